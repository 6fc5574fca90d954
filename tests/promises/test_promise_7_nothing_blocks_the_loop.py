"""Promise 7: nothing in the engine blocks the event loop."""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, added, same, values_of
from tests.promises.exploring import Explorer, random_of_loop


class Turns:
    """Counts the turns of the event loop, and the handlers that run between two turns.

    Attributes:
        number: the number of the present turn.
        most: the most handlers that one task ran between two turns.
        most_of_all: the most handlers that all tasks together ran between two turns.
    """

    def __init__(self) -> None:
        self.number = self.most = self.most_of_all = 0
        self._since_turn: Counter[asyncio.Task[Any] | None] = Counter()
        self._handle: asyncio.Handle | None = None

    def count(self) -> None:
        """Count a handler that runs."""
        self._since_turn[asyncio.current_task()] += 1

    @contextmanager
    def watched(self) -> Generator[None]:
        """Count anew, until the block ends."""
        self.number = self.most = self.most_of_all = 0
        self._since_turn.clear()
        self._turn()
        yield
        assert self._handle is not None
        self._handle.cancel()
        self._count()

    def _turn(self) -> None:
        self.number += 1
        self._count()
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def _count(self) -> None:
        self.most = max(self.most, *self._since_turn.values(), 0)
        self.most_of_all = max(self.most_of_all, self._since_turn.total())
        self._since_turn.clear()


turns = Turns()


@ps.node
async def never_waits(x: int) -> int:
    turns.count()
    return x


@ps.node
async def waits(x: int) -> int:
    turns.count()
    for _ in range(x % 3):
        await asyncio.sleep(0)
    return x


@ps.node(concurrency=1, capacity=1)
async def narrow(x: int) -> int:
    turns.count()
    return x


@ps.node
def further(x: int) -> int:
    turns.count()
    return x + 1


@ps.node
def below_60(x: int) -> bool:
    return x < 60


@ps.node
def many(x: int) -> list[int]:
    return list(range(60))


hops = never_waits >> never_waits >> further >> added >> narrow
plain_hops = further >> added


@ps.graph
async def line_hops(x: int) -> int:
    for _ in range(8):
        x = await never_waits(x)
    return x


@ps.node
async def refuses(x: int) -> int:
    turns.count()
    raise ValueError(x)


failing_hops = line_hops >> refuses
mixed_hops = never_waits >> waits >> never_waits


@ps.graph
async def looping_hops(x: int) -> int:
    return await ps.while_loop(below_60, further, await never_waits(x))


@ps.graph
async def mapping_hops(x: int) -> list[int]:
    return await ps.map_each(never_waits, many(x))


