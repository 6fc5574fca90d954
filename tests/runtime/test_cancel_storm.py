"""Under a storm of random cancels every later call works, and no task keeps a cancel that is not its own."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel

import penstock as ps
from penstock import engine, testing
from tests.kit import outcomes_of


def cancels(effort: int) -> int:
    """The number of cancels of each kind of storm on each loop: 100,000 with `make test-long`."""
    return 200 if effort == 1 else 5_000 * effort


class Storm:
    """The state that the handlers of a storm share: random numbers, and counts of cancels and complaints."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Reset the state for a new storm."""
        self.rng = random.Random(seed)
        self.cancels = 0
        self.complaints: Counter[str] = Counter()

    def turns(self) -> int:
        """Draw the number of times that a handler suspends."""
        return self.rng.choice((0, 0, 1, 2, 3, 5))

    async def suspends(self) -> None:
        for _ in range(self.turns()):
            await asyncio.sleep(0)


storm = Storm()


@contextmanager
def checked() -> Iterator[None]:
    """Complain if a handler begins with a cancel that was meant for another handler, or changes its task."""
    task = asyncio.current_task()
    if task.cancelling():
        storm.complaints["began with a cancel"] += 1
    try:
        yield
    except asyncio.CancelledError:
        storm.cancels += 1
        raise
    finally:
        if asyncio.current_task() is not task:
            storm.complaints["changed its task"] += 1


@ps.node
async def plain(x: int) -> int:
    with checked():
        await storm.suspends()
    return x


@ps.node
async def timed(x: int) -> int:
    with checked():
        try:
            async with asyncio.timeout(storm.rng.choice((0, 60))):
                await storm.suspends()
        except TimeoutError:
            await asyncio.sleep(0)
    return x


@ps.node
async def grouped(x: int) -> int:
    with checked():
        async with asyncio.TaskGroup() as group:
            for _ in range(storm.turns()):
                group.create_task(asyncio.sleep(0))
    return x


@ps.node
async def scoped(x: int) -> int:
    with checked(), anyio.move_on_after(storm.rng.choice((0, 60))):
        for _ in range(storm.turns()):
            await anyio.lowlevel.checkpoint()
    return x


@ps.node(concurrency=3, capacity=2)
async def narrow(x: int) -> int:
    with checked():
        await storm.suspends()
    return x


@ps.node(timeout_seconds=60, retry=ps.Retry(attempts=2))
async def fails(x: int) -> int:
    with checked():
        await storm.suspends()
        if x >= 0 and storm.rng.random() < 0.5:
            raise LookupError(x)
    return x


@ps.node
async def total(*values: int) -> int:
    return sum(values)


@ps.graph
async def stormy(x: int) -> int:
    a = await plain(x)
    b, c, d, e = await timed(a), await grouped(a), await scoped(a), await narrow(a)
    f = await ps.map_each(narrow, [a, a, a])
    return await total(b, c, d, e, f[0], f[1], f[2], await fails(a))


CALM = -7  # `fails` returns negative numbers


async def cancel_callers(call, wanted: int) -> None:
    """Keep forty callers busy, and cancel them at random."""

    async def caller() -> None:
        while storm.cancels < wanted:
            task = asyncio.create_task(call(1))
            for _ in range(storm.rng.randrange(25)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                error = task.exception()
                if error is not None and not isinstance(error, LookupError):
                    raise error

    async with asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(caller())


async def check_calm() -> None:
    assert not storm.complaints
    for _ in range(20):
        assert await engine.run(stormy(CALM)) == 8 * CALM
    assert not storm.complaints
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_storm_of_cancelled_calls_of_a_deployment(effort: int) -> None:
    storm.begin(2)
    async with engine.deploy(stormy, max_in_flight=16) as service:
        await cancel_callers(service, cancels(effort))
        for _ in range(20):
            assert await service(CALM) == 8 * CALM
        await testing.wait_quiescent()
        actors = service.statistics().actors
        assert {actor.node: actor.in_flight for actor in actors if actor.in_flight} == {}
        assert {actor.node: actor.inbox.depth for actor in actors if actor.inbox.depth} == {}
        assert service.statistics().admission.in_flight == 0
    await check_calm()


async def test_a_storm_of_failures_that_cancel_what_else_runs_for_their_item(effort: int) -> None:
    """Items of a stream share their workers: a late cancel would hit the next item."""
    storm.begin(3)

    def calls():
        while storm.cancels < cancels(effort) / 8:  # few items are cancelled: most have nothing left to do
            yield stormy(1)
        for _ in range(20):
            yield stormy(CALM)

    outcomes = await outcomes_of(engine.stream(calls(), max_in_flight=32, on_error="raise"))
    assert all(outcome.value == 8 * CALM for outcome in outcomes[-20:])
    assert all(isinstance(o.error, LookupError) for o in outcomes if o.error is not None)
    assert all(o.value in (8, 8 * CALM) for o in outcomes if o.error is None)
    await check_calm()


def test_a_storm_in_every_order(effort: int) -> None:
    async def main() -> None:
        storm.begin(asyncio.get_running_loop().seed)  # type: ignore[attr-defined]
        await cancel_callers(lambda x: engine.run(stormy(x)), 20)
        await check_calm()

    testing.interleavings(main, count=3 * effort)
