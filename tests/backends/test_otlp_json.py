"""Spans in the JSON dialects of all backends are read to equal records."""

from typing import Any

import pytest

from tests.backends.otlp_json import record_of
from tests.telemetry.records import Record

TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
RECORD = Record(
    name="fetch",
    trace_id=TRACE,
    span_id=SPAN,
    parent_id=PARENT,
    start=1_795_262_970_401_182_976,
    end=1_795_262_970_401_191_936,
    status="ERROR",
    message="no 7",
    attributes={"penstock.item": 7, "penstock.node": "fetch", "shares": [0.5, 1.5]},
    events=(("penstock.retry", {"penstock.attempt": 2}),),
    links=((TRACE, PARENT),),
)
# Camel case, ids in hexadecimal, numbers of 64 bits as text: the standard, and Jaeger.
STANDARD = {
    "name": "fetch",
    "traceId": TRACE,
    "spanId": SPAN,
    "parentSpanId": PARENT,
    "kind": 1,
    "startTimeUnixNano": "1795262970401182976",
    "endTimeUnixNano": "1795262970401191936",
    "status": {"code": 2, "message": "no 7"},
    "attributes": [
        {"key": "penstock.item", "value": {"intValue": "7"}},
        {"key": "penstock.node", "value": {"stringValue": "fetch"}},
        {"key": "shares", "value": {"arrayValue": {"values": [{"doubleValue": 0.5}, {"doubleValue": 1.5}]}}},
    ],
    "events": [{"name": "penstock.retry", "attributes": [{"key": "penstock.attempt", "value": {"intValue": "2"}}]}],
    "links": [{"traceId": TRACE, "spanId": PARENT}],
}
# Snake case, ids in base64, codes by name: MLflow.
SNAKE = {
    "name": "fetch",
    "trace_id": "CvdlGRbNQ92ESOshHIAxnA==",
    "span_id": "t61rcWkgMzE=",
    "parent_span_id": "APBnqgupArc=",
    "start_time_unix_nano": 1_795_262_970_401_182_976,
    "end_time_unix_nano": 1_795_262_970_401_191_936,
    "status": {"code": "STATUS_CODE_ERROR", "message": "no 7"},
    "attributes": [
        {"key": "penstock.item", "value": {"int_value": 7, "string_value": None}},
        {"key": "penstock.node", "value": {"string_value": "fetch"}},
        {"key": "shares", "value": {"array_value": {"values": [{"double_value": 0.5}, {"double_value": 1.5}]}}},
    ],
    "events": [{"name": "penstock.retry", "attributes": [{"key": "penstock.attempt", "value": {"int_value": 2}}]}],
    "links": [{"trace_id": "CvdlGRbNQ92ESOshHIAxnA==", "span_id": "APBnqgupArc="}],
}


@pytest.mark.parametrize("span", [STANDARD, SNAKE], ids=["standard", "snake case"])
def test_dialects_are_read_alike(span: dict[str, Any]) -> None:
    assert record_of(span) == RECORD


def test_what_is_missing_or_null_is_empty() -> None:
    [name, *times] = ["name", "startTimeUnixNano", "endTimeUnixNano"]
    kept = {key: STANDARD[key] for key in (name, "traceId", "spanId", *times)}
    found = record_of({**kept, "status": {}, "links": None, "events": None, "parentSpanId": None})
    assert (found.status, found.message, found.parent_id, found.events, found.links) == ("UNSET", "", "", (), ())
