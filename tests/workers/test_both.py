"""Worker processes and the workers of a cluster: what both promise, and then what only processes promise.

Further promises of processes alone are in `bad_days/test_threads_and_processes.py`: signals to a whole group.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from penstock.telemetry import names
from tests.bad_days import process_nodes
from tests.cluster.test_ray import outcomes  # noqa: F401 - the fixture: one Ray runs all scenarios
from tests.runtime import hedged_process
from tests.tracing import Tracing, attributes_of
from tests.workers import jobs
from tests.workers.both import BOTH, act, note

SCENARIOS = pytest.mark.parametrize("scenario", BOTH, ids=lambda one: one.__name__)


@SCENARIOS
async def test_on_worker_processes(scenario: Callable[[str, Path], Awaitable[None]], tmp_path: Path) -> None:
    await scenario("process", tmp_path)


@pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "penstock[ray]"')
@pytest.mark.timeout(300)
@SCENARIOS
def test_on_a_cluster(scenario: Callable[[str, Path], Awaitable[None]], outcomes: dict[str, str]) -> None:  # noqa: F811
    assert not outcomes[scenario.__name__], outcomes[scenario.__name__]


# Only processes promise these.


@pytest.mark.parametrize(
    ("node", "way", "code"),
    [
        (process_nodes.fork, "raise", 1),
        (process_nodes.fork, "return", 0),
        (process_nodes.fork, "exit", 3),
        (process_nodes.fork_in_batch, "raise", 1),
        (process_nodes.Forks, "raise", 1),
        (process_nodes.fork_in_reducer, "return", 0),
    ],
)
async def test_a_process_that_a_handler_has_forked_answers_nothing(node: Any, way: str, code: int) -> None:
    async with engine.Engine(max_processes=1) as own:
        forked = ps.graph(node() if isinstance(node, type) else node)
        async with own.deploy(forked) as service:
            results = await asyncio.gather(*(service((x, way if x == 2 else "")) for x in range(6)))
        assert results == [(x, code if x == 2 else 0) for x in range(6)]
        processes = own.statistics().processes
        assert processes is not None
        assert (processes.died, processes.killed) == (0, 0)


@pytest.mark.parametrize("slow", ["first", "second"])
async def test_a_process_that_loses_is_not_killed(
    slow: str, tmp_path: Any, tracing: Tracing, caplog: pytest.LogCaptureFixture
) -> None:
    @ps.graph
    async def ask(folder: str) -> int:
        return hedged_process.one_is_slow(folder, slow)

    async with engine.Engine(max_processes=2) as e, e.deploy(ask) as service:
        (tmp_path / "before").mkdir()
        (tmp_path / "before" / "go-on").touch()
        await service.run(ask(str(tmp_path / "before")))  # starts both workers
        while service.statistics().actors[0].in_flight:
            await asyncio.sleep(0.01)  # until the losing attempt has returned
        try:
            winner = await service.run(ask(str(tmp_path)))
            await testing.wait_quiescent()
            [actor] = service.statistics().actors
        finally:
            (tmp_path / "go-on").touch()
        await service.drain()
    begun, ended = [
        {int(path.name.split("-")[1]) for path in tmp_path.iterdir() if path.name.startswith(word)}
        for word in ("begun-", "ended-")
    ]
    assert winner in begun
    assert (len(begun), actor.in_flight, actor.hedged) == (2, 1, 2)
    assert ended == begun
    assert attributes_of(tracing.named("one_is_slow")[-1])[names.PROCESS_PID] == winner
    assert "ended span" not in caplog.text  # the attempt that has lost returns after the span of the step


async def test_calls_of_a_higher_priority_begin_earlier(tmp_path: Path) -> None:
    path, noting, holding = tmp_path / "noted", ps.node(runs_on="process")(jobs.note), ps.node(runs_on="process")(note)
    async with engine.Engine(max_processes=1) as e, e.deploy(ps.graph(noting), ps.graph(holding)) as service:
        first = asyncio.create_task(service.run(ps.graph(holding)(str(tmp_path), 0, "go on")))
        await testing.wait_quiescent()
        calls = [(service.run(ps.graph(noting)(str(path), number), priority=number % 3)) for number in range(9)]
        others = [asyncio.create_task(call) for call in calls]
        await testing.wait_quiescent()
        (tmp_path / "go on").touch()
        await asyncio.gather(first, *others)
    begun = [int(line.split()[0]) for line in path.read_text().splitlines()]
    assert begun == sorted(range(9), key=lambda number: (-(number % 3), number))


async def test_the_processes_of_the_default_engine_end_with_its_last_scope() -> None:
    acting = ps.graph(ps.node(runs_on="process")(act))
    async with engine.deploy(acting):
        worker = await engine.run(acting(""))
        assert await engine.run(acting("")) == worker
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert await engine.run(acting("")) != worker
