"""Device nodes on workers: each worker compiles the function, and batches are gathered in the driver."""

import asyncio
from collections.abc import Iterator
from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest

import penstock as ps
from penstock import cluster, devices, engine, testing

jax: Any = import_module("jax")
jnp: Any = jax.numpy
Array = Any
WORKERS = cluster.ray(workers=2, name="two workers with devices")
TRACED: list[tuple[int, ...]] = []


@pytest.fixture(autouse=True)
def in_threads() -> Iterator[None]:
    TRACED.clear()
    with testing.workers_in_threads(WORKERS):
        yield


@ps.device_node(runs_on=WORKERS, static=("power",))
def raised(x: Array, power: int = 2) -> Array:
    TRACED.append(x.shape)
    return x**power


async def test_a_function_is_compiled_where_it_is_called() -> None:
    @ps.graph
    async def both(x: Array) -> tuple[Array, Array]:
        return raised(x), raised(x, power=3)

    async with engine.Engine() as e:
        for _ in range(3):
            two, three = await e.run(both(np.full(4, 3.0, np.float32)))
            assert (two.tolist(), three.tolist()) == ([9.0] * 4, [27.0] * 4)
    assert 2 <= len(TRACED) <= 4  # one program for each power, in each worker that was called


BATCH = ps.Batch(8, max_wait_seconds=60)


@ps.device_node(runs_on=WORKERS, batch=BATCH, shared=("table",))
def looked_up(x: Array, table: Array) -> Array:
    TRACED.append(x.shape)
    return table[x].sum() / table.shape[0]


async def test_a_batch_is_gathered_here_and_computed_by_one_program_there() -> None:
    table = np.arange(10, dtype=np.float32)

    @ps.graph
    async def found(x: Array) -> Array:
        return looked_up(x, table)

    items = [np.array([number, 1]) for number in range(8)]
    async with engine.Engine() as e, e.deploy(found) as service:
        results = await asyncio.gather(*map(service, items))
        [actor] = service.statistics().actors
    assert [float(one) for one in results] == pytest.approx([(number + 1) / 10 for number in range(8)])
    assert len(TRACED) == 1  # the eight calls are one batch of one size, so there is one program
    assert {one.name: one.value for one in actor.figures}["calls"] == 1


@ps.device_node(runs_on=WORKERS, batch=devices.DeviceBatch(4, max_wait_seconds=60, pad_axes={"x": 0}))
def total(x: Array, mask: Array = None) -> Array:
    return x.sum() if mask is None else jnp.where(mask, x, 0).sum()


@ps.device_node(runs_on=WORKERS, batch=devices.PackedBatch(lengths=(16,), rows=1, items_per_row=3, max_wait_seconds=60))
def rows(x: Array, segments: Array = None) -> Array:
    return jax.ops.segment_sum(x[0], segments[0], 4)[None, 1:]


@ps.graph
async def totals(x: Array) -> Array:
    return total(x)


@ps.graph
async def of_rows(x: Array) -> Array:
    return rows(x)


async def test_padded_batches_and_packed_rows_give_each_item_its_result() -> None:
    items = [np.arange(length, dtype=np.float32) for length in (3, 5, 2, 4)]
    async with engine.Engine() as e:
        async with e.deploy(totals) as service:
            assert [*map(float, await asyncio.gather(*map(service, items)))] == [3.0, 10.0, 1.0, 6.0]
        async with e.deploy(of_rows) as service:
            assert [*map(float, await asyncio.gather(*map(service, items[:3])))] == [3.0, 10.0, 1.0]


async def test_an_item_that_does_not_fit_fails_alone() -> None:
    @ps.device_node(runs_on=WORKERS, batch=devices.DeviceBatch(2, max_wait_seconds=60))
    def same(x: Array) -> Array:
        return x

    items = [np.ones(3, np.float32), "no array"]
    async with engine.Engine() as e, e.deploy(ps.graph(same)) as service:
        good, bad = cast("list[Any]", await asyncio.gather(*map(service, items), return_exceptions=True))
    assert isinstance(bad, TypeError)
    assert good.tolist() == [1.0] * 3


@pytest.mark.parametrize("batch", [None, ps.Batch(1)])
async def test_an_error_of_a_device_node_says_what_the_error_of_the_function_says(batch: Any) -> None:
    @ps.device_node(runs_on=WORKERS, batch=batch)
    def product(x: Array) -> Array:
        return x @ jnp.ones(3)

    async with engine.Engine() as e:
        with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as found:
            await e.run(ps.graph(product)(np.ones(4, np.float32)))
    assert "in node 'product' of graph 'product', item 0, attempt 1" in found.value.__notes__
    assert "while compiling node 'product'" in "".join(found.value.__notes__)


@ps.device_node(runs_on=WORKERS, donate=True, static=("by",))
def stepped(state: Array, by: float) -> Array:
    return state + by


async def test_donation_takes_the_memory_of_what_has_come_and_of_no_argument_here() -> None:
    state = np.zeros(1000, np.float32)
    async with engine.Engine() as e:
        for _ in range(3):
            assert (await e.run(ps.graph(stepped)(state, 1.0))).tolist() == [1.0] * 1000
    assert not state.any()


@ps.device_node(runs_on=WORKERS, donate=True)
def of_both(state: Array, by: Array) -> Array:
    return state + by.sum()


async def test_what_came_with_a_call_is_donated() -> None:
    async with engine.Engine() as e:
        # The warning does not name the other buffer, which was usable.
        with pytest.warns(UserWarning, match=r"donated buffers were not usable: float32\[3\]\."):
            await e.run(ps.graph(of_both)(np.zeros(5, np.float32), np.zeros(3, np.float32)))


DEVICE = jax.devices("cpu")[0]
MESH = jax.sharding.Mesh(np.array([DEVICE]), ("x",))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 2}, "replicas=: each worker is a replica, so say how many workers there are; leave out replicas="),
    ({"in_specs": jax.P("x")}, "in_specs=: a mesh does not reach over workers"),
    ({"out_specs": jax.P("x")}, "out_specs=: a mesh does not reach over workers"),
    ({"sample_input": (1.0,)}, "sample_input=: a worker compiles when the first call comes"),
    ({"device": MESH}, "which belongs to this process: write the name of a device that each worker has"),
    ({"device": DEVICE}, "which belongs to this process: write the name of a device that each worker has"),
    ({"batch": ps.Batch("auto")}, "a size is found on a device of this process; write the size, such as max_size=16"),
    ({"batch": ps.Batch("auto"), "sample_input": (1.0,)}, "write the size, such as max_size=16"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_belongs_to_devices_of_one_process_is_refused_with_the_reason(options: Any, reason: str) -> None:
    with pytest.raises(TypeError, match="device node 'refused' has runs_on=, and ") as found:

        @ps.device_node(runs_on=WORKERS, **options)
        def refused(x: Array) -> Array:
            return x

    assert reason in str(found.value)


def test_nodes_on_workers_do_not_become_one_program() -> None:
    @ps.graph
    async def chain(x: Array) -> Array:
        return raised(raised(x))

    assert len(engine.plan(chain).steps) >= 2
    with pytest.raises(ps.DeviceError, match="no device of this process"):
        raised.vmap()
