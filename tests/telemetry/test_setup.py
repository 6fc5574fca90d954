"""`telemetry.setup`: the environment has the last word, nothing is set up twice, and no exit is held up.

The providers that it sets belong to the process, so each of these programs runs in a process of its own.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock import telemetry
from tests.telemetry import records
from tests.telemetry.otlp_receiver import ROOT, Receiver, receiving

PATIENCE_SECONDS = 50
BEGIN = """
import os, sys
from opentelemetry import metrics, trace
from penstock import telemetry
from tests.telemetry.small_application import run
"""
SET_UP = "telemetry.setup(service_name='here', endpoint=sys.argv[1])\n"


def run(program: str, endpoint: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + program, endpoint],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def succeed(program: str, endpoint: str, **variables: str) -> str:
    """Runs a program to a good end; returns what it printed."""
    done = run(program, endpoint, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def spans_of(receiver: Receiver) -> list[tuple[str, str]]:
    """Returns service and name of every span that arrived."""
    messages = [ExportTraceServiceRequest.FromString(body) for body in receiver.bodies("traces")]
    return [
        (records.attributes_of(group.resource.attributes)["service.name"], span.name)
        for message in messages
        for group in message.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


ONE_RUN = ["double", "penstock.run graph"]


def test_what_the_environment_says_wins_over_arguments() -> None:
    with receiving() as receiver, receiving() as other:
        succeed(
            SET_UP + "run()",
            other.endpoints["http/protobuf"],
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoints["http/protobuf"] + "/base",
            OTEL_SERVICE_NAME="from the environment",
        )
    assert sorted(spans_of(receiver)) == [("from the environment", name) for name in ONE_RUN]
    assert {request.target for request in receiver.requests} == {"/base/v1/metrics", "/base/v1/traces"}
    assert other.requests == []


def test_a_signal_may_go_its_own_way() -> None:
    with receiving() as receiver:
        succeed(
            SET_UP + "run()",
            receiver.endpoints["http/protobuf"],
            OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="grpc",
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=receiver.endpoints["grpc"],
            OTEL_RESOURCE_ATTRIBUTES="service.name=named",
        )
    assert sorted((request.protocol, request.target) for request in receiver.requests) == [
        ("grpc", "TraceService/Export"),
        ("http/protobuf", "/v1/metrics"),
    ]
    assert {service for service, _ in spans_of(receiver)} == {"named"}


@pytest.mark.parametrize(
    ("variables", "signals"),
    [
        ({"OTEL_METRICS_EXPORTER": "none"}, {"traces"}),
        ({"OTEL_TRACES_EXPORTER": "none"}, {"metrics"}),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, {"metrics"}),
        ({"OTEL_SDK_DISABLED": "True"}, set()),
    ],
    ids=str,
)
def test_variables_turn_signals_off(variables: dict[str, str], signals: set[str]) -> None:
    with receiving() as receiver:
        succeed(SET_UP + "run()", receiver.endpoints["http/protobuf"], **variables)
    assert {request.signal for request in receiver.requests} == signals


def test_disabled_it_loads_and_starts_nothing() -> None:
    program = "import threading; print('opentelemetry.sdk' in sys.modules, threading.active_count())"
    assert succeed(SET_UP + program, "http://127.0.0.1:9", OTEL_SDK_DISABLED="true") == "False 1\n"


def test_traces_go_to_a_receiver_while_prometheus_asks_for_metrics() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    program = """
from urllib.request import urlopen
page = urlopen("http://localhost:" + os.environ["OTEL_EXPORTER_PROMETHEUS_PORT"] + "/metrics").read().decode()
print([line.split()[-1] for line in page.splitlines() if line.startswith("penstock_run_duration_seconds_count")])
"""
    with receiving() as receiver:
        # `succeed` asserts that standard error is empty; warnings would be printed there before the numbers.
        printed = succeed(
            SET_UP + "run()" + program,
            receiver.endpoints["http/protobuf"],
            OTEL_METRICS_EXPORTER="prometheus",
            OTEL_EXPORTER_PROMETHEUS_PORT=port,
        )
    assert printed == "['1.0']\n"
    assert sorted(spans_of(receiver)) == [("here", name) for name in ONE_RUN]
    assert {request.target for request in receiver.requests} == {"/v1/traces"}


def test_a_console_is_an_exporter_as_well() -> None:
    variables = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none"}
    assert '"name": "penstock.run graph"' in succeed(SET_UP + "run()", "http://127.0.0.1:9", **variables)


def test_spans_and_metrics_go_to_the_endpoint_by_http_and_a_second_call_changes_nothing_and_says_so() -> None:
    again = "telemetry.setup(service_name='again', endpoint=sys.argv[1])\n"
    with receiving() as receiver:
        printed = succeed(SET_UP + again + "run()", receiver.endpoints["http/protobuf"] + "/")
    assert sorted(spans_of(receiver)) == [("here", name) for name in ONE_RUN]
    assert sorted(request.target for request in receiver.requests) == ["/v1/metrics", "/v1/traces"]
    assert printed.count("telemetry.already_set_up") == 2
    assert "signal=traces" in printed
    assert "signal=metrics" in printed


def test_a_provider_of_the_application_stays() -> None:
    own = """
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(tracing := TracerProvider())
metrics.set_meter_provider(metering := MeterProvider())
"""
    same = "assert (trace.get_tracer_provider(), metrics.get_meter_provider()) == (tracing, metering); run()"
    with receiving() as receiver:
        printed = succeed(own + SET_UP + same, receiver.endpoints["http/protobuf"])
    assert printed.count("telemetry.already_set_up") == 2
    assert receiver.requests == []


BY_OS = """
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
else:
    run()
