"""Failing machines: each test runs a scenario of `machines.py` on local raylets, in a process of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.machines import SCENARIOS

pytestmark = [
    pytest.mark.long,  # each test starts a Ray of its own
    pytest.mark.timeout(240),
    # Only the programs import Ray.
    pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "penstock[ray]"'),
]
ROOT = Path(__file__).parents[2]
CUTS = [name for name in SCENARIOS if name.startswith("a_link_that_is_cut")]
ENDS = "a_killed_head_ends_the_driver"
OTHERS = [name for name in SCENARIOS if name not in (*CUTS, ENDS)]


def run(name: str, folder: Path) -> tuple[int, str]:
    """Runs a scenario; returns its exit status and its output. Processes that it leaves behind are killed."""
    log = folder / "log"
    with log.open("w") as output:  # no pipe: processes of Ray may keep a pipe open for a while
        program = [sys.executable, "-m", "tests.cluster.machines", name, str(folder)]
        running = subprocess.Popen(program, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            status = running.wait(85)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    return status, log.read_text()


@pytest.mark.parametrize("name", [*OTHERS, *CUTS])
def test_what_becomes_of_calls(name: str, tmp_path: Path) -> None:
    if name in CUTS and (os.geteuid() or shutil.which("ip") is None):
        pytest.skip("network namespaces need root, and the program `ip` of iproute2")
    status, told = run(name, tmp_path)
    assert (tmp_path / "done").exists(), told[-4000:]
    assert not status


def test_a_driver_without_its_head_is_ended_by_ray(tmp_path: Path) -> None:
    status, told = run(ENDS, tmp_path)
    assert status == 1, told[-4000:]
    assert "GCS may have been killed" in told
