"""Each call has one span; each node execution has one if the call is sampled; and no span stays open.

Spans say how long an item waited, how it ended, and which span is inside of which; and traces travel on.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler, SamplingResult

import penstock as ps
from penstock import engine, telemetry, testing
from penstock.telemetry import names
from tests.kit import Gate, added, begun, model, numbers, outcomes, paused, plain, slow_to_leave, values_of, virtual
from tests.telemetry import span_targets
from tests.tracing import Tracing, attributes_of, id_of, parent_of


@ps.node(runs_on="thread")
def compute(x: int) -> int:
    trace.get_current_span().set_attribute("seen", x)
    return x


@ps.node
async def fail(x: int) -> int:
    raise LookupError(x)


computing = paused >> compute >> plain


async def test_a_call_is_a_child_of_its_callers_span_and_has_one_span_per_node(tracing: Tracing) -> None:
    with tracing.provider.get_tracer("test").start_as_current_span("caller") as caller:
        with telemetry.profile():  # changes no span
            assert await engine.run(computing(3)) == 3
        assert trace.get_current_span() is caller
    run = tracing.one("penstock.run paused_to_compute_to_plain")
    assert parent_of(run) == caller.get_span_context().span_id
    assert attributes_of(run) == {names.GRAPH: "paused_to_compute_to_plain", names.OUTCOME: "done"}
    for name in ("paused", "compute", "plain"):
        span = tracing.one(name)
        assert parent_of(span) == id_of(run)
        assert attributes_of(span)[names.FUNCTION].endswith(f".{name}")
        assert attributes_of(span)[names.ITEM] == 0
    assert attributes_of(tracing.one("compute"))["seen"] == 3  # the context travels into the thread
    assert len(tracing.spans()) == 5


class Unprintable(Exception):
    """An error whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@ps.node(retry=ps.Retry(attempts=2))
async def unprintable(x: int) -> int:
    if x or ps.current().attempt == 1:
        raise Unprintable
    return x


speechless = ps.graph(unprintable)


async def test_an_error_without_a_text_is_the_one_that_is_raised(tracing: Tracing) -> None:
    with pytest.raises(Unprintable):
        await engine.run(speechless(1))
    for span in (tracing.one("unprintable"), tracing.one("penstock.run unprintable")):
        assert attributes_of(span)[names.ERROR_TYPE] == "Unprintable"
        assert span.status.description == "<Unprintable whose str() raises RuntimeError>"
    assert await engine.run(speechless(0)) == 0
    assert await values_of(engine.stream((speechless(x) for x in range(3)), on_error="skip")) == [0]


async def test_another_attempt_and_a_fallback_are_events_of_the_span(tracing: Tracing) -> None:
    careful = fail.with_policy(name="careful", retry=ps.Retry(attempts=2), fallback=lambda error: -1)
    assert await engine.run(ps.graph(careful)(1)) == -1
    span = tracing.one("careful")
    assert attributes_of(span)[names.OUTCOME] == "done"
    failed = {names.NODE: "careful", names.ERROR_TYPE: "LookupError", names.ERROR_MESSAGE: "1"}
    assert [(event.name, dict(event.attributes or {})) for event in span.events] == [
        (names.RETRY, {**failed, names.ATTEMPT: 1, names.PAUSE: 0.0}),
        (names.ATTEMPT, {names.NODE: "careful", names.ATTEMPT: 2}),
        (names.FALLBACK, failed),
    ]  # fmt: skip


async def disconnect() -> None:
    await asyncio.sleep(0)
    raise ConnectionError


@pytest.mark.parametrize("failing", ["enter", "leave"])
async def test_no_span_stays_open_when_a_stateful_node_fails(failing: Any, tracing: Tracing) -> None:
    graph = ps.graph(model(**{failing: disconnect}))
    with pytest.raises(ConnectionError):
        await engine.run(graph(1))
    run = tracing.one("penstock.run Model")
    assert attributes_of(run)[names.OUTCOME] == ("failed" if failing == "enter" else "done")
    with pytest.raises(ConnectionError):
        await values_of(engine.stream([graph(1)]))
    with pytest.raises(ConnectionError):
        async with engine.deploy(graph) as service:
            await service(1)
    assert len(tracing.streams()) == 1


