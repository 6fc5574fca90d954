"""Fixtures that tests of profiles share."""

from collections.abc import Iterator

import pytest

from penstock.actors import chains
from tests.telemetry.virtual_time import VirtualTime

CLOCKED = (
    "actors.channel", "actors.attempts", "actors.chains", "actors.execution",
    "actors.executions", "actors.threads", "actors.worker", "engine.call_stream", "engine.executions",
    "engine.pipeline", "engine.statistics", "telemetry.profiling.durations", "telemetry.profiling.watching",
    "telemetry.profiling.recording", "telemetry.profiling.monitor", "engine.wiring",
)  # fmt: skip


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualTime]:
    now = VirtualTime()
    for module in CLOCKED:
        monkeypatch.setattr(f"penstock.{module}.perf_counter", now)
    monkeypatch.setattr("penstock.telemetry.profiling.watching.thread_seconds", lambda thread: 0.0)
    # In virtual time, the use of the GIL in real time has no meaning.
    monkeypatch.setattr("penstock.telemetry.profiling.watching.GilWatch._look", lambda *_: (0.0, {}))
    chains._compiled.cache_clear()
    yield now
    chains._compiled.cache_clear()
