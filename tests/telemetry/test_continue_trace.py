"""`telemetry.continue_trace`: a run belongs to the trace of the request that it answers."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
import structlog
from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import penstock as ps
from penstock import engine, telemetry
from penstock.telemetry import names

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is recorded while tracing is set up for one test, with the SDK's default sampler."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr("penstock.telemetry.spans.tracer._tracer", provider.get_tracer(names.INSTRUMENTATION))
    yield exporter
    provider.shutdown()


seen: list[object] = []


@ps.node
async def look(x: int) -> int:
    seen.append(baggage.get_baggage("tenant"))
    if x < 0:
        raise ValueError(x)
    return x


@ps.graph
async def looking(x: int) -> int:
    return await look(x)


def ids(span: trace.Span) -> tuple[str, str]:
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)


async def test_a_run_is_a_child_of_the_caller_in_the_other_process(spans: InMemorySpanExporter) -> None:
    with telemetry.continue_trace({"traceparent": SAMPLED, "tracestate": "vendor=1"}):
        await engine.run(looking(1))
    node, run = spans.get_finished_spans()
    assert (run.name, node.name) == ("penstock.run looking", "look")
    assert run.parent is not None
    assert run.context is not None
    assert node.parent is not None
    assert (trace.format_trace_id(run.parent.trace_id), trace.format_span_id(run.parent.span_id)) == (TRACE, SPAN)
    assert run.parent.is_remote
    assert run.context.trace_state.get("vendor") == "1"
    assert node.parent.span_id == run.context.span_id


async def test_every_call_of_a_deployment_has_its_own_request(spans: InMemorySpanExporter) -> None:
    async def answer(number: int) -> None:
        with telemetry.continue_trace({"traceparent": f"00-{number:032x}-{number:016x}-01"}):
            await service(number)

    async with engine.deploy(looking) as service:
        await asyncio.gather(*(answer(number) for number in range(1, 6)))
    runs = [span for span in spans.get_finished_spans() if span.name == "penstock.run looking"]
    assert sorted(span.parent.span_id for span in runs if span.parent) == [1, 2, 3, 4, 5]
    assert all(span.parent and span.context and span.parent.trace_id == span.context.trace_id for span in runs)


async def test_a_request_that_its_caller_does_not_sample_has_no_spans_and_its_logs_its_id(
    spans: InMemorySpanExporter,
) -> None:
    with telemetry.continue_trace({"traceparent": UNSAMPLED}), structlog.testing.capture_logs() as logs:
        async with engine.stream([looking(-1)], on_error="skip") as results:
            assert [result async for result in results] == []
    assert spans.get_finished_spans() == ()
    assert [(log["event"], log["trace_id"]) for log in logs] == [("stream.item_skipped", TRACE)]


async def test_without_an_sdk_logs_carry_the_id_as_well() -> None:
    with telemetry.continue_trace({"traceparent": SAMPLED}), structlog.testing.capture_logs() as logs:
        async with engine.stream([looking(-1)], on_error="skip") as results:
            assert [result async for result in results] == []
    assert [(log["trace_id"], log["span_id"]) for log in logs] == [(TRACE, SPAN)]


PAIRS = [("TraceParent", SAMPLED), ("baggage", "tenant=blue"), ("baggage", "plan=free"), ("accept", "*/*")]


@pytest.mark.parametrize(
    "headers",
    [
        PAIRS,
        [(name.encode(), value.encode()) for name, value in PAIRS],
        tuple(PAIRS),
        {"TRACEPARENT": SAMPLED, "Baggage": "tenant=blue,plan=free"},
    ],
    ids=["pairs", "ASGI", "tuple", "mapping"],
)
async def test_headers_of_any_form_and_case(headers: Mapping[str, str]) -> None:
    seen.clear()
    with telemetry.continue_trace(headers):
        assert ids(trace.get_current_span()) == (TRACE, SPAN)
        assert dict(baggage.get_all()) == {"tenant": "blue", "plan": "free"}
        await engine.run(looking(1))
    assert seen == ["blue"]  # baggage travels into the node
    assert not trace.get_current_span().get_span_context().is_valid
    assert dict(baggage.get_all()) == {}


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{SPAN}-01"}])
def test_headers_without_a_trace_change_nothing(headers: dict[str, str]) -> None:
    with (
        telemetry.continue_trace({"traceparent": SAMPLED, "baggage": "tenant=blue"}),
        telemetry.continue_trace(headers),
    ):
        assert ids(trace.get_current_span()) == (TRACE, SPAN)
        assert baggage.get_baggage("tenant") == "blue"


def test_an_error_ends_the_block_and_passes() -> None:
    with pytest.raises(LookupError), telemetry.continue_trace({"traceparent": SAMPLED}):
        raise LookupError
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("headers", [{"traceparent": SAMPLED}, {}], ids=["a trace", "none"])
async def test_a_generator_that_is_closed_elsewhere_logs_nothing(
    headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> AsyncIterator[int]:
        with telemetry.continue_trace(headers):
            yield 1
            yield 2

    parts = body()
    first = asyncio.create_task(anext(parts))  # type: ignore[arg-type]  # a coroutine at run time
    assert await first == 1
    await asyncio.create_task(parts.aclose())  # type: ignore[attr-defined]  # in another context
    assert caplog.text == ""
