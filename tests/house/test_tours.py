"""The tours and tables of docs/explanation/architecture.md match the code.

Tours list the files that a recorded call passes, in the order of the call. After a change that moves code, the failing
test prints the new tours. The tables tell how a step runs.
"""

import asyncio
import difflib
import gc
import re
import sys
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import cluster, engine
from penstock.actors import attempts
from penstock.actors.attempts import HedgeBudget, hedged
from penstock.actors.execution import Bound
from penstock.actors.policy import Policy
from penstock.devices import elsewhere, executor
from penstock.engine import executions
from penstock.engine.node import Execution
from penstock.workers.execution import InProcesses

SOURCE = f"{Path(engine.__file__).parents[1]}/"
WARMING_CALLS = 16  # calls during which a node is watched
PAGE = Path(__file__).parents[2] / "docs/explanation/architecture.md"


class Recorder:
    """Records, for each thread, the files of the package that run, in the order in which they are first entered.

    A device thread begins before the recording, so each new thread is watched from its beginning.
    """

    def __init__(self) -> None:
        self.calls = 0  # of functions, and resumptions of coroutines
        self._is_on = False
        self._passed: dict[str, dict[str, None]] = {}

    @contextmanager
    def watching(self) -> Generator[None]:
        before, before_of_threads = sys.getprofile(), threading.getprofile()
        gc.collect()
        gc.disable()  # objects of earlier tests must not be closed during a tour
        sys.setprofile(self._called)
        threading.setprofile(self._called)
        try:
            yield
        finally:
            gc.enable()
            threading.setprofile(before_of_threads)
            sys.setprofile(before)

    def begin(self) -> None:
        self._is_on = True

    def end(self) -> list[list[str]]:
        """Returns the files that each thread has entered, the thread of the event loop first."""
        self._is_on = False
        return [list(files) for files in self._passed.values()]

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if self._is_on and event == "call" and file.startswith(SOURCE):
            files = self._passed.setdefault(threading.current_thread().name, {})
            files.setdefault(file.removeprefix(SOURCE))
            self.calls += 1


@ps.node
async def fetch(url: str) -> str:
    await asyncio.sleep(0)
    return url


@ps.node
async def count(page: str) -> int:
    return len(page)


@ps.node
async def passed_on(page: str) -> str:
    return page


@ps.graph
async def measure(url: str) -> int:
    return await count(await fetch(url))


@ps.device_node(device="cpu", batch=ps.Batch(4))
def double(x: Any) -> Any:
    return x * 2


@ps.graph
async def doubled(x: Any) -> Any:
    return double(x)


async def item_through_a_stream(recorder: Recorder) -> list[list[str]]:
    goes_on = asyncio.Event()

    async def calls() -> AsyncIterator[ps.Call[int]]:
        for _ in range(WARMING_CALLS):
            yield measure("first")
        await goes_on.wait()
        yield measure("second")

    async with engine.stream(calls()) as stream:
        for _ in range(WARMING_CALLS):
            await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        for _ in range(10):
            await asyncio.sleep(0)
        recorder.begin()
        goes_on.set()
        await reading
        return recorder.end()


async def call_of_a_deployment(recorder: Recorder) -> list[list[str]]:
    async with engine.deploy(measure) as service:
        for _ in range(WARMING_CALLS):
            await service("first")
        recorder.begin()
        await service("second")
        return recorder.end()


async def call_whose_first_attempt_fails(recorder: Recorder) -> list[list[str]]:
    fails: list[str] = []

    @ps.node(retry=ps.Retry(attempts=2, backoff_seconds=0))
    async def ask(question: str) -> str:
        if fails:
            raise LookupError(fails.pop())
        await asyncio.sleep(0)
        return question

    @ps.graph
    async def asked(question: str) -> int:
        return await count(await passed_on(await ask(question)))

    async with engine.deploy(asked) as service:
        for number in range(WARMING_CALLS):
            fails[:] = ["known"] * (number == 0)
            await service("first")
        fails.append("again")
        recorder.begin()
        await service("second")
        return recorder.end()


async def array_through_a_device(recorder: Recorder) -> list[list[str]]:
    async with engine.deploy(doubled) as service:
        for number in (1, 2):  # compiles the program, and opens the device
            await service(np.full(3, number, np.float32))
        recorder.begin()
        await service(np.full(3, 3, np.float32))
        return recorder.end()