"""
BY_MULTIPROCESSING = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=run)
child.start()
child.join()
assert child.exitcode == 0
"""


@pytest.mark.parametrize("forking", [BY_OS, BY_MULTIPROCESSING], ids=["os", "multiprocessing"])
def test_a_forked_worker_sends_its_own_spans_at_its_exit(forking: str) -> None:
    with_threads = "import warnings; warnings.simplefilter('ignore')\n"  # Python 3.12 and newer warn of it
    with receiving() as receiver:
        program = SET_UP + with_threads + "run()" + forking  # those of the parent wait to be sent when it forks
        succeed(program, receiver.endpoints["http/protobuf"], OTEL_METRICS_EXPORTER="none")
    assert sorted(spans_of(receiver)) == sorted(("here", name) for name in 2 * ONE_RUN)


IN_PROCESSES = "from tests.telemetry.span_targets import trace_in_processes\n"


def test_spans_of_handlers_in_worker_processes_are_sent_from_there() -> None:
    with receiving() as receiver:
        succeed(SET_UP + IN_PROCESSES + "trace_in_processes()", receiver.endpoints["http/protobuf"])
    groups = [
        (records.attributes_of(group.resource.attributes), span)
        for body in receiver.bodies("traces")
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]
    nodes = {span.span_id: span.trace_id for _, span in groups if span.name == "traced"}
    inner = [(resource, span) for resource, span in groups if span.name.startswith("inner")]
    assert sorted(span.name for _, span in inner) == [f"inner {x}" for x in range(4)]
    assert {span.parent_span_id: span.trace_id for _, span in inner} == nodes
    parents = [resource for resource, span in groups if span.name == "traced"]
    of_parent = parents[0].get("service.instance.id")
    for resource, _ in inner:
        assert resource["service.instance.id"] != of_parent
        assert {**resource, "service.instance.id": of_parent} == {**parents[0], "service.instance.id": of_parent}
    instances = {
        records.attributes_of(group.resource.attributes).get("service.instance.id")
        for body in receiver.bodies("metrics")
        for group in ExportMetricsServiceRequest.FromString(body).resource_metrics
    }
    assert instances == {of_parent}  # metrics stay in the parent


def test_a_worker_process_sets_nothing_up_before_an_item_is_sampled() -> None:
    program = IN_PROCESSES + "print({has_sdk for _, has_sdk in trace_in_processes()})"
    with receiving() as receiver:
        url = receiver.endpoints["http/protobuf"]
        assert succeed(program, url) == "{False}\n"  # without `setup`
        assert succeed(SET_UP + program, url, OTEL_TRACES_SAMPLER="always_off") == "{False}\n"
        assert succeed(SET_UP + program, url, OTEL_TRACES_EXPORTER="none") == "{False}\n"


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_receiver_that_never_answers_does_not_keep_worker_processes(silent: str) -> None:
    variables = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600", "OTEL_METRICS_EXPORTER": "none"}
    ended = """
for pid in {pid for pid, _ in trace_in_processes()}:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        print("ended")
"""
    printed = succeed(SET_UP + IN_PROCESSES + ended, silent, **variables)
    assert printed.startswith("ended\n")


# The same code gives up both exporters.
@pytest.mark.parametrize("protocol", ["http/protobuf", pytest.param("grpc", marks=pytest.mark.long)])
def test_a_receiver_that_never_answers_does_not_keep_the_interpreter(silent: str, protocol: str) -> None:
    # The exporter would wait for ten minutes, and this test for less than one.
    variables = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600", "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    assert "telemetry.not_sent" in succeed(SET_UP + "run()", silent, **variables)


def test_without_the_sdk_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ImportError, match=r"pip install 'penstock\[otlp\]'"):
        telemetry.setup(service_name="here")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_its_exporter_the_error_names_the_extra(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", {"http": "http/protobuf", "grpc": "grpc"}[protocol])
    with pytest.raises(ImportError, match=rf"no exporter 'otlp_proto_{protocol}' .* pip install 'penstock\[otlp\]'"):
        telemetry.setup(service_name="here")


def test_an_exporter_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ImportError, match="pip install 'opentelemetry-exporter-zipkin'"):
        telemetry.setup(service_name="here")


def test_a_protocol_that_nothing_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="for metrics is 'http/json'; Penstock can send http/protobuf or grpc"):
        telemetry.setup(service_name="here")


def test_an_error_sets_nothing_up() -> None:
    failing = """
os.environ["OTEL_METRICS_EXPORTER"] = "carrier_pigeon"
try:
    telemetry.setup(service_name='here')
except ImportError:
    del os.environ["OTEL_METRICS_EXPORTER"]
"""
    with receiving() as receiver:
        assert succeed(failing + SET_UP + "run()", receiver.endpoints["http/protobuf"]) == ""
    assert sorted(spans_of(receiver)) == [("here", name) for name in ONE_RUN]
