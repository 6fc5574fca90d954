"""`telemetry.setup`: the environment has the last word, nothing is set up twice, and no exit is held up.

The providers that it sets belong to the process, so each of these programs runs in a process of its own.
"""

import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import penstock as ps
from penstock import telemetry
from tests.devices.processes import run_program
from tests.forked import Forks, forking
from tests.telemetry import records, sending
from tests.telemetry.otlp_receiver import Receiver, receiving

BEGIN = """
import os, sys
from opentelemetry import metrics, trace
import penstock as ps
from penstock import telemetry
from tests.telemetry.small_application import run
"""
SET_UP = "telemetry.setup(service_name='here', endpoint=sys.argv[1])\n"
SDK = (
    "opentelemetry.sdk.trace.export", "opentelemetry.sdk.metrics.export",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.exporter.otlp.proto.http.metric_exporter",
)  # fmt: skip
Succeed = Callable[..., str]


@pytest.fixture(scope="module")
def process() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def receiver(process: Receiver) -> Receiver:
    process.collect()  # what came to an earlier test
    return process


@pytest.fixture
def url(receiver: Receiver) -> str:
    return receiver.endpoints["http/protobuf"]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forking("tests.telemetry.small_application", *SDK) as found:
        yield found


@pytest.fixture
def succeed(forks: Forks) -> Succeed:
    """Runs a program to a good end in a fork; returns what it printed."""

    def succeed(program: str, endpoint: str, **variables: str) -> str:
        # All spans are sent at the exit, however slow the machine is: sockets that an earlier batch has opened are
        # closed with a ResourceWarning, which is an error here.
        variables = {"OTEL_BSP_SCHEDULE_DELAY": "60000", **variables}
        status, said, errors = forks.run(BEGIN + program, endpoint, **variables)
        assert (status, errors) == (0, "")
        return said

    return succeed


