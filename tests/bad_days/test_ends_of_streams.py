"""How a stream ends when its reader does not end it, and failures that must not look like its end."""

import asyncio
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import numpy as np
import pytest

import penstock as ps
from penstock import data, engine, testing
from tests.kit import Gate, begun, numbers, plain, virtual, without_the_collector


@ps.node
async def counted(stops_at: int, fails: bool) -> AsyncIterator[int]:
    """Give a few numbers, and then wait for ever or fail."""
    for number in range(stops_at):
        yield number
    if fails:
        raise OSError("the disk is gone")
    await asyncio.Event().wait()


@ps.node
async def number_of(index: int, stops_at: int, fails: bool) -> int:
    if index < stops_at:
        return index
    if fails:
        raise OSError("the disk is gone")
    await asyncio.Event().wait()
    return -1


counting, one_number = ps.graph(counted), ps.graph(number_of)


async def read_all(values: AsyncIterable[object]) -> None:
    async for _ in values:
        pass


async def cancelled_by_its_task(stream: engine.Stream[int]) -> None:
    [reader] = await begun(read_all(stream))
    reader.cancel()
    await asyncio.wait([reader])


async def cancelled_by_a_task_group_of_anyio(values: Any) -> None:
    """Cancels a reader as Starlette does when the client of a request has left."""
    async with anyio.create_task_group() as group:
        group.start_soon(read_all, values)
        await testing.wait_quiescent()
        group.cancel_scope.cancel()


async def cancelled_in_a_generator_by_a_task_group_of_anyio(stream: engine.Stream[int]) -> None:
    async def around() -> AsyncIterator[str]:
        async for number in stream:
            yield f"data: {number}"

    await cancelled_by_a_task_group_of_anyio(around())


async def cancelled_before_the_first_value(stream: engine.Stream[int]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(stream.wait_started)
        await asyncio.sleep(0)
        group.cancel_scope.cancel()


async def cancelled_while_it_reads_outcomes(stream: engine.Stream[int]) -> None:
    await cancelled_by_a_task_group_of_anyio(stream.outcomes())


async def timed_out(stream: engine.Stream[int]) -> None:
    with anyio.move_on_after(0.01):
        await read_all(stream)


async def left_between_two_values(stream: engine.Stream[int]) -> None:
    async for _ in stream:
        break


async def failed(stream: engine.Stream[int]) -> None:
    with pytest.raises(OSError, match="gone"):
        await read_all(stream)


LEAVING: list[Callable[[engine.Stream[int]], Awaitable[None]]] = [
    cancelled_by_its_task, cancelled_by_a_task_group_of_anyio, cancelled_in_a_generator_by_a_task_group_of_anyio,
    cancelled_before_the_first_value, cancelled_while_it_reads_outcomes, timed_out, left_between_two_values, failed,
]  # fmt: skip


@pytest.mark.parametrize("where", ["engine", "deployment"])
@pytest.mark.parametrize("kind", ["calls", "values"])
@pytest.mark.parametrize("leave", LEAVING)
async def test_a_stream_that_is_dropped_is_closed_without_the_collector_however_its_last_read_ended(
    leave: Callable[[engine.Stream[int]], Awaitable[None]], kind: str, where: str
) -> None:
    async with engine.Engine() as own, own.deploy(counting, one_number, max_in_flight=4) as service:
        place: Any = own if where == "engine" else service
        fails = leave is failed
        with without_the_collector():
            calls = (one_number(index, 3, fails) for index in range(1000))
            stream = place.stream(counting(3, fails) if kind == "values" else calls)
            dropped = weakref.ref(stream)
            await leave(stream)
            del stream
            await testing.wait_quiescent()
            in_flight = service.statistics().admission.in_flight
            assert (dropped() is None, in_flight, own.statistics().scopes) == (True, 0, 1)
            assert not asyncio.all_tasks() - {asyncio.current_task()}


def stream_of_five(kind: str, node: Any) -> engine.Stream[int]:
    """A stream of five calls of a node, or of five values of one call, one after the other."""
    one: ps.Graph[[int], int] = ps.graph(node)

    @ps.graph
    async def each() -> AsyncIterator[int]:
        return ps.map_each(node, numbers(5), concurrency=1)

    return engine.stream(each()) if kind == "values" else engine.stream(map(one, range(5)), max_in_flight=1)


@pytest.mark.parametrize("kind", ["calls", "values"])
@virtual
async def test_a_read_that_is_cancelled_leaves_the_stream_to_the_next(kind: str) -> None:
    ticks = 0

    @ps.node
    async def slow(x: int) -> int:
        await asyncio.sleep(0.02)
        return x

    values: list[int] = []
    async with stream_of_five(kind, slow) as stream:
        while len(values) < 5:
            try:
                async with asyncio.timeout(0.003):
                    values.append(await anext(stream))
            except TimeoutError:
                ticks += 1
    assert values == list(range(5))
    assert ticks >= 5 * 6


@pytest.mark.parametrize("kind", ["values", "calls"])
async def test_a_cancelled_wait_for_the_first_item_leaves_the_stream_open(kind: str) -> None:
    gate = Gate()
    async with stream_of_five(kind, gate.node()) as stream:
        [starting] = await begun(stream.wait_started())
        starting.cancel()
        await asyncio.wait([starting])
        gate.open()
        assert [x async for x in stream] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["calls", "values"])
