"""Nested calls that would wait for themselves for ever are refused, with the chain of calls; other nested calls end."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import NoneType

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, begun, outcomes, outcomes_of, same, values_of

SCHEDULERS = ["auto", "actors", "parallel", "wave", "sequential"]


def recursive(concurrency: int, **policy):
    """A graph whose limited node runs the graph again, one level less deep."""

    @ps.node(concurrency=concurrency, **policy)
    async def descend(depth: int) -> int:
        return 0 if depth == 0 else 1 + await engine.run(down(depth - 1))

    down = ps.graph(descend)
    return down


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("limit", [1, 3])
async def test_nesting_as_deep_as_the_limit_works_and_one_level_more_is_refused(limit, scheduler) -> None:
    down = recursive(limit)
    with ps.execution_options(scheduler=scheduler):
        assert await engine.run(down(limit - 1)) == limit - 1
        with pytest.raises(ps.ReentrantCallError) as caught:
            await engine.run(down(limit))
        assert str(caught.value).startswith(" → ".join(["node 'descend' of graph 'descend'"] * (limit + 1)))
        assert ("the only place is held" if limit == 1 else "all 3 places are held") in str(caught.value)
        assert "call the graph inside the graph" in str(caught.value)
        assert await engine.run(down(limit - 1)) == limit - 1  # the refused call has given its places back


@pytest.mark.parametrize(
    "how", ["stream", "deploy", "a node with a policy", "a body of control flow", "a stream inside"]
)
async def test_it_is_refused_however_the_node_came_to_run(how) -> None:
    down = recursive(1, **({"timeout_seconds": 60} if how == "a node with a policy" else {}))

    @ps.graph
    async def each(depths: list[int]) -> list[int]:
        return await ps.map_each(down, depths)

    @ps.node(concurrency=1)
    async def reads(x: int) -> list[int]:
        if x == 0:
            return []
        return await values_of(engine.stream(reading(0) for _ in range(40)))

    reading = ps.graph(reads)
    if how == "stream":
        outcomes = await outcomes_of(engine.stream(map(down, (0, 1, 0)), on_error="skip"))
        assert [type(outcome.error) for outcome in outcomes] == [NoneType, ps.ReentrantCallError, NoneType]
    elif how == "deploy":
        async with engine.deploy(down) as service:
            with pytest.raises(ps.ReentrantCallError):
                await service(1)
            assert await service(0) == 0
    else:
        call = {"a body of control flow": each([0, 1]), "a stream inside": reading(1)}.get(how, down(1))
        with pytest.raises(ps.ReentrantCallError):
            await engine.run(call)


async def test_callers_that_hold_all_places_together_are_told_so_and_not_all_of_them() -> None:
    gate = Gate()

    @ps.node(concurrency=3)
    async def shared(depth: int) -> int:
        return 1 + await engine.run(graph(await gate.wait(depth) - 1)) if depth else 0

    graph = ps.graph(shared)
    runs = await begun(*(engine.run(graph(1)) for _ in range(3)))
    gate.open()
    results = await asyncio.gather(*runs, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ps.ReentrantCallError)]
    assert len(refused) == 1  # the place of the refused call is enough for the others
    assert "all 3 places are held" in str(refused[0])
    assert [result for result in results if not isinstance(result, Exception)] == [1, 1]


def ring(length: int, limit: int, verb: str = "run") -> list[ps.Graph[[int, int], int]]:
    """Graphs of one limited node each; a handler calls the next graph, and the last handler calls the first graph."""
    graphs: list[ps.Graph[[int, int], int]] = []

    def graph_of(number: int) -> ps.Graph[[int, int], int]:
        @ps.node(concurrency=limit, name=f"node {number}")
        async def step(depth: int, item: int) -> int:
            call = graphs[(number + 1) % length](depth - 1, item)
            for _ in range(3):  # until all calls have begun
                await asyncio.sleep(0)
            if depth == 0:
                return item
            if verb == "run":
                return await engine.run(call)
            async with engine.stream([call]) as results:
                return await anext(results)

        @ps.graph
        async def mapping(depth: int, item: int) -> int:
            return (await ps.map_each(lambda one: step(depth, one), [item]))[0]

        return mapping if verb == "body" else ps.graph(step)

    graphs += [graph_of(number) for number in range(length)]
    return graphs


@pytest.mark.parametrize("verb", ["run", "stream", "body"])
@pytest.mark.parametrize(("length", "limit"), [(2, 1), (3, 1), (2, 3)])
async def test_nodes_whose_handlers_wait_for_places_of_each_other_are_told_so(length: int, limit: int, verb) -> None:
    """Each item holds one place and waits for a place in the next node; one item fails, and the others go on."""
    graphs = ring(length, limit, verb)
    async with asyncio.timeout(60):
        calls = [engine.run(graphs[item % length](1, item)) for item in range(length * limit)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, ps.ReentrantCallError)]
        assert len(refused) == 1
        assert "by way of a nested call, for places of other nodes" in str(refused[0])
        assert "in the same order" in str(refused[0])
        assert [one for one in results if one not in refused] == [
            item for item, one in enumerate(results) if one not in refused
        ]
        assert await engine.run(graphs[0](length * limit - 1, 7)) == 7  # all places are free again


async def test_a_circle_that_is_not_closed_is_waited_for() -> None:
    """One place is held by a handler that makes no nested call, so the other handlers get the place in the end."""
    first, second = ring(2, 2)
    calls = [first(1, 0), first(1, 1), second(1, 2), second(0, 3)]
    assert await asyncio.gather(*map(engine.run, calls)) == [0, 1, 2, 3]


async def test_an_item_that_waits_behind_a_circle_is_not_the_one_that_fails() -> None:
    first, second = ring(2, 1)

    @ps.node(concurrency=1)
    async def outside(item: int) -> int:
        return await engine.run(first(0, item))

    waiting = ps.graph(outside)

    results = await outcomes(*map(engine.run, (first(1, 0), second(1, 1), waiting(2))))
    assert results.count(ps.ReentrantCallError) == 1
    assert results[2] == 2


async def test_a_caller_that_joins_a_computation_which_waits_for_its_place_by_way_of_a_run_is_refused() -> None:
    holds, computes = asyncio.Event(), asyncio.Event()

    @ps.node(cache=ps.Cache(max_bytes=1000))
    async def kept(x: int) -> int:
        computes.set()
        return await engine.run(limited_alone(x, False))

    @ps.node(concurrency=1)
    async def limited(x: int, joins: bool) -> int:
        if not joins:
            return x
        holds.set()
        await computes.wait()
        await testing.wait_quiescent()  # the run inside the computation waits for the place
        return await engine.run(kept_alone(x))

    limited_alone = ps.graph(limited)
    kept_alone = ps.graph(kept)

    holder = asyncio.create_task(engine.run(limited_alone(1, True)))
    await holds.wait()
    assert await outcomes(holder, engine.run(kept_alone(1))) == [ps.ReentrantCallError] * 2


async def test_a_caller_may_handle_it_and_go_on() -> None:
    @ps.node(concurrency=1)
    async def careful(x: int) -> str:
        if x == 0:
            return "inner"
        try:
            return await engine.run(graph(0))
        except ps.ReentrantCallError:
            return "refused"

    graph = ps.graph(careful)

    assert await engine.run(graph(1)) == "refused"


async def test_a_sibling_that_holds_the_place_and_ends_is_waited_for() -> None:
    """Only places of the handler that makes the nested call count, not places of other handlers of the same item."""
    gate = asyncio.Event()

    @ps.node(concurrency=1)
    async def limited(x: int) -> int:
        if x == 1:
            await gate.wait()
        return x

    @ps.node
    async def nests(x: int) -> int:
        return await engine.run(inner(x + 1))

    inner = ps.graph(limited)

    @ps.graph
    async def outer(x: int) -> list[int]:
        return [await limited(x), await nests(x)]

    [run] = await begun(engine.run(outer(1)))
    assert not run.done()
    gate.set()
    assert await run == [1, 2]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_frame_that_is_refused_in_the_middle_of_its_way_ends_cleanly(scheduler) -> None:
    """A worker has carried the frame to the limited node; other branches of the frame still run."""
    unwound = []

    @ps.node
    async def beside(x: int) -> int:
        try:
            await asyncio.Event().wait()
        finally:
            unwound.append(x)
        return x

    @ps.node(concurrency=1)
    async def limited(x: int) -> int:
        return x if x == 0 else await engine.run(inner(0))

    @ps.graph
    async def inner(x: int) -> list[int]:
        y = await same(x)
        return [await limited(y), await beside(y)]

    outer = same >> limited
    with ps.execution_options(scheduler=scheduler), pytest.raises(ps.ReentrantCallError):
        await engine.run(outer(1))
    assert set(unwound) <= {0}
    assert await engine.run(outer(0)) == 0


async def test_a_task_of_a_handler_counts_as_the_handler() -> None:
    @ps.node(concurrency=1)
    async def gathers(x: int) -> int:
        if x == 0:
            return 0
        return sum(await asyncio.gather(engine.run(graph(0)), engine.run(graph(0))))

    graph = ps.graph(gathers)

    with pytest.raises(ps.ReentrantCallError):
        await engine.run(graph(1))


def through_a_thread(service_of, loop):
    @ps.node(runs_on="thread")
    def calls(x: int) -> int:
        return 0 if x == 0 else asyncio.run_coroutine_threadsafe(service_of()(x - 1), loop).result()

    return ps.graph(calls)


async def test_a_deployment_called_from_inside_itself_by_way_of_a_thread_is_refused() -> None:
    graph = through_a_thread(lambda: service, asyncio.get_running_loop())
    async with engine.deploy(graph, max_in_flight=1) as service:
        with pytest.raises(ps.ReentrantCallError, match="calls → calls"):
            await service(1)
        assert await service(0) == 0


@pytest.mark.parametrize("verb", ["run", "service", "stream"])
async def test_a_call_made_by_way_of_a_thread_ends_at_the_deadline_around_it(verb: str) -> None:
    loop, gate = asyncio.get_running_loop(), Gate()
    inner = gate.graph()
    made: list[Future[None]] = []

    @ps.node
    async def values(x: int) -> AsyncIterator[int]:
        yield await gate.wait(x)

    async def call() -> None:
        if verb == "run":
            await engine.run(inner(0))
        elif verb == "service":
            await service.run(inner(0), timeout_seconds=60)  # the earlier deadline counts
        else:
            async with engine.stream(ps.graph(values)(0)) as stream:
                await anext(stream)

    @ps.node(runs_on="thread")
    def calls(x: int) -> None:
        made.append(asyncio.run_coroutine_threadsafe(call(), loop))
        made[0].result()

    async with engine.deploy(inner) as service:
        try:
            with pytest.raises(ps.DeadlineExceeded, match=r"graph 'calls' did not finish within 0\.5 s"):
                await engine.run(ps.graph(calls)(0), timeout_seconds=0.5)  # time for the thread to begin
            with pytest.raises(ps.DeadlineExceeded, match="before the deadline of the call around it"):
                await asyncio.wait_for(asyncio.wrap_future(made[0]), 60)
        finally:
            gate.open()


async def test_a_handler_that_has_ended_holds_nothing() -> None:
    """The handler started a run and did not wait for it; its item is still in flight. Another item has the place."""
    inside, later, other = gates = [Gate() for _ in range(3)]
    waits_inside, waits_later = inside.node(), later.node()
    tasks: list[asyncio.Task] = []

    @ps.node(concurrency=1)
    async def limited(x: int) -> int:
        if x == 1:
            tasks.append(asyncio.create_task(engine.run(inner(0))))
            await asyncio.sleep(0)
        return await other.wait(x) if x == 2 else x

    @ps.graph
    async def inner(x: int) -> int:
        return await limited(await waits_inside(x))

    @ps.graph
    async def outer(x: int) -> int:
        return await waits_later(await limited(x))

    runs = await begun(*(engine.run(outer(x)) for x in (1, 2)))
    inside.open()
    await testing.wait_quiescent()
    assert not tasks[0].done()
    for gate in gates:
        gate.open()
    assert await asyncio.gather(*runs, *tasks) == [1, 2, 0]
