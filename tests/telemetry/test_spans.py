"""Each call has one span; each node execution has one if the call is sampled; and no span stays open."""

import asyncio
from functools import partial
from typing import Any

import pytest
from opentelemetry import trace

import penstock as ps
from penstock import engine, telemetry, testing
from penstock.telemetry import names
from tests.kit import model, numbers, paused, plain
from tests.tracing import Tracing, attributes_of, id_of, parent_of


@ps.node(runs_on="thread")
def compute(x: int) -> int:
    trace.get_current_span().set_attribute("seen", x)
    return x


@ps.node
async def fail(x: int) -> int:
    raise LookupError(x)


line = paused >> compute >> plain
RUN_OF_LINE = "penstock.run paused_to_compute_to_plain"


async def test_a_call_is_a_child_of_its_callers_span_and_has_one_span_per_node(tracing: Tracing) -> None:
    with tracing.provider.get_tracer("test").start_as_current_span("caller") as caller:
        with telemetry.profile():  # changes no span
            assert await engine.run(line(3)) == 3
        assert trace.get_current_span() is caller
    run = tracing.one(RUN_OF_LINE)
    assert parent_of(run) == caller.get_span_context().span_id
    assert attributes_of(run) == {names.GRAPH: "paused_to_compute_to_plain", names.OUTCOME: "done"}
    for name in ("paused", "compute", "plain"):
        span = tracing.one(name)
        assert parent_of(span) == id_of(run)
        assert attributes_of(span)[names.FUNCTION].endswith(f".{name}")
        assert attributes_of(span)[names.ITEM] == 0
    assert attributes_of(tracing.one("compute"))["seen"] == 3  # the context travels into the thread
    assert len(tracing.spans()) == 5


async def test_an_error_is_on_the_span_of_its_node_and_of_its_call(tracing: Tracing) -> None:
    with pytest.raises(LookupError):
        await engine.run((paused >> fail)(1))
    for name in ("fail", "penstock.run paused_to_fail"):
        span = tracing.one(name)
        assert attributes_of(span)[names.ERROR_TYPE] == "LookupError"
        assert not span.status.is_ok
        assert [event.name for event in span.events] == ["exception"]
    assert attributes_of(tracing.one("penstock.run paused_to_fail"))[names.OUTCOME] == "failed"
    assert tracing.one("paused").status.is_unset


class Unprintable(Exception):
    """An error whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@ps.node(retry=ps.Retry(attempts=2))
async def unprintable(x: int) -> int:
    if x or ps.current().attempt == 1:
        raise Unprintable
    return x


speechless = ps.graph(unprintable)


async def test_an_error_without_a_text_is_the_one_that_is_raised(tracing: Tracing) -> None:
    with pytest.raises(Unprintable):
        await engine.run(speechless(1))
    for span in (tracing.one("unprintable"), tracing.one("penstock.run unprintable")):
        assert attributes_of(span)[names.ERROR_TYPE] == "Unprintable"
        assert span.status.description == "<its str() raises RuntimeError>"
    assert await engine.run(speechless(0)) == 0
    async with engine.stream((speechless(x) for x in range(3)), on_error="skip") as results:
        assert [result async for result in results] == [0]


async def test_another_attempt_and_a_fallback_are_events_of_the_span(tracing: Tracing) -> None:
    careful = fail.with_policy(name="careful", retry=ps.Retry(attempts=2), fallback=lambda error: -1)
    assert await engine.run(ps.graph(careful)(1)) == -1
    span = tracing.one("careful")
    assert attributes_of(span)[names.OUTCOME] == "done"
    failed = {names.NODE: "careful", names.ERROR_TYPE: "LookupError", names.ERROR_MESSAGE: "1"}
    assert [(event.name, dict(event.attributes or {})) for event in span.events] == [
        (names.RETRY, {**failed, names.ATTEMPT: 2}), (names.FALLBACK, failed),
    ]  # fmt: skip


async def disconnect() -> None:
    await asyncio.sleep(0)
    raise ConnectionError


@pytest.mark.parametrize("failing", ["enter", "leave"])
async def test_no_span_stays_open_when_a_stateful_node_fails(failing: Any, tracing: Tracing) -> None:
    graph = ps.graph(model(**{failing: disconnect}))
    with pytest.raises(ConnectionError):
        await engine.run(graph(1))
    run = tracing.one("penstock.run Model")
    assert attributes_of(run)[names.OUTCOME] == ("failed" if failing == "enter" else "done")
    with pytest.raises(ConnectionError):
        async with engine.stream([graph(1)]) as stream:
            await anext(stream)
    with pytest.raises(ConnectionError):
        async with engine.deploy(graph) as service:
            await service(1)
    assert len(tracing.named("penstock.stream")) == 1


async def test_no_span_stays_open_when_an_engine_is_closed(tracing: Tracing) -> None:
    graph = ps.graph(model(enter=partial(asyncio.sleep, 0.02)))
    async with engine.Engine() as own:
        run = asyncio.create_task(own.run(graph(1)))
        reading = asyncio.create_task(read_one(own.stream([graph(1)])))
        await testing.wait_quiescent()
    for task in (run, reading):
        with pytest.raises(ps.EngineClosedError):
            await task
    assert len(tracing.named("penstock.run Model")) >= 1
    assert len(tracing.named("penstock.stream")) == 1


async def read_one(stream: engine.Stream[int]) -> int:
    async with stream:
        return await anext(stream)


async def test_no_span_stays_open_when_callers_and_readers_leave(
    tracing: Tracing, caplog: pytest.LogCaptureFixture
) -> None:
    assert await read_one(engine.stream(line(x) for x in range(100))) == 0
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


async def test_the_values_of_a_fold_have_spans_below_it_and_those_left_out_are_told_there(tracing: Tracing) -> None:
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
    assert [attributes_of(span)[names.ITEM] for span in added] == [0, 1, 2, 3]
    assert [span.status.status_code is trace.StatusCode.ERROR for span in added] == [False, True, False, False]
    [skipped] = [event for event in fold.events if event.name == names.ITEM_SKIPPED]
    assert attributes_of(skipped)[names.ITEM] == 1
