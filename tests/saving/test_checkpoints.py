"""Calls with checkpoint=: what a snapshot stores and when, where a restart continues, and which graphs are refused."""

import asyncio
import errno
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, engine, telemetry
from penstock.saving import snapshots
from tests.kit import Taken, actor, cancelled_at_every_step, counted
from tests.saving.exact import Counting, Keeping, Lines, exact, goes_on, ordered, over, taken, up_to
from tests.saving.random_pipelines import added, as_they_are, doubled, twice_node

SOURCE = np.arange(40)


class Counted(Keeping):
    """An object with state, for a node or a reader: the values so far."""

    def __init__(self) -> None:
        self.held: list[Any] = []


class Summed(Counted):
    def __call__(self, value: float) -> float:
        self.held.append(value)
        return sum(self.held)


class WithoutState:
    def __call__(self, value: float) -> float:
        return value


class RestoredLater(Summed):
    async def restore(self, state: Any) -> None:  # type: ignore[override]
        self.held = state


@ps.node
def number(record: data.Record[Any]) -> float:
    return float(record.index)


summed = ps.node(Summed)()


@ps.graph
async def sums(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[float]:
    return records >> number >> summed


def records_of(folder: Path) -> list[tuple[int | None, bool | None]]:
    return [(one.record, one.ended) for one in snapshots.stored_snapshots(folder, verify=True)]


async def test_a_stream_goes_on_where_its_newest_snapshot_is_and_once_at_its_end_it_stays_there(tmp_path: Path) -> None:
    assert await goes_on(lambda: sums(ordered()), tmp_path, 25, every_records=10) in ([0, 10], [0, 20])
    before = records_of(tmp_path)
    assert before[-1] == (40, True)
    for _ in range(2):
        assert await taken(sums(ordered()), ps.Checkpoint(tmp_path, every_records=10)) == []
    assert records_of(tmp_path) == before


async def test_more_epochs_go_on_after_the_end(tmp_path: Path) -> None:
    checkpoint = ps.Checkpoint(tmp_path, every_records=10)
    await taken(sums(ordered(epochs=2)), checkpoint)
    whole = await taken(sums(ordered(epochs=3)))
    assert await taken(sums(ordered(epochs=3)), checkpoint) == whole[80:]
    with pytest.raises(ps.CheckpointError, match="epochs was 3, and is 2"):
        await taken(sums(ordered(epochs=2)), checkpoint)


async def test_a_fold_goes_on_with_its_state_to_the_last_bit_and_with_the_indices_of_its_items(tmp_path: Path) -> None:
    crashes_at, seen = [33], list[int]()

    @ps.node
    def started() -> dict[str, Any]:
        weights = np.ones((3, 2)).T
        return {"in": weights, "out": weights, "items": []}

    @ps.node
    def added(state: dict[str, Any], value: tuple[int, int]) -> dict[str, Any]:
        if len(state["items"]) == crashes_at[0]:
            raise ValueError("crashed")
        seen.append(value[0])
        state["in"] *= 0.5
        state["out"] += value[0]
        return {**state, "items": [*state["items"], (value, ps.current().item)]}

    @ps.graph
    async def total(records: AsyncIterator[data.Record[None]]) -> Any:
        return await ps.fold(added, records >> item, started())

    checkpoint = ps.Checkpoint(tmp_path, every_records=8)
    with pytest.raises(ValueError, match="crashed"):
        await engine.run(total(ordered()), checkpoint=checkpoint)
    crashes_at[0] = -1
    seen.clear()
    got = await engine.run(total(ordered()), checkpoint=checkpoint)
    assert 40 - len(seen) in (8, 16, 24, 32)
    assert got["in"] is got["out"]
    again = await engine.run(total(ordered()), checkpoint=checkpoint)  # from the snapshot at the end of the stream
    assert exact(got) == exact(again) == exact(await engine.run(total(ordered())))


# Snapshots that the caller asks for.


async def test_a_snapshot_now_stores_what_the_reader_has_not_taken(tmp_path: Path) -> None:
    whole = await taken(sums(ordered()))
    checkpoint = ps.Checkpoint(tmp_path, every_records=1000)
    async with engine.stream(sums(ordered()), checkpoint=checkpoint) as stream:
        assert stream.position == 0
        got = [await anext(stream) for _ in range(3)]
        await stream.checkpoint()
        assert stream.position == 3
        got.append(await anext(stream))  # the stream continues after a snapshot
        await stream.checkpoint()
    async with engine.stream(sums(ordered()), checkpoint=checkpoint) as stream:
        assert stream.position == 4  # already before the first value
        got += [value async for value in stream]
    assert got == [value for _, value in whole]


async def test_a_snapshot_now_of_another_task_waits_for_the_reader(tmp_path: Path) -> None:
    checkpoint = ps.Checkpoint(tmp_path, every_records=1000)
    async with engine.stream(sums(ordered()), checkpoint=checkpoint) as stream:
        await anext(stream)
        asked = asyncio.create_task(stream.checkpoint())
        async for _ in stream:
            if asked.done():
                break
        await asked
        position = stream.position
    rest = await taken(sums(ordered()), checkpoint)
    assert 1 < rest[0][0] <= position + 1 if rest else position == 40


@pytest.mark.parametrize("where", ["reader", "node", "value"])
async def test_a_snapshot_now_that_cannot_be_made_ends_with_the_call(tmp_path: Path, where: str) -> None:
    failing: list[str] = []

    class Failing(Counted):
        whose = "reader"

        def state(self) -> Any:
            if self.whose in failing:
                raise RuntimeError("no state")
            return super().state()

    @ps.node
    class Node(Failing):
        whose = "node"

        def __call__(self, record: data.Record[Any]) -> Any:
            return object() if where == "value" and record.index > 5 else record.index

    node = Node()
    call = over(lambda records: ps.map_each(node, records), data.order(range(10_000)))
    checkpoint = ps.Checkpoint(tmp_path, every_records=100_000, reader=Failing())
    async with engine.stream(call, checkpoint=checkpoint) as stream:
        for _ in range(3):
            await anext(stream)
        failing.append(where)
        with pytest.raises(ps.EngineClosedError, match="ended before this snapshot") as caught:
            await stream.checkpoint()
        assert isinstance(caught.value.__cause__, ps.NotStorable if where == "value" else RuntimeError)
        with pytest.raises(type(caught.value.__cause__)):
            async for _ in stream:
                pass


@pytest.mark.parametrize("end", ["read", "closed", "failed"])
async def test_a_snapshot_of_a_stream_that_has_ended_is_refused_and_says_so(tmp_path: Path, end: str) -> None:
    @ps.node(stateless=True)
    async def fail(values: AsyncIterator[float]) -> AsyncIterator[float]:
        async for value in values:
            yield value
            raise ValueError("down")

    call = over(lambda records: records >> number >> fail) if end == "failed" else sums(ordered())
    async with engine.stream(call, checkpoint=ps.Checkpoint(tmp_path, every_records=10)) as stream:
        with suppress(ValueError):
            async for _ in stream:
                if end == "closed":
                    await stream.aclose()
        kept = "its end is saved" if end == "read" else "its last snapshot is the one before"
        with pytest.raises(
            ps.EngineClosedError, match=f"this stream has ended, so checkpoint.* nothing to save; {kept}"
        ):
            await stream.checkpoint()


# Sources.


class AsyncLines(Lines):
    def __aiter__(self) -> "AsyncLines":
        return self

    async def __anext__(self) -> float:
        await asyncio.sleep(0)
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    __iter__: Any = None


def mixed_with_records(until: Any) -> Callable[[Any], Any]:
    def mixed(lines: Any) -> Any:
        others = data.order(SOURCE, shuffle_seed=1) >> number
        return data.mix([(ps.map_each(shown, lines), 1.0), (others, 2.0)], seed=5, until=until)

    return mixed


@pytest.mark.parametrize(
    ("pipeline", "source"),
    [
        (lambda lines: data.order(lines) >> shown, AsyncLines),
        (mixed_with_records("first"), AsyncLines),
        (mixed_with_records("all"), lambda: data.order(AsyncLines, epochs=3)),
    ],
    ids=["order", "mix", "mix of an order"],
)
async def test_async_iterators_go_on_by_their_state(tmp_path: Path, pipeline: Any, source: Callable[[], Any]) -> None:
    first, second, third = await goes_on(lambda: over(pipeline, source()), tmp_path, 7, 6, every_records=3)
    assert first < second < third


@ps.node
def shown(value: Any) -> str:
    return repr(value)


@ps.node(stateless=True)
async def with_an_end(records: AsyncIterator[data.Record[Any]]) -> AsyncIterator[Any]:
    async for record in records:
        yield record.index
    yield "the end"


@ps.node
def beside(value: Any, other: Any) -> tuple[Any, Any]:
    return value, other


@ps.node
def listed(so_far: list[Any], value: Any) -> list[Any]:
    return [*so_far, value]


async def test_what_comes_behind_a_loop_comes_once(tmp_path: Path) -> None:
    async def opened_late(records: Any) -> Any:
        other = await some_time("other")
        return ps.map_each(lambda value: beside(value, other), with_an_end(records))

    @ps.graph
    async def folded(records: AsyncIterator[data.Record[None]]) -> list[Any]:
        return await ps.fold(listed, with_an_end(records), [])

    got = await taken(over(opened_late), ps.Checkpoint(tmp_path / "stream"))
    assert got[-1] == (41, ("the end", "other"))
    assert await taken(over(opened_late), ps.Checkpoint(tmp_path / "stream")) == []
    results = [await engine.run(folded(ordered()), checkpoint=ps.Checkpoint(tmp_path / "fold")) for _ in range(3)]
    assert results[0].count("the end") == 1
    assert results[1:] == results[:1] * 2


async def test_a_snapshot_behind_the_end_keeps_the_states_of_what_has_not_begun(tmp_path: Path) -> None:
    def shuffled(epochs: int) -> Any:
        return over(lambda records: records >> data.shuffled(4, seed=1) >> number, data.order(SOURCE, epochs=epochs))

    for folder in ("once", "again"):
        async with engine.stream(shuffled(1), checkpoint=ps.Checkpoint(tmp_path / folder)) as stream:
            while stream.position < 35:
                await anext(stream)
            await stream.checkpoint()  # a snapshot of the end, while some values are unread
    async with engine.stream(shuffled(1), checkpoint=ps.Checkpoint(tmp_path / "again")) as stream:
        await stream.checkpoint()  # before the stage begins
    rest = [await taken(shuffled(2), ps.Checkpoint(tmp_path / folder)) for folder in ("once", "again")]
    assert len(rest[0]) == 45
    assert rest[0] == rest[1]


@ps.node
async def item(value: Any) -> tuple[Any, int]:
    await asyncio.sleep(0)
    return getattr(value, "index", value), ps.current().item


async def test_batches_at_the_end_go_on(tmp_path: Path) -> None:
    def batches(records: Any) -> Any:
        return records >> number >> ps.node(batch=ps.Batch(4))(as_they_are)

    await goes_on(lambda: over(batches), tmp_path, 5, 30, every_records=7)


async def test_an_order_that_ended_with_a_smaller_batch_does_not_begin_again(tmp_path: Path) -> None:
    @ps.graph
    async def totals() -> AsyncIterator[int]:
        once, ones = data.order(range(10), batch=25), data.order(range(70), batch=1)
        return data.mix([(once, 0.03), (ones, 0.97)], seed=1, until="all") >> total

    @ps.node
    def total(records: data.Records[Any]) -> int:
        return int(records.index.sum())

    whole = [value async for value in engine.stream(totals())]
    assert whole.index(45) < 40  # `once` has one batch; its total comes long before `ones` has ended
    checkpoint, got = ps.Checkpoint(tmp_path), []
    async with engine.stream(totals(), checkpoint=checkpoint) as stream:
        while 45 not in got:
            got.append(await anext(stream))
        await stream.checkpoint()
    got += [value for _, value in await taken(totals(), checkpoint, len(whole))]
    assert got == whole


@pytest.mark.parametrize("until", ["first", "all"])
async def test_the_sources_of_a_mix_that_has_ended_may_get_more_epochs(tmp_path: Path, until: Any) -> None:
    def mixed(epochs: int, size: int = 5) -> ps.Call[AsyncIterator[list[int]]]:
        @ps.graph
        async def from_two() -> AsyncIterator[list[int]]:
            first, second = data.order(range(10), batch=size, epochs=epochs), data.order(range(100, 104), batch=1)
            return data.mix([(first, 0.7), (second, 0.3)], seed=1, until=until) >> indexes

        return from_two()

    @ps.node
    def indexes(records: data.Records[Any]) -> list[int]:
        return [int(index) for index in records.index]

    checkpoint = ps.Checkpoint(tmp_path / "whole batches")
    got = dict(await taken(mixed(1), checkpoint))
    ended_at = len(got)
    got |= dict(await taken(mixed(3), checkpoint, 1))
    got |= dict(await taken(mixed(3), checkpoint))
    assert sorted(got) == [*range(1, len(got) + 1)]
    assert len(got) > ended_at
    batches = [value for value in got.values() if len(value) == 5]
    alone = [value for value in got.values() if len(value) == 1]
    assert batches == ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 3)[: len(batches)]
    assert alone == [[one] for one in range(4)][: len(alone)]
    assert until == "first" or (len(batches), len(alone)) == (6, 4)

    checkpoint = ps.Checkpoint(tmp_path / "a smaller last one")
    assert [8, 9] in [value for _, value in await taken(mixed(1, 4), checkpoint)]
    with pytest.raises(ps.CheckpointError, match=r"with epochs=1 its last batch had 2 records less.* keep epochs=1"):
        await taken(mixed(3, 4), checkpoint)
    assert await taken(mixed(1, 4), checkpoint) == []


