"""Device nodes on a mesh give the results of one device, and so do stages on parts of a mesh."""

import asyncio
from collections.abc import Callable
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
from tests.kit import values_of

from .gates import Gate
from .kit import graph_of, resource_of, row

pytestmark = pytest.mark.several_devices

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


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
async def test_a_function_may_name_specs_without_a_mesh_whatever_its_axes(axis_type: Any) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=jax.devices("cpu"))
    constrain = jax.lax.with_sharding_constraint if axis_type is jax.sharding.AxisType.Auto else jax.reshard
    options: dict[str, Any] = {"in_specs": (P("data"), None), "out_specs": P("data")}
    node = ps.device_node(device=mesh, **options)(lambda x, w: constrain(x, P("data", None)) @ w)
    np.testing.assert_allclose(np.asarray(await engine.run(ps.graph(node)(X, W))), X @ W, rtol=1e-5)


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


weights = resource_of(lambda: {"w": W})


async def test_parameters_of_a_resource_are_placed_once_split_as_their_spec_says() -> None:
    def through(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ parameters["w"])

    node = ps.device_node(device=MESH, in_specs={"parameters": P(None, "model"), "x": P("data")})(through)
    whole = ps.device_node(device=MESH)(through)
    async with engine.deploy(graph_of(lambda w, x: [node(w, x), whole(w, x)], weights)) as service:
        for _ in range(3):
            for result in await service(X):
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
    graph = graph_of(lambda w, x: node(x, w), weights)
    with pytest.raises(ValueError, match=r"argument 'w'\['w'\] has 6 elements along axis 0"):
        await engine.run(graph(X))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 13])
async def test_batches_of_any_size_are_padded_so_that_their_rows_can_be_split(count: int) -> None:
    node = ps.device_node(device=MESH, batch=ps.Batch(8), in_specs=P("data"), out_specs=P("data"))(
        lambda x, w: {"product": jnp.tanh(x @ w), "sum": x.sum()}
    )
    graph = graph_of(lambda x: node(x, W))
    items = [X[number % 8] * number for number in range(count)]
    async with engine.deploy(graph, max_in_flight=16) as service:
        results = await asyncio.gather(*map(service, items))
    for item, result in zip(items, results, strict=True):
        np.testing.assert_allclose(result["product"], np.tanh(item @ W), rtol=1e-5)
        np.testing.assert_allclose(result["sum"], item.sum(), rtol=1e-4, atol=1e-5)


async def test_ragged_items_are_padded_and_masked_on_a_mesh() -> None:
    batch = devices.DeviceBatch(8, pad_axes={"tokens": 0})

    @ps.device_node(device=MESH, batch=batch, in_specs={"tokens": P("data", "model")}, out_specs=P("data"))
    def mean(tokens: Any, mask: Any = None) -> Any:
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
            asyncio.run(engine.run(graph(x)))
        return
    expected = np.cumsum(x, 0) / (1 + np.abs(x).sum()) + x.max()
    np.testing.assert_allclose(np.asarray(asyncio.run(engine.run(graph(x)))), expected, rtol=1e-4, atol=1e-5)


STAGES = devices.DeviceMesh(shape=(4, 2), axis_names=("stage", "data"), device="cpu")


def test_a_mesh_is_cut_along_any_axis_into_parts_that_have_all_its_axes() -> None:
    whole = devices.select(STAGES)
    stages = STAGES.split("stage")
    assert [stage.shape for stage in stages] == [(1, 2)] * 4
    for index, stage in enumerate(stages):
        assert (devices.select(stage).devices == whole.devices[index : index + 1]).all()
    columns = STAGES.split("data")
    assert [column.shape for column in columns] == [(4, 1)] * 2
    assert (devices.select(columns[1]).devices == whole.devices[:, 1:]).all()
    single = columns[1].split("stage")[2]
    assert (devices.select(single).devices == whole.devices[2:3, 1:]).all()
    assert stages[1] == STAGES.split("stage")[1] != stages[2]
    assert repr(STAGES) == "DeviceMesh(shape=(4, 2), axis_names=('stage', 'data'), device='cpu')"
    assert repr(stages[1]) == "DeviceMesh(shape=(1, 2), axis_names=('stage', 'data'), device='cpu') at 2, 3 of (4, 2)"
    assert len({*stages, *STAGES.split("stage")}) == 4
    with pytest.raises(ValueError, match="no axis 'rows'; it has stage, data"):
        STAGES.split("rows")
    large = devices.DeviceMesh(shape=(4, 4), axis_names=("stage", "data"), device="cpu")
    with pytest.raises(ps.DeviceError, match=r"shape \(4, 4\) needs 16 devices, and there are 8"):
        devices.select(large.split("stage")[0])


