"""Hedging: the moment of the second attempt, the attempt whose result counts, and the end of the other attempt."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, Gauge, numbers, outcomes, same, virtual

SOON = ps.Hedge(after_seconds=1, max_share=1)


class Attempts:
    """A node that runs one plan for each attempt, and logs the end of each attempt."""

    def __init__(self, *plans: Callable[[], Awaitable[str]], **policy: Any) -> None:
        self.plans = list(plans)
        self.log: list[str] = []
        self.numbers: list[int] = []

        @ps.node(**{"hedge": SOON, **policy})
        async def attempt(value: int) -> str:
            number = len(self.numbers)
            self.numbers.append(ps.current().attempt)
            try:
                result = await self.plans[number]()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                self.log.append(f"{number} cancelled")
                raise
            except Exception as error:
                self.log.append(f"{number} {error!r}")
                raise
            self.log.append(f"{number} done")
            return result

        self.ask = ps.graph(attempt)


def after(seconds: float, result: str | Exception) -> Callable[[], Awaitable[str]]:
    async def plan() -> str:
        await asyncio.sleep(seconds)
        if isinstance(result, Exception):
            raise result
        return result

    return plan


async def stubborn() -> str:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(5)
    return "stubborn"


async def turns_its_cancel_into_an_error() -> str:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise LookupError from None
    return "never"


async def leaves_slowly() -> str:
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(3)
    return "never"


LOST, FIRST, SECOND = (LookupError(text) for text in ("lost", "first", "second"))
RACES: list[tuple[list[Any], dict[str, Any], Any, list[int], list[str] | None]] = [
    # The second attempt begins when the first has not ended, and the first result wins.
    ([after(60, "a"), after(1, "b")], {}, "b", [1, 1], ["1 done", "0 cancelled"]),
    ([after(2, "a"), after(60, "b")], {}, "a", [1, 1], ["0 done", "1 cancelled"]),
    ([after(0.5, "a")], {}, "a", [1], ["0 done"]),
    ([after(0.5, FIRST)], {}, FIRST, [1], None),
    # An error waits for the other attempt; of two errors, that of the first attempt counts.
    ([after(2, LOST), after(5, "b")], {}, "b", [1, 1], None),
    ([after(5, "a"), after(1, LOST)], {}, "a", [1, 1], None),
    ([after(3, FIRST), after(2, SECOND)], {}, FIRST, [1, 1], None),
    ([after(3, FIRST), after(5, SECOND)], {}, FIRST, [1, 1], None),
    # A retry begins after both attempts, which have one number.
    (
        [after(2, LOST), after(5, LOST), after(0, "c")],
        {"retry": ps.Retry(2)},
        "c",
        [1, 1, 2],
        ["0 LookupError('lost')", "1 LookupError('lost')", "2 done"],
    ),
    # Each attempt has a timeout of its own.
    ([after(60, "a"), after(2.5, "b")], {"timeout_seconds": 3}, "b", [1, 1], None),
    ([after(60, "a"), after(60, "b")], {"timeout_seconds": 3}, ps.NodeTimeoutError("3 s"), [1, 1], None),
    # A first attempt that does not stop has lost all the same. The run ends when the loser has unwound.
    ([stubborn, after(1, "b")], {}, "b", [1, 1], None),
    ([turns_its_cancel_into_an_error, after(1, "b")], {}, "b", [1, 1], None),
    ([after(2, "a"), leaves_slowly], {}, "a", [1, 1], ["0 done", "1 cancelled"]),
    # The second attempt needs a place.
    ([after(5, "a"), after(0, "b")], {"concurrency": 1}, "a", [1], None),
    ([after(5, "a"), after(0, "b")], {"concurrency": 2}, "b", [1, 1], None),
]


@pytest.mark.parametrize(("plans", "policy", "end", "numbers", "log"), RACES)
@virtual
async def test_which_attempts_begin_and_whose_result_counts(
    plans: list[Any], policy: dict[str, Any], end: Any, numbers: list[int], log: list[str] | None
) -> None:
    attempts = Attempts(*plans, **policy)
    if isinstance(end, Exception):
        with pytest.raises(type(end), match=str(end)):
            await engine.run(attempts.ask(1))
    else:
        assert await engine.run(attempts.ask(1)) == end
    assert attempts.numbers == numbers
    assert attempts.log == (log or attempts.log)


@virtual
async def test_max_share_is_a_bucket_that_each_call_fills() -> None:
    hedged: list[int] = []
    slow: set[int] = set()

    @ps.node(hedge=ps.Hedge(after_seconds=1, max_share=0.25))
    async def call(number: int) -> None:
        if number in slow:
            hedged.append(number)
        elif number >= 0:
            slow.add(number)
            await asyncio.sleep(5)

    ask = ps.graph(call)

    async with engine.deploy(ask) as service:
        for number in range(9):
            await service.run(ask(number))
        assert hedged == [0, 3, 7]  # the budget begins with 1; then each call adds a quarter
        for _ in range(1000):
            await service.run(ask(-1))
        hedged.clear()
        await asyncio.gather(*[service.run(ask(number)) for number in range(20, 40)])
        assert len(hedged) == 10  # the budget holds at most 10


@virtual
async def test_a_copy_with_another_max_share_has_a_budget_of_its_own() -> None:
    begun: list[str] = []

    @ps.node(hedge=ps.Hedge(after_seconds=1, max_share=0))
    async def call(name: str) -> None:
        begun.append(name)
        await asyncio.sleep(5)

    of_copy = ps.graph(call.with_policy(hedge=ps.Hedge(after_seconds=1, max_share=1)))
    async with engine.Engine() as own:
        for number in range(3):
            await own.run(ps.graph(call)("original"))
            await own.run(of_copy(f"copy {number}"))
    assert begun.count("original") == 4  # the budget begins with 1
    assert [begun.count(f"copy {number}") for number in range(3)] == [2, 2, 2]


@virtual
async def test_it_is_counted() -> None:
    slow, soon = after(60, "slow"), after(2, "soon")
    attempts = Attempts(slow, soon, soon, slow, after(0, "at once"))

    async with engine.deploy(attempts.ask) as service:
        for _ in range(3):
            await service(1)
        [actor] = service.statistics().actors
        assert (actor.completed, actor.hedged, actor.hedges_won, actor.in_flight) == (3, 2, 1, 0)


@virtual
async def test_a_caller_that_leaves_cancels_both() -> None:
    attempts = Attempts(after(60, "first"), after(60, "second"))

    async with engine.deploy(attempts.ask) as service:
        call = asyncio.create_task(service(1))
        await asyncio.sleep(2)
        call.cancel()
        assert await outcomes(call) == [asyncio.CancelledError]
        await testing.wait_quiescent()
        assert sorted(attempts.log) == ["0 cancelled", "1 cancelled"]
        assert service.statistics().actors[0].in_flight == 0
    late = Attempts(after(60, "first"), after(60, "second"))
    with pytest.raises(ps.DeadlineExceeded):
        await engine.run(late.ask(1), timeout_seconds=2)
    assert sorted(late.log) == ["0 cancelled", "1 cancelled"]


async def test_a_thread_that_loses_keeps_its_place_until_it_returns() -> None:
    gate = Gate()

    @ps.node(hedge=ps.Hedge(after_seconds=0.01, max_share=1), runs_on="thread", concurrency=2)
    def blocking(value: int) -> str:
        if gate.came:
            return "second"
        gate.block(value)
        return "first"

    async with engine.deploy(ps.graph(blocking)) as service:
        assert await service(1) == "second"
        [actor] = service.statistics().actors
        assert (actor.in_flight, actor.hedges_won) == (1, 1)
        gate.open()
    assert service.statistics().actors[0].in_flight == 0


async def _race(seed: int) -> None:
    draw, gauge = random.Random(seed), Gauge()

    @ps.node(
        hedge=ps.Hedge(after_seconds=0.0001, max_share=1),
        retry=draw.choice([None, ps.Retry(2)]),
        timeout_seconds=draw.choice([None, 0.005]),
        concurrency=draw.choice([None, 1, 3]),
    )
    async def attempt(value: int) -> int:
        with gauge:
            try:
                await asyncio.sleep(draw.choice([0, 0, 0.0001, 0.0002, 0.001, 0.01]))
                if draw.random() < 0.3:
                    raise LookupError(value)
                return value
            finally:
                await asyncio.sleep(0)

    ask = ps.graph(attempt)

    async def one(service: Any, value: int) -> None:
        call = asyncio.create_task(service.run(ask(value)))
        await asyncio.sleep(draw.choice([0, 0.0001, 0.0003, 0.002]))
        if draw.random() < 0.3:
            call.cancel()
        with contextlib.suppress(LookupError, TimeoutError, asyncio.CancelledError):
            assert await call == value

    async with engine.deploy(ask) as service:
        await asyncio.gather(*[one(service, value) for value in range(12)])
        await testing.wait_quiescent()
        assert service.statistics().actors[0].in_flight == 0
        assert gauge.now == 0


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_every_call_has_one_outcome_and_leaves_nothing(first: int, effort: int) -> None:
    for seed in range(first, first + 20 * effort):
        testing.run_seeded(lambda seed=seed: _race(seed), seed=seed)


# Hedged streams: the first value decides.


class Streams:
    """A generator that gives values by one plan for each attempt, and records the tasks that ran each attempt."""

    def __init__(self, *plans: list[float | Exception], **policy: Any) -> None:
        self.log: list[str] = []
        self.tasks: list[set[object]] = []

        @ps.node(**{"hedge": SOON, **policy})
        async def attempt(value: int) -> AsyncIterator[str]:
            number = len(self.tasks)
            self.tasks.append({asyncio.current_task()})
            try:
                for index, seconds in enumerate(plans[number]):
                    if isinstance(seconds, Exception):
                        raise seconds
                    await asyncio.sleep(seconds)
                    yield f"{number}.{index}"
            finally:
                self.tasks[number].add(asyncio.current_task())
                self.log.append(f"{number} closes")
                await asyncio.sleep(5)
                self.log.append(f"{number} closed")

        self.graph = ps.graph(attempt)

    async def read(self) -> list[tuple[float, str]]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with engine.deploy(self.graph) as service:
            async with service.stream(self.graph(1)) as stream:
                got = [(loop.time() - began, value) async for value in stream]
            [self.actor] = service.statistics().actors
        assert all(len(tasks) == 1 for tasks in self.tasks)  # one task reads and closes an attempt
        return got


@pytest.mark.parametrize(
    ("plans", "got", "log", "counts"),
    [
        # The second attempt wins; its first value does not wait until the first attempt is closed.
        ([[60], [1, 1]], [(2, "1.0"), (3, "1.1")], ["0 closes", "1 closes", "0 closed", "1 closed"], (1, 1, 1)),
        # The first attempt gives a value first, after the second has begun.
        ([[2, 2], [60]], [(2, "0.0"), (4, "0.1")], ["1 closes", "0 closes", "1 closed", "0 closed"], (1, 0, 1)),
        # The first attempt gives a value in time; later values may take long.
        ([[0.5, 60]], [(0.5, "0.0"), (60.5, "0.1")], ["0 closes", "0 closed"], (0, 0, 1)),
        # An error waits for the other attempt; of two errors, the error of the first attempt counts.
        ([[1.5, LookupError()], [3]], [(1.5, "0.0")], None, (1, 0, 0)),
        # An empty stream is a result.
        ([[60], []], [], ["1 closes", "1 closed", "0 closes", "0 closed"], (1, 1, 1)),
    ],
)
@virtual
async def test_the_first_value_of_two_streams_counts(
    plans: list[Any], got: list[tuple[float, str]], log: list[str] | None, counts: tuple[int, int, int]
) -> None:
    streams = Streams(*plans)
    if counts[2]:
        assert await streams.read() == got
        actor = streams.actor
        assert (actor.hedged, actor.hedges_won, actor.completed) == counts
        assert (actor.failed, actor.in_flight) == (0, 0)
    else:
        with pytest.raises(LookupError):
            await streams.read()
    assert streams.log == (log or streams.log)


@virtual
async def test_a_stream_that_fails_waits_for_the_other_and_a_retry_and_the_failover_for_both() -> None:
    attempts: list[int] = []

    @ps.node
    async def instead(value: int) -> AsyncIterator[str]:
        yield "failover"

    @ps.node(hedge=SOON, retry=ps.Retry(2), failover=instead)
    async def attempt(value: int) -> AsyncIterator[str]:
        number = len(attempts)
        attempts.append(ps.current().attempt)
        await asyncio.sleep([2, value, 2, 2][number])  # so most attempts fail before they give a value
        if number == 1 and value == 3:
            yield "second"
            return
        raise LookupError(number)

    graph = ps.graph(attempt)
    assert [text async for text in engine.stream(graph(3))] == ["second"]
    assert attempts == [1, 1]
    attempts.clear()
    assert [text async for text in engine.stream(graph(4))] == ["failover"]
    assert attempts == [1, 1, 2, 2]


@pytest.mark.parametrize("why", ["no place", "an input stream", "no budget"])
@virtual
async def test_no_second_stream_begins_where_it_might_do_harm(why: str) -> None:
    begun: list[int] = []

    @ps.node(
        hedge=ps.Hedge(after_seconds=1, max_share=0 if why == "no budget" else 1),
        concurrency=1 if why == "no place" else None,
    )
    async def slow(values: Any) -> AsyncIterator[int]:
        begun.append(1)
        await asyncio.sleep(10)
        yield 1

    graph: Any = numbers >> slow if why == "an input stream" else ps.graph(slow)
    async with engine.Engine() as own:
        for _ in range(2):  # the budget begins with one hedge
            assert [value async for value in own.stream(graph(2))] == [1]
    assert len(begun) == (3 if why == "no budget" else 2)


async def _race_of_streams(seed: int) -> None:
    draw, gauge = random.Random(seed), Gauge()
    places = draw.choice([None, 2, 4])

    @ps.node
    async def instead(value: int) -> AsyncIterator[tuple[int, int]]:
        for index in range(3):
            yield -1, index

    @ps.node(
        hedge=ps.Hedge(after_seconds=0.2, max_share=1),
        retry=draw.choice([None, ps.Retry(2)]),
        timeout_seconds=draw.choice([None, 0.5]),
        failover=draw.choice([None, instead]),
        concurrency=places,
        capacity=draw.choice([1, 16]),
    )
    async def attempt(value: int) -> AsyncIterator[tuple[int, int]]:
        task = asyncio.current_task()
        try:
            with gauge:
                number = gauge.total
                for index in range(draw.randrange(5)):
                    await asyncio.sleep(draw.choice([0, 0, 0.1, 0.2, 0.2, 0.3, 1]))
                    if draw.random() < 0.1:
                        raise LookupError(value)
                    yield number, index
        finally:
            assert asyncio.current_task() is task
            await asyncio.sleep(draw.choice([0, 0.1]))

    graph = ps.graph(attempt)

    async def one(service: Any, value: int) -> None:
        leaves, got = draw.choice([0, 1, 9, 9]), list[tuple[int, int]]()
        with contextlib.suppress(LookupError, TimeoutError, asyncio.CancelledError):
            async with service.stream(graph(value), timeout_seconds=draw.choice([None, None, 1])) as stream:
                async for item in stream:
                    got.append(item)
                    if len(got) > leaves:
                        break
                    await asyncio.sleep(draw.choice([0, 0, 0.2]))
        assert [index for _, index in got] == [*range(len(got))]
        assert len({number for number, _ in got}) <= 1  # all values come from one attempt

    async with engine.deploy(graph) as service:
        tasks = [asyncio.create_task(one(service, value)) for value in range(8)]
        for task in tasks:
            await asyncio.sleep(draw.choice([0, 0.1, 0.2]))
            if not draw.randrange(4):
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(10)
        assert {actor.in_flight for actor in service.statistics().actors} == {0}
        assert {task.exception() for task in tasks if not task.cancelled()} <= {None}
    assert gauge.now == 0
    assert places is None or gauge.peak <= places


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_every_stream_has_the_values_of_one_attempt_and_leaves_nothing(first: int, effort: int) -> None:
    for seed in range(first, first + 40 * effort):
        testing.run_seeded(lambda seed=seed: _race_of_streams(seed), seed=seed)


# Refused hedges.


class Stateful:
    async def __call__(self, value: int) -> int:
        return value


@pytest.mark.parametrize(
    ("target", "policy", "message"),
    [
        (asyncio.sleep, {"effectful": True}, "hedge=, effectful=True"),
        (Stateful, {}, "stateful node 'Stateful' cannot have hedge="),
        (same.fn, {"batch": ps.Batch(2)}, "batched node 'same' has hedge="),
        (lambda value: value, {}, "plain `def` that runs on the event loop"),
    ],
)
def test_where_a_second_attempt_would_do_harm_it_is_refused(target: Any, policy: dict[str, Any], message: str) -> None:
    with pytest.raises((ps.OptionsError, TypeError), match=message):
        ps.node(hedge=SOON, **policy)(target)
    if "batch" in policy:
        with pytest.raises(TypeError, match=message):
            ps.node(**policy)(target).with_policy(hedge=SOON)


def test_a_device_node_has_none() -> None:
    pytest.importorskip("jax")

    @ps.device_node
    def double(x: Any) -> Any:
        return x * 2

    with pytest.raises(TypeError, match="device node 'double' cannot have hedge="):
        double.with_policy(hedge=SOON)
    with pytest.raises(TypeError, match="device node 'double' cannot have cache="):
        double.with_policy(cache=ps.Cache(max_bytes=10))


@pytest.mark.parametrize("options", [{"after_seconds": 0}, {"after_seconds": 1, "max_share": 1.5}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ps.OptionsError):
        ps.Hedge(**options)
