"""Inboxes without an engine: the work that a loop gets in a unit test, and the results that its callers see."""

import asyncio

import pytest

import penstock as ps
from penstock import testing


async def test_every_value_has_its_outcome_and_the_inbox_ends_behind_the_last() -> None:
    inbox, outcomes = testing.inbox([1, 2, 3])
    (await inbox.get()).finish("one")
    second, third = inbox.take_nowait(5)
    third.finish("three")
    second.fail(OSError("two"))
    assert [outcomes[0].result(), str(outcomes[1].exception()), outcomes[2].result()] == ["one", "two", "three"]
    with pytest.raises(ps.InboxClosed):
        await inbox.get()


async def test_a_future_that_is_cancelled_cancels_its_work() -> None:
    inbox, outcomes = testing.inbox(["queued", "taken", "other"])
    queued, taken, _ = outcomes
    queued.cancel()
    work, other = inbox.take_nowait(3)
    told: list[str] = []
    work.on_cancelled(lambda: told.append("taken"))
    other.on_cancelled(lambda: told.append("other"))
    assert not work.cancelled
    taken.cancel()
    assert work.cancelled
    await testing.wait_quiescent()
    assert told == ["taken"]


async def test_readers_get_the_parts_and_the_error_behind_them() -> None:
    inbox, [reader, other] = testing.stream_inbox("ab", capacity=2)
    first, second = inbox.take_nowait(2)
    assert [first.put_nowait(part) for part in range(3)] == [True, True, False]
    first.finish()
    assert [part async for part in reader] == [0, 1]
    reading = asyncio.ensure_future(anext(other))
    await testing.wait_quiescent()
    second.fail(OSError("no parts"))
    with pytest.raises(OSError, match="no parts"):
        await reading
    with pytest.raises(ps.InboxClosed):
        await inbox.get()


async def test_a_reader_that_is_closed_or_dropped_cancels_its_work() -> None:
    inbox, readers = testing.stream_inbox(["closed", "dropped", "kept"])
    closed, dropped, kept = inbox.take_nowait(3)
    await readers[0].aclose()
    assert closed.cancelled
    del readers[1]
    await testing.wait_quiescent()
    assert dropped.cancelled
    assert not kept.cancelled
