"""Runs graphs, or the demo, with tracing set up as an application does, and writes the recorded spans to a file.

    python -m tests.telemetry.sending RECORDS.json graphs
    python -m tests.telemetry.sending RECORDS.json demo ARGUMENTS...

The standard `OTEL_*` variables say where the spans go.
"""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry import metrics, trace

import penstock as ps
from penstock import engine, telemetry

SERVICE = "sender"


@ps.node(retry=ps.Retry(attempts=2))
async def fetch(url: str) -> str:
    if url == "a.org" and ps.current().attempt == 1:
        raise ConnectionError("not yet")
    return f"the text of {url}"


@ps.node
async def outline(text: str) -> int:
    await asyncio.sleep(0)
    return len(text)


@ps.node(runs_on="thread")
def count(text: str) -> int:
    caller = trace.Link(callers[-1])
    with trace.get_tracer("sender").start_as_current_span("split", links=[caller]):
        return len(text.split())


@ps.node
def join(left: int, right: int) -> int:
    metrics.get_meter("sender").create_counter("joined").add(1)
    return left + right


@ps.node
async def fail(number: int) -> int:
    raise LookupError(f"no {number}")


@ps.graph
async def measure(url: str) -> int:
    text = await fetch(url)
    return join(await outline(text), count(text))


@ps.graph
async def failing(number: int) -> int:
    return await fail(number)


callers: list[trace.SpanContext] = []


async def run_graphs() -> None:
    with trace.get_tracer("sender").start_as_current_span("caller") as caller:
        callers.append(caller.get_span_context())
        await engine.run(measure("a.org"))
    try:
        await engine.run(failing(7))
    except LookupError:
        pass
    async with engine.stream(measure(f"{number}.org") for number in range(3)) as results:
        async for _ in results:
            pass


def main(arguments: Sequence[str]) -> int:
    target, what, *rest = arguments
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.telemetry.records import from_sdk

    recorded = InMemorySpanExporter()
    set_up = telemetry.setup

    def set_up_and_record(**settings: Any) -> None:
        set_up(**settings)
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider)
        provider.add_span_processor(SimpleSpanProcessor(recorded))

    telemetry.setup = set_up_and_record
    if what == "graphs":
        telemetry.setup(service_name=SERVICE)
        asyncio.run(run_graphs())
        code = 0
    else:
        from examples import semantic_search

        code = semantic_search.main(["--trace", *rest])
    records = [dataclasses.asdict(from_sdk(span)) for span in recorded.get_finished_spans()]
    Path(target).write_text(json.dumps(records))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
