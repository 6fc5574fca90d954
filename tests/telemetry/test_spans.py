"""Each call has one span; each node execution has one if the call is sampled; and no span stays open."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog
from opentelemetry import trace

import penstock as ps
from penstock import engine, telemetry, testing
from penstock.telemetry import names
from tests.tracing import Tracing, attributes_of, id_of, parent_of


@ps.node
async def fetch(x: int) -> int:
    await asyncio.sleep(0)
    return x


@ps.node(runs_on="thread")
def compute(x: int) -> int:
    trace.get_current_span().set_attribute("seen", x)
    return x


@ps.node
def plain(x: int) -> int:
    return x


@ps.node(retry=ps.Retry(attempts=2))
async def flaky(x: int) -> int:
    if ps.current().attempt == 1:
        raise ValueError(x)
    return x


@ps.node
async def fail(x: int) -> int:
    raise LookupError(x)


@ps.graph
async def line(x: int) -> int:
    return plain(compute(await fetch(x)))


@ps.graph
async def failing(x: int) -> int:
    return await fail(await fetch(x))


async def test_a_profile_changes_no_span(tracing: Tracing) -> None:
    with telemetry.profile() as profile:
        assert await engine.run(line(3)) == 3
    run = tracing.one("penstock.run line")
    assert [parent_of(tracing.one(name)) for name in ("fetch", "compute", "plain")] == [id_of(run)] * 3
    assert [node.count for node in profile.nodes] == [1, 1, 1]


async def test_a_call_is_a_child_of_its_callers_span_and_has_one_span_per_node(tracing: Tracing) -> None:
    with tracing.provider.get_tracer("test").start_as_current_span("caller") as caller:
        assert await engine.run(line(3)) == 3
        assert trace.get_current_span() is caller
    run = tracing.one("penstock.run line")
    assert parent_of(run) == caller.get_span_context().span_id
    assert dict(run.attributes or {}) == {names.GRAPH: "line", names.OUTCOME: "done"}
    for name in ("fetch", "compute", "plain"):
        span = tracing.one(name)
        assert parent_of(span) == id_of(run)
        assert span.attributes is not None
        assert span.attributes[names.FUNCTION] == f"{__name__}.{name}"
        assert span.attributes[names.ITEM] == 0
    seen = tracing.one("compute").attributes
    assert seen is not None
    assert seen["seen"] == 3  # the context travels into the thread
    assert len(tracing.spans()) == 5


async def test_items_of_a_stream_are_children_of_its_span(tracing: Tracing) -> None:
    async with engine.stream(line(x) for x in range(3)) as stream:
        assert [x async for x in stream] == [0, 1, 2]
    whole = tracing.one("penstock.stream")
    runs = tracing.named("penstock.run line")
    assert sorted((span.attributes or {})[names.ITEM] for span in runs) == [0, 1, 2]  # type: ignore[type-var]
    assert {parent_of(run) for run in runs} == {id_of(whole)}
    assert {parent_of(span) for span in tracing.named("fetch")} == {id_of(run) for run in runs}
    assert len(tracing.named("plain")) == 3


async def test_every_call_of_a_deployment_is_a_child_of_its_own_caller(tracing: Tracing) -> None:
    tracer = tracing.provider.get_tracer("test")

    async def caller(x: int) -> int:
        with tracer.start_as_current_span(f"caller {x}") as span:
            await service(x)
            return span.get_span_context().span_id

    async with engine.deploy(line) as service:
        callers = await asyncio.gather(*(caller(x) for x in range(3)))
    assert sorted(parent_of(run) or 0 for run in tracing.named("penstock.run line")) == sorted(callers)


async def test_an_error_is_on_the_span_of_its_node_and_of_its_call(tracing: Tracing) -> None:
    with pytest.raises(LookupError):
        await engine.run(failing(1))
    for name in ("fail", "penstock.run failing"):
        span = tracing.one(name)
        assert (span.attributes or {})[names.ERROR_TYPE] == "LookupError"
        assert not span.status.is_ok
        assert [event.name for event in span.events] == ["exception"]
    assert (tracing.one("penstock.run failing").attributes or {})[names.OUTCOME] == "failed"
    assert tracing.one("fetch").status.is_unset


class Unprintable(Exception):
    """An error whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@ps.node(retry=ps.Retry(attempts=2))
