"""The fixture `explore`, for every test of a promise."""

import pytest

from tests.promises.exploring import Explorer, seed_to_replay


@pytest.fixture
def explore(request: pytest.FixtureRequest, effort: int) -> Explorer:
    """Runs an async function under many seeds; see `tests.promises.exploring`."""
    return Explorer(request.node.nodeid, effort, seed_to_replay())
