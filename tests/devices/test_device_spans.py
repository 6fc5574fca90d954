"""Spans of work on devices: batches linked to their items, compilations, transfers, regions."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

import penstock as ps
from penstock import devices, engine
from penstock.telemetry import names
from tests.tracing import Tracing, attributes_of, id_of, parent_of

from .kit import doubling, graph_of, resource_of, usual_device


def links_of(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def inside(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    times = [outer.start_time or 0, inner.start_time or 0, inner.end_time or 0, outer.end_time or 0]
    return times[0] > 0 and times == sorted(times)


async def test_a_call_has_a_span_on_its_device_with_its_compilation_and_its_transfer(tracing: Tracing) -> None:
    seen: list[int] = []

    @ps.device_node
    def double(x: np.ndarray) -> jnp.ndarray:
        seen.append(trace.get_current_span().get_span_context().span_id)
        return x * 2

    doubled = ps.graph(double)

    assert np.all(await engine.run(doubled(np.ones(4, np.float32))) == 2)
    node = tracing.one("double")
    call = tracing.one("penstock.device_call double")
    compilation = tracing.one("penstock.compile double")
    transfer = tracing.one("penstock.transfer double")
    assert parent_of(call) == id_of(node)
    assert parent_of(compilation) == parent_of(transfer) == id_of(call)
    assert all(inside(*pair) for pair in ((call, node), (compilation, call), (transfer, call)))
    assert seen == [id_of(compilation)]  # the span that is current while the function is traced
    assert attributes_of(compilation)[names.ARGUMENTS] == "x: float32[4]"
    assert attributes_of(transfer)[names.TRANSFER_BYTES] == 16
    assert attributes_of(node)[names.DEVICE_WAIT] >= 0
    found = attributes_of(call)
    assert (found[names.DEVICE], found[names.OUTCOME]) == (usual_device(), "done")
    assert min(found[names.DISPATCH_SECONDS], found[names.DEVICE_SECONDS]) >= 0
    await engine.run(doubled(np.ones(4, np.float32)))
    assert len(tracing.named("penstock.compile double")) == 1


async def test_a_batch_is_linked_to_the_first_128_of_its_items_and_says_how_many_they_are(tracing: Tracing) -> None:
    async with engine.deploy(doubling(batch=ps.Batch(200, max_wait_seconds=60.0)), max_in_flight=200) as service:
        results = await asyncio.gather(*(service(float(x)) for x in range(200)))
    assert [float(x) for x in results] == [2.0 * x for x in range(200)]
    batch = tracing.one("penstock.batch doubled")
    nodes = {id_of(span): span for span in tracing.named("doubled")}
    assert len(batch.links) == 128
    assert batch.dropped_links == 0
    assert links_of(batch) <= set(nodes)
    assert parent_of(batch) in nodes
    assert attributes_of(batch)[names.BATCH_ITEMS] == attributes_of(batch)[names.BATCH_ROWS] == len(nodes) == 200
    assert {frozenset(links_of(span)) for span in nodes.values()} == {frozenset({id_of(batch)})}
    assert all(attributes_of(span)[names.DEVICE_WAIT] >= 0 for span in nodes.values())


async def test_an_unsampled_item_opens_no_span_for_its_batch_and_one_for_itself_in_a_mixed_one(
    tracing: Tracing,
) -> None:
    async with engine.deploy(doubling(batch=ps.Batch(2, max_wait_seconds=60.0))) as service:
        tracing.sampler.is_on = False
        await asyncio.gather(service(1.0), service(2.0))
        assert tracing.spans() == ()
        unsampled = asyncio.create_task(service(1.0))
        await asyncio.sleep(0)
        tracing.sampler.is_on = True
        await asyncio.gather(unsampled, service(2.0))
    batch = tracing.one("penstock.batch doubled")
    assert links_of(batch) == {id_of(tracing.one("doubled"))}
    assert attributes_of(batch)[names.BATCH_ITEMS] == 2


async def test_a_batch_that_is_searched_for_the_failing_item_has_a_span_for_each_try(tracing: Tracing) -> None:
    @ps.device_node(batch=ps.Batch(2, max_wait_seconds=60.0))
    def double(x: float) -> jnp.ndarray:
        raise ValueError("never")

    async with engine.deploy(ps.graph(double)) as service:
        results = await asyncio.gather(service(1.0), service(2.0), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, ValueError]
    for name in ("penstock.batch double", "penstock.compile double"):
        assert {attributes_of(span)[names.ERROR_TYPE] for span in tracing.named(name)} == {"ValueError"}
    assert {attributes_of(span)[names.OUTCOME] for span in tracing.named("double")} == {"failed"}


async def test_a_region_names_all_of_its_nodes(tracing: Tracing) -> None:
    scale, shift = (ps.device_node(name=name)(lambda x: x + 1) for name in ("scale", "shift"))
    both = scale >> scale >> shift
    assert np.all(await engine.run(both(np.ones(2, np.float32))) == 4)
    node = tracing.one("scale ×2 → shift")
    assert attributes_of(node)[names.NODES] == ("scale", "scale", "shift")
    assert parent_of(tracing.one("penstock.device_call scale ×2 → shift")) == id_of(node)


def add(x: np.ndarray, y: float) -> jnp.ndarray:
    return x + y


async def test_functions_of_a_device_actor_belong_to_the_span_around_them(tracing: Tracing) -> None:
    device = devices.actor("cpu:0")
    x = np.ones(2, np.float32)
    with tracing.provider.get_tracer("test").start_as_current_span("step") as step:
        assert np.all(await device.run(add, x, 1.0) == 2)
    await device.run(add, x, 1.0)
    (call,) = tracing.named("penstock.device_call add")
    assert parent_of(call) == step.get_span_context().span_id
    assert np.all(x == 1)


async def test_parameters_are_transferred_once(tracing: Tracing) -> None:
    scale = ps.device_node(name="scale")(lambda w, x: x * w)
    scaled, x = graph_of(scale, resource_of(lambda: np.full((64,), 3.0, np.float32))), np.ones(64, np.float32)
    async with engine.deploy(scaled) as service:
        for _ in range(3):
            assert np.all(await service(x) == 3)
    sizes = [attributes_of(span)[names.TRANSFER_BYTES] for span in tracing.named("penstock.transfer scale")]
    assert sizes == [256] * 4


async def test_leaving_a_stream_of_device_nodes_early_detaches_nothing(
    tracing: Tracing, caplog: pytest.LogCaptureFixture
) -> None:
    doubled = doubling(batch=ps.Batch(4, max_wait_seconds=0.001))
    async with engine.stream(doubled(float(x)) for x in range(1000)) as stream:
        async for result in stream:
            assert result == 0
            break
    assert tracing.spans()
    assert attributes_of(tracing.streams()[0])[names.OUTCOME] == "cancelled"
    assert "detach" not in caplog.text
    assert "ended span" not in caplog.text
