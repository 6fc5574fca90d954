"""Driving a graph function through its trace, in one step: all that a graph may await is ready at once."""

import asyncio
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from ..._errors import GraphTraceError
from .locations import call_location, definition_location, is_generated, is_users
from .ref import Ref


def drive(value: Any, fn: Callable[..., Any]) -> Any:
    """Run what a graph function or a body returned to its end.

    Args:
        value: a coroutine, a call that is not awaited yet, or the value of a plain function.
        fn: the function, for errors.

    Raises:
        GraphTraceError: it waits for something that is neither a node nor a graph.
    """
    running: Any = value
    if not isinstance(value, types.CoroutineType):
        if isinstance(value, Ref) or not hasattr(value, "__await__"):
            return value
        running = value.__await__()
    try:
        foreign = running.send(None)
    except StopIteration as stop:
        return stop.value
    except Exception as error:
        location, module = _raised_at(error, call_location())
        if module.partition(".")[0] != "asyncio" or asyncio._get_running_loop() is not None:
            raise
        raise _foreign(location, fn, "something of asyncio") from error
    location, awaited = _suspended_at(running)
    running.close()
    if asyncio.isfuture(foreign):
        foreign._asyncio_future_blocking = False  # an event loop would have, and others may await it
    raise _foreign(location, fn, awaited)


@contextmanager
def located_errors(fn: Callable[..., Any]) -> Generator[None, None, None]:
    """Have what is raised inside say where in a graph that was, and why: a library that got a `Ref` does not know.

    Args:
        fn: the function that is traced.

    Raises:
        GraphTraceError: anything else was raised, which is its cause.
    """
    try:
        yield
    except (GraphTraceError, RecursionError):  # a graph that calls itself without end is told where it begins
        raise
    except Exception as error:
        location, _ = _raised_at(error, definition_location(fn))
        raise GraphTraceError(
            f"{location}: tracing graph {name_of(fn)!r} raised {type(error).__name__}: {error}; its body runs once, "
            "with a Ref for each value that is not known yet: put what needs the value itself, or may fail, into a "
            "node (`@ps.node`)"
        ) from error


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a traced function."""
    return str(getattr(fn, "__name__", repr(fn)))


def _foreign(location: str, fn: Callable[..., Any], awaited: str) -> GraphTraceError:
    return GraphTraceError(
        f"{location}: graph {name_of(fn)!r} awaits {awaited}, which is neither a node nor a "
        "graph; put it into a node (`@ps.node`) and await that"
    )


def _suspended_at(running: object) -> tuple[str, str]:
    """Return the innermost line of the user's that waits, and the name of what it waits for."""
    location, awaited = call_location(), "something"
    while running is not None:
        frame, awaits = _frame_of(running)
        if frame is None or not is_users(frame.f_code.co_filename):
            return location, _name_of(running)
        location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        running = awaits
    return location, awaited


def _frame_of(running: object) -> tuple[types.FrameType | None, object]:
    if isinstance(running, types.CoroutineType):
        return running.cr_frame, cast("object", running.cr_await)
    if isinstance(running, types.GeneratorType):
        generator = cast("types.GeneratorType[object, object, object]", running)
        return generator.gi_frame, generator.gi_yieldfrom
    return None, None


def _name_of(running: object) -> str:
    name = getattr(running, "__qualname__", None) or type(running).__name__
    return f"{name}()" if isinstance(running, types.CoroutineType | types.GeneratorType) else str(name)


def _raised_at(error: BaseException, location: str) -> tuple[str, str]:
    """Return the user's line that led to an exception, or else `location`, and the module that raised it."""
    module, traceback = "", error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_users(filename) and not is_generated(traceback.tb_frame):
            location = f"{filename}:{traceback.tb_lineno}"
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        traceback = traceback.tb_next
    return location, module
