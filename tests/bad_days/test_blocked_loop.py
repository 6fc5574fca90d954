"""A plain function that holds the event loop for too long is reported, once, by name and with the remedy."""

import time

import pytest
import structlog

import penstock as ps
from penstock import engine


@pytest.mark.parametrize("way", ["run", "stream"])
async def test_a_body_that_holds_the_loop_is_reported_once(way: str) -> None:
    @ps.node
    def slow(x: int) -> int:
        time.sleep(0.06)  # what is too long begins at 0.05
        return x

    @ps.node
    async def quick(x: int) -> int:
        return x

    @ps.graph
    async def graph(x: int) -> int:
        return await quick(slow(x))

    with structlog.testing.capture_logs() as logs:
        if way == "run":
            for x in range(3):
                assert await engine.run(graph(x)) == x
        else:
            async with engine.stream(graph(x) for x in range(3)) as stream:
                assert [x async for x in stream] == [0, 1, 2]
    (log,) = logs
    assert (log["event"], log["node"], log["graph"]) == ("node.blocks_loop", "slow", "graph")
    assert log["milliseconds"] >= 50
    assert 'runs_on="thread"' in log["remedy"]
