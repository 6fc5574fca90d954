"""`ps.call`: a handler runs nodes and graphs that it chooses at run time, as steps of its item."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import penstock as ps
from penstock import data, engine, extension
from tests.kit import Gate, begun, cancelled_at_every_step, model, numbers, outcomes, plain, same, virtual
from tests.saving.agents import MemoryStore
from tests.tracing import Tracing, id_of, parent_of

Handler = Callable[[Any], Coroutine[Any, Any, Any]]


def handled(handler: Handler, **options: Any) -> "ps.Graph[[Any], Any]":
    """Returns a graph with one step that runs this handler."""
    return ps.graph(ps.node(**options)(handler))


@ps.node
async def double(x: int, *, times: int = 2) -> int:
    return x * times


@ps.node
class Counting:
    def __init__(self, first: int) -> None:
        self.value = first

    async def __call__(self, by: int) -> int:
        self.value += by
        return self.value


counting = Counting(100)


@ps.graph
async def doubled_twice(x: int, y: int = 1) -> int:
    return await double(await double(x), times=y)


async def in_run(graph: "ps.Graph[[Any], Any]", x: Any) -> list[Any]:
    return [await engine.run(graph(x)) for _ in range(2)]


async def in_stream(graph: "ps.Graph[[Any], Any]", x: Any) -> list[Any]:
    return [value async for value in engine.stream(graph(x) for _ in range(2))]


async def in_deployment(graph: "ps.Graph[[Any], Any]", x: Any) -> list[Any]:
    async with engine.deploy(graph) as service:
        return [await service(x) for _ in range(2)]


@pytest.mark.parametrize("way", [in_run, in_stream, in_deployment])
async def test_it_is_a_step_wherever_the_handler_runs(way: Callable[..., Coroutine[Any, Any, list[Any]]]) -> None:
    attempts: list[tuple[int, int]] = []
    opened: list[str] = []

    @ps.node(retry=ps.Retry(3, backoff_seconds=0), concurrency=1)
    async def flaky(x: int) -> int:
        attempts.append((ps.current().item, ps.current().attempt))
        if ps.current().attempt < 3:
            raise OSError
        return x

    @ps.node(runs_on="thread")
    def in_thread(x: int) -> str:
        return f"{ps.current().node} {x}"

    @ps.resource
    async def line() -> AsyncIterator[str]:
        opened.append("open")
        yield "line"
        opened.append("closed")

    @ps.node
    async def asks(line: str, x: int) -> str:
        return f"{line} {x}"

    @ps.graph
    async def with_resource(x: int) -> str:
        return await asks(await line(), x)

    async def handler(x: int) -> list[Any]:
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(ps.call(counting, 1)) for _ in range(2)]
        return [
            await ps.call(flaky, x),
            await ps.call(in_thread, x=x),
            await ps.call(doubled_twice, x, y=5),
            await ps.call(double, x, times=3),
            await ps.call(with_resource, x),
            sorted(task.result() for task in both),
        ]

    results = await way(handled(handler), 7)
    fixed = [7, "in_thread 7", 70, 21, "line 7"]
    kept = way is not in_run  # calls that share a scope share its instance
    assert results == [[*fixed, [101, 102]], [*fixed, [103, 104] if kept else [101, 102]]]
    assert [attempt for _, attempt in attempts] == [1, 2, 3] * 2
    assert [item for item, _ in attempts] == ([0] * 6 if way is in_run else [0, 0, 0, 1, 1, 1])
    assert opened == (["open", "closed"] if kept else ["open", "closed"] * 2)


async def test_without_an_engine_it_just_awaits() -> None:
    assert [await ps.call(double, 3), await ps.call(doubled_twice, 3, y=1), await ps.call(Counting(1), 2)] == [6, 6, 3]
    assert await asyncio.to_thread(lambda: asyncio.run(ps.call(ps.node(abs), -2))) == 2


async def test_a_failure_is_raised_there_and_ends_nothing_else() -> None:
    gate = Gate()
    waits = gate.node()

    @ps.node
    async def fails(x: int) -> int:
        raise LookupError(x)

    async def handler(x: int) -> list[Any]:
        task = asyncio.create_task(ps.call(waits, 1))
        with pytest.raises(LookupError) as caught:
            await ps.call(fails, 5)
        gate.open()
        return [*caught.value.__notes__, await task]

    assert await engine.run(handled(handler)(0)) == ["in node 'fails' of graph 'fails', item 0, attempt 1", 1]


async def test_wrong_arguments_are_refused() -> None:
    async def handler(x: int) -> int:
        return await ps.call(double, x, y=2)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"graph 'double' is called wrongly: .*'y'"):
        await engine.run(handled(handler)(0))


class Lingering:
    """A node that works until it is cancelled, and a list of its events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.has_begun = asyncio.Event()
        self.node = ps.node(self.linger)

    async def linger(self, x: int) -> None:
        self.has_begun.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.events.append("unwound")
            raise

    async def left(self) -> "asyncio.Task[Any]":
        """Begins a task in a helper, so the code of the handler does not show the engine that it starts one."""
        self.has_begun.clear()
        task = asyncio.create_task(ps.call(self.node, 1))
        await self.has_begun.wait()
        return task

    async def passes(self, x: Any) -> Any:
        self.events.append("next")
        return x


