"""Which device or mesh a name means, and where nodes without a device run; errors list the devices that exist."""

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine
from tests.devices.processes import run

from .kit import graph_of


def cpus() -> list:
    return jax.devices("cpu")


def test_auto_is_the_first_device_of_the_best_platform() -> None:
    assert devices.select() == devices.select("auto") == jax.devices()[0]


@pytest.mark.several_devices
@pytest.mark.parametrize(("name", "index"), [("cpu", 0), ("cpu:0", 0), ("cpu:7", 7), ("CPU:3", 3)])
def test_a_name_is_a_platform_and_a_number(name: str, index: int) -> None:
    assert devices.select(name) == cpus()[index]


@pytest.mark.several_devices
def test_devices_and_meshes_of_jax_are_returned_as_they_are_and_a_device_mesh_is_resolved() -> None:
    assert devices.select(cpus()[5]) is cpus()[5]
    mesh = jax.sharding.Mesh(np.array(cpus()[:2]), ("data",))
    assert devices.select(mesh) is mesh
    mesh = devices.select(devices.DeviceMesh(shape=(2,), axis_names=("data",), device="cpu"))
    assert list(mesh.devices) == cpus()[:2]


@pytest.mark.several_devices
@pytest.mark.parametrize(
    "name", ["gpu", "gpu:0", "cuda:1", "rocm", "tpu", "abacus", "", "cpu:8", "cpu:-1", "cpu:", "cpu:x"]
)
def test_a_device_that_is_not_there_is_an_error_that_lists_those_that_are(name: str) -> None:
    if jax.default_backend() != "cpu" and not name.startswith("cpu"):
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ps.DeviceError) as caught:
        devices.select(name)
    assert repr(name) in str(caught.value)
    assert '"cpu:0", "cpu:1", "cpu:2"' in str(caught.value)
    assert '"cpu:7"' in str(caught.value)


@pytest.mark.parametrize("thing", [0, None, ["cpu"]])
def test_what_is_no_device_is_a_type_error(thing) -> None:
    with pytest.raises(TypeError, match=r"select\(.*the name of a device, a jax\.Device"):
        devices.select(thing)


def test_a_platform_that_cannot_start_is_told_with_who_asked_for_it() -> None:
    program = """
from penstock import devices
found = devices.status()
print(found.devices, *found.recommendations)
devices.select("cpu")
"""
    done = run("-c", program, JAX_PLATFORMS="abacus")
    assert done.stdout.startswith("() backend-failed: ")
    assert "Unset JAX_PLATFORMS" in done.stdout
    assert re.search(r"DeviceError: JAX cannot start its backend.*says 'abacus'.*Unset JAX_PLATFORMS", done.stderr)


def mesh(shape, names, **options) -> devices.DeviceMesh:
    return devices.DeviceMesh(shape=shape, axis_names=names, device="cpu", **options)


@pytest.mark.several_devices
def test_it_resolves_to_a_mesh_of_jax_with_auto_axes() -> None:
    resolved = mesh((4, 2), ("data", "model")).resolve()
    assert dict(resolved.shape) == {"data": 4, "model": 2}
    assert resolved.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert set(resolved.devices.flat) == set(jax.devices("cpu"))
    assert resolved == mesh((4, 2), ("data", "model")).resolve()
    assert set(mesh((3,), ("data",)).resolve().devices.flat) == set(jax.devices("cpu")[:3])


def test_it_is_a_value() -> None:
    one, same = mesh((4, 2), ("data", "model")), mesh([4, 2], ["data", "model"])
    assert one == same
    assert hash(one) == hash(same)
    assert one != mesh((2, 4), ("data", "model"))
    assert one.size == 8
    with pytest.raises(AttributeError):
        one.shape = (1, 1)


