"""Stages of other packages: the parts of `penstock.extension` for streams, with and without a checkpoint."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, engine, extension
from tests.kit import values_of
from tests.saving.exact import taken

SOURCE = np.arange(12)


class Differences(extension.StageIterator[int]):
    """Gives the difference of each value to the one before."""

    role = extension.StageRole("one_to_one")

    def __init__(self, values: AsyncIterator[Any]) -> None:
        super().__init__(values)
        self.before = np.int64(0)

    def state(self) -> Any:
        return self.before

    def restore(self, state: Any) -> None:
        self.before = state

    async def __anext__(self) -> int:
        value = (await anext(self.streams[0])).value
        before, self.before = self.before, value
        return int(value - before)


class Kept(Differences):
    """Collects values until there are enough; gives fewer values than it reads."""

    role = extension.StageRole()

    def __init__(self, values: AsyncIterator[Any], count: int) -> None:
        super().__init__(values)
        self.count = count

    async def __anext__(self) -> int:
        return sum([await super(Kept, self).__anext__() for _ in range(self.count)])


class Mapped(extension.StageIterator[int]):
    """Gives the results of a function that the stage calls for each value."""

    role = extension.StageRole("one_to_one", calls=("fn",))

    def __init__(self, values: AsyncIterator[Any], fn: Any) -> None:
        super().__init__(values)
        self.fn = fn

    async def __anext__(self) -> int:
        return int(self.fn((await anext(self.streams[0])).value))


class Unordered(Differences):
    role = extension.StageRole("arrival")


class Sum:
    def __init__(self) -> None:
        self.total = 0

    def __call__(self, value: int) -> int:
        self.total += int(value)
        return self.total

    def state(self) -> int:
        return self.total

    def restore(self, state: int) -> None:
        self.total = state


def records() -> Any:
    return data.order(SOURCE) >> data.read(SOURCE, runs_on="loop")


def staged(stage: Any, source: Callable[[], Any] = records) -> Any:
    """Return a call of a graph that passes the records through a stage."""

    @ps.graph
    async def graph() -> AsyncIterator[Any]:
        return stage(source())  # type: ignore[no-any-return]

    return graph()


DIFFERENCES = extension.stage_node("differences", Differences)
KEPT = extension.stage_node("kept", Kept, count=3)


async def read(call: Any, folder: Path, count: int | None = None, every: int = 1) -> list[Any]:
    """Reads `count` values, makes a checkpoint, and leaves; or reads all values."""
    return [value for _, value in await taken(call, ps.Checkpoint(folder, every_records=every), count, saves=True)]


@pytest.mark.parametrize(("stage", "expected"), [(DIFFERENCES, [0] + [1] * 11), (KEPT, [2, 3, 3, 3])])
async def test_a_stage_goes_on_with_its_state(tmp_path: Path, stage: Any, expected: list[int]) -> None:
    assert await read(staged(stage), tmp_path, 2) == expected[:2]
    assert await read(staged(stage), tmp_path) == expected[2:]


async def test_the_object_that_a_stage_calls_goes_on_with_its_state(tmp_path: Path) -> None:
    assert await read(staged(extension.stage_node("mapped", Mapped, fn=Sum())), tmp_path, 4) == [0, 1, 3, 6]
    assert (await read(staged(extension.stage_node("mapped", Mapped, fn=Sum())), tmp_path))[0] == 10


async def test_a_stage_with_one_value_for_each_may_stand_in_a_branch(tmp_path: Path) -> None:
    @ps.node
    def both(left: Any, right: int) -> tuple[int, int]:
        return int(left.value), right

    def joined(stage: Any) -> Any:
        @ps.graph
        async def joined() -> AsyncIterator[tuple[int, int]]:
            left, right = records() >> data.split(2)
            return ps.map_each(both, left, stage(right))  # type: ignore[no-any-return]

        return joined()

    assert (await read(joined(DIFFERENCES), tmp_path))[:2] == [(0, 0), (1, 1)]
    with pytest.raises(ps.PlanError, match="one value for each value on every branch"):
        await read(joined(KEPT), tmp_path)


async def test_an_order_of_arrival_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ps.PlanError, match=r"'unordered' cannot be used with .* in which they arrive"):
        await read(staged(extension.stage_node("unordered", Unordered)), tmp_path)


async def test_other_settings_are_noticed(tmp_path: Path) -> None:
    await read(staged(KEPT), tmp_path, 1)
    with pytest.raises(ps.CheckpointError, match=r"nodes\.kept.count was 3, and is 2"):
        await read(staged(extension.stage_node("kept", Kept, count=2)), tmp_path)


async def test_what_a_stage_keeps_is_in_memory() -> None:
    class Heavy(Differences):
        def state(self) -> Any:
            return np.zeros(1 << 20, np.uint8)

        async def __anext__(self) -> int:
            await anext(self.streams[0])
            return 1

    report = await engine.memory(staged(extension.stage_node("heavy", Heavy), lambda: data.order(SOURCE)))
    assert report.in_flight_bytes is not None
    assert 1 << 20 <= report.in_flight_bytes < 2 << 20


async def test_a_stage_closes_what_it_reads() -> None:
    closed: list[str] = []

    @ps.node
    async def numbers(name: str) -> AsyncIterator[data.Record[int]]:
        try:
            for record in range(1000):
                yield data.Record(0, record, record, 0, record)
        finally:
            closed.append(name)

    async with engine.stream(staged(DIFFERENCES, lambda: numbers("one"))) as stream:
        assert await anext(stream) == 0
    assert closed == ["one"]


async def test_what_is_a_stream_and_what_is_there() -> None:
    seen: list[Any] = []

    class Seen(extension.StageIterator[int]):
        async def __anext__(self) -> int:
            [stream] = self.streams
            seen.append((extension.is_stream(stream), extension.has_value(stream)))
            return int((await anext(stream)).index)

    @ps.graph
    async def staged() -> AsyncIterator[int]:
        ordered = data.order(SOURCE)
        seen.append((extension.is_stream(ordered), extension.is_stream(await number())))
        return extension.stage_node("seen", Seen)(ordered)  # type: ignore[no-any-return]

    @ps.node
    async def number() -> int:
        return 1

    assert await values_of(engine.stream(staged())) == [*range(12)]
    assert seen[0] == (True, False)
    assert all(is_stream for is_stream, _ in seen[1:])
    assert {is_there for _, is_there in seen[1:]} == {False, True}
    assert not extension.is_stream(iter(SOURCE))
    assert not extension.has_value(iter(SOURCE))


async def test_a_plain_iterator_runs_in_a_thread_of_its_own() -> None:
    names: set[str] = set()

    def values() -> Any:
        import threading

        for value in range(3):
            names.add(threading.current_thread().name)
            yield value

    read = extension.ThreadIterator(values(), "reading")
    assert [value async for value in read] == [0, 1, 2]
    await read.aclose()
    assert names == {"reading-1"}
