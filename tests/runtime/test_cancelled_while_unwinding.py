"""A task that is cancelled while it waits for an unwinding task keeps waiting idly, and is cancelled afterwards.

anyio's cancel scopes cancel again in every turn of the loop. The virtual clock would show a task that wakes each time:
its time passes only when no task can run.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

import penstock as ps
from penstock import engine
from tests.kit import model, outcomes, virtual

UNWINDING_SECONDS = 10.0


@ps.node
async def unwinds_slowly(seconds: float) -> float:
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(seconds)
    return seconds


async def leave_slowly() -> None:
    await asyncio.sleep(UNWINDING_SECONDS)


slow = ps.graph(unwinds_slowly)


@ps.graph
async def slow_bodies(seconds: float) -> list[float]:
    return await ps.map_each(unwinds_slowly, [0.0, seconds])


stateful = ps.graph(model(leave=leave_slowly))


async def one_run() -> None:
    await engine.run(slow(UNWINDING_SECONDS))


async def one_run_of_bodies() -> None:
    await engine.run(slow_bodies(UNWINDING_SECONDS))


async def a_stream() -> None:
    async with engine.stream([slow(UNWINDING_SECONDS)]) as results:
        await anext(results)


async def a_deployment_that_ends() -> None:
    async with engine.deploy(stateful) as service:
        assert await service(1) == 1
        await asyncio.sleep(1)


SCENARIOS = [one_run, one_run_of_bodies, a_stream, a_deployment_that_ends]


@pytest.mark.parametrize("scenario", SCENARIOS)
@virtual
async def test_a_cancel_scope_of_anyio_waits_for_what_unwinds(scenario: Callable[[], Awaitable[None]]) -> None:
    with anyio.move_on_after(1) as scope:
        await scenario()
    assert scope.cancelled_caught or scenario is a_deployment_that_ends
    assert asyncio.get_running_loop().time() == pytest.approx(1 + UNWINDING_SECONDS)


@pytest.mark.parametrize("scenario", SCENARIOS)
@virtual
async def test_a_cancel_that_follows_a_cancel_scope_is_not_lost(scenario: Callable[[], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()

    async def caller() -> None:
        with anyio.move_on_after(1):
            await scenario()
        pytest.fail("the cancel was lost")

    task = asyncio.create_task(caller())
    loop.call_later(2, task.cancel)
    loop.call_later(3, task.cancel)
    assert await outcomes(task) == [asyncio.CancelledError]
    assert loop.time() == pytest.approx(1 + UNWINDING_SECONDS)


async def unwind(said: list[str]) -> None:
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(UNWINDING_SECONDS)
        said.append("unwound")


with_timeout = ps.node(timeout_seconds=10, retry=ps.Retry(2))


times_out = ps.graph(with_timeout(unwind))


@with_timeout
async def parts(said: list[str]) -> AsyncIterator[int]:
    await unwind(said)
    yield 1


times_out_before_its_first_value = ps.graph(parts)


async def first_value(said: list[str]) -> None:
    async with engine.stream(times_out_before_its_first_value(said)) as values:
        await anext(values)


@pytest.mark.parametrize("left_after_seconds", [5, 15], ids=["then times out", "after its timeout"])
@pytest.mark.parametrize("ask", [lambda said: engine.run(times_out(said)), first_value], ids=["call", "stream"])
@virtual
async def test_a_handler_whose_caller_leaves_unwinds_once(
    ask: Callable[[list[str]], Awaitable[None]], left_after_seconds: float
) -> None:
    said: list[str] = []
    with anyio.move_on_after(left_after_seconds):
        await ask(said)
    assert asyncio.get_running_loop().time() == pytest.approx(UNWINDING_SECONDS + min(left_after_seconds, 10))
    assert said == ["unwound"]


@pytest.mark.parametrize("timeout_seconds", [None, 1.5], ids=["no timeout", "its timeout came first"])
@virtual
async def test_a_first_attempt_that_has_lost_unwinds_once(timeout_seconds: float | None) -> None:
    said: list[str] = []

    @ps.node(hedge=ps.Hedge(after_seconds=1, max_share=1), timeout_seconds=timeout_seconds)
    async def ask(number: int) -> None:
        said.append("began")
        await (unwind(said) if len(said) == 1 else asyncio.sleep(1))

    with anyio.move_on_after(5):
        await engine.run(ps.graph(ask)(1))
    assert asyncio.get_running_loop().time() == pytest.approx(UNWINDING_SECONDS + (timeout_seconds or 2), abs=0.01)
    assert said == ["began", "began", "unwound"]


unwinds = ps.node(unwind)
unwinds_after_its_timeout = ps.node(timeout_seconds=1)(unwind)


@ps.node
async def fails_after_a_second(said: list[str]) -> int:
    await asyncio.sleep(1)
    raise Broken


@ps.graph
async def beside_a_failure(said: list[str]) -> tuple[None, int]:
    return await unwinds(said), await fails_after_a_second(said)


@ps.graph
async def failure_in_a_body(said: list[str]) -> list[object]:
    return await ps.map_each(beside_a_failure, [said])


@ps.graph
async def failure_in_a_body_of_a_body(said: list[str]) -> list[object]:
    return await ps.map_each(failure_in_a_body, [said])


@ps.graph
async def timeout_in_a_body(said: list[str]) -> list[None]:
    return await ps.map_each(unwinds_after_its_timeout, [said])


@pytest.mark.parametrize(
    "of", [failure_in_a_body, failure_in_a_body_of_a_body, timeout_in_a_body], ids=lambda of: of.name
)
@virtual
async def test_a_handler_of_a_body_unwinds_once_if_its_caller_leaves_meanwhile(of: Any) -> None:
    said: list[str] = []
    with anyio.move_on_after(5):
        await engine.run(of(said))
    with anyio.move_on_after(1) as scope:  # the task takes cancellations as before
        await asyncio.sleep(2)
    assert scope.cancelled_caught
    assert asyncio.get_running_loop().time() == pytest.approx(1 + UNWINDING_SECONDS + 1)
    assert said == ["unwound"]


class Broken(Exception):
    """The instance cannot be used again."""


async def unwind_or_crash(said: list[str] | None) -> None:
    if said is None:
        raise Broken
    await unwind(said)


@pytest.mark.parametrize("crash_seconds", [1, 7], ids=["restart first", "timeout first"])
@virtual
async def test_a_handler_whose_instance_is_restarted_unwinds_once(crash_seconds: float) -> None:
    said: list[str] = []
    node = model(call=unwind_or_crash, restart_on=(Broken,), timeout_seconds=5, concurrency=2)
    async with engine.deploy(ps.graph(node)) as service:
        call = asyncio.create_task(service(said))
        await asyncio.sleep(crash_seconds)
        with pytest.raises(Broken):
            await service(None)
        await asyncio.sleep(8 - crash_seconds)
        call.cancel()
        assert await outcomes(call) == [asyncio.CancelledError]
    assert asyncio.get_running_loop().time() == pytest.approx(UNWINDING_SECONDS + min(crash_seconds, 5), abs=0.01)
    assert said == ["unwound"]
