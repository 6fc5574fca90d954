"""Batching: `Batch`, and the actor that gathers items of many requests and handles them with one call of a function."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, cast

from .._errors import EngineClosedError, InboxClosed, OptionsError, Overloaded, copy_of, travelling
from ..telemetry import spans
from ..telemetry.logs import shown
from .accepted import (
    NOT_NEGATIVE,
    POSITIVE,
    OptionRule,
    check_fields,
    instance,
    is_read_at_once,
    is_whole,
    optional,
    whole,
)
from .channel import PriorityFifo
from .frame import foreign_cancel
from .loop_host import Actor
from .own_loops import Inbox, Request, Work, waits_of
from .packing import Rows
from .tasks import Condition, uninterrupted
from .threads import ThreadPool, ThreadShare


@dataclass(frozen=True)
class Batch:
    """How a node gathers items of many requests, to handle them together.

    With `@node`, the function takes a list of items and returns a list of results. With `@device_node`, the function is
    written for one item: the arrays of the items are stacked, padded to one of a few sizes, and computed by one
    vectorised program; `devices.DeviceBatch` has further options for that.

    Args:
        max_size: the most items in one batch. "auto", for device nodes with `sample_input=`, takes the size that
            `devices.fit` recommends; the size is determined at warm-up or before the first call.
        max_wait_seconds: how long the first item of a batch waits for further items, in seconds; with 0, a batch has
            only the items that already wait.
        max_queue: how many items may wait in addition to the items of the next batch; further items are refused with
            `Overloaded`. None: all callers wait.
        max_cost: the most that the items of one batch may cost together, such as tokens. A batch ends before the item
            that would exceed it; a single item that costs more fails with a `ValueError`.
        cost: a plain function that returns the cost of an item, a number of at least 0. For `@node`, it takes the item;
            for `@device_node`, the arguments that are stacked. `max_cost` needs this function.

    Raises:
        OptionsError: an argument does not accept its value.
    """

    max_size: int | Literal["auto"]
    _: KW_ONLY
    max_wait_seconds: float = 0.0
    max_queue: int | None = None
    max_cost: float | None = None
    cost: Callable[..., float] | None = None

    def __post_init__(self) -> None:
        self._check(BATCH_FIELDS)

    def _check(self, accepted: Mapping[str, OptionRule]) -> None:
        check_fields(self, accepted, f"{type(self).__name__}(")
        if (self.max_cost is None) != (self.cost is None):
            raise OptionsError(
                f"{type(self).__name__}(max_cost={self.max_cost!r}, cost={self.cost!r}): give both, as max_cost= "
                "limits the sum of the costs that cost= returns for the items of a batch"
            )

    @property
    def _rows(self) -> Rows | None:
        """The limit of a batch besides the number of items: one row, as large as `max_cost`; None without."""
        if self.max_cost is None or self.max_size == "auto":
            return None
        return Rows((self.max_cost,), self.max_size)

    def _cost_of(self, arguments: tuple[Any, ...], node: str) -> float:
        """Return the cost of an item.

        Raises:
            TypeError: `cost` does not return a number of at least 0.
            ValueError: the item costs more than a batch may.
        """
        assert self.cost is not None
        assert self.max_cost is not None
        try:
            cost = self.cost(*arguments)
        except asyncio.CancelledError as error:  # as `result()` of a cancelled task raises it
            raise foreign_cancel(error, node) from error
        if not NOT_NEGATIVE.fits(cost):
            raise TypeError(f"node {node!r}: cost= of its Batch returned {shown(cost)}; return {NOT_NEGATIVE.text}")
        if cost > self.max_cost:
            raise ValueError(
                f"node {node!r} refuses an item: it costs {cost}, and a whole batch may cost at most "
                f"max_cost={self.max_cost}: make the item smaller, or max_cost= of the Batch larger"
            )
        return cost


_SIZE = 'a whole number of at least 1, or "auto" on a device node'
BATCH_FIELDS: Final = {
    "max_size": OptionRule(_SIZE, lambda size: size == "auto" or is_whole(size, 1)),
    "max_wait_seconds": NOT_NEGATIVE, "max_queue": optional(whole(0)), "max_cost": optional(POSITIVE),
    "cost": optional(OptionRule("a function that is not async, because a cost is not awaited", is_read_at_once)),
}  # fmt: skip
# The values that `batch=` of a node accepts.
BATCH: Final = optional(instance(Batch, "a Batch, such as penstock.Batch(max_size=32)"))


T = TypeVar("T")
U = TypeVar("U")


class WaitsForBatch(Protocol):
    """An entry of a `BatchQueue`: a work of a `Batcher`, or a call on a device. Entries are compared by identity."""

    priority: int  # higher first
    group: Hashable  # only entries of equal groups may be in one batch
    arrived_at: float  # when the entry began to wait

    @property
    def cost(self) -> float:
        """The part of the `max_cost` of a batch, or of a row, that the entry takes; used only with such a limit."""
        ...

    def is_wanted(self, now: float) -> bool:
        """Whether the caller still waits, and the deadline has not passed."""
        ...


W = TypeVar("W", bound=WaitsForBatch)

# How many turns of the event loop a due batch waits for callers who may come again, while no caller comes. Callers in a
# `map_each` over a stream come after 5 turns, behind a plain and an async node after 6, in a stream of calls after 7. A
# turn of an idle loop takes 5 us.
_MOST_TURNS: Final = 8


class BatchQueue(Generic[W]):
    """Decides which entries form a batch, and when: higher priorities first, first in, first out within one.

    The queue is a state machine without a clock: callers pass the time, of any clock. A `Batcher` runs batches on the
    event loop or in threads; a device runs batches of calls.
    """

    __slots__ = (
        "_batch", "_costs", "_expected", "_expected_before", "_fewest_rows", "_groups", "_max_size", "_rows",
        "_some_came", "_turns", "count",
    )  # fmt: skip

    def __init__(self, batch: Batch, fewest_rows: int = 1) -> None:
        assert batch.max_size != "auto"  # the size is known by now
        self._batch = batch
        self._max_size = batch.max_size
        self._rows = batch._rows
        self._fewest_rows = fewest_rows
        self._groups: dict[Hashable, PriorityFifo[W]] = {}
        self._costs: dict[Hashable, float] = {}  # the sum for each group, if costs limit a batch
        # how many callers of the last batch may come again: now, and a turn ago
        self._expected = self._expected_before = 0
        self._some_came = False
        self._turns = 0  # for how many more turns the next batch may wait for these callers
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether no further entry may wait."""
        batch = self._batch
        return batch.max_queue is not None and self.count >= self._max_size + batch.max_queue

    @property
    def room(self) -> int:
        """How many more entries to take from the inbox: enough for one batch; with `max_queue`, one entry too many.

        With the additional entry, the queue can refuse entries, instead of leaving them in the inbox.
        """
        max_queue = self._batch.max_queue
        return self._max_size - self.count if max_queue is None else self._max_size + max_queue + 1

    @property
    def due_at(self) -> float | None:
        """The time at which the next batch has to begin, even if not full; None if no entry waits."""
        if not self._groups:
            return None
        return min([_oldest(group) for group in self._groups.values()]) + self._batch.max_wait_seconds

    def add(self, entry: W) -> None:
        """Add an entry."""
        key = entry.group
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = PriorityFifo()
        group.push(entry, entry.priority)
        self.count += 1
        self._expected -= 1
        if self._rows is not None:
            self._costs[key] = self._costs.get(key, 0) + entry.cost

    def add_alike(self, entries: Sequence[W]) -> None:
        """Add entries of one group, where no costs limit a batch."""
        key, number = entries[0].group, len(entries)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = PriorityFifo()
        for entry in entries:
            group.push(entry, entry.priority)
        self.count += number
        self._expected -= number

    def discard(self, entry: W) -> None:
        """Remove an entry, if the entry still waits."""
        group = self._groups.get(entry.group)
        if group is not None and group.discard(entry, entry.priority):
            if self._rows is not None:
                self._costs[entry.group] -= entry.cost
            self._removed(group, entry.group, 1)

    def entries(self) -> list[W]:
        """Return all entries that wait, group by group."""
        return [entry for group in self._groups.values() for entry in group]

    def drop_unwanted(self, now: float) -> list[W]:
        """Remove and return the entries whose callers have left or whose deadlines have passed."""
        unwanted = [entry for group in self._groups.values() for entry in group if not entry.is_wanted(now)]
        for entry in unwanted:
            self.discard(entry)
        return unwanted

    def is_due(self, now: float) -> bool:
        """Whether a batch is full, or its first entry has waited for `max_wait_seconds`."""
        return any(self._is_due(group, key, self._max_size, now) for key, group in self._groups.items())

    def holds_only(self, group: Hashable) -> bool:
        """Whether all entries are of this group."""
        return self._groups.keys() <= {group}

    def returned(self, number: int) -> None:
        """Note that `number` callers get their results now, and may come again within a few turns of the loop.

        Without this, the first caller would be alone in a batch, and all other callers in the batch after that, for
        ever. If more entries wait already, their batch is large, and next time all callers are together.
        """
        self._expected = self._expected_before = number if number >= self.count else 0
        self._some_came = False
        self._turns = _MOST_TURNS

    def waits_for_callers(self) -> bool:
        """Whether the next batch has to wait for a turn of the loop, in which callers may come again."""
        return self._expected > 0 and self._turns > 0 and self.count > 0 and not self.is_due(-math.inf)

    def turn(self) -> None:
        """Count a turn for which the next batch has waited. Waiting ends with the turn in which no caller comes."""
        if self._expected < self._expected_before:
            self._some_came = True
        else:
            self._turns = 0 if self._some_came else self._turns - 1
        self._expected_before = self._expected

    def take(
        self, now: float, *, at_once: bool = False, largest: Mapping[Hashable, int] = MappingProxyType({})
    ) -> list[W]:
        """Remove and return the next batch that is due; return an empty list if no batch is due.

        Args:
            now: the time.
            at_once: whether a batch is due in any case, without waiting for further entries.
            largest: for some groups, a smaller limit than `max_size`, because more entries do not fit on the device.
        """
        max_size = self._max_size
        if len(self._groups) == 1:  # nearly always
            ((key, group),) = self._groups.items()
            size = largest.get(key, max_size)
            return self._taken(group, key, size) if at_once or self._is_due(group, key, size, now) else []
        due = [
            (group, key)
            for key, group in self._groups.items()
            if at_once or self._is_due(group, key, largest.get(key, max_size), now)
        ]
        if not due:
            return []
        group, key = max(due, key=lambda one: (one[0].highest, -_oldest(one[0])))
        return self._taken(group, key, largest.get(key, max_size))

    def take_more(self, key: Hashable, most: int) -> list[W]:
        """Remove and return up to `most` entries of a group, for a batch of the group taken before; not for rows."""
        group = self._groups.get(key)
        return [] if group is None or most < 1 else self._taken(group, key, most)

    def _taken(self, group: PriorityFifo[W], key: Hashable, size: int) -> list[W]:
        if self._rows is not None:
            length = self._rows.length_for(group.head().cost)
            chosen = self._rows.choose(group.in_order(), _cost, length, size, self._fewest_rows)
            for entry in chosen:
                self.discard(entry)
            return chosen
        taken = group.pop_many(size) if size > 1 else [group.pop()]
        self._removed(group, key, len(taken))
        return taken

    def _is_due(self, group: PriorityFifo[W], key: Hashable, size: int, now: float) -> bool:
        rows = self._rows
        if rows is None:
            is_full = group.count >= size
        else:
            is_full = rows.are_full(group.count, self._costs[key], rows.length_for(group.head().cost), size)
        return is_full or now >= _oldest(group) + self._batch.max_wait_seconds

    def _removed(self, group: PriorityFifo[W], key: Hashable, number: int) -> None:
        self.count -= number
        if not group.count:
            del self._groups[key]
            self._costs.pop(key, None)