def test_promise_7_the_loop_gets_its_turn_after_256_hops_at_most(explore: Explorer) -> None:
    """No task makes more than 256 hops between two turns of the loop; hops are counted, no time is measured."""

    async def main() -> int:
        rng = random_of_loop()
        graph: ps.Graph[[int], Any] = rng.choice([hops, plain_hops, line_hops, mixed_hops, looping_hops, mapping_hops])
        size = 10 if graph in (looping_hops, mapping_hops) else 100
        with turns.watched():
            if rng.random() < 0.8:
                options: Any = {"ordered": rng.random() < 0.5, "max_in_flight": rng.choice([2, 16, 64])}
                assert len(await values_of(engine.stream(map(graph, [0] * size), **options))) == size
            else:
                async with engine.deploy(graph, max_in_flight=16) as service:
                    await asyncio.gather(*map(service, [0] * (size // 8)))
        levels = 2 if graph in (looping_hops, mapping_hops) else 1  # a loop has two levels: the graph, and the body
        assert turns.most <= 256 * levels, f"{turns.most} handlers ran between two turns, in {graph.name!r}"
        return turns.most

    explore(main, reaches={"a long burst": lambda most: most > 100})


async def test_promise_7_items_that_fail_at_the_end_of_a_line_give_the_loop_its_turn() -> None:
    calls = map(failing_hops, [0] * 100)
    with turns.watched():
        assert await values_of(engine.stream(calls, max_in_flight=100, on_error="skip")) == []
    assert 100 < turns.most <= 256


def _fails(x: int) -> int:
    turns.count()
    raise OSError(x)


async def _afails(x: int) -> int:
    return _fails(x)


class Down:
    """A class with state, all of whose calls fail at once."""

    async def __call__(self, x: int) -> int:
        return _fails(x)


RETRIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (_fails, {}), "async": (_afails, {}), "class": (Down, {}),
    "wait": (_afails, {"retry": ps.Retry(attempts=20, wait=lambda error, attempt: 0)}),
    "timeout": (_afails, {"timeout_seconds": 60}),
    "hedge": (_afails, {"hedge": ps.Hedge(after_seconds=60)}),
    "cache": (_afails, {"cache": ps.Cache(max_bytes=1_000, ttl_seconds=1)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", RETRIES)
async def test_promise_7_every_retry_gives_the_loop_its_turn(kind: str) -> None:
    """This holds also for a retry without a pause, after an attempt that never waited."""
    handler, more = RETRIES[kind]
    down: Any = ps.node(**{"retry": ps.Retry(attempts=20), "fallback": lambda _: 7, **more})(handler)
    with turns.watched():
        assert await engine.run(ps.graph(down() if kind == "class" else down)(1)) == 7
    assert turns.most == 1


@ps.node(retry=ps.Retry(attempts=20))
async def fails_as_a_stream(x: int) -> AsyncIterator[int]:
    yield _fails(x)


@ps.node
async def last(values: AsyncIterator[int]) -> int:
    return [value async for value in values][-1]


async def test_promise_7_every_retry_of_a_stream_gives_the_loop_its_turn() -> None:
    with turns.watched(), pytest.raises(OSError, match="1"):
        await engine.run((fails_as_a_stream >> last)(1))
    assert turns.most == 1


class Witness:
    """Notes the thread in which it is pickled."""

    pickled_in: ClassVar[list[int]] = []

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        Witness.pickled_in.append(threading.get_ident())
        return int, (7,)


async def test_promise_7_arguments_are_pickled_and_processes_started_beside_the_loop() -> None:
    from tests.bad_days.process_nodes import square

    Witness.pickled_in.clear()

    async with engine.Engine() as own:
        run = asyncio.create_task(own.run(ps.graph(square)(Witness())))
        turns = 0
        while not run.done():  # the event loop turns while the process starts
            turns += 1
            await asyncio.sleep(0)
    assert run.result() == 49
    assert Witness.pickled_in
    assert threading.get_ident() not in Witness.pickled_in
    assert turns > 100


async def test_promise_7_the_end_of_an_engine_waits_for_a_thread_without_holding_the_loop() -> None:
    gate = Gate()
    blocking = ps.graph(ps.node(runs_on="thread")(gate.block))

    async def use() -> None:
        async with engine.Engine() as own:
            calling = asyncio.create_task(own.run(blocking(1)))
            await gate.has()
            calling.cancel()
            await asyncio.wait([calling])
            left.set()

    left = asyncio.Event()
    using = asyncio.create_task(use())
    await left.wait()
    await testing.wait_quiescent()
    assert not using.done()  # the caller has gone, but the Engine waits for its thread
    gate.open()  # reaching this line shows that the loop is free
    await using


async def test_promise_7_a_caller_whose_calls_never_wait_gives_the_loop_its_turn() -> None:
    """A call that never suspends may begin and end at once, but at most 256 such calls run between two turns."""
    async with engine.deploy(ps.graph(never_waits)) as service:
        with turns.watched():
            for number in range(2_000):
                assert await service(number) == number
    assert 0 < turns.most_of_all <= 256


async def test_promise_7_calls_that_take_long_to_suspend_begin_in_turns_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call may begin inside its caller's turn, unless that turn has already lasted a millisecond."""
    monkeypatch.setattr("penstock.actors.tasks.MOST_EAGER_SECONDS", -1.0)  # each turn has lasted too long
    begun_in: list[int] = []

    @ps.node
    async def noted(x: int) -> int:
        begun_in.append(turns.number)
        return x

    async with engine.deploy(ps.graph(noted)) as service:
        with turns.watched():
            for number in range(10):
                assert await service(number) == number
    assert len(set(begun_in)) == 10


async def test_promise_7_a_pipeline_that_never_waits_gives_the_loop_its_turn() -> None:
    """A long chain, or an endless source of items that never suspend, does not keep a timer from its turn."""
    line = same >> same >> same

    reading = asyncio.create_task(values_of(engine.stream(map(line, itertools.count()))))
    await asyncio.sleep(0.01)  # stands for any timer of the program
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()


@ps.node(concurrency=1, capacity=1000)
async def behind_a_wide_inbox(x: int) -> int:
    await asyncio.sleep(0)
    return x


wide = ps.graph(behind_a_wide_inbox)


async def test_promise_7_a_source_that_fills_a_wide_inbox_gives_the_loop_its_turn() -> None:
    def calls() -> Iterator[ps.Call[int]]:
        for x in range(1000):
            turns.count()
            yield wide(x)

    with turns.watched():
        assert await values_of(engine.stream(calls(), max_in_flight=1000)) == list(range(1000))
    assert 0 < turns.most <= 64
