"""Enqueue order on meshes: programs with collectives from many graphs, loops and meshes never deadlock."""

import asyncio
import functools
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine
from penstock.devices.enqueue_order import ENQUEUE_ORDER, holding, reshard

from .kit import on_the_host
from .processes import run_program

P = jax.P
MESH = devices.DeviceMesh(shape=(4, 2), axis_names=("data", "model"), device="cpu")
HALF = MESH.split("model")[1]
ROW = devices.DeviceMesh(shape=(4,), axis_names=("data",), device="cpu")
X = np.arange(64, dtype=np.float32).reshape(8, 8)
WIDTH = 32


def summed_by_hand(device: devices.DeviceMesh) -> Any:
    """Returns a graph whose node sums its parts with an explicit collective."""

    @ps.device_node(device=device, in_specs=P("data"), pure=False)
    def by_hand(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda part: jax.lax.psum(part.sum(0), "data"), in_specs=P("data"), out_specs=P())(x)

    return ps.graph(by_hand)


def summed_by_the_compiler(device: devices.DeviceMesh) -> Any:
    """Returns a graph whose node reduces over an axis that is split."""

    @ps.device_node(device=device, in_specs=P(None, "data"), out_specs=P("data"), pure=False)
    def by_compiler(x: jax.Array) -> jax.Array:
        return (x @ jnp.ones_like(x)).sum(0) / 8 + x.sum()

    return ps.graph(by_compiler)


def expected(graph: int, x: Any) -> Any:
    return x.sum(0) if graph == 0 else np.full(8, x.sum() / 8 + x.sum())


async def interleaved(graphs: list[Any], runs: int) -> None:
    """Runs calls of several graphs in turns, many at a time, and checks each result."""
    async with engine.Engine() as own, own.deploy(*graphs, max_in_flight=WIDTH) as service:

        async def client(number: int) -> None:
            for turn in range(number, runs, WIDTH):
                which = turn % len(graphs)
                result = await service.run(graphs[which](X + turn % 7))
                np.testing.assert_allclose(np.asarray(result), expected(which % 2, X + turn % 7), rtol=1e-5)

        async with asyncio.TaskGroup() as tasks:
            for number in range(WIDTH):
                tasks.create_task(client(number))


@pytest.mark.several_devices
async def test_meshes_may_overlap(effort: int) -> None:
    graphs = [summed_by_hand(MESH), summed_by_the_compiler(HALF), summed_by_hand(ROW), summed_by_the_compiler(MESH)]
    await interleaved(graphs, 250 * effort)


@pytest.mark.several_devices
async def test_results_go_from_mesh_to_mesh_while_others_compute_there(effort: int) -> None:
    specs: dict[str, Any] = {"in_specs": P("data"), "out_specs": P(None, "data"), "pure": False}
    there = ps.device_node(device=ROW, **specs)(lambda x: x - x.mean(0))
    back = ps.device_node(device=HALF, **specs)(lambda x: x - x.mean(1, keepdims=True))
    forth, reverse = there >> back, back >> there
    async with engine.deploy(forth, reverse, max_in_flight=16) as service, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(service.run((forth, reverse)[turn % 2](X * turn))) for turn in range(100 * effort)]
    for turn, call in enumerate(calls):
        x = X * turn
        np.testing.assert_allclose(
            np.asarray(call.result()), x - x.mean(0) - x.mean(1, keepdims=True) + x.mean(), atol=1e-2
        )


@pytest.mark.several_devices
@pytest.mark.parametrize("meshes", [(MESH, MESH), (HALF, ROW)], ids=["one mesh", "two that overlap"])
def test_two_engines_on_two_event_loops_share_devices(
    meshes: tuple[devices.DeviceMesh, devices.DeviceMesh], effort: int
) -> None:
    def work(mesh: devices.DeviceMesh) -> None:
        asyncio.run(interleaved([summed_by_hand(mesh), summed_by_the_compiler(mesh)], 100 * effort))

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(work, meshes)] == [None, None]


