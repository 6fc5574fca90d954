"""What a channel holds, and for how long its users wait; test_channel_model.py tries all that they may do."""

import asyncio

from penstock.actors.channel import Channel
from penstock.testing import wait_quiescent
from tests.kit import begun


def test_it_is_first_in_first_out_and_holds_no_more_than_its_capacity() -> None:
    channel: Channel[int] = Channel(3)
    assert [channel.put_nowait(number) for number in range(5)] == [True, True, True, False, False]
    assert [channel.get_nowait() for _ in range(3)] == [0, 1, 2]


def test_a_size_counts_as_it_was_when_the_item_came() -> None:
    channel: Channel[list[int]] = Channel(None, max_bytes=10, size_of=len)
    item = [1, 2, 3, 4, 5, 6]
    channel.put_nowait(item)
    item.clear()
    channel.get_nowait()
    assert channel.statistics().bytes_held == 0


async def test_only_waiting_is_counted_as_waiting() -> None:
    channel: Channel[int] = Channel(1)
    await channel.put(1)
    await channel.get()
    calm = channel.statistics()
    assert (calm.put_wait_seconds, calm.get_wait_seconds) == (0, 0)
    [getter] = await begun(channel.get())
    channel.put_nowait(2)
    await getter
    assert channel.statistics().get_wait_seconds > 0


async def test_those_who_wait_to_put_count_while_they_wait() -> None:
    channel: Channel[int] = Channel(1)
    assert channel.put_nowait(0)
    assert channel.statistics().put_wait_seconds == 0
    tasks = await begun(channel.put(1), channel.put(2))
    seen = [channel.statistics().put_wait_seconds]
    await wait_quiescent()
    seen.append(channel.statistics().put_wait_seconds)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    seen.append(channel.statistics().put_wait_seconds)
    assert await channel.get() == 0
    await tasks[0]
    seen.append(channel.statistics().put_wait_seconds)
    assert 0 < seen[0] < seen[1] < seen[2] < seen[3]
    assert channel.statistics().put_wait_seconds == seen[3]
