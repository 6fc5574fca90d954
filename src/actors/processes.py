"""Worker processes in which one death costs one item.

Each worker is spawned, never forked, and has a socket of its own, so a worker that dies takes only its own call with
it; `concurrent.futures.ProcessPoolExecutor` fails every queued call. One thread per worker blocks on its socket, which
keeps pickling and large writes off the event loop. docs/decisions/0002-process-workers.md compares the alternatives.
"""

import asyncio
import contextvars
import multiprocessing
import select
import signal
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from .._errors import EngineClosedError, WorkerDied
from . import pickling
from ._process_worker import READY, serve
from .process_target import process_target as process_target
from .threads import ThreadPool

# An idle worker has nothing to do but run its exit handlers; one that takes longer is killed.
_EXIT_GRACE_SECONDS = 0.5
# How often a thread that waits for a reply looks whether the process still exists. The closed socket says so at once,
# unless the process left a forked child behind that holds the socket open.
_ALIVE_CHECK_MILLISECONDS = 1000

_spawn = multiprocessing.get_context("spawn")
# multiprocessing's list of children is not made for threads: starting polls, and forgets, those that others close.
_children_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class ProcessPoolStatistics:
    """What a `ProcessPool` is doing and has done.

    Attributes:
        workers: processes started and not yet found dead.
        idle: processes that wait for a call.
        busy: processes that start, or run a call.
        queued: calls that wait for a process.
        completed: calls that came back, with a result or an error.
        died: processes that ended by themselves, busy or idle.
        killed: processes killed because their call was cancelled or the pool closed.
    """

    workers: int
    idle: int
    busy: int
    queued: int
    completed: int
    died: int
    killed: int


class _Worker:
    """One process and the parent's end of its socket."""

    def __init__(self) -> None:
        self.killed = False
        self._connection, child_end = socket.socketpair()
        # Until the worker ignores SIGINT, it is blocked: a Ctrl-C while it starts must not print a traceback.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with child_end, _children_lock:
                self._process = _spawn.Process(target=serve, args=(child_end,), name="penstock-worker")
                self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        self._replies = select.poll()
        self._replies.register(self._connection, select.POLLIN)

    def wait_ready(self) -> bool:
        """Block until the worker can take calls; False when it died before."""
        try:
            self._wait_for_reply()
            return self._connection.recv(len(READY)) == READY
        except (EOFError, OSError):
            return False

    def exchange(self, request: pickling.Message) -> tuple[bytearray, list[bytearray]]:
        """Send a call and block until its reply; raises EOFError or OSError when the process died."""
        pickling.send(self._connection, request)
        self._wait_for_reply()
        return pickling.receive(self._connection)

    def _wait_for_reply(self) -> None:
        while not self._replies.poll(_ALIVE_CHECK_MILLISECONDS):
            if not self.alive():
                raise EOFError("the process is gone")

    def alive(self) -> bool:
        return self._process.exitcode is None

    def kill(self) -> None:
        """End the process now, and whoever waits for its reply."""
        self.killed = True
        self._process.kill()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the process was gone already, and its end of the socket with it
            pass

    def hang_up(self) -> None:
        """Tell an idle process to end."""
        self._connection.close()

    def reap(self, grace_seconds: float) -> str:
        """Wait until the process has ended, killing it after `grace_seconds`, and say how it ended."""
        self._connection.close()
        self._process.join(grace_seconds)
        if self.alive():
            self._process.kill()
        exit_code = None
        # More than once: when another thread polls this process at the same moment, only one of the two is told.
        for _ in range(100):
            if (exit_code := self._process.exitcode) is not None:
                with _children_lock:
                    self._process.close()
                break
            self._process.join(0.01)
        return _describe(exit_code)


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


@dataclass(slots=True, eq=False)
class _Call:
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cancelled: bool = False
    worker: _Worker | None = field(default=None)


class ProcessPool:
    """Runs functions in at most `max_workers` processes, for the event loop of the first `run`.

    Processes start on demand and are reused; calls beyond `max_workers` wait first in, first out.
    """

    def __init__(self, max_workers: int) -> None:
        """Start nothing yet.

        Args:
            max_workers: the most processes that live at a time, at least 1.

        Raises:
            ValueError: `max_workers` is below 1.
        """
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        # A thread takes its next call without a turn of the loop, so calls that wait keep the workers busy.
        self._threads = ThreadPool(max_workers, name="penstock-process")
        self._lock = threading.Lock()  # guards everything below, which the threads and the loop share
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._closed = False
        self._completed = 0
        self._died = 0
        self._killed = 0
        self._futures: set[asyncio.Future[Any]] = set()  # touched on the loop only
        _pools.add(self)

    async def run(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function in a worker process.

        Cancelling kills the worker that runs the call; another one takes its place on demand.

        Args:
            target: what `process_target` says of the function.
            args: positional arguments; they are pickled when a worker is free.
            kwargs: keyword arguments.

        Returns:
            Its result. Arrays are rebuilt on memory of their own, and are writable if they were.

        Raises:
            EngineClosedError: the pool was closed.
            WorkerDied: the process that ran this call died.
            TypeError: an argument, the result or the exception does not pickle; the message names it and its type.
            BaseException: what the function raised; its `__cause__` shows the traceback in the worker.
        """
        call = _Call(target, args, kwargs)
        # An empty context: nothing of the caller's is read on this side.
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

    async def aclose(self) -> None:
        """Cancel every call, kill the workers that run one, let the idle ones end, and wait until all are gone.

        An idle worker has half a second for its exit handlers.
        """
        self._begin_close(kill_idle=False)
        try:
            await self._threads.aclose()
        finally:
            # Idle workers exist only until here; none is added once the pool is closed. In a thread, since it blocks.
            await asyncio.shield(self._in_own_thread())

    def close_nowait(self) -> None:
        """Cancel every call and kill every worker, for a loop that is going away."""
        self._begin_close(kill_idle=True)
        self._threads.close_nowait()
