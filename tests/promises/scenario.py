"""A small world that keeps books: which handlers were called, how often, how many at a time, and for which items.

Its graphs have everything that can get in the way: limits, tiny inboxes, retries, failures, a fan-out and a join,
loops over a list, a stream and streams in a stream, a stateful node, and readers with few places. They run in every
way that the engine has. A seed draws delays, failures, cancels, deadlines, slow readers and injected faults; where
Python has eager tasks, some seeds use them. The promises are then checked in the books.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import penstock as ps
from penstock.testing import faults
from tests.promises.exploring import random_of_loop


class Boom(Exception):
    """The error that a node of the world raises."""


class Injected(Exception):
    """The error that an injected fault raises."""


@dataclass(frozen=True)
class Shape:
    """One of the graphs of the world.

    Attributes:
        graph: the graph.
        handlers: the handlers that run once for each item that gets a result.
        may_fail: the handlers that may be drawn to fail.
        result: returns the expected result of an item, given its index.
    """

    graph: ps.Graph[["Item"], Any]
    handlers: tuple[str, ...]
    may_fail: tuple[str, ...]
    result: Callable[[int], Any]


@dataclass
class World:
    """The books of one interleaving."""

    rng: random.Random
    shape: Shape
    max_in_flight: int = 4
    is_faulty: bool = False
    statistics: Any = None  # of the stream or service, at its end
    injections: list[faults.Injections] = field(default_factory=list)
    calls: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    active: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    inside: set[int] = field(default_factory=set)  # items that have begun and are not yet yielded
    inside_peak: int = 0
    running: Counter[int] = field(default_factory=Counter)  # running handlers, by item
    running_peak: int = 0
    ended: set[int] = field(default_factory=set)
    too_late: list[str] = field(default_factory=list)
    outcomes: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)
    yielded: list[int] = field(default_factory=list)

    @classmethod
    def of_running_loop(cls, shape: str | None = None) -> "World":
        """Make a world that is drawn by the seed of the running loop."""
        rng = random_of_loop(has_eager_tasks=True)
        return cls(rng, SHAPES[shape or rng.choice(list(SHAPES))], is_faulty=rng.random() < 0.4)

    def items(self, count: int, first: int = 0) -> "list[Item]":
        """Draw items: how often each handler waits for an item, and which handlers fail."""
        return [self._item(index) for index in range(first, first + count)]

    def _item(self, index: int) -> "Item":
        rng = self.rng
        fails: dict[str, int] = {}
        if rng.random() < 0.25:
            fails[rng.choice(self.shape.may_fail)] = rng.choice([1, 99])
        return Item(self, index, {handler: rng.randrange(3) for handler in self.shape.handlers}, fails)

    @contextmanager
    def faults(self) -> Generator[None]:
        """Inject faults at random points, if this world was drawn to have faults."""
        if not self.is_faulty:
            yield
            return
        rng = self.rng
        nodes = ("take", "left", "right", "join", "each", "parts_of", "Tally", "gather", "Ledger")
        fault: faults.Fault = rng.choice([faults.Raise(Injected("injected")), faults.Cancel(), faults.Delay(0.3)])
        point: faults.Point = rng.choice(["node.call", "node.call", "node.call", "actor.start"])
        if point == "actor.start":
            fault = faults.Delay(0.3)  # any other fault would end the world before its checks
        chance = rng.choice([0.05, 0.2])
        node = rng.choice(nodes) if point == "node.call" else None
        with faults.inject(
            point, fault, node=node, probability=chance, seed=rng.randrange(1000), optional=True
        ) as injections:
            self.injections.append(injections)
            yield

    @property
    def injected(self) -> int:
        """Return how many faults happened."""
        return sum(map(len, self.injections))

    def end(self, item: int, kind: str, value: object = None) -> None:
        """Note that the caller of an item, or the reader of a stream, has received the item's outcome."""
        self.outcomes.setdefault(item, []).append((kind, value))
        self.yielded.append(item)
        self.inside.discard(item)
        self.ended.add(item)

    def count(self, kind: str) -> int:
        """Return how many items ended with this kind of outcome."""
        return sum(outcome[0] == kind for outcomes in self.outcomes.values() for outcome in outcomes)

    def begin(self, node: str, item: "Item", handler: str) -> None:
        """Note that a handler has begun."""
        if item.index in self.ended:
            self.too_late.append(f"{handler} began for item {item.index}, which had ended")
        self.calls[handler, item.index, ps.current().attempt] += 1
        self.inside.add(item.index)
        self.inside_peak = max(self.inside_peak, len(self.inside))
        self.running[item.index] += 1
        self.running_peak = max(self.running_peak, len(self.running))
        self.active[node] += 1
        self.peak[node] = max(self.peak[node], self.active[node])

    def leave(self, node: str, item: "Item") -> None:
        """Note that a handler has ended."""
        self.active[node] -= 1
        self.running[item.index] -= 1
        if not self.running[item.index]:
            del self.running[item.index]


