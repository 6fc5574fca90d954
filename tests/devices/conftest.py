"""Tests with JAX: on eight simulated CPU devices, and skipped where JAX is not installed."""

import pytest

CPU_DEVICES = 8


@pytest.fixture(scope="session", autouse=True)
def eight_cpu_devices() -> None:
    """Starts JAX's backend with eight CPU devices, before a test could be blamed for its threads and descriptors.

    The number must be set before the backend starts. So a test elsewhere that uses JAX does it in a process of its own.
    """
    jax = pytest.importorskip("jax", reason='these tests need JAX: pip install "penstock[jax]"')
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    assert len(jax.devices("cpu")) == CPU_DEVICES
    jax.block_until_ready(jax.numpy.zeros(2) + 1)
