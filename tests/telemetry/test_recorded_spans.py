"""Twelve graphs and the spans that they have: when each begins and ends beside the handlers, its parent, what it says.

`recorded_spans.json` is what they had when it was written. A change of how steps run leaves it as it is; one that is
meant to change spans writes it anew: `python -m tests.telemetry.test_recorded_spans`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

import penstock as ps
from penstock import engine, testing
from tests.kit import values_of
from tests.telemetry import span_targets
from tests.tracing import Tracing, attributes_of, id_of

RECORDED = Path(__file__).parent / "recorded_spans.json"
Log = list[Any]


class Beginnings(SpanProcessor):
    """Writes into a log when spans begin and end. Numbers that differ from run to run are left out."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._names: dict[int, str] = {}

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        count = sum(name.partition("#")[0] == span.name for name in self._names.values())
        name = self._names[id_of(span)] = f"{span.name}#{count + 1}" if count else span.name
        parent = None if span.parent is None else self._names.get(span.parent.span_id, "one that is not here")
        self._log.append(["begins", name, parent])

    def on_end(self, span: ReadableSpan) -> None:
        says = {
            name: "a time" if name.endswith("seconds") else "a process" if name.endswith("pid") else told(value)
            for name, value in sorted(attributes_of(span).items())
        }
        links = [self._names.get(link.context.span_id, "one that is not here") for link in span.links]
        events = [event.name for event in span.events]
        name = self._names[id_of(span)]
        self._log.append(["ends", name, span.kind.name, span.status.status_code.name, says, events, links])


def told(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


log: Log = []


@ps.node
async def fetch(x: int) -> int:
    log.append("fetch runs")
    await asyncio.sleep(0)
    log.append("fetch goes on")
    return x


@ps.node
def double(x: int) -> int:
    log.append("double runs")
    return 2 * x


@ps.node
def is_small(x: int) -> bool:
    return x < 8


@ps.node
async def add(x: int, y: int) -> int:
    log.append("add runs")
    return x + y


def failing_first(times: int) -> Callable[[int], Awaitable[int]]:
    count = 0

    async def fail(x: int) -> int:
        nonlocal count
        count += 1
        log.append(f"attempt {count}")
        await asyncio.sleep(0)
        if count <= times:
            raise ConnectionError(f"attempt {count}")
        return x

    return fail


async def rescue(x: int) -> int:
    log.append("rescue runs")
    return -x


@ps.node(retry=ps.Retry(attempts=2))
async def numbers(x: int) -> AsyncIterator[int]:
    for number in range(x):
        log.append(f"gives {number}")
        yield number


class Total(ps.Actor[int, int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
        while True:
            work = await inbox.get()
            log.append("the loop takes it")
            work.finish(work.value)


@ps.graph
async def joined(x: int) -> int:
    return await add(await fetch(x), double(x))


@ps.graph
async def streamed(x: int) -> AsyncIterator[int]:
    return ps.map_each(fetch, numbers(x))


@ps.graph
async def looped(x: int) -> int:
    return await ps.while_loop(is_small, double, x, max_iterations=9)


@ps.graph
async def chosen(x: int) -> int:
    return await ps.cond(is_small(x), fetch, double, x)


@ps.graph
async def mapped(xs: list[int]) -> list[int]:
    return await ps.map_each(fetch, xs, concurrency=1)


async def run_guarded(function: Callable[[int], Awaitable[int]], **options: Any) -> None:
    node = ps.node(name="guarded", **options)(function)
    with suppress(ConnectionError, ps.NodeTimeoutError):
        await engine.run(ps.graph(node)(3))


async def timeout() -> None:
    async def wait(x: int) -> int:
        log.append("waits")
        await asyncio.Event().wait()
        return x

    await run_guarded(wait, timeout_seconds=0.001, retry=ps.Retry(attempts=2))


async def hedge() -> None:
    second = asyncio.Event()

    async def wait_for_second(x: int) -> int:
        log.append("an attempt")
        if second.is_set():
            return x
        second.set()
        await asyncio.Event().wait()
        return 0

    await run_guarded(wait_for_second, hedge=ps.Hedge(after_seconds=0.001, max_share=1))


async def cache() -> None:
    node = ps.node(name="kept", cache=ps.Cache(max_bytes=10_000))(failing_first(0))
    async with engine.deploy(ps.graph(node)) as service:
        await asyncio.gather(service(1), service(1))  # the second joins the first
        await service(1)


async def control_flow() -> None:
    assert await engine.run(looped(1)) == 8
    assert await engine.run(chosen(9)) == 18
    assert await engine.run(mapped([1, 2])) == [1, 2]


async def elsewhere() -> None:
    for node in (ps.node(runs_on="thread")(span_targets.negate), ps.node(runs_on="process")(span_targets.negate)):
        assert await engine.run(ps.graph(node)(1)) == -1
    assert await engine.run(ps.graph(ps.node(Total)())(1)) == 1


async def device() -> None:
    @ps.device_node(device="cpu", batch=ps.Batch(4))  # a node of its own, which nothing has compiled yet
    def half(x: jax.Array) -> jax.Array:
        return x / 2

    async with engine.deploy(ps.graph(half)) as service:
        assert await service(np.float32(3)) == 1.5


TWICE = ps.Retry(attempts=2, backoff_seconds=0.001)
GRAPHS: dict[str, Callable[[], Awaitable[Any]]] = {
    "join": lambda: engine.run(joined(1)),
    "retry_and_fallback": lambda: run_guarded(failing_first(3), retry=TWICE, fallback=lambda error: 0),
    "failure": lambda: run_guarded(failing_first(3), retry=TWICE),
    "failover": lambda: run_guarded(failing_first(1), failover=ps.node(rescue)),
    "timeout": timeout,
    "hedge": hedge,
    "cache": cache,
    "control_flow": control_flow,
    "stream_of_values": lambda: values_of(engine.stream(streamed(2))),
    "stream_of_calls": lambda: values_of(engine.stream((joined(x) for x in range(2)), max_in_flight=1)),
    "elsewhere": elsewhere,
    "device": device,
}


async def spans_of(graph: str, tracing: Tracing) -> Log:
    log.clear()
    tracing.provider.add_span_processor(Beginnings(log))
    await GRAPHS[graph]()
    await testing.wait_quiescent()
    return [*log]


@pytest.mark.parametrize("graph", GRAPHS)
async def test_spans_are_those_that_were_recorded(graph: str, tracing: Tracing) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert json.loads(json.dumps(await spans_of(graph, tracing))) == recorded[graph]


def record() -> None:
    """Write the file anew."""
    recorded: dict[str, Log] = {}
    for graph in GRAPHS:
        with Tracing.set_up() as tracing:
            recorded[graph] = asyncio.run(spans_of(graph, tracing))
    lines = (
        f"{json.dumps(graph)}: [\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"
        for graph, entries in recorded.items()
    )
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    from tests.telemetry import test_recorded_spans  # under its own name, which spans say

    test_recorded_spans.record()
