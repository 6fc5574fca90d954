"""A small world that keeps books: what was called, how often, how many at a time, and for whom.

One graph with everything that can get in the way (a limit, a tiny inbox, retries, failures, a fan-out and a join) is
run in every way that the engine has, with delays, failures and cancels drawn from a seed. The promises are then read
off the books.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import penstock as ps
from penstock import engine, testing


class Boom(Exception):
    """What a node of the world raises."""


@dataclass
class World:
    """The books of one run."""

    rng: random.Random
    max_in_flight: int = 4
    calls: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    begun: dict[str, list[int]] = field(default_factory=dict)
    active: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    inside: set[int] = field(default_factory=set)  # begun, and not yet yielded
    inside_peak: int = 0
    running: Counter[int] = field(default_factory=Counter)  # handlers that run, by item
    running_peak: int = 0
    ended: set[int] = field(default_factory=set)
    too_late: list[str] = field(default_factory=list)
    outcomes: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)
    yielded: list[int] = field(default_factory=list)
    attempts_of_left: dict[int, int] = field(default_factory=dict)  # by `left`, as the books must say

    @classmethod
    def of_running_loop(cls, **arguments: Any) -> "World":
        """Make a world whose fate hangs on the seed of the running loop, so that one seed replays everything."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, testing.SeededLoop)
        return cls(random.Random(loop.seed), **arguments)

    def item(self, index: int, *, failures: bool = True) -> "Item":
        """Draw one item: how often each node waits for it, and which fail."""
        fails: dict[str, int] = {}
        if failures and self.rng.random() < 0.3:
            fails[self.rng.choice(["take", "left", "right", "plain", "join"])] = self.rng.choice([1, 99])
        self.attempts_of_left[index] = 2 if fails.get("left") else 1
        waits = {node: self.rng.randrange(3) for node in ("take", "left", "right", "join")}
        return Item(self, index, waits, fails)

    def end(self, item: int, kind: str, value: object = None) -> None:
        """The caller of an item, or the reader of a stream, has got its outcome."""
        self.outcomes.setdefault(item, []).append((kind, value))
        self.yielded.append(item)
        self.inside.discard(item)
        self.ended.add(item)

    def begin(self, node: str, item: "Item") -> None:
        """A handler has begun."""
        if item.index in self.ended:
            self.too_late.append(f"{node} began for item {item.index}, which had ended")
        self.calls[node, item.index, ps.current().attempt] += 1
        self.begun.setdefault(node, []).append(item.index)
        self.inside.add(item.index)
        self.inside_peak = max(self.inside_peak, len(self.inside))
        self.running[item.index] += 1
        self.running_peak = max(self.running_peak, len(self.running))
        self.active[node] += 1
        self.peak[node] = max(self.peak[node], self.active[node])

    def leave(self, node: str, item: "Item") -> None:
        """A handler has ended."""
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
        """Whether no attempt saves it."""
        return bool(self.fails) and self.fails != {"left": 1}

    @property
    def result(self) -> tuple[int, ...]:
        """What the graph makes of it."""
        return (self.index, 10 * self.index, 100 * self.index, 1000 * self.index)


async def handle(node: str, item: Item) -> None:
    """What every async node does."""
    item.world.begin(node, item)
    try:
        for _ in range(item.waits[node]):
            await asyncio.sleep(0 if item.index % 2 else 0.5)
        if ps.current().attempt <= item.fails.get(node, 0):
            raise Boom(node, item.index)
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
    item.world.begin("plain", item)
    item.world.leave("plain", item)
    if item.fails.get("plain"):
        raise Boom("plain", item.index)
    return 1000 * item.index


@ps.node(concurrency=2)
async def join(item: Item, a: int, b: int, c: int) -> tuple[int, ...]:
    await handle("join", item)
    return (item.index, a, b, c)


@ps.graph
async def world_graph(item: Item) -> tuple[int, ...]:
    taken = await take(item)
    return await join(taken, await left(taken), await right(taken), plain(taken))


LIMITS = {"take": 3, "right": 1, "join": 2}


async def as_stream(world: World, items: list[Item], *, ordered: bool = True) -> engine.StreamStatistics:
    """Run the items as a stream, and write down what comes out."""
    stream = engine.stream((world_graph(item) for item in items), max_in_flight=world.max_in_flight, ordered=ordered)
    async with stream:
        async for outcome in stream.outcomes():
            kind = "done" if outcome.error is None else "failed"
            world.end(outcome.index, kind, outcome.value if outcome.error is None else outcome.error)
    return stream.statistics()


async def as_calls(world: World, items: list[Item], *, disturbed: bool = True) -> engine.ServiceStatistics:
    """Run the items as calls of a deployment; some callers go away, and some have a deadline."""
    async with engine.deploy(world_graph, max_in_flight=world.max_in_flight) as service:
        await _call_all(world, items, service, disturbed=disturbed)
    return service.statistics()


async def as_runs(world: World, items: list[Item], *, disturbed: bool = True) -> None:
    """Run the items with `engine.run`, all at once; some callers go away, and some have a deadline."""
    await _call_all(world, items, engine, disturbed=disturbed)


async def _call_all(world: World, items: list[Item], runner: Any, *, disturbed: bool) -> None:
    submitted: set[int] = set()

    async def call(item: Item) -> None:
        submitted.add(item.index)
        fate = world.rng.random() if disturbed else 1.0
        options = {"timeout_seconds": world.rng.choice([0.25, 0.75, 1.5])} if fate < 0.2 else {}
        try:
            value = await runner.run(world_graph(item), **options)
        except ps.DeadlineExceeded as error:
            world.end(item.index, "expired", error)
        except Boom as error:
            world.end(item.index, "failed", error)
        except asyncio.CancelledError:
            world.end(item.index, "cancelled")
        else:
            world.end(item.index, "done", value)

    async def canceller(task: asyncio.Task[None], item: int, after: int) -> None:
        while item not in submitted:  # a task that is cancelled before its first step calls nobody
            await asyncio.sleep(0)
        for _ in range(after):
            await asyncio.sleep(0 if after % 2 else 0.25)
        task.cancel()

    async with asyncio.TaskGroup() as group:
        for item in items:
            task = group.create_task(call(item))
            if disturbed and world.rng.random() < 0.3:
                group.create_task(canceller(task, item.index, world.rng.randrange(12)))


def check_outcomes(world: World, items: list[Item]) -> None:
    """Every item has one outcome, and the right one."""
    for item in items:
        outcomes = world.outcomes.get(item.index, [])
        assert len(outcomes) == 1, f"item {item.index} has the outcomes {outcomes}"
        kind, value = outcomes[0]
        if kind == "done":
            assert value == item.result
            assert not item.fails_for_good
        elif kind == "failed":
            assert item.fails_for_good, f"item {item.index} failed with {value!r}, but should not"
            assert value.args[1] == item.index
    assert set(world.outcomes) == {item.index for item in items}