@pytest.fixture
def lingering() -> Lingering:
    return Lingering()


@pytest.mark.parametrize("how", ["returns", "raises", "retry"])
async def test_what_is_left_is_cancelled_and_waited_for_when_the_handler_ends(lingering: Lingering, how: str) -> None:

    async def handler(x: int) -> Any:
        task = await lingering.left()
        if how == "raises" or (how == "retry" and ps.current().attempt == 1):
            raise LookupError
        return task

    retry = ps.Retry(2, backoff_seconds=0) if how == "retry" else None
    graph = handled(handler, retry=retry) >> ps.node(lingering.passes)
    if how == "raises":
        with pytest.raises(LookupError):
            await engine.run(graph(1))
        assert lingering.events == ["unwound"]
        return
    async with engine.stream((graph(x) for x in range(12)), max_in_flight=1) as results:
        assert all([task.cancelled() async for task in results])
    assert lingering.events == ["unwound", "unwound", "next"][how != "retry" :] * 12


async def test_what_begins_at_once_and_is_left_is_ended_too(lingering: Lingering) -> None:

    async def handler(x: int) -> Any:  # an eager task begins its call within this step
        return asyncio.create_task(ps.call(lingering.node, 1))

    task = await engine.run(handled(handler)(1))
    assert lingering.events == ["unwound"] * lingering.has_begun.is_set()
    await asyncio.wait([task])  # a task that is not eager begins only now
    assert task.cancelled()


@pytest.mark.parametrize("is_inside", [False, True])
async def test_what_a_handler_leaves_in_a_line_is_ended_at_its_first_call(
    lingering: Lingering, *, is_inside: bool
) -> None:

    async def handler(x: int) -> Any:
        return x if x < 9 else await lingering.left()  # by item 9, the worker itself calls the handler

    passes = ps.node(lingering.passes)
    graph: Any = handled(handler) >> passes >> passes >> passes
    *_, task = [value async for value in engine.stream((passes >> graph if is_inside else graph)(x) for x in range(10))]
    assert task.cancelled()
    assert "unwound" in lingering.events


async def test_what_a_generator_leaves_is_ended_with_it_and_what_a_fallback_leaves_too(lingering: Lingering) -> None:

    @ps.node
    async def values(x: int) -> AsyncIterator[Any]:
        task = await lingering.left()
        yield 1
        assert not task.done()
        yield task

    @ps.node
    async def last(values: AsyncIterator[Any]) -> Any:
        return [value async for value in values][-1]

    async def fallback(error: Exception) -> Any:
        return await lingering.left()

    async def fails(x: int) -> Any:
        raise LookupError

    for graph in (values >> last, handled(fails, fallback=fallback)):
        assert (await engine.run(graph(1))).cancelled()
    assert lingering.events == ["unwound"] * 2