async def exception_with_policies(recorder: Recorder) -> list[list[str]]:
    passed: list[list[str]] = []

    @ps.node(
        retry=ps.Retry(attempts=2, backoff_seconds=0), hedge=ps.Hedge(after_seconds=60), cache=ps.Cache(max_bytes=1_000)
    )
    async def ask(question: str) -> str:
        await asyncio.sleep(0)
        if question == "unknown":
            recorder.begin()
            raise LookupError(question)
        return question

    @ps.node
    async def stay(question: str) -> None:
        try:
            await asyncio.sleep(60 if question == "unknown" else 0)
        finally:  # the failure of the call cancels this handler
            passed[:] = recorder.end()

    @ps.graph
    async def asked(question: str) -> tuple[str, None]:
        return await ask(question), await stay(question)

    async with engine.Engine() as own:
        for number in range(WARMING_CALLS):
            await own.run(asked(str(number)))
        with pytest.raises(LookupError):
            await own.run(asked("unknown"))
    return passed


TOURS = {
    "One item through a stream": item_through_a_stream,
    "One call through a deployment": call_of_a_deployment,
    "One call whose first attempt fails": call_whose_first_attempt_fails,
    "One array through a batched device node": array_through_a_device,
    "One exception with retry, hedge and cache": exception_with_policies,
}


def written(title: str) -> list[list[str]]:
    """Returns the files that a tour of the page names: one list for each table, from its first column."""
    tour = PAGE.read_text().partition(f"### {title}\n")[2].partition("\n#")[0]
    tables = re.findall(r"^\| file .*\n\| ---.*\n((?:\|.*\n)+)", tour, re.MULTILINE)
    return [re.findall(r"`(\S+\.py)`", "".join(row.split("|")[1] for row in table.splitlines())) for table in tables]


def shown(tour: list[list[str]]) -> str:
    return "\n\n".join("\n".join(f"| `{file}` |" for file in files) for files in tour)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # another loop calls the same files, perhaps in another order
@pytest.mark.parametrize("title", TOURS)
async def test_a_tour_passes_the_files_that_a_recorded_call_passes(title: str) -> None:
    recorder = Recorder()
    with recorder.watching():
        found = await TOURS[title](recorder)
    difference = "\n".join(difflib.ndiff(shown(written(title)).splitlines(), shown(found).splitlines()))
    assert written(title) == found, f'change this in {PAGE.name}, under "{title}":\n\n{difference}'


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_call_whose_first_attempt_fails_takes_few_function_calls() -> None:
    recorder = Recorder()
    with recorder.watching():
        (files,) = await call_whose_first_attempt_fails(recorder)
    assert len(files) <= 11
    assert recorder.calls <= 55


# --- Tables ---

# Layers around the result of `compose`; and the layer in place of a hedge, as no node has both.
OUTSIDE, INSTEAD_OF_A_HEDGE = ["in_input_order", "traced"], ["through_gate"]


def rows(first: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is `first`."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    found: list[list[str]] = []
    while lines[at].startswith("|"):
        found.append(lines[at].strip("| ").split(" | "))
        at += 1
    return found


def layers(run: Any) -> Iterator[str]:
    """Yield the names of the functions that made a layer and the layers inside it."""
    while run is not None:
        yield run.__qualname__.partition(".")[0]
        inside = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True)).get("run")
        run = None if inside is None else inside.cell_contents


async def never(attempt: Any) -> None:
    raise NotImplementedError


def subclasses(of: type) -> set[str]:
    found = [one for one in of.__subclasses__() if one.__module__.startswith("penstock.")]
    return {one.__name__ for one in found}.union(*(subclasses(one) for one in found))


def test_the_layers_of_a_policy_are_those_of_the_table() -> None:
    policy = Policy(timeout_seconds=1, retry=ps.Retry(2), fallback=lambda error: None, hedge=ps.Hedge(after_seconds=1))
    *outer, innermost = layers(attempts.compose(policy, (hedged(1, HedgeBudget(1)),), never))
    assert [row[0].strip("`") for row in rows("layer")] == [*OUTSIDE, *outer, *INSTEAD_OF_A_HEDGE, innermost]


def test_a_node_without_a_policy_has_no_stack_of_its_own() -> None:
    assert attempts.compose(Policy()) is attempts.compose(Policy())


def test_the_executions_are_those_of_the_table() -> None:
    table = rows("execution")
    named = {name for row in table for name in re.findall(r"`(\w+)`", row[1])}
    ours = {cls for cls in subclasses(Bound) if cls not in {"CacheSite", "_InBodies", "_Intercepted"}}
    assert named == ours
    known = {one for one in vars(executions).values() if isinstance(one, type) and issubclass(one, Execution)}
    known |= {executor.DeviceExecutor, cluster.Workers, elsewhere.GatheredHere, InProcesses}
    assert {row[0].strip("`") for row in table} == {one.__name__ for one in known}
