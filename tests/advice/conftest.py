"""Tests of advice: on the same simulated devices as those of devices."""

from tests.devices.conftest import eight_cpu_devices

__all__ = ["eight_cpu_devices"]
