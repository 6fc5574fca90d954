"""A plain `for` loop over the values of a graph."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock import data
from tests.devices.processes import run_program
from tests.kit import counted as count


@ps.node(runs_on="thread")
def checked(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


counting = ps.graph(count)


@ps.graph
async def failing(limit: int | None) -> AsyncIterator[int]:
    return count(limit) >> checked


@ps.graph
async def one() -> int:
    return 1


def test_a_for_loop_reads_the_values() -> None:
    with data.iterate(counting(100)) as numbers:
        assert list(numbers) == list(range(100))
        assert list(numbers) == []


def test_a_loop_that_is_left_ends_everything() -> None:
    threads = threading.active_count()
    with data.iterate(counting(None)) as numbers:
        for number in numbers:
            if number == 10:
                break
        assert next(numbers) == 11
    assert threading.active_count() == threads
    with pytest.raises(ps.EngineClosedError, match=r"with data\.iterate"):
        next(numbers)
    with pytest.raises(ps.EngineClosedError, match=r"call data\.iterate again"), numbers:
        pass
    with pytest.raises(KeyError), data.iterate(counting(None)) as numbers:
        raise KeyError(next(numbers))


def test_errors_are_raised_in_the_loop() -> None:
    got: list[int] = []
    with pytest.raises(ValueError, match="three"), data.iterate(failing(None)) as numbers:
        got.extend(numbers)
    with data.iterate(failing(None)) as numbers:
        assert [next(numbers) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="three"):
            next(numbers)
    with pytest.raises(ps.OptionsError), data.iterate(counting(1), max_in_flight=2):
        pass
    with pytest.raises(ps.PlanError), data.iterate(one()):  # type: ignore[arg-type]
        pass
    with pytest.raises(ps.EngineClosedError, match=r"with data\.iterate"):
        next(data.iterate(counting(1)))


async def test_it_is_refused_where_a_loop_runs_and_allowed_in_a_thread_of_it() -> None:
    with pytest.raises(ps.EngineLoopError, match=r"async with engine\.stream"), data.iterate(counting(3)):
        pass

    def read() -> list[int]:
        with data.iterate(counting(3)) as numbers:
            return list(numbers)

    assert await asyncio.to_thread(read) == [0, 1, 2]


class Stopped(Exception):
    """The error of a signal handler, as Ctrl-C raises KeyboardInterrupt."""


class Seen:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def state(self) -> list[int]:
        return self.numbers

    def restore(self, state: list[int]) -> None:
        self.numbers = state


@pytest.fixture
def main_thread() -> Iterator[int]:
    """Gives the id of this thread, in which SIGUSR1 raises `Stopped`."""

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    yield threading.get_ident()
    signal.signal(signal.SIGUSR1, before)


def interrupted_at_5(
    thread: int, going: threading.Event, numbers_of: Callable[[], data.Iterate[int]]
) -> ps.Graph[[AsyncIterator[data.Record[None]]], AsyncIterator[int]]:
    """Return a graph that gives indexes; index 5 sends SIGUSR1 to the thread that waits for it."""

    def is_waiting() -> bool:
        with contextlib.suppress(NameError):  # the `with` of the test may not have bound the name yet
            return numbers_of().position >= 5 and numbers_of()._is_waiting
        return False

    @ps.node(runs_on="thread")
    def interrupting(record: data.Record[None]) -> int:
        if record.index == 5 and not going.is_set():
            while not is_waiting():
                time.sleep(0)
            signal.pthread_kill(thread, signal.SIGUSR1)
            going.wait()
        return record.index

    @ps.graph
    async def interrupted(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
        return ps.map_each(interrupting, records, concurrency=1)

    return interrupted


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_signal_handler_that_raises_while_a_value_is_waited_for_loses_none(
    main_thread: int, tmp_path: Path, goes_on: bool
) -> None:
    going = threading.Event()

    interrupted = interrupted_at_5(main_thread, going, lambda: numbers)

    def read() -> tuple[int, list[int]]:
        nonlocal numbers
        seen = Seen()
        checkpoint = ps.Checkpoint(tmp_path, every_records=1000, reader=seen)
        numbers = data.iterate(interrupted(data.order(range(20))), checkpoint=checkpoint)
        with numbers:
            try:
                for number in numbers:
                    seen.numbers.append(number)
            except Stopped:
                going.set()
                before = numbers.position
                if not goes_on:
                    numbers.checkpoint()
                    return before, seen.numbers
                seen.numbers += numbers
                return before, seen.numbers
        return numbers.position, seen.numbers

    numbers = data.iterate(interrupted(data.order(range(20))))
    if not goes_on:
        assert read() == (5, list(range(5)))
    assert read() == (5 if goes_on else 20, list(range(20)))


def test_a_snapshot_in_a_signal_handler_is_refused_while_a_value_is_waited_for(
    main_thread: int, tmp_path: Path
) -> None:
    going = threading.Event()

    def save(*_: object) -> None:
        going.set()
        numbers.checkpoint()

    signal.signal(signal.SIGUSR1, save)

    interrupted = interrupted_at_5(main_thread, going, lambda: numbers)
    checkpoint = ps.Checkpoint(tmp_path, every_records=1000)
    with data.iterate(interrupted(data.order(range(20))), checkpoint=checkpoint) as numbers:
        with pytest.raises(ps.EngineLoopError, match=r"call checkpoint\(\) in the loop"):
            list(numbers)
        numbers.checkpoint()
        assert list(numbers) == list(range(5, 20))


def test_a_signal_handler_that_raises_while_the_call_is_opened_leaves_nothing(
    main_thread: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, join = threading.Event(), threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        going.set()  # the call is being left, and has not finished opening
        join(thread, timeout)

    @ps.node
    class Slow:
        async def __aenter__(self) -> "Slow":
            signal.pthread_kill(main_thread, signal.SIGUSR1)
            await asyncio.to_thread(going.wait)
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            pass

        def state(self) -> None:
            return None

        def restore(self, state: None) -> None:
            pass

        def __call__(self, record: data.Record[None]) -> int:
            return record.index

    slow = Slow()

    @ps.graph
    async def opened_slowly(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
        return ps.map_each(slow, records)

    threads = threading.active_count()
    monkeypatch.setattr(threading.Thread, "join", joined)
    checkpoint = ps.Checkpoint(tmp_path)
    with pytest.raises(Stopped), data.iterate(opened_slowly(data.order(range(3))), checkpoint=checkpoint):
        pass
    assert threading.active_count() == threads


LEFT_OPEN = """
import threading
import time

from penstock import data
from tests.data.test_iterate import slowly


def epoch():
    with data.iterate(slowly(data.order(range(1000)))) as numbers:
        yield from numbers


def read(goes_on):
    while not goes_on():
        time.sleep(0.001)
    print([next(kept) for _ in range(3)], flush=True)


kept = epoch()
"""


@ps.node(runs_on="thread")
def slow(record: data.Record[None]) -> int:
    time.sleep(0.01)
    return record.index


@ps.graph
async def slowly(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
    return ps.map_each(slow, records)


@pytest.mark.parametrize(
    "reads",
    [
        "read(lambda: True)",
        "read(lambda: True)\nraise SystemExit(0)",
        "threading.Thread(target=read, args=[lambda: True]).start()",
        "threading.Thread(target=read, args=[lambda: threading._SHUTTING_DOWN]).start()",
    ],
    ids=["the main thread", "a program that exits", "a thread", "a thread that begins when the main thread has ended"],
)
def test_a_program_that_ends_with_an_open_loop_exits(reads: str) -> None:
    assert run_program(LEFT_OPEN + reads) == "[0, 1, 2]\n"
