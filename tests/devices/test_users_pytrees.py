"""Classes of the user that check the arrays they hold: no value that is unlike an array reaches the constructor."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine

P = jax.P
MESH = devices.DeviceMesh(shape=(4, 2), axis_names=("data", "model"), device="cpu")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Interval:
    low: Any
    high: Any

    def __post_init__(self) -> None:
        if (self.low.shape, self.low.dtype) != (self.high.shape, self.high.dtype):
            raise ValueError("the two ends differ")


def widen(interval: Interval) -> Interval:
    return Interval(interval.low - 1, interval.high + 1)


def interval(shape: tuple[int, ...] = (8,)) -> Interval:
    return Interval(jnp.zeros(shape), jnp.ones(shape))


def check(found: Any) -> None:
    assert type(found) is Interval
    assert np.asarray(found.low).tolist() == [-1.0] * 8
    assert np.asarray(found.high).tolist() == [2.0] * 8


@pytest.mark.parametrize(
    "of",
    [
        ps.device_node(device="cpu")(widen),
        ps.device_node(device="cpu")(widen).vmap(),
        ps.device_node(device="cpu")(widen).vmap(batch_size=3),
        ps.device_node(device="cpu", batch=ps.Batch(4))(widen),
    ],
)
async def test_a_node_takes_and_gives_a_class_that_checks_its_arrays(of: Any) -> None:
    check(await engine.run(ps.graph(of)(interval())))


async def test_a_batch_of_keys_in_a_class_that_checks_its_arrays() -> None:
    node = ps.device_node(device="cpu", batch=ps.Batch(4))(lambda ends: jax.random.uniform(ends.low))
    low, high = jax.random.split(jax.random.key(0))
    assert float(await engine.run(ps.graph(node)(Interval(low, high)))) == float(jax.random.uniform(low))


async def test_a_recompilation_tells_which_array_of_a_class_has_changed() -> None:
    node = ps.device_node(device="cpu", name="widen")(widen)
    of = ps.graph(node)
    await engine.run(of(interval()))
    await engine.run(of(interval((4,))))
    told = [(each.argument, each.cause, each.before, each.after) for each in node.compile_statistics().recompilations]
    assert told == [
        ("interval.low", "shape", "float32[8]", "float32[4]"),
        ("interval.high", "shape", "float32[8]", "float32[4]"),
    ]


async def test_an_error_while_compiling_names_the_arrays_of_a_class() -> None:
    node = ps.device_node(device="cpu")(lambda ends: jnp.dot(ends[0].low, jnp.ones(3)))
    with pytest.raises(TypeError) as caught:
        await engine.run(ps.graph(node)([interval(), {"a": (jnp.ones(2), None)}]))
    text = "ends: [Interval(float32[8], float32[8]), {'a': (float32[2], None)}]"
    assert text in "\n".join(caught.value.__notes__)


@pytest.mark.several_devices
async def test_a_mesh_splits_the_arrays_of_a_class() -> None:
    node = ps.device_node(device=MESH, in_specs=P("data"), out_specs=P("data"))(widen)
    check(await engine.run(ps.graph(node)(interval())))
    actor = devices.actor(MESH)
    split = await actor.put(interval(), P("data"))
    assert split.low.sharding.spec == P("data")
    check(await actor.run(widen, split))
