"""Foreign code that observes calls decides nothing: log handlers, spans, metrics and `repr` may raise at any call.

Each way to run a step runs once without an error, and the calls of a door are counted. Then it runs again for each of
these calls, which raises, and has the same outcome.
"""

import asyncio
import itertools
import random
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.trace import SpanContext, TraceFlags

import penstock as ps
from penstock import engine, extension, serving, telemetry
from tests.kit import Gate, numbers, plain, same
from tests.serving.openai_server import chat, fails, thinker
from tests.telemetry import span_targets
from tests.tracing import provided

EVERY = -1


class Fault:
    """Counts the calls of a door, and raises at one of them.

    Attributes:
        calls: how many calls there were.
        at: the number of the call that raises; 0 for none, `EVERY` for all.
        error: what is raised.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(0)

    def begin(self, at: int, error: type[BaseException] = RuntimeError) -> None:
        self.calls, self.at, self.error = 0, at, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.calls += 1
            raises = self.at in (EVERY, self.calls)
        if raises:
            raise self.error("in a door")


# The doors. Each is a context manager that has all calls of the door counted by a `Fault`.


class FaultySpan(trace.Span):
    """A span of another vendor than OpenTelemetry's SDK."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._context = SpanContext(random.getrandbits(128), random.getrandbits(64), False, TraceFlags(1))

    def get_span_context(self) -> SpanContext:
        self._fault()
        return self._context

    def is_recording(self) -> bool:
        self._fault()
        return True

    def _observe(self, *args: Any, **kwargs: Any) -> None:
        self._fault()

    end = set_attributes = set_attribute = add_event = add_link = _observe  # type: ignore[assignment]
    update_name = set_status = record_exception = _observe  # type: ignore[assignment]


class FaultyTracer(trace.Tracer):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        self._fault()
        return FaultySpan(self._fault)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class FaultyProvider(trace.TracerProvider):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        return FaultyTracer(self._fault)


@contextmanager
def spans(fault: Fault) -> Iterator[None]:
    with provided(FaultyProvider(fault)):
        yield


@contextmanager
def logs(fault: Fault) -> Iterator[None]:
    def process(logger: Any, method: str, event: Any) -> Any:
        fault()
        raise structlog.DropEvent

    structlog.configure(processors=[process])
    yield
    structlog.reset_defaults()


@contextmanager
def metrics(fault: Fault) -> Iterator[None]:
    class Histogram:
        record = fault

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.telemetry.metrics.meter_provider", object)
        names = telemetry.names
        histograms = dict.fromkeys((names.METRIC_RUN_DURATION, names.METRIC_STREAM_DURATION), Histogram)
        patch.setattr("penstock.telemetry.metrics._histograms", histograms)
        yield


class Odd(ConnectionError):
    """An error of the user, whose texts may raise."""

    fault: Fault | None = None

    def __repr__(self) -> str:
        if self.fault is not None:
            self.fault()
        return "Odd()"

    __str__ = __repr__


@contextmanager
def texts(fault: Fault) -> Iterator[None]:
    with logs(Fault()), spans(Fault()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Odd, "fault", fault)
        yield


DOORS = {door.__name__: door for door in (spans, logs, metrics, texts)}

# The ways to run a step. Each takes an Engine, and returns its outcomes.

Way = Callable[[engine.Engine], Awaitable[Any]]
WAYS: dict[str, Way] = {}
_serial = itertools.count()


def way(run: Way) -> Way:
    WAYS[run.__name__] = run
    return run


async def outcome(call: Awaitable[Any]) -> Any:
    """Returns the result of a call; of an error, its class and its notes."""
    (found,) = await asyncio.gather(call, return_exceptions=True)
    if isinstance(found, ps.OptionsError | ps.PlanError | ps.GraphTraceError | AttributeError | TypeError):
        raise found  # the way itself is wrong
    if isinstance(found, BaseException):
        return type(found), [re.sub(r"_\d+", "", note) for note in getattr(found, "__notes__", ())]
    return found


