"""Worker processes in which one death costs one item."""

import asyncio
import contextvars
import itertools
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
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from multiprocessing import process, resource_tracker
from queue import SimpleQueue
from typing import Any, cast

from .._errors import EngineClosedError, WorkerDied
from ..telemetry import spans
from . import process_messages
from ._process_worker import READY, serve
from .process_messages import IN_CONNECTION, KILLS_WORKER, PACKET_HEAD, TELLS_BEGIN
from .threads import LoopMailbox, ProcessPoolStatistics, ThreadOwner, ThreadPool, recent_mean, travelling

# How often a thread that waits for a reply looks whether the process still exists. A closed socket tells it at once,
# but a child that the process has forked may hold the socket open.
_ALIVE_CHECK_SECONDS = 1.0
# Sockets that keep packets whole, and tell the reader when the other end was closed. The systems of Apple have none for
# Unix sockets; there, a read from datagrams fails once the other end was closed.
_PACKETS = socket.SOCK_DGRAM if sys.platform == "darwin" else socket.SOCK_SEQPACKET
_NO_ITEM: Mapping[str, object] = {}
_NO_REQUEST = process_messages.CallRequest("", (), {})

_spawn = multiprocessing.get_context("spawn")
# Guards multiprocessing's list of children, which is not thread-safe: a start polls the children of other threads. It
# is held while this process is forked, too: in the midst of a start, the child would inherit a lock of multiprocessing
# that none of its threads gives back. Reentrant, because a signal handler may fork.
_children_lock = threading.RLock()
_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class _Call:
    request: process_messages.CallRequest
    priority: int
    future: "asyncio.Future[Any]"
    begun: Callable[[], None] | None = None
    took: Callable[[float], None] | None = None
    kills_worker: bool = False  # an injected fault
    number: int = 0  # its own in the pool, and its place among the calls of its priority
    is_errand: bool = False  # for its worker alone, from the pool itself
    message: "process_messages.Message | None" = None  # once it is pickled
    worker: "WorkerProcess | None" = None  # that it was sent to
    expected_seconds: float = 0.0
    is_large: bool = False  # too large for a packet
    is_cancelled: bool = False

    def __lt__(self, other: "_Call") -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)


