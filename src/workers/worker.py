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
from time import perf_counter
from typing import Any

from ..actors.tasks import no_item
from ..extension import WorkerTraces, end_forked, pack_error
from ..telemetry import logs
from . import messages
from .messages import BEGUN, IN_CONNECTION, KILLS_WORKER, SPANS, TELLS_BEGIN, MessageReader, resolve, send

READY = b"R"
# Signals that go to a whole process group: Ctrl-C, and the signal that systemd and SLURM send by default. Only the
# engine's process decides what happens then.
FOR_ENGINE = frozenset({signal.SIGINT, signal.SIGTERM})
# By default, Python's collector runs after every 700 new objects. A call that makes many objects, such as the syntax
# tree of a file, pays for that in vain: nearly all objects end with their last reference. With these thresholds,
# parsing the standard library took 7 to 12 % less processor time; higher thresholds saved no more.
_COLLECTOR_THRESHOLDS = (10_000, 20, 20)
# How often a worker checks whether its parent process has changed, which means that the parent has died.
_PARENT_CHECK_SECONDS = 1.0


# The fields for log records of the present call: graph, node, item and attempt.
_item: ContextVar[Mapping[str, object]] = ContextVar("penstock_item_of_call", default={})  # noqa: B039 - never changed
# The id of the worker process. A process that a call forks has another id, and must answer nothing.
_worker = 0


def serve(connection: socket.socket, queue: socket.socket, traces: WorkerTraces) -> None:
    """Answer calls until the engine's process closes the queue or dies; the main function of a worker process.

    Args:
        connection: the worker's end of the connection for answers, and for calls that are too large for a packet.
        queue: the end of the queue of calls. The engine's process has this end as well, to take back waiting calls.
        traces: the traces of the calls.
    """
    global _worker  # noqa: PLW0603
    _worker = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # With a handler instead of SIG_IGN, because programs that a call starts inherit ignored signals: `Popen.terminate`
    # would do nothing to them.
    signal.signal(signal.SIGTERM, _leave_to_engine)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_ENGINE)  # blocked while the interpreter started
    connection.set_inheritable(False)
    queue.set_inheritable(False)
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    logs.describe_items(_item.get)
    no_item.set('in a worker process, from where no value comes back before the result: use runs_on="thread"')
    threading.Thread(target=_end_with_parent, name="penstock-parent-watch", daemon=True).start()
    small, large = MessageReader(queue), MessageReader(connection)
    try:
        connection.sendall(READY)
        while True:
            flags, number = small.receive_head()  # a call has begun once it is no longer in the queue
            began = perf_counter()
            if flags & TELLS_BEGIN:
                send(connection, number, [], BEGUN)
            if flags & KILLS_WORKER:
                os.kill(os.getpid(), signal.SIGKILL)
            if flags & IN_CONNECTION and large.receive_head()[1] != number:
                break
            try:
                call = (large if flags & IN_CONNECTION else small).receive()
            except MemoryError as error:  # the rest of the message is still in the socket, so the worker ends
                send(connection, number, _failure(error, error, began))
                break
            answer = _answer(*call, traces, began)
            if os.getpid() != _worker:
                end_forked(None)
            ended = traces.ended()
            if ended and (message := logs.guarded("spans", messages.encode, ended)) is not None:
                send(connection, number, message, SPANS)
            send(connection, number, answer)
    except (EOFError, OSError):  # the engine's process is gone
        pass
    close_instances(list(_instances))


def _leave_to_engine(number: int, frame: object) -> None:
    if os.getpid() != _worker:  # in a process that was forked from the worker, and inherits this handler
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _end_with_parent() -> None:
    # A closed connection ends an idle worker; this thread ends a worker whose call is still running. `join` waits until
    # a pipe is closed. A process that was forked from the parent may hold that pipe open, so this thread also compares
    # the parent's process id.
    parent = multiprocessing.parent_process()
    if parent is not None:
        while parent.is_alive() and os.getppid() == parent.pid:
            parent.join(_PARENT_CHECK_SECONDS)
        os._exit(1)


def _answer(body: memoryview, buffers: list[messages.Memory], traces: WorkerTraces, began: float) -> messages.Message:
    """Run one call, and encode its answer.

    The answer is `(True, result, seconds)`, or `(False, error, seconds)` with a packed error. The seconds count from
    the beginning of the call.
    """
    try:
        target, args, kwargs, headers, item, instance = messages.decode(body, buffers)
    except Exception as error:  # noqa: BLE001 - constructors are the arguments' own code and may raise anything
        reason = (
            f"an argument cannot be rebuilt in the worker process: {type(error).__name__}: {logs.shown(error, str)}"
        )
        return _failure(messages.NotSentError(reason), error, began)
    token = _item.set(item)
    try:
        function = resolve(target)  # first, because its module may set up tracing by itself
        with traces.within(headers) if headers else nullcontext():
            if instance is not None:
                function = _instance(function, instance)
            result = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        return _failure(error, error, began)
    finally:
        _item.reset(token)
    try:
        if "batch_size" in item and issubclass(type(result), list | tuple):
            return messages.encode_results(result, target, perf_counter() - began)
        return messages.encode((True, result, perf_counter() - began), (result,))
    except MemoryError as error:
        return _failure(error, error, began)
    except Exception as error:  # noqa: BLE001 - reducers are the result's own code and may raise anything
        return _failure(messages.unsendable(target, result, error), error, began)


# The instances of classes with runs_on="process" that were called in this process, by their numbers.
_instances: dict[int, Any] = {}


def _instance(cls: Callable[..., Any], wanted: messages.WorkerInstance) -> Any:
    """Return the instance of this process; the first call makes and enters the instance."""
    if wanted.key not in _instances:
        instance = cls(*wanted.args, **wanted.kwargs)
        if hasattr(instance, "__enter__"):
            instance.__enter__()
        _instances[wanted.key] = instance
    return _instances[wanted.key]


def close_instances(keys: Iterable[int]) -> None:
    """Leave instances whose scopes have ended, and forget them. Errors are logged, because no caller waits for them."""
    for key in keys:
        instance = _instances.pop(key, None)
        if hasattr(instance, "__exit__"):
            with logs.logged("actor.not_released", node=type(instance).__name__):
                instance.__exit__(None, None, None)


def _failure(error: BaseException, cause: BaseException, began: float) -> messages.Message:
    if os.getpid() != _worker:
        end_forked(cause)
    frames = cause.__traceback__
    # Without the first stack frame, which is `_answer`.
    text = "".join(traceback.format_exception(type(cause), cause, frames.tb_next if frames else None))
    return messages.encode((False, pack_error(error, text=text), perf_counter() - began))
