"""Arrays that lie elsewhere: moved, counted with their direction, and not waited for."""

import asyncio
import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine
from penstock.devices.enqueue_order import reshard

from .gates import Gate

P = jax.P
LEFT, RIGHT = devices.DeviceMesh(shape=(2, 4), axis_names=("stage", "data"), device="cpu").split("stage")
SQUARE = devices.DeviceMesh(shape=(2, 2), axis_names=("data", "model"), device="cpu")
X = np.arange(64, dtype=np.float32).reshape(8, 8)
PLACES = (
    "one device", "another", "left rows", "left columns", "left whole", "right rows", "right columns", "right whole",
    "square", "square columns", "explicit",
)  # fmt: skip


def shardings() -> dict[str, Any]:
    cpu = jax.devices("cpu")

    def on(mesh: devices.DeviceMesh, *entries: Any) -> Any:
        return jax.sharding.NamedSharding(devices.select(mesh), P(*entries))

    explicit = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=cpu[2:6])
    return {
        "one device": jax.sharding.SingleDeviceSharding(cpu[0]),
        "another": jax.sharding.SingleDeviceSharding(cpu[5]),
        "left rows": on(LEFT, "data"),
        "left columns": on(LEFT, None, "data"),
        "left whole": on(LEFT),
        "right rows": on(RIGHT, "data"),
        "right columns": on(RIGHT, None, "data"),
        "right whole": on(RIGHT),
        "square": on(SQUARE, "data", "model"),
        "square columns": on(SQUARE, None, ("model", "data")),
        "explicit": jax.sharding.NamedSharding(explicit, P("data")),
    }


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(PLACES, 2)))
def test_an_array_is_the_same_wherever_it_goes(source: str, target: str) -> None:
    there = shardings()
    moved = reshard(jax.device_put(X, there[source]), there[target])
    assert moved.sharding.is_equivalent_to(there[target], 2)
    np.testing.assert_array_equal(np.asarray(moved), X)


@pytest.mark.parametrize("target", ["one device", "another", "right rows", "right columns", "square", "left columns"])
def test_nobody_waits_for_an_array_that_is_moved(target: str) -> None:
    there = shardings()
    opened = threading.Event()

    def wait(x: Any) -> Any:
        assert opened.wait(30)
        return np.asarray(x)

    def held(x: jax.Array) -> jax.Array:
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    mesh = devices.select(LEFT)
    slow = jax.jit(jax.shard_map(held, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    given = jax.device_put(X, there["left rows"])
    reshard(given, there[target]).block_until_ready()  # compiled
    result = slow(given)
    moved = reshard(result, there[target])
    assert not result.is_ready()  # and here we are
    opened.set()
    np.testing.assert_array_equal(np.asarray(moved), X)


async def test_a_mismatch_between_nodes_is_a_transfer_with_a_direction() -> None:
    @ps.device_node(device=LEFT, in_specs=P("data"), out_specs=P("data"), pure=False)
    def first(x: jax.Array) -> jax.Array:
        return x + 1

    @ps.device_node(device=RIGHT, in_specs=P(None, "data"), out_specs=P("data"), pure=False)
    def second(x: jax.Array) -> jax.Array:
        return jnp.cumsum(x, 0)

    @ps.device_node(device="cpu:3", pure=False)
    def third(x: jax.Array) -> jax.Array:
        return x * 2

    @ps.graph
    async def graph(x: jax.Array) -> jax.Array:
        return third(second(first(x)))

    for _ in range(3):
        result = await engine.run(graph(X))
    np.testing.assert_allclose(np.asarray(result), np.cumsum(X + 1, 0) * 2)
    assert first.compile_statistics().transfers == 0
    (direction,) = second.compile_statistics().directions
    assert str(direction) == (
        "x: mesh(stage=1, data=4) P('data') -> mesh(stage=1, data=4) of cpu:4,5,6,7 P(None, 'data'), 3 times"
    )
    assert second.compile_statistics().transfers == 3
    (direction,) = third.compile_statistics().directions
    assert (direction.argument, direction.destination, direction.count) == ("x", "cpu:3", 3)


async def test_nodes_that_match_transfer_nothing() -> None:
    @ps.device_node(device=LEFT, in_specs=P("data"), out_specs=P("data"), pure=False)
    def first(x: jax.Array) -> jax.Array:
        return x + 1

    @ps.device_node(device=LEFT, in_specs=P("data"), pure=False)
    def second(x: jax.Array) -> jax.Array:
        return x * 2

    @ps.graph
    async def graph(x: jax.Array) -> jax.Array:
        return second(first(x))

    np.testing.assert_allclose(np.asarray(await engine.run(graph(X))), (X + 1) * 2)
    assert second.compile_statistics().transfers == 0


async def test_a_result_goes_from_mesh_to_mesh_before_it_is_ready() -> None:
    gate = Gate()

    @ps.device_node(device=LEFT, out_specs=P("data"), pure=False)
    def slow(x: jax.Array) -> jax.Array:
        return gate.pass_through(x)

    @ps.device_node(device=RIGHT, in_specs=P(None, "data"), pure=False)
    def after(x: jax.Array) -> jax.Array:
        return x.sum(0)

    @ps.device_node(device=RIGHT, pure=False)
    def other(x: jax.Array) -> jax.Array:
        return x * 2

    @ps.graph
    async def graph(x: jax.Array) -> jax.Array:
        return after(slow(x))

    beside = ps.graph(other)

    gate.open()
    await engine.run(graph(X))
    await engine.run(beside(X))
    await gate.entered()
    gate.close()
    async with engine.deploy(graph, beside) as service, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(service.run(graph(X)))
        await gate.entered()
        while after.compile_statistics().transfers < 2:
            await asyncio.sleep(0)
        second = tasks.create_task(service.run(beside(X)))
        while other.compile_statistics().hits < 1:  # the thread of the second mesh waits for nothing, and goes on
            await asyncio.sleep(0)
        assert not first.done()
        gate.open()
    np.testing.assert_allclose(np.asarray(first.result()), X.sum(0))
    np.testing.assert_allclose(np.asarray(second.result()), X * 2)