@dataclass(eq=False)
class Item:
    """One item of the world."""

    world: World
    index: int
    waits: dict[str, int]
    fails: dict[str, int]

    @property
    def fails_for_good(self) -> bool:
        """Whether the item fails in every attempt."""
        return bool(self.fails) and self.fails != {"left": 1}


async def handle(
    node: str, item: Item, handler: str | None = None, parts: AsyncIterator[int] | None = None
) -> list[int]:
    """Run the common part of every async node; return the values that it has read, if it reads a stream."""
    handler = handler or node
    item.world.begin(node, item, handler)
    try:
        read = [] if parts is None else [part async for part in parts]
        for _ in range(item.waits[handler]):
            await asyncio.sleep(0 if item.index % 2 else 0.5)
        if ps.current().attempt <= item.fails.get(handler, 0):
            raise Boom(handler, item.index)
        return read
    finally:
        item.world.leave(node, item)


@ps.node(concurrency=3)
async def take(item: Item) -> Item:
    await handle("take", item)
    return item


@ps.node(retry=ps.Retry(attempts=2, backoff_seconds=0.25))
async def left(item: Item) -> int:
    await handle("left", item)
    return 10 * item.index


@ps.node(concurrency=1, capacity=1)
async def right(item: Item) -> int:
    await handle("right", item)
    return 100 * item.index


@ps.node
def plain(item: Item) -> int:
    item.world.begin("plain", item, "plain")
    item.world.leave("plain", item)
    if item.fails.get("plain"):
        raise Boom("plain", item.index)
    return 1000 * item.index


@ps.node(concurrency=2)
async def join(item: Item, *values: Any) -> tuple[Any, ...]:
    await handle("join", item)
    return (item.index, *values)


@ps.node
def spread(item: Item) -> list[tuple[Item, int]]:
    return [(item, part) for part in range(3)]


@ps.node(concurrency=2)
async def each(part: tuple[Item, int]) -> int:
    await handle("each", part[0], f"each {part[1]}")
    return part[0].index * part[1]


@ps.node(capacity=1)
async def parts_of(item: Item) -> AsyncIterator[tuple[Item, int]]:
    for part in range(3):
        await asyncio.sleep(0 if item.index % 2 else 0.25)
        yield item, part


@ps.node
async def collect(parts: AsyncIterator[int]) -> list[int]:
    return [part async for part in parts]


@ps.node
async def once(part: tuple[Item, int]) -> AsyncIterator[tuple[Item, int]]:
    yield part


@ps.node(concurrency=2)
async def gather(part: tuple[Item, int], values: AsyncIterator[int]) -> int:
    return sum(await handle("gather", part[0], f"gather {part[1]}", values))


@ps.node
async def numbers(parts: AsyncIterator[tuple[Item, int]]) -> AsyncIterator[int]:
    async for _, part in parts:
        yield part


@ps.node
class Ledger:
    """A stateful node that reads a stream: one at a time, on the instance of its scope."""

    async def __call__(self, item: Item, parts: AsyncIterator[int]) -> int:
        return item.index * sum(await handle("ledger", item, parts=parts))


ledger = Ledger()


@ps.node
class Tally:
    """A stateful node: one item at a time, on the instance of its scope."""

    async def __aenter__(self) -> "Tally":
        self.open = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.open = False

    async def __call__(self, item: Item) -> int:
        assert self.open
        await handle("tally", item)
        assert self.open
        return 7 * item.index


tally = Tally()


@ps.node
async def lingers(item: Item) -> None:
    if item.index in item.world.ended:
        item.world.too_late.append(f"lingers began for item {item.index}, which had ended")
    item.world.active["lingers"] += 1
    try:
        await asyncio.sleep(1000)
    finally:
        item.world.active["lingers"] -= 1


