"""The loops on which state machines are run; a seeded one runs what is due in a random order."""

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

# One of them in `make test`: the orders in which the others run what is due are among those of the seeded one.
by_loop = pytest.mark.parametrize(
    "loop", [*(pytest.param(loop, marks=pytest.mark.long) for loop in ("asyncio", "uvloop")), "seeded"]
)
