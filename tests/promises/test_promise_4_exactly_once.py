"""Promise 4: a node runs exactly once per item and attempt. No hidden second call, no stale result."""

from collections import Counter

import pytest

import penstock as ps
from penstock import engine, testing
from tests.promises.scenario import World, as_calls, as_runs, as_stream

NODES = ("take", "left", "right", "plain", "join")


def check_calls(world: World, kinds: tuple[str, ...]) -> None:
    assert set(world.calls.values()) <= {1}, f"called twice: {[key for key, n in world.calls.items() if n > 1]}"
    for index, outcomes in world.outcomes.items():
        kind, _ = outcomes[0]
        if kind in kinds:
            made = {node: sorted(a for n, i, a in world.calls if (n, i) == (node, index)) for node in NODES}
            for node, attempts in made.items():
                assert attempts == list(range(1, len(attempts) + 1)), f"{node}, item {index}: attempts {attempts}"
            if kind == "done":
                assert {node: len(attempts) for node, attempts in made.items()} == {
                    **dict.fromkeys(NODES, 1),
                    "left": world.attempts_of_left[index],
                }


@pytest.mark.parametrize("ordered", [True, False])
def test_promise_4_a_node_runs_once_per_item_and_attempt_in_a_stream(effort: int, ordered: bool) -> None:
    async def main() -> None:
        world = World.of_running_loop()
        items = [world.item(index) for index in range(15)]
        statistics = await as_stream(world, items, ordered=ordered)
        check_calls(world, ("done", "failed"))
        done = Counter(node for node, _, _ in world.calls)
        for actor in statistics.actors:
            # An item that fails in one branch leaves the other branch without a count.
            assert actor.completed + actor.failed + actor.retried <= done[actor.node]

    testing.interleavings(main, count=60 * effort)


def test_promise_4_a_node_runs_once_per_call_and_attempt_whoever_goes_away(effort: int) -> None:
    async def calls() -> None:
        world = World.of_running_loop()
        await as_calls(world, [world.item(index) for index in range(15)])
        check_calls(world, ("done", "failed"))

    async def runs() -> None:
        world = World.of_running_loop()
        await as_runs(world, [world.item(index) for index in range(15)])
        check_calls(world, ("done", "failed"))

    testing.interleavings(calls, count=30 * effort)
    testing.interleavings(runs, count=30 * effort)


async def test_promise_4_statistics_agree_with_the_books() -> None:
    counts: Counter[str] = Counter()

    @ps.node(retry=ps.Retry(attempts=3))
    async def flaky(x: int) -> int:
        counts["flaky"] += 1
        if ps.current().attempt < 3 and x % 2:
            raise OSError
        return x

    @ps.node
    def plain(x: int) -> int:
        counts["plain"] += 1
        return x

    @ps.graph
    async def line(x: int) -> int:
        return plain(await flaky(x))

    async with engine.stream(line(x) for x in range(10)) as results:
        assert [x async for x in results] == list(range(10))
    actors = {actor.node: actor for actor in results.statistics().actors}
    assert (actors["flaky"].completed, actors["flaky"].retried, actors["flaky"].failed) == (10, 10, 0)
    assert actors["plain"].completed == counts["plain"] == 10
    assert counts["flaky"] == 20


async def test_promise_4_no_result_of_an_earlier_call_comes_back() -> None:
    """The trace is shared by all calls; what it saw is not."""

    @ps.node
    async def double(x: int) -> int:
        return 2 * x

    @ps.graph
    async def doubled(x: int) -> int:
        return await double(x)

    assert [await engine.run(doubled(x)) for x in (1, 2, 1, 3)] == [2, 4, 2, 6]
