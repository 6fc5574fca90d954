"""Details that no other test checks: side effects of a cancel, a thread, an error and a body."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import penstock as ps
from penstock import engine
from tests.kit import Gate, model, numbers, outcomes_of, values_of


async def test_an_item_of_map_each_that_fails_cancels_its_siblings_and_not_the_node_around_them() -> None:
    """The first item runs in the task of `map_each`, which must not keep the cancel of the item."""
    gate = Gate()

    @ps.node
    async def fail_at_one(x: int) -> int:
        if x == 1:
            raise LookupError(x)
        return await gate.wait(x)

    @ps.graph
    async def graph(x: int) -> list[int]:
        return await ps.map_each(fail_at_one, [x, 1, 2])

    with pytest.raises(LookupError):
        await engine.run(graph(0))
    outcomes = await outcomes_of(engine.stream((graph(0) for _ in range(3)), max_in_flight=1))
    assert [type(outcome.error) for outcome in outcomes] == [LookupError] * 3
    assert gate.cancelled.count(0) == 4


async def test_the_error_of_leaving_a_stateful_node_keeps_that_of_the_item() -> None:
    async def fail(x: int) -> int:
        raise ValueError("item")

    async def leave() -> None:
        raise RuntimeError("leaving")

    graph = ps.graph(model(call=fail, leave=leave))
    for ends in (engine.run(graph(1)), values_of(engine.stream([graph(1)]))):
        with pytest.raises(RuntimeError, match="leaving") as raised:
            await ends
        assert isinstance(raised.value.__context__, ValueError)


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_stateful_node_sees_calls_as_they_are_completed_and_values_in_their_order(ordered: bool) -> None:
    completed = [asyncio.Event() for _ in range(4)]
    learned: list[int] = []

    @ps.node
    async def prepare(x: int) -> int:
        if x < 3:
            await completed[x + 1].wait()  # the last item is completed first
        completed[x].set()
        return x

    async def learn(x: int) -> int:
        learned.append(x)
        return x

    learner = model(call=learn)
    step = prepare >> learner

    @ps.graph
    async def steps(x: int) -> AsyncIterator[int]:
        return ps.map_each(learner, ps.map_each(prepare, numbers(x), concurrency=4), concurrency=4)

    async with engine.stream((step(x) for x in range(4)), ordered=ordered) as results:
        assert [x async for x in results] == ([0, 1, 2, 3] if ordered else [3, 2, 1, 0])
    assert learned == [3, 2, 1, 0]
    learned.clear()
    for event in completed:
        event.clear()
    assert [x async for x in engine.stream(steps(4))] == [0, 1, 2, 3]
    assert learned == [0, 1, 2, 3]
