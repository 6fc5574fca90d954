"""The event loops on which all workloads are measured."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

NAMES = ("asyncio", "uvloop")


def factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the function that makes a loop of this name.

    Raises:
        ModuleNotFoundError: uvloop is not installed.
    """
    if name == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def run(name: str, main: Coroutine[Any, Any, R]) -> R:
    """Run `main` on a new loop of this name."""
    with asyncio.Runner(loop_factory=factory(name)) as runner:
        return runner.run(main)
