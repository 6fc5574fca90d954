"""`RateLimit` passes at most so many items a second, per scope or Engine, for all items together or for each key."""

import asyncio
import random
from collections import Counter
from collections.abc import Hashable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, testing
from tests.kit import Renamed, begun, virtual


@virtual
async def test_all_calls_of_a_deployment_share_one_limit_and_priorities_go_first() -> None:
    pass_on = ps.graph(ps.RateLimit(per_second=10, burst=3))
    async with engine.deploy(pass_on) as service:
        order: list[int] = []

        async def call(x: int, priority: int) -> None:
            order.append(await service.run(pass_on(x), priority=priority))

        async with asyncio.TaskGroup() as group:
            for x in range(5):
                group.create_task(call(x, priority=0))
            await testing.wait_quiescent()
            group.create_task(call(5, priority=1))
        assert order == [0, 1, 2, 5, 3, 4]
        assert round(asyncio.get_running_loop().time(), 6) == 0.3


@virtual
async def test_items_that_leave_use_nothing_up_and_the_end_does_not_wait_for_them() -> None:
    graph = ps.graph(ps.RateLimit(per_second=0.001))
    clock = asyncio.get_running_loop().time
    async with engine.deploy(graph) as service:
        assert await service(0) == 0
        cancelled = asyncio.create_task(service(1))
        with pytest.raises(ps.DeadlineExceeded):
            await service.run(graph(2), timeout_seconds=5)
        cancelled.cancel()
        assert await service(3) == 3
        assert clock() == 1000
        [left] = await begun(service(4))
        left.cancel()
    assert clock() == 1000


async def test_each_scope_has_its_own() -> None:
    once = ps.RateLimit(per_second=0.001)
    assert await asyncio.gather(*(engine.run(ps.graph(once)("x")) for _ in range(3))) == ["x"] * 3
    assert await once("y") == "y"


def tenant_of(request: tuple[str, int]) -> str:
    return request[0]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=25))
def test_the_limit_of_a_key_is_as_if_there_were_no_others(requests: list[tuple[str, int]]) -> None:
    async def main() -> dict[str, list[float]]:
        clock = asyncio.get_running_loop().time
        passed: dict[str, list[float]] = {"a": [], "b": [], "c": []}

        async def call(tenant: str) -> None:
            await service((tenant, 0))
            passed[tenant].append(round(clock(), 6))

        limit = ps.RateLimit(per_second=4, burst=2, key=tenant_of)
        async with engine.deploy(ps.graph(limit)) as service, asyncio.TaskGroup() as calls:
            for tenant, pause in requests:
                await asyncio.sleep(pause / 8)
                calls.create_task(call(tenant))
        return passed

    expected: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    now = 0.0
    for tenant, pause in requests:
        now += pause / 8
        before = expected[tenant]
        # A full bucket of two lets two items pass at once, and each later item after a quarter of a second.
        full_at = 0.0
        for at in before:
            full_at = max(full_at, at) + 0.25
        before.append(round(max(now, full_at - 0.25), 6))
    assert testing.run_virtual(main) == expected


@pytest.mark.parametrize("makes_engine", [True, False])
@virtual
async def test_with_scope_engine_runs_streams_and_deployments_share_one_limit(makes_engine: bool) -> None:
    limit = ps.RateLimit(per_second=2, scope="engine")
    graph = ps.graph(limit)

    own: Any = engine.Engine() if makes_engine else engine
    clock = asyncio.get_running_loop().time
    passed: list[float] = []

    async def run(number: int) -> None:
        assert await own.run(graph(("a", number))) == ("a", number)
        passed.append(round(clock(), 6))

    async with asyncio.TaskGroup() as runs:
        for number in range(4):
            runs.create_task(run(number))
    assert passed == [0, 0.5, 1, 1.5]
    async with own.deploy(graph) as service, own.stream([graph(("b", 1))]) as results:
        assert await service(("b", 0)) == ("b", 0)
        assert [result async for result in results] == [("b", 1)]
    assert round(clock(), 6) == 2.5
    [left] = await begun(own.run(graph(("a", 9))))
    left.cancel()  # the cancel leaves nothing of the limit behind
    await asyncio.wait([left])
    async with engine.Engine() as other:
        assert await other.run(graph(("a", 0))) == ("a", 0)
    assert round(clock(), 6) == 2.5
    if makes_engine:
        await own.__aexit__(None, None, None)


