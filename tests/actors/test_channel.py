"""Promises of a channel, each in its smallest case, on both loops; test_channel_model.py tries combinations."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from penstock import ChannelClosed
from penstock.actors.channel import Channel
from penstock.testing import cancel_at_every_step, interleavings, wait_quiescent


class Sized:
    """An item with a size; comparing two such items is an error, as with arrays."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = object.__hash__


def sized_channel(capacity: int | None, max_bytes: int) -> "Channel[Sized]":
    return Channel(capacity, max_bytes=max_bytes, size_of=lambda item: item.size_bytes)


async def waiting(*coroutines: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Starts a task for each coroutine, in this order, and returns when no task can go on."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await wait_quiescent()
    assert not any(task.done() for task in tasks)
    return tasks


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "arguments", [{"capacity": 0}, {"capacity": 1, "max_bytes": 0}, {"capacity": 1, "max_bytes": 9}]
)
def test_impossible_bounds_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Channel(**arguments)


def test_it_is_first_in_first_out_and_holds_no_more_than_its_capacity() -> None:
    channel: Channel[int] = Channel(3)
    assert [channel.put_nowait(number) for number in range(5)] == [True, True, True, False, False]
    assert (len(channel), channel.statistics().high_water) == (3, 3)
    assert [channel.get_nowait() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(anyio.WouldBlock):
        channel.get_nowait()
    assert channel.statistics().puts == 3


def test_without_capacity_it_never_refuses() -> None:
    channel: Channel[int] = Channel(None)
    assert all(channel.put_nowait(number) for number in range(1000))
    assert channel.statistics().capacity is None
    assert channel.get_many_nowait(2000) == list(range(1000))


def test_higher_priorities_leave_first_and_one_priority_is_in_order() -> None:
    channel: Channel[str] = Channel(None)
    for item, priority in [("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5), ("f", 0)]:
        channel.put_nowait(item, priority)
    assert "".join(channel.get_many_nowait(10)) == "ceabfd"
    channel.put_nowait("g")
    assert channel.get_nowait() == "g"


async def test_a_putter_that_waits_is_overtaken_by_nobody() -> None:
    channel: Channel[str] = Channel(1)
    channel.put_nowait("first")
    second, third = await waiting(channel.put("second"), channel.put("third"))
    assert channel.get_nowait() == "first"
    assert not channel.put_nowait("too late")  # "second" is in, though its putter has not run yet
    assert (await second, len(channel)) == (None, 1)
    assert (channel.get_nowait(), channel.get_nowait()) == ("second", "third")
    await third


async def test_a_putter_of_higher_priority_enters_first() -> None:
    channel: Channel[str] = Channel(1)
    channel.put_nowait("first")
    tasks = await waiting(channel.put("low"), channel.put("high", 1))
    assert [channel.get_nowait() for _ in range(3)] == ["first", "high", "low"]
    await asyncio.gather(*tasks)


async def test_an_item_without_priority_enters_after_one_with() -> None:
    channel: Channel[str] = Channel(1)
    channel.put_nowait("urgent", 1)
    (putter,) = await waiting(channel.put("usual"))
    assert [channel.get_nowait(), channel.get_nowait()] == ["urgent", "usual"]
    await putter


async def test_getters_are_served_in_the_order_in_which_they_came() -> None:
    channel: Channel[int] = Channel(4)
    first, second = await waiting(channel.get(), channel.get())
    channel.put_nowait(1)
    with pytest.raises(anyio.WouldBlock):
        channel.get_nowait()  # the item is promised to a getter
    late = asyncio.create_task(channel.get())
    assert channel.get_many_nowait(5) == []
    channel.put_nowait(2)
    channel.put_nowait(3)
    assert channel.get_many_nowait(5) == [1]  # one of three items is not promised
    assert (await first, await second) == (2, 3)
    await cancelled(late)


async def test_a_getter_that_was_woken_and_is_cancelled_passes_the_wake_up_on() -> None:
    channel: Channel[str] = Channel(1)
    first, second = await waiting(channel.get(), channel.get())
    channel.put_nowait("item")
    await cancelled(first)
    assert await second == "item"


async def test_an_item_put_for_a_getter_that_was_just_cancelled_is_free() -> None:
    channel: Channel[str] = Channel(2)
    (getter,) = await waiting(channel.get())
    getter.cancel()
    channel.put_nowait("item")
    await asyncio.wait([getter])
    assert channel.get_nowait() == "item"
    with pytest.raises(anyio.WouldBlock):
        channel.get_nowait()


async def test_a_putter_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    channel: Channel[str] = Channel(1)
    channel.put_nowait("first")
    second, third = await waiting(channel.put("second"), channel.put("third"))
    second.cancel()
    assert channel.get_nowait() == "first"  # the cancelled putter is still in line, but "third" enters
    await asyncio.wait([second, third])
    assert channel.get_many_nowait(5) == ["third"]


async def test_a_putter_that_is_cancelled_after_its_item_entered_can_take_it_back() -> None:
    channel: Channel[str] = Channel(1)
    channel.put_nowait("first")
    (putter,) = await waiting(channel.put("second"))
    channel.get_nowait()
    await cancelled(putter)
    assert len(channel) == 1
    assert channel.discard("second")
    assert len(channel) == 0


def test_bytes_are_bounded_and_a_larger_item_enters_only_when_empty() -> None:
    channel = sized_channel(None, 10)
    assert channel.put_nowait(Sized(6))
    assert not channel.put_nowait(Sized(5))
    assert channel.put_nowait(Sized(4))
    assert channel.statistics().bytes_held == 10
    assert not channel.put_nowait(Sized(25))
    channel.get_many_nowait(2)
    assert channel.put_nowait(Sized(25))
    assert not channel.put_nowait(Sized(0))  # no item fits beside it, not even of size 0
    channel.get_nowait()
    assert channel.statistics().bytes_held == 0


def test_a_size_counts_as_it_was_when_the_item_came() -> None:
    channel = sized_channel(None, 10)
    item = Sized(6)
    channel.put_nowait(item)
    item.size_bytes = 1
    channel.get_nowait()
    assert channel.statistics().bytes_held == 0


async def test_a_large_item_that_waits_is_not_overtaken_by_small_ones_of_its_priority() -> None:
    channel = sized_channel(None, 10)
    channel.put_nowait(Sized(6))
    large, small, urgent = Sized(25), Sized(1), Sized(2)
    (putter,) = await waiting(channel.put(large))
    assert not channel.put_nowait(small)
    assert channel.put_nowait(urgent, 1)  # a more urgent item passes it
    channel.get_many_nowait(2)
    await putter
    assert channel.get_nowait() is large


async def test_small_items_behind_a_large_one_enter_when_it_gives_up() -> None:
    channel = sized_channel(None, 10)
    channel.put_nowait(Sized(6))
    large, small = await waiting(channel.put(Sized(25)), channel.put(Sized(4)))
    await cancelled(large)
    await small
    assert channel.statistics().bytes_held == 10


async def test_a_discarded_item_makes_room() -> None:
    channel: Channel[Sized] = Channel(2)
    one, two, three = Sized(1), Sized(2), Sized(3)
    channel.put_nowait(one)
    channel.put_nowait(two)
    (putter,) = await waiting(channel.put(three))
    assert channel.discard(two)
    await putter
    assert not channel.discard(two)
    assert channel.get_many_nowait(5) == [one, three]


def test_a_discarded_item_gives_its_bytes_back() -> None:
    channel = sized_channel(None, 10)
    item, other = Sized(7), Sized(3)
    channel.put_nowait(item)
    channel.put_nowait(other)
    assert channel.discard(item)
    assert channel.statistics().bytes_held == 3
    assert channel.put_nowait(Sized(7))


async def test_an_item_discarded_before_it_entered_lets_its_putter_go_on() -> None:
    channel: Channel[str] = Channel(1)
    channel.put_nowait("first")
    second, third = await waiting(channel.put("second", 3), channel.put("third"))
    assert not channel.discard("second", 3)
    await second
    assert channel.get_many_nowait(1) == ["first"]
    await third
    assert channel.get_many_nowait(5) == ["third"]


async def test_a_getter_whose_item_was_discarded_stays_first_in_line() -> None:
    channel: Channel[str] = Channel(1)
    first, second = await waiting(channel.get(), channel.get())
    channel.put_nowait("discarded")
    channel.discard("discarded")
    await wait_quiescent()
    channel.put_nowait("item")
    assert await first == "item"
    await cancelled(second)


async def test_closing_refuses_puts_and_lets_the_rest_be_taken() -> None:
    channel: Channel[str] = Channel(1)
    channel.put_nowait("first")
    (putter,) = await waiting(channel.put("second"))
    channel.close()
    with pytest.raises(ChannelClosed, match="while this put waited"):
        await putter
    with pytest.raises(ChannelClosed, match="put into"):
        channel.put_nowait("third")
    assert channel.closed
    assert await channel.get() == "first"
    with pytest.raises(ChannelClosed, match="drained"):
        await channel.get()
    with pytest.raises(ChannelClosed, match="drained"):
        channel.get_nowait()


async def test_closing_wakes_every_getter() -> None:
    channel: Channel[str] = Channel(1)
    tasks = await waiting(channel.get(), channel.get())
    channel.close()
    for task in tasks:
        with pytest.raises(ChannelClosed):
            await task


@pytest.mark.parametrize("take_back", [False, True])
async def test_a_getter_behind_the_last_item_of_a_closed_channel_waits_until_it_is_gone(take_back: bool) -> None:
    channel: Channel[str] = Channel(1)
    first, second = await waiting(channel.get(), channel.get())
    channel.put_nowait("last")
    channel.close()
    if take_back:
        await cancelled(first)
        assert await second == "last"
    else:
        assert await first == "last"
        with pytest.raises(ChannelClosed):
            await second


async def test_a_getter_of_a_closed_channel_ends_when_the_last_item_is_discarded() -> None:
    channel: Channel[str] = Channel(1)
    tasks = await waiting(channel.get(), channel.get())
    channel.put_nowait("last")
    channel.close()
    channel.discard("last")
    for task in tasks:
        with pytest.raises(ChannelClosed):
            await task


async def test_only_waiting_is_counted_as_waiting() -> None:
    channel: Channel[int] = Channel(1)
    await channel.put(1)
    await channel.get()
    calm = channel.statistics()
    assert (calm.put_wait_seconds, calm.get_wait_seconds) == (0, 0)
    (getter,) = await waiting(channel.get())
    assert channel.statistics().waiting_getters == 1
    channel.put_nowait(2)
    await getter
    channel.put_nowait(3)
    (putter,) = await waiting(channel.put(4))
    assert channel.statistics().waiting_putters == 1
    await cancelled(putter)
    after = channel.statistics()
    assert (after.waiting_getters, after.waiting_putters) == (0, 0)
    assert after.put_wait_seconds > 0
    assert after.get_wait_seconds > 0


def test_many_producers_and_consumers_lose_and_duplicate_nothing(effort: int) -> None:
    async def main() -> None:
        channel: Channel[tuple[int, int]] = Channel(2)
        taken: list[tuple[int, int]] = []

        async def produce(producer: int) -> None:
            for number in range(5):
                await channel.put((producer, number))

        async def consume() -> None:
            while True:
                taken.append(await channel.get())
                taken.extend(channel.get_many_nowait(1))

        consumers = [asyncio.create_task(consume()) for _ in range(3)]
        await asyncio.gather(*map(produce, range(3)))
        channel.close()
        results = await asyncio.gather(*consumers, return_exceptions=True)
        assert all(isinstance(result, ChannelClosed) for result in results)
        assert sorted(taken) == list(itertools.product(range(3), range(5)))
        for producer in range(3):
            numbers = [number for owner, number in taken if owner == producer]
            assert numbers == sorted(numbers)

    interleavings(main, count=50 * effort)


def test_a_cancel_at_any_step_leaves_the_channel_usable() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel(1)
        taken: list[int] = []

        async def consume() -> None:
            while True:
                taken.append(await channel.get())

        async with asyncio.TaskGroup() as tasks:
            try:
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(consume())
                    inner.create_task(consume())
                    for number in range(4):
                        await channel.put(number)
                    channel.close()
            except* ChannelClosed:
                pass
            finally:
                statistics = channel.statistics()
                assert (statistics.waiting_getters, statistics.waiting_putters) == (0, 0)
                if not channel.closed:
                    left = channel.get_many_nowait(5)
                    assert taken + left == list(range(statistics.puts))
                    tasks.create_task(channel.put(1))
                    assert await channel.get() == 1

    for outcome in cancel_at_every_step(main):
        assert not outcome.tasks_left
        assert not outcome.loop_errors
        assert outcome.error is None or isinstance(outcome.error, asyncio.CancelledError)


async def test_those_who_wait_to_put_count_while_they_wait() -> None:
    channel: Channel[int] = Channel(1)
    assert channel.put_nowait(0)
    assert channel.statistics().put_wait_seconds == 0
    tasks = await waiting(channel.put(1), channel.put(2))
    seen = [channel.statistics().put_wait_seconds]
    await wait_quiescent()
    seen.append(channel.statistics().put_wait_seconds)
    await cancelled(tasks[1])
    seen.append(channel.statistics().put_wait_seconds)
    assert await channel.get() == 0
    await tasks[0]
    seen.append(channel.statistics().put_wait_seconds)
    assert 0 < seen[0] < seen[1] < seen[2] < seen[3]
    assert channel.statistics().put_wait_seconds == seen[3]
