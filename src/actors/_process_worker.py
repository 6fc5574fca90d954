"""The main function of a worker process: it takes one call at a time from its queue, until the queue closes."""

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
from functools import cache, partial
from time import perf_counter
from typing import Any

from ..telemetry import logs
from ..telemetry.spans import incoming
from . import process_messages
from .process_messages import (
    IN_CONNECTION,
    JOIN_MAX_BYTES,
    KILLS_WORKER,
    PACKET_HEAD,
    TELLS_BEGIN,
    MessageReader,
    resolve,
)
from .tasks import no_item

READY = b"R"
# The signals that go to a whole process group, of which only the engine's process decides what to do then: Ctrl-C, and
# what systemd and SLURM send by default.
FOR_ENGINE = frozenset({signal.SIGINT, signal.SIGTERM})
# A call that makes many objects, such as the syntax tree of a file, has Python's collector look through them every 700
# of them; nearly all are gone by their last reference anyway. With these thresholds, parsing the files of the standard
# library took 7 to 12 % less processor time, and more did not take less.
_COLLECTOR_THRESHOLDS = (10_000, 20, 20)
# How often a worker looks whether its parent has changed, which means that the parent has died.
_PARENT_CHECK_SECONDS = 1.0


# The fields for log records of the present call: graph, node, item and attempt.
_item: ContextVar[Mapping[str, object]] = ContextVar("penstock_item_of_call", default={})  # noqa: B039 - never changed


def serve(connection: socket.socket, queue: socket.socket, set_up_tracing: Callable[[], None] | None) -> None:
    """Answer calls until the engine's process closes the queue or dies; the main function of a worker process.

    Args:
        connection: the worker's end of the connection for answers, and for calls that are too large for a packet.
        queue: the end of the queue of calls that the engine's process has as well, to take back what waits in it.
        set_up_tracing: called before the first call that is sampled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # With a handler, because what is ignored here is ignored by the programs that a call starts as well, and then
    # `Popen.terminate` would do nothing.
    signal.signal(signal.SIGTERM, partial(_leave_to_engine, os.getpid()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_ENGINE)  # blocked while the interpreter started
    connection.set_inheritable(False)
    queue.set_inheritable(False)
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    logs.describe_items(_item.get)
    no_item.set('in a worker process, from where no value comes back before the result: use runs_on="thread"')
    set_up_once = cache(set_up_tracing or (lambda: None))
    threading.Thread(target=_end_with_parent, name="penstock-parent-watch", daemon=True).start()
    large, packet = MessageReader(connection), memoryview(bytearray(PACKET_HEAD.size + JOIN_MAX_BYTES))
    try:
        connection.sendall(READY)
        while length := queue.recv_into(packet):  # a call has begun once it is no longer in the queue
            began, flags = perf_counter(), packet[0]
            if flags & TELLS_BEGIN:
                process_messages.send(connection, process_messages.BEGUN)
            if flags & KILLS_WORKER:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                whole = packet[PACKET_HEAD.size : length]
                call = large.receive() if flags & IN_CONNECTION else process_messages.split(whole)
                answer = _answer(*call, set_up_once, began)
            except MemoryError as error:
                answer = _failure(error, error, began)
            process_messages.send(connection, answer)
    except (EOFError, OSError):  # the engine's process is gone
        pass
    close_instances(list(_instances))


def _leave_to_engine(worker: int, number: int, frame: object) -> None:
    if os.getpid() != worker:  # in a process that was forked from the worker, and inherits this handler
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _end_with_parent() -> None:
    # A closed connection ends an idle worker; this thread ends a worker whose call is still running. `join` waits for
    # the end of a pipe, which a process that was forked from the parent may hold open: so it looks at the parent's
    # process id as well.
    parent = multiprocessing.parent_process()
    if parent is not None:
        while parent.is_alive() and os.getppid() == parent.pid:
            parent.join(_PARENT_CHECK_SECONDS)
        os._exit(1)


def _answer(
    body: memoryview, buffers: list[process_messages.Memory], set_up_tracing: Callable[[], None], began: float
) -> process_messages.Message:
    """Run one call, and encode its answer.

    That is `(True, result, seconds)`, or `(False, exception, seconds)` with an exception as of `encode_error`; the
    seconds are those since the call has begun.
    """
    try:
        target, args, kwargs, headers, item, instance = process_messages.decode(body, buffers)
    except Exception as error:  # noqa: BLE001 - constructors are the arguments' own code and may raise anything
        reason = f"an argument cannot be rebuilt in the worker process: {type(error).__name__}: {error}"
        return _failure(process_messages.NotSentError(reason), error, began)
    token = _item.set(item)
    try:
        function = resolve(target)  # first, because its module may set up tracing by itself
        with incoming(headers, set_up_tracing) if headers else nullcontext():
            if instance is not None:
                function = _instance(function, instance)
            result = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        return _failure(error, error, began)
    finally:
        _item.reset(token)
    try:
        if "batch_size" in item and issubclass(type(result), list | tuple):
            result = process_messages.encode_results(result, target)
        return process_messages.encode_answer(result, perf_counter() - began)
    except MemoryError as error:
        return _failure(error, error, began)
    except Exception as error:  # noqa: BLE001 - reducers are the result's own code and may raise anything
        return _failure(process_messages.unsendable(target, result, error), error, began)


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
    """Leave instances whose scopes have ended, and forget them; errors are logged, as no caller waits."""
    for key in keys:
        instance = _instances.pop(key, None)
        if hasattr(instance, "__exit__"):
            with logs.logged("actor.not_released", node=type(instance).__name__):
                instance.__exit__(None, None, None)


def _failure(error: BaseException, cause: BaseException, began: float) -> process_messages.Message:
    frames = cause.__traceback__
    # Without the first stack frame, which is `_answer`.
    text = "".join(traceback.format_exception(type(cause), cause, frames.tb_next if frames else None))
    return process_messages.encode((False, process_messages.encode_error(error, text), perf_counter() - began))
