"""`stream.drain()`: the source gives no more items, items in flight finish, and the reader's loop ends."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from penstock.testing import run_virtual, wait_quiescent
from tests.kit import Gate, begun, cancelled_at_every_step, model, numbers, same, virtual


class Drained(Gate):
    """A graph whose items wait at a gate, and sources that count the items taken and say whether they closed."""

    def __init__(self) -> None:
        super().__init__()
        self.of = self.graph()
        self.taken = 0
        self.closed = False

    def plain(self) -> Iterator[ps.Call[int]]:
        try:
            for number in range(1000):
                self.taken += 1
                yield self.of(number)
        finally:
            self.closed = True

    async def waiting(self, count: int = 5) -> AsyncIterator[ps.Call[int]]:
        try:
            for number in range(count):
                self.taken += 1
                yield self.of(number)
            await asyncio.Event().wait()
        finally:
            self.closed = True


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("is_deployed", [True, False])
async def test_what_is_in_flight_is_finished_and_the_loop_ends(
    is_deployed: bool, is_plain: bool, ordered: bool
) -> None:
    gate = Drained()
    async with engine.deploy(gate.of) as service:
        calls: Any = gate.plain() if is_plain else gate.waiting()
        async with (service if is_deployed else engine).stream(calls, max_in_flight=5, ordered=ordered) as stream:
            await wait_quiescent()
            drains = await begun(stream.drain(), stream.drain(timeout_seconds=0))
            assert gate.closed
            assert gate.taken == 5
            assert not any(drain.done() for drain in drains)
            gate.open()
            assert await asyncio.gather(*drains) == [0, 0]  # no reader; the second drain waits for the first
            assert [outcome.value async for outcome in stream.outcomes()] == list(range(5))
            assert stream.position == 5


@pytest.mark.parametrize("order_by", [None, lambda call: call.arguments[0] % 2])
@pytest.mark.parametrize("is_deployed", [True, False])
@virtual
async def test_what_the_timeout_leaves_is_not_finished(is_deployed: bool, order_by: Any) -> None:
    begun: list[int] = []

    @ps.node(retry=ps.Retry(5), fallback=lambda error: -1)
    async def work(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(0.3 if number == 1 else 100)
        return number

    graph = ps.graph(work)

    async def calls() -> AsyncIterator[ps.Call[int]]:
        for number in range(6):
            taken.append(number)
            yield graph(number)
        await asyncio.Event().wait()

    taken: list[int] = []
    options: Any = {"order_by": order_by, "max_in_flight": 5}
    async with engine.deploy(graph, max_in_flight=2) as service:
        async with (service if is_deployed else engine).stream(calls(), **options) as stream:
            await asyncio.sleep(0.5)
            began = asyncio.get_running_loop().time()
            left = await stream.drain(timeout_seconds=2)
            assert asyncio.get_running_loop().time() - began == 2
            outcomes = [outcome async for outcome in stream.outcomes()]
            assert [outcome.index for outcome in outcomes] == taken
            errors = [outcome.error for outcome in outcomes]
            assert all(isinstance(error, ps.NotFinished) == (number != 1) for number, error in enumerate(errors))
            assert left == len(outcomes) - 1
            assert len(outcomes) >= 3
            assert "item 0 of graph 'work' was in flight when the stream was drained" in str(errors[0])
        statistics = service.statistics()
        if is_deployed:
            assert (statistics.completed, statistics.failed, statistics.cancelled) == (1, 0, left)
        assert not statistics.admission.in_flight
        assert not statistics.admission.queued
    assert len(begun) == len(set(begun))


@pytest.mark.parametrize("order_by", [None, lambda call: call.arguments[0]])
@pytest.mark.parametrize("is_plain", [True, False])
@virtual
async def test_a_call_whose_actors_have_not_started_is_not_finished(is_plain: bool, order_by: Any) -> None:
    taken: list[int] = []

    graph = ps.graph(model(enter=partial(asyncio.sleep, 100)))

    def calls() -> Iterator[ps.Call[int, str]]:
        for number in range(9):
            taken.append(number)
            yield ps.tagged(graph(number), "first")

    async def one_by_one() -> AsyncIterator[ps.Call[int, str]]:
        for call in calls():
            yield call

    source: Any = calls() if is_plain else one_by_one()
    async with engine.stream(source, order_by=order_by) as stream:
        await asyncio.sleep(1)
        assert await stream.drain(timeout_seconds=2) == 1
        (outcome,) = [outcome async for outcome in stream.outcomes()]
        assert isinstance(outcome.error, ps.NotFinished)
        assert (outcome.index, outcome.tag) == (0, "first")
        assert stream.statistics().submitted == 1
    assert taken == [0]
    assert asyncio.get_running_loop().time() == 3


async def test_a_close_wins() -> None:
    gate = Drained()
    stream = engine.stream(gate.waiting())
    async with stream:
        await wait_quiescent()
        [draining] = await begun(stream.drain())
    assert await draining == 0
    assert await stream.drain() == 0
    assert gate.closed


async def test_a_reader_drains_its_own_stream() -> None:
    gate = Drained()
    gate.open()
    got: list[int] = []
    async with engine.stream(gate.waiting(100), max_in_flight=4) as stream:
        async for value in stream:
            got.append(value)
            if value == 10:
                assert await stream.drain() == 0
    assert got == list(range(gate.taken))
    assert 11 <= gate.taken <= 15


async def test_one_that_was_not_begun_takes_nothing() -> None:
    for calls in (gate := Drained()).plain(), gate.waiting():
        async with engine.stream(calls) as stream:
            assert await stream.drain() == 0
            assert [value async for value in stream] == []
    assert not gate.taken


async def test_what_is_refused() -> None:
    @ps.node
    async def inside(end: str) -> None:
        await getattr(streams[-1], end)()

    graph = ps.graph(inside)

    streams: list[engine.Stream[None]] = []
    for end in ("drain", "aclose"):
        streams.append(engine.stream([graph(end)]))
        with pytest.raises(ps.ReentrantCallError, match="drained or closed from inside"):
            await anext(streams[-1])
    async with engine.stream(ps.graph(numbers)(1)) as stream:
        with pytest.raises(ps.OptionsError, match="for a stream of calls"):
            await stream.drain()
    with pytest.raises(ps.OptionsError, match="timeout_seconds"):
        await engine.stream([graph("drain")]).drain(timeout_seconds=-1)


async def test_only_a_drain_of_the_stream_ends_it_cleanly() -> None:
    gate = Drained()
    async with engine.deploy(gate.of) as service:
        drained, cut, listed = service.stream(gate.waiting()), service.stream(gate.waiting()), service.map(gate.plain())
        async with drained, cut:
            [reading] = await begun(listed)
            ends: list[asyncio.Task[Any]] = [*await begun(drained.drain()), *await begun(service.drain())]
            gate.open()
            await asyncio.wait(ends)
            assert [value async for value in drained] == list(range(5))
            assert [await anext(cut) for _ in range(5)] == list(range(5))
            with pytest.raises(ps.EngineClosedError):
                await anext(cut)
            with pytest.raises(ps.EngineClosedError, match="takes no more calls from its source"):
                await reading


def test_a_cancel_at_any_step_leaves_nothing() -> None:
    async def main() -> None:
        gate = Drained()
        gate.open()
        async with (
            engine.deploy(gate.of, max_in_flight=2) as service,
            service.stream(gate.waiting(), max_in_flight=4, order_by=lambda call: call.arguments[0] % 2) as stream,
        ):
            assert await anext(stream) == 0
            await stream.drain()
            taken = [value async for value in stream]
            assert taken == list(range(1, gate.taken))

    for _ in cancelled_at_every_step(main):
        pass


def test_every_call_that_was_taken_has_one_outcome_with_its_tag(effort: int) -> None:
    """Streams drain at random moments, with random sources, places, inboxes, policies and readers."""

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        tags: list[object] = []  # of the calls that were taken
        policy: Any = {
            "retry": rng.choice([None, ps.Retry(2, backoff_seconds=0.1)]),
            "hedge": rng.choice([None, ps.Hedge(after_seconds=0.5)]),
        }

        @ps.node(concurrency=rng.choice([1, 3]), capacity=rng.choice([1, 4]), **policy)
        async def work(number: int) -> int:
            await asyncio.sleep(rng.choice([0, 0.3, 2]))
            if rng.random() < 0.2:
                raise ValueError("broken")
            return number

        first = ps.graph(work)
        second = same >> work >> same

        graphs = rng.sample([first, second, ps.graph(same)], rng.randint(1, 3))

        def calls() -> Iterator[ps.Call[int, Any]]:
            for number in range(40):
                tags.append(rng.choice([object(), None]))
                call = rng.choice(graphs)(number)
                yield call if tags[-1] is None else ps.tagged(call, tags[-1])

        async def slowly() -> AsyncIterator[ps.Call[int, Any]]:
            for call in calls():
                yield call
                await asyncio.sleep(rng.choice([0, 0, 0.2]))

        options: Any = {"max_in_flight": rng.choice([1, 4, 20]), "ordered": rng.random() < 0.5}
        if rng.random() < 0.3:
            options["order_by"] = lambda call: call.arguments[0] % 3
        timeout = rng.choice([None, 0, 0.5, 3])
        reads_before = rng.randrange(8)
        async with engine.deploy(*graphs, max_in_flight=rng.choice([1, 4])) as service:
            made = (service if rng.random() < 0.5 else engine).stream(
                calls() if rng.random() < 0.5 else slowly(), **options
            )
            async with made as stream:
                reader = stream.outcomes()
                before = [await anext(reader) for _ in range(reads_before)]
                left = await stream.drain(timeout)
                after = [outcome async for outcome in reader]
                found = sorted([*before, *after], key=lambda outcome: outcome.index)
                assert [(outcome.index, outcome.tag) for outcome in found] == [*enumerate(tags)]
                assert sum(isinstance(outcome.error, ps.NotFinished) for outcome in after) == left
                assert timeout is not None or not left
            assert not service.statistics().admission.in_flight

    for seed in range(100 * effort):
        run_virtual(partial(main, seed), timeout_seconds=10_000)
