"""Promise 1: every submitted item gets exactly one terminal outcome: result, error, cancelled or expired."""

import asyncio

import pytest

import penstock as ps
from penstock import engine, testing
from tests.promises.scenario import Boom, World, as_calls, as_runs, as_stream, check_outcomes


@pytest.mark.parametrize("ordered", [True, False])
def test_promise_1_every_item_of_a_stream_gets_exactly_one_terminal_outcome(effort: int, ordered: bool) -> None:
    async def main() -> None:
        world = World.of_running_loop()
        items = [world.item(index) for index in range(12)]
        statistics = await as_stream(world, items, ordered=ordered)
        check_outcomes(world, items)
        assert (statistics.submitted, statistics.completed + statistics.failed) == (12, 12)
        assert statistics.yielded == 12
        assert statistics.in_flight == 0

    testing.interleavings(main, count=60 * effort)


def test_promise_1_every_call_of_a_deployment_gets_exactly_one_terminal_outcome(effort: int) -> None:
    async def main() -> None:
        world = World.of_running_loop()
        items = [world.item(index) for index in range(12)]
        statistics = await as_calls(world, items)
        check_outcomes(world, items)
        kinds = [kind for outcomes in world.outcomes.values() for kind, _ in outcomes]
        # A result may come in the same turn in which its caller is cancelled.
        assert statistics.completed >= kinds.count("done")
        # A caller that goes away in the very turn in which it gets a place never becomes a call of the deployment.
        assert statistics.completed + statistics.failed + statistics.cancelled <= statistics.admission.admitted
        assert statistics.admission.in_flight == statistics.admission.queued == 0

    testing.interleavings(main, count=60 * effort)


def test_promise_1_every_run_gets_exactly_one_terminal_outcome(effort: int) -> None:
    async def main() -> None:
        world = World.of_running_loop()
        items = [world.item(index) for index in range(12)]
        await as_runs(world, items)
        check_outcomes(world, items)

    testing.interleavings(main, count=60 * effort)


async def test_promise_1_the_first_failure_of_an_item_wins_and_a_later_one_is_logged() -> None:
    @ps.node
    async def fails_first(x: int) -> int:
        raise Boom("first")

    @ps.node
    async def fails_while_it_is_cancelled(x: int) -> int:
        try:
            await forever()
        finally:
            raise LookupError("second")

    @ps.graph
    async def two_failures(x: int) -> int:
        return await add(await fails_while_it_is_cancelled(x), await fails_first(x))

    with pytest.raises(Boom, match="first"):
        await engine.run(two_failures(1))


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


@ps.node
async def add(a: int, b: int) -> int:
    return a + b
