"""Log events say which trace, item and node they belong to."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry import trace

import penstock as ps
from penstock import engine, telemetry
from tests.kit import values_of
from tests.telemetry.span_targets import log_in_process
from tests.tracing import Tracing, id_of


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    """The logged events, after the processor of the library."""
    found = structlog.testing.LogCapture()
    structlog.configure(processors=[telemetry.add_trace_context, found])
    yield found.entries  # type: ignore[misc]
    structlog.reset_defaults()


def log(event: str, **fields: object) -> None:
    structlog.get_logger().info(event, **fields)


@ps.node(retry=ps.Retry(attempts=2))
async def fetch(x: int) -> int:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(log, "in a task"))
    log("fetched")
    if ps.current().attempt == 1 and x:
        raise ConnectionError
    return x


@ps.node(runs_on="thread")
def parse(x: int) -> int:
    log("in a thread")
    return x


line = fetch >> parse


async def test_an_event_of_a_handler_names_span_graph_node_item_and_attempt(
    tracing: Tracing, events: list[dict[str, Any]]
) -> None:
    assert await values_of(engine.stream([line(0), line(1)])) == [0, 1]
    spans = {(span.attributes or {})["penstock.item"]: span for span in tracing.named("fetch")}
    found = [event for event in events if event["event"] == "fetched"]
    assert sorted((event["item"], event["attempt"]) for event in found) == [(0, 1), (1, 1), (1, 2)]
    for event in found:
        span = spans[event["item"]]
        assert (event["graph"], event["node"]) == ("fetch_to_parse", "fetch")
        assert event["span_id"] == trace.format_span_id(id_of(span))
        assert event["trace_id"] == trace.format_trace_id(span.context.trace_id)  # type: ignore[union-attr]
    in_threads = [(event["node"], event["item"]) for event in events if event["event"] == "in a thread"]
    assert sorted(in_threads) == [("parse", 0), ("parse", 1)]
    in_tasks = [(event["node"], event["item"], event["attempt"]) for event in events if event["event"] == "in a task"]
    assert sorted(in_tasks) == [("fetch", 0, 1), ("fetch", 1, 1), ("fetch", 1, 2)]


async def test_without_tracing_items_are_named_all_the_same(events: list[dict[str, Any]]) -> None:
    assert await engine.run(line(0)) == 0
    assert {(event["graph"], event["item"]) for event in events} == {("fetch_to_parse", 0)}
    assert not any("trace_id" in event for event in events)


def test_outside_of_calls_nothing_is_added(events: list[dict[str, Any]]) -> None:
    log("outside")
    assert events == [{"event": "outside", "log_level": "info"}]


async def test_what_an_event_says_itself_stays(tracing: Tracing, events: list[dict[str, Any]]) -> None:
    @ps.node
    async def report(x: int) -> int:
        log("about another", item=7, trace_id="given")
        return x

    await engine.run(ps.graph(report)(1))
    (event,) = events
    assert (event["item"], event["trace_id"]) == (7, "given")
    assert "node" not in event
    assert "span_id" in event


async def test_warnings_of_the_library_name_what_they_are_about_and_no_other_item(
    tracing: Tracing, events: list[dict[str, Any]]
) -> None:
    @ps.node
    async def fail(x: int) -> int:
        raise LookupError(x)

    failing = ps.graph(fail)

    @ps.node
    async def read(x: int) -> int:
        return len(await values_of(engine.stream([failing(3)], on_error="skip")))

    assert await engine.run(ps.graph(read)(9)) == 0
    (event,) = [event for event in events if event["event"] == "stream.item_skipped"]
    assert (event["graph"], event["item"]) == ("fail", 0)
    assert "node" not in event
    assert event["span_id"] == trace.format_span_id(id_of(tracing.one("penstock.run fail")))


async def test_an_event_in_a_worker_process_names_graph_node_item_and_attempt_too() -> None:
    events = await values_of(engine.stream(log_in_process(x) for x in range(2)))
    common = {"event": "here", "graph": "logged", "node": "logged"}
    assert events == [{**common, "item": 0, "attempt": 1}, {**common, "item": 1, "attempt": 2}]