async def test_resuming_far_behind_replays_nothing(tmp_path: Path) -> None:
    asked: list[int] = []

    class Large:
        def __len__(self) -> int:
            return 20_000_000

        def __getitem__(self, index: int) -> int:
            asked.append(index)
            return index

    large = Large()

    @ps.graph
    async def read(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[data.Record[int]]:
        return records >> data.read(large, runs_on="loop")

    checkpoint = ps.Checkpoint(tmp_path, every_records=5)
    await taken(read(data.order(large, shuffle_seed=1)), checkpoint, 12)
    with snapshots.SnapshotFolder(tmp_path) as folder:
        snapshot = folder.newest()
        assert snapshot is not None
        states = {**snapshot.states, "records": {"epoch": 0, "step": 10_000_000}}
        folder.save(snapshots.Snapshot(10_000_000, states, snapshot.fingerprint, False))
    asked.clear()
    [(_, record)] = await taken(read(data.order(large, shuffle_seed=1)), checkpoint, 1)
    assert record.position == 10_000_000
    assert len(asked) < 100


# Events.


@ps.node(effectful="unordered")
async def telling(record: data.Record[Any]) -> int:
    await ps.emit(("begun", record.index, ps.current().item))
    await asyncio.sleep(0)
    await ps.emit(("done", record.index, ps.current().item))
    return record.index


@ps.node(effectful="unordered")
async def preparing(width: int) -> int:
    for number in range(40):  # more events than the reader has room for, before there is a stream
        await ps.emit(("prepared", number, width))
    return width


@ps.graph
async def told(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
    return ps.map_each(telling, records >> data.shuffled(3, seed=1), concurrency=4)


def of_kind(items: list[Any], kind: str) -> list[Any]:
    return [item for item in items if item.kind == kind]


@pytest.mark.parametrize("limits", [(1, 9, 2, 30, None), (0, 0, 50, None), (60, 59, None)])
async def test_events_are_neither_lost_nor_sent_again(tmp_path: Path, limits: tuple[int | None, ...]) -> None:
    async with engine.stream(told(ordered()), events=tuple) as items:
        whole = [item async for item in items]
        assert items.position == 40
    got: list[Any] = []
    for limit in limits:
        checkpoint = ps.Checkpoint(tmp_path, every_records=7)
        async with engine.stream(told(ordered()), events=tuple, checkpoint=checkpoint, capacity=2) as items:
            assert items.position == len(of_kind(got, "value"))
            got += [item async for item in up_to(items, limit)]
            if limit is not None:
                await items.checkpoint()
    assert sorted(map(repr, of_kind(got, "event"))) == sorted(map(repr, of_kind(whole, "event")))
    assert list(map(repr, of_kind(got, "value"))) == list(map(repr, of_kind(whole, "value")))


async def test_events_before_the_last_snapshot_do_not_come_again(tmp_path: Path) -> None:
    begins, read = list[int](), list[list[Any]]()
    for limit in (70, None):
        checkpoint = ps.Checkpoint(tmp_path, every_records=7)
        async with engine.stream(told(ordered()), events=tuple, checkpoint=checkpoint) as items:
            begins.append(items.position)
            read.append([item async for item in up_to(items, limit)])
    assert begins[1] > 0
    assert {one.item for one in of_kind(read[1], "event")} == set(range(begins[1], 40))
    values = of_kind(read[0], "value")[: begins[1]] + of_kind(read[1], "value")
    assert [one.value for one in values] == [value for _, value in await taken(told(ordered()))]


async def test_events_before_the_stream_do_not_hold_it_back(tmp_path: Path) -> None:
    async def told_late(records: Any) -> Any:
        width = await preparing(3)
        return ps.map_each(lambda value: beside(value, width), ps.map_each(telling, records))

    async with engine.stream(over(told_late), events=tuple, checkpoint=ps.Checkpoint(tmp_path)) as items:
        assert [(await anext(items)).value[0] for _ in range(40)] == ["prepared"] * 40


# Refusals.


@ps.node(failover=Counting())
class FailedOver(Counting):
    async def __call__(self) -> AsyncIterator[float]:
        raise ValueError("down")
        yield 0.0


@ps.node(failover=summed)
def down(value: float) -> float:
    raise ValueError("down")


def behind(records: Any) -> Any:
    async def body(record: Any) -> Any:
        return summed(await twice_node(number(record)))

    return ps.map_each(body, records)


async def left_alone(records: Any) -> Any:
    left, right = records >> data.split(2)
    await logged(right)
    return left >> number


@ps.node(effectful="unordered")
async def logged(values: AsyncIterator[Any]) -> None:
    async for _ in values:
        pass


def filtered_branch(records: Any) -> Any:
    left, right = records >> data.split(2)
    return ps.map_each(added, left >> number, right >> data.filtered(bool) >> number)


def two_sources(records: Any) -> Any:
    return ps.map_each(added, records >> number, data.order(SOURCE) >> number)


def mixed_late(records: Any) -> Any:
    return data.mix([(records >> data.batched(2), 1.0), (data.order(SOURCE) >> data.batched(2), 1.0)], seed=1)


@pytest.mark.parametrize(
    ("pipeline", "told"),
    [
        (lambda records: counted(3), "'counted' .* source of the stream.* take data.order"),
        (lambda records: records >> number >> ps.node(WithoutState)(), "class WithoutState is called .*stateless=True"),
        (lambda records: records >> number >> ps.node(RestoredLater)(), "class RestoredLater .* plain `def`"),
        (lambda records: records >> number >> ps.node(doubled), "'doubled' .* generator function .* stateless=True"),
        (lambda records: records >> number >> summed >> summed, "one instance is called at several places"),
        (lambda records: records >> number >> actor(Taken().take), "'take' .* owns its loop"),
        (lambda records: records >> number >> ps.node(restart_on=(ValueError,))(Summed)(), "leave out restart_on="),
        (
            lambda records: records >> number >> ps.node(runs_on="process")(Summed)(),
            "'Summed' .* worker processes.* in a thread",
        ),
        (lambda records: FailedOver()(), "'FailedOver' .* leave out failover="),
        (lambda records: ps.map_each(down, records >> number, concurrency=2), "'Summed' .* failover=.* concurrency=1"),
        (behind, "'Summed' .*ordered=True"),
        (
            lambda records: records >> number >> ps.node(batch=ps.Batch(4))(as_they_are) >> summed,
            "'as_they_are' .* rounding",
        ),
        (left_alone, "branch of this split does not lead to the result"),
        (filtered_branch, "several streams.* one data.split"),
        (two_sources, "several streams.* data.mix"),
        (mixed_late, "'batched' .* before data.mix"),
        (
            lambda records: (records >> data.split(2)) >> data.merged("arrival"),
            "'merged' .* in which they arrive.* data.merged\\('round_robin'\\)",
        ),
    ],
)
async def test_a_graph_that_could_not_go_on_is_refused(tmp_path: Path, pipeline: Any, told: str) -> None:
    with pytest.raises(ps.PlanError, match=told) as raised:
        engine.stream(over(pipeline), checkpoint=ps.Checkpoint(tmp_path))
    assert __file__ in str(raised.value)


async def generator() -> AsyncIterator[data.Record[None]]:
    yield data.Record(0, 0, 0, 0, None)


@pytest.mark.parametrize(
    "argument",
    [
        generator,
        lambda: ordered() >> data.shuffled(3, seed=1),
        lambda: (ordered(), ordered()) >> data.merged("round_robin"),
        lambda: data.mix([(ordered(), 1.0)], seed=1),
    ],
    ids=["generator", "stage", "merged", "mix"],
)
async def test_an_argument_that_would_begin_again_is_refused(tmp_path: Path, argument: Callable[[], Any]) -> None:
    with pytest.raises(ps.PlanError, match=r"state\(\)"):
        engine.stream(sums(argument()), checkpoint=ps.Checkpoint(tmp_path))


def numbers() -> Iterator[int]:
    yield from range(1000)


class Unstorable(Counted):
    def state(self) -> Any:
        return object()

    def __call__(self, record: data.Record[Any]) -> float:
        return float(record.index)


async def with_a_late_source(records: Any) -> Any:
    late = data.order(await some_time(numbers))
    return data.mix([(records, 1.0), (late, 1.0)], seed=1)


@ps.node
async def some_time(source: Any) -> Any:
    for _ in range(20):
        await asyncio.sleep(0)
    return source


@pytest.mark.parametrize("enters", [True, False])
@pytest.mark.parametrize(
    ("records", "pipeline", "told"),
    [
        (lambda: data.order(iter([1, 2])), lambda records: records, r"list_iterator .*state\(\)"),
        (lambda: data.order(numbers), lambda records: records, r"generator .*state\(\)"),
        (ordered, with_a_late_source, r"generator .*state\(\)"),
        (
            ordered, lambda records: ps.map_each(ps.node(Unstorable)(), records),
            "Unstorable is a builtins.object, which cannot be stored",
        ),
    ],
    ids=["iterator", "function", "late source of a mix", "model"],
)  # fmt: skip
async def test_what_cannot_go_on_is_refused_before_the_first_value(
    tmp_path: Path, records: Callable[[], Any], pipeline: Any, told: str, enters: bool
) -> None:
    noted: list[int] = []

    @ps.node
    def seen(record: data.Record[Any]) -> data.Record[Any]:
        noted.append(record.index)
        return record

    call = over(lambda records: pipeline(ps.map_each(seen, records)), records())
    stream = engine.stream(call, checkpoint=ps.Checkpoint(tmp_path))
    with pytest.raises((ps.PlanError, ps.NotStorable), match=told):
        await (stream.__aenter__() if enters else anext(stream))
    assert noted == []


@pytest.mark.parametrize("place", ["alone", "function", "in a mix"])
async def test_the_source_tells_its_state_once_at_the_start(tmp_path: Path, place: str) -> None:
    class Asked(Lines):
        times = 0

        def state(self) -> Any:
            self.times += 1
            return super().state()

    lines = Asked()
    records = data.order((lambda: lines) if place == "function" else lines)

    def mixed(records: Any) -> Any:
        return data.mix([(records, 1.0), (data.order(SOURCE), 1.0)], seed=1)

    call = over(mixed, records) if place == "in a mix" else sums(records)
    async with engine.stream(call, checkpoint=ps.Checkpoint(tmp_path)):
        assert lines.times == 1


async def test_checkpoint_is_for_one_call_that_has_it_and_is_no_services(tmp_path: Path) -> None:
    checkpoint = ps.Checkpoint(tmp_path)
    options: dict[str, Any] = {"checkpoint": checkpoint}
    with pytest.raises(ps.OptionsError, match="for one call of a graph"):
        engine.stream([sums(ordered())], **options)
    async with engine.deploy(sums) as service:
        with pytest.raises(ps.OptionsError, match=r"not for service\.stream"):
            service.stream(sums(ordered()), **options)

    with pytest.raises(ps.PlanError, match=r"0 ps\.fold"):
        await engine.run(ps.graph(summed)(1.0), checkpoint=checkpoint)
    async with engine.stream(sums(ordered())) as stream:
        with pytest.raises(ps.OptionsError, match="not saved"):
            await stream.checkpoint()


@ps.node(name="counting")
class CountingValues(Counted):
    def __call__(self, value: float) -> float:
        self.held.append(value)
        return value


def staged(*, is_stateful: bool = True, batches_first: bool = False) -> Any:
    one = CountingValues() if is_stateful else ps.node(name="counting")(lambda value: value)

    @ps.graph
    async def staged(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
        numbers = ps.map_each(one, ps.map_each(number, records))
        shuffle, batch = data.shuffled(4, seed=1), data.batched(2)
        return numbers >> batch >> shuffle if batches_first else numbers >> shuffle >> batch

    return staged(ordered())


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (lambda: sums(ordered()), lambda: sums(ordered(shuffle_seed=4)), "records.seed was 3, and is 4"),
        (
            lambda: sums(ordered()), lambda: sums(ordered(shard=(0, 2))),
            r"records.shard was \[0, 1\], and is \[0, 2\]",
        ),
        (
            lambda: sums(ordered()), lambda: sums(data.order(range(41), shuffle_seed=3)),
            r"records.length was 40, and is 41",
        ),
        (lambda: sums(ordered()), staged, "graph was 'sums', and is 'staged'.*nodes.batched was not there"),
        (staged, lambda: staged(batches_first=True), r"order was \["),
        (staged, lambda: staged(is_stateful=False), r"states was .*counting.*, and is \[\]"),
    ],
    ids=["seed", "shard", "length", "graph", "order of steps", "states"],
)  # fmt: skip
async def test_snapshots_of_another_run_are_refused(tmp_path: Path, before: Any, after: Any, told: str) -> None:
    await taken(before(), ps.Checkpoint(tmp_path, every_records=5), 10)
    with pytest.raises(ps.CheckpointError, match=told):
        await taken(after(), ps.Checkpoint(tmp_path, every_records=5))
    with pytest.raises(ps.CheckpointError, match="reader was False, and is True"):
        await taken(before(), ps.Checkpoint(tmp_path, every_records=5, reader=Counted()))
    if before is not staged and after is not staged:
        goes_on = ps.Checkpoint(tmp_path, every_records=5, on_mismatch="continue")
        assert (await taken(after(), goes_on))[0][0] > 1


async def test_a_batch_that_was_begun_for_a_larger_size_is_given_at_once(tmp_path: Path) -> None:
    def batches(size: int) -> Any:
        return over(lambda records: records >> data.read(SOURCE) >> data.batched(size), data.order(SOURCE))

    [(_, first)] = await taken(batches(8), ps.Checkpoint(tmp_path, every_records=5), 1)
    assert first.tolist() == [*range(8)]
    goes_on = ps.Checkpoint(tmp_path, every_records=5, on_mismatch="continue")
    assert [batch.tolist() for _, batch in await taken(batches(3), goes_on, 2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]


async def test_snapshots_of_another_run_are_refused_before_the_values_that_the_reader_had_not_taken(
    tmp_path: Path,
) -> None:
    checkpoint = ps.Checkpoint(tmp_path)
    async with engine.stream(sums(ordered()), checkpoint=checkpoint) as stream:
        await anext(stream)
        await stream.checkpoint()
    with pytest.raises(ps.CheckpointError, match=r"records\.seed was 3, and is 4"):
        async with engine.stream(sums(ordered(shuffle_seed=4)), checkpoint=checkpoint) as stream:
            await anext(stream)
    assert stream.position == 1  # the refused stream gave no value
    assert len(await taken(sums(ordered()), checkpoint)) == len(SOURCE) - 1


async def test_another_source_of_a_mix_is_refused_however_rarely_it_is_read(tmp_path: Path) -> None:
    def mixed(seed: int) -> ps.Call[AsyncIterator[float]]:
        @ps.graph
        async def from_two() -> AsyncIterator[float]:
            often = data.order(range(1000), shuffle_seed=1)
            return data.mix([(often, 0.98), (data.order(range(1000), shuffle_seed=seed), 0.02)], seed=1) >> number

        return from_two()

    checkpoint = ps.Checkpoint(tmp_path, every_records=10)
    await taken(mixed(1), checkpoint, 50)
    before = records_of(tmp_path)
    for _ in range(2):  # the first refused call must not write snapshots that would let the second call start
        with pytest.raises(ps.CheckpointError, match=r"order#2\.seed was 1, and is 2"):
            await taken(mixed(2), checkpoint)
    assert records_of(tmp_path) == before


async def test_a_second_run_is_refused(tmp_path: Path) -> None:
    checkpoint = ps.Checkpoint(tmp_path)
    async with engine.stream(sums(ordered()), checkpoint=checkpoint) as stream:
        await anext(stream)
        with pytest.raises(ps.CheckpointError, match="another run"):
            await taken(sums(ordered()), checkpoint)
    await taken(sums(ordered()), checkpoint)


def test_a_cancel_at_any_step_of_entering_leaves_nothing(tmp_path: Path) -> None:
    async def enter() -> None:
        async with engine.stream(sums(ordered()), checkpoint=ps.Checkpoint(tmp_path)):
            pass

    outcomes = 0
    for _ in cancelled_at_every_step(enter, timeout_seconds=None):
        outcomes += 1
        with snapshots.SnapshotFolder(tmp_path):  # the folder is unlocked, although the error is kept
            pass
    assert outcomes > 20


# Failures.


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: str, path: Path) -> None:
        if step == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshots, "before_step", fail)