async def unprintable(x: int) -> int:
    if x or ps.current().attempt == 1:
        raise Unprintable
    return x


@ps.graph
async def speechless(x: int) -> int:
    return await unprintable(x)


async def test_an_error_without_a_text_is_the_one_that_is_raised(tracing: Tracing) -> None:
    with pytest.raises(Unprintable):
        await engine.run(speechless(1))
    for span in (tracing.one("unprintable"), tracing.one("penstock.run speechless")):
        assert attributes_of(span)[names.ERROR_TYPE] == "Unprintable"
        assert span.status.description == "<its str() raises RuntimeError>"
    assert await engine.run(speechless(0)) == 0
    async with engine.stream((speechless(x) for x in range(3)), on_error="skip") as results:
        assert [result async for result in results] == [0]


async def test_another_attempt_is_an_event_of_the_span(tracing: Tracing) -> None:
    assert await engine.run(ps.graph(flaky)(1)) == 1
    events = tracing.one("flaky").events
    assert [(event.name, dict(event.attributes or {})) for event in events] == [
        (names.RETRY, {names.NODE: "flaky", names.ATTEMPT: 2, names.ERROR_TYPE: "ValueError", names.ERROR_MESSAGE: "1"})
    ]


async def test_an_unsampled_call_has_no_spans_of_nodes_and_its_warnings_still_find_it(tracing: Tracing) -> None:
    tracing.sampler.is_on = False

    @ps.node
    async def warn(x: int) -> int:
        assert not trace.get_current_span().is_recording()
        assert trace.get_current_span().get_span_context().is_valid
        return x

    assert await engine.run(ps.graph(warn)(1)) == 1
    assert tracing.spans() == ()


async def test_warnings_carry_the_ids_of_the_span(tracing: Tracing) -> None:
    with structlog.testing.capture_logs() as logs, tracing.provider.get_tracer("test").start_as_current_span("caller"):
        async with engine.stream([failing(1)], on_error="skip") as stream:
            assert [x async for x in stream] == []
    trace_id = trace.format_trace_id(tracing.one("caller").context.trace_id)  # type: ignore[union-attr]
    assert [(log["event"], log.get("trace_id")) for log in logs] == [("stream.item_skipped", trace_id)]


@ps.node
class Model:
    def __init__(self, failing: str) -> None:
        self.failing = failing

    async def __aenter__(self) -> "Model":
        await asyncio.sleep(0)
        if self.failing == "enter":
            raise ConnectionError
        if self.failing == "hang":
            await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.sleep(0)
        if self.failing == "exit":
            raise ConnectionError

    async def __call__(self, x: int) -> int:
        await asyncio.sleep(0)
        return x


models = {failing: Model(failing) for failing in ("", "enter", "exit", "hang")}


def modelled(failing: str) -> ps.Graph[[int], int]:
    model = models[failing]

    @ps.graph
    async def graph(x: int) -> int:
        return await model(x)

    return graph


@pytest.mark.parametrize("failing", ["enter", "exit"])
async def test_no_span_stays_open_when_a_stateful_node_fails(failing: str, tracing: Tracing) -> None:
    graph = modelled(failing)
    with pytest.raises(ConnectionError):
        await engine.run(graph(1))
    run = tracing.one("penstock.run graph")
    assert (run.attributes or {})[names.OUTCOME] == ("failed" if failing == "enter" else "done")
    with pytest.raises(ConnectionError):
        async with engine.stream([graph(1)]) as stream:
            await anext(stream)
    with pytest.raises(ConnectionError):
        async with engine.deploy(graph) as service:
            await service(1)
    assert len(tracing.named("penstock.stream")) == 1


