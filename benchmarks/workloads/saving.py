"""The cost of durability: iterations of durable loops, barriers, large snapshots, and restarts."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

import penstock as ps
from penstock import data, engine
from penstock.engine.checkpoint import Checkpointer
from penstock.saving import snapshots
from penstock.telemetry.counters import SavedSnapshots

from ..harness import Contenders, Row, Workload
from ..summary import Limits

# 4.3 KB as JSON: the messages of an agent.
STATE: dict[str, Any] = {
    "messages": [{"role": "user" if n % 2 else "assistant", "content": "word " * 18, "n": n} for n in range(32)],
    "left": 0,
}


@ps.node
def goes_on(state: dict[str, Any]) -> bool:
    return bool(state["left"])


class Iterations:
    """A loop that only notes when each iteration begins."""

    def __init__(self, durable: ps.Durable | None, number: int) -> None:
        began: list[float] = []
        self._began, self._is_durable = began, durable is not None

        @ps.node
        async def turn(state: dict[str, Any]) -> dict[str, Any]:
            began.append(time.perf_counter())
            return {**state, "left": state["left"] - 1}

        @ps.graph
        async def looped() -> dict[str, Any]:
            return await ps.while_loop(goes_on, turn, {**STATE, "left": number}, durable=durable)

        self._graph = looped

    async def milliseconds(self) -> float:
        """Return the median time of an iteration; single iterations may wait for the disk of other programs."""
        self._began.clear()
        await engine.run(self._graph, durable_key=f"{time.time_ns()}" if self._is_durable else None)
        return 1e3 * median(after - before for before, after in pairwise(self._began))


def commit_milliseconds(path: Path, number: int) -> float:
    """Return the time of a commit of as many bytes on the same disk."""
    taken: list[float] = []
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS kept (content BLOB)")
    for _ in range(number):
        began = time.perf_counter()
        connection.execute("INSERT INTO kept VALUES (?)", (b"x" * 4_600,))
        taken.append(time.perf_counter() - began)
    connection.close()
    return 1e3 * median(taken)


@asynccontextmanager
async def durable_contenders(quick: bool) -> AsyncIterator[Contenders]:
    number = 100 if quick else 400
    with TemporaryDirectory() as folder:
        durable = Iterations(ps.Durable(Path(folder, "loops.db")), number)
        plain = Iterations(None, number)

        async def above() -> float:
            return await durable.milliseconds() - await plain.milliseconds()

        async def commit() -> float:
            return commit_milliseconds(Path(folder, "commits.db"), number)

        yield {"above": above, "commit": commit}


DURABLE = Workload(
    name="durable",
    contenders=durable_contenders,
    control="commit",
    rows=(
        Row(
            title="an iteration with 4 KB of state that is kept, above the loop alone",
            subject="above",
            unit="ms",
            limits=Limits(must=1),
        ),
        Row(title="a commit of as many bytes by SQLite, on the same disk", subject="commit", unit="ms"),
    ),
)


class Counting:
    """A node with state on the path of barriers."""

    def __init__(self) -> None:
        self.count = 0

    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state


@ps.node(capacity=1)
class CountsStream(Counting):
    async def __call__(self, values: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for value in values:
            self.count += 1
            yield value


@ps.node(capacity=1)
class CountsEach(Counting):
    def __call__(self, value: Any) -> Any:
        self.count += 1
        return value


class Paced(Counting):
    """A source that gives a value when the reader has got the last value: so nearly every value has a barrier."""

    def __init__(self, values: int, taken: asyncio.Event) -> None:
        super().__init__()
        self._values, self._taken = values, taken

    async def __aiter__(self) -> AsyncIterator[int]:
        while self.count < self._values:
            await self._taken.wait()
            self._taken.clear()
            self.count += 1
            yield self.count


STAGES = 10
streams = [CountsStream() for _ in range(STAGES)]
each = [CountsEach() for _ in range(STAGES)]


@ps.graph
async def of_generators(values: AsyncIterator[int]) -> AsyncIterator[int]:
    for stage in streams:
        values = stage(values)
    return values


@ps.graph
async def of_functions(values: AsyncIterator[int]) -> AsyncIterator[int]:
    for stage in each:
        values = ps.map_each(stage, values)
    return values


@contextmanager
def nothing_written() -> Iterator[None]:
    """Drop snapshots as soon as they are complete, so that only the path of their barriers is measured."""

    async def forget(saving: Any, snapshot: object, answers: object) -> None:
        saving._add(SavedSnapshots(saved=1))
        saving._writing = None

    with patch.object(Checkpointer, "_write", forget):
        yield


async def paced_seconds(graph: Any, values: int, folder: Path, every: int) -> tuple[float, int]:
    """Return the seconds of the loop's thread, and how many barriers have come through."""
    taken = asyncio.Event()
    taken.set()
    with TemporaryDirectory(dir=folder) as own:
        checkpoint = ps.Checkpoint(own, every_records=every)
        async with engine.stream(graph(Paced(values, taken)), checkpoint=checkpoint) as stream:
            began = time.thread_time()
            async for _ in stream:
                taken.set()
            return time.thread_time() - began, stream.statistics().snapshots_saved


