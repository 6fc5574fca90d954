"""Context variables: a handler sees its caller's values; values that it sets reach neither caller nor other calls."""

import asyncio
import contextvars
from typing import Any

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
    for x in range(2):
        assert await engine.run(graph(x)) == "caller"
        assert var.get() == "caller"
    assert (await engine.run(reading_in_bodies(1)))[0] == "caller"
    assert var.get() == "caller"


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


async def test_an_async_source_runs_in_the_context_of_its_caller() -> None:
    var.set("caller")

    async def source():
        yield reading(len(var.get()))
        var.set("source")

    async with engine.stream(source()) as results:
        assert [seen async for seen in results] == ["caller"]
    assert var.get() == "caller"


async def test_current_tells_where_a_handler_is() -> None:
    found: dict[str, tuple[str, str, int, int]] = {}

    def note(x: int) -> int:
        info = ps.current()
        found[info.node] = (info.graph, info.node, info.item, info.attempt)
        return x

    @ps.node(name="eager", retry=ps.Retry(attempts=2))
    async def asynchronous(x: int) -> int:
        note(x)
        if ps.current().attempt == 1:
            raise LookupError
        await asyncio.sleep(0)
        return x

    inline, second_link, body = (ps.node(name=name)(note) for name in ("inline", "second link", "body"))
    inner = ps.graph(ps.node(runs_on="thread", name="threaded")(note))

    @ps.graph
    async def outer(x: int) -> list[int]:
        y = second_link(inline(await asynchronous(x)))
        return await ps.map_each(body, [await inner(y), y])

    async with engine.stream((outer(x) for x in range(3)), max_in_flight=1) as results:
        assert [r async for r in results] == [[0, 0], [1, 1], [2, 2]]
    note(0)
    assert found.pop("") == ("", "", 0, 1)  # outside of a handler
    assert found.pop("body")[1:] == ("body", 1, 1)  # in a body, the item is the place in the list
    assert found == {  # a graph in a graph is inlined
        node: ("outer", node, 2, 2 if node == "eager" else 1) for node in ("eager", "inline", "second link", "threaded")
    }


async def test_current_knows_the_time_that_is_left() -> None:
    @ps.node
    async def left(x: int) -> list[float | None]:
        return [ps.current().remaining_seconds(), await timed(x)]

    @ps.node(timeout_seconds=5)
    async def timed(x: int) -> float | None:
        return ps.current().remaining_seconds()

    @ps.graph
    async def all_three(x: int) -> list[Any]:
        return [await left(x), await timed(x), await ps.map_each(left, [x])]

    nothing = [None, None]  # a node that a node calls is just a function
    outer, limited, bodies = await engine.run(all_three(1))
    assert (outer, bodies) == (nothing, [nothing])
    assert 0 < limited <= 5
    outer, limited, bodies = await engine.run(all_three(1), timeout_seconds=2)
    assert all(0 < seconds <= 2 for seconds in [*outer, limited, *bodies[0]])


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
