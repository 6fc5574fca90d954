"""Worker processes in which one death costs one item."""

import asyncio
import contextvars
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import process, resource_tracker
from typing import Any, cast

from .._errors import EngineClosedError, WorkerDied
from ..telemetry import spans
from . import process_messages
from ._process_worker import READY, serve
from .threads import ProcessPoolStatistics, ThreadOwner, ThreadPool

# How often a thread that waits for a reply looks whether the process still exists. A closed socket tells it at once,
# but a child that the process has forked may hold the socket open.
_ALIVE_CHECK_MILLISECONDS = 1000

_spawn = multiprocessing.get_context("spawn")
# Guards multiprocessing's list of children, which is not thread-safe: a start polls the children of other threads.
_children_lock = threading.Lock()
_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


class WorkerProcess:
    """A spawned process, and the parent's end of its socket. All methods but `kill`, `hang_up` and `alive` block."""

    def __init__(self) -> None:
        self.killed = False
        self.instances: set[int] = set()  # that it may have made
        self._connection, child_end = socket.socketpair()
        _sockets.update((self._connection, child_end))
        # Now, because the first start of a process would start the tracker, and so unblock SIGINT again.
        resource_tracker.ensure_running()
        # SIGINT is blocked until the worker ignores it, so that a Ctrl-C while it starts does not print a traceback.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with child_end, _children_lock, _as_no_daemon():
                arguments = child_end, spans.set_up_of_workers()
                self._process = _spawn.Process(target=serve, args=arguments, name="penstock-worker")
                self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        self._replies = select.poll()
        self._replies.register(self._connection, select.POLLIN)

    def wait_ready(self) -> bool:
        """Block until the worker can take calls; return False if it has died."""
        try:
            self._wait_for_reply()
            return self._connection.recv(len(READY)) == READY
        except (EOFError, OSError):
            return False

    def exchange(self, request: process_messages.Message) -> process_messages.Received:
        """Send a call and block until its reply; raises EOFError or OSError if the process has died."""
        process_messages.send(self._connection, request)
        self._wait_for_reply()
        return process_messages.receive(self._connection)

    def _wait_for_reply(self) -> None:
        while not self._replies.poll(_ALIVE_CHECK_MILLISECONDS):
            if not self.alive():
                raise EOFError("the process is gone")

    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.exitcode is None

    def die(self) -> None:
        """Kill the process, and have it count as died and not as killed; for injected faults."""
        self._process.kill()

    def kill(self) -> None:
        """Kill the process, and wake the thread that waits for its reply."""
        self.killed = True
        self._process.kill()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the process had ended already, which closes its end of the socket
            pass

    def hang_up(self) -> None:
        """Tell an idle process to end, by closing its socket."""
        self._connection.close()

    def reap(self, grace_seconds: float) -> str:
        """Wait until the process has ended, and kill it after `grace_seconds`; return a text that says how it ended."""
        self._connection.close()
        self._process.join(grace_seconds)
        if self.alive():
            self._process.kill()
        exit_code = None
        # In a loop: if another thread polls this process at the same moment, only one of the two gets the exit code.
        for _ in range(100):
            if (exit_code := self._process.exitcode) is not None:
                with _children_lock:
                    self._process.close()
                break
            self._process.join(0.01)
        return _describe(exit_code)


@contextmanager
def _as_no_daemon() -> Generator[None]:
    """Allow a process that is a daemon of multiprocessing, as the workers of some servers are, to start processes.

    multiprocessing forbids that, because a daemon could leave its children behind. Our workers end with their parent.
    """
    configuration = cast("dict[str, Any]", getattr(process.current_process(), "_config"))  # noqa: B009 - not in its types
    is_daemon = configuration.pop("daemon", False)
    try:
        yield
    finally:
        configuration["daemon"] = is_daemon


def _leave_to_parent() -> None:
    """Close the sockets of workers in a forked process, and forget the workers: they are children of the parent."""
    global _children_lock  # noqa: PLW0603 - a new one: a thread of the parent, which was not forked, may hold it
    _children_lock = threading.Lock()
    for each in list(_sockets):
        each.close()
    # At exit, multiprocessing waits for its children, and fails if they are children of another process. After a fork
    # of its own, it clears this set in the same way.
    process._children.clear()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


os.register_at_fork(after_in_child=_leave_to_parent)


