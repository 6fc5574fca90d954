"""Context variables and `current()`: a handler sees its caller and its own place; what it sets reaches nobody else."""

import asyncio
import contextvars
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.kit import outcomes

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


reading = ps.graph(read_and_set)


reading_in_thread = ps.graph(read_and_set_in_thread)


reading_with_policy = ps.graph(read_and_set.with_policy(timeout_seconds=60))


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
    assert [seen async for seen in engine.stream([graph(1)])] == ["caller"]
    assert var.get() == "caller"
    async with engine.stream(graph(x) for x in range(20)) as results:
        async for _ in results:
            assert var.get() == "caller"
    # Whether later items of a stream see values of earlier items is unspecified, but no other stream sees them.
    assert [seen async for seen in engine.stream([graph(2)])] == ["caller"]


async def test_an_async_source_runs_in_the_context_of_its_caller() -> None:
    var.set("caller")

    async def source():
        yield reading(len(var.get()))
        var.set("source")

    assert [seen async for seen in engine.stream(source())] == ["caller"]
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

    assert [r async for r in engine.stream((outer(x) for x in range(3)), max_in_flight=1)] == [[0, 0], [1, 1], [2, 2]]
    note(0)
    assert found.pop("") == ("", "", 0, 1)  # outside of a handler
    assert found.pop("body")[1:] == ("body", 1, 1)  # in a body, the item is the place in the list
    assert found == {  # a graph in a graph is inlined
        node: ("outer", node, 2, 2 if node == "eager" else 1) for node in ("eager", "inline", "second link", "threaded")
    }


@pytest.mark.parametrize("way", ["run", "stream", "deploy"])
async def test_an_error_of_the_very_first_item_or_a_later_one_names_the_link_that_failed(way: str) -> None:
    """An actor times its first item, which takes another code path than later items."""
    seen: list[str] = []

    def note(x: int) -> int:
        seen.append(ps.current().node)
        if seen[-1] == "third" and x % 2 == 0:
            raise LookupError(x)
        return x

    first, second, third = (ps.node(name=name)(note) for name in ("first", "second", "third"))
    chain = first >> second >> third
    numbers = [0, 1, 3, 2, 5, 4]
    if way == "stream":
        outcomes = [outcome async for outcome in engine.stream(map(chain, numbers)).outcomes()]
        found = [outcome.error or outcome.value for outcome in outcomes]
    else:
        async with engine.deploy(chain) as service:
            ask = service if way == "deploy" else lambda number: engine.run(chain(number))
            found = [(await asyncio.gather(ask(number), return_exceptions=True))[0] for number in numbers]
    assert [one for one in found if not isinstance(one, LookupError)] == [1, 3, 5]
    items = [0, 0, 0] if way == "run" else [0, 3, 5]
    assert [one.__notes__ for one in found if isinstance(one, LookupError)] == [
        [f"in node 'third' of graph {chain.name!r}, item {item}, attempt 1"] for item in items
    ]
    assert seen[:3] == seen[-3:] == ["first", "second", "third"]


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
    assert await outcomes(run) == [asyncio.CancelledError]
    await stopped.wait()
