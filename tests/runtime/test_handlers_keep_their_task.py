"""One task runs a handler from first to last step, so timeouts and task groups, which remember their task, work."""

import asyncio
import contextlib
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import begun, numbers, outcomes, outcomes_of, paused

MODES = ["run", "stream", "deploy"]


async def through(mode: str, call: ps.Call) -> object:
    """Run one call in one of the ways that the engine offers."""
    if mode == "run":
        return await engine.run(call)
    if mode == "stream":
        async with engine.stream([call]) as results:
            return await anext(results)
    async with engine.deploy(call.graph) as service:
        return await service.run(call)


@ps.node
async def inner_timeout(x: int) -> str:
    try:
        async with asyncio.timeout(0.001):
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        await asyncio.sleep(0)
        return "timed out"
    return "went on"


@ps.node
async def inner_failing_group(x: int) -> str:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await asyncio.get_running_loop().create_future()
    except* LookupError:
        pass
    await asyncio.sleep(0)
    return "group failed"


@ps.node
async def inner_move_on(x: int) -> str:
    with anyio.move_on_after(0.001) as scope:
        await anyio.sleep_forever()
    await anyio.lowlevel.checkpoint()
    return f"{scope.cancelled_caught}"


@ps.node
async def inner_anyio_group(x: int) -> str:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep, 0)
        group.start_soon(anyio.sleep_forever)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    return f"{anyio.get_current_task().id == id(asyncio.current_task())}"


@ps.graph
async def everything(x: int) -> list[str]:
    return [await node(x) for node in (inner_timeout, inner_failing_group, inner_move_on, inner_anyio_group)]


@ps.node
async def cancels_its_task_and_waits(x: int) -> int:
    cancel_current_task(x)
    await asyncio.sleep(0)
    return x


@ps.node
async def cancels_its_task(x: int) -> int:
    cancel_current_task(x)
    return x


def cancel_current_task(x: int) -> None:
    """Cancel the current task for each odd number."""
    task = asyncio.current_task()
    if x % 2:
        task.cancel()


@pytest.mark.parametrize("mode", MODES)
async def test_timeouts_groups_and_cancel_scopes_work_in_nodes(mode: str) -> None:
    for _ in range(2):
        assert await through(mode, everything(1)) == ["timed out", "group failed", "True", "True"]


@pytest.mark.parametrize("policy", [{}, {"timeout_seconds": 60.0}, {"retry": ps.Retry(attempts=2)}])
async def test_a_handler_that_cancels_its_own_item_sees_it_at_its_next_suspension(policy) -> None:
    """The cancel must not hit the next work of its worker."""
    box: dict[int, asyncio.Task[int]] = {}
    seen: list[str] = []

    @ps.node(**policy)
    async def suicide(x: int) -> int:
        box[x].cancel()
        seen.append("asked")
        try:
            await asyncio.sleep(0)
            seen.append("first suspension")
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return x

    line = suicide >> paused
    harmless = ps.graph(paused)

    async with engine.deploy(line, harmless) as service:
        box[1] = asyncio.create_task(service(1))
        assert await outcomes(box[1]) == [asyncio.CancelledError]
        assert await service.run(harmless(2)) == 2
    box[3] = asyncio.create_task(engine.run(line(3)))
    assert await outcomes(box[3]) == [asyncio.CancelledError]
    assert seen.count("cancelled") == 2
    assert await engine.run(harmless(4)) == 4


async def test_a_handler_that_cancels_its_item_and_ends_without_waiting_harms_nobody() -> None:
    box: dict[int, asyncio.Task[int]] = {}
    later: list[int] = []

    @ps.node
    async def suicide(x: int) -> int:
        if x in box:
            box[x].cancel()
        return x

    @ps.node
    async def after(x: int) -> int:
        await asyncio.sleep(0)
        later.append(x)
        return x

    line = suicide >> after
    for x in range(20):
        box[x] = asyncio.create_task(engine.run(line(x)))
        assert await outcomes(box[x]) == [asyncio.CancelledError]
    assert await engine.run(line(100)) == 100
    assert later == [100]


async def test_a_handler_that_cancels_its_own_task_fails_its_item_only() -> None:
    line = ps.graph(cancels_its_task_and_waits)
    outcomes = await outcomes_of(engine.stream(map(line, range(10)), max_in_flight=3))
    assert [outcome.value for outcome in outcomes] == [0, None, 2, None, 4, None, 6, None, 8, None]
    assert all(isinstance(outcome.error, ps.NodeCancelledError) for outcome in outcomes[1::2])
    with pytest.raises(ps.NodeCancelledError) as raised:
        await engine.run(line(1))
    assert "'cancels_its_task_and_waits'" in raised.value.__notes__[0]


@pytest.mark.parametrize("size", [1, 2])
async def test_a_task_that_was_cancelled_from_outside_ends_as_cancelled(size: int) -> None:
    tasks: list[Any] = []

    @ps.node
    async def wait(x: int) -> int:
        tasks.append(asyncio.current_task())
        await asyncio.Event().wait()
        return x

    async with engine.deploy(ps.graph(wait) if size == 1 else wait >> wait) as service:
        [call] = await begun(service(1))
        tasks[0].cancel()
        with pytest.raises(ps.NodeCancelledError):
            await call
        await asyncio.wait(tasks)
    assert tasks[0].cancelled()


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_handler_that_cancels_its_own_task_and_never_waits_harms_no_other_item(is_last: bool) -> None:
    @ps.node
    async def wait(x: int) -> int:
        if not is_last or x % 4 == 0:
            await asyncio.sleep(0)
        return x

    line = wait >> cancels_its_task if is_last else cancels_its_task >> wait
    # More items than the first calls, during which a node is watched: later, a worker calls a line of nodes in a row.
    outcomes = await outcomes_of(engine.stream(map(line, range(40)), max_in_flight=3))
    assert [outcome.value for outcome in outcomes[::2]] == [*range(0, 40, 2)]
    # The handler's own item may have left the node already when the cancel arrives.
    assert all(o.value == o.index or isinstance(o.error, ps.NodeCancelledError) for o in outcomes)


