"""A process is forked: the parent keeps its threads, workers and items, and the child works."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [sys.executable, "-m", "tests.bad_days.forking"]

# `os.fork` is harder: the child exits as its parent does. Other tests here fork by multiprocessing.
both_ways = pytest.mark.parametrize("way", ["os.fork", pytest.param("multiprocessing", marks=pytest.mark.long)])


@pytest.fixture
def gates(tmp_path: Path) -> list[str]:
    """Make two named pipes: at one, a node says that it has begun; at the other, it waits."""
    gates = [tmp_path / "begun", tmp_path / "go_on"]
    for gate in gates:
        os.mkfifo(gate)
    return [str(gate) for gate in gates]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAMS, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )  # fmt: skip


@both_ways
def test_a_forked_child_that_exits_leaves_workers_and_items_of_its_parent_alone(way: str, gates: list[str]) -> None:
    done = run("in_flight", way, *gates)
    assert (done.returncode, done.stdout) == (0, "went on\n1 1 0 0\n"), done.stderr
    # A child of `os.fork` has the tasks of its parent, too, and asyncio reports that they did not end.
    assert "AssertionError" not in done.stderr


@both_ways
def test_a_forked_child_has_threads_and_workers_of_its_own(way: str) -> None:
    done = run("work_in_child", way)
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked\n", "")


def test_a_child_that_leaves_its_handler_in_a_thread_runs_no_items_of_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "items"
    done = run("in_thread_handler", str(log))
    assert (done.returncode, done.stdout) == (0, "1 0 0 0\n"), done.stderr
    assert "was forked in a handler, and left it" in done.stderr
    assert log.read_text() == "0123"


def test_a_child_that_is_forked_while_a_worker_starts_has_workers_of_its_own() -> None:
    done = run("while_a_worker_starts")
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_a_worker_ends_with_its_parent_though_a_forked_child_lives_on(gates: list[str]) -> None:
    command = [*PROGRAMS, "living_child", *gates]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker, child = (os.pidfd_open(int(parent.stdout.readline())) for _ in range(2))
        try:
            parent.kill()
            poller = select.poll()
            poller.register(worker, select.POLLIN)
            assert poller.poll(20_000), "the worker outlived its parent"
        finally:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(worker)
            os.close(child)


@pytest.mark.parametrize("started", ["by an array", pytest.param("by a node", marks=pytest.mark.long)])
def test_a_device_node_where_jax_had_started_before_the_fork_is_an_error_with_the_remedy(started: str) -> None:
    done = run("device", started)
    assert (done.returncode, done.stderr) == (0, "")
    *_, error, is_in_status = done.stdout.splitlines()
    assert is_in_status == "True"
    assert "JAX had started before this process was forked" in error
    assert "gunicorn without --preload" in error


def test_a_device_node_in_a_forked_child_works_where_jax_was_only_imported() -> None:
    done = run("device", "not at all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")
