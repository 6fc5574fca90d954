"""The tours of docs/explanation/architecture.md list the files that a recorded call passes, in the order of the call.

After a change that moves code, the failing test prints the new tours.
"""

import asyncio
import difflib
import gc
import re
import sys
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import engine

SOURCE = f"{Path(engine.__file__).parents[1]}/"
WARMING_CALLS = 16  # calls during which a node is watched
PAGE = Path(__file__).parents[2] / "docs/explanation/architecture.md"


class Recorder:
    """Records, for each thread, the files of the package that run, in the order in which they are first entered.

    A device thread begins before the recording, so each new thread is watched from its beginning.
    """

    def __init__(self) -> None:
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


@ps.node
async def fetch(url: str) -> str:
    await asyncio.sleep(0)
    return url


@ps.node
async def count(page: str) -> int:
    return len(page)


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
