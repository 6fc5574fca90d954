"""Worker processes in which one death costs one item."""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, cast

from .._errors import EngineClosedError, WorkerDied, copy_of, travelling
from ..engine import ProcessPoolStatistics
from ..extension import CallsAhead, LoopMailbox, ThreadOwner, WorkerTraces, unpack_error
from ..telemetry import logs
from . import messages
from .process import (
    ALIVE_CHECK_SECONDS,
    NO_ITEM,
    NO_REQUEST,
    RUNS_SCRIPT_AGAIN,
    WorkerCall,
    WorkerProcess,
    describe_exit,
    where_script_runs,
)

# ProcessPool: each worker is spawned, never forked, and has its own sockets. So a worker that dies fails only the call
# that it runs; `concurrent.futures.ProcessPoolExecutor` fails all queued calls. A thread for each worker sends calls
# and waits for answers, which keeps pickling and large writes off the event loop.
# docs/decisions/0002-process-workers.md compares the alternatives.

# How long `__exit__` of an instance in a worker may take when its scope ends.
_CLOSE_SECONDS = 5.0
_CLOSE_INSTANCES = "penstock.workers.worker:close_instances"
# How long an idle worker may take for its exit handlers, which send spans, before it is killed.
_EXIT_GRACE_SECONDS = 0.5
# A worker with less work than this answers before its thread could send another call.
_HAND_OVER_SECONDS = 0.0002
# With several calls, the thread does not read each answer at once: the thread, the event loop and the switches between
# them take 50 to 100 us of a processor each time. Answers gather in the socket for half of the expected work, and no
# longer than this.
_GATHER_SECONDS = 0.0075


