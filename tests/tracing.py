"""Tracing in memory: a provider for one test, and the spans that it has recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult

from penstock.telemetry import names
from penstock.telemetry import spans as tracer


class Switch(Sampler):
    """Samples as the parent of a span does; spans without a parent as `root` does, or all while `is_on` is true."""

    is_on = True
    root: Sampler | None = None

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        root = self.root or (ALWAYS_ON if self.is_on else ALWAYS_OFF)
        return ParentBased(root).should_sample(*args, **kwargs)

    def get_description(self) -> str:
        return f"Switch {Decision.RECORD_AND_SAMPLE}"


class Recorder(SpanProcessor):
    """Keeps the spans that were started and have not ended."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        self.open[id_of(span)] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        self.open.pop(id_of(span))


@contextmanager
def provided(provider: trace.TracerProvider) -> Iterator[None]:
    """Makes a provider the provider of the process for the length of a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_TRACER_PROVIDER", provider)
        # The tracer of the package may have found its provider in an earlier test, and would keep using it.
        patch.setattr(tracer, "_tracer", provider.get_tracer(names.INSTRUMENTATION))
        yield


class Tracing:
    """A provider, and the spans that it has recorded."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.sampler = Switch()
        self.provider = TracerProvider(sampler=self.sampler, shutdown_on_exit=False)
        self.recorder = Recorder()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.provider.add_span_processor(self.recorder)

    @classmethod
    @contextmanager
    def set_up(cls) -> Iterator["Tracing"]:
        """Makes this provider the provider of the process for the length of a `with` block."""
        found = cls()
        with provided(found.provider):
            yield found
            found.provider.shutdown()

    def spans(self) -> tuple[ReadableSpan, ...]:
        assert list(self.recorder.open.values()) == [], "these spans were never ended"
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans() if span.name == name]

    def streams(self) -> list[ReadableSpan]:
        return [span for span in self.spans() if span.name.startswith(names.STREAM)]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
