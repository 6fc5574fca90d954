"""Threads that are busy or cannot start, workers that are killed, and Ctrl-C while threads and workers run."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.bad_days import process_nodes
from tests.examples.programs import HEAR_CTRL_C, command
from tests.kit import Gate, outcomes_of

dying = ps.graph(process_nodes.die_at_three)
squared = ps.graph(process_nodes.square)


# Processes


async def test_system_exit_in_a_worker_process_is_one_in_a_node() -> None:
    async with engine.Engine() as own:
        with pytest.raises(SystemExit) as raised:
            await own.run(ps.graph(process_nodes.leave)(3))
        assert raised.value.code == 3
        assert raised.value.__notes__ == ["in node 'leave' of graph 'leave', item 0, attempt 1"]
        assert await own.run(squared(3)) == 9


async def test_an_argument_that_does_not_pickle_is_an_error_of_its_item() -> None:
    arguments: list[Any] = [2, lambda: 3, 4]
    async with engine.Engine() as own:
        first, failed, last = await outcomes_of(own.stream(map(squared, arguments)))
    assert (first.value, last.value) == (4, 16)
    assert failed.error is not None
    assert failed.error.__notes__[-1] == "in node 'square' of graph 'square', item 1, attempt 1"


async def test_a_worker_whose_answers_belong_to_no_call_is_killed() -> None:
    async with engine.Engine(max_processes=1) as own:
        graph = ps.graph(process_nodes.write_to_sockets)
        async with own.deploy(graph) as service:
            assert await service((1, "")) == (1, 0)
            with pytest.raises(ps.WorkerDied, match="belongs to no call"):
                await service((2, "write"))
            assert await asyncio.gather(service((3, "")), service((4, ""))) == [(3, 0), (4, 0)]


# Threads


async def test_a_stateful_node_is_left_after_the_thread_that_is_in_it_has_returned() -> None:
    gate = Gate()
    log: list[str] = []

    @ps.node(runs_on="thread")
    class Slow:
        async def __aenter__(self) -> "Slow":
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            log.append("left")

        def __call__(self, x: int) -> int:
            gate.block(x)
            log.append("returned")
            return x

    slow = Slow()

    graph = ps.graph(slow)

    async def expire() -> None:
        await engine.run(graph(1), timeout_seconds=0.5)

    async def abort() -> None:
        async with engine.deploy(graph) as service:
            call = asyncio.create_task(service(1))
            await gate.has()
            call.cancel()
            raise TimeoutError

    for way in (expire, abort):
        gate.close()
        gate.came.clear()
        log.clear()
        task = asyncio.create_task(way())
        await gate.has()
        await asyncio.wait([task], timeout=0.6)  # the deadline passes, but the call has to wait for the thread
        assert log == []
        gate.open()
        with pytest.raises(TimeoutError):
            await task
        assert log == ["returned", "left"]


# Ctrl-C

PROGRAM = """
import asyncio
import time
import penstock as ps
from penstock import engine

{code}

async def main():
    async with engine.stream(graph(x) for x in range(1000)) as stream:
        print("begun", flush=True)
        async for x in stream:
            print(x, flush=True)

if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""

PROCESSES = """
@ps.node(runs_on="process", concurrency=2)
def work(x: int) -> int:
    if x >= {last}:
        time.sleep(3600)
    return x

graph = ps.graph(work)
"""

COROUTINES_AND_THREADS = """
@ps.node(runs_on="thread", concurrency=2)
def work(x: int) -> int:
    time.sleep(0.001)
    return x

@ps.node
class Model:
    async def __aenter__(self):
        self.missing = {0, 1, 2, 3}  # of two threads, the one with a later item may be the faster one
        return self
    async def __aexit__(self, *exc_info):
        await asyncio.sleep(0)
        print("left", flush=True)
    async def __call__(self, x: int) -> int:
        self.missing.discard(x)
        if x > 3 and not self.missing:
            await asyncio.sleep(3600)
        return x

graph = work >> Model()
"""


