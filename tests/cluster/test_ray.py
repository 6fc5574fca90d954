"""Nodes on workers of a local Ray, which starts once in a run of pytest: see `scenarios.py`."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.scenarios import SCENARIOS

# Only the programs import Ray.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "penstock[ray]"')
ROOT = Path(__file__).parents[2]

UNREACHABLE = """
import asyncio, sys
import penstock as ps
from penstock import cluster, engine

@ps.node(runs_on=cluster.ray(workers=1, address=sys.argv[1], placement_timeout_seconds=5))
def nothing(number: int) -> int:
    return number

try:
    asyncio.run(engine.run(ps.graph(nothing)(1)))
except ps.ClusterError as error:
    print(error)
"""

KILLED = """
import asyncio, os, signal, sys, time
from importlib.util import find_spec
from pathlib import Path
import penstock as ps
from penstock import cluster, engine

@ps.node(runs_on=cluster.ray(workers=2))
async def waits(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    await asyncio.sleep(600)

async def main() -> None:
    async with engine.Engine() as e, e.deploy(ps.graph(waits)) as service:
        calls = [asyncio.ensure_future(service(sys.argv[1])) for _ in range(2)]
        while not list(Path(sys.argv[1]).iterdir()):
            await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the result of each scenario. The first pytest worker runs the scenarios, and the others wait for it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "cluster"
    with (shared / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            program = [sys.executable, "-m", "tests.cluster.scenarios", str(folder)]
            with (folder / "log").open("w") as log:
                # A process group of its own: if Ray is killed, the processes that it leaves behind are in the group.
                run = subprocess.Popen(program, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
                try:
                    run.wait(240)
                finally:
                    run.kill()
                    run.wait()
    if not (folder / "outcomes.json").exists():
        pytest.fail((folder / "log").read_text()[-4000:])
    found: dict[str, str] = json.loads((folder / "outcomes.json").read_text())
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [one.__name__ for one in SCENARIOS] + ["it_ends"])
def test_on_a_local_ray(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]


def run(program: str, argument: str, log: Path) -> str:
    with log.open("w") as output:  # no pipe: processes of Ray may keep a pipe open for a while
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "typings")}
        subprocess.run(
            [sys.executable, "-c", program, argument], cwd=ROOT, env=environment,
            stdout=output, stderr=output, timeout=80, check=False, start_new_session=True,
        )  # fmt: skip
    return log.read_text()


def test_a_head_that_refuses_is_an_error_at_once(tmp_path: Path) -> None:
    assert "the head at 127.0.0.1:1 cannot be reached" in run(UNREACHABLE, "127.0.0.1:1", tmp_path / "log")


@pytest.mark.long
def test_a_head_that_says_nothing_is_an_error_after_the_time_that_was_given(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert f"the head at {address} does not answer within 5 s" in run(UNREACHABLE, address, tmp_path / "log")


@pytest.mark.long
@pytest.mark.timeout(180)
def test_no_worker_outlives_a_driver_that_is_killed_by_30_seconds(tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    told = run(KILLED, str(folder), tmp_path / "log")
    pids = [int(one.name) for one in folder.iterdir()]
    assert pids, told
    give_up = time.monotonic() + 30
    while left := [pid for pid in pids if Path("/proc", str(pid)).exists()]:
        assert time.monotonic() < give_up, left
        time.sleep(0.1)
