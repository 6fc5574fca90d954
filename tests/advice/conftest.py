"""Tests of advice run on the same simulated devices as the tests of devices."""

from tests.devices.conftest import eight_cpu_devices

__all__ = ["eight_cpu_devices"]
