"""The main function of a worker process: it answers one call at a time from a socket, until the socket closes."""

import gc
import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

from ..telemetry import logs
from ..telemetry.spans import incoming
from . import process_messages
from .process_messages import resolve
from .tasks import no_item

READY = b"R"
# A call that makes many objects, such as the syntax tree of a file, has Python's collector look through them every 700
# of them; nearly all are gone by their last reference anyway. With these thresholds, parsing the files of the standard
# library took 7 to 12 % less processor time, and more did not take less.
_COLLECTOR_THRESHOLDS = (10_000, 20, 20)
# How often a worker looks whether its parent has changed, which means that the parent has died.
_PARENT_CHECK_SECONDS = 1.0


# The fields for log records of the present call: graph, node, item and attempt.
_item: ContextVar[Mapping[str, object]] = ContextVar("penstock_item_of_call", default={})  # noqa: B039 - never changed


def serve(connection: socket.socket, set_up_tracing: Callable[[], None] | None) -> None:
    """Answer calls until the engine's process closes the connection or dies; the main function of a worker process.

    Args:
        connection: the worker's end of the connection.
        set_up_tracing: called before the first call that is sampled.
    """
    # Ctrl-C goes to the whole process group; only the engine's process decides what to do then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while the interpreter started
    connection.set_inheritable(False)
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    logs.describe_items(_item.get)
    no_item.set('in a worker process, from where no value comes back before the result: use runs_on="thread"')
    set_up_once = cache(set_up_tracing or _nothing)
    threading.Thread(target=_end_with_parent, name="penstock-parent-watch", daemon=True).start()
    try:
        connection.sendall(READY)
        while True:
            process_messages.send(connection, _answer(*process_messages.receive(connection), set_up_once))
    except (EOFError, OSError):  # the engine's process is gone, or wants this one to end
        close_instances(list(_instances))


def _end_with_parent() -> None:
    # A closed connection ends an idle worker; this thread ends a worker whose call is still running. `join` waits for
    # the end of a pipe, which a process that was forked from the parent may hold open: so it looks at the parent's
    # process id as well.
    parent = multiprocessing.parent_process()
    if parent is not None:
        while parent.is_alive() and os.getppid() == parent.pid:
            parent.join(_PARENT_CHECK_SECONDS)
        os._exit(1)


def _nothing() -> None:
    pass


def _answer(
    body: memoryview, buffers: list[process_messages.Memory], set_up_tracing: Callable[[], None]
) -> process_messages.Message:
    """Run one call and encode `(True, result)` or `(False, exception)`, as `process_messages.encode_error` does."""
    try:
        target, args, kwargs, headers, item, instance = process_messages.decode(body, buffers)
    except Exception as error:  # noqa: BLE001 - constructors are the arguments' own code and may raise anything
        reason = f"an argument cannot be rebuilt in the worker process: {type(error).__name__}: {error}"
        return _failure(TypeError(reason), error)
    token = _item.set(item)
    try:
        function = resolve(target)  # first, because its module may set up tracing by itself
        with incoming(headers, set_up_tracing) if headers else nullcontext():
            if instance is not None:
                function = _instance(function, instance)
            result = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        return _failure(error, error)
    finally:
        _item.reset(token)
    try:
        return process_messages.encode((True, result))
    except MemoryError as error:
        return _failure(error, error)
    except Exception as error:  # noqa: BLE001 - reducers are the result's own code and may raise anything
        reason = (
            f"the result of {target!r} ({process_messages.type_name(result)}) cannot be sent back from a worker "
            f"process: {error}; return plain data instead"
        )
        return _failure(TypeError(reason), error)


# The instances of classes with runs_on="process" that were called in this process, by their numbers.
_instances: dict[int, Any] = {}


def _instance(cls: Callable[..., Any], wanted: process_messages.WorkerInstance) -> Any:
    """Return the instance of this process; its first call makes and enters it."""
    if wanted.key not in _instances:
        instance = cls(*wanted.args, **wanted.kwargs)
        if hasattr(instance, "__enter__"):
            instance.__enter__()
        _instances[wanted.key] = instance
    return _instances[wanted.key]


def close_instances(keys: Iterable[int]) -> None:
    """Leave instances whose scopes have ended, and forget them; errors are logged, since nobody waits for them."""
    for key in keys:
        instance = _instances.pop(key, None)
        if hasattr(instance, "__exit__"):
            try:
                instance.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001 - user code; the others have to be left as well
                logs.warning("actor.not_released", node=type(instance).__name__, error=repr(error))


def _failure(error: BaseException, cause: BaseException) -> process_messages.Message:
    frames = cause.__traceback__
    # Without the first stack frame, which is `_answer`.
    text = "".join(traceback.format_exception(type(cause), cause, frames.tb_next if frames else None))
    return process_messages.encode((False, process_messages.encode_error(error, text)))
