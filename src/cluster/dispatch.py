"""Dispatch: which worker gets which call, which calls are sent ahead or taken back, and what happens at a death."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from .._errors import EngineClosedError, WorkerDied, copy_of
from ..extension import CallsAhead

# This module uses no threads and no names of Ray: a `Transport` starts workers and carries calls. So the same code runs
# with simulated workers, in virtual time.

# A worker that does not answer a recall within this time is killed with all of its calls: a function holds its GIL.
_RECALL_SECONDS: Final = 1.0
# How many coroutines a worker runs at a time; each holds one of its threads.
MOST_COROUTINES: Final = 64
# How long no further worker is started after a worker could not be started.
_PAUSE_SECONDS: Final = 10.0


@dataclass(eq=False, slots=True)
class Call:
    """A call for a worker.

    Attributes:
        name: the name of the function, by which its mean time is kept.
        message: the message that the transport sends.
        future: gets the answer, an error of the transport, or `WorkerDied`. It is cancelled if the caller has left.
        is_coroutine: whether the call runs beside other calls. A function runs alone, and can only be killed.
        begun: called when the call begins, as far as the driver knows.
        worker: the worker that has the call.
        number: the number of the call among the calls of that worker.
        gone: set once the call was cancelled: a future that is done when no worker has the call any longer.
        expects: whether an answer is under way; a stream answers several times.
        expected_seconds: how long the call will take, by the mean time of its function.
    """

    name: str
    message: Any
    future: asyncio.Future[Any]
    is_coroutine: bool
    begun: Callable[[], None]
    worker: "Worker | None" = None
    number: int = 0
    gone: asyncio.Future[None] | None = None
    expects: bool = True
    expected_seconds: float = 0.0


@dataclass(eq=False, slots=True)
class Worker:
    """A worker, as the driver knows it.

    Attributes:
        number: its number.
        machine: the name of its machine, once it has started.
        process: the name of its process there.
        functions: the functions that were sent and not answered, in order; the first function runs.
        coroutines: the coroutines and streams that the worker has.
        ahead: whether the worker may get another function, by the expected times of `functions`.
        is_up: whether the worker has started.
        is_killed: whether the worker gets no more calls, because it ends.
        is_recalling: whether the worker was asked for the functions that it has not begun.
        handle: the transport's own object for the worker.
    """

    number: int
    machine: str = ""
    process: str = ""
    functions: dict[int, Call] = field(default_factory=dict[int, Call])
    coroutines: dict[int, Call] = field(default_factory=dict[int, Call])
    ahead: CallsAhead = field(default_factory=lambda: CallsAhead({}))
    _sent: int = 0
    is_up: bool = False
    is_killed: bool = False
    is_recalling: bool = False
    _timer: asyncio.TimerHandle | None = None
    handle: Any = None


class Transport:
    """Starts workers and carries calls to them. It answers by calling methods of `Dispatcher`, on the event loop.

    Attributes:
        dispatcher: the dispatcher that gives the orders and gets the answers; `Workers` sets it.
    """

    dispatcher: "Dispatcher"

    def start(self, worker: Worker) -> None:
        """Start a worker; `Dispatcher.started` is called later."""
        raise NotImplementedError

    def send(self, worker: Worker, call: Call) -> None:
        """Send a call; `Dispatcher.answered` is called later. A stream answers once more after each `more`."""
        raise NotImplementedError

    def more(self, worker: Worker, call: Call) -> None:
        """Ask for the next values of a stream; `Dispatcher.answered` is called later."""
        raise NotImplementedError

    def recall(self, worker: Worker, numbers: list[int]) -> None:
        """Take back the functions that a worker has not begun; `Dispatcher.recalled` is called later with these."""
        raise NotImplementedError

    def cancel(self, worker: Worker, call: Call) -> None:
        """Cancel a coroutine, or close a stream."""
        raise NotImplementedError

    def kill(self, worker: Worker) -> None:
        """Kill a worker, also while it starts; `Dispatcher.ended` is called later."""
        raise NotImplementedError


class Dispatcher:
    """Gives calls to workers: to a free worker, ahead to a busy worker, or to a new worker, up to `most` workers.

    Args:
        transport: carries the calls.
        most: the most workers.

    Attributes:
        workers: the workers that start or run.
        waiting: the functions and the coroutines that no worker has.
        died: how many workers have died that this dispatcher did not kill.
    """

    def __init__(self, transport: Transport, most: int) -> None:
        self._transport = transport
        self._most = most
        self._numbers = count(1)
        self._closed = False
        self._starting = 0
        self._may_start_at = 0.0
        self._free: dict[Worker, None] = {}  # workers that run no function
        self._roomy: dict[Worker, None] = {}  # workers that run functions and may get another one ahead
        self._lanes: list[dict[Worker, None]] = [{} for _ in range(MOST_COROUTINES + 1)]  # by number of coroutines
        self._mean_seconds: dict[str, float] = {}
        self._all_ended: asyncio.Future[None] | None = None
        self.workers: set[Worker] = set()
        self.waiting: dict[bool, deque[Call]] = {False: deque(), True: deque()}
        self.died = 0

    # Called by callers.

    def submit(self, call: Call) -> None:
        """Have a worker make a call; its future gets the outcome."""
        if self._closed:
            raise EngineClosedError("these workers were closed, because their Engine has ended: use an open Engine")
        self.waiting[call.is_coroutine].append(call)
        self._give(call.is_coroutine)

    def more(self, call: Call, future: "asyncio.Future[Any]") -> None:
        """Ask for the next values of a stream that has answered."""
        assert call.worker is not None
        call.future, call.expects = future, True
        self._transport.more(call.worker, call)

    def cancel(self, call: Call) -> "asyncio.Future[None]":
        """Give up a call; return a future that is done once no worker has it."""
        worker = call.worker
        gone = call.gone = call.future.get_loop().create_future()
        if worker is None or call.number not in (worker.coroutines if call.is_coroutine else worker.functions):
            call.message = None  # no worker has the call: it waits, or was just answered
            gone.set_result(None)
        elif call.is_coroutine:
            self._transport.cancel(worker, call)
            if not call.expects:  # otherwise the next answer of the stream says that it is closed
                call.expects = True
                self._transport.more(worker, call)
        else:
            self._make_way(worker)
        return gone

    async def aclose(self) -> None:
        """Fail the waiting calls, kill all workers, and wait until the workers have ended."""
        self._closed = True
        self._fail_waiting(EngineClosedError("the Engine was closed before a worker had begun this call"))
        for worker in [*self.workers]:
            self._kill(worker)
        if self.workers:
            self._all_ended = asyncio.get_running_loop().create_future()
            await self._all_ended

    # Called by the transport.

    def started(self, worker: Worker, error: BaseException | None = None) -> None:
        """Note that a worker has started; or with `error`, that it could not be started."""
        if worker.is_killed:
            return
        if error is None:
            self._starting -= 1
            worker.is_up = True
            self._free[worker] = self._lanes[0][worker] = None
            self._give(True)
            self._give(False)
            return
        self._end(worker)
        self._may_start_at = asyncio.get_running_loop().time() + _PAUSE_SECONDS
        if not any(one.is_up for one in self.workers) and not self._starting:
            self._fail_waiting(error)

    def answered(
        self, worker: Worker, number: int, answer: Any, seconds: float | None = None, *, goes_on: bool = False
    ) -> None:
        """Note an answer, or an error of the transport in place of it.

        Args:
            worker: the worker.
            number: the number of the call on that worker.
            answer: the answer for the caller; an exception if the transport failed.
            seconds: how long a function took.
            goes_on: whether the call is a stream that may have more values.
        """
        call = worker.functions.get(number)
        if call is None:
            call = worker.coroutines.get(number)
            if call is None:  # the call was taken back
                return
            call.expects = False
            if not goes_on:
                self._leave_lane(worker, call)
            elif call.gone is not None:  # the answer left before the worker heard of the cancellation
                call.expects = True
                self._transport.more(worker, call)
        else:
            self._function_ended(worker, call, seconds)
        _settle(call, answer, is_last=not goes_on)
        if self.waiting[call.is_coroutine]:
            self._give(call.is_coroutine)

    def recalled(self, worker: Worker, numbers: list[int]) -> None:
        """Note which functions a worker has not begun and will not begin. These functions wait again."""
        worker.is_recalling = False
        again: list[Call] = []
        for number in numbers:
            call = worker.functions.pop(number, None)
            if call is not None:
                worker.ahead.taken_back(call.expected_seconds)
                call.worker = None
                if call.gone is None:
                    again.append(call)
                elif not call.gone.done():
                    call.gone.set_result(None)
        self.waiting[False].extendleft(reversed(again))
        if any(call.gone is not None for call in worker.functions.values()):
            self._make_way(worker)
        else:
            self._place(worker)
        self._give(False)

    def ended(self, worker: Worker, reason: str) -> None:
        """Note that a worker has died. Its calls fail, because they had begun there or may have begun."""
        if worker not in self.workers:
            return
        calls = [*worker.functions.values(), *worker.coroutines.values()]
        was_killed = worker.is_killed
        self.died += not was_killed
        self._end(worker)
        for call in calls:
            first = call.is_coroutine or call is calls[0]
            state = "while it ran" if first else "and may have begun"
            _settle(
                call,
                WorkerDied(f"worker {worker.process} on {worker.machine} died {state} {call.name!r}: {reason}"),
                is_last=True,
            )
        if not self._closed:
            self._give(True)
            self._give(False)

    # Internal.

    def _give(self, to_coroutines: bool) -> None:
        """Give waiting functions or coroutines to workers, as long as a worker has room."""
        waiting = self.waiting[to_coroutines]
        while waiting:
            call = waiting[0]
            if call.gone is not None:
                waiting.popleft()
                continue
            worker = self._lane() if to_coroutines else self._thread(call.name)
            if worker is None:
                return
            waiting.popleft()
            self._send(worker, call)

    def _lane(self) -> Worker | None:
        """Return the worker with the fewest coroutines; None if no worker has room."""
        for number, lane in enumerate(self._lanes[:-1]):
            if lane:
                if number:
                    self._grow()
                return next(iter(lane))
        self._grow()
        return None

    def _thread(self, name: str) -> Worker | None:
        """Return a worker for a function: a free worker, or a busy worker that may get the function ahead."""
        if self._free:
            return next(reversed(self._free))  # the worker that was used last: its caches are warm
        self._grow()
        now = asyncio.get_running_loop().time()
        while self._roomy:
            worker = next(iter(self._roomy))
            if worker.ahead.has_room(name, now):
                return worker
            del self._roomy[worker]
        return None

    def _grow(self) -> None:
        """Start a further worker, if there may be more."""
        if len(self.workers) >= self._most or self._starting >= sum(map(len, self.waiting.values())):
            return
        if self._may_start_at and asyncio.get_running_loop().time() < self._may_start_at and self.workers:
            return
        worker = Worker(next(self._numbers), ahead=CallsAhead(self._mean_seconds))
        self.workers.add(worker)
        self._starting += 1
        self._transport.start(worker)

    def _send(self, worker: Worker, call: Call) -> None:
        worker._sent += 1
        call.worker, call.number = worker, worker._sent
        if call.is_coroutine:
            lane = len(worker.coroutines)
            del self._lanes[lane][worker]
            self._lanes[lane + 1][worker] = None
            worker.coroutines[call.number] = call
            call.begun()
        else:
            loop = call.future.get_loop()
            if not worker.functions:
                self._free.pop(worker, None)
                call.begun()
            elif worker._timer is None:
                worker._timer = loop.call_later(CallsAhead.OVERDUE_SECONDS, self._look, worker)
            worker.functions[call.number] = call
            call.expected_seconds = worker.ahead.sent(call.name, loop.time())
            self._place(worker)
        self._transport.send(worker, call)

    def _place(self, worker: Worker) -> None:
        """Put a worker in line for functions, ahead if it is busy. The worker that got one last is the last in line."""
        self._roomy.pop(worker, None)
        if worker.is_killed or worker.is_recalling:
            return
        if not worker.functions:
            self._free[worker] = None
        else:
            self._roomy[worker] = None

    def _function_ended(self, worker: Worker, call: Call, seconds: float | None) -> None:
        del worker.functions[call.number]
        worker.ahead.ended(call.expected_seconds, call.future.get_loop().time())
        if seconds is not None:
            worker.ahead.took(call.name, seconds)
        following = next(iter(worker.functions.values()), None)
        if following is not None and following.gone is None:
            following.begun()
        elif following is not None:
            self._make_way(worker)
        self._place(worker)

    def _leave_lane(self, worker: Worker, call: Call) -> None:
        lane = len(worker.coroutines)
        del worker.coroutines[call.number]
        if self._lanes[lane].pop(worker, 0) is None:
            self._lanes[lane - 1][worker] = None

    def _look(self, worker: Worker) -> None:
        """Take back the functions behind a function that takes too long."""
        worker._timer = None
        due, loop = worker.ahead.overdue_at(), asyncio.get_running_loop()
        if due is None or worker.is_recalling or worker.is_killed:
            return
        if loop.time() >= due:
            self._recall(worker)
        else:
            worker._timer = loop.call_at(due, self._look, worker)

    def _recall(self, worker: Worker) -> None:
        worker.is_recalling = True
        self._roomy.pop(worker, None)
        self._transport.recall(worker, [*worker.functions][1:])

    def _make_way(self, worker: Worker) -> None:
        """Kill a worker to end the function that it runs; functions that have not begun are taken back before."""
        if worker.is_recalling or worker.is_killed:
            return
        first = next(iter(worker.functions.values()))
        if len(worker.functions) > 1:
            self._recall(worker)
            asyncio.get_running_loop().call_later(_RECALL_SECONDS, self._give_up, worker)
        elif first.gone is not None:
            self._kill(worker)

    def _give_up(self, worker: Worker) -> None:
        if worker.is_recalling and any(call.gone is not None for call in worker.functions.values()):
            self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        if not worker.is_killed:
            self._take_out(worker)
            worker.is_killed = True
            self._transport.kill(worker)

    def _take_out(self, worker: Worker) -> None:
        for members in (self._free, self._roomy, self._lanes[len(worker.coroutines)]):
            members.pop(worker, None)

    def _end(self, worker: Worker) -> None:
        self._take_out(worker)
        self._starting -= not worker.is_up
        self.workers.discard(worker)
        worker.is_killed = True
        if worker._timer is not None:
            worker._timer.cancel()
        if self._all_ended is not None and not self.workers and not self._all_ended.done():
            self._all_ended.set_result(None)

    def _fail_waiting(self, error: BaseException) -> None:
        for waiting in self.waiting.values():
            for call in waiting:
                if not call.future.done():
                    call.future.set_exception(copy_of(error))
            waiting.clear()


def _settle(call: Call, answer: Any, *, is_last: bool) -> None:
    """Give the caller an answer; if the caller has left, note that no worker has the call any longer."""
    if call.gone is not None:
        if is_last and not call.gone.done():
            call.gone.set_result(None)
    elif not call.future.done():
        if isinstance(answer, BaseException):
            call.future.set_exception(answer)
        else:
            call.future.set_result(answer)