async def test_no_span_stays_open_when_an_engine_is_closed(tracing: Tracing) -> None:
    graph = ps.graph(model(enter=partial(asyncio.sleep, 0.02)))
    async with engine.Engine() as own:
        calls = await begun(own.run(graph(1)), read_one(own.stream([graph(1)])))
    assert await outcomes(*calls) == [ps.EngineClosedError] * 2
    assert len(tracing.named("penstock.run Model")) >= 1
    assert len(tracing.streams()) == 1


async def read_one(stream: engine.Stream[int]) -> int:
    async with stream:
        return await anext(stream)


async def test_no_span_stays_open_when_callers_and_readers_leave(
    tracing: Tracing, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine.deploy(computing) as service:
        for turns in range(6):
            call = asyncio.create_task(service(1))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        assert await read_one(service.stream(computing(x) for x in range(100))) == 0
    assert tracing.spans()
    assert "detach" not in caplog.text


async def test_the_values_of_a_fold_have_spans_below_it_and_those_left_out_are_told_there(tracing: Tracing) -> None:
    @ps.node
    def add(total: int, number: int) -> int:
        if number == 1:
            raise ValueError("one is no good")
        return total + number

    @ps.graph
    async def answer(count: int) -> int:
        return await ps.fold(add, numbers(count), 0, on_error="skip")

    assert await engine.run(answer(4)) == 5
    fold = tracing.one("fold")
    added = tracing.named("add")
    assert [parent_of(span) for span in added] == [id_of(fold)] * 4
    assert [attributes_of(span)[names.ITEM] for span in added] == [0, 1, 2, 3]
    assert [span.status.status_code is trace.StatusCode.ERROR for span in added] == [False, True, False, False]
    [skipped] = [event for event in fold.events if event.name == names.ITEM_SKIPPED]
    assert attributes_of(skipped)[names.ITEM] == 1


# --- How each span ends, and what is inside of what ---


@ps.node
async def add(x: int, y: int) -> int:
    return x + y


line = paused >> added
failing = ps.graph(fail)


def outcomes_in(spans: list[ReadableSpan]) -> list[str]:
    return [attributes_of(span)[names.OUTCOME] for span in spans]


CANCELLED, EXPIRED = ("cancelled", "UNSET", None), ("expired", "ERROR", "DeadlineExceeded")


def ends(tracing: Tracing, name: str) -> list[tuple[str, str, str | None]]:
    """Returns the outcome, the status and the type of the error of each span of this name."""
    found = [(attributes_of(span), span.status.status_code.name) for span in tracing.named(name)]
    return [(told[names.OUTCOME], status, told.get(names.ERROR_TYPE)) for told, status in found]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that spans are told."""
    found = [0.0]
    monkeypatch.setattr("penstock.telemetry.spans.perf_counter", lambda: found[0])
    return found


async def test_a_node_says_how_long_its_item_waited_since_its_inputs_were_complete(
    tracing: Tracing, now: list[float]
) -> None:
    gate = Gate()
    async with engine.deploy(paused >> gate.node(name="narrow", concurrency=1)) as service:
        calls = await begun(service(0), service(1))
        now[0] = 5.0
        gate.open()
        await asyncio.gather(*calls)
    waits = [attributes_of(span)[names.QUEUE_WAIT] for span in tracing.named("narrow")]
    assert sorted(waits) == [0.0, 5.0]
    assert [attributes_of(span)[names.QUEUE_WAIT] for span in tracing.named("paused")] == [0.0, 0.0]


@pytest.mark.parametrize("timeout_seconds", [None, 60])
async def test_a_node_that_awaits_what_was_cancelled_has_failed(
    tracing: Tracing, timeout_seconds: float | None
) -> None:
    @ps.node(timeout_seconds=timeout_seconds)
    async def await_cancelled(x: int) -> int:
        given_up = asyncio.get_running_loop().create_future()
        given_up.cancel()
        await given_up
        return x

    with pytest.raises(ps.NodeCancelledError):
        await engine.run(ps.graph(await_cancelled)(1))
    assert ends(tracing, "await_cancelled") == [("failed", "ERROR", "NodeCancelledError")]


async def test_a_join_waits_from_the_last_of_its_inputs_on_and_a_stream_is_there_once_opened(
    tracing: Tracing, now: list[float]
) -> None:
    @ps.node
    async def slow(x: int) -> int:
        now[0] += 3.0
        return x

    @ps.node
    async def total(values: AsyncIterator[int], y: int) -> int:
        return y + sum([value async for value in values])

    @ps.graph
    async def joined(x: int) -> int:
        return await total(numbers(await add(await slow(x), await paused(x))), x)

    assert await engine.run(joined(1), scheduler="sequential") == 2
    assert attributes_of(tracing.one("add"))[names.QUEUE_WAIT] == 0.0
    assert attributes_of(tracing.one("total"))[names.QUEUE_WAIT] == 0.0


@virtual
async def test_a_node_that_another_one_ends_says_so(tracing: Tracing) -> None:
    hang = Gate().node(name="hang")

    @ps.graph
    async def raced(x: int) -> int:
        return await add(await hang(x), await fail(x))

    hanging = ps.graph(hang)

    with pytest.raises(LookupError):
        await engine.run(raced(1))
    assert ends(tracing, "hang") == [CANCELLED]
    assert ends(tracing, "fail") == [("failed", "ERROR", "LookupError")]
    assert not tracing.one("hang").events
    tracing.exporter.clear()

    with pytest.raises(TimeoutError):
        await engine.run(hanging(1), timeout_seconds=60)
    async with engine.deploy(hanging) as service:
        with pytest.raises(TimeoutError):
            await service.run(hanging(1), timeout_seconds=60)
    assert ends(tracing, "hang") == ends(tracing, "penstock.run hang") == [EXPIRED] * 2
    tracing.exporter.clear()

    [run] = await begun(engine.run(hanging(1)))
    run.cancel()
    await asyncio.wait([run])
    assert ends(tracing, "hang") == ends(tracing, "penstock.run hang") == [CANCELLED]


async def test_a_call_that_gets_no_place_has_a_span_that_says_so(tracing: Tracing) -> None:
    gate = Gate()
    async with engine.deploy(gate.graph(name="wait"), max_in_flight=1, max_queue=1) as service:
        calls = await begun(service(0), service(1))
        with pytest.raises(ps.Overloaded):
            await service(2)
        runs = [span for span in tracing.exporter.get_finished_spans() if span.name == "penstock.run wait"]
        assert outcomes_in(runs) == ["refused"]
        gate.open()
        await asyncio.gather(*calls)
    assert sorted(outcomes_in(tracing.named("penstock.run wait"))) == ["done", "done", "refused"]
    waited = [names.ADMISSION_WAIT in attributes_of(span) for span in tracing.named("penstock.run wait")]
    assert sorted(waited) == [False, False, True]


async def test_a_text_of_a_megabyte_is_cut(tracing: Tracing) -> None:
    @ps.node
    async def raise_page(x: int) -> int:
        raise ValueError("begin" + "x" * 1_000_000 + "end")

    with pytest.raises(ValueError, match="begin"):
        await engine.run(ps.graph(raise_page)(1))
    for span in tracing.spans():
        assert len(span.to_json()) < 50_000
        assert str(span.status.description).startswith("begin")
        assert str(span.status.description).endswith("end")


def waits(tracing: Tracing, run: str, name: str) -> list[bool]:
    """Returns for each span of a run, in the order of their beginnings, whether it says how long the run waited."""
    runs = sorted(tracing.named(run), key=lambda span: span.start_time or 0)
    return [attributes_of(span).get(name, 0) > 0 for span in runs]


@pytest.mark.parametrize("trace_items", [False, True])
async def test_every_call_says_how_long_it_waited_for_its_place(tracing: Tracing, trace_items: bool) -> None:
    gate = Gate()
    wait, run = gate.node(name="wait"), "penstock.run wait"
    waiting = ps.graph(wait)

    @ps.graph
    async def told(x: int) -> AsyncIterator[int]:
        return numbers(await wait(x))

    async with engine.deploy(waiting, told, max_in_flight=1) as service:
        stream = service.stream([waiting(1), waiting(2)], trace_items=trace_items, max_in_flight=8)
        calls = await begun(service.run(waiting(0)), values_of(stream), values_of(service.stream(told(2))))
        leaves = (await begun(service.run(waiting(4))))[0]
        leaves.cancel()
        await asyncio.wait([leaves])
        gate.open()
        assert await asyncio.gather(*calls) == [0, [1, 2], [0, 1]]
    by_item = [attributes_of(span).get(names.ADMISSION_WAIT, 0) > 0 for span in tracing.named(run)]
    assert sorted(by_item) == [False, True, True, True]  # two items and the call that left; the first had its place
    assert waits(tracing, "penstock.run told", names.ADMISSION_WAIT) == [True]


async def test_items_that_wait_when_their_stream_ends_say_so(tracing: Tracing) -> None:
    gate = Gate()
    waiting = gate.graph(name="wait")
    async with engine.deploy(waiting, max_in_flight=1) as service:
        for options, name in ({}, names.ADMISSION_WAIT), ({"order_by": lambda _: 1}, names.KEY_WAIT):
            stream = service.stream([waiting(0), waiting(1)], max_in_flight=8, **options)
            [reader] = await begun(values_of(stream))
            reader.cancel()
            await asyncio.wait([reader])
            assert sorted(waits(tracing, "penstock.run wait", name)) == [False, True]
            tracing.exporter.clear()


async def test_a_call_says_how_long_it_waited_for_resources_and_stateful_nodes(tracing: Tracing) -> None:
    gate = Gate()

    @ps.resource
    async def pool() -> AsyncIterator[int]:
        yield await gate.wait(3)

    @ps.graph
    async def pooled(x: int) -> int:
        return await pool()

    @ps.node
    class Counting:
        async def __aenter__(self) -> "Counting":
            await gate.wait(4)
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def __call__(self, x: int) -> int:
            return x

    @ps.graph
    async def told(x: int) -> AsyncIterator[int]:
        return numbers(await pool())

    counts = Counting()

    @ps.graph
    async def counting(x: int) -> int:
        return await counts(x)

    calls = await begun(
        engine.run(pooled(1)), engine.run(counting(1)), values_of(engine.stream(told(0)))
    )  # fmt: skip
    gate.open()
    assert await asyncio.gather(*calls) == [3, 1, [0, 1, 2]]
    for graph in "pooled", "counting", "told":
        assert waits(tracing, f"penstock.run {graph}", names.OPEN_WAIT) == [True], graph


async def test_a_stream_says_how_it_ended_and_which_items_it_skipped(tracing: Tracing) -> None:
    calls = [line(0), failing(1), line(2)]
    assert await values_of(engine.stream(calls, on_error="skip")) == [1, 3]
    [whole] = tracing.streams()
    said = (names.OUTCOME, names.STREAM_ITEMS, names.STREAM_FAILED, names.STREAM_SKIPPED, names.GRAPH)
    assert [attributes_of(whole)[name] for name in said] == ["done", 3, 1, 1, "paused_to_added"]
    (event,) = whole.events
    assert event.name == names.ITEM_SKIPPED
    assert dict(event.attributes or {}) == {
        names.GRAPH: "fail", names.ITEM: 1, names.ERROR_TYPE: "LookupError", names.ERROR_MESSAGE: "1",
    }  # fmt: skip
    tracing.exporter.clear()

    with pytest.raises(LookupError):
        await values_of(engine.stream(calls))
    assert outcomes_in(tracing.streams()) == ["failed"]
    tracing.exporter.clear()

    async with engine.stream(line(x) for x in range(100)) as stream:
        async for _ in stream:
            break
    assert outcomes_in(tracing.streams()) == ["cancelled"]
    said = (names.STREAM_FAILED, names.STREAM_CANCELLED)
    runs = outcomes_in(tracing.named("penstock.run paused_to_added"))
    assert [attributes_of(tracing.streams()[0])[name] for name in said] == [0, runs.count("cancelled")]
    tracing.exporter.clear()

    with pytest.raises(TimeoutError):
        await values_of(engine.stream([line(1)], timeout_seconds=0))
    assert outcomes_in(tracing.streams()) == ["expired"]


def test_an_item_that_unwinds_after_its_reader_knows_says_how_it_ended(tracing: Tracing) -> None:
    leaving = ps.graph(slow_to_leave)

    @ps.graph
    async def failing_meanwhile(x: int) -> list[int]:
        return [await slow_to_leave(x), await fail(await paused(x))]

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await anext(engine.stream([leaving(1)], timeout_seconds=5))
        with pytest.raises(LookupError):
            await anext(engine.stream([failing_meanwhile(1)]))

    testing.run_virtual(main)
    expired, run = tracing.one("penstock.run slow_to_leave"), tracing.one("penstock.run failing_meanwhile")
    assert outcomes_in([*tracing.named("slow_to_leave"), expired, run]) == ["expired", "cancelled", "expired", "failed"]
    assert expired.status.description == "the stream did not end within 5 s"
    assert run.status.description == "1"


async def test_a_worker_process_has_the_context_of_its_node(tracing: Tracing) -> None:
    remotely = ps.graph(ps.node(runs_on="process", name="remote")(span_targets.ids))
    token = otel_context.attach(baggage.set_baggage("user", "ada"))
    try:
        trace_id, span_id, sampled, user = await engine.run(remotely(1))
    finally:
        otel_context.detach(token)
    node = tracing.one("remote")
    assert node.context is not None
    assert (trace_id, span_id, sampled, user) == (node.context.trace_id, id_of(node), True, "ada")
    tracing.exporter.clear()
    tracing.sampler.is_on = False
    trace_id, span_id, *rest = await engine.run(remotely(1))
    assert 0 not in (trace_id, span_id)
    assert (rest, tracing.spans()) == ([False, None], ())


async def test_without_trace_execution_there_are_no_spans(tracing: Tracing) -> None:
    with tracing.provider.get_tracer("test").start_as_current_span("caller") as caller:

        @ps.node
        async def look(x: int) -> bool:
            return trace.get_current_span() is caller

        looking = ps.graph(look)
        assert await engine.run(looking(1), trace_execution=False)
        assert await values_of(engine.stream([looking(1)], trace_execution=False)) == [True]
        async with engine.deploy(looking, trace_execution=False) as service:
            assert await service(1)
            assert await service.map([looking(1)]) == [True]
            assert not await service.run(looking(1), trace_execution=True)
        async with engine.Engine(trace_execution=False) as own:
            assert await own.run(looking(1))
        with ps.execution_options(trace_execution=False):
            assert await engine.run(looking(1))
        async with engine.deploy(looking) as service:
            assert await service.run(looking(1), trace_execution=False)
    assert len(tracing.spans()) == 3  # of the caller, and of the one call that asked for spans
    with pytest.raises(ps.OptionsError, match="trace_execution"):
        await engine.run(line(1), trace_execution="no")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@ps.node(batch=ps.Batch(4, max_wait_seconds=0))
async def doubled(xs: list[int]) -> list[int]:
    return [2 * x for x in xs]


async def test_spans_of_calls_alone_say_what_happened_to_a_call(tracing: Tracing) -> None:
    @ps.node(runs_on="thread")
    def inside(x: int) -> int:
        return span_targets.ids(x)[1]

    @ps.graph
    async def graph(x: int) -> int:
        return ps.apply(lambda found, _: found, inside(x), await doubled(x))

    gate = Gate()
    held = ps.graph(ps.node(gate.wait))
    async with engine.deploy(graph, held, max_in_flight=1, trace_execution="calls") as service:
        [waits] = await begun(service.run(held(0)))
        [call] = await begun(service.run(graph(1)))
        gate.open()
        await waits
        found = [await call, await engine.run(graph(2), trace_execution="calls")]
    found += await values_of(engine.stream([graph(3)], trace_execution="calls"))
    runs = tracing.named("penstock.run graph")
    assert found == [id_of(run) for run in runs]  # which is current in the handlers
    assert {span.name for span in tracing.spans()} == {
        "penstock.run graph", "penstock.run wait", "penstock.stream graph", "penstock.batch doubled"
    }  # fmt: skip
    assert attributes_of(runs[0])[names.ADMISSION_WAIT] > 0


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


@pytest.mark.parametrize("of", ["engine", "async source", "service", "engine with the option"])
async def test_each_item_begins_a_trace_that_is_linked_to_the_stream(tracing: Tracing, of: str) -> None:
    def calls() -> Iterator[ps.Call[int]]:
        for x in range(3):
            with tracing.provider.get_tracer("test").start_as_current_span("receive"):
                yield line(x)

    async def received() -> AsyncIterator[ps.Call[int]]:
        for call in calls():
            yield call

    if of == "service":
        async with engine.deploy(line) as service:
            values = await service.map(calls(), trace_items=True)
    elif of == "engine with the option":
        async with engine.Engine(trace_items=True) as own, own.deploy(line) as service:
            values = await values_of(service.stream(calls()))
    else:
        values = await values_of(engine.stream(received() if of == "async source" else calls(), trace_items=True))
    assert values == [1, 2, 3]
    [stream], runs = tracing.streams(), tracing.named("penstock.run paused_to_added")
    assert [span.parent for span in (stream, *runs)] == [None] * 4
    assert len({trace_of(span) for span in (stream, *runs)}) == 4
    for run in runs:
        assert [link.context for link in run.links] == [stream.context]
        item = attributes_of(run)[names.ITEM]
        below = [span for span in tracing.spans() if trace_of(span) == trace_of(run) and span is not run]
        told = [(span.name, parent_of(span), attributes_of(span)[names.ITEM]) for span in below]
        assert told == [(name, id_of(run), item) for name in ("paused", "added")]
    # Spans of the source do not gather in the trace of a stream, which may never end.
    assert trace_of(stream) not in {trace_of(span) for span in tracing.named("receive")}


class OddItems(Sampler):
    """Samples only runs whose item is odd."""

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        attributes = kwargs["attributes"] or {}
        return (ALWAYS_ON if attributes.get(names.ITEM, 0) % 2 else ALWAYS_OFF).should_sample(*args, **kwargs)

    def get_description(self) -> str:
        return "OddItems"


async def test_each_item_that_begins_a_trace_is_sampled_by_itself(tracing: Tracing) -> None:
    seen: dict[int, int] = {}

    @ps.node
    async def look(x: int) -> int:
        seen[x] = trace.get_current_span().get_span_context().trace_id
        return x

    looking = ps.graph(look)
    tracing.sampler.root = OddItems()
    assert await values_of(engine.stream((looking(x) for x in range(4)), trace_items=True)) == [0, 1, 2, 3]
    assert sorted(span.name for span in tracing.spans()) == ["look"] * 2 + ["penstock.run look"] * 2
    assert [trace_of(span) for span in tracing.named("look")] == [seen[1], seen[3]]
    assert len({*seen.values()}) == 4  # so the logs of an item that is not sampled are found by an id of its own
    assert 0 not in seen.values()


async def test_only_streams_of_calls_have_items_to_trace(tracing: Tracing) -> None:
    with pytest.raises(ps.OptionsError, match="'trace_items' does not apply to run"):
        await engine.run(line(1), trace_items=True)
    with pytest.raises(ps.OptionsError, match=r"'trace_items' does not apply to stream\(call\)"):
        engine.stream(ps.graph(numbers)(1), trace_items=True)
    with pytest.raises(ps.OptionsError, match="trace_items='yes': True or False"):
        engine.stream([line(1)], trace_items="yes")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


async def test_leaving_a_stream_of_generators_early_detaches_nothing(
    tracing: Tracing, caplog: pytest.LogCaptureFixture
) -> None:
    @ps.node
    async def endless(x: int) -> AsyncIterator[int]:
        try:
            while True:
                with tracing.provider.get_tracer("test").start_as_current_span("inner"):
                    await asyncio.sleep(0)
                yield x
        finally:
            await asyncio.sleep(0)

    @ps.graph
    async def mapped(x: int) -> AsyncIterator[int]:
        return ps.map_each(paused, endless(x))

    async with engine.stream(mapped(1)) as stream:
        await anext(stream)
    (step,) = [span for span in tracing.spans() if span.name.startswith("map_each")]
    assert outcomes_in([tracing.one("endless"), step, tracing.one("penstock.run mapped")]) == ["cancelled"] * 3
    assert {parent_of(span) for span in tracing.named("inner")} == {id_of(tracing.one("endless"))}
    assert tracing.one("endless").status.is_unset
    assert {parent_of(span) for span in tracing.named("paused")} == {id_of(step)}
    assert "detach" not in caplog.text
    assert "ended span" not in caplog.text


@ps.node
class Steps(ps.StreamActor[int, int]):
    """Counts up to each item, in steps of all that are there, each of which waits for something."""

    async def loop(self, inbox: ps.Inbox[ps.StreamWork[int, int]], /) -> None:
        active: dict[ps.StreamWork[int, int], int] = {}
        while True:
            for work in inbox.take_nowait(8) if active else [await inbox.get()]:
                active[work] = 0
            with self.step_span(active, own_span=True):
                await asyncio.sleep(0)
                with trace.get_tracer(names.INSTRUMENTATION).start_as_current_span("inner"):
                    for work, count in active.items():
                        work.put_nowait(count)
                        active[work] = count + 1
            for work in [work for work, count in active.items() if count == work.value]:
                work.finish()
                del active[work]


async def test_steps_of_a_loop_are_in_the_trace_of_an_item_with_links_to_all(tracing: Tracing) -> None:
    steps = ps.graph(Steps())
    async with engine.deploy(steps) as service:
        both = [values_of(service.stream(steps(3))) for _ in range(2)]
        assert await asyncio.gather(*both) == [[0, 1, 2]] * 2
        tracing.sampler.is_on = False
        assert await values_of(service.stream(steps(2))) == [0, 1]
    found = tracing.named("penstock.step Steps")
    items = {id_of(span) for span in tracing.named("Steps")}
    assert len(items) == 2
    assert {parent_of(step) for step in found} <= items
    assert {link.context.span_id for step in found for link in step.links} == items
    assert sum(attributes_of(step)[names.BATCH_ITEMS] for step in found) == 6
    assert {attributes_of(step)[names.NODE] for step in found} == {"Steps"}
    assert {parent_of(inner) for inner in tracing.named("inner")} == set(map(id_of, found))
    for span in tracing.named("Steps"):
        had = sorted(
            (step for step in found if span.context in [link.context for link in step.links]),
            key=lambda one: one.start_time or 0,
        )
        assert len(had) == 3
        assert [link.context for link in span.links] == [had[0].context, had[-1].context]
        assert attributes_of(span)[names.STEPS] == 3
        assert attributes_of(span)[names.STEP_WAIT] > 0
        assert [event.name for event in span.events] == [names.FIRST_VALUE]


class Counted(ps.Actor[int, int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
        while True:
            work = await inbox.get()
            for _ in range(work.value):
                with self.step_span([work]):
                    await asyncio.sleep(0)
            work.finish(work.value)


async def test_steps_are_counted_and_have_no_spans_by_default(tracing: Tracing) -> None:
    counted = ps.graph(ps.node(Counted)())
    assert await engine.run(counted(5)) == 5
    assert {span.name for span in tracing.spans()} == {"penstock.run Counted", "Counted"}
    assert attributes_of(tracing.one("Counted"))[names.STEPS] == 5


class Totals(ps.Actor[int, int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
        while True:
            works = [await inbox.get(), *inbox.take_nowait(7)]
            with self.step_span(works, own_span=True):
                await asyncio.sleep(0)
                for work in works:
                    with work:
                        work.finish(6 // work.value)


async def test_a_step_of_single_results_is_linked_to_their_items(tracing: Tracing) -> None:
    totals = ps.graph(ps.node(Totals)())
    async with engine.deploy(totals) as service:
        assert await asyncio.gather(*(service(n) for n in (1, 2, 3))) == [6, 3, 2]
    [step] = tracing.named("penstock.step Totals")
    assert {link.context.span_id for link in step.links} == {id_of(span) for span in tracing.named("Totals")}
    assert attributes_of(step)[names.BATCH_ITEMS] == len(step.links) == 3
    assert [[link.context for link in span.links] for span in tracing.named("Totals")] == [[step.context]] * 3


async def test_a_step_span_takes_no_work_alone() -> None:
    inbox, _ = testing.inbox([7])
    with pytest.raises(TypeError, match=r"got <Work of 7, open>: write step_span\(\[work\]\)"):
        Totals().step_span(await inbox.get())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
