"""The channel against a plain list, step by step: any producers and consumers, cancelled anywhere, on three loops."""

import asyncio
import itertools
import operator
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock import ChannelClosed
from penstock.actors.channel import Channel, PriorityFifo
from penstock.testing import wait_quiescent
from tests.loops import LOOPS, by_loop


@dataclass(eq=False)
class Item:
    priority: int
    size_bytes: int
    state: str = "new"  # later: refused, waiting, held, taken, discarded or withdrawn
    put_cancelled: bool = False

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a channel compares its items by identity: those of users may have any __eq__")

    __hash__ = object.__hash__


@dataclass
class Model:
    """A channel as two lists: the `held` items, and the `line` of items that wait to enter."""

    capacity: int | None
    max_bytes: int | None
    held: list[Item] = field(default_factory=list)
    line: list[Item] = field(default_factory=list)
    closed: bool = False
    entered: int = 0

    @property
    def bytes_held(self) -> int:
        return sum(item.size_bytes for item in self.held) if self.max_bytes is not None else 0

    def fits(self, item: Item) -> bool:
        if self.capacity is not None and len(self.held) >= self.capacity:
            return False
        return self.max_bytes is None or not self.held or self.bytes_held + item.size_bytes <= self.max_bytes

    def put(self, item: Item, *, waits: bool) -> str:
        if self.closed:
            item.state = "refused"
        elif self.fits(item) and not any(other.priority >= item.priority for other in self.line):
            self._enter(item)
        elif waits:
            item.state = "waiting"
            self.line.append(item)
        return item.state

    def take(self) -> Item:
        return self.take_many(1)[0]

    def take_many(self, number: int) -> list[Item]:
        taken = sorted(self.held, key=lambda item: -item.priority)[:number]  # a stable sort
        self.held = [item for item in self.held if not _holds(taken, item)]
        for item in taken:
            item.state = "taken"
        self._admit()
        return taken

    def leave(self, item: Item, state: str) -> None:
        item.state = state
        places = self.held if _holds(self.held, item) else self.line
        places[:] = [other for other in places if other is not item]
        self._admit()

    def close(self) -> None:
        self.closed = True
        for item in self.line:
            item.state = "refused"
        self.line.clear()

    def _admit(self) -> None:
        while self.line:
            item = _first(self.line)
            if not item.put_cancelled and not self.fits(item):
                return
            self.line[:] = [other for other in self.line if other is not item]
            if item.put_cancelled:
                item.state = "withdrawn"
            else:
                self._enter(item)

    def _enter(self, item: Item) -> None:
        item.state = "held"
        self.held.append(item)
        self.entered += 1


def _first(items: list[Item]) -> Item:
    return max(items, key=lambda item: item.priority)  # the earliest of the highest priority


def _holds(items: list[Item], item: Item) -> bool:
    return any(other is item for other in items)


