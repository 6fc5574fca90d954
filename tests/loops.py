"""The loops on which state machines are run; the seeded loop runs callbacks that are due in a random order."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from penstock.testing import SeededLoop

LOOPS: dict[str, Callable[[int], asyncio.AbstractEventLoop]] = {
    "asyncio": lambda seed: asyncio.new_event_loop(),
    "uvloop": lambda seed: uvloop.new_event_loop(),
    "seeded": SeededLoop,
}

# `make test` runs the seeded loop alone: it can run callbacks in every order in which the two others run them.
by_loop = pytest.mark.parametrize(
    "loop", [*(pytest.param(loop, marks=pytest.mark.long) for loop in ("asyncio", "uvloop")), "seeded"]
)
