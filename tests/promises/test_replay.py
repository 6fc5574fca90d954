"""A failing seed prints the command that replays it, and the command does so; an inner session fails on purpose."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

FAILING = """
import asyncio
import pathlib

import pytest


@pytest.mark.parametrize("way", ["of two words"])
def test_that_they_never_come_in_reverse(explore, way):
    async def main():
        with pathlib.Path("seeds").open("a") as seeds:
            print(asyncio.get_running_loop().seed, file=seeds)
        order = []

        async def arrive(number):
            await asyncio.sleep(0)
            order.append(number)

        await asyncio.gather(*map(arrive, range(4)))
        assert order != sorted(order, reverse=True), f"they came as {order}"

    explore(main)
"""

CONFTEST = """
from tests.conftest import effort
from tests.promises.conftest import explore
"""


def run(command: str, folder: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PENSTOCK_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**inherited, "PATH": path, **environment}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_failing_seed_prints_the_command_that_replays_it(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nasyncio_mode = auto\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_failing.py").write_text(FAILING)
    first = run("python -m pytest -p no:cacheprovider", tmp_path)
    tried = (tmp_path / "seeds").read_text().split()
    assert tried == [str(seed) for seed in range(len(tried))]
    assert len(tried) > 1, "a seed that fails at once would be found without replaying it, too"
    command = re.search(r"replay: (.*)", first)
    assert command is not None, first
    assert command[1].startswith(f"PENSTOCK_SEED={tried[-1]} python -m pytest ")

    (tmp_path / "seeds").unlink()
    second = run(command[1], tmp_path)
    assert (tmp_path / "seeds").read_text().split() == tried[-1:]
    assert "they came as [3, 2, 1, 0]" in first
    assert "they came as [3, 2, 1, 0]" in second
