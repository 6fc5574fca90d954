"""The spans and metrics of a real run that a receiver of OTLP in another process gets, over gRPC and over HTTP."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.telemetry import names
from tests.telemetry import records, sending
from tests.telemetry.otlp_receiver import ROOT, Request, receiving
from tests.telemetry.records import Record

WAYS = [
    ("http/protobuf", "gzip"), ("grpc", ""),
    *(pytest.param(way, marks=pytest.mark.long) for way in (("http/protobuf", ""), ("grpc", "gzip"))),
]  # fmt: skip


@dataclass
class Sent:
    """One run: the spans that the sending process recorded, and the requests that came over the wire."""

    protocol: str
    compression: str
    recorded: list[Record]
    requests: list[Request]

    def messages(self) -> list[Any]:
        bodies = [request.body for request in self.requests if request.signal == "traces"]
        return [ExportTraceServiceRequest.FromString(body) for body in bodies]

    def spans(self) -> dict[str, Any]:
        """Returns the spans, as protobuf, by their ids."""
        groups = [group for message in self.messages() for group in message.resource_spans]
        spans = [span for group in groups for scope in group.scope_spans for span in scope.spans]
        found = {span.span_id.hex(): span for span in spans}
        assert len(found) == len(spans), "no span is sent twice"
        return found

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans().values() if span.name == name]

    def one(self, name: str) -> Any:
        (span,) = self.named(name)
        return span


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: " ".join(way).strip())
def sent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sent:
    protocol, compression = request.param
    target = tmp_path_factory.mktemp("sent") / "records.json"
    with receiving() as receiver:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoints[protocol],
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        if compression:
            variables["OTEL_EXPORTER_OTLP_COMPRESSION"] = compression
        send(target, variables)
    recorded = [records.from_json(fields) for fields in json.loads(target.read_text())]
    return Sent(protocol, compression, recorded, receiver.requests)


def send(target: Path, variables: dict[str, str]) -> None:
    program = [sys.executable, "-W", "error", "-m", "tests.telemetry.sending", str(target), "graphs"]
    environment = {**os.environ, **variables}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_that_was_recorded_arrives_as_it_was(sent: Sent) -> None:
    arrived = {span.span_id.hex(): records.from_protobuf(span) for span in sent.spans().values()}
    assert arrived == {record.span_id: record for record in sent.recorded}
    assert len(arrived) >= 25


def test_it_arrives_the_way_that_the_variables_say(sent: Sent) -> None:
    assert {request.protocol for request in sent.requests} == {sent.protocol}
    assert {request.headers["x-tenant"] for request in sent.requests} == {"blue"}
    if sent.protocol == "http/protobuf":
        assert {request.target for request in sent.requests} == {"/v1/traces", "/v1/metrics"}
        assert {request.encoding for request in sent.requests} == {sent.compression}


def test_the_resource_names_the_service_and_the_scope_the_library(sent: Sent) -> None:
    for message in sent.messages():
        for group in message.resource_spans:
            resource = records.attributes_of(group.resource.attributes)
            assert resource["service.name"] == sending.SERVICE
            assert resource["telemetry.sdk.language"] == "python"
            assert resource["deployment.environment.name"] == "test"
            scopes = {scope.scope.name: {span.name for span in scope.spans} for scope in group.scope_spans}
            assert scopes["sender"] == {"caller", "split"}
            assert scopes[names.INSTRUMENTATION] >= {"penstock.run measure", "penstock.stream", "fetch", "join"}


def test_a_trace_is_a_tree_with_the_caller_at_its_root(sent: Sent) -> None:
    caller = sent.one("caller")
    assert caller.parent_span_id == b""
    (run,) = [span for span in sent.named("penstock.run measure") if span.parent_span_id == caller.span_id]
    below = {span.name: span for span in sent.spans().values() if span.parent_span_id == run.span_id}
    assert set(below) >= {"fetch", "outline", "count", "join"}
    (split,) = [span for span in sent.named("split") if span.trace_id == caller.trace_id]
    assert split.parent_span_id == below["count"].span_id  # opened by user code, in a thread
    assert [(link.trace_id, link.span_id) for link in split.links] == [(caller.trace_id, caller.span_id)]


def test_every_parent_is_there_and_no_child_begins_before_it_or_ends_after_it(sent: Sent) -> None:
    spans = sent.spans()
    for span in spans.values():
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:
            parent = spans[span.parent_span_id.hex()]
            assert span.trace_id == parent.trace_id
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, (parent.name, span.name)
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, (parent.name, span.name)


def test_metrics_arrive_as_well(sent: Sent) -> None:
    bodies = [request.body for request in sent.requests if request.signal == "metrics"]
    groups = [group for body in bodies for group in ExportMetricsServiceRequest.FromString(body).resource_metrics]
    assert {records.attributes_of(group.resource.attributes)["service.name"] for group in groups} == {sending.SERVICE}
    assert values_of(groups, "joined") == [4]


def values_of(groups: Iterable[Any], name: str) -> list[int]:
    """Returns the points of a sum that was sent."""
    scopes = [scope for group in groups for scope in group.scope_metrics]
    sums = [metric.sum for scope in scopes for metric in scope.metrics if metric.name == name]
    return [point.as_int for each in sums for point in each.data_points]