async def test_a_pipeline_of_stages_gives_what_one_device_gives() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(8, 8)).astype(np.float32) for _ in range(4)]
    layer = resource_of(lambda index: weights[index])

    specs: dict[str, Any] = {"in_specs": {"w": P(None, "data"), "x": P("data")}, "out_specs": P("data")}
    stages = [ps.device_node(device=part, **specs)(lambda w, x: jnp.tanh(x @ w)) for part in STAGES.split("stage")]

    @ps.graph
    async def pipeline(x: Any) -> Any:
        for index, compute in enumerate(stages):
            x = compute(await layer(index), x)
        return x

    batches = [rng.normal(size=(4, 8)).astype(np.float32) for _ in range(12)]
    results = await values_of(engine.stream(pipeline(batch) for batch in batches))
    for batch, result in zip(batches, results, strict=True):
        for w in weights:
            batch = np.tanh(batch @ w)
        np.testing.assert_allclose(np.asarray(result), batch, rtol=1e-4, atol=1e-5)
    assert [stage.compile_statistics().transfers for stage in stages] == [0, 12, 12, 12]


async def test_a_stage_works_on_an_item_while_the_one_before_works_on_the_next() -> None:
    gates = [Gate() for _ in range(4)]

    def stage(part: devices.DeviceMesh, gate: Gate) -> Any:
        return ps.device_node(device=part, pure=False)(lambda x: gate.pass_through(x) + 1)

    # One device for each stage: on simulated devices, programs with collectives run one at a time.
    line = devices.DeviceMesh(shape=(4,), axis_names=("stage",), device="cpu")
    first, second, third, last = map(stage, line.split("stage"), gates)

    pipeline = first >> second >> third >> last
    results = asyncio.create_task(values_of(engine.stream(pipeline(row(10 * item)) for item in range(4))))
    # A gate lets one computation pass at a time: the pipeline fills, step by step.
    for step in range(4):
        for gate in gates[: step + 1]:
            await gate.entered()
        if step < 3:
            for gate in gates[: step + 1]:
                gate.let_one_pass()
    # The last stage holds the first item, while the first stage holds the last one.
    assert [gate.values[-1][0] for gate in gates] == [30, 21, 12, 3]
    for gate in gates:
        gate.open()
    assert [float(result[0]) for result in await results] == [4, 14, 24, 34]


LEFT, RIGHT = devices.DeviceMesh(shape=(2, 4), axis_names=("stage", "data"), device="cpu").split("stage")
SQUARE = np.arange(64, dtype=np.float32).reshape(8, 8)


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
        result = await engine.run(graph(SQUARE))
    np.testing.assert_allclose(np.asarray(result), np.cumsum(SQUARE + 1, 0) * 2)
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
    await engine.run(graph(SQUARE))
    await engine.run(beside(SQUARE))
    await gate.entered()
    gate.close()
    async with engine.deploy(graph, beside) as service, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(service.run(graph(SQUARE)))
        await gate.entered()
        while after.compile_statistics().transfers < 2:
            await asyncio.sleep(0)
        second = tasks.create_task(service.run(beside(SQUARE)))
        while other.compile_statistics().hits < 1:  # the thread of the second mesh does not wait for the first mesh
            await asyncio.sleep(0)
        assert not first.done()
        gate.open()
    np.testing.assert_allclose(np.asarray(first.result()), SQUARE.sum(0))
    np.testing.assert_allclose(np.asarray(second.result()), SQUARE * 2)
