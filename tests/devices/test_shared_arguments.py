"""Arguments that all calls of a batch share are passed once: constants of the graph, and arguments marked as shared."""

import asyncio
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import penstock as ps
from penstock import devices, engine

from .kit import graph_of

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = [np.int32(2), np.int32(0), np.int32(3)]


def looked_up(table: Any, index: Any, scale: Any = 1) -> Any:
    return table[index] * scale


def node_of(size: int | None = None, **options: Any) -> Any:
    """Returns a node whose batches begin at `size` calls; without `size`, as soon as the device is free."""
    sizes = (4, 8) if size is None else (size,)
    batch = devices.DeviceBatch(sizes[-1], buckets=sizes, max_wait_seconds=0 if size is None else 60)
    return ps.device_node(device="cpu", batch=batch, **options)(looked_up)


def stacked_elements(node: Any) -> int:
    """Returns the number of stacked elements in all batches, without padding."""
    found: int = node.batch_statistics().real_elements
    return found


async def in_bodies(node: Any, *tables: Any) -> list[Any]:
    """Runs one body over all ids for each table; the table is a constant of the body."""
    look_up = graph_of(lambda table, ids: ps.map_each(lambda index: node(table, index), ids), awaits=True)
    return await asyncio.gather(*[engine.run(look_up(table, IDS)) for table in tables])


def constant_graph(node: Any, table: Any) -> Any:
    """Returns a graph whose constant is the table."""
    return graph_of(lambda index: node(table, index))


def expected(table: Any) -> list[Any]:
    return [table[index].tolist() for index in IDS]


def as_lists(rows: list[Any]) -> list[Any]:
    return [np.asarray(row).tolist() for row in rows]


@pytest.mark.parametrize("table", [TABLE, jnp.asarray(TABLE)], ids=["numpy", "jax"])
async def test_a_constant_of_the_graph_is_passed_once(table: Any) -> None:
    node = node_of(len(IDS))
    look_up = constant_graph(node, table)
    assert as_lists(await asyncio.gather(*[engine.run(look_up(index)) for index in IDS])) == expected(TABLE)
    # The stacked elements are ids and scales.
    assert (node.batch_statistics().batches, stacked_elements(node)) == (1, 2 * len(IDS))


async def test_constants_in_containers_bodies_regions_and_defaults_are_passed_once() -> None:
    def weighted(parts: Any, x: Any, bias: Any = TABLE[0]) -> Any:
        return parts["w"][0] @ x + bias

    batched = ps.device_node(device="cpu", batch=ps.Batch(8))
    first, second = batched(weighted), batched(weighted)
    parts = {"w": [np.eye(3, dtype=np.float32) * 2, None]}

    twice = graph_of(lambda rows: ps.map_each(lambda x: second(parts, first(parts, x)), rows), awaits=True)
    found = await engine.run(twice(list(TABLE)))
    assert as_lists(found) == [weighted(parts, weighted(parts, x)).tolist() for x in TABLE]
    assert engine.plan(twice).steps[0].bodies[0].steps[0].label == "weighted ×2"  # one region
    # Each batch of the region holds the rows of x, and nothing else.
    assert [one.statistics().real_elements for one in logs_of(first)] == [TABLE.size]


def logs_of(node: Any) -> list[Any]:
    """Returns the batch logs of the regions that contain a node."""
    return [region.batch_log for region in node.runs_on.regions]


async def test_calls_from_graphs_with_other_constants_run_in_other_batches() -> None:
    node = node_of(len(IDS))
    one, two = constant_graph(node, TABLE), constant_graph(node, TABLE * 10)
    found = await asyncio.gather(*[engine.run(graph(index)) for index in IDS for graph in (one, two)])
    assert as_lists(found[::2]) == expected(TABLE)
    assert as_lists(found[1::2]) == expected(TABLE * 10)
    assert (node.batch_statistics().batches, node.compile_statistics().programs) == (2, 1)


async def test_calls_with_other_numbers_share_a_batch() -> None:
    node = node_of(2)
    look_up = ps.graph(node)
    found = await asyncio.gather(*[engine.run(look_up(TABLE, IDS[0], scale)) for scale in (2, 3)])
    assert as_lists(found) == [(TABLE[2] * 2).tolist(), (TABLE[2] * 3).tolist()]
    assert node.batch_statistics().batches == 1


async def test_items_with_other_objects_run_in_other_batches_only_if_the_node_says_so() -> None:
    tables = [TABLE, TABLE * 10]
    shared, stacked = node_of(len(IDS), shared=("table",)), node_of(2 * len(IDS))
    for node, batches, elements in ((shared, 2, 2), (stacked, 1, 2 + TABLE.size)):
        found = await in_bodies(node, *tables)
        assert [as_lists(rows) for rows in found] == [expected(table) for table in tables]
        assert (node.batch_statistics().batches, stacked_elements(node)) == (batches, elements * 2 * len(IDS))