async def test_a_full_disk_lets_the_run_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await taken(sums(ordered()))
    checkpoint = ps.Checkpoint(tmp_path, every_records=5)
    await taken(sums(ordered()), checkpoint, 20)
    before = records_of(tmp_path)
    with monkeypatch.context() as patched:
        full_disk(patched)
        rest = await taken(sums(ordered()), checkpoint)
        assert rest == whole[rest[0][0] - 1 :]
    assert records_of(tmp_path) == before
    async with engine.stream(sums(ordered()), checkpoint=checkpoint) as stream:
        await anext(stream)
        full_disk(monkeypatch)
        with pytest.raises(ps.CheckpointError, match="No space left"):
            await stream.checkpoint()


async def test_a_full_disk_ends_the_run_that_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch)
    with pytest.raises(ps.CheckpointError, match="No space left"):
        await taken(sums(ordered()), ps.Checkpoint(tmp_path, every_records=5, on_save_error="raise"))
    with pytest.raises(ps.CheckpointError, match="No space left"):  # fails when the stream ends
        await taken(sums(ordered()), ps.Checkpoint(tmp_path, every_records=500, on_save_error="raise"))


async def test_a_value_that_cannot_be_stored_names_stage_and_type(tmp_path: Path) -> None:
    @ps.node
    def odd(record: data.Record[None]) -> Any:
        return object()

    shuffles = over(lambda records: records >> odd >> data.shuffled(8, seed=1))
    with pytest.raises(ps.NotStorable, match=r"shuffled.* builtins\.object"):
        await taken(shuffles, ps.Checkpoint(tmp_path, every_records=5))
    reader = Counted()
    reader.held.append(np.add)
    with pytest.raises(ps.NotStorable, match=r"reader\)\[0\].*ufunc"):
        await taken(sums(ordered()), ps.Checkpoint(tmp_path, every_records=5, reader=reader))