@ps.node
def is_true(x: int) -> bool:
    return True


CONTROL: dict[str, Any] = {
    "cond": lambda x: ps.cond(is_true(x), cancels_its_task_and_waits, cancels_its_task_and_waits, x),
    "map_each": lambda x: ps.map_each(cancels_its_task_and_waits, [x, x, x]),
    "while_loop": lambda x: ps.while_loop(is_true, cancels_its_task_and_waits, x),
}


@pytest.mark.parametrize("control", CONTROL)
async def test_a_body_of_control_flow_that_cancels_its_own_task_fails_its_item_only(control: str) -> None:
    @ps.graph
    async def graph(x: int) -> object:
        return await CONTROL[control](x)

    with pytest.raises(ps.NodeCancelledError):
        await engine.run(graph(1))
    assert [r async for r in engine.stream((graph(1) for _ in range(3)), on_error="skip")] == []


async def test_a_handler_that_undoes_its_cancel_leaves_its_worker_as_it_was() -> None:
    """Timeouts swallow a cancel and call `uncancel`, too; the next item can still be cancelled."""
    cancelled: list[int] = []

    @ps.node
    async def fail(x: int) -> int:
        await asyncio.sleep(0)
        raise LookupError

    @ps.node
    async def swallow(x: int) -> int:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(x)
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
        return x

    @ps.node
    async def both(a: int, b: int) -> int:
        return a + b

    @ps.graph
    async def fork(x: int) -> int:
        return await both(await swallow(x), await fail(x))

    assert [r async for r in engine.stream((fork(x) for x in range(20)), max_in_flight=1, on_error="skip")] == []
    assert cancelled == list(range(20))


async def test_workers_cancelled_by_somebody_else_are_replaced() -> None:
    """Some programs shut down with `for task in asyncio.all_tasks(): task.cancel()`."""
    async with engine.deploy(ps.graph(paused)) as service:
        await service(1)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        assert await service(2) == 2


@ps.graph
async def mapped(x: int) -> object:
    return await ps.map_each(paused, [x] * 5)


@ps.graph
async def folded(x: int) -> object:
    return await ps.fold(ps.node(lambda total, number: total + number), ps.map_each(paused, numbers(x)), 0)


@ps.node
async def never_ends(x: int) -> int:
    await asyncio.sleep(3600)
    return x


@pytest.mark.parametrize(
    "graph", [paused >> never_ends, mapped, folded, ps.graph(paused.with_policy(cache=ps.Cache(max_bytes=1000)))]
)
async def test_workers_that_were_cancelled_before_they_began_are_not_waited_for(graph: ps.Graph) -> None:
    for turns in range(12):
        async with engine.Engine() as own:
            run = asyncio.create_task(own.run(graph(5)))
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ps.NodeCancelledError):
                await run
        await testing.wait_quiescent()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def fan_out(branch: ps.Node[[int], object], *, layers: int = 1) -> ps.Graph[[int], int]:
    """Return a graph of `layers` layers in a row, each with 32 branches and a join."""

    @ps.node
    def join(parts: list[object]) -> int:
        return len(parts)

    @ps.graph
    async def layered(x: int) -> int:
        for _ in range(layers):
            x = join([await branch(x) for _ in range(32)])
        return x

    return layered


@pytest.mark.parametrize("layers", [1, 2])
async def test_branches_that_return_at_once_share_a_few_tasks(layers: int) -> None:
    tasks = set()

    @ps.node
    async def suspend_once(x: int) -> int:
        tasks.add(asyncio.current_task())
        await asyncio.sleep(0)
        return x

    assert await engine.run(fan_out(suspend_once, layers=layers)(1)) == 32
    assert len(tasks) <= 10 + 2 * (layers - 1)


@pytest.mark.parametrize(("returning", "turns"), [(0, 12), (8, 20)])
async def test_branches_that_wait_have_all_begun_within_a_few_turns_of_the_loop(returning: int, turns: int) -> None:
    """Also behind branches that return at once: each eighth branch, in the second case."""
    may_return = asyncio.Event()
    begun = 0

    @ps.node
    async def wait(x: int) -> int:
        nonlocal begun
        begun += 1
        await (asyncio.sleep(0) if returning and not begun % returning else may_return.wait())
        return x

    call = asyncio.ensure_future(engine.run(fan_out(wait)(1)))
    for _ in range(turns):
        await asyncio.sleep(0)
    assert begun == 32
    may_return.set()
    assert await call == 32


@pytest.mark.parametrize("mode", ["run", "deploy"])
async def test_tasks_end_when_the_branches_that_are_left_need_none(mode: str) -> None:
    may_return = [asyncio.Event() for _ in range(2)]
    working: list[Any] = []

    @ps.node
    async def wait(x: int) -> int:
        working.append(asyncio.current_task())
        await may_return[len(working) == 32].wait()
        return x

    [call] = await begun(through(mode, fan_out(wait)(1)))
    assert len({*working}) == len(working) == 32
    may_return[0].set()
    await testing.wait_quiescent()
    assert sum(not task.done() for task in working) == 1
    may_return[1].set()
    assert await call == 32