async def test_a_pytree_that_is_made_anew_for_each_call_is_told_by_its_arrays() -> None:
    summed = ps.device_node(device="cpu", batch=ps.Batch(len(IDS), max_wait_seconds=60), shared=("tables",))(
        lambda tables, index: tables[0][index] + tables[1]["more"][index]
    )
    look_up = graph_of(
        lambda table, ids: ps.map_each(lambda index: summed([table, {"more": table}], index), ids), awaits=True
    )
    assert as_lists(await engine.run(look_up(TABLE, IDS))) == expected(TABLE * 2)
    assert (summed.batch_statistics().batches, stacked_elements(summed)) == (1, len(IDS))


@jax.tree_util.register_pytree_node_class
class Scaled:
    """A pytree whose array is made when it is flattened."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        factor = self.factor
        return (TABLE * factor if isinstance(factor, int) else factor,), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> "Scaled":
        return cls(leaves[0])


async def test_a_pytree_that_makes_its_arrays_when_it_is_flattened_shares_no_batch_with_another() -> None:
    picked = ps.device_node(device="cpu", batch=ps.Batch(16, max_wait_seconds=0.01), shared=("scaled",))(
        lambda scaled, index: scaled.factor[index]
    )
    factors = [1, 2, 3, 4] * 4
    async with engine.deploy(ps.graph(picked)) as service:
        found = await asyncio.gather(*[service(Scaled(factor), IDS[0]) for factor in factors])
    assert as_lists(found) == [(TABLE[2] * factor).tolist() for factor in factors]


async def test_a_table_that_is_changed_in_place_is_read_anew() -> None:
    node, table = node_of(shared=("table",)), TABLE.copy()
    look_up = constant_graph(node, table)
    for number in range(3):
        table += number
        [found] = await in_bodies(node, table)
        assert as_lists(found) == expected(table)
        assert np.asarray(await engine.run(look_up(IDS[0]))).tolist() == table[2].tolist()


async def test_shared_arguments_are_compiled_before_the_first_call() -> None:
    node = node_of(shared=("table",), sample_input=(TABLE, IDS[0]))

    async with engine.deploy(ps.graph(node), warmup=True) as service:
        warm = node.compile_statistics()
        await service(TABLE, IDS[0])
    assert (warm.programs, node.compile_statistics().programs) == (2, 2)
    constant = node_of(sample_input=(TABLE, IDS[0]))
    async with engine.deploy(constant_graph(constant, TABLE), warmup=True) as service:
        await service(IDS[0])
    assert constant.compile_statistics().programs == 2


async def test_a_shared_argument_of_one_member_is_shared_in_a_region() -> None:
    halved = ps.device_node(device="cpu", batch=ps.Batch(8))(lambda x: x / 2)
    first = ps.device_node(device="cpu", batch=ps.Batch(8), shared=("table",))(looked_up)
    look_up = graph_of(lambda table, ids: ps.map_each(lambda index: halved(first(table, index)), ids), awaits=True)
    assert as_lists(await engine.run(look_up(TABLE, IDS))) == expected(TABLE / 2)
    assert [one.statistics().real_elements for one in logs_of(halved)] == [len(IDS)]


@pytest.mark.several_devices
async def test_the_spec_of_a_shared_argument_has_no_axis_for_the_batch() -> None:
    mesh = ps.devices.DeviceMesh(shape=(4, 2), axis_names=("data", "model"), device="cpu")
    specs = {"w": P(None, "model"), "x": P("data")}

    product = ps.device_node(device=mesh, batch=ps.Batch(8), shared=("w",), in_specs=specs)(lambda w, x: x @ w)
    products = graph_of(lambda w, rows: ps.map_each(lambda x: product(w, x), rows), awaits=True)
    weights = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert as_lists(await engine.run(products(weights, list(TABLE)))) == (TABLE @ weights).tolist()
    assert stacked_elements(product) == TABLE.size


def scaled(table: Any, x: Any, mask: Any = None) -> Any:
    return table * x


PADDED = devices.DeviceBatch(2, pad_axes={"x": 0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared": "table"}, "device node 'scaled' has shared='table': a tuple of names of parameters, as in shared="),
        ({"shared": ("tables",)}, "shared='tables' is no parameter of it; it has table, x"),
        ({"shared": ("x",), "static": ("x",)}, "'x' is in shared= and in static"),
        ({"shared": ("x",), "batch": PADDED}, "'x' is in shared= and in batch=DeviceBatch(pad_axes"),
        ({"shared": np.zeros(2), "batch": None}, "has shared=array([0., 0.]): a tuple of names of parameters"),
        ({"shared": ("table",), "batch": None}, "device node 'scaled' has shared=('table',), and no batch=: calls"),
        ({"shared": ("table", "x", "mask")}, "all of its parameters are named in shared= or static="),
    ],
)
def test_what_cannot_be_shared_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        ps.device_node(**{"batch": ps.Batch(2), **options})(scaled)
