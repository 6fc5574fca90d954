"""Device nodes on a mesh give the results of one device; arrays that do not divide evenly are padded or refused."""

import asyncio
from collections.abc import AsyncIterator
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

MESH = devices.DeviceMesh(shape=(4, 2), axis_names=("data", "model"), device="cpu")
P = jax.P


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w).sum(0)


X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("in_specs", "out_specs"),
    [
        (None, None),
        ((P("data"), P(None, "model")), P("model")),
        ([P("data", "model"), P("model")], None),
        ({"w": P(None, "data")}, P("data")),
        (P(None, "model"), P()),
        ({"x": P(("data", "model"))}, P("data")),
    ],
)
async def test_a_node_on_a_mesh_gives_what_it_gives_without(in_specs: Any, out_specs: Any) -> None:
    if in_specs == P(None, "model"):
        in_specs = {"x": P(None, "model"), "w": P("model")}
    node = ps.device_node(device=MESH, in_specs=in_specs, out_specs=out_specs)(product)
    result = await engine.run(ps.graph(node)(X, W))
    np.testing.assert_allclose(np.asarray(result), product(X, W), rtol=1e-5)
    assert len(result.sharding.device_set) == 8
    if out_specs is not None:
        wanted = jax.sharding.NamedSharding(devices.select(MESH), out_specs)
        assert result.sharding.is_equivalent_to(wanted, 1)


async def test_one_spec_stands_for_all_parameters_and_shardings_of_jax_serve_too() -> None:
    node = ps.device_node(device=MESH, in_specs=P("data"))(lambda x, w: x + w)
    np.testing.assert_allclose(np.asarray(await engine.run(ps.graph(node)(X, X))), X + X)
    mesh = devices.select(MESH)
    split = jax.sharding.NamedSharding(mesh, P("data"))
    node = ps.device_node(device=mesh, in_specs={"x": split}, out_specs=split)(lambda x, w: jnp.tanh(x @ w))
    result = await engine.run(ps.graph(node)(X, W))
    np.testing.assert_allclose(np.asarray(result), np.tanh(X @ W), rtol=1e-5)


async def test_a_sharding_over_other_devices_is_refused() -> None:
    first, second = devices.DeviceMesh(shape=(2, 4), axis_names=("stage", "data"), device="cpu").split("stage")
    elsewhere = jax.sharding.NamedSharding(devices.select(second), P("data"))
    node = ps.device_node(device=first, in_specs={"x": elsewhere})(product)
    message = r"runs on mesh\(stage=1, data=4\), .* over mesh\(stage=1, data=4\) of cpu:4,5,"
    with pytest.raises(TypeError, match=message):
        await engine.run(ps.graph(node)(X, W))


async def test_a_spec_is_a_prefix_of_a_pytree() -> None:
    node = ps.device_node(device=MESH, in_specs={"x": {"a": P("data"), "b": None}})(
        lambda x, w: x["a"][0] @ w + x["b"]["c"]
    )
    result = await engine.run(ps.graph(node)({"a": [X], "b": {"c": np.float32(3)}}, W))
    np.testing.assert_allclose(np.asarray(result), X @ W + 3, rtol=1e-5)


@ps.resource
async def weights() -> AsyncIterator[dict[str, Any]]:
    yield {"w": W}


async def test_parameters_of_a_resource_are_placed_once_split_as_their_spec_says() -> None:
    def through(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ parameters["w"])

    seen: list[Any] = []
    node = ps.device_node(device=MESH, in_specs={"parameters": P(None, "model"), "x": P("data")})(through)
    whole = ps.device_node(device=MESH)(through)

    @ps.graph
    async def graph(x: jax.Array) -> list[jax.Array]:
        parameters = await weights()
        return [node(parameters, x), whole(parameters, x)]

    async with engine.deploy(graph) as service:
        for _ in range(3):
            seen += await service(X)
    for result in seen:
        np.testing.assert_allclose(np.asarray(result), np.tanh(X @ W), rtol=1e-5)
    # The arrays were already in place, also for the second call.
    assert (node.compile_statistics().transfers, whole.compile_statistics().transfers) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "in_specs": P("data")}, "device='cpu' is one device: pass a DeviceMesh as device="),
        ({"device": "cpu", "out_specs": P()}, "which split arrays over a mesh"),
        ({"in_specs": (P("data"),)}, r"has 1 specs, and there are 2 parameters: x, w\. Give a spec for each"),
        ({"in_specs": {"y": P("data")}}, "has 'y', which is no parameter of it; it has x, w"),
        ({"in_specs": P("rows")}, "the mesh has no axis 'rows'; it has data, model"),
        ({"out_specs": P("rows")}, "the spec of the result is .* no axis 'rows'"),
        ({"in_specs": {"w": P("data", "data")}}, "the spec of w is .* splits two axes over 'data'"),
        ({"in_specs": {"w": "data"}}, "the spec of w is 'data': write jax.P"),
    ],
)
def test_specs_that_do_not_fit_are_refused_when_the_node_is_decorated(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=rf"device node 'product'.*{message}"):
        ps.device_node(**{"device": MESH, **options})(product)