@pytest.mark.parametrize("second", ["anext", "wait_started"])
@pytest.mark.parametrize("first", ["anext", "wait_started"])
async def test_a_second_reader_is_refused_and_the_first_reads_on(first: str, second: str, kind: str) -> None:
    gate = Gate()
    async with stream_of_five(kind, gate.node()) as stream:
        ways: dict[str, Any] = {"anext": stream.__anext__, "wait_started": stream.wait_started}
        [reader] = await begun(ways[first]())
        with pytest.raises(RuntimeError, match="one reader"):
            async with asyncio.timeout(60):
                await ways[second]()
        gate.open()
        assert await reader == (0 if first == "anext" else None)
        assert [x async for x in stream] == ([1, 2, 3, 4] if first == "anext" else [0, 1, 2, 3, 4])


async def test_stop_async_iteration_of_a_node_does_not_look_like_the_end_of_the_stream() -> None:
    @ps.node
    async def exhausted(x: int) -> int:
        raise StopAsyncIteration

    with pytest.raises(RuntimeError, match=r"exhausted.*StopAsyncIteration"):
        await read_all(engine.stream(map(ps.graph(exhausted), range(3))))


# Places where Penstock calls a user's function while a reader waits for the next value.

Feed: TypeAlias = "Callable[[Callable[[Any], Any]], AsyncIterator[Any]]"


class Failing:
    """A source whose length fails in a later epoch, and whose third record fails."""

    def __init__(self, fail: Callable[[Any], Any]) -> None:
        self.fail = fail
        self.lengths = 0

    def __len__(self) -> int:
        self.lengths += 1
        self.fail(self.lengths - 2)
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.fail(index))


class Sequence:
    def __init__(self, fail: Callable[[Any], Any]) -> None:
        self.fail = fail

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.full(4, self.fail(2))


class Remembering:
    """A function for `data.filtered` that has a state, which cannot be asked for after the third value."""

    def __init__(self, fail: Callable[[Any], Any]) -> None:
        self.fail, self.seen = fail, 0

    def __call__(self, record: data.Record[Any]) -> bool:
        self.seen += 1
        return True

    def state(self) -> int:
        return int(self.fail(max(2, self.seen) if self.seen > 3 else 0))

    def restore(self, state: int) -> None:
        self.seen = state


def asked_later(fail: Callable[[Any], Any]) -> Callable[[data.Record[Any]], Any]:
    async def keeps(record: data.Record[Any]) -> bool:
        fail(record.index)
        return True

    return keeps


def next_of(fail: Callable[[Any], Any]) -> Iterator[int]:
    return map(fail, range(4))


