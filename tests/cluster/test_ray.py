"""Nodes on workers of a local Ray, which starts once for a run of pytest: see `scenarios.py`."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.scenarios import SCENARIOS

pytest.importorskip("ray", reason='needs Ray: pip install "penstock[ray]"')
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each scenario went; the first worker of pytest to come runs them, and others wait for it."""
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
                # A group of its own: Ray leaves processes behind if it is killed, and they are in the group.
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
