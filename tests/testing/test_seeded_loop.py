"""One seed replays one interleaving, many seeds find many interleavings, and none breaks a promise of asyncio."""

import asyncio
import itertools

import pytest

from penstock.testing import interleavings, run_seeded


async def three_tasks() -> str:
    """Returns the order in which three tasks took three steps each."""
    steps: list[str] = []

    async def walk(name: str) -> None:
        for _ in range(3):
            steps.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*map(walk, "abc"))
    return "".join(steps)


def test_one_seed_is_one_interleaving() -> None:
    for seed in range(20):
        assert run_seeded(three_tasks, seed=seed) == run_seeded(three_tasks, seed=seed)


def test_seeds_find_every_order() -> None:
    async def main() -> str:
        return (await three_tasks())[:3]

    starts = {start for start in interleavings(main, count=200) if len(set(start)) == 3}
    assert starts == {"".join(order) for order in itertools.permutations("abc")}


def test_tasks_that_wake_together_come_in_any_order() -> None:
    async def main() -> str:
        woken: list[str] = []
        event = asyncio.Event()

        async def wait(name: str) -> None:
            await event.wait()
            woken.append(name)

        waiting = asyncio.gather(*map(wait, "abc"))
        await asyncio.sleep(1)
        event.set()
        await waiting
        return "".join(woken)

    assert set(interleavings(main, count=100)) == {"".join(order) for order in itertools.permutations("abc")}


def test_tasks_woken_by_different_callbacks_come_in_any_order() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        woken: list[str] = []

        async def wait(name: str, future: asyncio.Future[None]) -> None:
            await future
            woken.append(name)

        first: asyncio.Future[None] = loop.create_future()
        second: asyncio.Future[None] = loop.create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(wait("a", first))
            group.create_task(wait("b", second))
            await asyncio.sleep(1)
            first.set_result(None)
            loop.call_soon(lambda: None)  # "b" may not overtake this, so only a postponed "a" comes second
            second.set_result(None)
        return "".join(woken)

    assert set(interleavings(main, count=50)) == {"ab", "ba"}


def test_cancelling_a_set_of_tasks_replays() -> None:
    async def main() -> str:
        ended: list[str] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(name)

        tasks = {asyncio.create_task(wait(name)) for name in "abcdefgh"}  # a set's order depends on addresses
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return "".join(ended)

    assert len({run_seeded(main, seed=7) for _ in range(20)}) == 1


def test_plain_callbacks_keep_their_order() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        ran: list[int] = []
        async with asyncio.TaskGroup() as group:
            for number in range(10):
                loop.call_soon(ran.append, number)
                group.create_task(asyncio.sleep(0))
        return ran

    assert all(ran == list(range(10)) for ran in interleavings(main, count=50))


def test_a_step_never_overtakes_a_callback_registered_before_it() -> None:
    async def main() -> bool:
        loop = asyncio.get_running_loop()
        seen: list[bool] = []

        async def waiter(future: asyncio.Future[None]) -> None:
            marks: list[None] = []
            future.add_done_callback(lambda _: marks.append(None))  # added before this task waits on the future
            await future
            seen.append(bool(marks))

        futures: list[asyncio.Future[None]] = [loop.create_future() for _ in range(5)]
        waiting = asyncio.gather(*map(waiter, futures))
        await asyncio.sleep(1)
        for future in futures:
            future.set_result(None)
        await waiting
        return all(seen)

    assert all(interleavings(main, count=100))


def test_timers_are_virtual_and_part_of_the_replay() -> None:
    async def main() -> tuple[tuple[float, str], ...]:
        woken: list[tuple[float, str]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append((asyncio.get_running_loop().time(), name))

        await asyncio.gather(sleeper("a", 60.0), sleeper("b", 60.0), sleeper("c", 5.0))
        return tuple(woken)

    assert set(interleavings(main, count=50)) == {
        ((5.0, "c"), (60.0, "a"), (60.0, "b")),
        ((5.0, "c"), (60.0, "b"), (60.0, "a")),
    }


async def lost_update() -> None:
    """Fails under some interleavings: a task's write is lost if the other task has read before it."""
    balance = 0

    async def deposit() -> None:
        nonlocal balance
        read = balance
        if read:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        balance = read + 1

    async def deposit_later() -> None:
        await asyncio.sleep(0)
        await deposit()

    await asyncio.gather(deposit(), deposit_later(), deposit_later())
    assert balance == 3


def test_a_failure_names_the_seed_that_replays_it() -> None:
    with pytest.raises(AssertionError) as failure:
        interleavings(lost_update, count=200)
    (note,) = failure.value.__notes__
    seed = int(note.split()[2].rstrip(";"))
    assert f"run_seeded(main, seed={seed})" in note
    with pytest.raises(AssertionError):
        run_seeded(lost_update, seed=seed)


def test_a_deadlock_names_the_seed() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError) as failure:
        interleavings(main, count=2, first_seed=40)
    assert "under seed 40;" in failure.value.__notes__[0]