async def test_a_state_that_changes_in_place_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_changed = threading.Event()
    monkeypatch.setattr(snapshots, "before_step", lambda step, path: has_changed.wait(60))

    @ps.node
    class Large(Keeping):
        def __init__(self) -> None:
            self.held = np.zeros(100_000)

        def __call__(self, record: data.Record[None]) -> float:
            self.held += 1
            return float(self.held[-1])

    large = Large()

    checkpoint = ps.Checkpoint(tmp_path, every_records=10)
    async with engine.stream(over(lambda records: ps.map_each(large, records)), checkpoint=checkpoint) as stream:
        for _ in range(30):
            await anext(stream)
        has_changed.set()  # the snapshot is written after this point
    with snapshots.SnapshotFolder(tmp_path) as folder:
        snapshot = folder.newest()
        assert snapshot is not None
        assert snapshot.record == 10
        assert set(snapshot.states["map_each/Large"]) == {float(snapshot.record)}


async def test_a_barrier_waits_for_what_runs_before_it(tmp_path: Path) -> None:
    @ps.node
    async def slow(value: float) -> float:
        for _ in range(int(value) % 5 * 3):
            await asyncio.sleep(0)
        return value

    def slowly(records: Any) -> Any:
        return ps.map_each(summed, ps.map_each(slow, records >> number, concurrency=8))

    await goes_on(lambda: over(slowly), tmp_path, 15, 15, every_records=3)


