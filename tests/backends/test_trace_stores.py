"""Arize Phoenix and MLflow have every span of a real run: `make test-backends`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends import sent
from tests.backends.otlp_json import record_of
from tests.backends.server import free_port, program, serving
from tests.telemetry.records import Record


@dataclass(frozen=True)
class Phoenix:
    """A running Phoenix server: one port takes queries, and traces over HTTP; another takes traces over gRPC."""

    url: str
    endpoints: dict[str, str]

    def spans(self, project: str) -> list[Record]:
        """Returns the spans of a project; an empty list while Phoenix does not know the project."""
        found: list[Record] = []
        query: dict[str, Any] = {"limit": 1000}
        while True:
            answer = httpx.get(f"{self.url}/v1/projects/{project}/spans/otlpv1", params=query, timeout=30)
            if answer.status_code == httpx.codes.NOT_FOUND:
                return []
            page = answer.raise_for_status().json()
            found += [record_of(span) for span in page["data"]]
            if not page["next_cursor"]:
                return found
            query["cursor"] = page["next_cursor"]


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    command = program("phoenix")
    folder = tmp_path_factory.mktemp("phoenix")
    http, grpc = free_port(), free_port()
    variables = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    url = f"http://127.0.0.1:{http}"
    with serving([command, "serve"], folder, variables, f"{url}/healthz"):
        yield Phoenix(url, {"http/protobuf": url, "grpc": f"http://127.0.0.1:{grpc}"})


@pytest.mark.parametrize(
    ("what", "protocol"),
    [(sent.DEMO, "http/protobuf"), (sent.GRAPHS, "http/protobuf"), (sent.GRAPHS, "grpc")],
    ids=["demo by HTTP", "graphs by HTTP", "graphs by gRPC"],
)
def test_phoenix_has_every_span(
    what: tuple[str, ...], protocol: str, phoenix: Phoenix, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sent")
    project = folder.name
    recorded = sent.send(
        what,
        folder,
        OTEL_EXPORTER_OTLP_ENDPOINT=phoenix.endpoints[protocol],
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_RESOURCE_ATTRIBUTES=f"openinference.project.name={project}",
    )
    found = sent.wait_until_all_are_there(recorded, lambda: phoenix.spans(project))
    sent.compare(recorded, found, links=False)


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running MLflow server."""
    command = program("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder)]
    variables = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    variables["PATH"] = f"{command.parent}:/usr/bin:/bin"  # MLflow starts its server by a program's name
    url = f"http://127.0.0.1:{port}"
    serve: list[str | Path] = [command, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    with serving(serve, folder, variables, f"{url}/health"):
        yield url


def spans_of(url: str, traces: set[str]) -> list[Record]:
    """Returns the spans that MLflow has of these traces."""
    found: list[Record] = []
    for trace_id in traces:
        answer = httpx.get(f"{url}/api/3.0/mlflow/traces/get", params={"trace_id": f"tr-{trace_id}"}, timeout=30)
        if answer.status_code != httpx.codes.NOT_FOUND:
            found += [record_of(span) for span in answer.raise_for_status().json()["trace"].get("spans", [])]
    return found


@pytest.mark.parametrize("what", [sent.DEMO, sent.GRAPHS], ids=["demo", "graphs"])
def test_mlflow_has_every_span_and_its_links(what: tuple[str, ...], mlflow: str, tmp_path: Path) -> None:
    created = httpx.post(f"{mlflow}/api/2.0/mlflow/experiments/create", json={"name": what[0]})
    experiment = created.raise_for_status().json()["experiment_id"]
    recorded = sent.send(
        what,
        tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=mlflow,
        OTEL_EXPORTER_OTLP_HEADERS=f"x-mlflow-experiment-id={experiment}",
    )
    traces = {record.trace_id for record in recorded}
    found = sent.wait_until_all_are_there(recorded, lambda: spans_of(mlflow, traces))
    sent.compare(recorded, found, links=True, extra_attributes=["mlflow.traceRequestId"])
    if what == sent.GRAPHS:
        assert any(record.links for record in found)