async def each(graph: Any, own: engine.Engine, *values: Any) -> list[Any]:
    return [await outcome(own.run(graph(value))) for value in values]


def named(node: Any) -> Any:
    """Gives a node another name for each run, since the engine tells some things once for a name."""
    return ps.graph(node.named(f"{node.name}_{next(_serial)}"))


def refuse(x: Any) -> None:
    if x < 0:
        raise Odd


@ps.node
async def checked(x: int) -> int:
    await asyncio.sleep(0)
    refuse(x)
    return x


@ps.node
def checked_plain(x: int) -> int:
    refuse(x)
    return x


@ps.node(runs_on="thread")
def checked_thread(x: int) -> int:
    refuse(x)
    return x


@way
async def loop(own: engine.Engine) -> Any:
    return await each(ps.graph(checked), own, 1, -1)


@way
async def plain_def(own: engine.Engine) -> Any:
    return await each(ps.graph(checked_plain), own, 1, -1)


@way
async def chain(own: engine.Engine) -> Any:
    return await each(plain >> checked_plain >> same >> checked, own, 1, -1)


@way
async def thread(own: engine.Engine) -> Any:
    return await each(ps.graph(checked_thread), own, 1, -1)


@way
async def process(own: engine.Engine) -> Any:
    return await each(ps.graph(ps.node(runs_on="process", name="negate")(span_targets.negate)), own, 1, 2)


@way
async def process_batch(own: engine.Engine) -> Any:
    batch = ps.node(runs_on="process", batch=ps.Batch(2), name="negate_all")(span_targets.negate_all)
    return await asyncio.gather(*(outcome(own.run(ps.graph(batch)(x))) for x in (1, -1)))


@way
async def batch(own: engine.Engine) -> Any:
    @ps.node(batch=ps.Batch(2))
    async def of_list(xs: list[int]) -> list[int | Exception]:
        return [Odd() if x < 0 else x for x in xs]

    return await asyncio.gather(*(outcome(own.run(ps.graph(of_list)(x))) for x in (1, -1, 2)))


@ps.node
async def until(count: int) -> AsyncIterator[int]:
    for number in range(abs(count)):
        yield number
    refuse(count)


@ps.graph
async def telling(count: int) -> AsyncIterator[int]:
    return until(count)


@way
async def values(own: engine.Engine) -> Any:
    async def read(count: int) -> Any:
        async with own.stream(telling(count)) as stream:
            return [value async for value in stream]

    return [await outcome(read(2)), await outcome(read(-2))]


@way
async def left_values(own: engine.Engine) -> Any:
    async with own.stream(telling(3)) as stream:
        return await anext(stream)


@way
async def stream(own: engine.Engine) -> Any:
    async with own.stream(map(ps.graph(checked), (1, -1, 2)), on_error="skip") as found:
        return [value async for value in found]


@way
async def stream_of_traces(own: engine.Engine) -> Any:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    calls = [telemetry.continued(ps.graph(checked)(x), headers) for x in (1, -1, 2)]
    async with own.stream(calls, trace_items=True) as found:
        return [(one.value, type(one.error)) async for one in found.outcomes()]


@way
async def deployment(own: engine.Engine) -> Any:
    async with own.deploy(ps.graph(checked), max_in_flight=1) as service:
        return await asyncio.gather(*(outcome(service(x)) for x in (1, -1, 2)))


@way
async def continued(own: engine.Engine) -> Any:
    with telemetry.continue_trace({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}):
        return await each(ps.graph(checked), own, 1)


@way
async def device(own: engine.Engine) -> Any:
    @ps.device_node(device="cpu", static=("odd",))
    def scaled(x: Any, odd: bool) -> Any:
        if odd and x.shape == (3,):
            raise Odd
        return x * 2

    graph = named(scaled)
    arrays = [np.ones(size, np.float32) for size in (2, 3, 4)]
    found = [await outcome(own.run(graph(array, True))) for array in arrays]
    return [one.tolist() if hasattr(one, "tolist") else one for one in found]