def _describe(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name of its own
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + (", often a sign of too little memory" if name == "SIGKILL" else "")


# ProcessPool: each worker is spawned, never forked, and has a socket of its own. So a worker that dies fails only its
# own call; `concurrent.futures.ProcessPoolExecutor` fails all queued calls. A thread for each worker blocks on its
# socket, which keeps pickling and large writes off the event loop. docs/decisions/0002-process-workers.md compares the
# alternatives.

# How long `__exit__` of an instance in a worker may take when its scope ends.
_CLOSE_SECONDS = 5.0
_CLOSE_INSTANCES = "penstock.actors._process_worker:close_instances"
# How long an idle worker may take for its exit handlers, which send its spans, before it is killed.
_EXIT_GRACE_SECONDS = 0.5
_NO_ITEM: Mapping[str, object] = {}
# A slot for `penstock.testing.faults`: called with the target of each call. It may raise in place of the call, or
# return True to have the worker of the call killed.
fault_at_call: Callable[[str], Awaitable[bool]] | None = None


@dataclass(slots=True, eq=False)
class _Call:
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    headers: dict[str, str]  # of the trace that the call belongs to
    item: Mapping[str, object]
    kills_worker: bool  # an injected fault
    instance: process_messages.WorkerInstance | None = None
    cancelled: bool = False
    worker: "WorkerProcess | None" = field(default=None)


class ProcessPool(ThreadOwner):
    """Runs functions in at most `max_workers` processes, for the event loop of the first `run`.

    Processes start on demand and are reused; calls beyond `max_workers` wait, first in, first out.
    """

    def __init__(self, max_workers: int) -> None:
        """Make a pool without processes.

        Args:
            max_workers: the most processes at a time, at least 1.

        Raises:
            ValueError: `max_workers` is below 1.
        """
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        # A thread takes its next call without waiting for the loop, so that queued calls keep the workers busy.
        self._threads = ThreadPool(max_workers, name="penstock-process")
        self.begin_without_threads()
        self._closed = False
        self._completed = 0
        self._died = 0
        self._killed = 0
        self._futures: set[asyncio.Future[Any]] = set()  # touched on the loop only
        super().__init__()

    def begin_without_threads(self) -> None:
        """Forget all workers; for a new pool, and in a forked process, which has none of the workers of its parent."""
        # It guards all state that the threads and the loop share. A forked process needs a new one: a thread of the
        # parent may hold the old one.
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._ended: set[int] = set()  # the instances of scopes that have ended, which some worker may still have

    async def run(
        self,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        item: Mapping[str, object] = _NO_ITEM,
        instance: process_messages.WorkerInstance | None = None,
    ) -> Any:
        """Run a function in a worker process.

        Cancelling this kills the worker that runs the call; a new one is started on demand.

        Args:
            target: the name of the function; see `process_target`.
            args: its positional arguments; they are pickled when a worker is free.
            kwargs: its keyword arguments.
            item: the fields for log records of the call: graph, node, item and attempt.
            instance: for a class, its instance in the worker, which is called in its place.

        Returns:
            The result of the function. Arrays are rebuilt on memory of their own, and are writable if they were.

        Raises:
            EngineClosedError: the pool was closed.
            WorkerDied: the process that ran this call died.
            TypeError: an argument or the result does not pickle; the message names it and its type.
            MemoryError: there is no memory for the result.
            BaseException: the error of the function; its `__cause__` shows the traceback in the worker.
        """
        kills_worker = fault_at_call is not None and await fault_at_call(target)
        if self._closed:
            raise EngineClosedError("this process pool was closed; it belongs to an Engine that has ended")
        call = _Call(target, args, kwargs, spans.outgoing(), item, kills_worker, instance)
        # An empty context: `_perform` needs no variables of the caller.
        future = self._threads.submit(contextvars.Context(), None, self._perform, call)
        self._futures.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(call)
            raise
        finally:
            self._futures.discard(future)

    def statistics(self) -> ProcessPoolStatistics:
        """Return a snapshot; callable from any thread."""
        with self._lock:
            workers, idle = len(self._workers), len(self._idle)
            return ProcessPoolStatistics(
                workers=workers,
                idle=idle,
                busy=workers - idle,
                queued=self._threads.statistics().queued,
                completed=self._completed,
                died=self._died,
                killed=self._killed,
            )

    async def close_instances(self, keys: Collection[int]) -> None:
        """Have the workers leave the instances of a scope that has ended; wait for those that run no call now.

        Those that run one do it after that. A worker that takes too long is killed.
        """
        with self._lock:
            self._ended.update(keys)
            self._forget_ended()
            holders = [(worker, ended) for worker in self._idle if (ended := worker.instances & self._ended)]
            for worker, _ in holders:
                self._idle.remove(worker)
        closing = {
            self._threads.submit(contextvars.Context(), None, self._close_instances, worker, ended): worker
            for worker, ended in holders
        }
        if closing:
            _, hanging = await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
            for one in hanging:
                closing[one].kill()
            if hanging:
                await asyncio.wait(hanging)

    def _forget_ended(self) -> None:
        self._ended &= {key for worker in self._workers for key in worker.instances}

    def _close_instances(self, worker: "WorkerProcess", keys: set[int]) -> None:
        """Have a worker that runs no call leave instances; it is idle then. Runs in a thread of the pool."""
        request = process_messages.encode_request(_CLOSE_INSTANCES, (keys,), {}, {}, _NO_ITEM)
        try:
            worker.exchange(request)
        except (EOFError, OSError):
            self._remove(worker, _EXIT_GRACE_SECONDS)
            return
        with self._lock:
            worker.instances -= keys
            is_killed = worker.killed
            if not is_killed:
                self._idle.append(worker)
            self._forget_ended()
        if is_killed:
            self._remove(worker, _EXIT_GRACE_SECONDS)

    async def aclose(self) -> None:
        """Cancel all calls, kill the workers that run one, let the idle ones end, and wait until all are gone.

        An idle worker has half a second for its exit handlers.
        """
        self._refuse_and_kill()
        try:
            if self._idle:
                # `asyncio.wait`, because it does not cancel the job when this task is cancelled.
                await asyncio.wait([self._threads.submit(contextvars.Context(), None, self._retire_idle)])
        finally:
            self.close_nowait()
        await self._threads.aclose()

    def close_nowait(self) -> None:
        """Cancel all calls and kill all workers, for a loop that is being shut down."""
        self._refuse_and_kill()
        self.abandon()
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            self._remove(worker, _EXIT_GRACE_SECONDS)
        self._threads.close_nowait()

    def abandon(self) -> None:
        """Kill all workers without touching futures or the loop; callable from any thread."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()

    def join(self) -> None:
        """Block until the threads have ended, which wait for their workers."""
        self._threads.join()

    def _refuse_and_kill(self) -> None:
        with self._lock:
            self._closed = True
            for worker in self._workers.difference(self._idle):
                worker.kill()
        for future in self._futures:
            future.cancel()

    def _retire_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._workers.difference_update(idle)
        for worker in idle:
            worker.hang_up()
        give_up = time.monotonic() + _EXIT_GRACE_SECONDS
        for worker in idle:
            worker.reap(max(give_up - time.monotonic(), 0))

    def _cancel(self, call: _Call) -> None:
        with self._lock:
            call.cancelled = True
            if call.worker is not None:
                call.worker.kill()

    def _perform(self, call: _Call) -> Any:
        """Run one call; runs in a thread of the pool."""
        request = process_messages.encode_request(
            call.target, call.args, call.kwargs, call.headers, call.item, call.instance
        )
        worker = self._assign(call)
        if call.instance is not None:
            worker.instances.add(call.instance.key)
        if call.kills_worker:
            worker.die()
        try:
            reply = worker.exchange(request)
        except (EOFError, OSError):
            end = self._remove(worker, _EXIT_GRACE_SECONDS, call)
            raise WorkerDied(f"the worker process that ran {call.target!r} {end}; only this item is affected") from None
        except BaseException:  # such as MemoryError: the next call would read the rest of this reply as its own
            with self._lock:
                worker.kill()
            self._remove(worker, _EXIT_GRACE_SECONDS, call)
            raise
        with self._lock:
            ended = worker.instances & self._ended
            call.worker = None
            if not worker.killed:
                self._completed += 1
                if not ended:
                    self._idle.append(worker)
        if ended and not worker.killed:
            self._close_instances(worker, ended)
        elif worker.killed:  # the call was cancelled after its reply had arrived
            self._remove(worker, _EXIT_GRACE_SECONDS)
        return _unpack(call.target, *reply)

    def _assign(self, call: _Call) -> "WorkerProcess":
        """Give the call an idle worker that is alive, or a new one."""
        while idle := self._take_for(call):
            if idle.alive():
                return idle
            self._remove(idle, 0, call)

        worker = WorkerProcess()
        with self._lock:
            self._workers.add(worker)
            call.worker = worker
            if self._closed or call.cancelled:
                worker.kill()
        if not worker.wait_ready():
            end = self._remove(worker, _EXIT_GRACE_SECONDS, call)
            raise WorkerDied(
                f"the worker process for {call.target!r} {end} while it started. Each worker imports the main script: "
                'put code that runs an engine there under `if __name__ == "__main__":`'
            )
        return worker

    def _take_for(self, call: _Call) -> "WorkerProcess | None":
        with self._lock:
            if call.cancelled or not self._idle:
                return None
            call.worker = self._idle.pop()  # the one used last, whose caches are warm
            return call.worker

    def _remove(self, worker: "WorkerProcess", grace_seconds: float, call: _Call | None = None) -> str:
        """Wait for a process that is ending; return a text that says how it ended."""
        with self._lock:  # once it is no member of `_workers`, no other thread kills it
            self._workers.discard(worker)
            if call is not None:
                call.worker = None
            if worker.killed:
                self._killed += 1
            else:
                self._died += 1
        return worker.reap(grace_seconds)


def _unpack(target: str, body: memoryview, buffers: list[process_messages.Memory]) -> Any:
    try:
        succeeded, value = process_messages.decode(body, buffers)
    except MemoryError:
        raise
    except Exception as error:  # constructors are the result's own code and may raise anything
        raise TypeError(f"the result of {target!r} cannot be rebuilt in this process: {error}") from error
    if succeeded:
        return value
    raised = process_messages.decode_error(value, target)
    try:
        raise raised from process_messages.RemoteTraceback(value.traceback)
    finally:
        del raised  # breaks a cycle: its traceback refers to this stack frame