async def barrier_microseconds(graph: Any, values: int, folder: Path) -> float:
    """Return the time that a barrier adds to a stream, in microseconds."""
    with nothing_written():
        without, _ = await paced_seconds(graph, values, folder, 2 * values)
        taken, barriers = await paced_seconds(graph, values, folder, 1)
    return (taken - without) / barriers * 1e6


FAR = 10_000_000


class Large:
    """A source of many records that takes no memory."""

    def __len__(self) -> int:
        return 2 * FAR

    def __getitem__(self, index: int) -> int:
        return index


large = Large()


@ps.graph
async def read(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
    return records >> data.shuffled(1_000, seed=1) >> data.read(large, runs_on="loop") >> data.batched(32)


async def first_batch_milliseconds(checkpoint: ps.Checkpoint) -> float:
    began = time.perf_counter()
    async with engine.stream(read(data.order(large, shuffle_seed=1)), checkpoint=checkpoint) as batches:
        await anext(batches)
        return 1e3 * (time.perf_counter() - began)


async def far_behind(folder: Path) -> ps.Checkpoint:
    """Return a checkpoint whose newest snapshot is after `FAR` records."""
    checkpoint = ps.Checkpoint(folder, every_records=10 * FAR)
    async with engine.stream(read(data.order(large, shuffle_seed=1)), checkpoint=checkpoint) as batches:
        await anext(batches)
        await batches.checkpoint()
    with snapshots.SnapshotFolder(folder) as stored:
        snapshot = stored.newest()
        assert snapshot is not None
        states = {**snapshot.states, "records": {"epoch": 0, "step": FAR}}
        stored.save(snapshots.Snapshot(FAR, states, snapshot.fingerprint, False))
    return checkpoint


@asynccontextmanager
async def barrier_contenders(quick: bool) -> AsyncIterator[Contenders]:
    values = 500 if quick else 2_000
    with TemporaryDirectory() as own:
        folder = Path(own)
        far = await far_behind(folder / "far")
        yield {
            "generators": lambda: barrier_microseconds(of_generators, values, folder),
            "functions": lambda: barrier_microseconds(of_functions, values, folder),
            "far": lambda: first_batch_milliseconds(far),
        }


MARKS = Workload(
    name="marks",
    contenders=barrier_contenders,
    rows=(
        Row(
            title="a mark through ten generators with state",
            subject="generators",
            unit="µs",
            limits=Limits(must=100),
        ),
        Row(
            title="a mark through ten functions with state",
            subject="functions",
            unit="µs",
            limits=Limits(must=100),
        ),
        Row(
            title="from a start at record 10,000,000 of a shuffled source to its first batch",
            subject="far",
            unit="ms",
            limits=Limits(must=1_000),
        ),
    ),
)

LARGE_STATE_BYTES = 80_000_000
BETWEEN_CUTS_SECONDS = 30


@ps.node
class Model:
    """80 MB of state, and a millisecond of work for each value, which holds the GIL."""

    def __init__(self) -> None:
        self.weights = np.ones(LARGE_STATE_BYTES // 4, np.float32)

    def __call__(self, record: data.Record[None]) -> int:
        return sum(n * n for n in range(15_000))

    def state(self) -> Any:
        return self.weights

    def restore(self, state: Any) -> None:
        self.weights = state


model = Model()


@ps.graph
async def train(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
    return ps.map_each(model, records)


async def train_seconds(values: int, folder: Path, *, saved: bool) -> tuple[float, float]:
    """Return the seconds of a stream, and of a snapshot that is requested after a fifth of the stream."""

    async def cut() -> float:
        began = time.perf_counter()
        await stream.checkpoint()
        return time.perf_counter() - began

    with TemporaryDirectory(dir=folder) as own:
        checkpoint = ps.Checkpoint(own, every_records=10 * values)
        async with engine.stream(train(data.order(range(2 * values))), checkpoint=checkpoint) as stream:
            began = time.perf_counter()
            saving: asyncio.Task[float] | None = None
            async for _ in stream:
                if saved and stream.position == values // 5:
                    saving = asyncio.create_task(cut())
                if stream.position == values:
                    break
            taken = time.perf_counter() - began
            return taken, 0.0 if saving is None else await saving


@asynccontextmanager
async def large_contenders(quick: bool) -> AsyncIterator[Contenders]:
    values = 2_000 if quick else 4_000
    with TemporaryDirectory() as own:
        folder = Path(own)

        async def slower() -> float:
            taken, _ = await train_seconds(values, folder, saved=True)
            without, _ = await train_seconds(values, folder, saved=False)
            return 100 * (taken - without) / BETWEEN_CUTS_SECONDS

        async def cut() -> float:
            _, of_cut = await train_seconds(values, folder, saved=True)
            return of_cut

        yield {"slower": slower, "cut": cut}


LARGE_CUTS = Workload(
    name="large-cuts",
    contenders=large_contenders,
    rounds=(7, 2),
    rows=(
        Row(
            title="80 MB saved beside a pipeline once in 30 s: how much slower that is",
            subject="slower",
            unit="%",
            limits=Limits(must=3),
        ),
        Row(
            title="the same, from asking for the cut until it is written",
            subject="cut",
            unit="s",
            limits=Limits(must=2),
        ),
    ),
)
