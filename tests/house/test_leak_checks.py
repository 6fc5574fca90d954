"""The checks of tests/conftest.py find leaks: an inner pytest session runs tests that leak on purpose."""

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]

LEAKING = """
import asyncio, gc, os, subprocess, sys, threading
import pytest
from tests import leaks

KEPT = []
leaks.PATIENCE_SECONDS = 1.0  # nothing of this ends

async def test_nothing():
    await asyncio.to_thread(len, "")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()

async def test_task():
    KEPT.append(asyncio.create_task(asyncio.sleep(3600)))

async def test_task_that_ends_soon():
    asyncio.create_task(asyncio.sleep(0))

async def test_swallowing_task():
    async def stay():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
    KEPT.append(asyncio.create_task(stay()))

async def test_thread():
    threading.Thread(target=RELEASE.wait, name="left-thread", daemon=True).start()

async def test_descriptor():
    KEPT.append(os.pipe())

def test_descriptor_of_a_sync_test():
    KEPT.append(os.pipe())

async def test_child():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

async def test_zombie():
    KEPT.append(os.spawnlp(os.P_NOWAIT, "true", "true"))

async def test_callback_raises():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)

async def test_error_that_nobody_retrieves():
    async def fail():
        raise ValueError("unseen")
    asyncio.create_task(fail())
    await asyncio.sleep(0)

def test_task_destroyed():
    loop = asyncio.new_event_loop()
    async def forever():
        await loop.create_future()
    task = loop.create_task(forever())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del task


async def test_coroutine_never_awaited():
    asyncio.sleep(0)

@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_only_uvloop():
    assert "uvloop" in type(asyncio.get_running_loop()).__module__

async def test_which_loop(request):
    assert ("uvloop" in type(asyncio.get_running_loop()).__module__) == ("uvloop" in request.node.name)

RELEASE = threading.Event()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs the leaking tests under this project's configuration; returns the complaint about each, or ""."""
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "test_leaking.py").write_text(textwrap.dedent(LEAKING))
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n0"]
    options = ["-c", str(ROOT / "pyproject.toml"), f"--junitxml={report}", str(folder)]
    # An inner session must not take itself for a worker of the outer one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout + done.stderr
    complaints: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        messages = [problem.get("message", "") + (problem.text or "") for problem in case]
        name = str(case.get("name"))
        complaints[name] = complaints.get(name, "") + "".join(messages)
    return complaints


COMPLAINTS = {
    "test_task": "Task pending", "test_swallowing_task": "stay", "test_thread": "thread 'left-thread'",
    "test_descriptor": "file descriptor", "test_child": "child process", "test_zombie": "child process",
    "test_callback_raises": "division by zero",
    "test_error_that_nobody_retrieves": "exception was never retrieved",
    "test_coroutine_never_awaited": "was never awaited",
}  # fmt: skip


def test_async_leaks_are_caught(outcomes: dict[str, str]) -> None:
    for (test, complaint), loop in itertools.product(COMPLAINTS.items(), ("asyncio", "uvloop")):
        assert complaint in outcomes[f"{test}[{loop}]"], test


def test_sync_leak_is_caught(outcomes: dict[str, str]) -> None:
    assert "file descriptor" in outcomes["test_descriptor_of_a_sync_test"]
    assert "Task was destroyed but it is pending" in outcomes["test_task_destroyed"]


def test_clean_tests_pass_on_both_loops(outcomes: dict[str, str]) -> None:
    clean = ["test_nothing", "test_task_that_ends_soon", "test_which_loop"]
    names = [f"{test}[{loop}]" for test in clean for loop in ("asyncio", "uvloop")]
    assert {name: outcomes[name] for name in names} == dict.fromkeys(names, "")


def test_marker_picks_one_loop(outcomes: dict[str, str]) -> None:
    assert {name: complaint for name, complaint in outcomes.items() if "only_uvloop" in name} == {
        "test_only_uvloop": ""
    }