@virtual
async def test_the_end_of_the_item_ends_what_the_handler_has_called() -> None:
    events: list[str] = []

    @ps.node
    async def lingers(x: int) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            events.append("unwound")

    async def handler(x: int) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ps.call(lingers, 1))
            await ps.call(lingers, 1)

    async def has_patience(x: int) -> str:
        try:
            async with asyncio.timeout(1):
                await ps.call(lingers, 1)
        except TimeoutError:
            assert len(events) == 5
            return "gave up" if await ps.call(double, 1) == 2 else ""
        return ""

    with pytest.raises(ps.DeadlineExceeded):
        await engine.run(handled(handler)(0), timeout_seconds=1)
    assert events == ["unwound"] * 2
    with pytest.raises(ps.NodeTimeoutError):
        await engine.run(handled(handler, timeout_seconds=1.0)(0))
    assert events == ["unwound"] * 4
    assert await engine.run(handled(has_patience)(0)) == "gave up"
    del events[4:]
    [caller] = await begun(engine.run(handled(handler)(0)))
    caller.cancel()
    assert await outcomes(caller) == [asyncio.CancelledError]
    assert events == ["unwound"] * 6


async def endless(x: int) -> int:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # a scope of anyio cancels again here
    return x


async def endless_batch(many: list[int]) -> list[int]:
    return [await endless(x) for x in many]


waiting = ps.node(endless)
full = ps.node(concurrency=1)(endless)


@ps.graph
async def two_waits(x: int) -> list[int]:
    return await ps.map_each(waiting, [await same(x), x], concurrency=2)


@ps.node
async def calls_in_turn(x: int) -> Any:
    return await ps.call(SCOPED["graph"], x)


SCOPED: dict[str, Any] = {
    "async def": waiting,
    "full": full,
    "timeout": ps.node(timeout_seconds=60)(endless),
    "retry": ps.node(retry=ps.Retry(2))(endless),
    "cache": ps.node(cache=ps.Cache(max_bytes=100))(endless),
    "batch": ps.node(batch=ps.Batch(max_size=1, max_wait_seconds=0))(endless_batch),
    "thread": None,
    "graph": two_waits,
    "nested": calls_in_turn,
}


@pytest.mark.parametrize("called", SCOPED)
@pytest.mark.parametrize("how", ["CancelScope", "TaskGroup of anyio", "timeout"])
async def test_a_scope_around_it_catches_its_own_cancellation(how: str, called: str) -> None:
    gate, ends = Gate(), list[Callable[[], object]]()
    target = SCOPED[called] or ps.node(runs_on="thread")(gate.block)

    async def scoped(x: int) -> str:
        with suppress(TimeoutError):
            if how == "timeout":
                async with asyncio.timeout(60) as timeout:
                    ends.append(lambda: timeout.reschedule(0))
                    await ps.call(target, x)
            elif how == "CancelScope":
                with anyio.CancelScope() as scope:
                    ends.append(scope.cancel)
                    await ps.call(target, x)
                assert scope.cancelled_caught
            else:
                async with anyio.create_task_group() as group:
                    ends.append(group.cancel_scope.cancel)
                    await ps.call(target, x)
        await asyncio.sleep(0)  # no cancellation is left
        return "went on"

    both = handled(scoped)
    calls = await begun(*[engine.run(both(x)) for x in range(2)])
    if called == "thread":
        await gate.has(2)
    for end in ends:
        end()
    if called == "thread":
        gate.open()
    assert await asyncio.gather(*calls) == ["went on"] * 2


async def test_a_stateful_node_that_starts_is_given_up_with_the_handler(lingering: Lingering) -> None:
    slow = model(enter=lambda: lingering.linger(1))

    async def handler(x: int) -> str:
        tasks = [asyncio.create_task(ps.call(slow, 1)) for _ in range(2)]
        await lingering.has_begun.wait()
        return str(len(tasks))

    assert await engine.run(handled(handler)(0)) == "2"
    assert lingering.events == ["unwound"]


