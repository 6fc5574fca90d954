"""Actors that own their loop and give streams: a stream is bounded, has one reader, and ends when the reader leaves."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS, Scheduler, Taken, actor, begun, cancelled_at_every_step, values_of, virtual

PartInbox = ps.Inbox[ps.StreamWork[int, int]]


@ps.node
class Counter(ps.StreamActor[int, int]):
    """Counts up to each item, giving each open item one part in turn; drops a reader that does not keep up."""

    async def loop(self, inbox: PartInbox, /) -> None:
        open_items: dict[ps.StreamWork[int, int], int] = {}
        while True:
            for work in [] if open_items else [await inbox.get()]:
                open_items[work] = 0
            open_items |= dict.fromkeys(inbox.take_nowait(100), 0)
            await asyncio.sleep(0)
            for work, part in list(open_items.items()):
                open_items[work] += 1
                if work.cancelled or part == work.value:
                    work.finish()
                elif work.put_nowait(part):
                    continue
                else:
                    work.fail(TimeoutError("too slow"))
                del open_items[work]


count = Counter()


@ps.node
async def letters(parts: AsyncIterator[int]) -> AsyncIterator[str]:
    async for part in parts:
        yield chr(97 + part)


@ps.node
async def collect(parts: AsyncIterator[int]) -> list[int]:
    return [part async for part in parts]


counted = ps.graph(count)


spelt = count >> letters


collected = count >> collect


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_parts_come_in_order_under_every_scheduler(scheduler: Scheduler) -> None:
    assert [part async for part in engine.stream(counted(100), scheduler=scheduler)] == list(range(100))
    assert [part async for part in engine.stream(spelt(5), scheduler=scheduler)] == ["a", "b", "c", "d", "e"]
    assert await engine.run(collected(40), scheduler=scheduler) == list(range(40))


async def test_outside_a_graph_a_loop_runs_for_one_item() -> None:
    assert [part async for part in count(3)] == [0, 1, 2]
    parts = aiter(count(100))
    assert await anext(parts) == 0
    await parts.aclose()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


@pytest.mark.parametrize("capacity", [1, 3])
async def test_a_reader_holds_no_more_than_the_capacity(capacity: int) -> None:
    taken = Taken(ps.StreamActor, capacity=capacity)
    async with engine.stream(taken.graph(0)) as parts:
        starting = asyncio.create_task(parts.wait_started())
        work = await taken.work()
        assert work.put_nowait(0)
        await starting
        await testing.wait_quiescent()
        held = 0
        while work.put_nowait(held + 1):
            held += 1
            await testing.wait_quiescent()
        assert held <= capacity
        assert await anext(parts) == 0
        assert work.put_nowait(held + 1)
        work.finish()
        assert [part async for part in parts] == list(range(1, held + 2))


async def test_the_inbox_has_a_capacity_of_its_own() -> None:
    waiting = asyncio.Event()
    held: list[int] = []
    depths: list[int] = []

    async def holding(inbox: PartInbox) -> None:
        await waiting.wait()
        depths.append(len(inbox))
        while True:
            work = await inbox.get()
            held.append(sum(work.put_nowait(part) for part in range(9)))
            work.finish()

    graph = ps.graph(actor(holding, ps.StreamActor, capacity=2, inbox_capacity=20))
    async with engine.deploy(graph, max_in_flight=30) as service:
        streams = [service.stream(graph(n)) for n in range(30)]
        reads = await begun(*map(anext, streams))
        inbox = service.statistics().actors[0].inbox
        assert (inbox.depth, inbox.capacity, inbox.waiting_putters) == (20, 20, 10)
        waiting.set()
        await asyncio.gather(*reads)
        for stream in streams:
            await stream.aclose()
    assert (held, depths) == ([2] * 30, [20])


async def test_a_reader_that_leaves_cancels_the_work_at_once() -> None:
    taken = Taken(ps.StreamActor)
    graph = taken.graph
    async with engine.deploy(graph) as service:
        for number, parts_read in enumerate((0, 1, 5)):
            async with service.stream(graph(number)) as parts:
                starting = asyncio.create_task(parts.wait_started())
                work = await taken.work(number)
                for part in range(max(1, parts_read)):
                    work.put_nowait(part)
                await starting
                assert [await anext(parts) for _ in range(parts_read)] == list(range(parts_read))
                assert not work.cancelled
            assert work.cancelled
            assert work.put_nowait(1)  # ignored
            work.finish()


async def test_a_reader_that_leaves_before_the_first_part_leaves_the_inbox() -> None:
    taken, opened = Taken(ps.StreamActor), asyncio.Event()

    async def late(inbox: PartInbox) -> None:
        await opened.wait()
        await taken.take(inbox)

    graph = ps.graph(actor(late, ps.StreamActor))
    async with engine.deploy(graph) as service:
        first, second = service.stream(graph(1)), service.stream(graph(2))
        starting = await begun(*(stream.wait_started() for stream in (first, second)))
        await first.aclose()
        await asyncio.gather(starting[0], return_exceptions=True)
        opened.set()
        work = await taken.work()
        work.finish()
        await starting[1]
        assert [part async for part in second] == []
    assert [work.value for work in taken.works] == [2]


@pytest.mark.parametrize("is_read_meanwhile", [False, True])
@pytest.mark.parametrize(("parts_before", "fails"), [(0, True), (3, True), (3, False)])
async def test_the_end_comes_after_the_parts_before_it(parts_before: int, fails: bool, is_read_meanwhile: bool) -> None:
    taken, error = Taken(ps.StreamActor), OSError("gone") if fails else None
    async with engine.stream(taken.graph(0)) as parts:
        reading = asyncio.create_task(collect_all(parts))
        work = await taken.work()
        for part in range(parts_before):
            work.put_nowait(part)
            if is_read_meanwhile:
                await testing.wait_quiescent()
        if error is None:
            work.finish()
        else:
            work.fail(error)
        assert await reading == (list(range(parts_before)), error)
    assert error is None or "in node 'take' of graph 'take', item 0" in error.__notes__[0]


async def test_an_error_that_no_reader_comes_to_is_logged() -> None:
    taken, failed = Taken(ps.StreamActor), asyncio.Event()

    @ps.node
    async def first_of(parts: AsyncIterator[int]) -> int:
        part = await anext(parts)
        await failed.wait()
        return part

    graph = taken.graph >> first_of
    with structlog.testing.capture_logs() as entries:
        running = asyncio.create_task(engine.run(graph(0)))
        work = await taken.work()
        work.put_nowait(5)
        await testing.wait_quiescent()
        work.fail(OSError("gone"))
        await testing.wait_quiescent()
        failed.set()
        assert await running == 5
    assert [entry["event"] for entry in entries] == ["stream.unread_error"]


async def collect_all(parts: AsyncIterator[int]) -> tuple[list[int], BaseException | None]:
    got: list[int] = []
    try:
        async for part in parts:
            got.append(part)  # noqa: PERF401 - keeps the parts before the error
    except Exception as error:  # noqa: BLE001 - the test checks the error
        return got, error
    return got, None


async def test_retry_only_before_the_first_part() -> None:
    taken = Taken(ps.StreamActor, retry=ps.Retry(attempts=3))
    async with engine.stream(taken.graph(0)) as parts:
        reading = asyncio.create_task(collect_all(parts))
        (await taken.work(0)).fail(OSError("once"))
        work = await taken.work(1)
        work.put_nowait(1)
        await testing.wait_quiescent()
        work.fail(OSError("gone"))
        got, error = await reading
    assert got == [1]
    assert str(error) == "gone"
    assert len(taken.works) == 2


@virtual
async def test_the_deadline_covers_the_whole_stream() -> None:
    taken = Taken(ps.StreamActor)
    graph = taken.graph

    async with engine.stream(graph(0), timeout_seconds=2) as parts:
        reading = asyncio.create_task(collect_all(parts))
        work = await taken.work()
        work.put_nowait(0)
        await asyncio.sleep(1)
        assert not work.cancelled
        got, error = await reading
        assert got == [0]
        assert isinstance(error, ps.DeadlineExceeded)
        assert work.cancelled
        assert work.deadline == asyncio.get_running_loop().time() == 2


@pytest.mark.parametrize("restart", ["temporary", "permanent"])
@pytest.mark.parametrize("parts_before", [0, 2])
async def test_the_end_of_a_loop_ends_its_streams(parts_before: int, restart: str) -> None:
    async def closing(inbox: PartInbox) -> None:
        work = await inbox.get()
        for part in range(parts_before):
            work.put_nowait(part)
            await asyncio.sleep(0.001)
        raise OSError("the device is gone")

    is_gone = restart == "temporary"
    message = "actor 'closing' takes no more items: its loop" if is_gone else "'closing' was restarted"
    graph = ps.graph(actor(closing, ps.StreamActor, restart=restart))
    async with engine.deploy(graph) as service:
        for expected in [range(parts_before), range(0 if is_gone else parts_before)]:
            async with service.stream(graph(0)) as parts:
                got, error = await collect_all(parts)
            assert isinstance(error, ps.ActorStopped if is_gone else ps.ActorRestarted)
            assert message in str(error)
            assert isinstance(error.__cause__, OSError)
            assert got == [*expected]


async def test_a_slow_reader_stalls_itself_and_nobody_else() -> None:
    async with engine.deploy(counted) as service:
        slow = service.stream(counted(1000))
        await slow.wait_started()
        assert [part async for part in service.stream(counted(1000))] == list(range(1000))
        got, error = await collect_all(slow)
        assert got == list(range(len(got)))
        assert 0 < len(got) < 50
        assert str(error) == "too slow"
        await slow.aclose()


@pytest.mark.parametrize("is_read_by_a_node", [False, True])
@pytest.mark.parametrize("how", ["taken", "left", "finished", "too slow"])
@virtual
async def test_a_loop_waits_for_room_as_long_as_it_says(how: str, is_read_by_a_node: bool) -> None:
    taken, loop = Taken(ps.StreamActor, capacity=4), asyncio.get_running_loop()
    graph: Any = taken.graph >> letters if is_read_by_a_node else taken.graph
    async with engine.deploy(graph) as service, service.stream(graph(1)) as stream:
        reading = asyncio.ensure_future(anext(stream))
        work = await taken.work()
        assert work.room == 4
        await work.wait_room()  # returns at once: there is room
        while work.put_nowait(7):
            await testing.wait_quiescent()
        await reading
        while work.put_nowait(7):
            await testing.wait_quiescent()
        assert (work.room, work.settled) == (0, False)
        began = loop.time()
        waits = [asyncio.create_task(work.wait_room(timeout_seconds=30)) for _ in range(2)]
        await asyncio.sleep(29)
        if how == "taken":
            for _ in range(8 if is_read_by_a_node else 1):
                await anext(stream)
        elif how == "left":
            await stream.aclose()
        elif how == "finished":
            work.finish()
        await asyncio.gather(*waits)
        assert loop.time() - began == (30 if how == "too slow" else 29)
        assert (work.room > 0, work.settled) == (True, how != "taken")
        assert work.put_nowait(8)
        if how == "too slow":
            _, error = await collect_all(stream)
            assert str(error) == "the reader has taken nothing for 30 seconds"


@virtual
async def test_a_reader_that_takes_a_part_at_times_is_not_too_slow() -> None:
    inbox, [parts] = testing.stream_inbox([7], capacity=16)

    async def refill() -> None:
        """Puts a part whenever there is room; a second task waits for room at the same time."""
        work = await inbox.get()
        waiter: asyncio.Task[None] | None = None
        while not work.settled:
            if work.put_nowait(work.value):
                continue
            if waiter is None or waiter.done():
                waiter = asyncio.create_task(work.wait_room(timeout_seconds=3))
            await asyncio.sleep(0.1)

    running = asyncio.create_task(refill())
    for _ in range(20):
        await asyncio.sleep(1)
        assert await anext(parts) == 7
    await running  # the reader takes no more parts
    rest, error = await collect_all(parts)
    assert rest == [7] * 16
    assert str(error) == "the reader has taken nothing for 3 seconds"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "3"])
async def test_a_timeout_of_a_wait_for_room_is_a_positive_number(seconds: Any) -> None:
    inbox, _ = testing.stream_inbox([7])
    with pytest.raises(ps.OptionsError, match=r"wait_room\(timeout_seconds=.*a finite number above 0"):
        await (await inbox.get()).wait_room(timeout_seconds=seconds)


async def test_a_fake_is_a_generator() -> None:
    async def fake(n: int) -> AsyncIterator[int]:
        yield -n

    with testing.replace(count, fake):
        assert await engine.run(collected(3)) == [-3]


def test_every_stream_has_one_end_under_many_interleavings(effort: int) -> None:
    async def main() -> None:
        async with engine.deploy(counted, spelt) as service:

            async def read(n: int) -> None:
                async with service.stream(counted(n)) as parts:
                    assert [part async for part in parts] == list(range(n))

            async def leave(n: int) -> None:
                async with service.stream(spelt(n)) as parts:
                    async for part in parts:
                        if part == "d":
                            return

            async with asyncio.TaskGroup() as group:
                for n in range(4):
                    group.create_task(read(n * 7))
                    group.create_task(leave(20))
                gone = group.create_task(read(1000))
                await asyncio.sleep(0)
                gone.cancel()

    testing.interleavings(main, count=40 * effort)


def test_a_cancel_at_every_step_leaves_nothing_behind() -> None:
    for outcome in cancelled_at_every_step(lambda: values_of(engine.stream(spelt(3)))):
        assert outcome.error or outcome.result == ["a", "b", "c"]
