"""Sources that raise, never end or never give an item; readers that leave, are late, or never read."""

import asyncio
import itertools
import re
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import engine, testing
from tests.kit import paused, without_the_collector

echoed = ps.graph(paused)


@ps.node
async def fail_at_zero(x: int) -> int:
    if x == 0:
        raise LookupError(x)
    return x


failing_at_zero = ps.graph(fail_at_zero)


def plainly(make: Callable[[], Iterator[Any]]) -> Any:
    return make()


def asynchronously(make: Callable[[], Iterator[Any]]) -> Any:
    async def source() -> AsyncIterator[Any]:
        calls = make()
        try:
            for call in calls:
                await asyncio.sleep(0)
                yield call
        finally:
            calls.close()  # type: ignore[attr-defined]

    return source()


both = pytest.mark.parametrize("kind", [plainly, asynchronously])


class Abrupt(BaseException):
    """An error like that of `pytest.fail`: no Exception, but it should not end the program either."""


async def read(stream: engine.Stream[Any]) -> tuple[list[Any], str]:
    """Returns the values of a stream, and the error that has ended it."""
    values: list[Any] = []
    try:
        async with stream:
            async for value in stream:
                values.append(value)  # noqa: PERF401 - what was read before an error counts
    except (Exception, Abrupt) as error:  # noqa: BLE001 - the tests look at every error
        return values, repr(error)
    return values, ""


@both
@pytest.mark.parametrize(("error", "count"), [(LookupError, 5), (LookupError, 0), (Abrupt, 5)])
async def test_the_error_of_a_source_comes_in_its_turn(kind, error: type[BaseException], count: int) -> None:
    def source() -> Iterator[ps.Call[int]]:
        for x in range(count):
            yield echoed(x)
        raise error("source")

    async with engine.deploy(echoed) as service:
        for stream in (engine.stream, service.stream):
            seen, raised = await read(stream(kind(source)))
            assert raised == f"{error.__name__}('source')"
            # An error that is no Exception aborts the stream; results that were on their way may be lost.
            assert seen == [*range(len(seen) if error is Abrupt else count)]
        assert await service(7) == 7
    if not count:
        with pytest.raises(error):
            await engine.stream(kind(source)).wait_started()


async def test_a_source_whose_own_awaited_task_was_cancelled_is_an_error_of_the_stream() -> None:
    async def source() -> AsyncIterator[ps.Call[int]]:
        yield echoed(1)
        task = asyncio.ensure_future(asyncio.sleep(3600))
        task.cancel()
        await task

    seen, raised = await read(engine.stream(source()))
    assert (seen, raised.partition("(")[0]) == ([1], "NodeCancelledError")


async def test_a_source_that_swallows_cancellation_is_asked_no_more_after_the_end() -> None:
    given = 0
    go_on = asyncio.Event()

    async def source() -> AsyncIterator[ps.Call[int]]:
        nonlocal given
        while True:
            given += 1
            yield echoed(given)
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                pass

    stream = engine.stream(source())
    assert await anext(stream) == 1
    await stream.aclose()
    assert given <= 2


@both
async def test_an_error_of_a_source_that_is_closed_is_logged(kind) -> None:
    def source() -> Iterator[ps.Call[int]]:
        try:
            for x in itertools.count():
                yield echoed(x)
        finally:
            raise OSError("flush failed")

    with structlog.testing.capture_logs() as logs:
        async with engine.stream(kind(source)) as stream:
            await anext(stream)
    assert [log["event"] for log in logs] == ["stream.source_not_closed"]
    assert "flush failed" in repr(logs[0])


async def test_an_idle_stream_holds_no_item_of_an_async_source() -> None:
    class Value:
        pass

    made: list[weakref.ref[Value]] = []

    @ps.node
    async def drop(value: Value) -> int:
        return 1

    dropping = ps.graph(drop)

    async def source() -> AsyncIterator[ps.Call[int]]:
        for _ in range(3):
            value = Value()
            made.append(weakref.ref(value))
            yield dropping(value)
            del value
        await asyncio.get_running_loop().create_future()

    with without_the_collector():
        async with engine.stream(source()) as stream:
            for _ in range(3):
                await anext(stream)
            await testing.wait_quiescent()
            assert [ref() for ref in made] == [None, None, None]


@both
async def test_something_else_than_a_call_names_the_item(kind) -> None:
    def source() -> Iterator[Any]:
        yield echoed(0)
        yield 7

    seen, raised = await read(engine.stream(kind(source)))
    assert seen == [0]
    assert re.match("TypeError.*item 1 is 7", raised)


@both
@pytest.mark.parametrize("count", [0, 1])
async def test_no_item_and_one_item(kind, count: int) -> None:
    def source() -> Iterator[ps.Call[int]]:
        yield from (echoed(x) for x in range(count))

    for ordered in (True, False):
        assert await read(engine.stream(kind(source), ordered=ordered)) == (list(range(count)), "")
    async with engine.deploy(echoed) as service:
        assert await service.map(kind(source)) == list(range(count))
    stream = engine.stream(kind(source))
    await stream.wait_started()  # a stream without items has then begun and ended
    assert [outcome.value async for outcome in stream.outcomes()] == list(range(count))


@both
async def test_a_stream_that_was_closed_hands_out_nothing(kind) -> None:
    stream = engine.stream(kind(lambda: (echoed(x) for x in range(1, 6))))
    assert await anext(stream) == 1
    await testing.wait_quiescent()  # the other items have ended, too
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@both
async def test_a_stream_that_raised_hands_out_nothing_more(kind) -> None:
    reads: list[Callable[[engine.Stream[int]], Any]] = [anext, lambda stream: stream.wait_started()]
    for read_one in reads:
        stream: engine.Stream[int] = engine.stream(kind(lambda: (failing_at_zero(x) for x in range(6))))
        with pytest.raises(LookupError):
            await read_one(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_an_engine_that_is_closed_under_a_busy_reader_does_not_look_like_the_end() -> None:
    async with engine.Engine() as own:
        stream = own.stream((echoed(x) for x in range(1000)), max_in_flight=1)
        assert await anext(stream) == 0
    seen, raised = await read(stream)
    assert (seen in ([], [1]), raised.partition("(")[0]) == (True, "EngineClosedError")