async def test_nothing_begins_for_an_item_that_has_ended_while_a_stateful_node_started() -> None:
    gate = Gate()
    begun: list[int] = []

    async def call(x: int) -> None:
        begun.append(x)

    slow = model(enter=lambda: gate.wait("start"), call=call)

    @ps.node
    async def calls(x: int) -> None:
        task = asyncio.create_task(ps.call(slow, 1))
        try:
            await asyncio.shield(task)
        finally:
            gate.open()
            assert await outcomes(task) == [asyncio.CancelledError]

    @ps.node
    async def fails_meanwhile(x: int) -> None:
        await gate.has()
        raise LookupError

    @ps.graph
    async def both(x: int) -> None:
        await calls(x)
        await fails_meanwhile(x)

    with pytest.raises(LookupError):
        await engine.run(both(0))
    assert begun == []


@pytest.mark.parametrize("how", ["itself", "one another", "an instance", "a cache"])
async def test_a_circle_of_waits_is_refused(how: str) -> None:
    both = asyncio.Barrier(2)

    async def calls(x: int) -> Any:
        if how != "one another":
            return await ps.call(first, x)
        if x:
            return 0
        await both.wait()
        return await ps.call(second, 1)

    async def calls_back(x: int) -> Any:
        if x:
            return 0
        await both.wait()
        return await ps.call(first, 1)

    @ps.node
    class Itself:
        async def __call__(self, x: int) -> Any:
            return await ps.call(instance, x)

    instance = Itself()
    keeps = {"cache": ps.Cache(max_bytes=1000)} if how == "a cache" else {"concurrency": 1}
    first: Any = instance if how == "an instance" else ps.node(**keeps)(calls)
    second = ps.node(concurrency=1)(calls_back)

    begins = ps.graph(first)

    runs = [engine.run(begins(0)), *([engine.run(ps.graph(second)(0))] if how == "one another" else [])]
    results = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 60)
    assert any(isinstance(one, ps.ReentrantCallError) for one in results), results


@pytest.mark.parametrize("is_beside", [False, True])
async def test_promise_7_calls_that_never_wait_give_others_their_turn(*, is_beside: bool) -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def calls_many() -> None:
        before = turns
        for _ in range(1000):
            await ps.call(double, 1)
        assert turns - before >= 3

    async def handler(x: int) -> None:
        await (asyncio.create_task(calls_many()) if is_beside else calls_many())

    other = asyncio.create_task(take_turns())
    await engine.run(handled(handler)(0))
    other.cancel()


async def test_steps_do_not_count_in_max_workers() -> None:
    in_thread = ps.node(runs_on="thread")(plain.fn)

    async def handler(x: int) -> list[Any]:
        return await asyncio.gather(ps.call(double, 1), ps.call(in_thread, 2), ps.call(double, 3))

    for graph in (handled(handler), ps.graph(Counting(0)) >> ps.node(handler)):
        assert await engine.run(graph(0), max_workers=1) == [2, 2, 6]
        assert [value async for value in engine.stream([graph(0)], max_workers=1)] == [[2, 2, 6]]


async def test_a_cached_node_calls_tools() -> None:
    @ps.node(cache=ps.Cache(max_bytes=1000))
    async def looked_up(x: int) -> int:
        return await ps.call(double, await ps.call(counting, x))

    for run in (in_run, in_deployment):
        async with engine.Engine() as own, own.deploy(ps.graph(looked_up)) as service:
            assert await service(1) == 202
            assert await run(ps.graph(looked_up), 1) == [202, 202]


async def test_a_result_with_discard_is_that_of_the_handler_that_gets_it() -> None:
    discarded: list[list[int]] = []
    gate = Gate()
    waits = gate.node()

    @ps.node(discard=discarded.append)
    async def opens(x: int) -> list[int]:
        return [x]

    @ps.graph
    async def both(x: int) -> list[int]:
        opened = await opens(x)
        await waits(x)
        return opened

    async def handler(x: int) -> list[int]:
        opened = await ps.call(opens, x)
        if x == 4:
            raise LookupError
        return opened

    async def leaves(x: int) -> None:
        asyncio.create_task(ps.call(both, 5))  # noqa: RUF006 - the test leaves the task behind
        await gate.has()

    assert await engine.run(handled(handler)(3)) == [3]
    with pytest.raises(LookupError):
        await engine.run(handled(handler)(4))
    assert discarded == []
    await engine.run(handled(leaves)(0))
    assert discarded == [[5]]


