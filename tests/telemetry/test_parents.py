"""Whatever the order of steps, every span is in the trace of its own caller, below the right parent."""

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace

import penstock as ps
from penstock import engine, testing
from penstock.telemetry import names
from tests.kit import values_of
from tests.tracing import Tracing, attributes_of, id_of, parent_of

SEEN = "test.seen"
Service = engine.Service[[int], tuple[int, int]]


@ps.node
async def fetch(x: int) -> int:
    trace.get_current_span().set_attribute(SEEN, x)
    for _ in range(x % 3):
        await asyncio.sleep(0)
    trace.get_current_span().set_attribute(SEEN, x)
    return x


@ps.node(concurrency=2)
async def parse(x: int) -> int:
    await asyncio.sleep(0)
    trace.get_current_span().set_attribute(SEEN, x)
    return x


@ps.node
def plain(x: int) -> int:
    trace.get_current_span().set_attribute(SEEN, x)
    return x


@ps.node(batch=ps.Batch(3))
async def batched(xs: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return xs


@ps.node
async def repeat(x: int) -> AsyncIterator[int]:
    for _ in range(2):
        await asyncio.sleep(0)
        trace.get_current_span().set_attribute(SEEN, x)
        yield x


@ps.node
async def nested(x: int) -> int:
    return await engine.run(inner(x))


inner = fetch >> plain


@ps.graph
async def both(x: int) -> tuple[int, int]:
    a = await parse(await fetch(x))
    b = await batched(await nested(x))
    return a, b


@ps.graph
async def streamed(x: int) -> AsyncIterator[int]:
    return ps.map_each(parse, repeat(x))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["run", "service", "stream", "values", "leave"]), st.integers(0, 5)),
    min_size=2,
    max_size=6,
)


async def perform(action: str, x: int, service: Service) -> None:
    match action:
        case "run":
            await engine.run(both(x))
        case "service":
            await service(x)
        case "stream":
            await values_of(engine.stream([both(x), both(x)]))
        case "values":
            await values_of(engine.stream(streamed(x)))
        case _:
            async with service.stream(both(x) for _ in range(5)) as stream:
                await anext(stream)


@settings(max_examples=25)
@given(actions=ACTIONS, seed=st.integers(0, 2**20))
def test_concurrent_calls_never_mix_their_parents(actions: list[tuple[str, int]], seed: int) -> None:
    with Tracing.set_up() as tracing:
        tracer = tracing.provider.get_tracer("test")

        async def caller(service: Service, number: int, action: str, x: int) -> None:
            with tracer.start_as_current_span(f"caller {number}", attributes={"test.x": x}) as span:
                await perform(action, x, service)
                assert trace.get_current_span() is span

        async def main() -> None:
            async with engine.deploy(both) as service:
                await asyncio.gather(*(caller(service, number, *action) for number, action in enumerate(actions)))

        testing.run_seeded(main, seed=seed, timeout_seconds=3600.0)
        spans = {id_of(span): span for span in tracing.spans()}

    roots = [span for span in spans.values() if span.name.startswith("caller")]
    assert len({span.context.trace_id for span in roots}) == len(actions)  # type: ignore[union-attr]
    x_of = {span.context.trace_id: attributes_of(span)["test.x"] for span in roots}  # type: ignore[union-attr]
    for span in spans.values():
        trace_id = span.context.trace_id  # type: ignore[union-attr]
        parent = spans.get(parent_of(span) or 0)
        if parent is None:
            assert span in roots
            continue
        assert parent.context.trace_id == trace_id  # type: ignore[union-attr]
        assert attributes_of(span).get(SEEN, x_of[trace_id]) == x_of[trace_id]
        if span.name == "penstock.batch batched":
            assert parent.name == "batched"
        elif names.NODE in attributes_of(span):
            assert parent.name.startswith(("penstock.run", "map_each"))
        elif span.name == "penstock.run inner":
            assert parent.name == "nested"
