"""Nodes of JAX's own transformations: `node.vmap(...)`, at once, in chunks and over a mesh; and `devices.einsum`."""

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import devices, engine
from tests.conftest import EFFORT

from .kit import graph_of

MESH = devices.DeviceMesh(shape=(4, 2), axis_names=("data", "model"), device="cpu")
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(13, 5)).astype(np.float32)
W = RANDOM.normal(size=(5, 3)).astype(np.float32)


def score(x: Any, w: Any, scale: Any = 2.0) -> Any:
    return {"norm": jnp.sqrt((x * x).sum()), "out": jnp.tanh(x @ w) * scale}


def scores_of(x: Any) -> Any:
    """Returns the scores of some rows, as NumPy computes them."""
    return {"norm": np.sqrt((x * x).sum(1)), "out": np.tanh(x @ W) * 2}


doubled = ps.device_node(lambda x: x * 2)
squared = ps.device_node(lambda x: x @ x)


async def run(node: Any, *args: Any) -> Any:
    graph = graph_of(lambda *, given: node(*[given[index] for index in range(len(args))]))
    return await engine.run(graph(given=args))


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)


@pytest.mark.several_devices
@pytest.mark.parametrize("device", ["cpu", MESH], ids=["one", "mesh"])
@given(
    rows=st.sampled_from([0, 1, 13, 20]),
    batch_size=st.sampled_from([None, 1, 4, 24]),
    axes=st.sampled_from([(0, 0), (1, 0), (0, {"norm": 0, "out": 1}), (-1, {"norm": 0, "out": -1})]),
    on_device=st.booleans(),
)
@settings(max_examples=5 * EFFORT, deadline=None)
def test_it_is_equal_to_vmap(
    device: Any, rows: int, batch_size: int | None, axes: tuple[int, Any], on_device: bool
) -> None:
    in_axis, out_axes = axes
    node = ps.device_node(device=device)(score).vmap((in_axis, None), out_axes, batch_size=batch_size)
    x = np.moveaxis(RANDOM.normal(size=(rows, 5)).astype(np.float32), 0, in_axis)
    expected = jax.vmap(score, (in_axis, None), out_axes)(x, W)
    same(node(x, W), expected)  # outside of a graph, too
    same(asyncio.run(run(node, jnp.asarray(x) if on_device else x, W)), expected)


async def test_pytrees_keys_and_what_is_the_same_for_all_rows() -> None:
    def sample(state: Any, key: Any) -> Any:
        return {"drawn": jax.random.key_data(key)[0] + state["x"], "key": key}, jnp.ones(2)

    state = {"x": X[:, :3], "unused": np.arange(4.0)}
    keys = jax.random.split(jax.random.key(0), 13)
    in_axes = ({"x": 0, "unused": None}, 0)
    expected = jax.vmap(sample, in_axes, (0, None))(state, keys)
    found = await run(ps.device_node(sample).vmap(in_axes, (0, None), batch_size=4), state, keys)
    same(found[0]["drawn"], expected[0]["drawn"])
    same(found[1], expected[1])
    assert (jax.random.key_data(found[0]["key"]) == jax.random.key_data(expected[0]["key"])).all()


async def test_chunks_are_calls_of_one_program_however_many_rows_there_are() -> None:
    node = ps.device_node(score).vmap((0, None), batch_size=4)
    async with engine.Engine():
        for rows in (13, 4, 3, 1, 12):
            same(await run(node, X[:rows], W), scores_of(X[:rows]))
    assert node.compile_statistics().programs == 1


@pytest.mark.several_devices
async def test_rows_are_split_over_a_mesh_and_the_rest_of_a_chunk_is_padded() -> None:
    seen: list[Any] = []

    def look(x: Any) -> Any:
        jax.debug.inspect_array_sharding(x, callback=seen.append)
        return x * 2

    node = ps.device_node(device=MESH, pure=False)(look).vmap(batch_size=5)
    same(await run(node, X), X * 2)
    assert node.compile_statistics().programs == 1
    # 5 rows do not divide evenly over the devices, so a chunk has 8 rows, one for each device.
    assert [sharding.shard_shape((8, 5)) for sharding in seen] == [(1, 5)]


async def test_the_program_of_a_chunk_is_compiled_at_warmup() -> None:
    encode = ps.device_node(sample_input=(X[0], W))(score)
    chunked = encode.vmap((0, None), batch_size=4)

    async with engine.deploy(ps.graph(chunked), warmup=True) as service:
        assert chunked.compile_statistics().programs == 1
        same(await service(X, W), scores_of(X))
    assert chunked.compile_statistics().programs == 1


