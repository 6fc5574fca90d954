"""The search on three local raylets; one raylet is killed during the search."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "cluster_search.py"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_file_is_lost_with_the_raylet_that_is_killed() -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "penstock[ray]"')
    run = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, timeout=240, start_new_session=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "killing one of 3 raylets" in run.stdout
    assert " 0 lost" in run.stdout