async def test_events_spans_and_statistics_are_those_of_steps(tracing: Tracing) -> None:
    @ps.node(effectful="unordered")
    async def tells(x: int) -> int:
        await ps.emit(f"{ps.current().graph} {x}")
        return x

    async def handler(x: int) -> list[int]:
        return [await ps.call(tells, 1), await ps.call(double, 2)]

    graph = handled(handler)
    async with engine.stream(graph(0), events=str) as told:
        assert [(event.value, event.node) async for event in told] == [("tells 1", "tells")]
        assert await told.result() == [1, 4]
    parent = tracing.one("handler")
    assert {span.name for span in tracing.spans() if parent_of(span) == id_of(parent)} == {"tells", "double"}
    async with engine.deploy(graph) as service:
        await service(0)
        counted = {(actor.graph, actor.node): actor.completed for actor in service.statistics().actors}
        assert counted == {("handler", "handler"): 1, ("tells", "tells"): 1, ("double", "double"): 1}


async def test_it_is_refused_where_nothing_could_wait_for_it(tmp_path: Path) -> None:
    @ps.graph
    async def looping(x: int) -> int:
        return await ps.while_loop(ps.node(lambda x: x > 0), double, x, durable=ps.Durable(tmp_path / "loops.db"))

    starting = model(enter=lambda: ps.call(double, 1))

    async def in_thread(x: int) -> Any:
        return await asyncio.to_thread(lambda: asyncio.run(ps.call(double, x)))

    async def batch(items: list[int]) -> list[Any]:
        return [await ps.call(double, item) for item in items]

    def plain(x: int) -> Any:
        return ps.call(double, x)

    refused: list[tuple[Any, dict[str, Any], str]] = [
        (plain, {}, "in a thread or in a plain `def`"),
        (plain, {"runs_on": "thread"}, "in a thread or in a plain `def`"),
        (in_thread, {}, "in a thread or in a plain `def`"),
        (batch, {"batch": ps.Batch(4)}, "in a batch, which are for many items"),
        (_calling(starting), {}, "while a stateful node starts"),
        (_calling(numbers), {}, "gives a stream of values"),
        (_calling(ps.graph(numbers)), {}, "gives a stream of values"),
        (_calling(looping), {}, "has a durable loop, which needs a key"),
    ]
    for handler, options, message in refused:
        with pytest.raises(ps.PlanError, match=message):
            await engine.run(handled(handler, **options)(1))
    with pytest.raises(TypeError, match="takes a node or a graph"):
        await ps.call(len, [])
    with pytest.raises(ps.GraphTraceError, match=r"test_late_steps.py:\d+: ps.call is for nodes"):
        await engine.run(_traced(1))
    goes_on = asyncio.Event()

    async def outlives() -> Any:
        await goes_on.wait()
        return await ps.call(double, 1)

    async def leaves(x: int) -> Any:
        return asyncio.create_task(outlives())

    task = await engine.run(handled(leaves)(1))
    goes_on.set()
    with pytest.raises(ps.UnknownItemError, match="handler has ended"):
        await task


@ps.graph
async def _traced(x: int) -> int:
    return await ps.call(double, x)


def _calling(called: Any) -> Handler:
    async def handler(x: Any) -> Any:
        return await ps.call(called, x)

    return handler


async def test_a_stateful_node_is_refused_where_snapshots_would_not_have_its_state(tmp_path: Path) -> None:
    @ps.node
    async def tool(record: data.Record[int]) -> int:
        return await ps.call(counting if record.index == 3 else double, record.index)

    @ps.graph
    async def fed(records: AsyncIterator[data.Record[int]]) -> AsyncIterator[int]:
        return ps.map_each(tool, records)

    async with engine.stream(
        fed(data.order([0, 1, 2, 3], shuffle_seed=None)), checkpoint=ps.Checkpoint(tmp_path)
    ) as values:
        assert [await anext(values) for _ in range(3)] == [0, 2, 4]
        with pytest.raises(ps.PlanError, match="states of the steps of its graph alone"):
            await anext(values)


