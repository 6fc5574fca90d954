"""Sends the spans and metrics of an application to a receiver of OTLP, also at its exit."""

import atexit
import copyreg
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from multiprocessing.util import Finalize, register_after_fork
from time import monotonic
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from opentelemetry import metrics, trace

from . import spans
from .logs import logged, warning

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource


# Closing the exporters at the exit of the interpreter, within a time limit.
#
# If the endpoint is down, the SDK's own exit handlers wait for all retries of each batch, up to half a minute for each
# signal. So each exporter is closed in a thread, and the exit waits only `EXIT_SECONDS` for these threads. The threads
# are started early, because Python starts no thread at exit.

# A full queue of the SDK, 2,048 spans, goes to a receiver on the same machine in 0.2 s by HTTP and in 0.4 s by gRPC.
# There is time for one retry, which comes after a second.
EXIT_SECONDS = 3.0


class _Closer:
    """A thread that waits, and calls a function at the exit."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self.start()

    def start(self) -> None:
        """Start the thread; call this again in a forked process, which does not have the thread."""
        self.told = threading.Event()
        self.done = threading.Event()
        threading.Thread(target=self._run, name="penstock-telemetry-exit", daemon=True).start()

    def _run(self) -> None:
        self.told.wait()
        self._close()
        self.done.set()


def close_at_exit(closes: Sequence[Callable[[], None]]) -> None:
    """Call functions at the exit of the interpreter, each in a thread; the exit waits at most `EXIT_SECONDS`."""
    closers = [_Closer(close) for close in closes]
    if not closers:
        return

    def go_on_in_child() -> None:
        for closer in closers:
            closer.start()

    atexit.register(_close, closers)
    os.register_at_fork(after_in_child=go_on_in_child)
    # Children that `multiprocessing` has forked end without `atexit`, and do not inherit the finalizers of their
    # parent.
    register_after_fork(go_on_in_child, lambda _: Finalize(None, _close, [closers], exitpriority=-1))


def _close(closers: Sequence[_Closer]) -> None:
    for closer in closers:
        closer.told.set()
    give_up = monotonic() + EXIT_SECONDS
    if not all(closer.done.wait(max(0.0, give_up - monotonic())) for closer in closers):
        warning("telemetry.not_sent", waited_seconds=EXIT_SECONDS, remedy="is the receiver of OTLP running?")


# Sends the spans and metrics of an application to a receiver of OTLP.
#
# Libraries call only the API of OpenTelemetry. Exporters belong to the application, so the SDK is an extra, and only
# `setup` loads it.

# The values of OTEL_EXPORTER_OTLP_PROTOCOL, and the exporter for each. The first one is the default of the standard.
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def setup(*, service_name: str, endpoint: str | None = None) -> None:
    """Send the spans and metrics of this application to a receiver of OTLP: a collector, Jaeger, or any other.

    Call it once, before the first call of a graph. It sets the global providers of OpenTelemetry, so that all other
    instrumented libraries in the process send their spans and metrics, too. Spans that handlers make in worker
    processes are sent, too. At the exit of the interpreter, unsent data is sent for at most 3 seconds;
    `trace.get_tracer_provider().force_flush()` sends it earlier.

    The standard `OTEL_*` variables configure everything else, and a variable wins over an argument, so that the
    operator decides. `OTEL_EXPORTER_OTLP_PROTOCOL` chooses between `http/protobuf`, the default, and `grpc`.
    `OTEL_TRACES_SAMPLER` chooses which calls are sampled; by default all, except requests that their callers do not
    sample. `OTEL_TRACES_EXPORTER=none` or `OTEL_METRICS_EXPORTER=none` turns one of the two off,
    `OTEL_SDK_DISABLED=true` both.

    If the application, or an earlier call, has set a provider already, that provider stays, and the warning
    `telemetry.already_set_up` is logged.

    Args:
        service_name: the `service.name` of all spans and metrics, unless `OTEL_SERVICE_NAME` or
            `OTEL_RESOURCE_ATTRIBUTES` sets it.
        endpoint: the URL of the receiver, such as `http://collector:4318`, unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set.
            For HTTP, `/v1/traces` and `/v1/metrics` are added to it. By default, the receiver is on this machine, at
            port 4318 (4317 for gRPC).

    Raises:
        ImportError: the SDK, or an exporter that a variable names, is not installed; the message says what to install.
        ValueError: a variable names a protocol for which there is no exporter.
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
        batches = _batching(traces)
        _trace_with(batches, resource)
        closes.append(batches.shutdown)
        spans.export_of_worker = lambda ended: [*map(batches.on_end, pickle.loads(ended))]
        spans.set_up_of_workers = partial(_hand_over_traces, dict(resource.attributes), endpoint)
    if numbers and _is_free("metrics", metrics.get_meter_provider()):
        closes.append(_send_metrics(numbers, resource).shutdown)
    close_at_exit(closes)


