"""Replicas: copies of a node on several devices behind one inbox; the next item goes to the first free copy."""

import asyncio
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine

from .gates import Gate, gated
from .kit import graph_of, numbers_of, resource_of, row

MESH = devices.DeviceMesh(shape=(2,), axis_names=("x",))


@pytest.mark.several_devices
async def test_calls_of_a_node_run_on_all_its_devices_at_once() -> None:
    gate = Gate()

    node = ps.device_node(device="cpu:1", replicas=4, prefetch=1, pure=False)(lambda x: gate.pass_through(x) * 2)
    async with engine.deploy(ps.graph(node), max_in_flight=16) as service, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(service(row(number))) for number in range(8)]
        await gate.entered(4)
        # The other items wait for the first free replica.
        assert sorted(value[0] for value in gate.values) == [0, 1, 2, 3]
        gate.open()
    results = [call.result() for call in calls]
    assert numbers_of(results) == [2 * number for number in range(8)]
    assert {device.id for result in results for device in result.devices()} == {1, 2, 3, 4}


@pytest.mark.several_devices
async def test_a_call_goes_to_the_device_that_is_free_and_waits_behind_none_that_is_not() -> None:
    gate = Gate()

    node = ps.device_node(device="cpu", replicas=2, prefetch=1, pure=False)(
        lambda x: jax.lax.cond(x[0] < 0, gate.pass_through, lambda x: x, x)
    )
    async with engine.deploy(ps.graph(node), max_in_flight=32) as service, asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(service(row(-1)))
        await gate.entered()
        results = [await service(row(number)) for number in range(5)]
        results += await asyncio.gather(*(service(row(number)) for number in range(5, 20)))
        assert not slow.done()
        gate.open()
    (busy,) = slow.result().devices()
    assert numbers_of(results) == list(range(20))
    assert all(busy not in result.devices() for result in results)


@pytest.mark.several_devices
async def test_each_replica_takes_batches_of_its_own() -> None:
    gate = Gate()
    of = gated(gate, replicas=3, prefetch=1, batch=ps.Batch(4))
    async with engine.deploy(of, max_in_flight=32) as service, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(service(np.float32(number))) for number in range(16)]
        await gate.entered(3)
        assert sorted(gate.values) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        gate.open()
    assert [float(call.result()) for call in calls] == [*range(16)]


@pytest.mark.several_devices
async def test_with_room_for_more_each_device_gets_one_before_any_gets_two() -> None:
    gate = Gate()
    of = gated(gate, replicas=4, prefetch=2, batch=ps.Batch(2))
    async with engine.deploy(of, max_in_flight=32) as service, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(service(np.float32(number))) for number in range(8)]
        await gate.entered(4)
        gate.open()
    assert [float(call.result()) for call in calls] == [*range(8)]


@pytest.mark.several_devices
async def test_parameters_are_placed_on_each_device_and_reloaded_there() -> None:
    version = 1.0
    weights = resource_of(lambda: {"w": np.full(3, version, np.float32)})

    scaled = ps.device_node(device="cpu:2", replicas=3)(lambda parameters, x: parameters["w"] * x)
    graph = graph_of(scaled, weights)
    async with engine.deploy(graph) as service:
        for version in (1.0, 5.0):
            await service.reload(weights)
            results = await asyncio.gather(*(service(np.float32(number)) for number in range(12)))
            assert numbers_of(results) == [version * number for number in range(12)]
    statistics = scaled.compile_statistics()
    assert (statistics.programs, statistics.transfers, statistics.recompilations) == (3, 0, ())


@pytest.mark.several_devices
@pytest.mark.parametrize("batch", [None, ps.Batch(4), ps.Batch(4, max_wait_seconds=0.002)])
async def test_many_calls_and_cancels_leave_nothing_behind(batch: ps.Batch | None) -> None:
    node = ps.device_node(device="cpu", replicas=4, batch=batch)(lambda x: jnp.sin(x).sum())
    neighbour = ps.device_node(device="cpu:1", pure=False)(lambda x: x + 1)
    graphs = [ps.graph(neighbour), ps.graph(node)]
    async with engine.deploy(*graphs, max_in_flight=256) as service, asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(service.run(graphs[min(number % 3, 1)](np.full(3, number, np.float32))))
            for number in range(300)
        ]
        for call in calls[::7]:
            call.cancel()
    for number, call in enumerate(calls):
        if not call.cancelled():
            expected = np.full(3, number + 1) if number % 3 == 0 else np.sin(np.float32(number)) * 3
            np.testing.assert_allclose(np.asarray(call.result()), expected, rtol=1e-4)


@pytest.mark.several_devices
async def test_more_replicas_than_devices_are_an_error_that_lists_these() -> None:
    node = ps.device_node(device="cpu:5", replicas=4)(lambda x: x)
    with pytest.raises(ps.DeviceError, match=r"replicas=4 needs 4 devices from cpu:5 on, and there are 3: .*\"cpu:7\""):
        await engine.run(ps.graph(node)(np.zeros(1)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *[
            ({option: value}, ValueError, f"has {option}={re.escape(repr(value))}: a whole number of at least 1")
            for option in ("replicas", "prefetch")
            for value in (0, "2", 2.0, True, None)
        ],
        ({"donate": "x"}, TypeError, "has donate='x': True or False.*actor.*with donate_argnums="),
        ({"donate": (0,)}, TypeError, r"has donate=\(0,\): True or False"),
        ({"pure": None}, TypeError, "has pure=None: True or False"),
        ({"static": 3}, TypeError, "has static=3: a tuple of names of parameters"),
        ({"static": ("x", 0)}, TypeError, r"has static=\('x', 0\): a tuple of names of parameters"),
        ({"static": ("y",)}, TypeError, "static='y' is no parameter of it; it has x"),
        ({"batch": 8}, TypeError, r"has batch=8: a Batch, such as penstock.Batch\(max_size=32\)"),
        ({"device": ["cpu"]}, TypeError, r"has device=\['cpu'\]: the name of a device, a jax.Device"),
        ({"device": 3}, TypeError, "has device=3: the name of a device, a jax.Device"),
        ({"static": "x"}, TypeError, r"has static='x': a tuple of names of parameters, as in static=\('x',\)"),
        ({"sample_input": np.ones(2)}, TypeError, r"has a ndarray: for a single argument, write sample_input=\(argum"),
        ({"sample_input": [np.ones(2)]}, TypeError, r"has a ndarray: for a single argument, write sample_input=\(arg"),
        ({"replicas": 2, "device": MESH}, TypeError, "has replicas=2, and runs on a mesh, whose devices compute to"),
    ],
)
def test_options_that_do_not_fit_are_refused_when_the_node_is_decorated(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"device node 'wrong'.*{message}"):
        ps.device_node(name="wrong", **options)(lambda x: x)
