"""A span as plain values, the same for a recorded span and for the span in a receiver or a backend."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import format_span_id, format_trace_id

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """One span; ids are hexadecimal, times are nanoseconds since 1970.

    Attributes:
        parent_id: empty at the root of a trace.
        status: "UNSET", "OK" or "ERROR".
        events: name and attributes of each.
        links: trace and span id of each.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    status: str
    message: str
    attributes: Attributes
    events: tuple[tuple[str, Attributes], ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> tuple[str, str, str, str]:
        """The ids that say where the span stands in its trace."""
        return self.trace_id, self.span_id, self.parent_id, self.name


def from_sdk(span: ReadableSpan) -> Record:
    assert span.context is not None
    return Record(
        name=span.name,
        trace_id=format_trace_id(span.context.trace_id),
        span_id=format_span_id(span.context.span_id),
        parent_id=format_span_id(span.parent.span_id) if span.parent else "",
        start=span.start_time or 0,
        end=span.end_time or 0,
        status=span.status.status_code.name,
        message=span.status.description or "",
        attributes=plain(span.attributes or {}),
        events=tuple((event.name, plain(event.attributes or {})) for event in span.events),
        links=tuple(
            (format_trace_id(link.context.trace_id), format_span_id(link.context.span_id)) for link in span.links
        ),
    )


def plain(attributes: Attributes) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in attributes.items()}


def from_json(fields: dict[str, Any]) -> Record:
    """Read a record that `dataclasses.asdict` and `json` have written."""
    events = tuple((name, attributes) for name, attributes in fields["events"])
    return Record(**{**fields, "events": events, "links": tuple(tuple(link) for link in fields["links"])})


def from_protobuf(span: Any) -> Record:
    """Read a span of `opentelemetry.proto.trace.v1`."""
    return Record(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        status=("UNSET", "OK", "ERROR")[span.status.code],
        message=span.status.message,
        attributes=attributes_of(span.attributes),
        events=tuple((event.name, attributes_of(event.attributes)) for event in span.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def attributes_of(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
