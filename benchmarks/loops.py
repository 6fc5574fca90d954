"""The event loops that everything is measured on."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

NAMES = ("asyncio", "uvloop")


def factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that makes a loop of that name.

    Raises:
        ModuleNotFoundError: uvloop is not installed.
    """
    if name == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def run(name: str, main: Coroutine[Any, Any, R]) -> R:
    """Runs `main` on a new loop of that name."""
    with asyncio.Runner(loop_factory=factory(name)) as runner:
        return runner.run(main)
