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

# Two of them in `make test`: what is due runs in the same order on asyncio and uvloop.
by_loop = pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.long), "uvloop", "seeded"])