@pytest.mark.parametrize(
    ("in_specs", "out_specs", "message"),
    [
        (P(None, "data"), None, r"'product', argument 'x' has 6 elements along axis 1, .* over 4 .* Pad the axis to 8"),
        ({"w": P("data")}, None, r"argument 'w' has 6 elements along axis 0, shape \(6, 4\), and its spec P\('data'\)"),
        ({"x": P(None, None, "data")}, None, r"argument 'x' has 2 axes, .* has 3: give it one entry for each"),
        (None, P(("data", "model")), r"the result of node 'product' has 4 elements along axis 0, .* over 8 devices"),
    ],
)
async def test_what_does_not_divide_is_refused_with_the_sizes_and_the_remedy(
    in_specs: Any, out_specs: Any, message: str
) -> None:
    node = ps.device_node(device=MESH, in_specs=in_specs, out_specs=out_specs)(product)
    with pytest.raises(ValueError, match=message):
        await engine.run(ps.graph(node)(X, W))


async def test_a_parameter_of_a_resource_that_does_not_divide_is_refused_alike() -> None:
    node = ps.device_node(device=MESH, in_specs={"w": P("data")})(lambda x, w: x @ w["w"])

    @ps.graph
    async def graph(x: Any) -> Any:
        return node(x, await weights())

    with pytest.raises(ValueError, match=r"argument 'w'\['w'\] has 6 elements along axis 0"):
        await engine.run(graph(X))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 13])
async def test_batches_of_any_size_are_padded_so_that_their_rows_can_be_split(count: int) -> None:
    node = ps.device_node(device=MESH, batch=ps.Batch(8), in_specs=P("data"), out_specs=P("data"))(
        lambda x, w: {"product": jnp.tanh(x @ w), "sum": x.sum()}
    )

    @ps.graph
    async def graph(x: Any) -> Any:
        return node(x, W)

    rows = [X[number % 8] * number for number in range(count)]
    async with engine.deploy(graph, max_in_flight=16) as service:
        results = await asyncio.gather(*(service(row) for row in rows))
    for row, result in zip(rows, results, strict=True):
        np.testing.assert_allclose(result["product"], np.tanh(row @ W), rtol=1e-5)
        np.testing.assert_allclose(result["sum"], row.sum(), rtol=1e-4, atol=1e-5)


async def test_ragged_items_are_padded_and_masked_on_a_mesh() -> None:
    @ps.device_node(
        device=MESH,
        batch=devices.DeviceBatch(8, pad_axes={"tokens": 0}),
        in_specs={"tokens": P("data", "model")},
        out_specs=P("data"),
    )
    def mean(tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        if mask is None:
            return jnp.mean(tokens)
        return jnp.sum(tokens * mask) / jnp.sum(mask)

    rows = [np.arange(length, dtype=np.float32) for length in range(1, 40, 3)]
    async with engine.deploy(ps.graph(mean), max_in_flight=16) as service:
        results = await asyncio.gather(*(service(row) for row in rows))
    np.testing.assert_allclose([float(result) for result in results], [row.mean() for row in rows], rtol=1e-5)


_ENTRIES = st.sampled_from([None, "data", "model", ("data", "model")])


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    in_spec=st.lists(_ENTRIES, max_size=2),
    out_spec=st.none() | st.lists(_ENTRIES, max_size=2),
)
@settings(max_examples=12 * EFFORT)
def test_random_sizes_and_specs_give_what_one_device_gives_or_are_refused(
    shape: tuple[int, int], in_spec: list[Any], out_spec: list[Any] | None
) -> None:
    def used(spec: list[Any]) -> list[str]:
        return [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]

    def divides(spec: list[Any], of: tuple[int, ...]) -> bool:
        sizes = {"data": 4, "model": 2}
        return all(size % int(np.prod([sizes[a] for a in used([e])])) == 0 for size, e in zip(of, spec, strict=False))

    specs = [in_spec, *([] if out_spec is None else [out_spec])]
    if any(len(used(spec)) != len(set(used(spec))) for spec in specs):
        return
    node = ps.device_node(device=MESH, in_specs=(P(*in_spec),), out_specs=None if out_spec is None else P(*out_spec))(
        lambda x: jnp.cumsum(x, 0) / (1 + jnp.abs(x).sum()) + x.max()
    )

    graph = ps.graph(node)
    x = np.random.default_rng(shape).normal(size=shape).astype(np.float32)
    if not all(divides(spec, shape) for spec in specs):
        with pytest.raises(ValueError, match="is no multiple of"):
            asyncio.run(_run(graph(x)))
        return
    expected = np.cumsum(x, 0) / (1 + np.abs(x).sum()) + x.max()
    np.testing.assert_allclose(np.asarray(asyncio.run(_run(graph(x)))), expected, rtol=1e-4, atol=1e-5)


async def _run(call: Any) -> Any:
    return await engine.run(call)
