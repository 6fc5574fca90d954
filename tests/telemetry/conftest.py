"""Fixtures that tests of profiles share."""

from collections.abc import Iterator

import pytest

from tests.telemetry.virtual_time import Clock, VirtualTime, telling


@pytest.fixture
def virtual() -> Iterator[VirtualTime]:
    now = VirtualTime()
    with telling(now):
        yield now


@pytest.fixture
def clock() -> Iterator[Clock]:
    now = Clock()
    with telling(now):
        yield now
