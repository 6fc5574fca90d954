"""A node that holds the event loop for too long is reported, once, by name and with the remedy."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import engine
from tests.kit import begun, outcomes, paused, values_of
from tests.telemetry.virtual_time import VirtualTime, telling

NOW = VirtualTime()


@pytest.fixture(autouse=True)
def only_the_test_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("penstock.actors.node_actor.BLOCKING_SECONDS", 0.05)
    with telling(NOW):
        yield


def block() -> None:
    NOW.hold(0.06)


KEPT = ps.Cache(max_bytes=1)
POLICIES: dict[str, dict[str, Any]] = {
    "policy": {"timeout_seconds": 60, "retry": ps.Retry(2)},
    "cache": {"cache": KEPT},
    "batch": {"batch": ps.Batch(4)},
    "plain batch": {"batch": ps.Batch(4)},
}


def blocking(kind: str) -> Any:
    """Return a new blocking node, which was not reported before; a batch is returned as one item is."""

    def blocking(x: Any) -> Any:
        block()
        return x

    async def blocking_later(x: Any) -> Any:
        if kind == "after a wait":
            await asyncio.sleep(0)
        block()
        await asyncio.sleep(0)
        return x

    class Blocking:
        async def __call__(self, x: int) -> int:
            block()
            return x

    if kind == "class":
        return ps.node(Blocking)()
    return ps.node(**POLICIES.get(kind, {}))(blocking if "plain" in kind else blocking_later)


@pytest.mark.parametrize("kind", ["async", "after a wait", "policy", "cache", "class", "batch", "plain", "plain batch"])
async def test_a_node_that_blocks_is_reported_once_over_all_scopes(kind: str) -> None:
    node = blocking(kind)

    @ps.graph
    async def graph(x: int) -> int:
        blocked = node(x) if kind == "plain" else await node(x)
        return await paused(blocked)

    with structlog.testing.capture_logs() as logs:
        assert await engine.run(graph(1)) == 1
        async with engine.deploy(graph) as service:
            assert await service(2) == 2
        assert await values_of(engine.stream(graph(x) for x in range(2))) == [0, 1]
    (log,) = logs
    assert log["event"] == "node.blocks_loop"
    assert log["node"] in ("blocking", "blocking_later", "Blocking")
    assert log["graph"] == {"cache": "graph/computed", "batch": None, "plain batch": None}.get(kind, "graph")
    assert log["milliseconds"] == 60
    assert 'runs_on="thread"' in log["remedy"]


async def test_an_error_of_a_watched_coroutine_has_the_traceback_of_any_other() -> None:
    @ps.node
    async def fails(x: int) -> int:
        await asyncio.sleep(0)
        raise ValueError(x)

    for _ in range(12):  # the first eight calls would be watched if they did not fail
        with pytest.raises(ValueError, match="1") as caught:
            await engine.run(ps.graph(fails)(1))
        names = [entry.name for entry in caught.traceback]
        assert names[-1] == "fails"
        assert "watched" not in names


async def test_a_watched_coroutine_is_cancelled_and_closed_as_any_other() -> None:
    seen: list[str] = []

    @ps.node
    async def waits(x: int) -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("unwound")
            raise
        return x

    [running] = await begun(engine.run(ps.graph(waits)(1)))
    running.cancel()
    assert await outcomes(running) == [asyncio.CancelledError]
    assert seen == ["cancelled", "unwound"]
