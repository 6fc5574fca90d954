"""Functions that worker processes import."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import baggage, trace

import penstock as ps
from penstock import engine, telemetry


def ids(x: int) -> tuple[int, int, bool, object]:
    """Returns the ids of the span that is current, whether it is sampled, and what baggage it has."""
    context = trace.get_current_span().get_span_context()
    return context.trace_id, context.span_id, context.trace_flags.sampled, baggage.get_baggage("user")


def negate(x: int) -> int:
    return -x


def negate_all(xs: list[int]) -> list[int | Exception]:
    return [ConnectionError(x) if x < 0 else -x for x in xs]


@ps.node(runs_on="process")
def traced(x: int) -> tuple[int, bool]:
    """Make a span; return the id of this process, and whether the process has set up an SDK."""
    with trace.get_tracer("targets").start_as_current_span(f"inner {x}"):
        return os.getpid(), "opentelemetry.sdk.trace" in sys.modules


@ps.node(runs_on="process", retry=ps.Retry(attempts=2))
def logged(x: int) -> Mapping[str, Any]:
    """Return the fields of a log event in a worker process."""
    event = telemetry.add_trace_context(None, "info", {"event": "here"})
    if event["attempt"] == 1 and x:
        raise ConnectionError
    return event


@ps.node(runs_on="process")
def busy(spans: int) -> int:
    """Make so many spans, and fail; without a number, the process is killed."""
    for number in range(spans):
        with trace.get_tracer("targets").start_as_current_span(f"inner {number}"):
            pass
    if not spans:
        os.kill(os.getpid(), signal.SIGKILL)
    raise LookupError(spans)


in_process, log_in_process, in_busy_process = ps.graph(traced), ps.graph(logged), ps.graph(busy)


async def _fail_in_processes(numbers: Sequence[int]) -> None:
    async with engine.Engine(max_processes=1) as own:
        for number in numbers:
            with contextlib.suppress(LookupError, ps.WorkerDied):
                await own.run(in_busy_process(number))


def fail_in_processes(*numbers: int) -> None:
    """Run items in one worker process, one after the other; each makes so many spans, and fails."""
    asyncio.run(_fail_in_processes(numbers))


async def _trace_in_processes(number: int) -> list[tuple[int, bool]]:
    async with engine.Engine() as own, own.stream(in_process(x) for x in range(number)) as results:
        return [result async for result in results]


def trace_in_processes(number: int = 4) -> list[tuple[int, bool]]:
    """Run items in worker processes, and end the processes."""
    return asyncio.run(_trace_in_processes(number))