class WorkerProcess:
    """A spawned process, its queue, and the parent's end of its connection.

    Calls go into the queue, a pair of connected sockets for packets of which this process keeps both ends: what the
    worker has not taken out, this process can. The kernel gives each packet to one of the two, so a call that was
    taken back has not begun, and will not. One thread, that of the worker, waits for what comes through the connection.

    Attributes:
        pid: the number of the process.
        connection: the socket for its answers, and for calls that are too large for a packet.
        killed: whether this process has killed it.
        instances: the numbers of the instances that it may have made.
        calls: the calls that were sent and have no answer yet, in order; the worker runs one after the other.
        errands: calls that only this worker can run, and that were not sent yet.
        expected_seconds: how long its calls will take, from the first one on.
        since: when the first of these was sent, or the one before it was answered.
        is_ready: whether it has started.
        is_resting: whether its thread waits for the doorbell, because the worker has no calls.
        is_woken: whether its thread was woken otherwise, and has not noticed yet.
        doorbell: has an entry once the thread shall not rest any longer. A queue, because ringing it does not give up
            the GIL, which the event loop needs until it waits itself.
        replies: reads the answers.
    """

    def __init__(self) -> None:
        self.killed = False
        self.instances: set[int] = set()
        self.calls: deque[_Call] = deque()
        self.errands: deque[_Call] = deque()
        self.expected_seconds = self.since = 0.0
        self.is_ready = self.is_resting = self.is_woken = False
        self.doorbell: SimpleQueue[None] = SimpleQueue()
        self.connection, child_end = socket.socketpair()
        self._queue, self._worker_queue = socket.socketpair(socket.AF_UNIX, _PACKETS)
        _sockets.update((self.connection, child_end, self._queue, self._worker_queue))
        try:
            with child_end, _children_lock:
                self._start(child_end)
        except BaseException:
            self.hang_up()
            raise
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.replies = process_messages.MessageReader(self.connection)
        self._events = select.poll()
        self._events.register(self.connection, select.POLLIN)
        self._events.register(self._queue, select.POLLIN)

    def _start(self, child_end: socket.socket) -> None:
        # Now, because the first start of a process would start the tracker, and so unblock SIGINT again.
        resource_tracker.ensure_running()
        # SIGINT is blocked until the worker ignores it, so that a Ctrl-C while it starts does not print a traceback.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _as_no_daemon():
                arguments = child_end, self._worker_queue, spans.set_up_of_workers()
                self._process = _spawn.Process(target=serve, args=arguments, name="penstock-worker")
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def wait_ready(self) -> bool:
        """Block until the worker can take calls; return False if it has died."""
        try:
            while not self.has_reply(_ALIVE_CHECK_SECONDS):
                pass
            self.is_ready = self.connection.recv(len(READY)) == READY
        except (EOFError, OSError):
            pass
        return self.is_ready

    def has_reply(self, seconds: float) -> bool:
        """Block until there is a reply, this thread is woken or the time is over; raises EOFError if it has died."""
        events = self._events.poll(seconds * 1000)
        if not events and seconds == _ALIVE_CHECK_SECONDS and not self.alive():
            raise EOFError("the process is gone")
        connection = self.connection.fileno()
        for descriptor, _ in events:
            if descriptor == connection:
                return True
            self._queue.recv(1, socket.MSG_DONTWAIT)
            self.is_woken = False
        return False

    def wake(self) -> None:
        """Have the thread of the worker look after it; with the lock of the pool held."""
        if self.is_resting:
            self.is_resting = False
            self.doorbell.put(None)
        elif not self.is_woken:
            self.is_woken = True
            try:
                self._worker_queue.send(b"w", socket.MSG_DONTWAIT)
            except OSError:  # it has ended: its thread is awake
                pass

    def put(self, call: _Call) -> bool:
        """Put a call into the queue; return False if there is no room. With the lock of the pool held."""
        message = call.message
        assert message is not None
        head = self._head(call)
        try:
            self._queue.sendmsg([head] if call.is_large else [head, *message], (), socket.MSG_DONTWAIT)
        except OSError:  # it is full, or the process has ended, which its thread will notice
            return False
        if not self.calls:
            self.since = time.monotonic()
            self.expected_seconds = 0.0
        self.calls.append(call)
        self.expected_seconds += call.expected_seconds
        call.worker = self
        if call.request.instance is not None:
            self.instances.add(call.request.instance.key)
        return True

    def take_back(self) -> list[_Call]:
        """Take the calls back that the worker has not begun, in their order; with the lock of the pool held."""
        numbers: set[int] = set()
        try:
            while packet := self._worker_queue.recv(PACKET_HEAD.size, socket.MSG_DONTWAIT):
                numbers.add(PACKET_HEAD.unpack(packet)[1])
        except OSError:  # it is empty
            pass
        taken = [call for call in self.calls if call.number in numbers]
        if taken and taken[0].is_large:  # its bytes are on their way through the connection: it counts as begun
            self._queue.sendmsg([self._head(taken.pop(0))], (), socket.MSG_DONTWAIT)
        for call in taken:
            self.calls.remove(call)
            call.worker = None
            self.expected_seconds -= call.expected_seconds
        self.errands.extendleft(call for call in reversed(taken) if call.is_errand)
        return [call for call in taken if not call.is_errand]

    @staticmethod
    def _head(call: _Call) -> bytes:
        tells_begin = call.begun is not None
        flags = call.is_large * IN_CONNECTION + tells_begin * TELLS_BEGIN + call.kills_worker * KILLS_WORKER
        return PACKET_HEAD.pack(flags, call.number)

    def answered(self) -> _Call:
        """Remove the call that was answered; with the lock of the pool held."""
        call = self.calls.popleft()
        self.expected_seconds -= call.expected_seconds
        self.since = time.monotonic()
        return call

    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.exitcode is None

    def kill(self) -> None:
        """Kill the process, and wake its thread; with the lock of the pool held."""
        self.killed = True
        self.wake()
        self._process.kill()
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the process had ended already, which closes its end of the socket
            pass

    def hang_up(self) -> None:
        """Close the sockets; with the lock of the pool held, since others read from the queue."""
        for one in (self.connection, self._queue, self._worker_queue):
            one.close()

    def reap(self, grace_seconds: float) -> str:
        """Wait for the end of the process, and kill it after `grace_seconds`; return a text that says how it ended."""
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
    global _children_lock  # noqa: PLW0603 - a new one: a signal handler that raised may have kept this from holding it
    _children_lock = threading.RLock()
    for each in list(_sockets):
        each.close()
    # At exit, multiprocessing waits for its children, and fails if they are children of another process. After a fork
    # of its own, it clears this set in the same way.
    process._children.clear()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def _hold_children() -> None:
    _children_lock.acquire()


