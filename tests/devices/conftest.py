"""Tests with JAX: on eight simulated CPU devices, and skipped where JAX is not installed."""

import importlib.util

import pytest

from penstock import devices

CPU_DEVICES = 8

if importlib.util.find_spec("jax"):
    import jax

    # Set before a test module of this folder is imported: the number only counts before the backend starts.
    # Folders whose tests need several devices import this module in their conftest.py.
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


@pytest.fixture(scope="session", autouse=True)
def eight_cpu_devices() -> None:
    """Starts JAX's backend before the first test, so that no test is blamed for its threads and descriptors."""
    jax = pytest.importorskip("jax", reason='these tests need JAX: pip install "penstock[jax]"')
    assert len(jax.devices("cpu")) == CPU_DEVICES
    jax.block_until_ready(jax.numpy.zeros(2) + 1)
    devices.select("cpu")  # warns here, and in no test, where JAX's own programs may compute wrong values
