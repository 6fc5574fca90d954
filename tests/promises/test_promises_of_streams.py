"""The promises for streams of values: bounds, order, exactly once, cancelled items, and no open streams at the end."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import cancelled_at_every_step
from tests.promises.exploring import Explorer, random_of_loop

CAPACITY = 3
READERS = 2


class Opened(Exception):
    """The error that a generator raises before its first value."""


class World:
    """One random world: generators that fail, and readers that leave, fail, are slow, or are cancelled."""

    def __init__(self, rng: random.Random, clients: int) -> None:
        self.random = rng
        self.open = 0
        self.ahead = 0
        self.reading = 0
        self.most_reading = 0
        self.given = [0] * clients
        self.attempts = [0] * clients
        self.ends: Counter[str] = Counter()  # how clients ended

    async def pause(self) -> None:
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)


world: World


@ps.node(capacity=CAPACITY, retry=ps.Retry(attempts=2))
async def numbers(client: int) -> AsyncIterator[int]:
    mine = world
    mine.open += 1
    mine.attempts[client] += 1
    fails = mine.random.randrange(8)
    try:
        await mine.pause()
        if not fails:
            raise Opened
        for number in range(mine.random.randrange(12)):
            mine.given[client] = number + 1
            yield number
            await mine.pause()
        if fails == 1:
            raise ValueError("in the middle")
    finally:
        mine.open -= 1  # before the pause, which may be cancelled
        await mine.pause()


@ps.node
async def same(number: int) -> int:
    await world.pause()
    return number


@ps.node
async def once(number: int) -> AsyncIterator[int]:
    yield await same(number)


@ps.node(concurrency=READERS)
async def only(values: AsyncIterator[int]) -> int:
    mine = world
    mine.reading += 1
    mine.most_reading = max(mine.most_reading, mine.reading)
    try:
        return sum([value async for value in values])
    finally:
        mine.reading -= 1


plain = ps.graph(numbers)


@ps.graph
async def mapped(client: int) -> AsyncIterator[int]:
    return ps.map_each(same, numbers(client), concurrency=2)


@ps.graph
async def nested(client: int) -> AsyncIterator[int]:
    async def body(number: int) -> int:
        return await only(once(number))

    return ps.map_each(body, numbers(client), concurrency=2)


async def read(service: engine.Service[[int], AsyncIterator[int]], client: int) -> None:
    """Run one client: whatever it does, it reads values in order, once each, and then at most its own error."""
    mine = world
    graph = mine.random.choice([plain, mapped, nested])
    leaves_at = mine.random.choice([0, 2, 5, 100])
    is_slow = not mine.random.randrange(4)
    got: list[int] = []
    values = service.stream(graph(client))
    try:
        await values.wait_started()
        async for value in values:
            got.append(value)
            if len(got) > leaves_at:
                mine.ends["left"] += 1
                break
            await mine.pause()
            if is_slow:
                await asyncio.sleep(0.001)
            if graph is plain:
                mine.ahead = max(mine.ahead, mine.given[client] - len(got))
        else:
            mine.ends["read to the end"] += 1
    except (Opened, ValueError) as error:
        mine.ends[type(error).__name__] += 1
    except asyncio.CancelledError:
        # A cancelled task keeps its traceback, which refers to the stream that it should drop; so end normally here.
        mine.ends["cancelled"] += 1
    finally:
        assert got == list(range(len(got)))
        if mine.random.randrange(2):
            await values.aclose()


async def _world(rng: random.Random, clients: int = 12) -> World:
    global world  # noqa: PLW0603 - one world at a time, seen by the nodes
    mine = world = World(rng, clients)
    async with engine.deploy(plain, mapped, nested, max_in_flight=3) as service:
        tasks = [asyncio.create_task(read(service, client)) for client in range(clients)]
        for task in tasks:
            if not mine.random.randrange(4):
                await mine.pause()
                task.cancel()
        await asyncio.wait(tasks)
        failures = [task.exception() for task in tasks if not task.cancelled()]
        del task, tasks
        await testing.wait_quiescent()
        assert not any(failures), failures
        # 2: a channel holds at most its capacity; the generator may have one more value.
        assert mine.ahead <= CAPACITY + 1
        assert (mine.most_reading <= READERS, mine.reading) == (True, 0)
        # 4: an attempt is repeated only before the first value.
        assert max(mine.attempts) <= 2
        # 5 and 6: a reader that left has freed its place, and every generator is closed.
        statistics = service.statistics()
        assert (statistics.admission.in_flight, statistics.admission.queued, mine.open) == (0, 0, 0)
        # 1: every admitted call has one outcome; other calls were cancelled before they had a place, or began.
        settled = statistics.completed + statistics.failed
        assert settled <= statistics.admission.admitted <= settled + statistics.cancelled <= clients
    return mine


def test_promises_hold_for_streams_under_every_interleaving(explore: Explorer) -> None:
    async def main() -> World:
        mine = await _world(random_of_loop(has_eager_tasks=True))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return mine

    ends = ("left", "read to the end", "Opened", "ValueError", "cancelled")
    reaches = {f"a reader: {end}": lambda world, end=end: world.ends[end] > 0 for end in ends}
    full = {
        "a full channel": lambda world: world.ahead == CAPACITY + 1,
        "as many readers as may": lambda world: world.most_reading == READERS,
    }
    explore(main, reaches={**reaches, **full, "a second attempt": lambda world: max(world.attempts) == 2})


@pytest.mark.parametrize("seed", range(5))
async def test_promises_hold_for_streams_on_real_loops(seed: int) -> None:
    await _world(random.Random(seed))
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_promises_hold_for_streams_cancelled_at_every_step() -> None:
    for outcome in cancelled_at_every_step(lambda: _world(random.Random(1), clients=3)):
        assert world.open == 0, outcome
