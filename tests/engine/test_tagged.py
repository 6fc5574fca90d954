"""`ps.tagged`: a call carries an object past its nodes, and the object comes back with the outcome."""

import asyncio
import gc
import pickle
import random
import weakref
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
from opentelemetry import trace

import penstock as ps
from penstock import engine, telemetry
from penstock.testing import run_virtual, wait_quiescent
from tests.kit import added, paused


class Message:
    """A tag that equals no copy of itself, and cannot be pickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("a message does not pickle")


@ps.graph
async def chain(number: int) -> int:
    return added(added(number))


waiting = paused >> added


def test_each_outcome_has_the_tag_of_its_call(effort: int) -> None:
    """Calls with and without a tag share a stream; its source, options and nodes are random."""

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        retry, hedge = (
            rng.choice([None, ps.Retry(2, backoff_seconds=0.1)]),
            rng.choice([None, ps.Hedge(after_seconds=0.5)]),
        )

        @ps.node(concurrency=rng.choice([1, 3]), capacity=rng.choice([1, 4]), retry=retry, hedge=hedge)
        async def work(number: int) -> int:
            await asyncio.sleep(rng.choice([0, 0.3, 2]))
            if rng.random() < 0.3:
                raise ValueError("broken")
            return number

        working = work >> added
        graphs = rng.sample([chain, waiting, working], rng.randint(1, 3))
        tags: dict[int, Message | None] = {}

        def calls() -> Iterator[ps.Call[int, Any]]:
            for number in range(40):
                tags[number] = Message(number) if rng.random() < 0.8 else None
                call = rng.choice(graphs)(number)
                yield call if tags[number] is None else ps.tagged(call, tags[number])

        async def slowly() -> AsyncIterator[ps.Call[int, Any]]:
            for call in calls():
                yield call
                await asyncio.sleep(rng.choice([0, 0, 0.2]))

        options: Any = {"max_in_flight": rng.choice([1, 4, 20]), "ordered": rng.random() < 0.5}
        options["order_by"] = rng.choice([None, None, lambda call: call.arguments[0] % 3])
        async with engine.deploy(*graphs, max_in_flight=rng.choice([1, 4])) as service:
            made: engine.Stream[int, Any] = (service if rng.random() < 0.5 else engine).stream(
                calls() if rng.random() < 0.5 else slowly(), **options
            )
            async with made as stream:
                found: list[engine.Outcome[int, Any]] = []
                reader = stream.outcomes()
                if rng.random() < 0.5:
                    found += [await anext(reader) for _ in range(rng.randrange(8))]
                    await stream.drain(rng.choice([0, 0.5, 3]))
                found += [outcome async for outcome in reader]
                assert len(found) == len(tags)
                assert all(outcome.tag is tags[outcome.index] for outcome in found)

    for seed in range(100 * effort):
        run_virtual(partial(main, seed), timeout_seconds=10_000)


@pytest.mark.parametrize("is_tagged_first", [True, False])
async def test_a_call_has_a_tag_and_headers(is_tagged_first: bool) -> None:
    message = Message(0)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}

    @ps.node
    def trace_id() -> int:
        return trace.get_current_span().get_span_context().trace_id

    call: ps.Call[int, Message]
    if is_tagged_first:
        call = telemetry.continued(ps.tagged(ps.graph(trace_id)(), message), headers)
    else:
        call = ps.tagged(telemetry.continued(ps.graph(trace_id)(), headers), message)
    async with engine.stream([call], trace_items=True) as stream:
        (outcome,) = [outcome async for outcome in stream.outcomes()]
    assert outcome.tag is message
    assert outcome.value == 0x0AF7651916CD43DD8448EB211C80319C


async def test_it_is_neither_compared_nor_pickled() -> None:
    call = ps.tagged(chain(1), Message(1))
    assert call.tag.number == 1
    read: ps.Call[int] = pickle.loads(pickle.dumps(call))
    assert (read.graph, read.arguments, read.tag) == (chain, (1,), None)
    async with engine.stream([call, chain(1)]) as stream:
        with_tag, without = [outcome async for outcome in stream.outcomes()]
    assert without.tag is None
    assert with_tag == engine.Outcome(0, 3, None)
    assert hash(with_tag) == hash(engine.Outcome(0, 3, None))
    again = pickle.loads(pickle.dumps(with_tag))
    assert (again, again.tag) == (with_tag, None)
    assert await engine.run(call) == await call == 3


def test_only_a_call_has_a_tag() -> None:
    with pytest.raises(TypeError, match=r"ps\.tagged takes a call of a graph"):
        ps.tagged(added(1), 1)  # type: ignore[arg-type]


async def test_order_by_sees_it() -> None:
    seen: list[int] = []

    def key_of(call: ps.Call[Any, Message]) -> int:
        seen.append(call.tag.number)
        return call.tag.number

    async with engine.stream([ps.tagged(waiting(1), Message(7))], order_by=key_of) as stream:
        assert [value async for value in stream] == [2]
    assert seen == [7]


@pytest.mark.parametrize("graph", [chain, waiting], ids=lambda graph: graph.name)
@pytest.mark.parametrize("reads_outcomes", [True, False])
async def test_it_is_kept_no_longer_than_needed(reads_outcomes: bool, graph: ps.Graph[[int], int]) -> None:
    alive: list[weakref.ref[Message]] = []

    def calls() -> Iterator[ps.Call[int, Message]]:
        for number in range(200):
            message = Message(number)
            alive.append(weakref.ref(message))
            yield ps.tagged(graph(number), message)

    most = 0
    async with engine.stream(calls(), max_in_flight=4) as stream:
        async for _ in stream.outcomes() if reads_outcomes else stream:
            await wait_quiescent()
            most = max(most, sum(one() is not None for one in alive))
    del _
    gc.collect()
    assert most <= (6 if reads_outcomes else 10)
    assert not any(one() for one in alive)
