"""Snapshots of arrays lie on the same simulated devices as the tests of devices; and agents run in forks."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.devices.conftest  # noqa: F401 - sets their number before a backend of JAX starts
from tests.forked import forking
from tests.saving.agents import MemoryStore, RunAgent, program


@pytest.fixture(scope="session")
def run_agent() -> Iterator[RunAgent]:
    """Runs a function of the agents in a process of its own, to its end or until it is killed; returns its lines."""
    with forking("tests.saving.agents") as forks:

        def run(file: Path | str, *arguments: str, function: str = "main", **environment: str) -> list[str]:
            status, said, errors = forks.run(program(function), str(file), *arguments, **environment)
            assert errors == ""
            assert status in (0, -signal.SIGKILL)
            return said.splitlines()

        yield run


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()