async def test_a_node_is_found_again_though_it_is_bound_anew_each_time() -> None:
    class Client:
        @ps.node(timeout_seconds=60)
        async def get(self, x: int) -> int:
            return x

    client = Client()

    async def handler(x: int) -> int:
        return await ps.call(client.get, x) + await ps.call(client.get.with_policy(timeout_seconds=60), x)

    async with engine.deploy(handled(handler)) as service:
        assert [await service(x) for x in range(3)] == [0, 2, 4]
        assert len(service.statistics().actors) == 2


async def test_a_node_that_a_handler_calls_as_a_function_says_that_its_options_do_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limited, free = ps.node(concurrency=1, retry=ps.Retry(3), name="limited")(same.fn), ps.node(pure=True)(same.fn)
    assert [await limited(1), await free(1)] == [1, 1]
    assert capsys.readouterr() == ("", "")

    async def handler(x: int) -> int:
        return await limited(x) + await limited.named("again")(x) + await free(x) + await ps.call(limited, x)

    assert await engine.run(handled(handler)(1)) == 4
    out, err = capsys.readouterr()
    (line,) = (out + err).splitlines()
    assert "node.called_as_function" in line
    assert "without='concurrency, retry'" in line
    assert "await ps.call(limited, ...)" in line


# Questions to a person, and keys by which other services recognise work that was done before.


def looped(store: MemoryStore, body: Handler, last: int = 1) -> "ps.Graph[[], list[Any]]":
    """Returns a graph whose loop runs `body` until its list has `last` items."""
    goes_on = ps.node(lambda state: len(state) < last)
    step = ps.node(body)
    durable = ps.Durable(store)

    @ps.graph
    async def loops() -> list[Any]:
        return await ps.while_loop(goes_on, step, [], durable=durable)

    return loops


async def test_what_a_handler_calls_may_ask() -> None:
    paid: list[str] = []

    @ps.node(retry=ps.Retry(3))
    async def pays(amount: int) -> str:
        answer = await ps.interrupt(f"pay {amount}?")
        paid.append(ps.current().idempotency_key)
        return f"{amount} {answer}"

    async def body(state: list[Any]) -> list[Any]:
        return [*state, *await asyncio.gather(ps.call(pays, 1), ps.call(ps.graph(pays), 2))]

    graph = looped(MemoryStore(), body, last=2)
    with pytest.raises(ps.Interrupted, match=r"pay 1\?"):
        await engine.run(graph, durable_key="k")
    with pytest.raises(ps.Interrupted, match=r"pay 2\?"):
        await engine.run(graph, durable_key="k", answer="yes")
    assert await engine.run(graph, durable_key="k", answer="no") == ["1 yes", "2 no"]
    assert paid[0] == paid[1] != paid[2]  # the step of the first question has run twice


@ps.node
async def key_of(x: object = None) -> str:
    return ps.current().idempotency_key


@ps.node(runs_on="thread")
def key_in_thread(x: object = None) -> str:
    return ps.current().idempotency_key


