"""`telemetry.continue_trace`, `continued`: a call belongs to the trace of the request or message that it answers."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import structlog
from opentelemetry import baggage, trace
from opentelemetry.trace import SpanKind

import penstock as ps
from penstock import engine, telemetry
from tests.kit import values_of
from tests.tracing import Tracing, attributes_of, id_of, parent_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


seen: list[object] = []


@ps.node
async def look(x: int) -> int:
    seen.append(baggage.get_baggage("tenant"))
    if x < 0:
        raise ValueError(x)
    return x


@ps.node
async def count(x: int) -> AsyncIterator[int]:
    yield x


looking, counting = ps.graph(look), ps.graph(count)


ABOVE = int(TRACE, 16), int(SPAN, 16)


def ids_of(context: object) -> tuple[int, int]:
    assert isinstance(context, trace.SpanContext)
    return context.trace_id, context.span_id


async def test_a_run_is_a_child_of_the_caller_in_the_other_process(tracing: Tracing) -> None:
    with telemetry.continue_trace({"traceparent": SAMPLED, "tracestate": "vendor=1"}):
        await engine.run(looking(1))
    run: Any = tracing.one("penstock.run look")
    assert ids_of(run.parent) == ABOVE
    assert run.parent.is_remote
    assert run.context.trace_state.get("vendor") == "1"
    assert parent_of(tracing.one("look")) == id_of(run)


async def test_a_request_that_its_caller_does_not_sample_has_no_spans_and_its_logs_its_id(tracing: Tracing) -> None:
    with telemetry.continue_trace({"traceparent": UNSAMPLED}), structlog.testing.capture_logs() as logs:
        assert await values_of(engine.stream([looking(-1)], on_error="skip")) == []
    assert tracing.spans() == ()
    assert [(log["event"], log["trace_id"]) for log in logs] == [("stream.item_skipped", TRACE)]


async def test_without_an_sdk_logs_carry_the_id_as_well() -> None:
    with telemetry.continue_trace({"traceparent": SAMPLED}), structlog.testing.capture_logs() as logs:
        assert await values_of(engine.stream([looking(-1)], on_error="skip")) == []
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
        assert ids_of(trace.get_current_span().get_span_context()) == ABOVE
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
        assert ids_of(trace.get_current_span().get_span_context()) == ABOVE
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


MESSAGES: list[tuple[int, Any]] = [
    (0, {"traceparent": f"00-{1:032x}-{1:016x}-01", "baggage": "tenant=blue"}),
    (1, {}),
    (2, [("traceparent", f"00-{3:032x}-{3:016x}-01".encode())]),  # as Kafka's clients have them
    (3, {"traceparent": f"00-{4:032x}-{4:016x}-00"}),
]


def messages() -> Iterator[ps.Call[int]]:
    for number, headers in MESSAGES:
        yield telemetry.continued(looking(number), headers)


async def test_the_span_of_a_message_is_of_a_consumer_and_names_the_message(tracing: Tracing) -> None:
    about = {"messaging.system": "nats", "messaging.message.id": "orders/7"}
    call = telemetry.continued(looking(1), {"traceparent": SAMPLED}, attributes=about)
    await engine.run(ps.tagged(call, "tag"))
    await engine.run(telemetry.continued(looking(1), {}, attributes={"order": 12}))
    first, second = tracing.named("penstock.run look")
    assert first.kind is SpanKind.CONSUMER
    assert about.items() <= attributes_of(first).items()
    assert second.kind is SpanKind.INTERNAL
    assert attributes_of(second)["order"] == 12


@pytest.mark.parametrize("of", ["engine", "service"])
async def test_an_item_goes_on_from_the_headers_of_its_message(tracing: Tracing, of: str) -> None:
    seen.clear()
    with trace.get_tracer("test").start_as_current_span("consumer"):
        if of == "engine":
            assert await values_of(engine.stream(messages(), trace_items=True)) == [0, 1, 2, 3]
        else:
            async with engine.deploy(looking) as service:
                assert await service.map(messages(), trace_items=True) == [0, 1, 2, 3]
    runs = tracing.named("penstock.run look")
    # A message without a trace begins a trace; a message that its sender has not sampled is not recorded.
    assert [span.parent and ids_of(span.parent) for span in runs] == [(1, 1), None, (3, 3)]
    assert [[link.context for link in span.links] for span in runs] == [[tracing.streams()[0].context]] * 3
    assert ids_of(runs[0].context)[0] == 1
    assert seen == ["blue", None, None, None]


async def test_a_call_of_its_own_goes_on_from_headers(tracing: Tracing) -> None:
    def call(number: int, graph: Any = looking) -> Any:
        return telemetry.continued(graph(number), {"traceparent": f"00-{TRACE}-{number:016x}-01"})

    with trace.get_tracer("test").start_as_current_span("caller"):
        await engine.run(call(1))
        async with engine.deploy(looking) as service:
            await service.run(call(2))
        assert await values_of(engine.stream(call(3, counting))) == [3]
        await engine.run(telemetry.continued(looking(4), {}))  # headers without a trace
    runs = [span for span in tracing.spans() if span.name.startswith("penstock.run")]
    parents = [ids_of(span.parent) for span in runs]
    caller = tracing.spans()[-1]
    assert parents == [(int(TRACE, 16), 1), (int(TRACE, 16), 2), (int(TRACE, 16), 3), ids_of(caller.context)]


@pytest.mark.parametrize("of", ["iterable", "async iterable"])
async def test_a_stream_with_one_trace_refuses_what_goes_on_from_another(of: str) -> None:
    async def received() -> AsyncIterator[ps.Call[int]]:
        for call in messages():
            yield call

    with pytest.raises(ps.OptionsError, match=r"item 0 of a stream goes on .*: pass trace_items=True"):
        await values_of(engine.stream(received() if of == "async iterable" else messages()))


@pytest.mark.parametrize("has_sdk", [True, False])
async def test_without_spans_logs_carry_the_ids_of_the_message(tracing: Tracing, has_sdk: bool) -> None:
    @ps.node
    async def note(x: int) -> str:
        return trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)

    noting = ps.graph(note)

    with pytest.MonkeyPatch.context() as patch:
        if not has_sdk:
            patch.setattr(trace, "_TRACER_PROVIDER", None)
        call = telemetry.continued(noting(1), {"traceparent": SAMPLED})
        assert await engine.run(call, trace_execution=not has_sdk) == TRACE
        assert await values_of(engine.stream([call], trace_items=True, trace_execution=not has_sdk)) == [TRACE]
    assert tracing.spans() == ()
