"""Tests of advice run on the same simulated devices as the tests of devices."""

from tests.devices.conftest import devices_have_started

__all__ = ["devices_have_started"]
