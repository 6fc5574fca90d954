"""`stream(progress=True)`: a bar on a terminal, and no output elsewhere."""

import asyncio
import io
import os
import re
import sys
import termios
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from penstock.engine.call_stream import length_of
from penstock.studio.progress import words
from tests.kit import numbers, values_of


@ps.graph
@ps.node
async def checked(number: int) -> int:
    await asyncio.sleep(0)
    if number % 5 == 3:
        raise ValueError(number)
    return number


counted = ps.graph(numbers)


class Screen:
    """A terminal to which standard error goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._master, self.slave = os.openpty()
        termios.tcsetwinsize(self.slave, (30, 120))
        os.set_blocking(self._master, False)
        self.file = open(self.slave, "w", closefd=False)  # noqa: SIM115 - closed below

    def attach(self) -> None:
        """Send standard error there; call it inside of the test, as pytest replaces standard error before each test."""
        self._monkeypatch.setattr(sys, "stderr", self.file)

    def shown(self) -> str:
        """Return the written text, without colours and movements of the cursor."""
        found = b""
        try:
            while part := os.read(self._master, 65536):
                found += part
        except BlockingIOError:
            pass
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", found.decode())

    async def until(self, pattern: str) -> str:
        """Wait until the written text has a pattern; return the text."""
        found = ""
        while not re.search(pattern, found):
            await asyncio.sleep(0)
            found += self.shown()
        return found

    def last(self) -> str:
        """Return the last line."""
        return re.split(r"[\r\n]+", self.shown().strip())[-1].strip()

    def close(self) -> None:
        self.file.close()
        os.close(self.slave)
        os.close(self._master)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    found = Screen(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    yield found
    found.close()


async def read(calls: Any, *, progress: bool = True, **options: Any) -> list[int]:
    return await values_of(engine.stream(calls, progress=progress, **options))


async def test_the_bar_ends_with_what_was_done(screen: Screen) -> None:
    screen.attach()
    assert len(await read([checked(number) for number in range(20)], on_error="skip")) == 16
    assert re.fullmatch(r"checked ━+ 20/20  [\d,.]+/s  4 failed", screen.last())
    await read((checked(number) for number in range(3)), ordered=False)  # without a length
    assert re.fullmatch(r"checked ━+ 3  [\d,.]+/s", screen.last())
    assert await read(counted(7)) == [*range(7)]  # values of one call
    assert re.fullmatch(r"numbers ━+ 7  [\d,.]+/s", screen.last())
    with pytest.raises(ValueError, match="3"):
        await read([checked(number) for number in range(4)], max_in_flight=1)
    assert "4/4" in screen.last()


async def test_a_name_that_would_drive_the_terminal_is_shown_escaped(screen: Screen) -> None:
    async def evil(number: int) -> int:
        return await checked(number)

    evil.__name__ = "a\x1b]0;title\x07\nb"
    graph = ps.graph(evil)
    screen.attach()
    await read([graph(number) for number in range(3)])
    assert screen.last().startswith("a\\x1b]0;title\\x07 b ━")


async def test_the_numbers_move_while_it_runs(screen: Screen) -> None:
    screen.attach()
    gate = asyncio.Event()

    @ps.graph
    @ps.node(concurrency=1, capacity=1)
    async def waiting(number: int) -> int:
        if number == 2:
            await gate.wait()
        return number

    async with engine.stream([waiting(number) for number in range(4)], progress=True) as results:
        assert [await anext(results), await anext(results)] == [0, 1]
        await screen.until(r"waiting [━╸╺]+ 2/4 +[\d.,]+/s +1 s left|2/4 +[\d.,]+/s +\d+ s left")
        gate.set()
        assert [number async for number in results] == [2, 3]
    assert "4/4" in screen.last()


class Numbers:
    """A source with a length."""

    def __init__(self, count: int, gate: asyncio.Event | None = None) -> None:
        self._left, self._gate = deque(range(count)), gate

    def __len__(self) -> int:
        return len(self._left)

    def __aiter__(self) -> "Numbers":
        return self

    async def __anext__(self) -> int:
        if self._gate is not None and len(self._left) == 2:
            await self._gate.wait()
        if not self._left:
            raise StopAsyncIteration
        return self._left.popleft()


@ps.graph
@ps.node
async def filtered(numbers: AsyncIterator[int]) -> AsyncIterator[int]:
    async for number in numbers:
        if number % 2:
            yield number


async def test_values_of_a_source_with_a_length_have_a_total_and_the_time_left(screen: Screen) -> None:
    screen.attach()
    gate = asyncio.Event()
    async with engine.stream(filtered(Numbers(6, gate)), progress=True) as stream:
        assert [await anext(stream), await anext(stream)] == [1, 3]
        await screen.until(r"filtered [━╸╺]+ 4/6 +[\d.,]+/s +\d+ s left")
        gate.set()
        assert [value async for value in stream] == [5]
    assert re.fullmatch(r"filtered ━+ 6/6  [\d,.]+/s", screen.last())
    assert await read(filtered(Numbers(2))) == [1]  # read before the bar looks
    assert re.fullmatch(r"filtered ━+ 2/2  [\d,.]+/s", screen.last())


async def test_streams_of_a_service_have_one_too(screen: Screen) -> None:
    screen.attach()
    async with engine.deploy(counted, checked) as service:
        assert await service.map([checked(1), checked(2)], progress=True) == [1, 2]
        assert screen.last().startswith("checked ━")
        assert await values_of(service.stream(counted(2), progress=True)) == [0, 1]
        assert screen.last().startswith("numbers ━")


async def test_bars_of_streams_that_run_together_stand_below_each_other(screen: Screen) -> None:
    screen.attach()
    async with engine.stream([checked(1), checked(2)], progress=True) as one:
        assert await anext(one) == 1
        assert await read(counted(2)) == [0, 1]
        assert await anext(one) == 2
    lines = [line.strip() for line in screen.shown().splitlines()]
    assert any(re.match("checked ━+ 2/2", line) for line in lines[-2:])
    assert any(re.match("numbers ━+ 2 ", line) for line in lines[-2:])
    assert len([thread for thread in threading.enumerate() if thread.name == "penstock-progress"]) == 0


async def test_what_a_break_cancels_has_not_failed(screen: Screen) -> None:
    screen.attach()

    @ps.graph
    @ps.node
    async def waiting(number: int) -> int:
        if number:
            await asyncio.Event().wait()
        return number

    async with engine.stream([waiting(number) for number in range(50)], progress=True) as results:
        async for _ in results:
            break
    assert "failed" not in screen.last()


async def test_a_cancel_ends_it(screen: Screen) -> None:
    screen.attach()

    async def forever() -> AsyncIterator[ps.Call[int]]:
        await asyncio.Event().wait()
        yield checked(1)

    task = asyncio.create_task(read(forever()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert screen.last().startswith("a stream ")


async def test_a_stream_that_is_dropped_ends_it(screen: Screen) -> None:
    screen.attach()
    results = engine.stream([checked(1), checked(2)], progress=True)
    assert await anext(results) == 1
    del results
    while any(thread.name.startswith(("penstock-progress", "Thread-")) for thread in threading.enumerate()):
        await asyncio.sleep(0)  # until the thread of rich has ended, and the thread that draws the last numbers


async def test_a_stream_that_never_begins_shows_nothing(screen: Screen) -> None:
    screen.attach()
    await engine.stream([checked(1)], progress=True).aclose()
    assert screen.shown() == ""


async def test_a_terminal_that_is_stopped_stops_no_loop(screen: Screen) -> None:
    screen.attach()
    termios.tcflow(screen.slave, termios.TCOOFF)  # Ctrl-S
    task = asyncio.create_task(read([checked(1), checked(2)]))
    try:
        while True:  # until it is closing: all has been read
            await asyncio.sleep(0)
            if any(one.get_name() == "penstock-stream-close" for one in asyncio.all_tasks()):
                break
        for _ in range(100):
            await asyncio.sleep(0)  # the loop goes on
        assert not task.done()
    finally:
        termios.tcflow(screen.slave, termios.TCOON)
    assert await task == [1, 2]


async def test_what_the_program_prints_stays_where_it_belongs(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.attach()
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    async with engine.stream([checked(1)], progress=True) as results:
        shown = await screen.until(".")  # until the display has begun
        async for number in results:
            print("found", number)
    assert output.getvalue() == "found 1\n"
    assert "found" not in shown + screen.shown()
    assert sys.stdout is output
    assert sys.stderr is screen.file


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "penstock.studio.progress", raising=False)


@pytest.mark.usefixtures("without_rich")
async def test_elsewhere_than_on_a_terminal_it_is_silent_and_needs_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    assert await read([checked(1), checked(2)]) == [1, 2]
    assert output.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    assert await read([checked(1)]) == [1]


@pytest.mark.usefixtures("without_rich")
async def test_on_a_terminal_without_rich_it_names_the_extra(screen: Screen) -> None:
    screen.attach()
    with pytest.raises(ps.MissingExtraError, match=r'pip install "penstock\[rich\]"'):
        engine.stream([checked(1)], progress=True)
    assert await read([checked(1)], progress=False) == [1]


class Broken:
    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[ps.Call[int]]:
        yield checked(1)


@pytest.mark.parametrize(
    ("calls", "length"),
    [([1, 2], 2), ((), 0), (range(7), 7), (iter([1, 2, 3]), 3), ((n for n in [1]), None), (Broken(), None), (3, None)],
)
def test_a_length_is_known_where_the_calls_know_it(calls: object, length: int | None) -> None:
    assert length_of(calls) == length


@pytest.mark.parametrize(
    ("standing", "text"),
    [
        ((0, 0, None, None, ""), "0"),
        ((1234, 0, None, 12.3, ""), "1,234  12.3/s"),
        ((10, 2, 100, 10.0, "decode"), "10/100  10.0/s  9 s left  2 failed  decode limits"),
        ((0, 0, 7200, 1.0, ""), "0/7,200  1.00/s  2 h 0 min left"),
        ((0, 0, 10, 0.0, ""), "0/10  0/s"),
        ((12, 0, 10, 5.0, ""), "12/10  5.00/s"),
        ((1, 0, None, 1.0, "a\x1b[2Jb"), "1  1.00/s  a\\x1b[2Jb limits"),
    ],
)
def test_words(standing: Any, text: str) -> None:
    assert words(*standing) == text