def _batching(exporters: list[Callable[[], Any]]) -> Any:
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    batches: Any = cast(Any, SynchronousMultiSpanProcessor)()
    for make in exporters:
        batches.add_span_processor(BatchSpanProcessor(make()))
    return batches


def _trace_with(processor: Any, resource: "Resource") -> None:
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider(None, resource, shutdown_on_exit=False, active_span_processor=processor))


def _as_plain(kind: type, values: Any) -> tuple[Callable[..., Any], tuple[Any]]:
    return kind, (kind(values),)


# How many spans of one call a worker hands over with its answer: as many as the SDK keeps in its queue of a batch.
_MOST_HANDED_OVER = 512


def _hand_over_traces(resource: dict[str, Any], endpoint: str | None) -> None:
    """Let a worker process hand its spans over to its parent, which has called `setup`; a worker sends no metrics.

    Spans that end between two calls, and those of a call that has very many, are sent from here.

    Args:
        resource: the resource attributes of the parent. The worker has a `service.instance.id` of its own and, if a
            detector has found its parent's, attributes of its own process.
        endpoint: as for `setup`.
    """
    if not _has_none(trace.get_tracer_provider()):  # the module of the node has set up a provider
        return
    with logged("telemetry.not_set_up_in_worker"):  # an item must not fail because its spans cannot be sent
        from opentelemetry.attributes import BoundedAttributes
        from opentelemetry.sdk.resources import PROCESS_PID, SERVICE_INSTANCE_ID, ProcessResourceDetector, Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
        from opentelemetry.sdk.util import BoundedList

        # These have locks, which do not pickle.
        copyreg.pickle(BoundedAttributes, partial(_as_plain, dict))
        copyreg.pickle(BoundedList, partial(_as_plain, tuple))

        @cache
        def sent_from_here() -> Any:
            batches = _batching(_find_exporters("traces", endpoint))
            close_at_exit([batches.shutdown])
            return batches

        class HandsOver(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                ended = spans.ended_in_worker
                if ended is not None and len(ended) < _MOST_HANDED_OVER:
                    ended.append(span)
                else:
                    sent_from_here().on_end(span)

        own = Resource({**resource, SERVICE_INSTANCE_ID: str(uuid4())})
        if PROCESS_PID in resource:
            own = own.merge(ProcessResourceDetector().detect())
        _trace_with(HandsOver(), own)


def _send_metrics(exporters: list[Callable[[], Any]], resource: "Resource") -> "MeterProvider":
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    made = [make() for make in exporters]
    # Some exporters are metric readers themselves: the exporter for Prometheus does not send, but is scraped.
    readers = [each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(each) for each in made]
    provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    return provider


def _is_free(signal: str, provider: object) -> bool:
    """Whether no provider is set yet; log a warning if a provider is set."""
    if _has_none(provider):
        return True
    remedy = "call telemetry.setup() once, and only where nothing else sets a provider"
    warning("telemetry.already_set_up", signal=signal, provider=type(provider).__qualname__, remedy=remedy)
    return False


def _has_none(provider: object) -> bool:
    # Until a provider is set, the API returns a proxy, whose class has no public name for metrics.
    return "Proxy" in type(provider).__name__


def _find_exporters(signal: str, endpoint: str | None) -> list[Callable[[], Any]]:
    """Return a function for each exporter that the variables name, which makes the exporter."""
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

    named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME)  # the name in the environment
    return Resource.create({} if named else {SERVICE_NAME: service_name})


def _read(variable: str) -> str:
    return os.environ.get(variable, "").strip()  # in the standard, an empty variable counts as unset
