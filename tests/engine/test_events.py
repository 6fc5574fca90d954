"""Events out of a graph: which code may emit, which events the reader sees and when, and how both sides end."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import data, engine, testing
from tests.kit import (
    SCHEDULERS,
    Gate,
    Scheduler,
    begun,
    cancelled_at_every_step,
    numbers,
    outcomes,
    values_of,
    virtual,
    without_the_collector,
)


@dataclass(frozen=True)
class Progress:
    done: int


@ps.node(effectful="unordered")
async def work(amount: int) -> int:
    for done in range(amount):
        await ps.emit(Progress(done))
    return amount


@ps.node(effectful="unordered", runs_on="thread")
def work_in_thread(amount: int) -> int:
    for done in range(amount):
        ps.emit(Progress(done))
    return amount


@ps.node
async def less(amount: int) -> int:
    return amount - 1


@ps.node
def is_left(amount: int) -> bool:
    return amount > 0


@ps.node
def larger(left: int, right: int) -> int:
    return max(left, right)


one = ps.graph(work)
in_thread = ps.graph(work_in_thread)


async def seen(stream: engine.EventStream[Progress, Any]) -> list[int]:
    """Read events to the end of their call."""
    return [event.value.done async for event in stream]


class Endless:
    """A graph whose node emits for ever; counts the events that were let in, and records how the node ends."""

    def __init__(self) -> None:
        self.emitted = 0
        self.ended: list[str] = []

        @ps.node(effectful="unordered")
        async def endless() -> None:
            try:
                while True:
                    await ps.emit(Progress(self.emitted))
                    self.emitted += 1
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise

        self.graph = ps.graph(endless)


# The events that a reader gets.


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("graph", [one, in_thread], ids=lambda graph: graph.name)
async def test_a_reader_gets_each_event_in_order_and_then_the_result(
    scheduler: Scheduler, graph: ps.Graph[[int], int]
) -> None:
    async with engine.stream(graph(50), events=Progress, scheduler=scheduler) as events:
        assert await seen(events) == list(range(50))
        assert await events.result() == 50
        assert await events.result() == 50


async def test_a_deployment_has_readers_of_events() -> None:
    async with engine.deploy(one, in_thread, max_in_flight=2) as service:

        async def client(amount: int) -> int:
            graph = one if amount % 2 else in_thread
            async with service.stream(graph(amount), events=Progress, priority=amount) as events:
                assert await seen(events) == list(range(amount))
                return await events.result()

        assert await asyncio.gather(*map(client, range(10))) == list(range(10))
        assert await service.run(one(3)) == 3
        statistics = service.statistics()
        assert (statistics.completed, statistics.admission.in_flight) == (11, 0)


async def branch(amount: int) -> int:
    return await work(amount)


async def down(amount: int) -> int:
    await work(amount)
    return await less(amount)


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (lambda: ps.cond(is_left(2), branch, branch, 2), [(0, 0), (1, 0)]),
        (lambda: ps.switch(1, (less, branch), 2), [(0, 0), (1, 0)]),
        (lambda: ps.while_loop(is_left, down, 2), [(0, 0), (1, 0), (0, 1)]),
        (lambda: ps.map_each(branch, [1, 2], concurrency=1), [(0, 0), (0, 1), (1, 1)]),
        (lambda: ps.map_each(lambda n: ps.while_loop(is_left, down, n), [1, 1], concurrency=1), [(0, 0), (0, 0)]),
        (lambda: ps.fold(lambda total, n: branch(n), numbers(3), 0), [(0, 1), (0, 2), (1, 2)]),
        (lambda: ps.fold(larger, ps.map_each(branch, numbers(3), concurrency=1), 0), [(0, 1), (0, 2), (1, 2)]),
    ],
    ids=["cond", "switch", "while_loop", "map_each", "nested", "fold", "map of a stream"],
)
async def test_a_node_emits_at_any_depth(control: Callable[[], Any], expected: list[tuple[int, int]]) -> None:
    @ps.graph
    async def graph() -> object:
        found: object = await control()
        return found

    events = await values_of(engine.stream(graph(), events=Progress))
    assert [(event.value.done, event.item) for event in events] == expected


async def test_an_event_says_node_item_and_attempt_and_a_retry_takes_nothing_back() -> None:
    tried: list[int] = []

    @ps.node(effectful="unordered", retry=ps.Retry(3), name="third time")
    async def third_time(number: int) -> int:
        tried.append(number)
        await ps.emit("begun")
        if tried.count(number) < 3:
            raise OSError("not yet")
        return number

    @ps.graph
    async def graph() -> list[int]:
        return await ps.map_each(third_time, [7, 8], concurrency=1)

    assert await values_of(engine.stream(graph(), events=str)) == [
        engine.Event("begun", "third time", item, attempt) for item in (0, 1) for attempt in (1, 2, 3)
    ]


async def test_tasks_that_a_handler_and_its_helper_have_started_emit() -> None:
    async def tell(done: int) -> None:
        await ps.emit(Progress(done))

    def helper() -> "asyncio.Task[None]":
        return asyncio.create_task(tell(2))

    @ps.node(effectful="unordered")
    async def starts_tasks() -> None:
        await asyncio.create_task(tell(1))
        await helper()

    assert await seen(engine.stream(ps.graph(starts_tasks)(), events=Progress)) == [1, 2]


async def test_only_the_class_that_is_asked_for_is_read() -> None:
    @ps.node(effectful="unordered")
    async def both() -> None:
        await ps.emit("text")
        await ps.emit(Progress(1))
        await ps.emit(2)

    for kind, expected in ((Progress, [Progress(1)]), (object, ["text", Progress(1), 2])):
        events = await values_of(engine.stream(ps.graph(both)(), events=kind))
        assert [event.value for event in events] == expected


# Events together with a stream of values.


@ps.node(effectful="unordered", capacity=2)
async def tokens(count: int) -> AsyncIterator[str]:
    for number in range(count):
        await ps.emit(Progress(number))
        yield f"token {number}"
    await ps.emit(Progress(count))


@ps.graph
async def answer(count: int) -> AsyncIterator[str]:
    return tokens(await work(count))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("is_slow", [False, True])
async def test_one_iterator_gives_events_and_values_in_the_order_of_the_node(
    scheduler: Scheduler, is_slow: bool
) -> None:
    got: list[object] = []
    async with engine.stream(answer(20), events=Progress, capacity=2, scheduler=scheduler) as items:
        async for item in items:
            if is_slow:
                await testing.wait_quiescent()
            got.append(item.value.done if item.kind == "event" else item.value)
    pairs: list[object] = [one for number in range(20) for one in (number, f"token {number}")]
    assert got == [*range(20), *pairs, 20]


async def test_events_of_a_step_beside_the_stream_are_read_after_its_values() -> None:
    ended = asyncio.Event()

    @ps.node(effectful="unordered")
    async def beside() -> None:
        await ended.wait()
        for done in range(40):
            await ps.emit(Progress(done))

    @ps.node
    async def two() -> AsyncIterator[int]:
        yield -1
        yield -2
        ended.set()

    @ps.graph
    async def graph() -> AsyncIterator[int]:
        await beside()
        return two()

    items = await values_of(engine.stream(graph(), events=Progress, capacity=1))
    got = [item.value.done if item.kind == "event" else item.value for item in items]
    assert sorted(got, key=lambda one: one >= 0) == [-1, -2, *range(40)]


async def test_an_error_of_the_stream_is_raised_after_the_events_before_it() -> None:
    @ps.node(effectful="unordered")
    async def breaks() -> AsyncIterator[int]:
        await ps.emit(Progress(1))
        yield 1
        await ps.emit(Progress(2))
        raise OSError("the model is gone")

    async with engine.stream(ps.graph(breaks)(), events=Progress) as items:
        assert [(await anext(items)).value for _ in range(3)] == [Progress(1), 1, Progress(2)]
        with pytest.raises(ps.PlanError, match="'breaks' gives a stream"):
            await items.result()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        with pytest.raises(OSError, match="the model is gone"):
            await anext(items)


# Events of calls that go on after a restart.


@pytest.mark.parametrize("is_deployed", [False, True])
async def test_a_durable_loop_emits_and_asks_and_goes_on(tmp_path: Path, is_deployed: bool) -> None:
    @ps.node(effectful="unordered")
    async def step(amount: int) -> int:
        await ps.emit(Progress(amount))
        if amount == 1:
            await ps.interrupt("go on?")
        return amount - 1

    @ps.graph
    async def graph(amount: int) -> int:
        return await ps.while_loop(is_left, step, amount, durable=ps.Durable(ps.SQLiteStore(tmp_path / "loops.db")))

    async def read(stream: engine.EventStream[Progress, int], got: list[int]) -> int:
        async with stream as events:
            async for event in events:
                got.append(event.value.done)  # noqa: PERF401 - keeps the events before the question
            return await events.result()

    async with engine.deploy(graph) as service:
        owner: Any = service if is_deployed else engine
        first: list[int] = []
        with pytest.raises(ps.Interrupted, match="go on"):
            await read(owner.stream(graph(3), events=Progress, durable_key="a"), first)
        second: list[int] = []
        assert await read(owner.stream(graph(3), events=Progress, durable_key="a", answer="yes"), second) == 0
    assert (first, second) == ([3, 2, 1], [1])


async def test_what_a_checkpointed_stream_emits_comes_again_after_a_restart(tmp_path: Path) -> None:
    @ps.node(effectful="unordered")
    async def tell(record: data.Record[None]) -> int:
        await ps.emit(Progress(record.index))
        return record.index

    @ps.graph
    async def graph(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
        return ps.map_each(tell, records, concurrency=1)

    async def read(limit: int) -> tuple[list[int], list[int]]:
        got: tuple[list[int], list[int]] = [], []
        checkpoint = ps.Checkpoint(tmp_path, every_records=5)
        async with engine.stream(graph(data.order(range(20))), events=Progress, checkpoint=checkpoint) as items:
            async for item in items:
                if item.kind == "event":
                    got[0].append(item.value.done)
                else:
                    got[1].append(item.value)
                if len(got[1]) == limit:
                    break
        return got

    told, values = await read(8)
    assert (told, values) == (list(range(max(told) + 1)), list(range(8)))
    again, rest = await read(100)
    assert again == rest
    assert rest in (list(range(20)), list(range(5, 20)))


# Bounds and order of events.


@pytest.mark.parametrize("capacity", [None, 1, 5])
async def test_a_slow_reader_holds_back_the_node_that_emits(capacity: int | None) -> None:
    endless, bound = Endless(), capacity or 16
    async with engine.stream(endless.graph(), events=Progress, capacity=capacity) as events:
        for number in range(30):
            assert (await anext(events)).value == Progress(number)
            await testing.wait_quiescent()
            assert endless.emitted == number + 1 + bound
            assert events.statistics().in_flight == bound


@virtual
async def test_what_a_node_waits_for_its_reader_is_part_of_its_timeout() -> None:
    @ps.node(effectful="unordered", timeout_seconds=1)
    async def counts() -> int:
        for number in range(10):
            await ps.emit(number)
        return 10

    graph = ps.graph(counts)

    async with engine.stream(graph(), events=int, capacity=1) as events:
        await asyncio.sleep(0.9)
        assert [event.value async for event in events] == list(range(10))
    async with engine.stream(graph(), events=int, capacity=1) as events:
        await asyncio.sleep(1.1)
        with pytest.raises(ps.NodeTimeoutError):
            await events.result()


async def test_a_slow_reader_holds_back_a_thread() -> None:
    emitted = 0
    told = threading.Event()

    @ps.node(effectful="unordered", runs_on="thread")
    def endless() -> None:
        nonlocal emitted
        while True:
            if emitted == 3:
                told.set()
            ps.emit(Progress(emitted))
            emitted += 1

    async with engine.stream(ps.graph(endless)(), events=Progress, capacity=2) as events:
        assert (await anext(events)).value == Progress(0)
        await asyncio.to_thread(told.wait, 60)
        await testing.wait_quiescent()
        assert emitted == 3
        assert [(await anext(events)).value.done for _ in range(20)] == list(range(1, 21))


async def test_emitters_that_wait_for_room_are_let_in_in_the_order_in_which_they_came() -> None:
    @ps.node(effectful="unordered")
    async def say(number: int) -> int:
        await ps.emit(number)
        return number

    @ps.graph
    async def graph() -> list[int]:
        return await ps.map_each(say, list(range(20)), concurrency=20)

    for is_read in (True, False):
        async with engine.stream(graph(), events=int, capacity=2) as events:
            await events.wait_started()
            await testing.wait_quiescent()
            found = [event.value async for event in events] if is_read else await events.result()
        assert found == list(range(20))


# Code that may emit, and code that may not.


async def emits_later(number: int) -> int:
    await ps.emit(1)
    return number


def emits(number: int) -> int:
    ps.emit(1)
    return number


silent = ps.node(name="silent")(emits_later)
on_the_loop = ps.node(effectful="unordered", name="on_the_loop")(emits)
in_a_process = ps.node(effectful="unordered", runs_on="process")(emits)
batched = ps.node(effectful="unordered", batch=ps.Batch(4))(emits_later)


@ps.node(effectful="unordered")
class Own(ps.Actor[int, int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[int, int]]) -> None:
        while True:
            one = await inbox.get()
            try:
                await ps.emit(1)
            except TypeError as error:
                one.fail(error)


async def _result(call: ps.Call[int], own: Any = engine) -> int:
    async with own.stream(call, events=object) as events:
        result: int = await events.result()
        return result


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (silent, r"""node 'silent' .*@ps.node\(effectful="unordered"\)"""),
        (on_the_loop, r"node 'on_the_loop' is a plain `def` .*runs_on=.thread."),
        (in_a_process, r'in a worker process.*use runs_on="thread"'),
        (batched, r"in the loop of an actor or in a batch.*use a node of one item"),
        (Own(), r"in the loop of an actor or in a batch.*use a node of one item"),
    ],
)
async def test_who_may_not_emit(node: Any, message: str) -> None:
    graph = ps.graph(node)
    async with engine.Engine() as own:  # one Engine, so that a worker process starts once
        for use in (own.run(graph(1)), _result(graph(1), own)):
            with pytest.raises(TypeError, match=message):
                await use


async def test_a_graph_may_not_emit() -> None:
    @ps.graph
    async def graph() -> int:
        await ps.emit(1)
        return await work(1)

    with pytest.raises(ps.GraphTraceError, match="a graph is traced once, so put the call into a node"):
        await engine.run(graph())


async def test_a_node_without_an_engine_is_just_its_function() -> None:
    assert await work(3) == 3
    assert await asyncio.to_thread(work_in_thread, 3) == 3
    assert await one(3) == 3


async def test_what_has_no_events_to_read_is_refused_and_says_how_to_read_them() -> None:
    async with engine.deploy(one) as service:
        stream: Any = engine.stream
        deployed: Any = service.stream
        for verb, call, options, message in (
            (stream, one(1), {"events": 3}, "events=3: the class of the events"),
            (stream, one(1), {"events": list[int]}, "the class of the events"),
            (stream, one(1), {"events": int, "capacity": 0}, "capacity=0"),
            (stream, one(1), {"events": int, "checkpoint": ps.Checkpoint("/")}, "for a graph that returns a stream"),
            (stream, answer(1), {"capacity": 3}, "capacity= bounds the events of a call"),
            (stream, [one(1)], {"events": int}, "events= reads the events of one call"),
            (stream, one(1), {}, r"engine.stream\(call, events="),
            (deployed, one(1), {}, r"service.stream\(call, events="),
            (deployed, in_thread(1), {"events": int}, "not part of this deployment"),
        ):
            with pytest.raises(ps.PlanError if verb is deployed or not options else ps.OptionsError, match=message):
                verb(call, **options)


# Events without a reader, and events after the outcome.


@pytest.mark.parametrize("graph", [one, in_thread], ids=lambda graph: graph.name)
async def test_events_that_nobody_reads_are_dropped(graph: ps.Graph[[int], int]) -> None:
    assert await engine.run(graph(100)) == 100
    assert await values_of(engine.stream(graph(n) for n in (100, 101))) == [100, 101]
    async with engine.deploy(graph) as service:
        assert await service(100) == 100
    assert len(await values_of(engine.stream(answer(30)))) == 30


async def test_result_discards_what_was_not_read_and_what_is_to_come() -> None:
    for graph in (one, in_thread):
        async with engine.stream(graph(100), events=Progress, capacity=2) as events:
            assert (await anext(events)).value == Progress(0)
            assert await events.result() == 100
            assert await seen(events) == []


async def test_what_is_emitted_after_the_outcome_is_dropped() -> None:
    late: list[asyncio.Task[None]] = []
    ended = asyncio.Event()

    async def tell_late() -> None:
        await ended.wait()
        for _ in range(100):
            await ps.emit(Progress(1))

    @ps.node(effectful="unordered")
    async def starts_a_task() -> None:
        ps.current()
        late.append(asyncio.create_task(tell_late()))

    async with engine.stream(one(10), events=Progress) as events:
        await testing.wait_quiescent()  # the call has ended, and its events can still be read
        assert await seen(events) == list(range(10))
    async with engine.stream(ps.graph(starts_a_task)(), events=Progress, capacity=1) as events:
        await events.result()
        ended.set()
        await late[0]
        assert await seen(events) == []


async def test_an_item_that_was_cancelled_emits_nothing_more() -> None:
    begun = asyncio.Event()

    @ps.node(effectful="unordered")
    async def says_farewell(number: int) -> int:
        if number == 0:
            await begun.wait()
            raise OSError("broken")
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await ps.emit("farewell")
        return number

    @ps.graph
    async def graph() -> list[int]:
        return await ps.map_each(says_farewell, [0, 1])

    async with engine.stream(graph(), events=str) as events:
        with pytest.raises(OSError, match="broken"):
            await anext(events)


# Ends of calls and of their events.


async def test_the_error_of_the_call_comes_after_the_events_before_it() -> None:
    @ps.node(effectful="unordered")
    async def breaks() -> int:
        await ps.emit(Progress(1))
        raise OSError("broken")

    graph = ps.graph(breaks)

    async with engine.stream(graph(), events=Progress) as events:
        assert (await anext(events)).value == Progress(1)
        with pytest.raises(OSError, match="broken") as caught:
            await anext(events)
        assert caught.value.__notes__ == ["in node 'breaks' of graph 'breaks', item 0, attempt 1"]
        assert await seen(events) == []
        with pytest.raises(ps.EngineClosedError, match="without a result"):
            await events.result()
    with pytest.raises(OSError, match="broken"):
        await _result(graph())


async def test_a_refusal_and_a_deadline_are_errors_of_the_call() -> None:
    gate = Gate()

    @ps.node(effectful="unordered")
    async def waits() -> int:
        await ps.emit(Progress(1))
        return await gate.wait(1)

    graph = ps.graph(waits)

    async with engine.deploy(graph, max_in_flight=1, max_queue=0) as service:
        async with service.stream(graph(), events=Progress) as events:
            await events.wait_started()
            refused = service.stream(graph(), events=Progress)
            with pytest.raises(ps.Overloaded):
                await refused.wait_started()
            gate.open()
            assert await seen(events) == [1]
        gate.close()
        async with service.stream(graph(), events=Progress, timeout_seconds=0.01) as events:
            with pytest.raises(ps.DeadlineExceeded):
                await events.result()
    async with engine.stream(one(0), events=Progress) as none:
        await none.wait_started()
        assert await seen(none) == []


@pytest.mark.parametrize("how", ["leaves", "drops", "drops while it waits", "closes"])
async def test_a_reader_that_leaves_cancels_the_call(how: str) -> None:
    endless = Endless()
    with without_the_collector():
        events = engine.stream(endless.graph(), events=Progress)
        await anext(events)
        if how == "leaves":
            async with events:
                pass
        elif how == "closes":
            await events.aclose()
        elif how == "drops while it waits":
            for _ in range(16):
                await anext(events)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(events)
        del events
        await testing.wait_quiescent()
        assert endless.ended == ["cancelled"]


async def test_a_read_that_is_cancelled_leaves_the_stream_open() -> None:
    told, asked = asyncio.Event(), asyncio.Event()

    @ps.node(effectful="unordered")
    async def tells() -> int:
        await told.wait()
        await ps.emit(Progress(1))
        await asked.wait()
        return 3

    async def cancelled(read: Any) -> None:
        [reading] = await begun(read)
        reading.cancel()
        assert await outcomes(reading) == [asyncio.CancelledError]

    async with engine.stream(ps.graph(tells)(), events=Progress) as events:
        await cancelled(anext(events))
        told.set()
        assert (await anext(events)).value == Progress(1)
        await cancelled(anext(events))
        await cancelled(events.result())
        asked.set()
        assert await events.result() == 3


async def test_one_reader() -> None:
    async with engine.stream(Endless().graph(), events=Progress, capacity=1) as events:
        assert (await outcomes(anext(events), anext(events))).count(RuntimeError) == 1


async def test_the_end_of_a_call_raises_in_a_thread_that_waits() -> None:
    begun: list[int] = []
    ended: list[int] = []

    @ps.node(effectful="unordered", runs_on="thread")
    def endless() -> None:
        begun.append(number := len(begun))
        try:
            while True:
                ps.emit(Progress(1))
        except asyncio.CancelledError:
            ended.append(number)
            raise

    graph = ps.graph(endless)

    async with engine.Engine() as own:
        async with own.stream(graph(), events=Progress, capacity=1) as events:
            await anext(events)
        while len(begun) < 2:  # a slow thread may begin only after the deadline
            async with own.stream(graph(), events=Progress, timeout_seconds=0.01) as events:
                with pytest.raises(ps.DeadlineExceeded):
                    await events.result()
    assert ended == begun


@pytest.mark.parametrize(("then", "is_full"), [("retry", False), ("fallback", True)])
async def test_an_attempt_in_a_thread_that_has_timed_out_emits_nothing_more(
    then: str, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.events._LOOK_SECONDS", 0.01)
    ended: list[str] = []
    timed_out, is_over = threading.Event(), threading.Event()

    def work() -> int:
        if timed_out.is_set():
            return 2
        try:
            ps.emit("in time")
            if is_full:
                ps.emit("waits for the reader")
            timed_out.wait(60)
            ps.emit("too late")
        except asyncio.CancelledError:
            ended.append("cancelled")
        finally:
            is_over.set()
        return 1

    def fall_back(error: Exception) -> int:
        timed_out.set()
        return 2

    def retry_now(error: Exception, attempt: int) -> float:
        timed_out.set()
        return 0.0

    policy: dict[str, Any] = {"fallback": fall_back} if then == "fallback" else {"retry": ps.Retry(2, wait=retry_now)}
    threaded = ps.node(effectful="unordered", runs_on="thread", timeout_seconds=0.5, **policy)(work)

    @ps.node
    async def wait(number: int) -> int:
        await asyncio.to_thread(is_over.wait, 60)
        return number

    @ps.graph
    async def graph() -> int:
        return await wait(threaded())

    async with engine.stream(graph(), events=str, capacity=1) as events:
        if is_full:
            await events.wait_started()
            await asyncio.to_thread(is_over.wait, 60)
        assert [event.value async for event in events] == ["in time"]
        assert await events.result() == 2
    assert ended == ["cancelled"]


async def test_a_task_of_an_attempt_that_has_failed_emits_nothing_more() -> None:
    tasks: list[asyncio.Task[None]] = []
    has_failed = asyncio.Event()

    async def tell() -> None:
        await has_failed.wait()
        await ps.emit("too late")

    @ps.node(effectful="unordered", retry=ps.Retry(2, backoff_seconds=0))
    async def leaves_a_task() -> None:
        if not tasks:
            tasks.append(asyncio.create_task(tell()))
            raise OSError("not yet")
        has_failed.set()
        await tasks[0]
        await ps.emit("second")

    [event] = await values_of(engine.stream(ps.graph(leaves_a_task)(), events=str))
    assert event.value == "second"


def test_a_cancel_at_every_step_leaves_nothing() -> None:
    async def main() -> list[object]:
        items = await values_of(engine.stream(answer(3), events=Progress, capacity=1))
        async with engine.stream(one(3), events=Progress, capacity=1) as events:
            await anext(events)
            return [*items, await events.result()]

    for outcome in cancelled_at_every_step(main):
        assert outcome.cancelled or len(outcome.result or ()) == 3 + 3 + 3 + 1 + 1