@virtual
async def test_keys_and_what_waits_for_each_are_bounded_and_full_limits_are_forgotten() -> None:
    limit = ps.RateLimit(per_second=1, key=tenant_of, max_keys=2, max_waiting_per_key=1)
    async with engine.deploy(ps.graph(limit)) as service:
        await service(("a", 0))
        await asyncio.sleep(0.25)
        await service(("b", 0))
        with pytest.raises(ps.Overloaded, match="key 'c' is one too many") as refused:
            await service(("c", 0))
        assert refused.value.retry_after_seconds == pytest.approx(0.75)
        [gone] = await begun(service(("a", 1)))
        with pytest.raises(ps.Overloaded, match="1 items of key 'a' wait") as refused:
            await service(("a", 2))
        assert refused.value.retry_after_seconds == pytest.approx(1.75)
        gone.cancel()
        await asyncio.wait([gone])
        assert await service(("a", 3)) == ("a", 3)  # a caller that has left does not count
        await asyncio.sleep(0.25)  # the bucket of "b" is full again
        assert await service(("c", 0)) == ("c", 0)
        with pytest.raises(ps.Overloaded):
            await service(("b", 0))


@virtual
async def test_forgetting_lifts_no_limit() -> None:
    limit = ps.RateLimit(per_second=1, burst=2, key=tenant_of, on_limit="refuse")
    async with engine.deploy(ps.graph(limit)) as service:
        for _ in range(2):
            await service(("a", 0))
        await asyncio.sleep(1.5)  # one token of two is back
        for number in range(20):  # each new key makes the limit look at some old keys
            await service((f"b{number}", 0))
        await service(("a", 0))
        with pytest.raises(ps.Overloaded):
            await service(("a", 0))


@pytest.mark.parametrize(
    "key", [lambda request: [request], lambda request: request.tenant, lambda request: asyncio.sleep(0)]
)
async def test_an_item_without_a_key_fails_alone(key: Any) -> None:
    def of(request: tuple[str, int]) -> Hashable:
        own: Hashable = key(request) if request[1] else request[0]
        return own

    async with engine.deploy(ps.graph(ps.RateLimit(per_second=100, key=of))) as service:
        with pytest.raises((TypeError, AttributeError)):
            await service(("a", 1))
        assert await service(("a", 0)) == ("a", 0)


@virtual
async def test_the_work_of_a_key_whose_hash_changes_passes_in_its_turn() -> None:
    limit = ps.RateLimit(per_second=1, key=tenant_of, max_keys=3)
    async with engine.deploy(ps.graph(limit)) as service:
        keys = [Renamed("a"), Renamed("b")]
        calls = await begun(*(service((cast(Any, key), number)) for number in range(3) for key in keys))
        keys[0].name = "c"
        assert [number for _, number in await asyncio.gather(*calls)] == [0, 0, 1, 1, 2, 2]
        assert asyncio.get_running_loop().time() == pytest.approx(2)
        await asyncio.sleep(1)
        for number in range(10):  # the limit forgets the changed key as well
            await service((f"tenant {number}", 0))
            await asyncio.sleep(1)


def test_the_options_of_limits_by_key_are_checked() -> None:
    async def awaited(request: tuple[str, int]) -> str:
        return request[0]

    wrong = {"key": awaited, "on_limit": "drop", "scope": "call", "max_keys": 0, "max_waiting_per_key": -1}
    for option, value in wrong.items():
        with pytest.raises(ps.OptionsError, match=f"{option}="):
            ps.RateLimit(**{"per_second": 1, option: value})


# Items that take several tokens.


@virtual
async def test_an_item_takes_its_cost_and_one_that_is_too_large_leaves_a_debt() -> None:
    graph = ps.graph(ps.RateLimit(per_second=10, burst=5, cost=lambda cost: cost))
    clock, passed = asyncio.get_running_loop().time, list[float]()
    async with engine.stream((graph(cost) for cost in (3, 2, 0, 1, 12, 0, 1)), max_in_flight=64) as results:
        async for _ in results:
            passed.append(round(clock(), 6))
    # The item of cost 12 waits for the whole burst of 5, and leaves a debt of 7. The next item waits for 8 tokens.
    assert passed == [0, 0, 0, 0.1, 0.6, 1.3, 1.4]


def quota_of(tenant: str) -> float:
    return {"a": 10.0, "b": 1.0}[tenant]


@pytest.mark.parametrize("used", [float("inf"), float("-inf"), float("nan"), 10**400, "20"])
def test_tokens_that_are_no_finite_number_are_refused_and_leave_the_key_as_it_was(used: Any) -> None:
    limit = ps.RateLimit(per_second=10, burst=5, key=lambda item: item, scope="engine")
    with pytest.raises(ps.OptionsError, match=r"settle\(used=.*a finite number"):
        limit.settle("a", used)