async def test_no_span_stays_open_when_an_engine_is_closed(tracing: Tracing) -> None:
    graph = modelled("hang")
    async with engine.Engine() as own:
        run = asyncio.create_task(own.run(graph(1)))
        reading = asyncio.create_task(read_one(own.stream([graph(1)])))
        await testing.wait_quiescent()
    for task in (run, reading):
        with pytest.raises(ps.EngineClosedError):
            await task
    assert len(tracing.named("penstock.run graph")) >= 1
    assert len(tracing.named("penstock.stream")) == 1


async def read_one(stream: engine.Stream[int]) -> int:
    async with stream:
        return await anext(stream)


async def test_no_span_stays_open_when_callers_and_readers_leave(
    tracing: Tracing, caplog: pytest.LogCaptureFixture
) -> None:
    assert await read_one(engine.stream(line(x) for x in range(100))) == 0
    assert {(span.attributes or {})[names.OUTCOME] for span in tracing.named("penstock.run line")} <= {
        "done",
        "cancelled",
        "failed",
    }
    async with engine.deploy(line) as service:
        for turns in range(6):
            call = asyncio.create_task(service(1))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        assert await read_one(service.stream(line(x) for x in range(100))) == 0
        with pytest.raises(TimeoutError):
            await service.run(line(1), timeout_seconds=0)
    run = asyncio.create_task(engine.run(line(1)))
    await asyncio.sleep(0)
    run.cancel()
    await asyncio.wait([run])
    assert tracing.spans()
    assert "detach" not in caplog.text


async def test_a_streamed_call_has_a_span_until_it_has_been_read(tracing: Tracing) -> None:
    @ps.node
    async def tokens(count: int) -> AsyncIterator[int]:
        for number in range(count):
            trace.get_current_span().set_attribute("seen", number)
            yield number

    @ps.graph
    async def answer(count: int) -> AsyncIterator[int]:
        return ps.map_each(fetch, tokens(count))

    async with engine.stream(answer(3)) as values:
        assert [value async for value in values] == [0, 1, 2]
    run = tracing.one("penstock.run answer")
    assert run.attributes is not None
    assert run.attributes[names.OUTCOME] == "done"
    assert [parent_of(span) for span in tracing.named("tokens")] == [id_of(run)]
    assert (tracing.one("tokens").attributes or {})["seen"] == 2
    assert len(tracing.named("fetch")) == 3


async def test_the_values_of_a_fold_have_spans_below_it_and_those_left_out_are_told_there(tracing: Tracing) -> None:
    @ps.node
    async def numbers(count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    @ps.node
    def add(total: int, number: int) -> int:
        if number == 1:
            raise ValueError("one is no good")
        return total + number

    @ps.graph
    async def answer(count: int) -> int:
        return await ps.fold(add, numbers(count), 0, on_error="skip")

    assert await engine.run(answer(4)) == 5
    fold = tracing.one("fold")
    added = tracing.named("add")
    assert [parent_of(span) for span in added] == [id_of(fold)] * 4
    assert [(span.attributes or {})[names.ITEM] for span in added] == [0, 1, 2, 3]
    assert [span.status.status_code is trace.StatusCode.ERROR for span in added] == [False, True, False, False]
    [skipped] = [event for event in fold.events if event.name == names.ITEM_SKIPPED]
    assert (skipped.attributes or {})[names.ITEM] == 1


async def test_leaving_a_stream_early_is_no_error_and_detaches_nothing(
    tracing: Tracing, caplog: pytest.LogCaptureFixture
) -> None:
    @ps.node
    async def endless() -> AsyncIterator[int]:
        while True:
            await asyncio.sleep(0)
            yield 1

    @ps.graph
    async def answer() -> AsyncIterator[int]:
        return endless()

    async with engine.deploy(answer) as service, service.stream(answer()) as values:
        await anext(values)
    assert (tracing.one("penstock.run answer").attributes or {})[names.OUTCOME] == "cancelled"
    assert tracing.one("endless").status.status_code is trace.StatusCode.UNSET
    assert "detach" not in caplog.text