async def test_restore_comes_after_the_instance_was_entered(tmp_path: Path) -> None:
    happened: list[str] = []

    @ps.node
    class Entered(Counted):
        async def __aenter__(self) -> "Entered":
            happened.append("entered")
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            happened.append("left")

        def restore(self, state: Any) -> None:
            happened.append("restored")
            super().restore(state)

        def __call__(self, record: data.Record[None]) -> int:
            if happened[-1] != "called":
                happened.append("called")
            return record.index

    entered = Entered()

    checkpoint = ps.Checkpoint(tmp_path, every_records=5)
    for limit in (20, None):
        await taken(over(lambda records: ps.map_each(entered, records)), checkpoint, limit)
    assert happened == ["entered", "called", "left", "entered", "restored", "called", "left"]


async def test_profiles_and_statistics_show_what_snapshots_cost(tmp_path: Path) -> None:
    with telemetry.profile() as profile:
        async with engine.stream(sums(ordered()), checkpoint=ps.Checkpoint(tmp_path, every_records=1000)) as stream:
            for _ in range(3):
                await anext(stream)
                await stream.checkpoint()
            assert stream.statistics().snapshots_saved == 3
            assert "3 saved, 0 skipped, 0 failed, at most 1 values apart" in str(stream.statistics())
            [value async for value in stream]
    shown = " ".join(str(profile).split())
    assert "snapshots 4 of sums," in shown
    assert "beside the pipeline each; for copies, steps waited" in shown


@pytest.mark.parametrize("told", [{"files": {"a", "b"}}, {1: "one"}, ["a"], {"shape": (1, 2)}, {"rate": math.nan}])
async def test_a_fingerprint_that_json_does_not_give_back_is_refused(tmp_path: Path, told: Any) -> None:
    class Telling(AsyncLines):
        def fingerprint(self) -> Any:
            return told

    call = over(lambda numbers: numbers >> summed, Telling())
    with pytest.raises(ps.PlanError, match=r"fingerprint\(\) of source 'records'.*changes on its way through JSON"):
        await taken(call, ps.Checkpoint(tmp_path, every_records=2), 4)
