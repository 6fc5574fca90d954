"""Promise 4: a node runs exactly once per item and attempt. No hidden second call, no stale result."""

from collections import Counter

import pytest
import structlog

import penstock as ps
from penstock import engine, testing
from tests.kit import same, values_of


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

    line = flaky >> plain
    results = engine.stream(map(line, range(10)))
    assert await values_of(results) == list(range(10))
    actors = {actor.node: actor for actor in results.statistics().actors}
    assert (actors["flaky"].completed, actors["flaky"].retried, actors["flaky"].failed) == (10, 10, 0)
    assert actors["plain"].completed == counts["plain"] == 10
    assert counts["flaky"] == 20


async def test_promise_4_what_was_asked_for_is_called_as_often_as_asked() -> None:
    counts: Counter[str] = Counter()

    @ps.node
    async def backup(x: int) -> int:
        counts["backup"] += 1
        return -x

    @ps.node(retry=ps.Retry(attempts=2), failover=backup)
    async def down(x: int) -> int:
        counts["down"] += 1
        raise OSError

    @ps.node(cache=ps.Cache(max_bytes=1000))
    async def kept(x: int) -> int:
        counts["kept"] += 1
        return x

    @ps.node(hedge=ps.Hedge(after_seconds=60))
    async def soon(x: int) -> int:
        counts["soon"] += 1
        return x

    line = down >> kept >> soon
    async with engine.Engine() as e:
        assert [await e.run(line(x)) for x in (1, 2, 1, 2, 1)] == [-1, -2, -1, -2, -1]
    assert counts == {"backup": 5, "down": 10, "kept": 2, "soon": 5}


async def test_promise_4_no_result_of_an_earlier_call_comes_back() -> None:
    """All calls share the trace, but not the values that were seen in it."""
    graph = ps.graph(same)
    assert [await engine.run(graph(x)) for x in (1, 2, 1, 3)] == [1, 2, 1, 3]


async def test_promise_4_what_was_called_runs_and_its_failure_fails_its_item_unless_it_is_pure() -> None:
    counts: Counter[str] = Counter()

    @ps.node
    async def check(x: int) -> None:
        counts["check"] += 1
        if x == 1:
            raise PermissionError(x)

    @ps.node
    def note(x: int) -> None:
        counts["note"] += 1

    @ps.node(pure=True)
    async def unread(x: int) -> int:
        raise AssertionError("it is pure, and no step reads its result")

    @ps.graph
    async def checked(x: int) -> int:
        await check(x)
        _ = note(x)
        await unread(x)
        return await same(x)

    with structlog.testing.capture_logs():
        assert await engine.run(checked(0)) == 0
        with pytest.raises(PermissionError):
            await engine.run(checked(1))
        assert await values_of(engine.stream(map(checked, range(3)), on_error="skip")) == [0, 2]
        async with engine.deploy(checked) as service:
            assert await service(2) == 2
            with pytest.raises(PermissionError):
                await service(1)
    assert counts["check"] == 7
    assert counts["note"] >= 4


async def test_promise_4_effects_keep_the_order_of_the_source() -> None:
    booked: list[str] = []

    @ps.node
    async def check(user: str) -> float:
        await testing.wait_quiescent()  # until no other task runs
        if user == "eve":
            raise PermissionError(f"{user} may not")
        return 0.5

    @ps.node(effectful=True)
    async def book(user: str) -> str:
        booked.append(user)
        return user

    @ps.node
    def receipt(risk: float, user: str) -> str:
        return f"{user} at {risk}"

    @ps.graph
    async def pay(user: str) -> str:
        risk = await check(user)
        return receipt(risk, await book(user))

    for call in (pay, lambda user: engine.run(pay(user))):
        booked.clear()
        with pytest.raises(PermissionError):
            await call("eve")
        assert booked == []
        assert await call("bob") == "bob at 0.5"
        assert booked == ["bob"]
    assert await values_of(engine.stream([pay("ann"), pay("eve")], on_error="skip")) == ["ann at 0.5"]
    async with engine.deploy(pay) as service:
        with pytest.raises(PermissionError):
            await service("eve")
    assert booked == ["bob", "ann"]