def _cost(entry: WaitsForBatch) -> float:
    return entry.cost


def _oldest(group: PriorityFifo[W]) -> float:
    """Return when the oldest entry began to wait; the first entry of each priority is its oldest."""
    return min([entry.arrived_at for entry in group.heads()])


# A thread whose batch took less than this runs the next batch at once, however small. Otherwise the thread would idle
# for as long, until a busy loop gives it the next batch.
SHORT_SECONDS: Final = 0.002

# How many callers of a batch are resumed in one turn of the loop. If all callers of a large batch were resumed in one
# turn, their next requests would come in one turn as well: too late for a thread that ends a batch meanwhile.
_SETTLED_IN_A_TURN = 16


class Batcher(Actor[T, U]):
    """An actor that calls a function with the items of a batch, and gives each item its result.

    Args:
        call: handles a batch; returns one result or exception for each item.
        batch: how items are gathered.
        concurrency: how many batches are handled at a time.
        name: the name of the function, for errors.
    """

    def __init__(
        self,
        call: Callable[[list[T]], Awaitable[Sequence[U | BaseException]] | Sequence[U | BaseException]],
        batch: Batch,
        concurrency: int,
        name: str,
    ) -> None:
        self._call: Callable[[list[T]], Any] = call
        self._penstock_figures: Any = getattr(call, "figures", tuple)
        self._queue: BatchQueue[Request[T, U]] = BatchQueue(batch)
        self._batch = batch
        self._may_refuse = batch.max_queue is not None
        self._has_costs = batch.cost is not None
        self._free = concurrency
        self._name = name
        self._room = Condition()
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False  # whether no more items will come, so that batches do not wait for more items
        self._aborted = False
        self._inbox: Inbox[Request[T, U]] | None = None  # while the inbox is open
        self._lock = threading.Lock()  # guards the queue, from which threads may take batches
        self._counts_turn = False  # whether `_turn` is scheduled

    async def loop(self, inbox: Inbox[Work[T, U]], /) -> None:
        """Collect batches and start them."""
        # The engine hands out requests, which wait in the queue unchanged.
        queue, requests = self._queue, cast("Inbox[Request[T, U]]", inbox)
        self._inbox = requests
        try:
            async with asyncio.TaskGroup() as batches:
                try:
                    while True:
                        if queue.room <= 0:
                            await self._room.wait_for(lambda: queue.room > 0)
                        self._enqueue([await requests.get(), *requests.take_nowait(queue.room - 1)], batches)
                        self._start(batches)
                except InboxClosed:
                    self._ending = True
                    self._start(batches)
                except asyncio.CancelledError:  # the task group starts no more batches then
                    self._aborted = True
                    raise
        finally:
            self._inbox = None
            self._stop_timer()

    def _enqueue(self, works: list[Request[T, U]], batches: asyncio.TaskGroup) -> None:
        """Add works to the queue, and refuse works for which the queue has no room."""
        now, queue = asyncio.get_running_loop().time(), self._queue
        for work in works:
            if self._may_refuse and queue.is_full and not self._make_room(now, batches):
                work.fail(self._overloaded())
            elif not self._has_costs or self._is_priced(work):
                work.arrived_at = now
                with self._lock:
                    queue.add(work)

    def _is_priced(self, work: Request[T, U]) -> bool:
        """Compute the cost of a work. If that fails, fail the work and return False."""
        with work:
            work.cost = self._batch._cost_of((work.value,), self._name)
        return not work.settled

    def _make_room(self, now: float, batches: asyncio.TaskGroup) -> bool:
        """Remove unwanted works from a full queue, and start batches that are due; return whether there is room now."""
        with self._lock:
            self._queue.drop_unwanted(now)
        if self._queue.is_full:
            self._start(batches)  # a full batch may be waiting to start
        return not self._queue.is_full

    def _start(self, batches: asyncio.TaskGroup, due: float = 0.0) -> None:
        """Start the batches that are due, and set a timer for the next batch."""
        loop = asyncio.get_running_loop()
        now = max(loop.time(), due)  # a timer may run up to one tick of the clock too early
        while self._free and not self._aborted and (batch := self._take(now)):
            self._free -= 1
            batches.create_task(self._run(batch, batches), name=f"penstock-batch-{self._name}")
        # only now: with eager tasks, a batch that ends at once has called this method and set a timer
        self._stop_timer()
        with self._lock:
            next_due = self._queue.due_at
            is_held = next_due is not None and self._queue.waits_for_callers()
        if self._free and next_due is not None and not self._aborted:
            if not is_held:
                self._timer = loop.call_at(next_due, self._start, batches, next_due)
            elif not self._counts_turn:
                self._counts_turn = True
                loop.call_soon(self._turn, batches)
        if self._queue.room > 0:
            self._room.notify_all()

    def _turn(self, batches: asyncio.TaskGroup) -> None:
        """Check whether the callers have come for which a batch has waited for a turn of the loop."""
        self._counts_turn = False
        self._fetch(batches)
        with self._lock:
            self._queue.turn()
        self._start(batches)

    def _take(self, now: float) -> list[Request[T, U]]:
        queue = self._queue
        with self._lock:
            # Dropping unwanted entries would not change this answer.
            if not self._ending and (not queue.is_due(now) or queue.waits_for_callers()):
                return []
            queue.drop_unwanted(now)
            batch = queue.take(now, at_once=self._ending)
        for work in batch:
            work.runs = True
        return batch

    async def _run(self, batch: list[Request[T, U]], batches: asyncio.TaskGroup) -> None:
        results: list[Any]
        task, callers = asyncio.current_task(), len(batch)
        assert task is not None

        def caller_left() -> None:
            nonlocal callers
            callers -= 1
            if not callers:
                task.cancel()

        for work in batch:
            work.on_cancelled(caller_left)
        try:
            with spans.of_batch(self._name, waits_of(batch)):
                results = results_of(await self._call([work.value for work in batch]), len(batch), self._name)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            own_cancels = 0 if callers else 1
            if isinstance(error, asyncio.CancelledError) and task.cancelling() > own_cancels:
                raise  # the loop was cancelled, and not only this batch
            results = self._failures(error, batch)
        # The next batch starts before the callers of this batch are resumed, so that the function does not wait for
        # them.
        self._free += 1
        self._fetch(batches)
        if len(batch) > 1 or self._queue.count:  # not for a single caller
            self._queue.returned(len(batch))
        self._start(batches)
        self._settle(batch, results)
        # Breaks cycles: an error of these refers to this stack frame.
        del batch, results, work  # pyright: ignore[reportPossiblyUnboundVariable] - a batch has an item

    def _fetch(self, batches: asyncio.TaskGroup) -> None:
        """Add works that have come to the inbox meanwhile to the queue."""
        if self._inbox is not None and (room := self._queue.room) > 0:
            self._enqueue(self._inbox.take_nowait(room), batches)

    def _failures(self, error: BaseException, batch: list[Request[T, U]]) -> list[Any]:
        """Return an exception for each item of a batch whose function has raised, or could not be called."""
        if isinstance(error, asyncio.CancelledError):
            return [foreign_cancel(error, self._name) for _ in batch]
        return [error, *(copy_of(error) for _ in batch[1:])]

    def _settle(self, batch: list[Request[T, U]], results: list[Any], first: int = 0) -> None:
        """Give each work its result, some in each turn of the loop: the next requests of callers come in between."""
        end = first + _SETTLED_IN_A_TURN
        if end < len(batch):
            asyncio.get_running_loop().call_soon(self._settle, batch, results, end)
        for work, result in zip(batch[first:end], results[first:end], strict=True):
            work.runs = False
            if isinstance(result, BaseException):
                work.fail(result)
            else:
                work.finish(result)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"node {self._name!r} refuses an item: {self._queue.count} items wait already, as many as one batch and "
            "max_queue= of its Batch allow"
        )


