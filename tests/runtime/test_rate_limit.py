"""`RateLimit` passes its input on, so many times per second of a scope."""

import asyncio

import pytest

import penstock as ps
from penstock import engine, testing

limited = ps.RateLimit(per_second=10, burst=3)


@ps.graph
async def pass_on(x: int) -> int:
    return await limited(x)


def test_a_burst_passes_and_then_the_rate_holds() -> None:
    async def main() -> list[float]:
        clock = asyncio.get_running_loop().time
        passed: list[float] = []
        async with engine.stream((pass_on(x) for x in range(7)), max_in_flight=64) as results:
            expected = 0
            async for result in results:
                assert result == expected
                expected += 1
                passed.append(round(clock(), 6))
        return passed

    assert testing.run_virtual(main, timeout_seconds=60) == [0, 0, 0, 0.1, 0.2, 0.3, 0.4]


def test_all_calls_of_a_deployment_share_one_limit_and_priorities_go_first() -> None:
    async def main() -> None:
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

    testing.run_virtual(main, timeout_seconds=60)


def test_items_that_leave_use_nothing_up_and_the_end_does_not_wait_for_them() -> None:
    slow = ps.RateLimit(per_second=0.001)

    @ps.graph
    async def graph(x: int) -> int:
        return await slow(x)

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        async with engine.deploy(graph) as service:
            assert await service(0) == 0
            cancelled = asyncio.create_task(service(1))
            with pytest.raises(ps.DeadlineExceeded):
                await service.run(graph(2), timeout_seconds=5)
            cancelled.cancel()
            assert await service(3) == 3
            assert clock() == 1000
            left = asyncio.create_task(service(4))
            await testing.wait_quiescent()
            left.cancel()
        assert clock() == 1000

    testing.run_virtual(main, timeout_seconds=5000)


async def test_each_scope_has_its_own() -> None:
    once = ps.RateLimit(per_second=0.001)

    @ps.graph
    async def graph(x: str) -> str:
        return await once(x)

    assert await asyncio.gather(*(engine.run(graph("x")) for _ in range(3))) == ["x"] * 3
    assert await once("y") == "y"


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="per_second=0"):
        ps.RateLimit(per_second=0)
    with pytest.raises(ValueError, match="burst=0"):
        ps.RateLimit(per_second=1, burst=0)
