"""The engine's side of one worker process: its start, its sockets, and its end."""

import asyncio
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import process, resource_tracker
from queue import SimpleQueue
from typing import Any, cast

from .._errors import WorkerDied
from ..extension import CallsAhead, WorkerTraces
from . import messages
from .messages import HEAD, IN_CONNECTION, KILLS_WORKER, TELLS_BEGIN
from .worker import FOR_ENGINE, READY, serve

# How often a thread that waits for a reply checks whether the process still exists. A closed socket ends the wait at
# once, but a child that the process has forked may hold the socket open.
ALIVE_CHECK_SECONDS = 1.0
# The name of a worker process, and its exit status if its main script uses an Engine; no program uses this status.
_WORKER_NAME = "penstock-worker"
RUNS_SCRIPT_AGAIN = 87
# Sockets that keep packets whole, and tell the reader when the other end was closed. Apple's systems have no such Unix
# sockets; there, a read from a datagram socket fails once the other end was closed.
_PACKETS = socket.SOCK_DGRAM if sys.platform == "darwin" else socket.SOCK_SEQPACKET
NO_ITEM: Mapping[str, object] = {}
NO_REQUEST = messages.CallRequest("", (), {})

_spawn = multiprocessing.get_context("spawn")
# Guards multiprocessing's list of children, which is not thread-safe: a start polls the children of other threads. The
# lock is held while this process is forked, too: a fork in the midst of a start would leave the child a lock of
# multiprocessing that none of its threads gives back. Reentrant, because a signal handler may fork.
_children_lock = threading.RLock()
_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class WorkerCall:
    """A call for a worker process, with the future and the callbacks for its outcome."""

    request: messages.CallRequest
    priority: int
    future: "asyncio.Future[Any]"
    begun: Callable[[], None] | None = None
    took: Callable[[float], None] | None = None
    kills_worker: bool = False  # an injected fault
    number: int = 0  # the identity of the call in the pool, and its place among the calls of its priority
    is_errand: bool = False  # whether the pool itself sends the call, to one particular worker
    message: "messages.Message | None" = None  # the pickled call; None before it is pickled
    worker: "WorkerProcess | None" = None  # the worker that has the call in its queue
    expected_seconds: float = 0.0
    is_large: bool = False  # too large for a packet
    is_cancelled: bool = False

    def __lt__(self, other: "WorkerCall") -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)


