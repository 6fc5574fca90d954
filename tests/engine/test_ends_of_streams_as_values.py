"""How streams of values end: bounded, closed by their readers, retried only before the first value, never left open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS, Gate, Gauge, Scheduler, begun, numbers, outcomes, paused, values_of, virtual


class Source:
    """An endless generator that counts the values it gives, and how often it is opened and closed."""

    def __init__(self, *, fails_at: dict[int, BaseException] | None = None, hangs_at: int = -1, **policy: Any) -> None:
        self.given = self.opened = self.closed = 0
        fails_at = {**(fails_at or {})}

        @ps.node(name="numbers", **policy)
        async def numbers() -> AsyncIterator[int]:
            self.opened += 1
            try:
                while True:
                    if self.given in fails_at:
                        raise fails_at.pop(self.given)
                    if self.given == hangs_at:
                        await asyncio.Event().wait()
                    self.given += 1
                    yield self.given - 1
            finally:
                self.closed += 1

        self.node, self.graph = numbers, ps.graph(numbers)


@ps.node
async def one(numbers: AsyncIterator[int]) -> int:
    await testing.wait_quiescent()
    return await anext(numbers)


@ps.node(effectful="unordered")
async def fails_beside() -> None:
    await testing.wait_quiescent()
    raise OSError("beside")


async def read(stream: engine.Stream[int]) -> tuple[list[int], str, list[str]]:
    """Reads a stream to its end; returns its values, and the error that has ended it with its notes."""
    got: list[int] = []
    try:
        async with stream as values:
            async for value in values:
                got.append(value)  # noqa: PERF401 - keeps the values before an error
    except Exception as error:  # noqa: BLE001 - the tests look at every error
        return got, repr(error), getattr(error, "__notes__", [])
    return got, "", []


def note(attempt: int = 1) -> list[str]:
    return [f"in node 'numbers' of graph 'numbers', item 0, attempt {attempt}"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("capacity", "fewest"), [(1, 1), (4, 4), (16, 13)])
async def test_a_slow_reader_holds_its_producer_back(scheduler: Scheduler, capacity: int, fewest: int) -> None:
    """The producer goes on as soon as a quarter of its buffer is free."""
    source = Source(capacity=capacity)
    async with engine.stream(source.graph(), scheduler=scheduler) as values:
        for number in range(20):
            assert await anext(values) == number
            await testing.wait_quiescent()
            assert source.given <= number + 1 + capacity + 1  # buffered values, and one that waits for room
            assert fewest <= values.statistics().in_flight <= capacity
    assert source.closed == 1


async def test_backpressure_passes_through_a_map_and_batches() -> None:
    source = Source(capacity=2)

    @ps.node(capacity=2)
    async def pairs(numbers: AsyncIterator[int]) -> AsyncIterator[tuple[int, int]]:
        async for number in numbers:
            yield number, await anext(numbers)

    gauge = Gauge()

    @ps.node
    async def counted(number: int) -> int:
        with gauge:
            return await paused(number)

    @ps.graph
    async def graph() -> AsyncIterator[tuple[int, int]]:
        return pairs(ps.map_each(counted, source.node(), concurrency=3))

    async with engine.stream(graph()) as values:
        assert await anext(values) == (0, 1)
        await testing.wait_quiescent()
        first = source.given
        await testing.wait_quiescent()
        assert source.given == first <= 40
        assert [await anext(values) for _ in range(50)] == [(2 * n, 2 * n + 1) for n in range(1, 51)]
    assert 1 < gauge.peak <= 3
    assert source.closed == 1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_a_reader_that_ends_early_closes_the_generator(scheduler: Scheduler, how: str) -> None:
    source = Source()
    kept: list[object] = []

    @ps.node
    async def some(numbers: AsyncIterator[int]) -> int:
        kept.append(numbers)  # the reader's end must close the stream, not its deletion
        total = await anext(numbers) + await anext(numbers)
        if how == "raises":
            raise LookupError("enough")
        return total

    graph = source.node >> some
    assert await outcomes(engine.run(graph(), scheduler=scheduler)) == [1 if how == "returns" else LookupError]
    assert source.closed == 1


async def test_a_generator_that_ends_closes_the_one_that_it_reads() -> None:
    source = Source()

    @ps.node
    async def three(numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        for _ in range(3):
            yield await anext(numbers)

    graph = source.node >> three
    async with engine.stream(graph()) as values:
        assert [value async for value in values] == [0, 1, 2]
        assert source.closed == 1
    async with engine.stream(graph()) as values:
        await anext(values)
    assert source.closed == 2


async def test_an_error_is_raised_at_the_reader_in_its_turn() -> None:
    values = engine.stream(Source(fails_at={3: ValueError("fourth")}).graph())
    assert await read(values) == ([0, 1, 2], "ValueError('fourth')", note())
    assert [value async for value in values] == []


async def test_a_reader_may_catch_the_error_of_what_it_reads() -> None:
    source = Source(fails_at={2: ValueError("third")})

    @ps.node
    async def sturdy(numbers: AsyncIterator[int]) -> list[int]:
        got: list[int] = []
        try:
            async for number in numbers:
                got.append(number)  # noqa: PERF401 - keeps the values before an error
        except ValueError:
            got.append(-1)
        return got

    assert await engine.run((source.node >> sturdy)()) == [0, 1, -1]


async def test_an_error_that_no_reader_comes_to_is_logged() -> None:
    @ps.node(name="numbers")
    async def fails_when_it_closes() -> AsyncIterator[int]:
        try:
            for number in range(99):
                yield number
        finally:
            raise OSError("not closed")

    for source in (Source(fails_at={2: ValueError("third")}).node, fails_when_it_closes):
        with capture_logs() as logs:
            assert await engine.run((source >> one)()) == 0
        assert [(log["event"], log["node"]) for log in logs] == [("stream.unread_error", "numbers")]


@pytest.mark.parametrize("deployed", [False, True])
@pytest.mark.parametrize("expires", [False, True])
@virtual
async def test_an_error_that_the_program_does_not_read_is_logged(deployed: bool, expires: bool) -> None:
    graph = Source(fails_at={2: ValueError("third")}).graph
    options: dict[str, Any] = {"timeout_seconds": 1} if expires else {}
    async with AsyncExitStack() as stack:
        own: Any = await stack.enter_async_context(engine.deploy(graph)) if deployed else engine
        with capture_logs() as logs:
            async with own.stream(graph(), **options) as numbers:
                assert await anext(numbers) == 0
                await asyncio.sleep(2)  # the generator has failed
    assert [(log["event"], log["node"]) for log in logs] == [("stream.unread_error", "numbers")]


async def test_retry_only_before_the_first_value() -> None:
    source = Source(retry=ps.Retry(attempts=3), fails_at={0: OSError("first"), 2: OSError("third")})
    assert await read(engine.stream(source.graph())) == ([0, 1], "OSError('third')", note(attempt=2))
    assert (source.opened, source.closed) == (2, 2)


async def test_fallback_only_before_the_first_value() -> None:
    def listed(error: Exception) -> list[int]:
        return [10, 11]

    async def generated(error: Exception) -> AsyncIterator[int]:
        yield 20

    for fallback, expected in ((listed, [10, 11]), (generated, [20])):
        source = Source(fallback=fallback, fails_at={0: OSError("first")})
        assert await read(engine.stream(source.graph())) == (expected, "", [])
        source = Source(fallback=fallback, fails_at={1: OSError("second")})
        assert await read(engine.stream(source.graph())) == ([0], "OSError('second')", note())
    _, error, _ = await read(engine.stream(Source(fallback=str, fails_at={0: OSError("first")}).graph()))
    assert "TypeError" in error
    assert "fallback of 'numbers', which gives a stream, returned 'first'" in error


@virtual
async def test_the_timeout_of_a_generator_is_until_its_first_value() -> None:
    source = Source(hangs_at=0, timeout_seconds=5, retry=ps.Retry(attempts=2))
    with pytest.raises(ps.NodeTimeoutError, match="longer than 5 s"):
        await engine.stream(source.graph()).wait_started()
    assert (source.opened, asyncio.get_running_loop().time() >= 10) == (2, True)

    @ps.node(timeout_seconds=5)
    async def slow() -> AsyncIterator[int]:
        for number in range(5):
            yield number
            await asyncio.sleep(4)

    assert await values_of(engine.stream(ps.graph(slow)())) == [0, 1, 2, 3, 4]


async def test_an_attempt_that_has_read_from_a_stream_is_not_repeated() -> None:
    source = Source()
    tried = 0

    @ps.node(retry=ps.Retry(attempts=3))
    async def fragile(numbers: AsyncIterator[int]) -> int:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise OSError("before it read")
        await anext(numbers)
        raise OSError("after it read")

    with pytest.raises(OSError, match="after it read"):
        await engine.run((source.node >> fragile)())
    assert (tried, source.opened, source.closed) == (2, 1, 1)


@virtual
async def test_the_deadline_covers_the_whole_stream() -> None:
    source = Source(hangs_at=2)
    _, error, _ = await read(engine.stream(source.graph(), timeout_seconds=3))
    assert (error.partition("(")[0], source.closed) == ("DeadlineExceeded", 1)
    source = Source()
    values = engine.stream(source.graph(), timeout_seconds=3)
    assert await anext(values) == 0
    await asyncio.sleep(4)  # a slow reader: values that it has not read by the deadline are dropped
    with pytest.raises(ps.DeadlineExceeded):
        await anext(values)
    assert source.closed == 1
    async with engine.deploy(source.graph, max_in_flight=1) as service:
        async with service.stream(source.graph()) as held:
            await held.wait_started()
            with pytest.raises(ps.DeadlineExceeded, match="got no place"):
                await service.stream(source.graph(), timeout_seconds=3).wait_started()
        assert service.statistics().admission.in_flight == 0


async def test_a_stream_is_refused_before_it_has_begun() -> None:
    source = Source()
    async with engine.deploy(source.graph, max_in_flight=1, max_queue=0) as service:
        async with service.stream(source.graph()) as held:
            await held.wait_started()
            refused = service.stream(source.graph())
            with pytest.raises(ps.Overloaded):
                await refused.wait_started()
            with pytest.raises(StopAsyncIteration):
                await anext(refused)
        async with service.stream(source.graph()) as again:
            await again.wait_started()
        assert service.statistics().admission.refused == 1


async def test_a_drain_waits_for_open_streams() -> None:
    graph = ps.graph(numbers)
    async with engine.deploy(graph) as service:
        values = service.stream(graph(40))
        assert await anext(values) == 0
        [drained] = await begun(service.drain())
        assert not drained.done()
        with pytest.raises(ps.EngineClosedError, match="draining"):
            service.stream(graph(40))
        assert [value async for value in values] == list(range(1, 40))
        await drained


async def test_an_abort_ends_open_streams() -> None:
    source = Source()
    async with engine.deploy(source.graph) as service:
        values = service.stream(source.graph())
        assert await anext(values) == 0
        await service.abort()
        with pytest.raises(ps.EngineClosedError, match="stopped while the call was in flight"):
            await anext(values)
    async with engine.Engine() as own:
        values = own.stream(source.graph())
        await values.wait_started()
    with pytest.raises(ps.EngineClosedError, match="Engine was closed"):
        await anext(values)
    assert source.closed == 2


async def test_a_closed_stream_stays_closed() -> None:
    source = Source()
    values = engine.stream(source.graph())
    await values.aclose()
    with pytest.raises(ps.EngineClosedError, match="read once"):
        await values.wait_started()
    async with engine.stream(source.graph()) as values:
        await anext(values)
    assert [value async for value in values] == []
    await values.aclose()


async def test_closing_a_stream_from_one_of_its_own_nodes() -> None:
    holder: list[engine.Stream[int]] = []

    @ps.node
    async def closes() -> AsyncIterator[int]:
        yield 1
        await holder[0].aclose()

    values = engine.stream(ps.graph(closes)())
    holder.append(values)
    assert "closed from inside one of its own nodes" in (await read(values))[1]
    holder.clear()


async def test_the_stream_ends_when_all_steps_have() -> None:
    gate = Gate()

    @ps.node(effectful="unordered")
    async def store(fails: bool) -> None:
        if await gate.wait(fails):
            raise OSError("disk full")

    @ps.graph
    async def graph(fails: bool) -> AsyncIterator[int]:
        await store(fails)
        return numbers(1)

    async with engine.stream(graph(False)) as values:
        assert await anext(values) == 0
        asyncio.get_running_loop().call_soon(gate.open)
        assert [value async for value in values] == []
        assert gate.gone == [False]
    assert (await read(engine.stream(graph(True))))[1] == "OSError('disk full')"


async def test_the_failure_of_another_step_ends_the_stream_at_once() -> None:
    source = Source(hangs_at=5)

    @ps.graph
    async def graph() -> AsyncIterator[int]:
        await fails_beside()
        return source.node()

    assert (await read(engine.stream(graph(), scheduler="parallel")))[1] == "OSError('beside')"
    assert source.closed == 1


async def test_a_stream_that_was_cut_short_does_not_look_complete() -> None:
    source = Source()
    seen: list[str] = []

    @ps.node
    async def stubborn(numbers: AsyncIterator[int]) -> int:
        await anext(numbers)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                seen.append(repr(await anext(numbers, "the end")))
            except asyncio.CancelledError as error:
                seen.append(str(error))
        return 0

    @ps.graph
    async def graph() -> int:
        await fails_beside()
        return await stubborn(source.node())

    with pytest.raises(OSError, match="beside"):
        await engine.run(graph())
    assert (seen, source.closed) == (["item 0 has ended"], 1)


async def test_a_map_ends_with_its_first_error_in_its_turn() -> None:
    source = Source()
    asked: list[int] = []

    @ps.node
    async def picky(number: int) -> int:
        asked.append(number)
        await asyncio.sleep(0 if number > 3 else 0.001)
        if number in (3, 5):
            raise ValueError(f"not {number}")
        return number

    @ps.graph
    async def graph() -> AsyncIterator[int]:
        return ps.map_each(picky, source.node(), concurrency=4)

    got, error, notes = await read(engine.stream(graph()))
    assert (got, error) == ([0, 1, 2], "ValueError('not 3')")
    assert notes[0] == "in node 'picky' of graph 'graph/picky', item 3, attempt 1"
    assert len(asked) <= 3 + 4
    assert source.closed == 1


async def test_leaving_waits_for_a_generator_that_takes_its_time_to_close() -> None:
    steps: list[str] = []

    @ps.node
    async def careful() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            steps.append("closed")

    async with engine.stream(ps.graph(careful)()) as values:
        await anext(values)
    assert steps == ["closed"]


async def test_a_generator_that_is_cancelled_by_something_that_it_awaits() -> None:
    @ps.node
    async def awaits_cancelled() -> AsyncIterator[int]:
        yield 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    assert "NodeCancelledError" in (await read(engine.stream(ps.graph(awaits_cancelled)())))[1]
