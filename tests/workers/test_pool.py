"""Worker processes: values to a worker and back, deaths, cancellation, clean ends."""

import asyncio
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock._errors import EngineClosedError, WorkerDied
from penstock.workers import messages
from penstock.workers.messages import process_target
from penstock.workers.pool import ProcessPool
from tests.kit import outcomes, without_the_collector
from tests.workers import jobs

STATM = Path("/proc/self/statm")


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    async with aclosing(ProcessPool(1)) as pool:
        yield pool


async def call(pool: ProcessPool, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await pool.run(process_target(fn), args, kwargs)


class Door:
    """A Unix socket that a job in another process connects to, so that a test knows that the job runs."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.knocks: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def running_pid(self) -> int:
        """Wait until `jobs.block` runs, and return the id of its process."""
        reader, writer = await self.knocks.get()
        worker = int(await reader.read(20))
        writer.close()
        return worker

    async def release(self, number: int = 1) -> None:
        """Wait until `number` calls of `jobs.hold` run at a time, then let them return."""
        writers = [(await self.knocks.get())[1] for _ in range(number)]
        for writer in writers:
            writer.write(b"x")
            writer.close()
            await writer.wait_closed()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    door = Door(str(tmp_path / "door"))
    async with await asyncio.start_unix_server(lambda *streams: door.knocks.put_nowait(streams), door.path):
        yield door


def exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# Values


async def test_results_come_back(pool: ProcessPool) -> None:
    assert await call(pool, jobs.add, 1, b=2) == 3
    assert await call(pool, jobs.pid) != os.getpid()
    assert await call(pool, jobs.shadowed.fn, 5) == -5
    assert await call(pool, jobs.Tools.triple, 5) == 15
    collects_after, *_ = await call(pool, gc.get_threshold)
    assert collects_after > gc.get_threshold()[0]


async def test_arrays_travel_and_stay_writable(pool: ProcessPool) -> None:
    for number in (0, 10, 1_000, 1_000_000):
        array = np.arange(number, dtype=np.float64).reshape(2, -1)
        doubled = await call(pool, jobs.double, array)
        np.testing.assert_array_equal(array.ravel(), np.arange(number))
        np.testing.assert_array_equal(doubled, 2 * array)
        doubled += 1  # its memory is its own

        frozen = np.ones(number)
        frozen.flags.writeable = False
        parts = {"frozen": frozen, "transposed": array.T, "view": array[:, ::2], "list": [array, array]}
        back = await call(pool, jobs.echo, {**parts, "text": "x" * number})
        assert not back["frozen"].flags.writeable
        assert back["list"][0] is back["list"][1]
        assert back["text"] == "x" * number
        for name in ("frozen", "transposed", "view"):
            np.testing.assert_array_equal(back[name], parts[name])


def test_an_array_is_written_from_its_own_memory() -> None:
    array = np.ones(1_000_000)
    message = messages.encode_request(messages.CallRequest("module:fn", (array,), {}))
    assert any(np.shares_memory(np.frombuffer(segment, dtype=np.uint8), array) for segment in message)


async def test_a_large_message_does_not_block_the_loop(pool: ProcessPool) -> None:
    # The worker does not read yet: it takes far longer to start than the socket's buffer takes to fill.
    array = np.ones(4_000_000)
    running = asyncio.create_task(call(pool, jobs.echo, array))
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    np.testing.assert_array_equal(await running, array)


async def test_a_large_result_has_memory_of_its_own(pool: ProcessPool) -> None:
    size = 16 * 1024 * 1024
    array = await call(pool, jobs.ones, size)
    array += 1
    assert (array.nbytes, array[0], array[-1]) == (size, 2, 2)


@pytest.mark.timed
async def test_a_large_result_does_not_hold_the_loop_while_it_comes(pool: ProcessPool) -> None:
    await call(pool, jobs.ones, 1)  # start the worker, and load NumPy in it
    running = asyncio.create_task(call(pool, jobs.ones, 128 * 1024 * 1024))
    began = last = time.perf_counter()
    longest = 0.0
    while not running.done():
        await asyncio.sleep(0.001)  # a spinning loop would slow down the transfer
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    await running
    assert longest / (last - began) < 0.25


async def test_a_result_that_does_not_fit_into_memory_is_an_error_of_its_call(pool: ProcessPool) -> None:
    await call(pool, jobs.pid)
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(STATM.read_text().split()[0]) * resource.getpagesize()  # noqa: ASYNC240 - no disk
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 16 * 1024 * 1024, before[1]))
    try:
        with pytest.raises(MemoryError):
            await call(pool, jobs.ones, 256 * 1024 * 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert await call(pool, jobs.add, 1, 2) == 3


async def test_workers_start_on_demand_and_are_reused(door: Door) -> None:
    async with aclosing(ProcessPool(2)) as pool:
        assert pool.statistics().workers == 0
        assert len({await call(pool, jobs.pid) for _ in range(5)}) == 1
        assert (pool.statistics().workers, pool.statistics().idle) == (1, 1)
        holds = [asyncio.create_task(call(pool, jobs.hold, door.path, None)) for _ in range(3)]
        await door.release(2)
        assert pool.statistics().workers == 2
        await door.release()
        await asyncio.gather(*holds)
        assert (pool.statistics().idle, pool.statistics().busy) == (2, 0)


# Errors


async def test_exceptions_keep_type_arguments_notes_and_traceback(pool: ProcessPool) -> None:
    with pytest.raises(jobs.NotedError) as raised:
        await call(pool, jobs.raise_noted, "one", 2)
    assert raised.value.args == ("one", 2)
    assert raised.value.__notes__ == ["a note from the worker"]
    assert "in raise_noted" in str(raised.value.__cause__)
    assert "penstock/workers" not in str(raised.value.__cause__)
    with pytest.raises(jobs.RefusesAttributes) as refusing:
        await call(pool, jobs.raise_error, jobs.RefusesAttributes, "one", "two")
    assert refusing.value.args == ("one", "two")
    assert "in raise_error" in str(refusing.value.__cause__)
    with pytest.raises(SystemExit, match="7"):
        await call(pool, jobs.raise_error, SystemExit, 7)
    assert pool.statistics().workers == 1  # the worker lives


async def test_what_does_not_pickle_and_what_is_missing_is_named(pool: ProcessPool) -> None:
    with pytest.raises(TypeError, match=r"argument 2 \(_thread\.lock\) of '.*:echo'"):
        await call(pool, jobs.echo, 1, threading.Lock())
    with pytest.raises(TypeError, match=r"argument 'values' \(generator\)"):
        await call(pool, jobs.echo, values=(number for number in range(3)))
    assert pool.statistics().workers == 0  # nothing was sent
    with pytest.raises(TypeError, match=r"the result of '.*:make_generator' \(generator\)"):
        await call(pool, jobs.make_generator)
    with pytest.raises(TypeError, match=r"the result of '.*:make_only_there' cannot be rebuilt.*not at home"):
        await call(pool, jobs.make_only_there)
    with pytest.raises(TypeError, match=r"an argument cannot be rebuilt.*not at home"):
        await call(pool, jobs.echo, jobs.OnlyThere(os.getpid()))
    errors: list[tuple[Any, ...]] = [
        (jobs.TwoArguments, "one", "two"), (jobs.HoldsALock,), (jobs.RebuiltAsNoException,), (jobs.Frozen, 1),
        (jobs.RebuiltOnlyThere,), (jobs.RebuiltAsInterrupt,), (jobs.ExitsWhenRebuilt,),
    ]  # fmt: skip
    for kind, *args in errors:
        with pytest.raises(TypeError, match=f"raised .*{kind.__name__}, which does not survive pickling") as raised:
            await call(pool, jobs.raise_error, kind, *args)
        assert "in raise_error" in str(raised.value.__cause__)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        await pool.run("no_such_module:fn", (), {})
    with pytest.raises(AttributeError, match="no_such_function"):
        await pool.run("tests.workers.jobs:no_such_function", (), {})
    assert await call(pool, jobs.add, 1, 2) == 3


# Deaths and cancellation


async def test_a_worker_that_died_while_idle_is_replaced(pool: ProcessPool) -> None:
    assert await call(pool, jobs.terminate_what_it_has_started) == [-signal.SIGTERM] * 2
    worker = await call(pool, jobs.pid)
    os.kill(worker, signal.SIGKILL)
    with suppress(ChildProcessError):  # the pool may have reaped it first
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the worker is dead
    assert await call(pool, jobs.pid) != worker
    assert (pool.statistics().died, pool.statistics().workers) == (1, 1)


async def test_a_death_is_seen_though_a_forked_child_holds_the_socket(pool: ProcessPool, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    try:
        with pytest.raises(WorkerDied, match="exit code 4"):
            await call(pool, jobs.die_with_a_forked_child, str(pid_file))
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


async def test_a_death_is_seen_though_an_instance_waits_to_be_left(
    pool: ProcessPool, tmp_path: Path, door: Door
) -> None:
    pid_file = tmp_path / "pid"
    instance = messages.WorkerInstance(1, (str(pid_file),), {})
    running = asyncio.create_task(pool.run(process_target(jobs.ForksAndBlocks), (door.path,), {}, instance=instance))
    worker = await door.running_pid()
    try:
        await pool.close_instances({1})
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await asyncio.wait_for(running, 60)
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


async def test_cancelling_kills_the_worker_and_another_takes_its_place(pool: ProcessPool, door: Door) -> None:
    starting = asyncio.create_task(call(pool, jobs.pid))
    while not pool.statistics().workers:
        await asyncio.sleep(0)
    starting.cancel()  # while the worker starts
    assert await outcomes(starting) == [asyncio.CancelledError]
    blocked = asyncio.create_task(call(pool, jobs.block, door.path))
    worker = await door.running_pid()
    before = pool.statistics()
    blocked.cancel()
    assert await outcomes(blocked) == [asyncio.CancelledError]
    assert await call(pool, jobs.pid) != worker
    assert not exists(worker)
    after = pool.statistics()
    assert (after.killed, after.died, after.completed) == (before.killed + 1, 0, before.completed + 1)


async def test_a_call_that_is_cancelled_while_it_waits_keeps_nothing(pool: ProcessPool, door: Door) -> None:
    blocked = asyncio.create_task(call(pool, jobs.block, door.path))
    await door.running_pid()
    with without_the_collector():
        array = np.zeros(2)
        kept = weakref.ref(array)
        work = pool.run(process_target(jobs.pid), (array,), {}, begun=partial(id, array), took=partial(max, array))
        waiting = asyncio.create_task(work)
        del array, work
        await asyncio.sleep(0)
        waiting.cancel()
        assert await outcomes(waiting) == [asyncio.CancelledError]
        del waiting
        while kept() is not None:  # a thread may be about to pickle it
            await asyncio.sleep(0)
    blocked.cancel()
    assert await outcomes(blocked) == [asyncio.CancelledError]


# Calls that are sent ahead to a worker


async def warm(pool: ProcessPool, path: Path) -> None:
    """Let the pool measure that `jobs.note` is short, and start all of its workers."""
    await asyncio.gather(*[call(pool, jobs.note, str(path), -1) for _ in range(40)])
    path.write_text("")  # noqa: ASYNC240 - no disk


def noted(path: Path) -> list[int]:
    return [int(line.split()[0]) for line in path.read_text().splitlines()]


async def test_calls_that_a_dead_worker_has_not_begun_go_to_another(pool: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "noted"
    await warm(pool, path)
    for died in range(1, 4):
        calls = [call(pool, jobs.note, str(path), number, "die" * (number == 2)) for number in range(12)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(outcomes[2], WorkerDied)
        assert [outcome for outcome in outcomes if not isinstance(outcome, WorkerDied)] == [0, 1, *range(3, 12)]
        assert noted(path) == list(range(12)) * died
        assert pool.statistics().died == died


async def test_a_call_that_is_cancelled_before_it_begins_does_not_run_and_kills_nobody(
    pool: ProcessPool, tmp_path: Path, door: Door
) -> None:
    path = tmp_path / "noted"
    await warm(pool, path)
    for turns in range(10):
        tasks = [asyncio.create_task(call(pool, jobs.note, str(path), 0, door.path))]
        tasks += [asyncio.create_task(call(pool, jobs.note, str(path), number)) for number in range(1, 12)]
        for _ in range(10 * turns):
            await asyncio.sleep(0)
        for cancelled in (3, 4, 11):
            tasks[cancelled].cancel()
        await asyncio.wait([tasks[3], tasks[4], tasks[11]])
        await door.release()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [number in (3, 4, 11) for number in range(12)]
        assert noted(path) == [number for number in range(12) if number not in (3, 4, 11)]
        path.write_text("")
    assert (pool.statistics().killed, pool.statistics().died) == (0, 0)


async def test_calls_of_a_higher_priority_begin_earlier(pool: ProcessPool, tmp_path: Path, door: Door) -> None:
    path = tmp_path / "noted"
    first = asyncio.create_task(call(pool, jobs.hold, door.path, None))
    arguments = [(str(path), number) for number in range(12)]
    target = process_target(jobs.note)
    tasks = [asyncio.create_task(pool.run(target, each, {}, priority=each[1] % 3)) for each in arguments]
    await door.release()
    await asyncio.gather(first, *tasks)
    assert noted(path) == sorted(range(12), key=lambda number: (-(number % 3), number))


async def test_one_can_hear_when_a_call_begins_and_how_long_it_took(pool: ProcessPool, door: Door) -> None:
    heard: list[str] = []

    async def numbered(number: int) -> None:
        target = process_target(jobs.hold)
        await pool.run(
            target, (door.path, None), {},
            begun=lambda: heard.append(f"begun {number}"), took=lambda _: heard.append(f"took {number}"),
        )  # fmt: skip

    tasks = [asyncio.create_task(numbered(number)) for number in range(2)]
    for number, task in enumerate(tasks):
        await door.release()
        await task
        assert heard[2 * number : 2 * number + 2] == [f"begun {number}", f"took {number}"]


async def test_under_kills_and_cancels_each_call_has_one_outcome_and_runs_once(tmp_path: Path, effort: int) -> None:
    for seed in range(1 + effort // 4):
        rng, path = random.Random(seed), tmp_path / f"noted-{seed}"
        async with aclosing(ProcessPool(rng.choice((1, 2, 3)))) as pool:
            await warm(pool, path)
            acts = rng.choices(("", "wait", "die"), (40, 4, 2), k=80)
            tasks = [asyncio.create_task(call(pool, jobs.note, str(path), *each)) for each in enumerate(acts)]
            kills = 0
            for number in rng.sample(range(80), 12):
                for _ in range(rng.choice((0, 1, 30, 300))):
                    await asyncio.sleep(0)
                if rng.random() < 0.7:
                    tasks[number].cancel()
                elif workers := sorted(worker.pid for worker in pool._workers):
                    kills += 1
                    with suppress(ProcessLookupError):  # the worker has died meanwhile
                        os.kill(rng.choice(workers), signal.SIGKILL)
            await asyncio.wait(tasks)
            begun = noted(path)
            assert len(begun) == len(set(begun)), f"seed {seed}: a call has run twice"
            died = 0
            for number, task in enumerate(tasks):
                if task.cancelled():
                    continue
                if isinstance(task.exception(), WorkerDied):
                    died += 1
                else:
                    assert task.result() == number, f"seed {seed}"
                    assert number in begun, f"seed {seed}"
            assert died <= kills + acts.count("die"), f"seed {seed}"
            assert pool.statistics().queued == 0, f"seed {seed}"


async def test_a_call_gets_its_own_result_though_others_are_taken_back_while_the_worker_goes_on(
    pool: ProcessPool, effort: int
) -> None:
    for number in range(20):  # lets the pool measure that calls are short
        await call(pool, jobs.add, number)
    rng = random.Random(0)
    for _ in range(15 * (1 + effort // 8)):
        tasks = [asyncio.create_task(call(pool, jobs.add, number)) for number in range(40)]
        for number in range(39, 30, -1):
            for _ in range(rng.choice((1, 10, 30))):
                await asyncio.sleep(0)
            tasks[number].cancel()  # the pool takes back calls sent ahead, and sends the others again
        await asyncio.wait(tasks)
        results = {number: task.result() for number, task in enumerate(tasks) if not task.cancelled()}
        assert results == {number: jobs.add(number) for number in results}


# Ends


async def test_aclose_ends_the_idle_and_kills_the_busy(door: Door) -> None:
    pool = ProcessPool(2)
    blocked = asyncio.create_task(call(pool, jobs.block, door.path))
    busy = await door.running_pid()
    idle = await call(pool, jobs.pid)
    await pool.aclose()
    assert not exists(busy)
    assert not exists(idle)
    assert (pool.statistics().killed, pool.statistics().died) == (1, 0)  # the idle worker has ended by itself
    assert await outcomes(blocked) == [asyncio.CancelledError]


async def test_aclose_cancels_what_is_queued(door: Door) -> None:
    pool = ProcessPool(1)
    calls = [asyncio.create_task(call(pool, jobs.block, door.path)) for _ in range(3)]
    await door.running_pid()
    await pool.aclose()
    await asyncio.wait(calls)
    assert all(task.cancelled() for task in calls)
    with pytest.raises(EngineClosedError):
        await call(pool, jobs.add, 1)
    assert pool.statistics().workers == 0
    await pool.aclose()  # a second aclose does nothing


# Names


@pytest.mark.parametrize(
    ("fn", "remedy"),
    [
        (jobs.a_lambda, "with `def`"),
        (jobs.outer(), "move it to the top level"),
        (jobs.another_name, "a name of its own"),
        (jobs.FakeNode(jobs.add), "wrap it in a function"),
    ],
)
def test_a_function_without_a_name_to_import_is_refused(fn: Callable[..., Any], remedy: str) -> None:
    with pytest.raises(TypeError, match=remedy):
        process_target(fn)


# Whole programs


def run_script(path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=40, check=False)


SCRIPT = """
import asyncio, os, time
from penstock.workers.messages import process_target
from penstock.workers.pool import ProcessPool

class Value:
    def __init__(self, number):
        self.number = number

def add_one(value):
    return Value(value.number + 1)

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(600)

async def main():
    pool = ProcessPool(2)
    value = await pool.run(process_target(add_one), (Value(41),), {})
    print(type(value) is Value, value.number, flush=True)
"""
GUARD = "if __name__ == '__main__':"


def test_a_function_that_no_worker_can_import_is_refused(tmp_path: Path) -> None:
    code = (
        "from penstock.workers.messages import process_target\n"
        "def job(): pass\n"
        "try: process_target(job)\n"
        "except TypeError as error: print(error)\n"
    )
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(code)
    python = sys.executable
    for command, message in (
        ([python, "-c", code], "interactive session or notebook"),
        ([python, "-m", "package"], "a package's __main__.py"),
    ):
        result = subprocess.run(
            command, input=code, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path
        )
        assert message in result.stdout, result.stderr


@pytest.mark.parametrize(
    "end",
    [
        f"{GUARD} asyncio.run(main())",
        (
            "    asyncio.create_task(pool.run('__main__:sleep', (), {}))\n    await asyncio.sleep(0.5)\n"
            f"{GUARD}\n    loop = asyncio.new_event_loop(); loop.run_until_complete(main())"
        ),
    ],
    ids=["idle", "busy-and-loop-never-closed"],
)
def test_the_interpreter_exits_though_the_pool_was_never_closed(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}\n{end}\n")
    result = run_script(script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("True 42\n")


# Large bytes


LARGE = messages.JOIN_MAX_BYTES + 1
SOME, OTHER = b"some" * LARGE, bytearray(b"other" * LARGE)


def in_shapes() -> dict[str, Any]:
    array = np.arange(LARGE)
    return {
        "itself": SOME,
        "a bytearray": OTHER,
        "in a tuple": (1, SOME, OTHER),
        "in a list, twice": [SOME, OTHER, SOME, OTHER],
        "in a dict, and deeper": {"a": SOME, "b": [[SOME, OTHER]], "c": OTHER},
        "with arrays": [array, SOME, {"x": array, "y": [OTHER]}, array.astype(np.float32)],
        "small and large": [b"x", b"", SOME[: LARGE - 1], SOME[:LARGE], bytearray(3), "text"],
        "large text": [SOME, "text" * LARGE],
    }


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


async def test_large_bytes_come_back_as_they_were(pool: ProcessPool) -> None:
    for shape, value in in_shapes().items():
        assert equal(await call(pool, jobs.echo, value), value), shape
        assert equal(await pool.run("tests.workers.jobs:echo", (), {"value": value}), value), shape
    one, other, same, also = await call(pool, jobs.echo, in_shapes()["in a list, twice"])
    assert one is same  # shared objects stay shared, and are sent once
    assert other is also
    batch = {"node": "echo", "batch_size": 8}
    shapes = list(in_shapes().values())
    assert equal(await pool.run("tests.workers.jobs:echo", (shapes,), {}, batch), shapes)
    other += b"it can grow"
    assert len(also) == len(OTHER) + len(b"it can grow")


@pytest.mark.parametrize(
    "value", [SOME, OTHER, (1, SOME), [OTHER], {"a": SOME}], ids=lambda value: type(value).__name__
)
def test_large_bytes_are_not_copied_into_a_message(value: Any) -> None:
    """Pickling and unpickling hold the GIL, so the event loop would wait: a second for 400 MB."""
    found = [
        messages.encode_request(messages.CallRequest("a:b", (1, value), {})),
        messages.encode_request(messages.CallRequest("a:b", (), {"x": value})),
        messages.encode((True, value, 0.1), (value,)),
        messages.encode_results([value, 1], "a:b", 0.1),
    ]
    for message in found:
        inside = [segment.obj for segment in message if isinstance(segment, memoryview)]
        assert any(one is SOME or one is OTHER for one in inside)
        assert sum(len(segment) for segment in message if isinstance(segment, bytes)) < 1000