async def test_a_key_is_the_same_in_each_attempt_and_after_a_restart_and_of_no_other_work() -> None:
    seen: list[list[str]] = []

    @ps.graph
    async def each(x: object) -> list[str]:
        return await ps.map_each(key_of, [1, 2])

    @ps.node(failover=key_of)
    async def fails(x: object) -> str:
        raise OSError

    async def body(state: list[Any]) -> list[Any]:
        keys = [ps.current().idempotency_key]
        keys += await asyncio.gather(*(ps.call(node) for node in (key_of, key_of, key_in_thread)))
        keys += await ps.call(each, 1) + await ps.call(each, 2)
        keys += [await ps.call(fails, 1), await ps.call(fails.named("other"), 1)]
        seen.append(keys)
        if len(seen) in (1, 2, 4):
            raise ConnectionError
        return [*state, len(keys)]

    store = MemoryStore()
    retried = ps.node(retry=ps.Retry(2, backoff_seconds=0))(body)
    goes_on = ps.node(lambda state: len(state) < 2)

    @ps.graph
    async def loops() -> Any:
        first = await key_of(0)
        both = await ps.map_each(key_of, [first]), await ps.map_each(key_of, [first])
        state = await ps.while_loop(goes_on, retried, [], durable=ps.Durable(store))
        return ps.apply(lambda first, a, b: [first, *a, *b], first, *both), state

    with pytest.raises(ConnectionError):
        await engine.run(loops, durable_key="k")  # both attempts fail
    around, state = await engine.run(loops, durable_key="k")
    assert state == [10] * 2
    assert seen[0] == seen[1] == seen[2]
    assert seen[3] == seen[4]
    works = [*around, *seen[0], *seen[3]]
    assert len(set(works)) == len(works)
    assert all(len(key) == 32 for key in works)
    again, _ = await engine.run(loops, durable_key="k")  # another loop with the same key
    others, _ = await engine.run(loops, durable_key="other")
    assert set(works).isdisjoint([*again, *others, *seen[5], *seen[7]])


async def test_without_a_durable_loop_a_key_is_unique_to_the_call() -> None:
    seen: list[str] = []

    async def handler(x: int) -> list[str]:
        seen.append(await ps.call(key_of))
        if ps.current().attempt == 1:
            raise OSError
        return [await engine.run(ps.graph(key_of)(1)), await engine.run(ps.graph(key_of)(1))]

    graph = handled(handler, retry=ps.Retry(2, backoff_seconds=0))
    keys = await engine.run(graph(1))
    assert seen[0] == seen[1]
    keys += await engine.run(graph(1))
    assert len({*keys, *seen}) == 6

    async def nested(state: list[Any]) -> list[Any]:
        inner = [await engine.run(ps.graph(key_of)(1)) for _ in range(2)]
        inner += [await engine.run(looped(store, once), durable_key="inner") for _ in range(2)]
        return [*state, inner]

    async def once(state: list[Any]) -> list[Any]:
        return [ps.current().idempotency_key]

    store = MemoryStore()
    ((a, b, (c,), (d,)),) = await engine.run(looped(store, nested), durable_key="outer")
    assert len({a, b, c, d}) == 4
    outside = ps.current()
    assert outside.idempotency_key != outside.idempotency_key


async def test_a_key_is_the_same_wherever_the_loop_goes_on_and_on_a_worker_elsewhere() -> None:
    seen: list[str] = []

    async def body(state: list[Any]) -> list[Any]:
        seen.append(await ps.call(key_of))
        info = ps.current()
        for elsewhere in (info, pickle.loads(pickle.dumps(info))):
            with extension.working_on(elsewhere):
                assert ps.current().idempotency_key == info.idempotency_key
        if len(seen) < 4:
            raise ConnectionError
        return [*state, 1]

    graph = looped(MemoryStore(), body)
    async with engine.deploy(graph) as service:
        for run in (service.run, engine.run):
            with pytest.raises(ConnectionError):
                await run(graph, durable_key="k")
        with pytest.raises(ConnectionError):
            async with service.stream(graph(), events=str, durable_key="k") as told:
                await told.result()
        async with engine.stream(graph(), events=str, durable_key="k") as told:
            assert await told.result() == [1]
    assert len(seen) == 4
    assert len(set(seen)) == 1


def test_promise_6_nothing_that_a_handler_has_called_is_left_after_a_cancel_at_every_step() -> None:
    active: list[int] = []

    @ps.node(concurrency=1)
    async def works(x: int) -> int:
        active.append(x)
        try:
            await asyncio.sleep(0)
            return x
        finally:
            active.remove(x)

    async def handler(x: int) -> list[int]:
        task = asyncio.create_task(ps.call(works, 1))
        values = [await ps.call(counting, 1), await ps.call(works, 2)]
        return [*values, await task]

    async def main() -> list[int]:
        try:
            return await engine.run(handled(handler)(0))
        finally:
            assert not active

    for outcome in cancelled_at_every_step(main):
        assert outcome.cancelled or outcome.result == [101, 2, 1]
