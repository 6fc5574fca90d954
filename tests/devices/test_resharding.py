"""Arrays with another placement: they are moved, counted with their direction, and not waited for."""

import asyncio
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import devices, engine

from .gates import Gate

P = jax.P
LEFT, RIGHT = devices.DeviceMesh(shape=(2, 4), axis_names=("stage", "data"), device="cpu").split("stage")
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def placed(mesh: devices.DeviceMesh, fn: Callable[[Any], Any]) -> Any:
    """Returns a node whose argument and result are split in the same way."""
    return ps.device_node(device=mesh, in_specs=P("data"), out_specs=P("data"), pure=False)(fn)


async def test_only_a_mismatch_between_nodes_is_a_transfer_and_it_has_a_direction() -> None:
    first, matching = placed(LEFT, lambda x: x + 1), placed(LEFT, lambda x: x * 2)
    second = ps.device_node(device=RIGHT, in_specs=P(None, "data"), out_specs=P("data"), pure=False)(
        lambda x: jnp.cumsum(x, 0)
    )
    third = ps.device_node(device="cpu:3", pure=False)(lambda x: x)
    graph = first >> matching >> second >> third
    for _ in range(3):
        result = await engine.run(graph(X))
    np.testing.assert_allclose(np.asarray(result), np.cumsum(X + 1, 0) * 2)
    assert first.compile_statistics().transfers == matching.compile_statistics().transfers == 0
    (direction,) = second.compile_statistics().directions
    assert str(direction) == (
        "x: mesh(stage=1, data=4) P('data') -> mesh(stage=1, data=4) of cpu:4,5,6,7 P(None, 'data'), 3 times"
    )
    assert second.compile_statistics().transfers == 3
    (direction,) = third.compile_statistics().directions
    assert (direction.argument, direction.destination, direction.count) == ("x", "cpu:3", 3)


async def test_a_result_goes_from_mesh_to_mesh_before_it_is_ready() -> None:
    gate = Gate()

    slow = ps.device_node(device=LEFT, out_specs=P("data"), pure=False)(gate.pass_through)
    after = ps.device_node(device=RIGHT, in_specs=P(None, "data"), pure=False)(lambda x: x.sum(0))
    other = ps.device_node(device=RIGHT, pure=False)(lambda x: x * 2)
    graph, beside = slow >> after, ps.graph(other)
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
        while other.compile_statistics().hits < 1:  # the thread of the second mesh does not wait for the first mesh
            await asyncio.sleep(0)
        assert not first.done()
        gate.open()
    np.testing.assert_allclose(np.asarray(first.result()), X.sum(0))
    np.testing.assert_allclose(np.asarray(second.result()), X * 2)