async def _begin(work: list[Any]) -> list[asyncio.Task[Any]]:
    """Begin tasks in a helper, so that the engine does not see it in the code of the handler."""
    return [asyncio.create_task(one) for one in work]


@ps.node(concurrency=2)
async def choose(item: Item) -> list[int]:
    await handle("choose", item)
    left_over = await _begin([ps.call(lingers, item), ps.call(lingers, item)]) if item.index % 3 else []
    if item.index % 2:
        values = [await ps.call(node, item) for node in (left, right, tally)]
    else:
        values = await asyncio.gather(ps.call(left, item), ps.call(right, item=item), ps.call(tally, item))
    assert not any(task.done() for task in left_over)
    return values


@ps.graph
async def called(item: Item) -> tuple[Any, ...]:
    taken = await take(item)
    return await join(taken, await choose(taken), plain(taken))


@ps.graph
async def fan_out(item: Item) -> tuple[Any, ...]:
    taken = await take(item)
    return await join(taken, await left(taken), await right(taken), plain(taken))


@ps.graph
async def mapped(item: Item) -> tuple[Any, ...]:
    taken = await take(item)
    return await join(taken, await ps.map_each(each, spread(taken), concurrency=2), plain(taken))


@ps.graph
async def stateful(item: Item) -> tuple[Any, ...]:
    taken = await take(item)
    return await join(taken, await tally(taken), await left(taken))


@ps.graph
async def streamed(item: Item) -> tuple[Any, ...]:
    taken = await take(item)
    return await join(taken, await collect(ps.map_each(each, parts_of(taken), concurrency=2)), plain(taken))


@ps.graph
async def nested(item: Item) -> tuple[Any, ...]:
    async def inner(part: tuple[Item, int]) -> int:
        return await gather(part, ps.map_each(each, once(part)))

    taken = await take(item)
    gathered = await collect(ps.map_each(inner, parts_of(taken), concurrency=3))
    return await join(taken, gathered, await ledger(taken, numbers(parts_of(taken))))


EACH = ("each 0", "each 1", "each 2")
PARTS = Shape(mapped, ("take", *EACH, "plain", "join"), ("take", "each 1", "plain", "join"),
              lambda i: (i, [0, i, 2 * i], 1000 * i))  # fmt: skip
SHAPES = {
    "fan-out": Shape(fan_out, ("take", "left", "right", "plain", "join"), ("take", "left", "right", "plain", "join"),
                     lambda i: (i, 10 * i, 100 * i, 1000 * i)),
    "mapped": PARTS,
    "streamed": replace(PARTS, graph=streamed),
    "nested": Shape(nested, ("take", *EACH, "gather 0", "gather 1", "gather 2", "ledger", "join"),
                    ("take", "each 1", "gather 1", "ledger", "join"), lambda i: (i, [0, i, 2 * i], 3 * i)),
    "stateful": Shape(stateful, ("take", "tally", "left", "join"), ("take", "tally", "left", "join"),
                      lambda i: (i, 7 * i, 10 * i)),
    "called": Shape(called, ("take", "choose", "left", "right", "tally", "plain", "join"),
                    ("take", "choose", "left", "right", "tally", "join"),
                    lambda i: (i, [10 * i, 100 * i, 7 * i], 1000 * i)),
}  # fmt: skip

LIMITS = {"take": 3, "choose": 2, "right": 1, "join": 2, "each": 2, "tally": 1, "gather": 2, "ledger": 1}


def check_outcomes(world: World, items: list[Item]) -> None:
    """Check that every item has exactly one outcome, the right one."""
    blamed = 0
    for item in items:
        outcomes = world.outcomes.get(item.index, [])
        assert len(outcomes) == 1, f"item {item.index} has the outcomes {outcomes}"
        kind, value = outcomes[0]
        if kind == "done":
            assert value == world.shape.result(item.index)
            assert not item.fails_for_good
        elif kind == "failed" and isinstance(value, Boom):
            assert item.fails_for_good, f"item {item.index} failed with {value!r}, but should not"
            assert value.args[1] == item.index
        elif kind == "failed":
            assert isinstance(value, Injected | ps.NodeCancelledError), repr(value)
            blamed += 1
    assert blamed <= world.injected, "more items failed by faults than there were faults"
    assert set(world.outcomes) == {item.index for item in items}
