"""Context variables: a handler sees its caller's values; values that it sets reach neither caller nor other calls."""

import asyncio
import contextvars

import pytest

import penstock as ps
from penstock import engine

var: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="unset")


@ps.node
async def read_and_set(x: int) -> str:
    seen = var.get()
    var.set(f"set by {x}")
    await asyncio.sleep(0)
    assert var.get() == f"set by {x}"
    return seen


@ps.node(runs_on="thread")
def read_and_set_in_thread(x: int) -> str:
    seen = var.get()
    var.set(f"set by {x} in a thread")
    return seen


@ps.node(timeout_seconds=60)
async def with_policy(x: int) -> str:
    seen = var.get()
    var.set(f"set by {x} with a policy")
    return seen


reading = ps.graph(read_and_set)


reading_in_thread = ps.graph(read_and_set_in_thread)


reading_with_policy = ps.graph(with_policy)


@ps.graph
async def reading_in_bodies(x: int) -> list[str]:
    return await ps.map_each(read_and_set, [x, x, x])


GRAPHS = [reading, reading_in_thread, reading_with_policy]


@pytest.mark.parametrize("graph", GRAPHS)
async def test_a_handler_of_a_run_sees_its_caller_and_leaves_nothing(graph) -> None:
    var.set("caller")
    assert await engine.run(graph(1)) == "caller"
    assert var.get() == "caller"
    assert await engine.run(graph(2)) == "caller"


@pytest.mark.parametrize("graph", GRAPHS)
async def test_every_call_of_a_deployment_has_a_context_of_its_own(graph) -> None:
    """It is a copy of the caller's context, and not of the context that made the deployment."""
    var.set("deployer")

    async def caller(name: str) -> None:
        var.set(name)
        for x in range(5):
            assert await service(x) == name
            assert var.get() == name

    async with engine.deploy(graph, max_in_flight=3) as service, asyncio.TaskGroup() as group:
        for name in "abcdef":
            group.create_task(caller(name))
    assert var.get() == "deployer"


@pytest.mark.parametrize("graph", GRAPHS)
async def test_a_stream_runs_in_the_context_of_its_caller_and_leaves_nothing_there(graph) -> None:
    var.set("caller")
    async with engine.stream([graph(1)]) as results:
        assert [seen async for seen in results] == ["caller"]
    assert var.get() == "caller"
    async with engine.stream(graph(x) for x in range(20)) as results:
        async for _ in results:
            assert var.get() == "caller"
    # Whether later items of a stream see values of earlier items is unspecified, but no other stream sees them.
    async with engine.stream([graph(2)]) as results:
        assert [seen async for seen in results] == ["caller"]


async def test_bodies_of_control_flow_leave_nothing_in_the_callers_context() -> None:
    var.set("caller")
    assert (await engine.run(reading_in_bodies(1)))[0] == "caller"
    assert var.get() == "caller"


async def test_a_source_runs_in_the_context_of_its_caller() -> None:
    var.set("caller")

    async def source():
        yield reading(len(var.get()))
        var.set("source")

    async with engine.stream(source()) as results:
        assert [seen async for seen in results] == ["caller"]
    assert var.get() == "caller"


async def test_current_tells_where_a_handler_is() -> None:
    found: dict[str, tuple[str, str, int, int]] = {}

    def note(place: str) -> None:
        info = ps.current()
        found[place] = (info.graph, info.node, info.item, info.attempt)

    @ps.node(name="eager", retry=ps.Retry(attempts=2))
    async def asynchronous(x: int) -> int:
        note("async")
        if ps.current().attempt == 1:
            raise LookupError
        await asyncio.sleep(0)
        return x

    @ps.node
    def inline(x: int) -> int:
        note("inline")
        return x

    @ps.node
    def second_link(x: int) -> int:
        note("link")
        return x

    @ps.node(runs_on="thread")
    def threaded(x: int) -> int:
        note(f"thread {x}")  # items in threads overtake each other
        return x

    @ps.node
    async def body(x: int) -> int:
        note(f"body {x}")
        return x

    inner = ps.graph(threaded)

    @ps.graph
    async def outer(x: int) -> list[int]:
        y = second_link(inline(await asynchronous(x)))
        return await ps.map_each(body, [await inner(y), y])

    note("outside")
    async with engine.stream(outer(x) for x in range(3)) as results:
        assert [r async for r in results] == [[0, 0], [1, 1], [2, 2]]
    assert found["outside"] == ("", "", 0, 1)
    assert found["async"] == ("outer", "eager", 2, 2)
    assert found["inline"] == ("outer", "inline", 2, 1)
    assert found["link"] == ("outer", "second_link", 2, 1)
    assert found["thread 2"] == ("outer", "threaded", 2, 1)  # a graph in a graph is inlined
    note("after")
    assert found["after"] == ("", "", 0, 1)


async def test_current_knows_the_time_that_is_left() -> None:
    @ps.node
    async def left(x: int) -> tuple[float | None, float | None]:
        return ps.current().remaining_seconds(), await timed(x)

    @ps.node(timeout_seconds=5)
    async def timed(x: int) -> float | None:
        return ps.current().remaining_seconds()

    @ps.graph
    async def both(x: int) -> list:
        return [await left(x), await timed(x)]

    (outer, inside), limited = await engine.run(both(1))
    assert (outer, inside) == (None, None)  # a node that a node calls is just a function
    assert limited is not None
    assert 0 < limited <= 5
    (outer, _), limited = await engine.run(both(1), timeout_seconds=2)
    assert outer is not None
    assert limited is not None
    assert 0 < outer <= 2
    assert 0 < limited <= 2


async def test_a_thread_can_ask_whether_anybody_still_waits() -> None:
    loop = asyncio.get_running_loop()
    begun, stopped = asyncio.Event(), asyncio.Event()

    @ps.node(runs_on="thread")
    def spin(x: int) -> int:
        loop.call_soon_threadsafe(begun.set)
        try:
            while True:
                ps.current().check_cancelled()
        except asyncio.CancelledError:
            loop.call_soon_threadsafe(stopped.set)
            raise

    run = asyncio.create_task(engine.run(ps.graph(spin)(1)))
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await stopped.wait()
