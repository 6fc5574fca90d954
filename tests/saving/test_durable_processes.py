"""Durable loops over several processes: killed, refused, taken over, asked in one process and answered in another."""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.saving.agents import TURNS, WORDS, RunAgent, program

ROOT = Path(__file__).parents[2]


@contextmanager
def started(file: Path | str, *arguments: str, **environment: str) -> Iterator[Any]:
    """Begins the agent in a process of its own, which is killed at the end of the block."""
    command = [sys.executable, "-c", program(), str(file), *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_is_killed_in_every_turn_comes_to_its_end(tmp_path: Path, run_agent: RunAgent) -> None:
    file = tmp_path / "loops.db"
    for turn in range(TURNS):
        said = run_agent(file, "k", DIE_IN=str(turn))
        assert said[-1] == f"turn {turn}"
        assert len(said) == (1 if turn == 0 else 2)  # the interrupted turn runs again, the turns before it do not
    assert run_agent(file, "k") == [f"turn {TURNS - 1}", f"result {WORDS}"]


def test_a_key_that_is_under_way_in_another_process_is_refused_and_taken_over_when_that_dies(
    tmp_path: Path, run_agent: RunAgent
) -> None:
    file = tmp_path / "loops.db"
    with started(file, "k", STOP_IN="2") as first:
        assert [first.stdout.readline() for _ in range(3)] == ["turn 0\n", "turn 1\n", "turn 2\n"]
        (refused,) = run_agent(file, "k")
        assert refused.startswith(f"refused the key 'k' is under way in process {first.pid}")
        assert run_agent(file, "another")[-1] == f"result {WORDS}"
        first.kill()
        # The process is a zombie: no parent has read its exit status, so it is still in the table of processes.
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert run_agent(file, "k") == [*(f"turn {number}" for number in range(2, TURNS)), f"result {WORDS}"]


def test_an_agent_asks_and_its_answer_outlasts_the_process_that_was_given_it(
    tmp_path: Path, run_agent: RunAgent
) -> None:
    file = tmp_path / "loops.db"
    asked = ["turn 3", "asked k what comes in turn 3?"]
    assert run_agent(file, "k", ASK_IN="3")[-2:] == asked
    assert run_agent(file, "k", ASK_IN="3") == asked  # the call still waits for its answer
    assert run_agent(file, "k", "peace", ASK_IN="3", DIE_IN="3") == ["turn 3"]
    assert run_agent(file, "k", ASK_IN="3") == ["turn 3", "turn 4", "result word0 word1 word2 peace word4"]


def test_a_forked_child_opens_the_file_anew_and_leaves_that_of_its_parent_alone(tmp_path: Path) -> None:
    file = tmp_path / "loops.db"
    command = [sys.executable, "-c", program("fork"), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"child {WORDS}\nparent {WORDS}\n", "")
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.long
def test_a_process_that_is_killed_at_any_moment_runs_no_turn_again_whose_state_was_kept(
    tmp_path: Path, effort: int
) -> None:
    for seed in range(effort):
        file, chance, last = tmp_path / f"{seed}.db", random.Random(seed), 0
        while True:
            with started(file, "k") as process:
                said = [process.stdout.readline()]
                if said == [f"result {WORDS}\n"]:
                    break
                # The turn of the kill, or the turn after it, if its state was stored before the kill.
                assert said[0] in (f"turn {last}\n", f"turn {last + 1}\n")
                said += [process.stdout.readline() for _ in range(chance.randrange(3))]
                for _ in range(chance.randrange(200_000)):  # a busy wait, so that the kill comes at any moment
                    pass
                process.kill()
                said += process.stdout.readlines()
                last = max(int(line.removeprefix("turn ")) for line in said if line.startswith("turn "))
                if any(line.startswith("result") for line in said):
                    break
