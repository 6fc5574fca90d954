"""Tests with JAX: on eight simulated CPU devices, and skipped where JAX is not installed.

With `PENSTOCK_TEST_DEVICES=there`, which `make test-devices` sets, they run on the devices of the machine. Tests that
need several are marked `several_devices`: that target runs them on simulated devices, in a process of their own.
"""

import importlib.util
import os

import pytest

from penstock import devices

CPU_DEVICES = 8
ARE_SIMULATED = os.environ.get("PENSTOCK_TEST_DEVICES") != "there"

if ARE_SIMULATED and importlib.util.find_spec("jax"):
    import jax

    # Set before a test module of this folder is imported: the number only counts before the backend starts.
    # Folders whose tests need several devices import this module in their conftest.py.
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


@pytest.fixture(scope="session", autouse=True)
def devices_have_started() -> None:
    """Starts JAX's backend before the first test, so that no test is blamed for its threads and descriptors."""
    jax = pytest.importorskip("jax", reason='these tests need JAX: pip install "penstock[jax]"')
    assert not ARE_SIMULATED or len(jax.devices("cpu")) == CPU_DEVICES
    jax.block_until_ready(jax.numpy.zeros(2) + 1)
    devices.select("cpu")  # warns here, and in no test, where JAX's own programs may compute wrong values