def _let_children_go() -> None:
    with suppress(RuntimeError):  # a signal handler has raised while this thread waited for the lock, and fork goes on
        _children_lock.release()


os.register_at_fork(before=_hold_children, after_in_parent=_let_children_go, after_in_child=_leave_to_parent)


def _describe(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name of its own
        name = f"signal {-exit_code}"
    return f"was killed by {name}"


# ProcessPool: each worker is spawned, never forked, and has sockets of its own. So a worker that dies fails only the
# call that it runs; `concurrent.futures.ProcessPoolExecutor` fails all queued calls. A thread for each worker waits for
# its answers and sends it calls, which keeps pickling and large writes off the event loop.
# docs/decisions/0002-process-workers.md compares the alternatives.

# How long `__exit__` of an instance in a worker may take when its scope ends.
_CLOSE_SECONDS = 5.0
_CLOSE_INSTANCES = "penstock.actors._process_worker:close_instances"
# How long an idle worker may take for its exit handlers, which send its spans, before it is killed.
_EXIT_GRACE_SECONDS = 0.5
# For how long a worker is given calls ahead, by the mean time that calls of the same function took. It has to be longer
# than the way of an answer and the next call, which is 0.1 to 1 ms where the event loop is busy, and than the pause
# below. Measured: decision 0002.
_AHEAD_SECONDS = 0.015
# If a call takes so much longer than that, what waits behind it is taken back.
_OVERDUE_SECONDS = 2 * _AHEAD_SECONDS
# A worker that has calls for less time than this answers before its thread could send it another one.
_HAND_OVER_SECONDS = 0.0002
# A worker that has several calls is not asked for each answer: its thread, the event loop and the switches between
# them take 50 to 100 us of a processor each time. For half of what it has to do, and no longer than this, its answers
# gather in the socket.
_GATHER_SECONDS = 0.0075
# A slot for `penstock.testing.faults`: called with the target of each call. It may raise in place of the call, or
# return True to have the worker of the call killed.
fault_at_call: Callable[[str], Awaitable[bool]] | None = None


class ProcessPool(ThreadOwner):
    """Runs functions in at most `max_workers` processes, for the event loop of the first `run`.

    Processes start on demand and are reused. A worker that runs short calls has its next ones already. Calls begin in
    the order of priority and then of arrival, but one of higher priority does not overtake those that a worker has:
    as many as take 15 ms, by the mean of their function. What waits behind a call that takes longer than 30 ms is taken
    back, for another worker or for later.
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
        self._max_workers = max_workers
        self._threads = ThreadPool(max_workers, name="penstock-process")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._completed = 0
        self._died = 0
        self._killed = 0
        self._numbers = itertools.count()
        self._mean_seconds: dict[str, float] = {}  # of the calls of each function
        self._futures: set[asyncio.Future[Any]] = set()  # touched on the loop only
        self.begin_without_threads()
        super().__init__()

    def begin_without_threads(self) -> None:
        """Forget all workers; for a new pool, and in a forked process, which has none of the workers of its parent."""
        # It guards all state that the threads and the loop share. A forked process needs a new one: a thread of the
        # parent may hold the old one.
        self._lock = threading.Lock()
        self._arrived: deque[_Call] = deque()
        self._waiting: list[_Call] = []  # a heap, of those that had arrived when a thread looked
        self._drivers = 0  # threads that start, drive or end a worker
        self._workers: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._has_room: set[WorkerProcess] = set()  # workers that run calls, and would get another one
        self._mailbox = None if self._loop is None else LoopMailbox(self._loop)

    async def run(
        self,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        item: Mapping[str, object] = _NO_ITEM,
        instance: process_messages.WorkerInstance | None = None,
        *,
        priority: int = 0,
        begun: Callable[[], None] | None = None,
        took: Callable[[float], None] | None = None,
    ) -> Any:
        """Run a function in a worker process.

        Cancelling this takes the call back, or kills the worker that has begun it; a new one is started on demand.

        Args:
            target: the name of the function; see `process_target`.
            args: its positional arguments; they are pickled when a worker is free.
            kwargs: its keyword arguments.
            item: the fields for log records of the call: graph, node, item and attempt.
            instance: for a class, its instance in the worker, which is called in its place.
            priority: calls of a higher one begin earlier.
            begun: called on the loop once the worker has begun the call.
            took: called on the loop with the seconds that the call took in the worker, before this returns.

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
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._mailbox = LoopMailbox(self._loop)
        request = process_messages.CallRequest(target, args, kwargs, spans.outgoing(), item, instance)
        future: asyncio.Future[Any] = self._loop.create_future()
        call = _Call(request, priority, future, begun, took, kills_worker, next(self._numbers))
        # Without the lock, which a thread may hold while it sends. A thread that is about to rest has said so before it
        # looks here for the last time.
        self._arrived.append(call)
        self._futures.add(future)
        try:
            if self._idle or self._has_room or self._drivers < self._max_workers:
                self._recruit()
            return await future
        finally:
            if not future.done() or future.cancelled():
                self._cancel(call)
            self._futures.discard(future)

    def statistics(self) -> ProcessPoolStatistics:
        """Return a snapshot; callable from any thread."""
        with self._lock:
            workers, idle = len(self._workers), len(self._idle)
            ahead = sum(len(worker.calls) - 1 for worker in self._workers if worker.calls)
            return ProcessPoolStatistics(
                workers=workers,
                idle=idle,
                busy=workers - idle,
                queued=len(self._arrived) + len(self._waiting) + ahead,
                completed=self._completed,
                died=self._died,
                killed=self._killed,
            )

    async def close_instances(self, keys: Collection[int]) -> None:
        """Have the workers leave the instances of a scope that has ended; wait for those that run no call now.

        Those that run one do it after that. A worker that takes too long is killed.
        """
        closing: dict[asyncio.Future[Any], WorkerProcess] = {}
        with self._lock:
            for worker in self._workers:
                if ended := worker.instances.intersection(keys):
                    worker.instances -= ended
                    request = process_messages.CallRequest(_CLOSE_INSTANCES, (ended,), {})
                    future = asyncio.get_running_loop().create_future()
                    if worker in self._idle:
                        self._idle.remove(worker)
                        closing[future] = worker
                    worker.errands.append(_Call(request, 0, future, number=next(self._numbers), is_errand=True))
                    worker.wake()
        if closing:
            _, hanging = await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
            with self._lock:
                for one in hanging:
                    closing[one].kill()
            if hanging:
                await asyncio.wait(hanging)

    async def aclose(self) -> None:
        """Cancel all calls, kill the workers that run one, let the idle ones end, and wait until all are gone.

        An idle worker has half a second for its exit handlers.
        """
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.wake()
                if worker.calls or not worker.is_ready:
                    worker.kill()
        for future in self._futures:
            future.cancel()
        try:
            await self._threads.aclose()
        except asyncio.CancelledError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Kill all workers without touching futures or the loop; callable from any thread."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()

    def join(self) -> None:
        """Block until the threads have ended, which wait for their workers."""
        self._threads.join()

    def _recruit(self) -> None:
        """Have a worker look for calls: an idle one, or a new one, or one that has room for more. Runs on the loop."""
        with self._lock:
            if self._closed or not self._is_waiting():
                return
            if self._idle:
                self._idle.pop().wake()  # the one used last, whose caches are warm
                return
            if self._drivers >= self._max_workers:
                if self._has_room:
                    self._has_room.pop().wake()
                return
            self._drivers += 1
        try:
            self._threads.submit(contextvars.Context(), None, self._drive)
        except BaseException:
            with self._lock:
                self._drivers -= 1
            raise

    def _cancel(self, call: _Call) -> None:
        with self._lock:
            call.is_cancelled = True
            worker = call.worker
            if worker is None:
                call.request, call.message = _NO_REQUEST, None  # it must not keep its arguments until it is next
            elif not worker.killed:
                self._put_back(worker.take_back())
                # Nothing can begin there now. So if this call was the last to begin, the worker is not at another one.
                if worker.calls and worker.calls[-1] is call:
                    worker.kill()
                worker.wake()

    def _put_back(self, calls: Iterable[_Call]) -> None:
        """Have calls wait that were taken back, at their places in the order; with the lock held."""
        assert self._mailbox is not None
        for call in calls:
            if not call.is_cancelled:
                heappush(self._waiting, call)
                self._mailbox.post(self._recruit)

    def _drive(self) -> None:
        """Start a worker, give it calls and settle them until it ends; then another one, while calls wait.

        Runs in a thread of the pool.
        """
        while (worker := self._start()) is not None:
            error: BaseException | None = None
            try:
                self._serve(worker)
            except (EOFError, OSError):
                pass
            except BaseException as unexpected:  # noqa: BLE001 - no caller may wait for a thread that has ended
                error = unexpected
                with self._lock:
                    worker.kill()
            self._remove(worker, error)

    def _start(self) -> WorkerProcess | None:
        """Return a new worker; None if no call waits. A call that cannot be pickled needs none."""
        while True:
            with self._lock:
                self._drivers -= 1
                call = None if self._closed else self._next()
                if call is None:
                    return None
                self._drivers += 1
            if not self._encode(call):
                continue
            with self._lock:
                heappush(self._waiting, call)  # another worker may be free before this one has started
            try:
                worker = WorkerProcess()
            except BaseException as error:  # noqa: BLE001 - such as too many files or processes; the error of the call
                self._fail_next(error)
                continue
            with self._lock:
                self._workers.add(worker)
                if self._closed:
                    worker.kill()
            if worker.wait_ready():
                return worker
            end = self._remove(worker)
            self._fail_next(
                WorkerDied(
                    f"worker process {worker.pid} {end} while it started. Each worker imports the main script: put "
                    'code that runs an engine there under `if __name__ == "__main__":`'
                )
            )

    def _next(self) -> _Call | None:
        """Take the next call that waits; with the lock held."""
        while self._is_waiting():
            call = heappop(self._waiting)
            if not call.is_cancelled:
                return call
        return None

    def _is_waiting(self) -> bool:
        """Whether calls wait; with the lock held."""
        while self._arrived:
            heappush(self._waiting, self._arrived.popleft())
        return bool(self._waiting)

    def _fail_next(self, error: BaseException) -> None:
        with self._lock:
            call = self._next()
        if call is not None:
            self._post([_Outcome(call, error=error)])

    def _serve(self, worker: WorkerProcess) -> None:
        """Give a worker calls and settle them, until the pool is closed; raises EOFError or OSError if it dies."""
        outcomes: list[_Outcome] = []
        try:
            while True:
                self._feed(worker, outcomes)
                with self._lock:
                    if worker in self._idle:
                        self._idle.remove(worker)
                    if worker.calls:
                        seconds = _OVERDUE_SECONDS if len(worker.calls) > 1 else _ALIVE_CHECK_SECONDS
                        if not self._is_waiting() and worker.expected_seconds > _HAND_OVER_SECONDS:
                            self._has_room.add(worker)
                    elif self._closed or worker.killed:  # its last call was answered at the same moment
                        return
                    else:
                        # It has said so before it looks for calls the last time: see `run`.
                        self._idle.append(worker)
                        if worker.errands or self._is_waiting():
                            self._idle.remove(worker)
                            continue
                        worker.is_resting, seconds = True, None
                # Only now: the event loop needs the GIL for the results, which this thread gives up while it waits.
                outcomes = self._post(outcomes)
                if seconds is None:
                    worker.doorbell.get()
                    if worker.killed or not worker.alive():
                        return
                    continue
                if len(worker.calls) > 2:
                    time.sleep(min(_GATHER_SECONDS, worker.expected_seconds / 2))
                has_reply = worker.has_reply(seconds)
                with self._lock:
                    self._has_room.discard(worker)
                if has_reply:
                    self._receive(worker, outcomes)
                elif seconds == _OVERDUE_SECONDS:
                    self._leave_to_others(worker)
        finally:
            self._post(outcomes)

    def _leave_to_others(self, worker: WorkerProcess) -> None:
        """Take back what waits behind a call that takes too long."""
        with self._lock:
            if len(worker.calls) < 2 or time.monotonic() - worker.since < _OVERDUE_SECONDS:
                return
            self._put_back(worker.take_back())

    def _feed(self, worker: WorkerProcess, outcomes: "list[_Outcome]") -> None:
        """Send a worker as many calls as it may have; before one that takes long to send, settle what has ended."""
        while True:
            with self._lock:
                call = self._next_for(worker)
            if call is None:
                return
            if not self._encode(call):
                continue
            with self._lock:
                if call.is_cancelled:
                    continue
                is_lost = self._closed or worker.killed
                is_sent = not is_lost and not (call.is_large and worker.calls) and worker.put(call)
                if not is_sent:
                    if call.is_errand:
                        worker.errands.appendleft(call)
                    else:
                        heappush(self._waiting, call)
            if not is_sent:
                assert self._mailbox is not None
                self._mailbox.post(self._recruit)
                return
            if call.is_large:
                self._post(outcomes.copy())
                outcomes.clear()
                process_messages.send(worker.connection, call.message or [])

    def _next_for(self, worker: WorkerProcess) -> _Call | None:
        """Take the next call for a worker; None if it has enough. With the lock held."""
        if worker.errands:  # each alone: behind a call that takes long it would be taken back again and again
            return None if worker.calls else worker.errands.popleft()
        waiting = self._waiting
        if self._closed or worker.killed or not self._is_waiting():
            return None
        if worker.calls:
            sent = sum([len(one.calls) for one in self._workers])
            if worker.calls[0].is_large or len(worker.calls) * self._max_workers >= len(waiting) + sent:
                return None  # the others get their share
            mean_seconds = self._mean_seconds.get(waiting[0].request.target, _AHEAD_SECONDS)
            if waiting[0].is_large or worker.expected_seconds + mean_seconds > _AHEAD_SECONDS:
                return None
            if time.monotonic() - worker.since > _AHEAD_SECONDS:
                return None
        call = self._next()
        if call is not None:
            call.expected_seconds = self._mean_seconds.get(call.request.target, _AHEAD_SECONDS)
        return call

    def _encode(self, call: _Call) -> bool:
        """Pickle a call; if that fails, its caller gets the error."""
        if call.message is None:
            try:
                call.message = message = process_messages.encode_request(call.request)
                call.is_large = len(message) > 1 or len(message[0]) > process_messages.JOIN_MAX_BYTES
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self._post([_Outcome(call, error=error)])
                return False
        return True

    def _receive(self, worker: WorkerProcess, outcomes: "list[_Outcome]") -> None:
        """Add the outcomes of all calls whose answers have come."""
        assert self._mailbox is not None
        while True:
            error: MemoryError | None = None
            body, buffers = memoryview(b""), list[process_messages.Memory]()
            try:
                body, buffers = worker.replies.receive()
            except MemoryError as of_reply:
                error = of_reply
            if not body and error is None:
                self._mailbox.post(_tell_begun, worker.calls[0])
            else:
                with self._lock:
                    call = worker.answered()
                    self._completed += not call.is_errand
                outcome = _Outcome(call, error=error) if error else _unpack(call, body, buffers)
                if outcome.seconds is not None and not call.is_errand:
                    target, means = call.request.target, self._mean_seconds
                    means[target] = recent_mean(means.get(target), outcome.seconds)
                outcomes.append(outcome)
            if worker.replies.is_empty:
                return

    def _post(self, outcomes: "list[_Outcome]") -> "list[_Outcome]":
        """Have calls settled on the loop; return an empty list for the next outcomes."""
        assert self._mailbox is not None
        if not outcomes:
            return outcomes
        self._mailbox.post(_settle, outcomes)
        return []

    def _remove(self, worker: WorkerProcess, error: BaseException | None = None) -> str:
        """Wait for a process that is ending, and settle what it has begun; return a text that says how it ended."""
        assert self._mailbox is not None
        with self._lock:  # once it is not a member of `_workers`, no other thread kills it
            self._workers.discard(worker)
            self._has_room.discard(worker)
            if worker in self._idle:
                self._idle.remove(worker)
            self._put_back(worker.take_back())
            worker.hang_up()
            begun, errands = list(worker.calls), list(worker.errands)
            worker.calls.clear()
            if worker.killed:
                self._killed += 1
            elif begun or not self._closed:
                self._died += 1
        self._mailbox.post(self._recruit)
        end = worker.reap(_EXIT_GRACE_SECONDS)
        failed = [call for call in begun if not call.is_errand]
        errands += [call for call in begun if call.is_errand]
        self._post([_Outcome(call, error=error or _died(call, worker, end)) for call in failed])
        self._post([_Outcome(call) for call in errands])
        return end


@dataclass(slots=True)
class _Outcome:
    """How a call ended.

    Attributes:
        call: the call.
        value: its result.
        error: its error; None if it has a result.
        seconds: how long it took in the worker; None if unknown.
    """

    call: _Call
    value: Any = None
    error: BaseException | None = None
    seconds: float | None = None


def _settle(outcomes: list[_Outcome]) -> None:
    """Settle the futures of calls that have ended; on the loop."""
    for outcome in outcomes:
        call = outcome.call
        if call.future.done():
            continue
        if call.took is not None and outcome.seconds is not None:
            call.took(outcome.seconds)
        if outcome.error is None:
            call.future.set_result(outcome.value)
        else:
            call.future.set_exception(travelling(outcome.error))


def _tell_begun(call: _Call) -> None:
    if call.begun is not None and not call.future.done():
        call.begun()


def _died(call: _Call, worker: WorkerProcess, end: str) -> WorkerDied:
    size = call.request.item.get("batch_size")
    whom = "only this item is affected" if size is None else f"the {size} items of this batch are affected, no others"
    remedy = ""
    if "SIGKILL" in end:
        remedy = (
            ". SIGKILL is often a sign of too little memory: give the Engine a smaller max_processes=, or send "
            f"{'less at a time' if size is None else 'fewer items in a batch'}"
        )
    elif "SIG" in end:
        remedy = ". The environment variable PYTHONFAULTHANDLER=1 has it print where it was"
    return WorkerDied(f"worker process {worker.pid} {end} while it ran {call.request.target!r}; {whom}{remedy}")


def _unpack(call: _Call, body: memoryview, buffers: list[process_messages.Memory]) -> _Outcome:
    target = call.request.target
    try:
        succeeded, value, seconds = process_messages.decode(body, buffers)
        if isinstance(value, process_messages.SentResults):
            return _Outcome(call, process_messages.decode_results(value, target), seconds=seconds)
    except MemoryError as error:
        return _Outcome(call, error=error)
    except BaseException as error:  # noqa: BLE001 - constructors are the result's own code and may raise anything
        return _Outcome(call, error=process_messages.unbuilt(target, error))
    if succeeded:
        return _Outcome(call, value, seconds=seconds)
    raised = process_messages.decode_error(value, target)
    try:
        # In this way, because an exception may refuse the assignment of `__cause__`.
        raise raised from process_messages.RemoteTraceback(value.traceback)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        return _Outcome(call, error=error, seconds=seconds)
    finally:
        del raised  # breaks a cycle: its traceback refers to this stack frame