class ChannelMachine(RuleBasedStateMachine):
    """Acts on channel and model without a turn of the loop in between, so that a cancel may hit a woken task."""

    new_loop: Callable[[int], asyncio.AbstractEventLoop]

    @initialize(
        seed=st.integers(0, 1000),
        capacity=st.sampled_from([1, 2, 3, None]),
        max_bytes=st.sampled_from([None, None, 10]),
    )
    def open(self, seed: int, capacity: int | None, max_bytes: int | None) -> None:
        self.loop = self.new_loop(seed)
        self.model = Model(capacity, max_bytes)
        size_of = (lambda item: item.size_bytes) if max_bytes is not None else None
        self.channel: Channel[Item] = Channel(capacity, max_bytes=max_bytes, size_of=size_of)
        self.items: list[Item] = []
        self.putters: dict[asyncio.Task[None], Item] = {}
        self.getters: dict[asyncio.Task[None], int] = {}  # each with the number of its get
        self.getter_numbers = itertools.count()
        self.gets_begun: list[int] = []  # numbers of getters, as they came to the channel
        self.served_since_rest: list[int] = []
        self.item_was_discarded = False

    def new_item(self, priority: int, size_bytes: int) -> Item:
        self.items.append(Item(priority, size_bytes))
        return self.items[-1]

    # Most users have priority 0 and items of one byte: these values come first, so that failures shrink to them.
    puts = dict(priority=st.sampled_from([0, 0, 0, 1, -1]), size_bytes=st.sampled_from([1, 4, 9, 25]))  # noqa: C408, RUF012

    @rule(**puts, number=st.integers(1, 3), run=st.booleans())
    def start_putters(self, priority: int, size_bytes: int, number: int, run: bool) -> None:
        for _ in range(number):
            item = self.new_item(priority, size_bytes)
            self.putters[self.loop.create_task(self.put(item))] = item
        if run:
            self.one_turn()

    async def put(self, item: Item) -> None:
        refused = self.model.put(item, waits=True) == "refused"
        try:
            await self.channel.put(item, item.priority)
        except ChannelClosed as error:
            seen = "put into" if refused else "while this put waited"
            assert (item.state, seen in str(error)) == ("refused", True)  # noqa: PT017 - a put may also succeed
        except asyncio.CancelledError:
            if item.state == "waiting":
                self.model.leave(item, "withdrawn")
            raise
        else:
            assert not refused
            assert item.state in {"held", "taken", "discarded"}

    @rule(number=st.integers(1, 3), run=st.booleans())
    def start_getters(self, number: int, run: bool) -> None:
        for _ in range(number):
            getter = next(self.getter_numbers)
            self.getters[self.loop.create_task(self.get(getter))] = getter
        if run:
            self.one_turn()

    async def get(self, getter: int) -> None:
        self.gets_begun.append(getter)
        try:
            item = await self.channel.get()
        except ChannelClosed:
            assert self.model.closed
            assert not self.model.held
        else:
            assert item is self.model.take()
            self.served_since_rest.append(getter)

    @rule(**puts)
    def put_nowait(self, priority: int, size_bytes: int) -> None:
        item = self.new_item(priority, size_bytes)
        if self.model.put(item, waits=False) == "refused":
            with pytest.raises(ChannelClosed, match="put into"):
                self.channel.put_nowait(item, priority)
        else:
            assert self.channel.put_nowait(item, priority) == (item.state == "held")

    @rule()
    def get_nowait(self) -> None:
        if not self.model.held and self.model.closed:
            with pytest.raises(ChannelClosed, match="drained"):
                self.channel.get_nowait()
            return
        try:
            item = self.channel.get_nowait()
        except anyio.WouldBlock:
            assert len(self.model.held) <= len(self.getters)  # every held item is promised to a getter
        else:
            assert item is self.model.take()

    @rule(max_items=st.integers(0, 5))
    def get_many(self, max_items: int) -> None:
        before = len(self.model.held)
        items = self.channel.get_many_nowait(max_items)
        assert min(max_items, before) >= len(items) >= min(max_items, before - len(self.getters))
        assert all(map(operator.is_, items, self.model.take_many(len(items))))

    @precondition(lambda self: self.model.held or self.model.line)
    @rule(number=st.integers(0, 10))
    def discard(self, number: int) -> None:
        candidates = self.model.held + self.model.line
        item = candidates[number % len(candidates)]
        held = item.state == "held"
        assert self.channel.discard(item, item.priority) == held
        self.item_was_discarded = True
        self.model.leave(item, "discarded")
        assert not self.channel.discard(item, item.priority)

    @precondition(lambda self: self.putters or self.getters)
    @rule(number=st.integers(0, 10))
    def cancel(self, number: int) -> None:
        tasks = [*self.putters, *self.getters]
        task = tasks[number % len(tasks)]
        task.cancel()
        item = self.putters.get(task)
        if item is not None and item.state == "waiting":
            item.put_cancelled = True

    @precondition(lambda self: len(self.items) > 12)  # otherwise most runs would close at once
    @rule()
    def close(self) -> None:
        self.channel.close()
        self.model.close()

    @rule()
    def one_turn(self) -> None:
        self.run(asyncio.sleep(0))

    @rule()
    def come_to_rest(self) -> None:
        self.run(wait_quiescent())
        statistics = self.channel.statistics()
        assert statistics.waiting_putters == len(self.putters) == len(self.model.line)
        assert statistics.waiting_getters == len(self.getters)
        # No task sleeps that could run.
        assert not (self.getters and self.model.held)
        assert not (self.model.closed and (self.getters or self.putters))
        assert not self.model.line or not self.model.fits(_first(self.model.line))
        self.check_fairness()

    def check_fairness(self) -> None:
        """Check that no getter was served before an older getter that still waits."""
        if self.getters and self.served_since_rest and not self.item_was_discarded:
            begun = self.gets_begun.index
            assert max(map(begun, self.served_since_rest)) < min(map(begun, self.getters.values()))
        self.served_since_rest.clear()
        self.item_was_discarded = False

    @invariant()
    def bounds_hold_at_every_instant(self) -> None:
        statistics = self.channel.statistics()
        assert statistics.depth == len(self.channel) == len(self.model.held)
        assert statistics.bytes_held == self.model.bytes_held
        assert statistics.puts == self.model.entered
        assert self.channel.closed == self.model.closed
        if self.model.capacity is not None:
            assert statistics.depth <= statistics.high_water <= self.model.capacity
        if self.model.max_bytes is not None:
            assert statistics.bytes_held <= self.model.max_bytes or statistics.depth == 1

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(coroutine)
        for tasks in (self.putters, self.getters):
            for task in [task for task in tasks if task.done()]:
                tasks.pop(task)
                if not task.cancelled():
                    task.result()

    def teardown(self) -> None:
        try:
            self.come_to_rest()
            self.close()
            self.get_many(len(self.model.held))
            self.come_to_rest()
            ends = {"refused", "taken", "discarded", "withdrawn", "new"}
            assert {item.state for item in self.items} <= ends
            assert not self.putters
            assert not self.getters
        finally:
            self.loop.close()


