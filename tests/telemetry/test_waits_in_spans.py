"""The span of a step says whether it waited or worked, for what it waited, where it ran, and which attempts failed."""

import asyncio
import os
import threading
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

import penstock as ps
from penstock import engine, telemetry
from penstock.telemetry import names
from tests.kit import Gate, begun, outcomes
from tests.tracing import Tracing, attributes_of, id_of, parent_of


def number_of_process(x: int) -> int:
    return os.getpid()


def numbers_of_process(xs: list[int]) -> list[int]:
    return [os.getpid()] * len(xs)


def name_of_thread(x: int) -> str:
    return threading.current_thread().name


@ps.node
async def fail(x: int) -> int:
    raise LookupError(x)


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


async def test_a_step_in_a_thread_names_the_thread_and_the_wait_for_it(tracing: Tracing) -> None:
    gate = Gate()
    held = ps.node(runs_on="thread", concurrency=4, name="held")(gate.block)
    named = ps.node(runs_on="thread", concurrency=4)(name_of_thread)

    @ps.graph
    async def both(x: int) -> str:
        return named(held(x))

    async with engine.Engine(max_workers=1) as own:
        calls = await begun(own.run(both(0)), own.run(both(1)))
        gate.open()
        names_of_threads = await asyncio.gather(*calls)
    spans = tracing.named("name_of_thread")
    assert sorted(attributes_of(span)[names.THREAD_NAME] for span in spans) == sorted(names_of_threads)
    waits = [attributes_of(span)[names.THREAD_WAIT] for span in tracing.named("held")]
    assert len(waits) == 2
    assert max(waits) > 0


async def test_a_step_in_a_process_names_the_process_and_the_waits_for_it_and_for_its_start(tracing: Tracing) -> None:
    graph = ps.graph(ps.node(runs_on="process")(number_of_process))
    async with engine.Engine(max_processes=1) as own, own.deploy(graph) as service:
        ids = [await service(0), await service(1)]
    first, second = map(attributes_of, tracing.named("number_of_process"))
    assert [first[names.PROCESS_PID], second[names.PROCESS_PID]] == ids
    assert os.getpid() not in ids
    assert first[names.WORKER_WAIT] >= first[names.WORKER_START] > 0
    assert names.WORKER_START not in second


@pytest.mark.parametrize("runs_on", ["loop", "thread", "process"])
async def test_a_batch_on_the_host_is_a_span_with_links_to_its_items_and_back(tracing: Tracing, runs_on: Any) -> None:
    batched = ps.node(batch=ps.Batch(2, max_wait_seconds=60), runs_on=runs_on)(numbers_of_process)
    async with engine.Engine(max_processes=1) as own, own.deploy(ps.graph(batched)) as service:
        results = await asyncio.gather(service(0), service(1))
    items, batch = tracing.named("numbers_of_process"), tracing.one("penstock.batch numbers_of_process")
    assert linked(batch) == {id_of(span) for span in items}
    assert [linked(span) for span in items] == [{id_of(batch)}] * 2
    assert parent_of(batch) in linked(batch)
    assert attributes_of(batch)[names.BATCH_ITEMS] == 2
    assert all(attributes_of(span)[names.BATCH_WAIT] > 0 for span in items)
    assert (names.THREAD_NAME in attributes_of(batch)) == (runs_on == "thread")
    assert attributes_of(batch).get(names.PROCESS_PID) == (results[0] if runs_on == "process" else None)


async def test_a_batch_that_fails_is_a_failed_span(tracing: Tracing) -> None:
    @ps.node(batch=ps.Batch(2, max_wait_seconds=60))
    async def refuse(xs: list[int]) -> list[int]:
        raise LookupError("no batch")

    async with engine.deploy(ps.graph(refuse)) as service:
        assert await outcomes(service(0), service(1)) == [LookupError, LookupError]
    assert {span.status.status_code for span in tracing.named("penstock.batch refuse")} == {StatusCode.ERROR}


async def test_a_failed_attempt_is_a_red_span_and_the_next_one_an_event(tracing: Tracing) -> None:
    attempts = 0

    @ps.node(retry=ps.Retry(3, backoff_seconds=0))
    async def fetch(x: int) -> int:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise ConnectionError(f"attempt {attempts}")
        return x

    assert await engine.run(ps.graph(fetch)(7)) == 7
    node = tracing.one("fetch")
    assert node.status.status_code is StatusCode.UNSET
    said = [(event.name, (event.attributes or {})[names.ATTEMPT]) for event in node.events]
    assert said == [(names.RETRY, 1), (names.ATTEMPT, 2), (names.RETRY, 2), (names.ATTEMPT, 3)]
    failed = tracing.named("penstock.attempt fetch")
    assert [(span.status.description, attributes_of(span)[names.ATTEMPT]) for span in failed] == [
        ("attempt 1", 1), ("attempt 2", 2),
    ]  # fmt: skip
    for span, event in zip(failed, node.events[1::2], strict=True):
        assert parent_of(span) == id_of(node)
        assert attributes_of(span)[names.PAUSE] >= 0
        assert node.start_time <= span.start_time <= span.end_time <= event.timestamp  # type: ignore[operator]


BODY_SECONDS = 0.05


async def rest(x: int) -> int:
    await asyncio.sleep(BODY_SECONDS)
    return x


def work(x: int) -> int:
    time.sleep(BODY_SECONDS)
    return x


ONCE: dict[str, int] = {}


async def fail_once(x: int) -> int:
    await asyncio.sleep(BODY_SECONDS)
    if ONCE.setdefault(str(x), 0) == 0:
        ONCE[str(x)] = 1
        raise ConnectionError
    return x


@pytest.mark.timed  # two clocks are compared, each of which another program may hold up
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (rest, {}),
        (work, {}),
        (fail_once, {"retry": ps.Retry(2)}),
        (rest, {"timeout_seconds": 60}),
        (work, {"runs_on": "thread", "concurrency": 6}),
        (work, {"runs_on": "thread", "timeout_seconds": 60}),
        (work, {"runs_on": "process"}),
        (work, {"runs_on": "process", "timeout_seconds": 60}),
    ],
)
async def test_the_own_time_of_a_step_is_the_time_in_a_profile(
    tracing: Tracing, function: Any, options: dict[str, Any]
) -> None:
    ONCE.clear()
    node = ps.node(**options)(function)
    async with engine.Engine(max_workers=2, max_processes=2) as own, own.deploy(ps.graph(node)) as service:
        with telemetry.profile() as profile:
            await asyncio.gather(*(service(x) for x in range(6)))
    seconds = 0.0
    for span in tracing.named(function.__name__):
        waits = (attributes_of(span).get(name, 0.0) for name in (names.THREAD_WAIT, names.WORKER_WAIT))
        seconds += ((span.end_time or 0) - (span.start_time or 0)) / 1e9 - sum(waits)
    [measured] = [found.busy_seconds for found in profile.nodes if found.node == function.__name__]
    assert seconds == pytest.approx(measured, rel=0.05)
