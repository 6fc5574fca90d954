"""Work is settled once; an inbox hands out work whose caller still waits, and says when no more work will come."""

import asyncio
from collections.abc import Callable

import pytest

import penstock as ps
from penstock.actors.own_loops import AnyRequest, Mailbox, Request, StreamRequest

IntWork = Request[int, int]


async def fill(inbox: Mailbox[IntWork], *values: int, priority: int = 0, deadline: float | None = None) -> None:
    for value in values:
        await inbox.channel.put(Request(value, priority, deadline), priority)


async def test_settling_twice_says_so() -> None:
    for again in (lambda work: work.finish(2), lambda work: work.fail(OSError("late"))):
        finished: IntWork = Request(7)
        finished.finish(1)
        with pytest.raises(ps.WorkSettledError, match="settled before"):
            again(finished)
        assert await finished.outcome == 1
        failed: IntWork = Request(7)
        failed.fail(ValueError("no"))
        with pytest.raises(ps.WorkSettledError, match="settled before"):
            again(failed)
        with pytest.raises(ValueError, match="no"):
            await failed.outcome


async def test_an_error_that_comes_with_the_cancel_is_not_reported_as_lost() -> None:
    work: IntWork = Request(7)
    work.fail(OSError("nobody waits"))
    work.cancel()  # the suite's leak checks see errors that the loop reports


async def test_an_actor_may_fail_an_item_with_any_error() -> None:
    work: IntWork = Request(7)
    work.fail(StopIteration(3))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await work.outcome


async def test_a_stream_that_was_settled_takes_no_more_parts() -> None:
    work: StreamRequest[str, int] = StreamRequest("prompt")
    reader = work.buffer.reader()
    work.put_nowait(1)
    work.finish()
    assert work.settled
    assert work.put_nowait(2)  # ignored: the part is dropped
    for again in (work.finish, lambda: work.fail(OSError())):
        with pytest.raises(ps.WorkSettledError, match="settled before"):
            again()
    assert [part async for part in reader] == [1]
    with pytest.raises(ps.WorkSettledError):  # a stream read to its end is settled, not cancelled
        work.finish()


async def test_higher_priorities_first_and_first_in_first_out_within_one() -> None:
    inbox: Mailbox[IntWork] = Mailbox()
    await fill(inbox, 1, 2)
    await fill(inbox, 3, 4, priority=1)
    assert [work.value for work in inbox.take_nowait(3)] == [3, 4, 1]
    assert (await inbox.get()).value == 2
    assert inbox.take_nowait(5) == []


async def test_cancelled_and_expired_work_is_not_handed_out() -> None:
    inbox: Mailbox[IntWork] = Mailbox()
    now = asyncio.get_running_loop().time()
    gone: IntWork = Request(1)
    await inbox.channel.put(gone)
    await fill(inbox, 2, deadline=now)
    await fill(inbox, 3, deadline=now + 3600)
    gone.cancel()
    waiting: IntWork = Request(4)
    await inbox.channel.put(waiting)
    await fill(inbox, 5)
    waiting.outcome.cancel()
    assert [work.value for work in inbox.take_nowait(2)] == [3, 5]


async def test_a_waiting_loop_sleeps_through_cancelled_work() -> None:
    inbox: Mailbox[IntWork] = Mailbox()
    getting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    work: IntWork = Request(1)
    await inbox.channel.put(work)
    work.cancel()
    await fill(inbox, 2)
    assert (await getting).value == 2


async def test_an_inbox_may_be_bounded_by_the_bytes_of_its_values() -> None:
    inbox: Mailbox[Request[object, int]] = Mailbox(max_bytes=10)

    for value in (b"123456", object(), "1234"):
        await inbox.channel.put(Request(value))
    putting = asyncio.create_task(inbox.channel.put(Request(b"7")))
    await asyncio.sleep(0)
    assert not putting.done()
    assert (await inbox.get()).value == b"123456"
    await putting


async def test_a_loop_that_ignores_the_end_does_not_stop_the_others() -> None:
    inbox: Mailbox[IntWork] = Mailbox()
    inbox.channel.close()

    async def stubborn() -> None:
        while True:
            try:
                await inbox.get()
            except ps.InboxClosed:
                continue

    task = asyncio.create_task(stubborn())
    for _ in range(3):
        await asyncio.sleep(0)  # would not return if `get` never yielded
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("make", [lambda: Request[int, int](7), lambda: StreamRequest[int, int](7)])
async def test_who_asks_is_told_of_a_cancel_once_and_not_of_an_end(make: Callable[[], AnyRequest[int]]) -> None:
    told: list[str] = []
    gone, settled, late = make(), make(), make()
    gone.on_cancelled(lambda: told.append("gone"))
    gone.on_cancelled(lambda: told.append("gone, too"))
    settled.on_cancelled(lambda: told.append("settled"))
    settled.fail(OSError())
    for work in (gone, settled, late):
        work.cancel()
    assert told == []  # not within the step that cancels
    late.on_cancelled(lambda: told.append("late"))
    settled.on_cancelled(lambda: told.append("settled"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert told == ["gone", "gone, too", "late"]