@by_loop
def test_a_channel_behaves_like_a_list_with_a_door(loop: str) -> None:
    class OnLoop(ChannelMachine):
        new_loop = staticmethod(LOOPS[loop])

    # With fewer examples, the test missed some faults that were put in on purpose.
    usual = settings.default
    stateful.run_state_machine_as_test(OnLoop, settings=settings(usual, max_examples=2 * usual.max_examples))


class Entry:
    def __init__(self, priority: int) -> None:
        self.priority = priority


# An integer pushes with this priority, None pops, and ("discard", number) removes one entry from the middle.
operations = st.lists(st.one_of(st.integers(-2, 2), st.none(), st.tuples(st.just("discard"), st.integers(0, 20))))


@given(operations)
def test_lanes_are_a_list_sorted_by_priority(operations: list[int | tuple[str, int] | None]) -> None:
    lanes: PriorityFifo[Entry] = PriorityFifo()
    expected: list[Entry] = []
    for operation in operations:
        if isinstance(operation, int):
            entry = Entry(operation)
            lanes.push(entry, operation)
            expected.append(entry)
            expected.sort(key=lambda entry: -entry.priority)  # a stable sort
        elif not expected:
            continue
        elif operation is None:
            assert lanes.pop() is expected.pop(0)
        else:
            entry = expected.pop(operation[1] % len(expected))
            assert not lanes.discard(entry, entry.priority + 1)
            assert lanes.discard(entry, entry.priority)
            assert not lanes.discard(entry, entry.priority)
        assert len(lanes) == lanes.count == len(expected)
        assert bool(lanes) == bool(expected)
        for priority in range(-2, 3):
            assert [*lanes.lane(priority)] == [entry for entry in expected if entry.priority == priority]
        if expected:
            assert lanes.head() is expected[0]
            assert lanes.highest == expected[0].priority


def test_empty_lanes_raise() -> None:
    lanes: PriorityFifo[Entry] = PriorityFifo()
    for look in (lanes.pop, lanes.head, lambda: lanes.highest):
        with pytest.raises(IndexError):
            look()