def groups_of(receiver: Receiver) -> list[tuple[Any, Any]]:
    """Returns the attributes of the resource, and the span, of every span that arrived."""
    receiver.collect()
    return [
        (records.attributes_of(group.resource.attributes), span)
        for body in receiver.bodies("traces")
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def metrics_of(receiver: Receiver) -> list[Any]:
    """Returns the groups of metrics that arrived, one for each resource."""
    bodies = map(ExportMetricsServiceRequest.FromString, receiver.bodies("metrics"))
    return [group for body in bodies for group in body.resource_metrics]


def spans_of(receiver: Receiver) -> list[tuple[str, str]]:
    """Returns service and name of every span that arrived, in order."""
    return sorted((resource["service.name"], span.name) for resource, span in groups_of(receiver))


ONE_RUN = [("here", "double"), ("here", "penstock.run double")]


@pytest.mark.parametrize(
    "named", [{"OTEL_SERVICE_NAME": "named"}, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=named"}], ids=str
)
def test_what_the_environment_says_wins_over_arguments_also_for_one_signal(
    succeed: Succeed, receiver: Receiver, url: str, named: dict[str, str]
) -> None:
    ways = {"ENDPOINT": f"{url}/base", "TRACES_PROTOCOL": "grpc", "TRACES_ENDPOINT": receiver.endpoints["grpc"]}
    variables = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in ways.items()}
    succeed(SET_UP + "run()", f"{url}/argument", **variables, **named)
    assert spans_of(receiver) == [("named", name) for _, name in ONE_RUN]
    assert sorted((request.protocol, request.target) for request in receiver.requests) == [
        ("grpc", "TraceService/Export"), ("http/protobuf", "/base/v1/metrics"),
    ]  # fmt: skip


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
def test_variables_turn_signals_off(
    succeed: Succeed, receiver: Receiver, url: str, variables: dict[str, str], signals: set[str]
) -> None:
    succeed(SET_UP + "run()", url, **variables)
    assert {request.signal for request in receiver.collect()} == signals


def test_disabled_it_loads_and_starts_nothing() -> None:
    program = f"{BEGIN}{SET_UP}import threading; print('opentelemetry.sdk' in sys.modules, threading.active_count())"
    # No fork, since a fork has loaded the SDK.
    assert run_program(program, "http://127.0.0.1:9", OTEL_SDK_DISABLED="true") == "False 1\n"


def test_traces_go_to_a_receiver_while_prometheus_asks_for_metrics(
    succeed: Succeed, receiver: Receiver, url: str
) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    program = """
from urllib.request import urlopen
page = urlopen("http://localhost:" + os.environ["OTEL_EXPORTER_PROMETHEUS_PORT"] + "/metrics").read().decode()
print([line.split()[-1] for line in page.splitlines() if line.startswith("penstock_run_duration_seconds_count")])
"""
    variables = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": port}
    # `succeed` asserts that standard error is empty; warnings would be printed there before the numbers.
    assert succeed(SET_UP + "run()" + program, url, **variables) == "['1.0']\n"
    assert spans_of(receiver) == ONE_RUN
    assert {request.target for request in receiver.requests} == {"/v1/traces"}


def test_a_console_is_an_exporter_as_well(succeed: Succeed) -> None:
    variables = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none"}
    assert '"name": "penstock.run double"' in succeed(SET_UP + "run()", "http://127.0.0.1:9", **variables)


def test_spans_and_metrics_go_to_the_endpoint_by_http_and_a_second_call_changes_nothing_and_says_so(
    succeed: Succeed, receiver: Receiver, url: str
) -> None:
    again = "telemetry.setup(service_name='again', endpoint=sys.argv[1])\n"
    printed = succeed(SET_UP + again + "run()", f"{url}/")
    assert spans_of(receiver) == ONE_RUN
    assert sorted(request.target for request in receiver.requests) == ["/v1/metrics", "/v1/traces"]
    assert printed.count("telemetry.already_set_up") == 2
    assert "signal=traces" in printed
    assert "signal=metrics" in printed


def test_a_provider_of_the_application_stays(succeed: Succeed, receiver: Receiver, url: str) -> None:
    own = """
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(tracing := TracerProvider())
metrics.set_meter_provider(metering := MeterProvider())
"""
    same = "assert (trace.get_tracer_provider(), metrics.get_meter_provider()) == (tracing, metering); run()"
    assert succeed(own + SET_UP + same, url).count("telemetry.already_set_up") == 2
    assert receiver.collect() == []


def test_a_provider_that_is_set_late_sees_what_was_counted_before(succeed: Succeed) -> None:
    late = """
run()  # before there is a provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
metrics.set_meter_provider(MeterProvider([reader := InMemoryMetricReader()], shutdown_on_exit=False))
run()
for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics:
    points = {metric.name: metric.data.data_points for metric in scope.metrics}
    if scope.scope.name == "penstock":
        print([point.value for point in points["penstock.node.executions"] if point.value])
        print([(point.count, point.explicit_bounds[0]) for point in points["penstock.run.duration"]])
"""
    assert succeed(late, "http://127.0.0.1:9") == "[2]\n[(1, 0.005)]\n"


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
def test_a_forked_worker_sends_its_own_spans_at_its_exit(
    succeed: Succeed, receiver: Receiver, url: str, forking: str
) -> None:
    with_threads = "import warnings; warnings.simplefilter('ignore')\n"  # Python 3.12 and newer warn of it
    program = SET_UP + with_threads + "run()" + forking  # the spans of the parent wait to be sent when it forks
    succeed(program, url, OTEL_METRICS_EXPORTER="none")
    assert spans_of(receiver) == sorted(2 * ONE_RUN)


IN_PROCESSES = "from tests.telemetry.span_targets import trace_in_processes\n"


def test_spans_of_handlers_in_worker_processes_are_sent(succeed: Succeed, receiver: Receiver, url: str) -> None:
    succeed(SET_UP + IN_PROCESSES + "trace_in_processes()", url)
    groups = groups_of(receiver)
    nodes = {span.span_id: span.trace_id for _, span in groups if span.name == "traced"}
    inner = [(resource, span) for resource, span in groups if span.name.startswith("inner")]
    assert sorted(span.name for _, span in inner) == [f"inner {x}" for x in range(4)]
    assert {span.parent_span_id: span.trace_id for _, span in inner} == nodes
    parents = [resource for resource, span in groups if span.name == "traced"]
    of_parent = parents[0].get("service.instance.id")
    for resource, _ in inner:
        assert resource["service.instance.id"] != of_parent
        assert {**resource, "service.instance.id": of_parent} == {**parents[0], "service.instance.id": of_parent}
    attributes = [records.attributes_of(group.resource.attributes) for group in metrics_of(receiver)]
    assert {found.get("service.instance.id") for found in attributes} == {of_parent}  # metrics stay in the parent


@pytest.mark.parametrize(
    ("items", "arrived"),
    [((3, 2, 0), 5), ((1, 600), 601)],
    ids=["a worker is killed at a later item", "an item has more spans than an answer takes along"],
)
def test_spans_of_items_that_have_ended_are_there(
    succeed: Succeed, receiver: Receiver, url: str, items: tuple[int, ...], arrived: int
) -> None:
    program = f"from tests.telemetry.span_targets import fail_in_processes\nfail_in_processes(*{items})"
    succeed(SET_UP + program, url, OTEL_METRICS_EXPORTER="none", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2048")
    inner = [span for _, span in groups_of(receiver) if span.name.startswith("inner")]
    assert len({span.span_id for span in inner}) == len(inner) == arrived


def test_a_worker_process_has_its_own_process_in_the_resource_of_its_spans(
    succeed: Succeed, receiver: Receiver, url: str
) -> None:
    program = SET_UP + "import os; print(os.getpid())\n" + IN_PROCESSES + "trace_in_processes(1)"
    parent = int(
        succeed(program, url, OTEL_METRICS_EXPORTER="none", OTEL_EXPERIMENTAL_RESOURCE_DETECTORS="otel,process")
    )
    found = {span.name: resource["process.pid"] for resource, span in groups_of(receiver)}
    bodies = [ExportTraceServiceRequest.FromString(body) for body in receiver.bodies("traces")]
    scopes = [scope.scope for body in bodies for group in body.resource_spans for scope in group.scope_spans]
    assert {scope.version for scope in scopes if scope.name == "penstock"} == {ps.__version__}
    assert found["traced"] == parent
    assert found["inner 0"] not in (parent, None)


def test_a_worker_process_sets_nothing_up_before_an_item_is_sampled(succeed: Succeed, url: str) -> None:
    program = IN_PROCESSES + "print({has_sdk for _, has_sdk in trace_in_processes(1)})"
    assert succeed(program, url) == "{False}\n"  # without `setup`
    for variables in ({"OTEL_TRACES_SAMPLER": "always_off"}, {"OTEL_TRACES_EXPORTER": "none"}):
        assert succeed(SET_UP + program, url, **variables) == "{False}\n"


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


IMPATIENT = "from penstock.telemetry import exporting; exporting.EXIT_SECONDS = 0.2\n"


def test_a_receiver_that_never_answers_keeps_neither_worker_processes_nor_the_interpreter(
    succeed: Succeed, silent: str
) -> None:
    ended = """
for pid, _ in trace_in_processes(1):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        print("ended")
"""
    # The exporter would wait for ten minutes, and this test for less than one.
    printed = succeed(IMPATIENT + SET_UP + IN_PROCESSES + ended, silent, OTEL_EXPORTER_OTLP_TIMEOUT="600")
    assert printed.startswith("ended\n")
    assert "telemetry.not_sent" in printed


@pytest.mark.parametrize(
    ("missing", "variables", "error", "told"),
    [
        ("sdk.resources", {}, ImportError, r"pip install 'penstock\[otlp\]'"),
        (
            "exporter.otlp.proto.grpc.trace_exporter", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ImportError,
            r"no exporter 'otlp_proto_grpc' .* pip install 'penstock\[otlp\]'",
        ),
        (None, {"OTEL_TRACES_EXPORTER": "zipkin"}, ImportError, "pip install 'opentelemetry-exporter-zipkin'"),
        (
            None, {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"}, ValueError,
            "for metrics is 'http/json'; Penstock can send http/protobuf or grpc",
        ),
    ],
    ids=["the SDK", "an exporter", "an exporter of others", "a protocol"],
)  # fmt: skip
def test_what_is_not_there_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, missing: str | None, variables: dict[str, str], error: type[Exception], told: str
) -> None:
    if missing is not None:
        monkeypatch.setitem(sys.modules, f"opentelemetry.{missing}", None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=told):
        telemetry.setup(service_name="here")


def test_an_error_sets_nothing_up(succeed: Succeed, receiver: Receiver, url: str) -> None:
    failing = """
os.environ["OTEL_METRICS_EXPORTER"] = "carrier_pigeon"
try:
    telemetry.setup(service_name='here')
except ImportError:
    del os.environ["OTEL_METRICS_EXPORTER"]
"""
    assert succeed(failing + SET_UP + "run()", url) == ""
    assert spans_of(receiver) == ONE_RUN


# A run of real graphs, whose spans the program also writes into a file.
SENDING = "from tests.telemetry import sending; sending.main([sys.argv[1], 'graphs'])"


@pytest.mark.parametrize(("protocol", "compression"), [("http/protobuf", "gzip"), ("grpc", "")])
def test_all_that_was_recorded_arrives_as_it_was(
    succeed: Succeed, receiver: Receiver, tmp_path: Path, protocol: str, compression: str
) -> None:
    way = {"ENDPOINT": receiver.endpoints[protocol], "PROTOCOL": protocol, "HEADERS": "x-tenant=blue"}
    way |= {"COMPRESSION": compression} if compression else {}
    variables = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in way.items()}
    written = tmp_path / "records.json"
    succeed(SENDING, str(written), OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test", **variables)
    groups = groups_of(receiver)
    arrived = {span.span_id.hex(): records.from_protobuf(span) for _, span in groups}
    recorded = [records.from_json(fields) for fields in json.loads(written.read_text())]
    assert len(recorded) == len(groups) >= 25
    assert arrived == {record.span_id: record for record in recorded}
    for resource, _ in groups:
        names = ("service.name", "telemetry.sdk.language", "deployment.environment.name")
        assert [resource[name] for name in names] == [sending.SERVICE, "python", "test"]
    for span in arrived.values():
        assert 0 < span.start <= span.end
        if span.parent_id:
            parent = arrived[span.parent_id]
            assert span.trace_id == parent.trace_id
            assert parent.start <= span.start <= span.end <= parent.end, (parent.name, span.name)
    assert {arrived[span.parent_id].name for span in arrived.values() if span.links} == {"count"}  # opened in a thread
    assert {(request.protocol, request.headers["x-tenant"]) for request in receiver.requests} == {(protocol, "blue")}
    if protocol == "http/protobuf":
        assert {request.encoding for request in receiver.requests} == {compression}
    bodies = map(ExportTraceServiceRequest.FromString, receiver.bodies("traces"))
    sent = [scope for body in bodies for group in body.resource_spans for scope in group.scope_spans]
    assert {scope.scope.name for scope in sent} == {"sender", "penstock"}
    assert {span.name for scope in sent if scope.scope.name == "sender" for span in scope.spans} == {"caller", "split"}
    scopes = [scope for group in metrics_of(receiver) for scope in group.scope_metrics]
    sums = {metric.name: metric.sum.data_points for scope in scopes for metric in scope.metrics}
    assert [point.as_int for point in sums["joined"]] == [4]