class ThreadBatcher(Batcher[T, U]):
    """A batcher of a function that blocks. A thread that has run a batch also runs the next batch that is due.

    So the function does not wait for the event loop between two batches. A busy loop takes milliseconds to give a
    thread its next batch, and as long again until the batch begins.

    Args:
        call: handles a batch, in a thread; returns one result or exception for each item.
        batch: how items are gathered.
        concurrency: how many batches are handled at a time.
        name: the name of the function, for errors.
        threads_of: returns the threads.
        share: limits how many threads are busy at a time; None without a limit.
    """

    def __init__(
        self,
        call: Callable[[list[T]], Sequence[U | BaseException]],
        batch: Batch,
        concurrency: int,
        name: str,
        threads_of: Callable[[], ThreadPool],
        share: ThreadShare | None,
    ) -> None:
        super().__init__(call, batch, concurrency, name)
        self._threads_of = threads_of
        self._share = share

    async def _run(self, batch: list[Request[T, U]], batches: asyncio.TaskGroup) -> None:
        share = self._share
        if share is not None:
            await share.take()
        try:
            begun = self._begin(batch)
            while batch:
                ended, results = await begun
                self._fetch(batches)
                # In this turn of the loop, before the callers are resumed: so the thread gets the GIL sooner.
                batch = self._following(asyncio.get_running_loop().time())
                if batch:
                    begun = self._begin(batch)
                else:
                    self._free += 1
                self._start(batches)
                self._settle(ended, results)
                del ended, results  # breaks a cycle
        finally:
            if share is not None:
                share.give_back()

    def _begin(self, batch: list[Request[T, U]]) -> Awaitable[tuple[list[Request[T, U]], list[Any]]]:
        """Give a batch to a thread. Return an awaitable of the last batch of the thread and its results."""
        returned, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            running = self._threads_of().submit(copy_context(), returned.set, self._run_batches, batch, loop.time)
        except (EngineClosedError, RuntimeError) as error:  # the pool is closed, or no thread can start
            running = loop.create_future()
            running.set_result((batch, self._failures(error, batch)))
            returned.set()
        return self._end_of(batch, running, returned)

    async def _end_of(
        self,
        batch: list[Request[T, U]],
        running: "asyncio.Future[tuple[list[Request[T, U]], list[Any]]]",
        returned: asyncio.Event,
    ) -> tuple[list[Request[T, U]], list[Any]]:
        try:
            return await running
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # this task was cancelled, and not only the job, as by a pool that is closed
            return batch, self._failures(error, batch)
        finally:  # also when cancelled: the thread must not outlive its scope
            await uninterrupted(returned.wait())

    def _run_batches(
        self, batch: list[Request[T, U]], clock: Callable[[], float]
    ) -> tuple[list[Request[T, U]], list[Any]]:
        """Run a batch, and further batches while one is due, in a thread. Return the last batch and its results."""
        while True:
            results: list[Any] = []
            began = clock()
            # The batch may have waited for this thread, and callers may leave at any time, also during `_take`.
            unwanted = [work for work in batch if not work.is_wanted(began)]
            if unwanted:
                batch = [work for work in batch if work not in unwanted]
                for work in unwanted:
                    self._threads_of().post(work.leave_batch)
            try:
                if batch:
                    with spans.of_batch(self._name, waits_of(batch), threading.current_thread().name):
                        returned = copy_context().run(self._call, [work.value for work in batch])
                        results = results_of(returned, len(batch), self._name)
                    del returned  # the results must not live until the next batch has ended
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - the error is the outcome of the whole batch
                results = self._failures(travelling(error), batch)
            ended = clock()
            if ended - began > SHORT_SECONDS:
                with self._lock:
                    self._queue.returned(len(batch))
            following = self._following(ended)
            try:
                if not following:
                    return batch, results
                self._threads_of().post(self._returned, batch, results)
            finally:
                batch = following
                del results  # also breaks a cycle: an error in it refers to this stack frame

    def _following(self, now: float) -> list[Request[T, U]]:
        """Take the next batch for the same thread; empty if no batch is due, or another job waits for a thread."""
        share = self._share
        if self._aborted or self._threads_of().has_queued_jobs or (share is not None and share.is_wanted):
            return []
        return self._take(now)

    def _returned(self, batch: list[Request[T, U]], results: list[Any]) -> None:
        """Settle a batch whose thread goes on with the next batch, which has made room in the queue."""
        self._settle(batch, results)
        if self._queue.room > 0:
            self._room.notify_all()


def results_of(results: object, size: int, name: str) -> list[Any]:
    """Check the results of a batch, and return them as a list.

    Raises:
        TypeError: the function did not return a sequence.
        ValueError: there is not one result for each item.
    """
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        raise TypeError(
            f"node {name!r} has batch=, so it must return a list with one result or exception per item, but returned "
            f"{type(results).__name__}"
        )
    found: list[Any] = [*results]
    if len(found) != size:
        raise ValueError(
            f"node {name!r} got {size} items and returned {len(found)} results; return one result or exception per "
            "item, in the same order"
        )
    return found
