"""A short soak, as `make soak` runs it for minutes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(150)
def test_a_loaded_and_disturbed_deployment_loses_nothing_and_keeps_nothing() -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0.1", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