@pytest.mark.several_devices
def test_too_few_devices_are_listed_with_the_remedy() -> None:
    with pytest.raises(ps.DeviceError) as caught:
        mesh((8, 2), ("data", "model")).resolve()
    needs = "shape (8, 2) needs 16 devices"
    for part in (needs, "there are 8", '"cpu:7"', '"jax_num_cpu_devices", 16', "smaller shape"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((), (), "whole number of at least 1"),
        ((4, 0), ("a", "b"), "whole number of at least 1"),
        ((2.0,), ("a",), "whole number of at least 1"),
        ((True,), ("a",), "whole number of at least 1"),
        ((4, 2), ("a",), "one name for each axis"),
        ((4, 2), ("a", "a"), "all different"),
    ],
)
def test_what_does_not_fit_together_is_refused_at_once(shape, names, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh(shape, names)


def test_a_platform_that_is_none_or_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names one device; a mesh takes a platform: 'gpu'"):
        devices.DeviceMesh(shape=(1,), axis_names=("data",), device="gpu:0")
    with pytest.raises(ps.DeviceError, match=r"no platform 'abacus'; this process has.*cpu:0"):
        devices.DeviceMesh(shape=(1,), axis_names=("data",), device="abacus").resolve()


X = np.ones(2, np.float32)


anywhere = ps.device_node(lambda x: x + 1)
on_five = ps.device_node(device="cpu:5")(lambda x: x + 1)


@ps.node
def place(x: jax.Array) -> int:
    [device] = x.devices()
    return device.id


where = anywhere >> place


where_of_all = graph_of(lambda xs: ps.map_each(where, xs), awaits=True)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Resets options that a test sets for the process."""
    yield
    ps.set_execution_options()


@pytest.mark.several_devices
async def test_every_level_says_where_a_node_without_a_device_runs() -> None:
    async def found(**options: Any) -> int:
        return await own.run(where(X), **options)

    async with engine.Engine() as own:
        assert await found() == 0
        ps.set_execution_options(device_strategy="cpu:1")
        assert await found() == 1
    async with engine.Engine(device_strategy="cpu:2") as own:
        assert await found() == 2
        with ps.execution_options(device_strategy="cpu:3"):
            assert await found() == 3
            assert await found(device_strategy="cpu:4") == 4
            assert await found(device_strategy="auto") == 0
        assert await found() == 2


@pytest.mark.several_devices
async def test_runs_streams_and_deployments_take_it() -> None:
    @ps.node
    async def twice(x: jax.Array) -> AsyncIterator[int]:
        for _ in range(2):
            yield place(x)

    places = anywhere >> twice
    assert [value async for value in engine.stream(places(X), device_strategy="cpu:6")] == [6, 6]
    assert await engine.run(where_of_all([X, X]), device_strategy="cpu:1") == [1, 1]
    async with engine.stream((where_of_all([X]) for _ in range(3)), device_strategy="cpu:2") as results:
        assert [result async for result in results] == [[2]] * 3
    async with engine.deploy(where, device_strategy="cpu:3") as service:
        with ps.execution_options(device_strategy="cpu:4"):  # the deployment keeps its own strategy
            assert await service(X) == 3
        with pytest.raises(ps.OptionsError, match=r"'device_strategy' does not apply to service\.run"):
            await service.run(where(X), device_strategy="cpu:4")


@pytest.mark.several_devices
async def test_a_device_of_its_own_stays_and_copies_follow_the_strategy() -> None:
    copied = ps.device_node(replicas=2)(lambda x: x + 1)
    of = graph_of(lambda x: [place(on_five(anywhere(x))), place(copied(x))])
    first, second = await engine.run(of(X), device_strategy="cpu:3")
    assert first == 5
    assert second in (3, 4)
    with pytest.raises(ps.DeviceError, match="replicas=2 needs 2 devices from cpu:7 on"):
        await engine.run(of(X), device_strategy="cpu:7")


@pytest.mark.several_devices
async def test_what_is_compiled_before_the_first_call_is_compiled_for_it() -> None:
    node = ps.device_node(sample_input=(X,))(lambda x: x - 1)

    of = node >> place
    async with engine.deploy(of, warmup=True, device_strategy="cpu:2") as service:
        assert await service(X) == 2
    assert node.compile_statistics().misses == 1
    with ps.execution_options(device_strategy="cpu:3"):
        await node.warmup(X)
        assert await engine.run(of(X)) == 3
    assert node.compile_statistics().misses == 2


async def test_a_strategy_that_names_no_device_is_an_error_that_lists_those_that_are() -> None:
    for name in ("cpu:99", "gppu"):
        with pytest.raises(ps.DeviceError, match=f'there is no device {name!r}; this process has .*"cpu:0"'):
            await engine.run(where(X), device_strategy=name)
