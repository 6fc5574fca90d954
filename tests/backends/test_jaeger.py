"""Jaeger has every span of a real run: docs/how-to/jaeger.md says how to start one.

    JAEGER_QUERY_URL=http://localhost:16686 OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 \
        .venv/bin/python -m pytest tests/backends/test_jaeger.py

The test queries `/api/v3`, the API that Jaeger keeps; the older `/api/traces?service=` is gone.
"""

import os
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from tests.backends import sent
from tests.backends.otlp_json import record_of
from tests.telemetry.records import Record

NEEDED = ("JAEGER_QUERY_URL", "OTEL_EXPORTER_OTLP_ENDPOINT")
UNSET = [name for name in NEEDED if not os.environ.get(name)]

pytestmark = pytest.mark.skipif(bool(UNSET), reason=f"needs a running Jaeger, at {' and '.join(UNSET)}")


def ask(path: str) -> httpx.Response:
    return httpx.get(f"{os.environ['JAEGER_QUERY_URL'].rstrip('/')}/api/v3/{path}", timeout=30)


def spans_of(traces: set[str]) -> list[Record]:
    """Returns the spans that Jaeger has of these traces."""
    found: list[Record] = []
    for trace_id in traces:
        answer = ask(f"traces/{trace_id}")
        if answer.status_code != httpx.codes.NOT_FOUND:
            groups = answer.raise_for_status().json()["result"]["resourceSpans"]
            found += [record_of(span) for group in groups for scope in group["scopeSpans"] for span in scope["spans"]]
    return found


@pytest.mark.parametrize("what", [sent.DEMO, sent.GRAPHS], ids=["demo", "graphs"])
def test_jaeger_has_every_span_and_its_links(what: tuple[str, ...], tmp_path: Path) -> None:
    service = f"penstock-{uuid4()}"
    recorded = sent.send(what, tmp_path, OTEL_SERVICE_NAME=service)
    traces = {record.trace_id for record in recorded}
    found = sent.wait_until_all_are_there(recorded, lambda: spans_of(traces))
    sent.compare(recorded, found, links=True)
    assert service in ask("services").raise_for_status().json()["services"]