def test_locks_are_taken_in_one_order_and_a_single_device_needs_none() -> None:
    def devices_of(platform: str, numbers: Iterable[int]) -> Any:
        return [SimpleNamespace(platform=platform, id=number) for number in numbers]

    assert ENQUEUE_ORDER.locks(devices_of("gpu", [0])) == ENQUEUE_ORDER.locks(devices_of("cpu", [0])) == ()
    forwards = ENQUEUE_ORDER.locks(devices_of("gpu", [0, 1, 2]))
    assert forwards == ENQUEUE_ORDER.locks(devices_of("gpu", [2, 1, 0]))
    assert ENQUEUE_ORDER.locks(devices_of("gpu", [1, 2, 3]))[:2] == forwards[1:]
    # CPU devices share their threads, so programs on different CPU devices have to wait for each other.
    assert ENQUEUE_ORDER.locks(devices_of("cpu", [0, 1])) == ENQUEUE_ORDER.locks(devices_of("cpu", [2, 3]))
    with holding(forwards):
        assert all(lock.locked() for lock in forwards)
    assert not any(lock.locked() for lock in forwards)


_STEPS_WITH_COLLECTIVES = """
import asyncio
import jax, jax.numpy as jnp
from penstock import devices

jax.config.update("jax_num_cpu_devices", 8)
MESHES = [devices.DeviceMesh(shape=shape, axis_names=("data",), device="cpu") for shape in ((8,), (4,))]


def step(weights, x):
    def of_part(part):
        return jax.lax.psum((part @ part.T).sum() * 0 + part.sum(), "data")

    return weights + jax.shard_map(of_part, in_specs=jax.P("data"), out_specs=jax.P())(x + weights * 0)


async def train(mesh):
    device = devices.actor(mesh)
    bound = device.bind(step, donate_argnums=(0,), ready=False)
    weights, x = await device.run(lambda: (jnp.zeros(()), jnp.ones((64, 64))))
    for _ in range(500):
        weights = await bound(weights, x)
    return float(weights)


async def main():
    print(*await asyncio.gather(*map(train, MESHES)))


asyncio.run(main())
"""


def test_steps_with_collectives_that_are_handed_on_do_not_starve_each_other() -> None:
    # XLA aborts the process if CPU devices wait for each other for longer than this limit.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=8"
    assert run_program(_STEPS_WITH_COLLECTIVES, XLA_FLAGS=flags).split() == [str(500 * 64.0 * 64)] * 2


# --- Moving an array to another placement does not wait for its computation ---

LEFT, RIGHT = devices.DeviceMesh(shape=(2, 4), axis_names=("stage", "data"), device="cpu").split("stage")
SQUARE = devices.DeviceMesh(shape=(2, 2), axis_names=("data", "model"), device="cpu")


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


@pytest.mark.several_devices
@pytest.mark.parametrize("steps", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3, 5, 6, 7, 8, 9, 10))])
def test_an_array_is_the_same_wherever_it_goes(steps: int) -> None:
    there = [*shardings().values()]
    for source, target in zip(there, there[steps:] + there[:steps], strict=True):
        moved = reshard(jax.device_put(X, source), target)
        assert moved.sharding.is_equivalent_to(target, 2), (source, target)
        np.testing.assert_array_equal(np.asarray(moved), X)


@pytest.mark.several_devices
@pytest.mark.parametrize("target", ["one device", "another", "right rows", "right columns", "square", "left columns"])
def test_nobody_waits_for_an_array_that_is_moved(target: str) -> None:
    there = shardings()
    opened = threading.Event()

    def wait(x: Any) -> Any:
        assert opened.wait(30)
        return np.asarray(x)

    held = functools.partial(on_the_host, wait)
    slow = jax.jit(jax.shard_map(held, mesh=devices.select(LEFT), in_specs=P("data"), out_specs=P("data")))
    given = jax.device_put(X, there["left rows"])
    reshard(given, there[target]).block_until_ready()  # compiles the move
    result = slow(given)
    moved = reshard(result, there[target])
    assert not result.is_ready()  # the move was dispatched before its input was computed
    opened.set()
    np.testing.assert_array_equal(np.asarray(moved), X)
