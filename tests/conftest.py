"""Settings and checks for every test: both event loops, no leaks, and the effort that the caller asks for."""

import asyncio
import gc
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker

import pytest
import uvloop
from hypothesis import settings
from pytest_asyncio import is_async_test

from tests import leaks
from tests.leaks import Holdings, left_since, loop_errors
from tests.telemetry.virtual_time import VirtualTime, telling
from tests.tracing import Tracing

# A factor for the number of random examples and interleavings; `make test-long` sets it.
EFFORT = int(os.environ.get("PENSTOCK_TEST_EFFORT", "1"))

# The gate tries the same examples every time, so that it never fails by luck; the long run looks for new ones.
settings.register_profile("penstock", deadline=None, derandomize=EFFORT == 1, max_examples=50 * EFFORT, print_blob=True)
settings.load_profile("penstock")

# Hundreds of tests start a Python of their own. If Python may not write bytecode, each of these tests compiles the
# package anew, which takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Folders and files whose code does the same on both loops: each of their tests runs on one loop. Only threads, other
# processes and devices wait there, or nothing waits.
ON_ONE_LOOP = {
    "advice", "chat", "devices", "examples", "studio", "telemetry", "typing", "test_extension.py", "test_faults.py",
    "test_forks.py", "test_nodes.py", "test_plan.py", "test_postgres.py", "test_process_nodes.py", "test_processes.py",
    "test_random_graphs.py", "test_redis.py", "test_runs.py", "test_staleness.py",
    "test_threads.py", "test_threads_and_processes.py", "test_trace_values.py", "test_written_before.py",
}  # fmt: skip


@pytest.fixture(scope="session")
def effort() -> int:
    """A factor for the number of seeds, cancels or rounds that a test tries; 1 in `make test`."""
    return EFFORT


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Gives every `async def` test both loops; `@pytest.mark.asyncio(loop_factories=["uvloop"])` picks one.

    Tests of code that starts tasks also run with eager tasks, if Python has them (3.12). An eager task runs until it
    first waits before `create_task` returns.
    """
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    starts_tasks = item.path.parent.name in {"runtime", "promises"} or "stream" in item.path.name
    if sys.version_info >= (3, 12) and starts_tasks:
        loops["eager"] = _eager_loop
    return loops


@pytest.hookimpl(optionalhook=True)  # there is no such hook without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Runs one worker more than there are cores: many tests wait for a process, a socket or a moment."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


def _eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    return loop


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a test on its second loop to `make test-long` where it would only show the same again.

    These are the tests of `ON_ONE_LOOP`, and tests with parameters, whose cases take turns on the loops. All tests in
    tests/promises run on both loops. The names of the test and its case decide the loop, so the loop is the same
    however tests are selected, and each case has exactly one.
    """
    for item in items:
        if not isinstance(item, pytest.Function) or not is_async_test(item) or item.path.parent.name == "promises":
            continue
        marker = item.get_closest_marker("asyncio")
        if marker is not None and "loop_factories" in marker.kwargs:
            continue
        loop, _, case = item.callspec.id.partition("-")  # the plugin names the loop first
        if case or {item.path.parent.name, item.path.name} & ON_ONE_LOOP:
            loops = list(pytest_asyncio_loop_factories(config, item))
            if loops.index(loop) != zlib.crc32(f"{item.originalname}[{case}]".encode()) % len(loops):
                item.add_marker("long")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Makes the objects that live as long as the process, so that no test is blamed for leaving them behind."""
    resource_tracker.ensure_running()  # one helper process of multiprocessing, with a pipe to it
    uvloop.new_event_loop().close()  # libuv's pipe for signals


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the collector forget all modules, which makes a full collection after a test cost next to nothing."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def how_fast_the_machine_is_decides_nothing() -> Iterator[None]:
    """Lets all calls of one turn of the loop begin in it, even on a slow machine, so that they form one batch.

    And no handler is reported to hold the loop because another program has held the processor.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.actors.tasks.MOST_EAGER_SECONDS", 60.0)
        patch.setattr("penstock.actors.node_actor.BLOCKING_SECONDS", 3600.0)
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a thread, a file descriptor or a child process, or an error that no one has seen.

    The fixture is set up before the event loop, and checks after the loop was closed.
    """
    with loop_errors() as errors:
        before = Holdings.now()
        yield
        gc.collect()  # the finalizer of a task logs that nobody awaited it
        gc.freeze()  # the next collection skips modules that are loaded by now, so it is quick
        left = left_since(before)
    if left or errors:
        pytest.fail("\n  ".join(["the test left behind:", *left, *errors]), pytrace=False)


@pytest.fixture(autouse=True)
def no_task_left_behind(nothing_left_behind: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails an async test that leaves a task; other tests have no loop.

    The fixture asks pytest-asyncio for the loop. An `async def` fixture would run the loop twice more for each test.
    """
    runner = request.getfixturevalue("_function_scoped_runner") if is_async_test(request.node) else None
    yield
    if runner is not None and asyncio.all_tasks(runner.get_loop()):
        runner.run(_tasks_end())


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    """Sets up tracing for one test only."""
    with Tracing.set_up() as found:
        yield found


@pytest.fixture
def virtual() -> Iterator[VirtualTime]:
    """The time that profiles, looks and statistics are told."""
    now = VirtualTime()
    with telling(now):
        yield now


async def _tasks_end() -> None:
    loop = asyncio.get_running_loop()
    give_up = time.monotonic() + leaks.PATIENCE_SECONDS
    while (left := asyncio.all_tasks(loop) - {asyncio.current_task()}) and time.monotonic() < give_up:
        await asyncio.sleep(0)
    if left:
        pytest.fail("\n  ".join(["the test left behind:", *map(repr, left)]), pytrace=False)