class ProcessPool(ThreadOwner):
    """Runs functions in at most `max_workers` processes, for the event loop of the first `run`.

    Processes start on demand and are reused. A worker that runs short calls gets its next calls ahead: calls for 15 ms,
    by the mean time of their function. Calls begin in the order of priority and then of arrival, but a call of higher
    priority does not overtake calls that a worker already has. Calls that wait behind a call of more than 30 ms are
    taken back, for another worker or for later.

    Attributes:
        closed: whether the pool was closed, so that it takes no calls.
    """

    def __init__(self, max_workers: int, started: Callable[[float, float], None] = lambda began, ended: None) -> None:
        """Make a pool without processes.

        Args:
            max_workers: the most processes at a time, at least 1.
            started: called with the times of the start of a worker, if no other worker had done any work meanwhile.

        Raises:
            ValueError: `max_workers` is below 1.
        """
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        self._max_workers = max_workers
        self._started = started
        self._all_ended = asyncio.Event()  # set when the last thread has ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False
        self._completed = 0
        self._died = 0
        self._killed = 0
        self._refusal: str | None = None  # why no worker can start
        self._numbers, self._threads_started = itertools.count(), itertools.count(1)
        self._mean_seconds: dict[str, float] = {}  # the mean time of the calls of each function
        self._futures: set[asyncio.Future[Any]] = set()  # touched on the loop only
        self.begin_without_threads()
        super().__init__()

    def begin_without_threads(self) -> None:
        """Forget all workers; for a new pool, and in a forked process, which has no workers of its parent."""
        # The lock guards all state that the threads and the loop share. A forked process needs a new lock: a thread of
        # the parent may hold the old lock.
        self._lock = threading.Lock()
        self._arrived: deque[WorkerCall] = deque()
        self._waiting: list[WorkerCall] = []  # a heap of the calls that had arrived when a thread looked
        self._threads: set[threading.Thread] = set()
        self._drivers = 0  # threads that start, drive or end a worker
        self._workers: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._has_room: set[WorkerProcess] = set()  # workers that run calls, and can get another call
        self._mailbox = None if self._loop is None else LoopMailbox(self._loop)

    async def run(
        self,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        item: Mapping[str, object] = NO_ITEM,
        instance: messages.WorkerInstance | None = None,
        *,
        priority: int = 0,
        begun: Callable[[], None] | None = None,
        took: Callable[[float], None] | None = None,
        kills_worker: bool = False,
    ) -> Any:
        """Run a function in a worker process.

        Cancelling this takes the call back, or kills the worker that has begun it; a new worker starts on demand.

        Args:
            target: the name of the function; see `process_target`.
            args: the positional arguments; they are pickled when a worker is free.
            kwargs: the keyword arguments.
            item: the fields for log records of the call: graph, node, item and attempt.
            instance: for a class, the instance in the worker, which is called in the place of the function.
            priority: calls of a higher priority begin earlier.
            begun: called on the loop once the worker has begun the call.
            took: called on the loop with the seconds that the call took in the worker, before this returns.
            kills_worker: whether the worker is killed when it begins the call; for tests.

        Returns:
            The result of the function. Arrays are rebuilt in new memory, and are writable if they were writable.

        Raises:
            EngineClosedError: the pool was closed.
            WorkerDied: the process that ran this call died.
            TypeError: an argument or the result does not pickle; the message names the value and its type.
            MemoryError: there is no memory for the result.
            BaseException: the error of the function; its `__cause__` shows the traceback in the worker.
        """
        given = time.perf_counter()
        if self.closed:
            raise EngineClosedError("this process pool was closed; it belongs to an Engine that has ended")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._mailbox = LoopMailbox(self._loop)
        request = messages.CallRequest(target, args, kwargs, WorkerTraces.headers(), item, instance)
        future: asyncio.Future[Any] = self._loop.create_future()
        call = WorkerCall(request, priority, future, begun, took, kills_worker, next(self._numbers))
        # Without the lock, which a thread may hold while it sends. A thread that is about to rest adds its worker to
        # `_idle` before it looks at `_arrived` for the last time.
        self._arrived.append(call)
        self._futures.add(future)
        try:
            if self._idle or self._has_room or self._drivers < self._max_workers:
                self._recruit()
            return await future
        finally:
            if request.headers and call.worker is not None:
                started_at, ready_at = call.worker.started_at, call.worker.ready_at
                WorkerTraces.ran_in(call.worker.pid, max(0.0, ready_at - max(given, started_at)))
            if not future.done() or future.cancelled():
                self._cancel(call)
            self._futures.discard(future)
            # They refer to the arguments, which a call that was cancelled must not keep until it is next in line.
            call.begun = call.took = None
            del call, future  # breaks a cycle: an error of the call refers to this stack frame

    def statistics(self) -> ProcessPoolStatistics:
        """Return a snapshot; callable from any thread."""
        with self._lock:
            workers, idle = len(self._workers), len(self._idle)
            ahead = sum(len(worker.calls) - 1 for worker in self._workers if worker.calls)
            return ProcessPoolStatistics(
                workers=workers, idle=idle, busy=workers - idle, queued=len(self._arrived) + len(self._waiting) + ahead,
                completed=self._completed, died=self._died, killed=self._killed,
            )  # fmt: skip

    async def close_instances(self, keys: Collection[int]) -> None:
        """Make the workers leave the instances of a scope that has ended. Wait for the workers that are idle now.

        Busy workers leave their instances after the present call. A worker that takes too long is killed.
        """
        closing: dict[asyncio.Future[Any], WorkerProcess] = {}
        with self._lock:
            for worker in self._workers:
                if ended := worker.instances.intersection(keys):
                    worker.instances -= ended
                    request = messages.CallRequest(_CLOSE_INSTANCES, (ended,), {})
                    future = asyncio.get_running_loop().create_future()
                    if worker in self._idle:
                        self._idle.remove(worker)
                        closing[future] = worker
                    worker.errands.append(WorkerCall(request, 0, future, number=next(self._numbers), is_errand=True))
                    worker.wake()
        if closing:
            _, hanging = await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
            with self._lock:
                for one in hanging:
                    closing[one].kill()
            if hanging:
                await asyncio.wait(hanging)

    async def aclose(self) -> None:
        """Cancel all calls, kill the busy workers, let the idle workers end, and wait until all workers are gone.

        An idle worker has half a second for its exit handlers.
        """
        with self._lock:
            self.closed = True
            for worker in self._workers:
                worker.wake()
                if worker.calls or not worker.is_ready:
                    worker.kill()
        for future in self._futures:
            future.cancel()
        try:
            if self._threads:
                await self._all_ended.wait()
        except asyncio.CancelledError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Kill all workers without touching futures or the loop; callable from any thread."""
        with self._lock:
            self.closed = True
            for worker in self._workers:
                worker.kill()

    def join(self) -> None:
        """Block until the threads have ended; each thread waits for its worker."""
        for thread in list(self._threads):
            thread.join()

    def _recruit(self) -> None:
        """Let a worker look for calls: an idle worker, a new worker, or a worker with room. Runs on the loop."""
        with self._lock:
            if self.closed or not self._is_waiting():
                return
            if self._idle:
                self._idle.pop().wake()  # the worker that was used last, whose caches are warm
                return
            if self._drivers >= self._max_workers:
                if self._has_room:
                    self._has_room.pop().wake()
                return
            self._drivers += 1
        thread = threading.Thread(target=self._drive, name=f"penstock-process-{next(self._threads_started)}")
        try:
            thread.start()
        except RuntimeError:  # no thread can start
            with self._lock:
                self._drivers -= 1
            raise
        self._threads.add(thread)

    def _cancel(self, call: WorkerCall) -> None:
        with self._lock:
            call.is_cancelled = True
            worker = call.worker
            if worker is None:
                # the call must not keep its arguments until it is next in line
                call.request, call.message = NO_REQUEST, None
            elif not worker.killed:
                self._put_back(worker.take_back())
                # No further call can begin there now. So if this call began last, the worker runs no other call.
                if worker.calls and worker.calls[-1] is call:
                    worker.kill()
                worker.wake()

    def _put_back(self, calls: Iterable[WorkerCall]) -> None:
        """Let calls that were taken back wait again, at their places in the order; with the lock held."""
        assert self._mailbox is not None
        for call in calls:
            if not call.is_cancelled:
                heappush(self._waiting, call)
                self._mailbox.post(self._recruit)

    def _drive(self) -> None:
        """Start a worker, send calls and settle them until the worker ends; then start the next, while calls wait.

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
        assert self._mailbox is not None
        self._mailbox.post(self._thread_ended, threading.current_thread())

    def _thread_ended(self, thread: threading.Thread) -> None:
        thread.join()  # the thread only has to return
        self._threads.discard(thread)
        if self.closed and not self._threads:
            self._all_ended.set()

    def _start(self) -> WorkerProcess | None:
        """Return a new worker; None if no call waits. A call that cannot be pickled needs no worker."""
        while True:
            with self._lock:
                self._drivers -= 1
                call = None if self.closed else self._next()
                if call is None:
                    return None
                self._drivers += 1
            if self._refusal is not None:
                self._post([_Outcome(call, error=WorkerDied(self._refusal))])
                continue
            if not self._encode(call):
                continue
            with self._lock:
                heappush(self._waiting, call)  # another worker may be free before this one has started
            before = self._completed
            try:
                worker = WorkerProcess(CallsAhead(self._mean_seconds))
            except BaseException as error:  # noqa: BLE001 - such as too many files or processes: this becomes the error of the call
                self._fail_next(error)
                continue
            with self._lock:
                self._workers.add(worker)
                if self.closed:
                    worker.kill()
            if worker.wait_ready():
                if self._completed == before:
                    self._started(worker.started_at, worker.ready_at)
                return worker
            end = self._remove(worker)
            remedy = 'put code that runs an engine there under `if __name__ == "__main__":`'
            started = f"worker process {worker.pid} {end} while it started"
            reason = f"{started}. Each worker imports the main script: {remedy}"
            if end == describe_exit(RUNS_SCRIPT_AGAIN):
                reason = f"{where_script_runs()}: the main script runs an engine, and each worker imports it: {remedy}"
                with self._lock:
                    is_first, self._refusal = self._refusal is None, reason
                if is_first:
                    logs.warning("process.script_runs_engine", reason=reason)
            self._fail_next(WorkerDied(reason))

    def _next(self) -> WorkerCall | None:
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
        """Send a worker calls and settle them, until the pool is closed. Raises EOFError or OSError if it dies."""
        outcomes: list[_Outcome] = []
        try:
            while True:
                self._feed(worker, outcomes)
                with self._lock:
                    if worker in self._idle:
                        self._idle.remove(worker)
                    if worker.calls:
                        seconds = CallsAhead.OVERDUE_SECONDS if len(worker.calls) > 1 else ALIVE_CHECK_SECONDS
                        if not self._is_waiting() and worker.ahead.seconds > _HAND_OVER_SECONDS:
                            self._has_room.add(worker)
                    elif self.closed or worker.killed:  # the last call was answered at the same moment
                        return
                    else:
                        # Add the worker to `_idle` before looking for calls for the last time: see `run`.
                        self._idle.append(worker)
                        if worker.errands or self._is_waiting():
                            self._idle.remove(worker)
                            continue
                        worker.is_resting, seconds = True, None
                # Only now: the event loop needs the GIL for the results, and this thread releases the GIL while it
                # waits.
                outcomes = self._post(outcomes)
                if seconds is None:
                    worker.doorbell.get()
                    if worker.killed or not worker.alive():
                        return
                    continue
                if len(worker.calls) > 2:
                    time.sleep(min(_GATHER_SECONDS, worker.ahead.seconds / 2))
                has_reply = worker.has_reply(seconds)
                with self._lock:
                    self._has_room.discard(worker)
                if has_reply:
                    self._receive(worker, outcomes)
                elif seconds == CallsAhead.OVERDUE_SECONDS:
                    self._leave_to_others(worker)
        finally:
            self._post(outcomes)

    def _leave_to_others(self, worker: WorkerProcess) -> None:
        """Take back the calls that wait behind a call that takes too long."""
        with self._lock:
            due = worker.ahead.overdue_at()
            if due is not None and time.monotonic() >= due:
                self._put_back(worker.take_back())

    def _feed(self, worker: WorkerProcess, outcomes: "list[_Outcome]") -> None:
        """Send a worker as many calls as it may have. Before a call that takes long to send, settle ended calls."""
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
                if self._is_waiting() and self._waiting[0] < call and not call.is_errand:
                    heappush(self._waiting, call)  # an earlier call was taken back meanwhile, and begins first
                    continue
                is_lost = self.closed or worker.killed
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
                messages.send(worker.connection, call.number, call.message or [])

    def _next_for(self, worker: WorkerProcess) -> WorkerCall | None:
        """Take the next call for a worker; None if it has enough calls. With the lock held."""
        if worker.errands:  # each alone: behind a long call, an errand would be taken back again and again
            return None if worker.calls else worker.errands.popleft()
        waiting = self._waiting
        if self.closed or worker.killed or not self._is_waiting():
            return None
        if worker.calls:
            sent = sum([len(one.calls) for one in self._workers])
            if worker.calls[0].is_large or len(worker.calls) * self._max_workers >= len(waiting) + sent:
                return None  # the other workers get their share
            if waiting[0].is_large or not worker.ahead.has_room(waiting[0].request.target, time.monotonic()):
                return None
        return self._next()

    def _encode(self, call: WorkerCall) -> bool:
        """Pickle a call. If pickling fails, the caller gets the error."""
        if call.message is None:
            try:
                call.message = message = messages.encode_request(call.request)
                call.is_large = len(message) > 1 or len(message[0]) > messages.JOIN_MAX_BYTES
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self._post([_Outcome(call, error=error)])
                return False
        return True

    def _receive(self, worker: WorkerProcess, outcomes: "list[_Outcome]") -> None:
        """Add the outcomes of all calls whose answers have come."""
        assert self._mailbox is not None
        while True:
            flags, call = worker.next_head()
            if flags & messages.BEGUN:
                self._mailbox.post(_tell_begun, call)
            elif flags & messages.SPANS:
                WorkerTraces.export(worker.replies.receive()[0])
            else:
                body, buffers = worker.replies.receive()
                with self._lock:
                    worker.answered()
                    self._completed += not call.is_errand
                outcome = _unpack(call, body, buffers)
                if outcome.seconds is not None and not call.is_errand:
                    worker.ahead.took(call.request.target, outcome.seconds)
                outcomes.append(outcome)
            if worker.replies.is_empty:
                return

    def _post(self, outcomes: "list[_Outcome]") -> "list[_Outcome]":
        """Settle calls on the loop; return an empty list for the next outcomes."""
        assert self._mailbox is not None
        if not outcomes:
            return outcomes
        self._mailbox.post(_settle, outcomes)
        return []

    def _remove(self, worker: WorkerProcess, error: BaseException | None = None) -> str:
        """Wait for a process that is ending, and settle the calls that it began; return a text about its end."""
        assert self._mailbox is not None
        with self._lock:  # once the worker is not in `_workers`, no other thread kills it
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
            elif begun or not self.closed:
                self._died += 1
        self._mailbox.post(self._recruit)
        end = worker.reap(_EXIT_GRACE_SECONDS)
        failed = [call for call in begun if not call.is_errand]
        errands += [call for call in begun if call.is_errand]
        self._post([_Outcome(call, error=copy_of(error) if error else _died(call, worker, end)) for call in failed])
        self._post([_Outcome(call) for call in errands])
        return end


