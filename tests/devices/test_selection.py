"""A device is chosen by name; the error for a missing device lists the devices that exist."""

import re

import numpy as np
import pytest

import penstock as ps
from penstock import devices
from tests.devices.processes import run

jax = pytest.importorskip("jax")


def cpus() -> list:
    return jax.devices("cpu")


def test_auto_is_the_first_device_of_the_best_platform() -> None:
    assert devices.select() == devices.select("auto") == jax.devices()[0]


@pytest.mark.parametrize(("name", "index"), [("cpu", 0), ("cpu:0", 0), ("cpu:7", 7), ("CPU:3", 3)])
def test_a_name_is_a_platform_and_a_number(name: str, index: int) -> None:
    assert devices.select(name) == cpus()[index]


def test_devices_and_meshes_of_jax_are_returned_as_they_are_and_a_device_mesh_is_resolved() -> None:
    assert devices.select(cpus()[5]) is cpus()[5]
    mesh = jax.sharding.Mesh(np.array(cpus()[:2]), ("data",))
    assert devices.select(mesh) is mesh
    mesh = devices.select(devices.DeviceMesh(shape=(2,), axis_names=("data",), device="cpu"))
    assert list(mesh.devices) == cpus()[:2]


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
