"""Sends a real run to a backend, and compares the spans of the backend with the recorded spans, one by one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from tests.telemetry import records
from tests.telemetry.otlp_receiver import ROOT
from tests.telemetry.records import Record

# The demo over a small folder: one pipeline in threads, in processes and on a device, and 64 calls of a deployment.
DEMO = ("demo", "examples", "--limit", "3", "--query", "read weights")
GRAPHS = ("graphs",)
PATIENCE_SECONDS = 60


def send(what: Iterable[str], folder: Path, **variables: str) -> list[Record]:
    """Runs Penstock in another process, with tracing set by the variables; returns the spans recorded there."""
    target = folder / "records.json"
    program = [sys.executable, "-m", "tests.telemetry.sending", str(target), *what]
    environment = {**os.environ, "OTEL_METRICS_EXPORTER": "none", **variables}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "telemetry.not_sent" not in done.stdout
    return [records.from_json(fields) for fields in json.loads(target.read_text())]


def wait_until_all_are_there(recorded: list[Record], ask: Callable[[], list[Record]]) -> list[Record]:
    """Asks until a backend has as many spans as were sent, and returns them: it stores spans after it answers."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while len(found := ask()) < len(recorded) and time.monotonic() < give_up:
        time.sleep(0.2)
    return found


def compare(recorded: list[Record], found: list[Record], *, links: bool, extra_attributes: Iterable[str] = ()) -> None:
    """Compares names, ids, parents, times to a microsecond, status, attributes, events and, where kept, links.

    Args:
        recorded: the spans as they were recorded.
        found: the spans that the backend has.
        links: whether the backend keeps links.
        extra_attributes: the attributes that the backend adds.
    """
    assert sorted(record.place for record in found) == sorted(record.place for record in recorded)
    by_id = {(record.trace_id, record.span_id): record for record in found}
    for sent in recorded:
        there = by_id[sent.trace_id, sent.span_id]
        assert abs(there.start - sent.start) <= 1000, sent.name
        assert abs(there.end - sent.end) <= 1000, sent.name
        attributes = {name: value for name, value in there.attributes.items() if name not in extra_attributes}
        expected = sent if links else replace(sent, links=())
        assert replace(there, start=sent.start, end=sent.end, attributes=attributes) == expected
