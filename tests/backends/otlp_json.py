"""Reads spans from the answers of backends: OTLP in JSON, in the dialect of each backend."""

import base64
import re
from typing import Any

from tests.telemetry.records import Record

STATUS = {"STATUS_CODE_UNSET": "UNSET", "STATUS_CODE_OK": "OK", "STATUS_CODE_ERROR": "ERROR"}
STATUS_BY_NUMBER = ("UNSET", "OK", "ERROR")


def record_of(span: dict[str, Any]) -> Record:
    """Reads one span: names in camel or snake case, ids in hexadecimal or base64, numbers as such or as text."""
    span = {_snake(name): value for name, value in span.items() if value is not None}
    status = {name: value for name, value in span.get("status", {}).items() if value is not None}
    code = status.get("code", 0)
    return Record(
        name=span["name"],
        trace_id=_id(span["trace_id"], 32),
        span_id=_id(span["span_id"], 16),
        parent_id=_id(span.get("parent_span_id", ""), 16),
        start=int(span["start_time_unix_nano"]),
        end=int(span["end_time_unix_nano"]),
        status=STATUS_BY_NUMBER[code] if isinstance(code, int) else STATUS[code],
        message=status.get("message", ""),
        attributes=_attributes(span.get("attributes", [])),
        events=tuple((event["name"], _attributes(event.get("attributes") or [])) for event in span.get("events", [])),
        links=tuple(_link(link) for link in span.get("links", [])),
    )


def _snake(name: str) -> str:
    return re.sub(r"(?=[A-Z])", "_", name).lower()


def _id(text: str, length: int) -> str:
    return text if len(text) in (0, length) else base64.b64decode(text).hex()


def _link(link: dict[str, Any]) -> tuple[str, str]:
    link = {_snake(name): value for name, value in link.items()}
    return _id(link["trace_id"], 32), _id(link["span_id"], 16)


def _attributes(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(value: dict[str, Any]) -> Any:
    [(kind, content)] = [(_snake(name), content) for name, content in value.items() if content is not None]
    if kind == "array_value":
        return [_value(each) for each in content.get("values", [])]
    return int(content) if kind == "int_value" else content