@dataclass(slots=True)
class _Outcome:
    """How a call ended.

    Attributes:
        call: the call.
        value: the result of the call.
        error: the error of the call; None if the call has a result.
        seconds: how long the call took in the worker; None if unknown.
    """

    call: WorkerCall
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


def _tell_begun(call: WorkerCall) -> None:
    if call.begun is not None and not call.future.done():
        call.begun()


def _died(call: WorkerCall, worker: WorkerProcess, end: str) -> WorkerDied:
    size = call.request.item.get("batch_size")
    whom = "only this item is affected" if size is None else f"the {size} items of this batch are affected, no others"
    remedy = ""
    if "SIGKILL" in end:
        remedy = (
            ". SIGKILL is often a sign of too little memory: give the Engine a smaller max_processes=, or send "
            f"{'less at a time' if size is None else 'fewer items in a batch'}"
        )
    elif "SIG" in end:
        remedy = ". With the environment variable PYTHONFAULTHANDLER=1, the worker prints its stack"
    return WorkerDied(f"worker process {worker.pid} {end} while it ran {call.request.target!r}; {whom}{remedy}")


def _unpack(call: WorkerCall, body: memoryview, buffers: list[messages.Memory]) -> _Outcome:
    target = call.request.target
    try:
        succeeded, value, seconds = messages.decode(body, buffers)
    except MemoryError as error:
        return _Outcome(call, error=error)
    except BaseException as error:  # noqa: BLE001 - constructors are the result's own code and may raise anything
        return _Outcome(call, error=messages.unbuilt(target, error))
    if not succeeded:
        return _Outcome(call, error=unpack_error(value, target), seconds=seconds)
    if "batch_size" in call.request.item and isinstance(value, list):
        value = messages.decode_results(cast("list[object]", value), target)
    return _Outcome(call, value, seconds=seconds)