def begun_again(fail: Callable[[Any], Any]) -> Callable[[], Iterator[int]]:
    epochs = count()
    return lambda: iter([fail(next(epochs))])


def values_from(value: Any) -> AsyncIterator[Any]:
    @ps.node
    async def made() -> AsyncIterator[Any]:
        yield value
        yield value

    return made()


def parts(fail: Callable[[Any], Any]) -> AsyncIterator[Any]:
    """Give batches whose constructor fails for a part, and for a joined batch."""

    @dataclass
    class Batch:
        values: Any

        def __post_init__(self) -> None:
            fail(0 if np.size(self.values) == 2 else 2)

    return values_from(Batch(np.arange(2)))


FEEDS: dict[str, Feed] = {
    "filtered": lambda fail: data.order(range(4)) >> data.filtered(lambda record: fail(record.index) >= 0),
    "filtered, async": lambda fail: data.order(range(4)) >> data.filtered(asked_later(fail)),
    "read on the loop": lambda fail: data.order(range(4)) >> data.read(Failing(fail), runs_on="loop"),
    "read in a thread": lambda fail: data.order(range(4)) >> data.read(Failing(fail)),
    "length": lambda fail: data.order(Failing(fail), epochs=4),
    "begin": lambda fail: data.order(begun_again(fail), epochs=4),
    "next": lambda fail: data.order(next_of(fail)),
    "unbatched": lambda fail: parts(fail) >> data.unbatched(),
    "rebatched": lambda fail: parts(fail) >> data.rebatched(3),
    "packed": lambda fail: values_from(Sequence(fail)) >> data.packed(3),
    "state": lambda fail: data.order(range(8)) >> data.filtered(Remembering(fail)),
}


def failing_with(error: Exception) -> Callable[[Any], Any]:
    def fail(number: Any) -> Any:
        if number >= 2:
            raise error
        return number or 0

    return fail


@pytest.mark.parametrize(
    ("where", "error"),
    [*product(FEEDS, [StopAsyncIteration]), *product([one for one in FEEDS if one != "next"], [StopIteration])],
)
async def test_an_iterator_that_a_function_of_a_feed_exhausts_does_not_end_the_feed(
    where: str, error: type[Exception], tmp_path: Path
) -> None:
    raised = error("exhausted")

    @ps.graph
    async def feed() -> AsyncIterator[Any]:
        return FEEDS[where](failing_with(raised))

    saved = ps.Checkpoint(tmp_path, every_values=1) if where == "state" else None
    with pytest.raises(RuntimeError, match=error.__name__) as caught:
        await read_all(engine.stream(feed(), checkpoint=saved))
    assert caught.value.__cause__ is raised


class Page:
    """A result whose property fails while the result of the graph is built."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @property
    def text(self) -> str:
        raise self.error


@pytest.mark.parametrize("error", [StopAsyncIteration, StopIteration])
@pytest.mark.parametrize("where", ["order_by", "key", "key of one call", "result"])
async def test_nor_does_it_end_a_stream_of_calls(where: str, error: type[Exception]) -> None:
    raised = error("exhausted")

    def fails(call: object) -> str:
        raise raised

    @ps.node
    async def page() -> Page:
        return Page(raised)

    @ps.graph
    async def text(number: int) -> str:
        return (await page()).text

    counting, same = ps.graph(numbers), ps.graph(plain)
    async with engine.deploy(counting, same, text, key=fails if where.startswith("key") else None) as service:
        streams: dict[str, Callable[[], engine.Stream[Any]]] = {
            "order_by": lambda: service.stream(map(same, range(3)), order_by=fails),
            "key": lambda: service.stream(map(same, range(3))),
            "key of one call": lambda: service.stream(counting(3)),
            "result": lambda: service.stream(map(text, range(3))),
        }
        with pytest.raises(RuntimeError, match=error.__name__) as caught:
            await read_all(streams[where]())
    assert caught.value.__cause__ is raised
