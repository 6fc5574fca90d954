"""Jaeger has every span of a real run, and its traces answer the questions of traces.md: `make test-backends`.

Where Go is, `make test-backends` builds a Jaeger. Another one, started as docs/how-to/jaeger.md says, is named by

    JAEGER_QUERY_URL=http://localhost:16686 OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 \
        .venv/bin/python -m pytest tests/backends/test_jaeger.py

The tests query `/api/v3`, the API that Jaeger keeps.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.backends import sent
from tests.backends.otlp_json import record_of
from tests.backends.server import free_port, program, serving
from tests.backends.slow_requests import CHATS, HELD_SECONDS
from tests.telemetry.otlp_receiver import ROOT
from tests.telemetry.records import Record


def in_order_of_names(span: Record) -> Record:
    """Returns a span with its events in the order of their names, in which some versions of Jaeger return them."""
    return replace(span, events=tuple(sorted(span.events, key=lambda event: event[0])))


class Jaeger:
    """A running Jaeger: the URLs for questions, and for spans over HTTP."""

    def __init__(self, query: str, otlp: str) -> None:
        self.query, self.otlp = query.rstrip("/"), otlp

    def ask(self, path: str, **parameters: Any) -> httpx.Response:
        return httpx.get(f"{self.query}/api/v3/{path}", params=parameters, timeout=30)

    def spans_of(self, answer: httpx.Response) -> list[Record]:
        if answer.status_code == httpx.codes.NOT_FOUND:
            return []
        groups = answer.raise_for_status().json()["result"]["resourceSpans"]
        found = [record_of(span) for group in groups for scope in group["scopeSpans"] for span in scope["spans"]]
        return [in_order_of_names(span) for span in found]

    def trace(self, trace_id: str) -> list[Record]:
        return self.spans_of(self.ask(f"traces/{trace_id}"))

    def search(self, service: str, most: int) -> list[list[Record]]:
        """Returns the latest traces of a service, as the page of Jaeger shows them."""
        now = datetime.now(UTC)
        times = {"start_time_min": now - timedelta(hours=1), "start_time_max": now + timedelta(minutes=1)}
        given = {f"query.{name}": f"{time:%Y-%m-%dT%H:%M:%S.%fZ}" for name, time in times.items()}
        answer = self.ask("traces", **given, **{"query.service_name": service, "query.num_traces": most})
        spans = sorted(self.spans_of(answer), key=lambda span: span.trace_id)
        return [list(group) for _, group in groupby(spans, key=lambda span: span.trace_id)]

    def run(self, what: str, **variables: str) -> tuple[str, Any]:
        """Runs slow requests; returns the name of their service, and what they have printed."""
        service = f"penstock-{uuid4()}"
        own = {"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": self.otlp, "OTEL_SERVICE_NAME": service}
        command = [sys.executable, "-m", "tests.backends.slow_requests", what]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **own, **variables}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return service, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    if query := os.environ.get("JAEGER_QUERY_URL"):
        yield Jaeger(query, os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"])
        return
    command, ports = program("jaeger"), [free_port() for _ in range(4)]
    places = (
        "extensions.jaeger_query.http", "receivers.otlp.protocols.http", "receivers.otlp.protocols.grpc",
        "extensions.jaeger_query.grpc",
    )  # fmt: skip
    options = [f"--set={place}.endpoint=127.0.0.1:{port}" for place, port in zip(places, ports, strict=True)]
    query, otlp = (f"http://127.0.0.1:{port}" for port in ports[:2])
    with serving([command, *options], tmp_path_factory.mktemp("jaeger"), {}, f"{query}/api/v3/services"):
        yield Jaeger(query, otlp)


@pytest.mark.parametrize("what", [sent.DEMO, sent.GRAPHS], ids=["demo", "graphs"])
def test_jaeger_has_every_span_and_its_links(what: tuple[str, ...], jaeger: Jaeger, tmp_path: Path) -> None:
    service = f"penstock-{uuid4()}"
    recorded = sent.send(what, tmp_path, OTEL_SERVICE_NAME=service, OTEL_EXPORTER_OTLP_ENDPOINT=jaeger.otlp)
    traces = {record.trace_id for record in recorded}
    found = sent.wait_until_all_are_there(
        recorded, lambda: [span for trace_id in traces for span in jaeger.trace(trace_id)]
    )
    sent.compare([*map(in_order_of_names, recorded)], found, links=True)
    assert service in jaeger.ask("services").raise_for_status().json()["services"]


def test_the_last_twenty_traces_after_a_hundred_chats_are_twenty_chats(jaeger: Jaeger) -> None:
    service, _ = jaeger.run("chats")
    latest = jaeger.search(service, 20)
    assert len(latest) == 20
    for trace in latest:
        assert [span.name for span in trace if not span.parent_id] == ["chat teller"]
    assert sum(span.name == "penstock.step Teller" for trace in jaeger.search(service, CHATS) for span in trace) >= 30


def test_a_trace_is_sampled_as_a_whole(jaeger: Jaeger) -> None:
    service, _ = jaeger.run("chats", OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.3")
    traces = jaeger.search(service, 10 * CHATS)
    assert 5 < len(traces) < 60
    for trace in traces:
        names = [span.name for span in trace if span.name != "penstock.step Teller"]
        assert sorted(names) == ["Teller", "chat teller", "penstock.run teller"]


def seconds(span: Record) -> float:
    return (span.end - span.start) / 1e9


class Trace:
    """The trace of the slowest request of one kind."""

    def __init__(self, traces: list[list[Record]], name: str) -> None:
        fitting = [(span, trace) for trace in traces for span in trace if span.name == name]
        self.request, self.spans = max(fitting, key=lambda found: seconds(found[0]))

    def one(self, name: str) -> Record:
        [found] = [span for span in self.spans if span.name == name]
        return found

    def below(self) -> Record:
        """Returns the longest span below the request."""
        return max((span for span in self.spans if span is not self.request), key=seconds)


def test_the_questions_of_an_engineer_have_answers(jaeger: Jaeger) -> None:
    service, told = jaeger.run("questions")
    traces = jaeger.search(service, 1000)
    of: Callable[[str], Trace] = lambda name: Trace(traces, name)  # noqa: E731 - a short name for the questions below
    held = HELD_SECONDS * 0.9

    # Which step was slow?
    working = of("penstock.run quick_to_slow")
    assert working.below().name == "slow"
    assert seconds(working.one("slow")) > held > 10 * seconds(working.one("quick"))

    # Was it waiting, and for what? What is left of the step is work.
    for name, wait in (
        ("penstock.run slow", "penstock.admission_wait_seconds"),
        ("in_thread", "penstock.thread_wait_seconds"),
        ("in_batch", "penstock.batch_wait_seconds"),
        ("in_process", "penstock.worker_wait_seconds"),
        ("on_device", "penstock.device_wait_seconds"),
    ):
        waits = [span for trace in traces for span in trace if span.name == name and wait in span.attributes]
        waited = max(waits, key=lambda span: span.attributes[wait])
        assert waited.attributes[wait] > seconds(waited) / 2, wait
    assert of("penstock.run in_process").one("in_process").attributes["penstock.worker_start_seconds"] > 0

    # Where did it run?
    assert of("penstock.run in_thread").one("in_thread").attributes["thread.name"] in told["threads"]
    assert of("penstock.run in_process").one("in_process").attributes["process.pid"] in told["pids"]
    assert of("penstock.run on_device").one("penstock.device_call on_device").attributes["penstock.device"] == "cpu:0"

    # Which attempt failed, and why?
    retried = [span for span in of("penstock.run retried").spans if span.name == "penstock.attempt retried"]
    assert sorted((span.attributes["penstock.attempt"], span.message) for span in retried) == [
        (1, "attempt 1"), (2, "attempt 2")
    ]  # fmt: skip

    # Which server was asked? When was the first token?
    chat = of("chat gateway")
    asked = sorted((span for span in chat.spans if "server.port" in span.attributes), key=lambda span: span.start)
    assert [(span.attributes["server.port"], span.attributes.get("error.type")) for span in asked] == [
        (9, "ConnectError"), (told["port"], None)
    ]  # fmt: skip
    assert chat.request.attributes["http.response.status_code"] == 200
    assert chat.request.attributes["gen_ai.response.time_to_first_chunk"] < seconds(chat.request) - held
    assert chat.request.attributes["penstock.part_seconds"] > held / 3

    # Where is the message, and its dead letter?
    found = [span for trace in traces for span in trace if span.attributes.get("messaging.message.id") == "orders/0/19"]
    by_name = {span.name: span for span in found}
    run, letter = by_name["penstock.run poisoned"], by_name["penstock.dead_letter orders/0"]
    assert letter.parent_id == run.span_id