async def test_wrong_rows_and_options_are_refused() -> None:
    encode = ps.device_node(score)
    with pytest.raises(ps.OptionsError, match=r"score.vmap\(batch_size=0"):
        encode.vmap(batch_size=0)
    with pytest.raises(TypeError, match="has 3 parameters: x, w, scale"):
        encode.vmap((0, 0, 0, 0))
    for size in (None, 4):
        for axes, message in (
            (0, r"x \(13, 5\) along axis 0, w \(5, 3\) along axis 0; give all .* write None in in_axes="),
            ((2, None), r"'x' has no axis 2: its shape is \(13, 5\); to give all of it"),
            ((None, None), "different numbers of rows: none"),
        ):
            with pytest.raises(ValueError, match=f"score.vmap.*{message}"):
                await run(encode.vmap(axes, batch_size=size), X, W)
    with pytest.raises(TypeError, match="dot"):
        await run(squared.vmap(batch_size=4), np.ones((5, 2, 3), np.float32))


def flops(fn: Any, *args: Any) -> float:
    """Returns the operations of a compiled function, by XLA's own analysis."""
    cost: Any = jax.jit(fn).lower(*args).compile().cost_analysis()
    return float(cost["flops"])


def test_outside_of_a_graph_it_is_jaxs() -> None:
    a = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(devices.einsum("ij->ji", a), a.T)
    np.testing.assert_allclose(devices.einsum("...j->...", a), a.sum(-1))


async def test_a_call_is_a_node_whose_products_are_in_the_best_order() -> None:
    power = graph_of(lambda a, v: devices.einsum("ij,jk,k->i", a, a, v))
    assert "einsum ij,jk,k->i" in str(power)
    (step,) = engine.plan(power).steps
    node: Any = step.head.callee
    n = 500
    a, v = np.random.default_rng(0).random((n, n), np.float32), np.ones(n, np.float32)
    assert flops(node.fn, a, a, v) <= 2e6
    np.testing.assert_allclose(await engine.run(power(a, v)), a @ (a @ v), rtol=1e-4)


async def test_it_is_fused_with_other_nodes_around_it() -> None:
    halved = ps.device_node(name="halved")(lambda x: x / 2)
    mixed = graph_of(lambda a, b: halved(devices.einsum("ij->", devices.einsum("ij,jk->ik", halved(a), b))))
    (step,) = engine.plan(mixed).steps
    assert step.label == "halved → einsum ij,jk->ik → einsum ij-> → halved"
    a = np.random.default_rng(0).random((3, 3))
    np.testing.assert_allclose(await engine.run(mixed(a, a)), (a @ a).sum() / 4, rtol=1e-5)


def test_subscripts_that_are_no_text_are_refused_with_the_line() -> None:
    @ps.graph
    async def symbolic(x: Any) -> Any:
        return devices.einsum(x, x)

    line = f"{__file__}:{symbolic.fn.__code__.co_firstlineno + 2}"
    with pytest.raises(ps.GraphTraceError, match="write them as text") as no:
        engine.plan(symbolic)
    assert str(no.value).startswith(line)


@pytest.mark.parametrize(
    ("subscripts", "name"), [("ij, jk", "ij,jk->ik"), ("ij, jk -> ki", "ij,jk->ki"), ("ii", "ii->")]
)
def test_snapshots_know_a_sum_by_its_written_out_subscripts(subscripts: str, name: str) -> None:
    summed = graph_of(lambda a: devices.einsum(subscripts, *[a] * (subscripts.count(",") + 1)))
    assert f"einsum {name}" in str(summed)


@pytest.mark.parametrize(
    ("subscripts", "told"),
    [("ii->i", "index 'i' has the lengths 1 and 5 in operand 1"), ("i?->i", r"'\?' is no index"), ("ij->ik", "k")],
)
async def test_subscripts_that_do_not_fit_are_refused(subscripts: str, told: str) -> None:
    diagonal = graph_of(lambda a: devices.einsum(subscripts, a))
    with pytest.raises(ValueError, match=told) as no:
        await engine.run(diagonal(np.ones((1, 5), np.float32)))
    assert f"einsum {subscripts}" in "\n".join(no.value.__notes__)