@virtual
async def test_each_key_has_its_rate_and_settles_its_debt_alone() -> None:
    limit = ps.RateLimit(per_second=quota_of, burst=10, key=tenant_of, scope="engine", cost=lambda request: request[1])

    clock = asyncio.get_running_loop().time
    async with engine.Engine() as own, own.deploy(ps.graph(limit)) as service:

        async def passed(tenant: str, cost: int) -> float:
            await service((tenant, cost))
            return round(clock(), 6)

        assert [await passed("a", 10), await passed("b", 10)] == [0, 0]
        limit.settle("a", 20)  # additional cost of the answer
        calls = [asyncio.create_task(passed(*request)) for request in [("a", 10), ("b", 1), ("a", 1)]]
        await asyncio.sleep(0.5)
        assert [call.done() for call in calls] == [False] * 3
        limit.settle("a", -5)  # tokens given back while calls wait
        assert await asyncio.gather(*calls) == [2.5, 1, 2.6]
        calls = [asyncio.create_task(passed("a", 1))]
        await asyncio.sleep(0)
        limit.settle("a", 10)
        assert await asyncio.gather(*calls) == [3.7]
        with pytest.raises(KeyError):  # a key without a quota fails alone
            await service(("c", 1))


@virtual
async def test_a_debt_is_told_to_those_who_are_refused() -> None:
    limit = ps.RateLimit(per_second=2, burst=4, key=tenant_of, on_limit="refuse", scope="engine")

    async with engine.deploy(ps.graph(limit)) as service:
        await service(("a", 1))
        limit.settle("a", 7)
        with pytest.raises(ps.Overloaded, match="the limit of key 'a' is used up") as caught:
            await service(("a", 1))
        found = caught.value
        assert (found.retry_after_seconds, found.key) == (pytest.approx(2.5), "a")  # a debt of 4, and one token
        await service(("b", 1))


def test_under_many_interleavings_no_key_uses_more_than_its_tokens(effort: int) -> None:
    """For random costs, debts and cancels: burst, rate and one item bound the tokens used up to any moment."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, testing.SeededLoop)
        draw = random.Random(loop.seed)
        limit = ps.RateLimit(
            per_second=quota_of, burst=8, key=tenant_of, cost=lambda request: request[1], scope="engine"
        )
        graph, used, settled = ps.graph(limit), Counter[str](), list[tuple[str, float, int]]()

        async with engine.Engine() as own, own.deploy(graph) as service:

            async def one(tenant: str, cost: int) -> None:
                await asyncio.sleep(draw.choice([0, 0, 0.5, 3]))
                await service.run(graph((tenant, cost)), priority=draw.randrange(2))
                used[tenant] += cost
                now = loop.time()
                before = sum(amount for of, at, amount in settled if of == tenant and (at < now or amount < 0))
                # The last item that passes at a moment may cost up to 11, while a whole burst is 8.
                assert used[tenant] + before <= 8 + 3 + now * quota_of(tenant) + 1e-6
                if draw.random() < 0.5:
                    debt = draw.choice([-cost, 1, 20])
                    settled.append((tenant, now, debt))
                    limit.settle(tenant, debt)

            calls = [asyncio.create_task(one(draw.choice("aab"), draw.randrange(12))) for _ in range(12)]
            for call in calls:
                if not draw.randrange(4):
                    await asyncio.sleep(0)
                    call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert [call.exception() for call in calls if not call.cancelled() and call.exception()] == []
        return len(settled)

    assert any(testing.interleavings(main, count=60 * effort))


async def test_what_cannot_be_settled_is_refused() -> None:
    with pytest.raises(ps.OptionsError, match="per_second=, a function of the key, needs key="):
        ps.RateLimit(per_second=quota_of)
    with pytest.raises(ps.OptionsError, match="cost="):
        ps.RateLimit(per_second=1, cost=3)  # type: ignore[arg-type]
    with pytest.raises(ps.OptionsError, match=r'settle: .* scope="engine"'):
        ps.RateLimit(per_second=1).settle(None, 3)
    shared = ps.RateLimit(per_second=1, scope="engine", cost=lambda request: request[1])
    graph = ps.graph(shared)
    shared.settle(None, 3)  # no node has used the limit yet
    async with engine.Engine() as own, engine.Engine() as other:
        await own.run(graph(("a", 1)))
        await other.run(graph(("a", 1)))
        with pytest.raises(ps.OptionsError, match="a node calls it, or one Engine has it"):
            shared.settle(None, 3)
        with pytest.raises(ps.OptionsError, match=r"RateLimit: the result of cost\(item\)=-1"):
            await own.run(graph(("a", -1)))
