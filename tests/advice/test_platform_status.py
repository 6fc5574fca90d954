"""Status reports the platform, with and without JAX, and changes nothing."""

import dataclasses
import os

import pytest

from penstock import devices
from penstock.devices.self_check import SelfCheck
from tests.devices.processes import run_program

jax = pytest.importorskip("jax")

READ = """
import os
os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)  # set by the JAX of the test's own process
before = dict(os.environ)
from penstock import devices
found = devices.status()
devices.select()
devices.benchmark(seconds=0.01)
assert found.devices, found
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""
PASSIVE = """
import sys
from penstock import devices
found = devices.status(start_backend=False)
print("jax" in sys.modules, found.devices, found.default_platform, found.jax_version, found.recommendations)
"""


def test_it_has_the_devices_of_jax() -> None:
    found = devices.status()
    assert found.jax_version == jax.__version__
    assert found.default_platform == jax.default_backend()
    assert devices.by_platform()["cpu"] == jax.devices("cpu")
    cpus = [device for device in found.devices if device.platform == "cpu"]
    assert [device.name for device in cpus] == [f"cpu:{index}" for index in range(8)]
    assert [devices.select(device.name).id for device in cpus] == [device.id for device in cpus]
    assert all(device.is_local and device.process == 0 for device in cpus)
    assert ("cpu", True) in [(check.kind, check.passed) for check in found.self_checks]
    assert "simulated-devices" in [advice.code for advice in found.recommendations]
    for part in (jax.__version__, "self-check cpu  right values", "cpu:7", "simulated-devices: "):
        assert part in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.jax_version = "2"


def test_reading_changes_neither_environment_nor_configuration() -> None:
    environment, configuration = dict(os.environ), dict(jax.config.values)
    devices.status()
    devices.select("cpu:1")
    devices.DeviceMesh(shape=(2,), axis_names=("data",), device="cpu").resolve()
    devices.benchmark("cpu", seconds=0.01)
    assert dict(os.environ) == environment
    assert dict(jax.config.values) == configuration


@pytest.mark.parametrize("variables", [{}, pytest.param({"TPU_SKIP_MDS_QUERY": "0"}, marks=pytest.mark.long)])
def test_reading_changes_nothing_when_it_is_what_loads_jax(variables: dict[str, str]) -> None:
    run_program(READ, **variables)


def test_without_starting_a_backend_jax_is_not_even_loaded() -> None:
    assert run_program(PASSIVE) == f"False () None {jax.__version__} ()\n"


def test_a_jax_that_computes_wrong_values_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SelfCheck(lambda device, matrix: matrix[0])
    monkeypatch.setattr("penstock.devices.self_check.SELF_CHECK", wrong)
    found = devices.status()
    assert [check.passed for check in found.self_checks] == [False] * len(found.self_checks)
    assert "wrong-values" in [advice.code for advice in found.recommendations]
    assert "WRONG VALUES" in str(found)
