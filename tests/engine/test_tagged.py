"""`ps.tagged`: a call carries an object past its nodes, and the object comes back with the outcome."""

import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace

import penstock as ps
from penstock import engine, telemetry
from penstock.testing import wait_quiescent
from tests.kit import added, outcomes_of, paused, values_of


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
    (outcome,) = await outcomes_of(engine.stream([call], trace_items=True))
    assert outcome.tag is message
    assert outcome.value == 0x0AF7651916CD43DD8448EB211C80319C


async def test_it_is_neither_compared_nor_pickled() -> None:
    call = ps.tagged(chain(1), Message(1))
    assert call.tag.number == 1
    read: ps.Call[int] = pickle.loads(pickle.dumps(call))
    assert (read.graph, read.arguments, read.tag) == (chain, (1,), None)
    with_tag, without = await outcomes_of(engine.stream([call, chain(1)]))
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

    assert await values_of(engine.stream([ps.tagged(waiting(1), Message(7))], order_by=key_of)) == [2]
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
