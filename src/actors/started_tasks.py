"""Started tasks: how the engine starts its own, and which handlers start some, which then have to know their item."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")

# Of `asyncio.eager_task_factory`, and of all that `asyncio.create_eager_task_factory` makes; from Python 3.12 on.
_EAGER: CodeType | None = getattr(getattr(asyncio, "eager_task_factory", None), "__code__", None)

# What starts a task, or a thread in a copy of the context, under its usual name in asyncio and anyio. A handler that
# hides it in another function loses nothing but what `penstock.current()` says about not having been asked before.
_STARTERS = frozenset(
    {
        "TaskGroup", "as_completed", "create_task", "create_task_group", "ensure_future", "gather", "run_sync",
        "shield", "start_soon", "to_thread", "wait_for",
    }
)  # fmt: skip


def start_task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    context: Context | None = None,
) -> "asyncio.Task[T]":
    """Start a task of the engine; it takes its first step in a later turn of the loop, also where tasks are eager.

    An eager task runs before whoever starts it knows the task: a handler would be run in the midst of what starts it,
    and could not be cancelled there.
    """
    factory: Any = loop.get_task_factory()
    if factory is None or _EAGER is None or getattr(factory, "__code__", None) is not _EAGER:
        return loop.create_task(work, name=name, context=context)
    make_task: Callable[..., asyncio.Task[T]] = factory.__closure__[0].cell_contents
    return make_task(work, loop=loop, name=name, context=context)


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
