"""Sends the spans and metrics of an application to a receiver of OTLP, also at its exit."""

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from multiprocessing.util import Finalize, register_after_fork
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from opentelemetry import metrics, trace

from . import spans
from .logs import warning

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider


# Closes what sends telemetry when the interpreter exits, without keeping it from exiting.
#
# The SDK's own handlers wait for an endpoint that is down: for all retries of each batch, up to half a minute for each
# signal. Python starts no thread at exit, so each of these waits for that moment from the beginning.

# A full queue of the SDK, 2,048 spans, goes to a receiver on the same machine in 0.2 s by HTTP and in 0.4 s by gRPC.
# There is time for one retry, which comes after a second.
EXIT_SECONDS = 3.0


class _Closer:
    """Calls a function in a thread of its own when told to."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self.start()

    def start(self) -> None:
        """Begin to wait; once more in a process that was forked, which has no such thread."""
        self.told = threading.Event()
        self.done = threading.Event()
        threading.Thread(target=self._run, name="penstock-telemetry-exit", daemon=True).start()

    def _run(self) -> None:
        self.told.wait()
        self._close()
        self.done.set()


def close_at_exit(closes: Sequence[Callable[[], None]]) -> None:
    """Call functions side by side at exit, and wait for them, `EXIT_SECONDS` at most."""
    closers = [_Closer(close) for close in closes]
    if not closers:
        return

    def go_on_in_child() -> None:
        for closer in closers:
            closer.start()

    atexit.register(_close, closers)
    os.register_at_fork(after_in_child=go_on_in_child)
    # The children that `multiprocessing` forks end without `atexit`, and begin without the finalizers of their parent.
    register_after_fork(go_on_in_child, lambda _: Finalize(None, _close, [closers], exitpriority=-1))


def _close(closers: Sequence[_Closer]) -> None:
    for closer in closers:
        closer.told.set()
    give_up = monotonic() + EXIT_SECONDS
    if not all(closer.done.wait(max(0.0, give_up - monotonic())) for closer in closers):
        warning("telemetry.not_sent", waited_seconds=EXIT_SECONDS, remedy="is the receiver of OTLP running?")


# Sends the spans and metrics of an application to a receiver of OTLP.
#
# Libraries call the API of OpenTelemetry and nothing else. What is set up here belongs to the application, so the SDK
# is an extra, and only `setup` loads it.

# What OTEL_EXPORTER_OTLP_PROTOCOL may say, and the exporter that speaks it. The first is the standard's default.
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def setup(*, service_name: str, endpoint: str | None = None) -> None:
    """Send the spans and metrics of this application to a receiver of OTLP: a collector, Jaeger, or any other.

    Call it once, before the first call of a graph. It sets the global providers of OpenTelemetry, so that everything
    else in the process that is instrumented is sent, too, and `trace.get_tracer_provider().force_flush()` works.
    Spans that handlers make in worker processes are sent from there. When the interpreter exits, what is left is sent,
    for 3 seconds at most.

    The standard `OTEL_*` variables say the rest, and one that is set wins over an argument: the operator has the last
    word. `OTEL_EXPORTER_OTLP_PROTOCOL` chooses between `http/protobuf`, the default, and `grpc`;
    `OTEL_TRACES_SAMPLER` what is sampled (unset, all but the requests that their callers do not sample);
    `OTEL_TRACES_EXPORTER=none` or `OTEL_METRICS_EXPORTER=none` turns one off, `OTEL_SDK_DISABLED=true` both.

    What has a provider already, set by the application or by an earlier call, stays as it is, and a warning
    `telemetry.already_set_up` is logged.

    Args:
        service_name: `service.name` of what is sent, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` has one.
        endpoint: URL of the receiver, unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set, as in `http://collector:4318`. For
            HTTP it is the base to which `/v1/traces` and `/v1/metrics` are added. Unset, it is this machine, at port
            4318 (4317 for gRPC).

    Raises:
        ImportError: the SDK is not installed, or an exporter that a variable names; the message says what to install.
        ValueError: a variable asks for a protocol that there is no exporter for.
    """
    if _read("OTEL_SDK_DISABLED").lower() == "true":
        return
    try:
        resource = _resource(service_name)
    except ImportError as error:
        raise ImportError("telemetry.setup() needs the SDK: pip install 'penstock[otlp]'") from error
    traces, numbers = (_find_exporters(signal, endpoint) for signal in ("traces", "metrics"))  # all, or an error
    closes: list[Callable[[], None]] = []
    if traces and _is_free("traces", trace.get_tracer_provider()):
        closes.append(_send_traces(traces, resource).shutdown)
        spans.set_up_workers(partial(_send_traces_of_worker, dict(resource.attributes), endpoint))
    if numbers and _is_free("metrics", metrics.get_meter_provider()):
        closes.append(_send_metrics(numbers, resource).shutdown)
    close_at_exit(closes)


def _send_traces(exporters: list[Callable[[], Any]], resource: "Resource") -> "TracerProvider":
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for make in exporters:
        provider.add_span_processor(BatchSpanProcessor(make()))
    trace.set_tracer_provider(provider)
    return provider


def _send_traces_of_worker(resource: dict[str, Any], endpoint: str | None) -> None:
    """Do in a worker process what `setup` did in the one that started it; metrics stay there.

    Args:
        resource: attributes of that process, which this one shares but for its `service.instance.id`.
        endpoint: as for `setup`.
    """
    if not _has_none(trace.get_tracer_provider()):  # the module of its node has set one up
        return
    try:
        from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource

        own = Resource({**resource, SERVICE_INSTANCE_ID: str(uuid4())})
        close_at_exit([_send_traces(_find_exporters("traces", endpoint), own).shutdown])
    except Exception as error:  # noqa: BLE001 - exporters are others' code, and an item must not fail for its spans
        warning("telemetry.not_set_up_in_worker", error=repr(error))


def _send_metrics(exporters: list[Callable[[], Any]], resource: "Resource") -> "MeterProvider":
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    made = [make() for make in exporters]
    # Some are readers themselves: that of Prometheus is asked, and does not send.
    readers = [each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(each) for each in made]
    provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    return provider


def _is_free(signal: str, provider: object) -> bool:
    """Whether the application has set no provider yet; warns otherwise."""
    if _has_none(provider):
        return True
    remedy = "call telemetry.setup() once, and only where nothing else sets a provider"
    warning("telemetry.already_set_up", signal=signal, provider=type(provider).__qualname__, remedy=remedy)
    return False


def _has_none(provider: object) -> bool:
    # Until one is set, the API shows a stand-in, and that of metrics has no public name.
    return "Proxy" in type(provider).__name__


def _find_exporters(signal: str, endpoint: str | None) -> list[Callable[[], Any]]:
    """Return what makes the exporters that the variables ask for."""
    names = [name.strip() for name in (_read(f"OTEL_{signal.upper()}_EXPORTER") or "otlp").split(",")]
    return [_exporter(signal, name, endpoint) for name in names if name.lower() != "none"]


def _exporter(signal: str, name: str, endpoint: str | None) -> Callable[[], Any]:
    variables = f"OTEL_EXPORTER_OTLP_{signal.upper()}_", "OTEL_EXPORTER_OTLP_"
    if name == "otlp":
        name = _protocol(signal, variables)
    try:
        make: Callable[..., Any] = next(iter(entry_points(group=f"opentelemetry_{signal}_exporter", name=name))).load()
    except (StopIteration, ImportError) as error:
        package = "penstock[otlp]" if name in _PROTOCOLS.values() else f"opentelemetry-exporter-{name}"
        raise ImportError(f"no exporter {name!r} for {signal} is installed: pip install {package!r}") from error
    if endpoint is None or name not in _PROTOCOLS.values() or any(_read(f"{prefix}ENDPOINT") for prefix in variables):
        return make
    url = endpoint if name == _PROTOCOLS["grpc"] else f"{endpoint.rstrip('/')}/v1/{signal}"
    return lambda: make(endpoint=url)


def _protocol(signal: str, prefixes: tuple[str, ...]) -> str:
    chosen = next(filter(None, (_read(f"{prefix}PROTOCOL") for prefix in prefixes)), "http/protobuf")
    if chosen not in _PROTOCOLS:
        known = " or ".join(_PROTOCOLS)
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL for {signal} is {chosen!r}; Penstock can send {known}")
    return _PROTOCOLS[chosen]


def _resource(service_name: str) -> "Resource":
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME)  # what the environment says
    return Resource.create({} if named else {SERVICE_NAME: service_name})


def _read(variable: str) -> str:
    return os.environ.get(variable, "").strip()  # to the standard, empty means unset