def interrupt_after(
    line: str, code: str, tmp_path: Path, before: str = HEAR_CTRL_C, *, number: int = signal.SIGINT
) -> tuple[list[str], str, int]:
    """Run a program; signal its group, as Ctrl-C does, when it has printed `line`. Return output, errors, status."""
    program = tmp_path / "program.py"
    program.write_text(code if "asyncio.run(" in code else PROGRAM.format(code=code))
    process = subprocess.Popen(
        command(program, (), before),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # a buffer would keep lines that `communicate` does not see
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        printed = []
        while not printed or printed[-1] != line:
            printed.append(process.stdout.readline().decode().strip())
            assert printed[-1], process.communicate()
        os.killpg(process.pid, number)
        rest, errors = (output.decode() for output in process.communicate(timeout=30))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return [*printed, *rest.split()], errors, process.returncode


needs_groups = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")


IGNORE_CTRL_C = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


@needs_groups
@pytest.mark.parametrize(
    ("code", "line", "before", "last"),
    [
        pytest.param(PROCESSES.format(last=4), "begun", HEAR_CTRL_C, "interrupted", id="while workers start"),
        pytest.param(PROCESSES.format(last=4), "3", HEAR_CTRL_C, "interrupted", id="while workers are busy"),
        pytest.param(PROCESSES.format(last=1000), "3", IGNORE_CTRL_C, "999", id="what a shell has told to ignore it"),
        pytest.param(COROUTINES_AND_THREADS, "3", HEAR_CTRL_C, "interrupted", id="with threads and a stateful node"),
        pytest.param(COROUTINES_AND_THREADS, "begun", HEAR_CTRL_C, "interrupted", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_without_noise(code: str, line: str, before: str, last: str, tmp_path: Path) -> None:
    printed, errors, status = interrupt_after(line, code, tmp_path, before)
    # Errors would be a traceback of a worker, or a message of the resource tracker.
    assert (errors, printed[-1], status) == ("", last, 0)
    # At the beginning, the stateful node may not have been entered.
    assert "left" in printed or code != COROUTINES_AND_THREADS or line == "begun"


DRAINING = """
import asyncio, signal, time
import penstock as ps
from penstock import engine

@ps.node(runs_on="process", concurrency=2)
def work(x: int) -> int:
    time.sleep(0.02)
    return x

graph = ps.graph(work)

async def main():
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)

    def calls():
        x = 0
        while not stopping.is_set():
            yield graph(x)
            x += 1

    async with engine.stream(calls(), max_in_flight=6) as stream:
        await asyncio.sleep(0)
        print("begun", flush=True)
        async for outcome in stream.outcomes():
            print("ended" if outcome.error is None else type(outcome.error).__name__, flush=True)

if __name__ == "__main__":
    asyncio.run(main())
    print("drained", flush=True)
"""


@needs_groups
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "begun"),
        (signal.SIGTERM, "ended"),
        pytest.param(signal.SIGINT, "ended", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "begun", marks=pytest.mark.long),
    ],
)
def test_a_program_that_drains_at_a_signal_to_its_group_loses_no_item(
    number: signal.Signals, line: str, tmp_path: Path
) -> None:
    """systemd and SLURM send SIGTERM to all processes of a service; items in worker processes are not lost."""
    printed, errors, code = interrupt_after(line, DRAINING, tmp_path, number=number)
    assert (errors, code) == ("", 0)
    assert (printed[0], printed[-1]) == ("begun", "drained")
    assert {*printed[1:-1]} <= {"ended"}


UNGUARDED = """
import asyncio
import sys
import penstock as ps
from penstock import engine

@ps.node(runs_on="process", concurrency=2)
def work(x: int) -> int:
    return 2 * x

graph = ps.graph(work)

async def calls():
    if sys.argv[1] == "stream":
        async with engine.stream([graph(1), graph(2), graph(3)]) as results:
            return [outcome.error async for outcome in results.outcomes()]
    elif sys.argv[1] == "deploy":
        async with engine.deploy(graph) as service:
            return await asyncio.gather(*map(service, range(3)), return_exceptions=True)
    async with engine.Engine(max_processes=2) as one:
        return await asyncio.gather(*[one.run(graph(x)) for x in range(3)], return_exceptions=True)

def main():
    return asyncio.run(calls())

"""


@pytest.mark.parametrize(
    "verb", ["stream", *(pytest.param(verb, marks=pytest.mark.long) for verb in ("deploy", "Engine"))]
)
def test_a_script_that_runs_an_engine_without_guard_is_not_run_again_by_its_workers(verb: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{UNGUARDED}print(*main(), sep='\\n')\nprint('sent the mails')\n")
    line = script.read_text().splitlines().index("print(*main(), sep='\\n')") + 1
    result = subprocess.run([sys.executable, script, verb], capture_output=True, text=True, timeout=60, check=False)
    *errors, last = [line for line in result.stdout.splitlines() if "[warning" not in line]
    expected = f"{script}:{line}: the main script runs an engine, and each worker imports it: put code that"
    assert [one.startswith(expected) for one in errors] == [True] * 3, result
    assert 'under `if __name__ == "__main__":`' in errors[0]
    assert last == "sent the mails"
    assert result.stdout.count("sent the mails") == 1
    assert result.stdout.count("process.script_runs_engine") == 1
    assert (result.stderr, result.returncode) == ("", 0)


def test_a_process_node_may_run_an_engine_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\nimport penstock as ps\nfrom penstock import engine\n"
        "@ps.node\nasync def inner(x: int) -> int:\n    return x + 1\n"
        "@ps.node(runs_on='process')\ndef outer(x: int) -> int:\n"
        "    return asyncio.run(engine.run(ps.graph(inner)(x)))\n"
        "if __name__ == '__main__':\n    print(asyncio.run(engine.run(ps.graph(outer)(1))))\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == ("2\n", "")
