"""Telling from its code whether a handler starts tasks, which then have to know its item."""

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

# What starts a task, or a thread in a copy of the context, under its usual name in asyncio and anyio. A handler that
# hides it in another function loses nothing but what `penstock.current()` says about not having been asked before.
_STARTERS = frozenset(
    {
        "TaskGroup", "as_completed", "create_task", "create_task_group", "ensure_future", "gather", "run_sync",
        "shield", "start_soon", "to_thread", "wait_for",
    }
)  # fmt: skip


def starts_tasks(fn: Callable[..., Any]) -> bool:
    """Whether the code of a function, of its inner functions or of what it wraps names what starts tasks."""
    return any(not _STARTERS.isdisjoint(code.co_names) for code in _codes(fn))


def _codes(fn: Callable[..., Any]) -> Iterator[CodeType]:
    queue: list[CodeType] = []
    function: Any = fn
    while function is not None:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            queue.append(code)
        function = getattr(function, "__wrapped__", None)
    while queue:
        code = queue.pop()
        yield code
        queue.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