@way
async def device_batch(own: engine.Engine) -> Any:
    @ps.device_node(device="cpu", batch=ps.Batch(4))
    def scaled(x: Any) -> Any:
        if x.shape[-1] == 3:
            raise Odd
        return x * 2

    graph = named(scaled)
    arrays = [np.ones(size, np.float32) for size in (2, 2, 3, 3)]
    found = await asyncio.gather(*(outcome(own.run(graph(array))) for array in arrays))
    return [one.tolist() if hasattr(one, "tolist") else one for one in found]


@ps.node
class Doubler(ps.Actor[int, int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
        while True:
            work = await inbox.get()
            with self.step_span([work]):
                if work.value < 0:
                    work.fail(Odd())
                else:
                    work.finish(work.value * 2)


@way
async def own_loop(own: engine.Engine) -> Any:
    return await each(ps.graph(Doubler()), own, 1, -1)


@ps.node(restart_on=(Odd,))
class Counter:
    async def __call__(self, x: int) -> int:
        refuse(x)
        return x


@ps.node
class Crashing(ps.Actor[int, int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
        while True:
            work = await inbox.get()
            refuse(work.value)
            work.finish(work.value)


@way
async def restarts(own: engine.Engine) -> Any:
    async with own.deploy(ps.graph(Counter())) as service:
        return [await outcome(service(x)) for x in (1, -1, 2, -1, 3)]


@way
async def loop_restarts(own: engine.Engine) -> Any:
    async with own.deploy(ps.graph(Crashing())) as service:
        return [await outcome(service(x)) for x in (1, -1, 2)]


@way
async def last_restart(own: engine.Engine) -> Any:
    async def run() -> Any:
        async with own.deploy(ps.graph(Counter()), max_restarts=0) as service:
            return [await outcome(service(x)) for x in (1, -1, 2)]

    return await outcome(run())


@ps.graph
async def mapped(xs: list[int]) -> list[int]:
    return await ps.map_each(checked, xs, on_error="skip")


@way
async def map_each(own: engine.Engine) -> Any:
    return await each(mapped, own, [1, -1, 2])


@ps.node
async def halved(x: int) -> int:
    return x // 2


@ps.node
def is_large(x: int) -> bool:
    return x > 2


@ps.graph
async def looped(x: int) -> int:
    return await ps.while_loop(is_large, halved, x)


@way
async def while_loop(own: engine.Engine) -> Any:
    return await each(looped, own, 9)


@ps.node
async def add(total: int, x: int) -> int:
    refuse(x - 1)
    return total + x


@ps.graph
async def folded(count: int) -> int:
    return await ps.fold(add, numbers(count), 0, on_error="skip")


@way
async def fold(own: engine.Engine) -> Any:
    return await each(folded, own, 3)


def failing_at_first(**policy: Any) -> Any:
    attempts = itertools.count()

    @ps.node(**policy)
    async def first_fails(x: int) -> int:
        if not next(attempts):
            raise Odd
        return x

    return named(first_fails)


@way
async def retry(own: engine.Engine) -> Any:
    return await each(failing_at_first(retry=ps.Retry(2, backoff_seconds=0)), own, 1)


@way
async def retry_in_vain(own: engine.Engine) -> Any:
    return await each(named(checked.with_policy(retry=ps.Retry(2, backoff_seconds=0))), own, -1)


@way
async def fallback(own: engine.Engine) -> Any:
    return await each(failing_at_first(fallback=lambda error: -1), own, 1)


@way
async def failover(own: engine.Engine) -> Any:
    return await each(failing_at_first(failover=same), own, 1)


@way
async def hedge(own: engine.Engine) -> Any:
    begun = itertools.count()

    @ps.node(hedge=ps.Hedge(after_seconds=0.001, max_share=1))
    async def second_wins(x: int) -> int:
        if not next(begun):
            await asyncio.Event().wait()
        return x

    return await each(named(second_wins), own, 1)


@way
async def hedge_with_error(own: engine.Engine) -> Any:
    begun = itertools.count()
    second = asyncio.Event()

    @ps.node(hedge=ps.Hedge(after_seconds=0.001, max_share=1))
    async def second_wins(x: int) -> int:
        if next(begun):
            second.set()
            await asyncio.sleep(0)
            return x
        await second.wait()
        raise Odd

    return await each(named(second_wins), own, 1)


@way
async def timeout(own: engine.Engine) -> Any:
    @ps.node(timeout_seconds=0.01)
    async def too_slow(x: int) -> int:
        await asyncio.Event().wait()
        return x

    return await each(ps.graph(too_slow), own, 1)


@way
async def deadline(own: engine.Engine) -> Any:
    return await outcome(own.run(Gate().graph()(1), timeout_seconds=0.01))


@way
async def caller_leaves(own: engine.Engine) -> Any:
    gate = Gate()
    task = asyncio.create_task(own.run(gate.graph()(1)))
    await gate.has()
    task.cancel()
    return await outcome(task), gate.cancelled


@way
async def cache(own: engine.Engine) -> Any:
    @ps.node(cache=ps.Cache(max_bytes=10_000))
    async def cached(x: int) -> int:
        refuse(x)
        return x

    return await each(ps.graph(cached), own, 1, 1, -1, -1)


@ps.node
def pair(x: int, y: int) -> int:
    return x + y


@way
async def discard(own: engine.Engine) -> Any:
    def give_up(_: object) -> None:
        raise Odd

    @ps.node(discard=give_up)
    async def opened(x: int) -> int:
        return x

    @ps.graph
    async def opens(x: int) -> int:
        return pair(await opened(x), await checked(-1))

    return await each(opens, own, 1)


@way
async def late_step(own: engine.Engine) -> Any:
    @ps.node
    async def calls(x: int) -> Any:
        return [await outcome(ps.call(checked, x)), await outcome(ps.call(checked, -x))]

    return await each(ps.graph(calls), own, 1)


@way
async def two_fail(own: engine.Engine) -> Any:
    """The second of two steps fails while it is cancelled."""
    gate = Gate()

    @ps.node
    async def late(x: int) -> int:
        try:
            return await gate.wait(x)
        finally:
            raise Odd

    @ps.node
    async def early(x: int) -> int:
        await gate.has()
        raise LookupError

    @ps.graph
    async def both(x: int) -> int:
        return pair(await late(x), await early(x))

    return await each(both, own, 1)


@way
async def resource_ends(own: engine.Engine) -> Any:
    @ps.resource
    async def opened() -> AsyncIterator[int]:
        yield 1
        raise Odd

    @ps.graph
    async def uses(x: int) -> int:
        return pair(await opened(), x)

    async def run() -> Any:
        async with engine.Engine() as other:
            return await outcome(other.run(uses(1)))

    return await outcome(run())


@way
async def answers(own: engine.Engine) -> Any:
    """Answers of a model server; the second ends with an error of its graph."""
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(
            serving.openai({"thinker": thinker, "fails": fails}, trace_content=True)
        )
        transport = httpx.ASGITransport(served, raise_app_exceptions=False)
        http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://here"))
        found = [await chat(http, model, stream=stream) for model in ("thinker", "fails") for stream in (False, True)]
        return [(one.status_code, one.text.count("data:"), one.text.count("content")) for one in found]


@pytest.fixture
async def own(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[engine.Engine]:
    monkeypatch.setattr("penstock.telemetry.logs._told", set())  # an earlier test may have had an error in a door
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(engine.Engine(max_processes=1))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", WAYS)
async def test_an_error_at_any_call_of_a_door_changes_no_outcome(name: str, door: str, own: engine.Engine) -> None:
    fault, run = Fault(), WAYS[name]
    with DOORS[door](fault):
        right = await asyncio.wait_for(run(own), 60)
        calls = fault.calls
        errors: list[tuple[int, type[BaseException]]] = [(at, RuntimeError) for at in range(1, calls + 1)]
        errors += [(EVERY, RuntimeError), (EVERY, asyncio.CancelledError)] if calls else []
        for at, error in errors:
            fault.begin(at, error)
            assert await asyncio.wait_for(run(own), 60) == right, f"{error.__name__} at call {at} of {calls}"


@ps.device_node(device="cpu")
def doubled(x: Any) -> Any:
    return x * 2


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
async def test_no_error_of_a_door_ends_a_thread_of_the_engine(error: type[BaseException], own: engine.Engine) -> None:
    main, fault = threading.current_thread(), Fault()

    class OutsideTheLoop(Fault):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not main:
                fault()

    fault.begin(EVERY, error)
    with logs(Fault()), spans(OutsideTheLoop()):
        for size in (2, 3):
            result = await asyncio.wait_for(own.run(ps.graph(doubled)(np.ones(size, np.float32))), 60)
            assert result.tolist() == [2.0] * size
    assert fault.calls


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_a_signal_raises_inside_of_a_door_ends_the_program(error: type[BaseException]) -> None:
    fault = Fault()
    fault.begin(EVERY, error)

    async def main() -> None:
        with logs(fault):
            async with engine.Engine() as own:
                await own.run(failing_at_first(retry=ps.Retry(2, backoff_seconds=0))(1))

    with pytest.raises(error):
        asyncio.run(main())


async def test_the_first_error_of_a_door_is_logged_and_no_other(own: engine.Engine) -> None:
    fault = Fault()
    fault.begin(EVERY)
    with structlog.testing.capture_logs() as events, spans(fault), metrics(fault):
        await each(ps.graph(checked), own, 1, 2)
    assert [(event["event"], event["door"], event["error"]) for event in events] == [
        ("telemetry.failed", "spans", "RuntimeError('in a door')"),
        ("telemetry.failed", "metrics", "RuntimeError('in a door')"),
    ]
    assert {re.sub(r":\d+$", "", event["at"]) for event in events} == {__file__}


async def test_a_log_that_cannot_be_written_is_told_once_on_standard_error(
    own: engine.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = Fault()
    fault.begin(EVERY)
    with logs(fault):
        assert await WAYS["restarts"](own)
    assert fault.calls > 1
    told = "Penstock could not write a log line: RuntimeError('in a door'). It tells this once.\n"
    assert capsys.readouterr().err == told


class Faulty(extension.Execution):
    """Runs coroutines here, and cannot tell its figures."""

    def bind(self, site: extension.Site) -> extension.Bound:
        return FaultyBound(site.node.fn)


class FaultyBound(extension.Bound):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    async def run(self, attempt: extension.Attempt) -> Any:
        return await self.fn(*attempt.args)

    def figures(self) -> list[extension.Figure]:
        raise RuntimeError("no figures")


async def test_figures_that_cannot_be_told_are_left_out(own: engine.Engine) -> None:
    elsewhere = ps.graph(ps.node(runs_on=Faulty("faulty"))(same.fn))
    with structlog.testing.capture_logs() as events:
        async with own.deploy(elsewhere) as service:
            assert await service(1) == 1
            assert service.statistics().actors[0].figures == ()
    assert [(event["event"], event["door"]) for event in events] == [("telemetry.failed", "figures")]


def test_a_provider_that_makes_no_instruments_is_asked_once(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(NO_INSTRUMENTS)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "2 results, asked once"), ended


NO_INSTRUMENTS = """
import asyncio
from opentelemetry import metrics

import penstock as ps
from penstock import engine

asked = []


class Provider(metrics.MeterProvider):
    def get_meter(self, *args, **kwargs):
        asked.append(args)
        raise RuntimeError("no meter")


@ps.node
async def same(x):
    return x


async def main():
    metrics.set_meter_provider(Provider())
    found = [await engine.run(ps.graph(same)(x)) for x in (1, 2)]
    print(len(found), "results, asked", "once" if len(asked) == 1 else len(asked))


asyncio.run(main())
"""
