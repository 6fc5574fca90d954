"""Snapshots of arrays lie on the same simulated devices as the tests of devices."""

import tests.devices.conftest  # noqa: F401 - sets their number before a backend of JAX starts