class WorkerProcess:
    """A spawned process, its queue, and the parent's end of its connection.

    Calls go into the queue, a pair of connected sockets for packets. The engine's process keeps both ends, so it can
    take back calls that the worker has not taken out. The kernel gives each packet to one of the two processes, so a
    call that was taken back has not begun, and will not begin. Each worker process has one thread in the engine's
    process, which waits for the answers.

    Attributes:
        pid: the number of the process.
        connection: the socket for its answers, and for calls that are too large for a packet.
        killed: whether the engine's process has killed the worker.
        instances: the numbers of the instances that the worker may have made.
        calls: the calls that were sent and have no answer yet, in order; the worker runs one after the other.
        errands: calls that only this worker can run, and that were not sent yet.
        ahead: whether the worker may get another call, by the expected times of `calls`.
        is_ready: whether the worker has started.
        started_at, ready_at: when its start began and ended, in seconds of `perf_counter`; `ready_at` is 0 before.
        is_resting: whether the thread of the worker waits for the doorbell, because the worker has no calls.
        is_woken: whether the thread was woken through the queue, and has not noticed yet.
        doorbell: a queue that gets an entry to end the rest of the thread. Putting an entry into this kind of queue
            does not give up the GIL, which the event loop needs until it waits itself.
        replies: reads the answers.
    """

    def __init__(self, ahead: CallsAhead) -> None:
        self.ahead = ahead
        self.killed = False
        self.started_at, self.ready_at = time.perf_counter(), 0.0
        self.instances: set[int] = set()
        self.calls: deque[WorkerCall] = deque()
        self.errands: deque[WorkerCall] = deque()
        self.is_ready = self.is_resting = self.is_woken = False
        self.doorbell: SimpleQueue[None] = SimpleQueue()
        self.connection, child_end = socket.socketpair()
        self._queue, self._worker_queue = socket.socketpair(socket.AF_UNIX, _PACKETS)
        _sockets.update((self.connection, child_end, self._queue, self._worker_queue))
        with ExitStack() as undo, child_end, _children_lock:
            undo.callback(self.hang_up)
            self._start(child_end)
            undo.pop_all()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.replies = messages.MessageReader(self.connection)
        self._events = select.poll()
        self._events.register(self.connection, select.POLLIN)
        self._events.register(self._queue, select.POLLIN)

    def _start(self, child_end: socket.socket) -> None:
        # Start the tracker now: otherwise the first start of a process would, and would unblock the signals again.
        resource_tracker.ensure_running()
        # Signals are blocked until the worker ignores them, so that a Ctrl-C during the start prints no traceback.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_ENGINE)
        try:
            with _as_no_daemon():
                arguments = child_end, self._worker_queue, WorkerTraces()
                self._process = _spawn.Process(target=serve, args=arguments, name=_WORKER_NAME)
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def wait_ready(self) -> bool:
        """Block until the worker can take calls; return False if it has died."""
        with suppress(EOFError, OSError):
            while not self.has_reply(ALIVE_CHECK_SECONDS):
                pass
            self.is_ready = self.connection.recv(len(READY)) == READY
            self.ready_at = time.perf_counter()
        return self.is_ready

    def has_reply(self, seconds: float) -> bool:
        """Block until a reply comes, this thread is woken or the time is over; raise EOFError if the worker died."""
        events = self._events.poll(seconds * 1000)
        if not events and seconds == ALIVE_CHECK_SECONDS and not self.alive():
            raise EOFError("the process is gone")
        connection = self.connection.fileno()
        for descriptor, _ in events:
            if descriptor == connection:
                return True
            self._queue.recv(1, socket.MSG_DONTWAIT)
            self.is_woken = False
        return False

    def wake(self) -> None:
        """Wake the thread of the worker; with the lock of the pool held."""
        if self.is_resting:
            self.is_resting = False
            self.doorbell.put(None)
        elif not self.is_woken:
            self.is_woken = True
            try:
                self._worker_queue.send(b"w", socket.MSG_DONTWAIT)
            except OSError:  # the worker has ended, so its thread is awake
                pass

    def put(self, call: WorkerCall) -> bool:
        """Put a call into the queue; return False if the queue is full. With the lock of the pool held."""
        message = call.message
        assert message is not None
        head = self._head(call)
        try:
            self._queue.sendmsg([head] if call.is_large else [head, *message], (), socket.MSG_DONTWAIT)
        except OSError:  # the queue is full; or the process has ended, which its thread will notice
            return False
        self.calls.append(call)
        call.expected_seconds = self.ahead.sent(call.request.target, time.monotonic())
        call.worker = self
        if call.request.instance is not None:
            self.instances.add(call.request.instance.key)
        return True

    def take_back(self) -> list[WorkerCall]:
        """Take back the calls that the worker has not begun, in their order; with the lock of the pool held."""
        numbers: set[int] = set()
        with suppress(OSError):  # until the queue is empty
            while packet := self._worker_queue.recv(HEAD.size, socket.MSG_DONTWAIT):
                numbers.add(HEAD.unpack(packet)[1])
        taken = [call for call in self.calls if call.number in numbers]
        if taken and taken[0].is_large:  # its bytes are in the connection, so the call counts as begun
            self._queue.sendmsg([self._head(taken.pop(0))], (), socket.MSG_DONTWAIT)
        for call in taken:
            self.calls.remove(call)
            call.worker = None
            self.ahead.taken_back(call.expected_seconds)
        self.errands.extendleft(call for call in reversed(taken) if call.is_errand)
        return [call for call in taken if not call.is_errand]

    @staticmethod
    def _head(call: WorkerCall) -> bytes:
        tells_begin = call.begun is not None
        flags = call.is_large * IN_CONNECTION + tells_begin * TELLS_BEGIN + call.kills_worker * KILLS_WORKER
        return HEAD.pack(flags, call.number)

    def next_head(self) -> tuple[int, WorkerCall]:
        """Return the flags of the next answer, and its call: the one that the worker runs.

        Raises:
            WorkerDied: the number is not the one of the call, so results would go to the wrong items.
            EOFError, OSError: the worker is gone.
        """
        flags, number = self.replies.receive_head()
        if not self.calls or self.calls[0].number != number:
            raise WorkerDied(
                f"worker process {self.pid} has sent an answer that belongs to no call, and was killed: code of a node "
                "has written into a socket of the worker; close only the file descriptors that the node has opened"
            )
        return flags, self.calls[0]

    def answered(self) -> None:
        """Remove the call that was answered; with the lock of the pool held."""
        self.ahead.ended(self.calls.popleft().expected_seconds, time.monotonic())

    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.exitcode is None

    def kill(self) -> None:
        """Kill the process, and wake its thread; with the lock of the pool held."""
        self.killed = True
        self.wake()
        self._process.kill()
        with suppress(OSError):  # the process may have ended already, which closes its end of the socket
            self.connection.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Close the sockets; with the lock of the pool held, since other threads read from the queue."""
        for one in (self.connection, self._queue, self._worker_queue):
            one.close()

    def reap(self, grace_seconds: float) -> str:
        """Wait for the end of the process, and kill it after `grace_seconds`; return a text that says how it ended."""
        self._process.join(grace_seconds)
        if self.alive():
            self._process.kill()
        exit_code = None
        # In a loop: if another thread polls this process at the same moment, only one thread gets the exit code.
        for _ in range(100):
            if (exit_code := self._process.exitcode) is not None:
                with _children_lock:
                    self._process.close()
                break
            self._process.join(0.01)
        return describe_exit(exit_code)


@contextmanager
def _as_no_daemon() -> Generator[None]:
    """Allow a daemon process of multiprocessing, such as a worker of some servers, to start processes.

    multiprocessing forbids daemons to start processes, because a daemon could leave its children behind. Worker
    processes of Penstock end with their parent.
    """
    configuration = cast("dict[str, Any]", getattr(process.current_process(), "_config"))  # noqa: B009 - not in its types
    is_daemon = configuration.pop("daemon", False)
    try:
        yield
    finally:
        configuration["daemon"] = is_daemon


def _leave_to_parent() -> None:
    """Close the sockets of workers in a forked process, and forget the workers: they are children of the parent."""
    # A new lock, because this thread may not hold the old lock: a signal handler may have raised during `acquire`.
    global _children_lock  # noqa: PLW0603
    _children_lock = threading.RLock()
    for each in list(_sockets):
        each.close()
    # At exit, multiprocessing waits for its children, and fails if they are children of another process. After a fork
    # of its own, multiprocessing clears this set in the same way.
    cast("set[Any]", getattr(process, "_children")).clear()  # noqa: B009 - not in its types


def _let_children_go() -> None:
    with suppress(RuntimeError):  # a signal handler has raised while this thread waited for the lock, and fork goes on
        _children_lock.release()


os.register_at_fork(before=_children_lock.acquire, after_in_parent=_let_children_go, after_in_child=_leave_to_parent)


def end_in_script() -> None:
    """End this process at once if it is a worker, which still imports the main script: the script would run again."""
    if process.current_process().name == _WORKER_NAME:
        os._exit(RUNS_SCRIPT_AGAIN)


def where_script_runs() -> str:
    """Return the file of the main script, with the line of its top level that runs now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return str(getattr(sys.modules["__main__"], "__file__", "the main script"))


def describe_exit(exit_code: int | None) -> str:
    """Return how a process has ended, as the end of a sentence."""
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name of its own
        name = f"signal {-exit_code}"
    return f"was killed by {name}"
