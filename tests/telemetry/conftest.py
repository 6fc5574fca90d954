"""The virtual time of tests of profiles."""

from collections.abc import Iterator

import pytest

from tests.telemetry.virtual_time import VirtualTime, telling


@pytest.fixture
def virtual() -> Iterator[VirtualTime]:
    now = VirtualTime()
    with telling(now):
        yield now
