"""The cost of observation: tracing, metrics, profiles."""

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import cache

from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal as metrics_internal
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from penstock import telemetry
from penstock.telemetry import spans as tracer

from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .graphs import chain, stream_seconds

STAGES = 10
# The SDK collects metrics once a minute. Here it collects in nearly every sample.
COLLECT_SECONDS = 0.1


class _Discarding(SpanExporter):
    """An exporter that drops all spans, because encoding and sending are not measured."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    items, sampled_items = (4_000, 100) if quick else (20_000, 500)
    graph = chain(STAGES)
    unsampled = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    sampled = TracerProvider(shutdown_on_exit=False)
    sampled.add_span_processor(BatchSpanProcessor(_Discarding(), max_queue_size=100_000))
    meters, reader = _meters()

    def seconds(seen: Callable[[], AbstractContextManager[object]]) -> Callable[[], Awaitable[float]]:
        async def sample() -> float:
            with seen():
                return await stream_seconds(graph, items)

        return sample

    async def sampled_execution() -> float:
        with _traced(sampled):
            taken = await stream_seconds(graph, sampled_items)
        sampled.force_flush()
        return taken / (sampled_items * STAGES) * 1e6

    async def above_the_sdk() -> float:
        """Return the extra cost of a sampled node execution, without the cost of the spans themselves."""
        with _traced(sampled):
            taken = await stream_seconds(graph, sampled_items)
        spans = sampled_items * (STAGES + 1)  # each call has a span, too
        taken -= _span_seconds(sampled, spans) + await stream_seconds(graph, sampled_items)
        sampled.force_flush()
        return taken / (sampled_items * STAGES) * 1e6

    try:
        yield {
            "unseen": seconds(nullcontext),
            "unsampled": seconds(lambda: _traced(unsampled)),
            "metrics": seconds(lambda: _metered(meters, reader)),
            "profile": seconds(telemetry.profile),
            "sampled": sampled_execution,
            "above": above_the_sdk,
        }
    finally:
        unsampled.shutdown()
        sampled.shutdown()


@cache
def _meters() -> tuple[MeterProvider, InMemoryMetricReader]:
    """Return the provider of metrics and its reader; instruments keep the first provider of a process for good."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    metrics_internal._METER_PROVIDER = None  # calls see the provider only inside `_metered`
    return provider, reader


def _span_seconds(provider: TracerProvider, count: int) -> float:
    """Return the seconds of `count` spans with four attributes, without any work in the spans."""
    sdk = provider.get_tracer("bare")
    parent = trace.set_span_in_context(sdk.start_span("call"))
    began = time.perf_counter()
    for item in range(count):
        attributes = {"penstock.node": "stage", "penstock.item": item, "code.function.name": "a.b", "waited": 0.001}
        sdk.start_span("stage", parent, attributes=attributes).end()
    return time.perf_counter() - began


@contextmanager
def _traced(provider: TracerProvider) -> Iterator[None]:
    """Send spans to a provider for a while. A process normally has one provider for good; here several take turns."""
    before = trace._TRACER_PROVIDER, tracer._tracer
    trace._TRACER_PROVIDER, tracer._tracer = provider, provider.get_tracer("penstock")
    try:
        yield
    finally:
        trace._TRACER_PROVIDER, tracer._tracer = before


@contextmanager
def _metered(provider: MeterProvider, reader: InMemoryMetricReader) -> Iterator[None]:
    """Have metrics recorded, and collected in a thread, as the SDK does."""
    over = threading.Event()

    def collect() -> None:
        while not over.wait(COLLECT_SECONDS):
            reader.get_metrics_data()

    thread = threading.Thread(target=collect)
    metrics_internal._METER_PROVIDER = provider
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        metrics_internal._METER_PROVIDER = None


def _added(title: str, subject: str, must: float) -> Row:
    return Row(title=title, subject=subject, reference="unseen", limits=Limits(must=must))


TELEMETRY = Workload(
    name="telemetry",
    contenders=contenders,
    control="unseen",
    rounds=(40, 5),
    rows=(
        _added("10 async stages, traced but unsampled / unseen", "unsampled", 1.03),
        _added("the same with metrics, collected ten times a second", "metrics", 1.05),
        _added("the same inside of telemetry.profile()", "profile", 1.10),
        Row(title="a sampled node execution, batch processor", subject="sampled", unit="us", limits=Limits(must=60)),
        Row(
            title="of that, above what spans with four attributes take by themselves",
            subject="above",
            unit="us",
            limits=Limits(must=5, aim=3),
        ),
    ),
)
