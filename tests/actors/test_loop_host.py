"""What a supervisor does with the host of a loop: after a crash, and to restart it together with others."""

import asyncio
from typing import Self

import pytest

import penstock as ps
from penstock import testing
from penstock.actors.loop_host import LoopHost
from tests.kit import virtual


class Log:
    def __init__(self) -> None:
        self.entries: list[str] = []
        self.instances = 0


class Fragile(ps.Actor[str, str]):
    """Notes what it takes, and ends when it is told to."""

    def __init__(self, log: Log) -> None:
        log.instances += 1
        self.number = log.instances
        self.log = log

    async def __aenter__(self) -> Self:
        self.log.entries.append(f"enter {self.number}")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.log.entries.append(f"exit {self.number}")

    async def loop(self, inbox: ps.Inbox[ps.Work[str, str]], /) -> None:
        while True:
            work = await inbox.get()
            self.log.entries.append(work.value)
            if work.value == "crash":
                raise OSError("gone")
            if work.value == "wait":
                await asyncio.get_running_loop().create_future()
            work.finish(f"{work.value} by {self.number}")


async def test_after_a_crash_the_inbox_goes_on_in_order() -> None:
    log = Log()
    exits: list[BaseException | None] = []
    restarts: list[asyncio.Task[None]] = []

    def restart(host: LoopHost, error: BaseException | None) -> None:
        exits.append(error)
        host.fail_taken(lambda: LookupError("restarted"))
        restarts.append(asyncio.create_task(host.start()))

    async with LoopHost(lambda: Fragile(log), "fragile", on_exit=restart) as host:
        calls = [asyncio.create_task(host.run(value)) for value in ("a", "crash", "b", "c")]
        results = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*restarts)
    assert [str(result) for result in results] == ["a by 1", "restarted", "b by 2", "c by 2"]
    assert isinstance(results[1], LookupError)
    assert [str(error) for error in exits] == ["gone"]
    assert log.entries == ["enter 1", "a", "crash", "exit 1", "enter 2", "b", "c", "exit 2"]


async def test_a_loop_that_is_halted_keeps_its_inbox_for_the_next() -> None:
    log = Log()
    async with LoopHost(lambda: Fragile(log), "fragile") as host:
        calls = [asyncio.create_task(host.run(value)) for value in ("a", "wait", "b")]
        await testing.wait_quiescent()
        await host.halt()
        host.fail_taken(lambda: LookupError("restarted"))
        calls.append(asyncio.create_task(host.run("c")))
        await testing.wait_quiescent()
        assert log.entries[-1] == "exit 1"
        await host.start()
        results = await asyncio.gather(*calls, return_exceptions=True)
        await host.halt()
        await host.halt()  # it is down
    assert [str(result) for result in results] == ["a by 1", "restarted", "b by 2", "c by 2"]


async def test_a_start_that_is_cancelled_leaves_nothing_behind() -> None:
    left: list[str] = []

    class Slow(Fragile):
        async def __aenter__(self) -> Self:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0)
                left.append("left")
            return self

    host = LoopHost(lambda: Slow(Log()), "slow")
    starting = asyncio.create_task(host.start())
    await testing.wait_quiescent()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert left == ["left"]


@virtual
async def test_a_close_that_is_cancelled_ends_the_loop_first() -> None:
    log = Log()
    host = LoopHost(lambda: Fragile(log), "fragile")
    await host.start()
    call = asyncio.create_task(host.run("wait"))
    await testing.wait_quiescent()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await host.close()
    assert log.entries[-1] == "exit 1"
    with pytest.raises(ps.ActorStopped):
        await call


async def test_an_abandoned_host_fails_what_waits_and_what_comes() -> None:
    log = Log()
    error = OSError("no more")
    async with LoopHost(lambda: Fragile(log), "fragile", on_exit=lambda host, _: host.abandon(error)) as host:
        results = await asyncio.gather(host.run("crash"), host.run("b"), return_exceptions=True)
        with pytest.raises(ps.ActorStopped, match="no more") as caught:
            await host.run("c")
    assert [type(result) for result in results] == [ps.ActorStopped] * 2
    assert caught.value.__cause__ is error


async def test_an_actor_that_swallows_the_cancellation_of_its_start_is_left_again() -> None:
    log = Log()

    class Stubborn(Fragile):
        async def __aenter__(self) -> Self:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                log.entries.append("swallowed")
            return self

    host = LoopHost(lambda: Stubborn(log), "stubborn")
    starting = asyncio.create_task(host.start())
    await testing.wait_quiescent()
    starting.cancel()
    done, _ = await asyncio.wait([starting], timeout=30)
    assert done
    assert starting.cancelled()
    assert log.entries == ["swallowed", "exit 1"]


async def test_tasks_of_a_loop_that_all_end_with_the_inbox_end_it_cleanly() -> None:
    class Workers(ps.Actor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
            async def worker() -> None:
                while True:
                    work = await inbox.get()
                    work.finish(work.value * 2)

            async with asyncio.TaskGroup() as outer:
                outer.create_task(worker())
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(worker())

    async with LoopHost(Workers, "workers") as host:
        assert await host.run(3) == 6


async def test_a_loop_whose_tasks_end_by_more_than_the_inbox_raises_it() -> None:
    class Workers(ps.Actor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
            async def worker() -> None:
                try:
                    await inbox.get()
                finally:
                    raise OSError("gone")

            async with asyncio.TaskGroup() as group:
                group.create_task(worker())

    with pytest.raises(ExceptionGroup) as caught:
        async with LoopHost(Workers, "workers"):
            await testing.wait_quiescent()
    assert caught.group_contains(OSError, match="gone")


class Leaving(Fragile):
    """Needs a while to be left."""

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.sleep(60)
        await super().__aexit__(*exc_info)


@pytest.mark.parametrize("way", ["halt", "close", "cancelled close"])
@virtual
async def test_nothing_breaks_into_the_end_of_an_instance(way: str) -> None:
    log = Log()
    exits: list[BaseException | None] = []
    host = LoopHost(lambda: Leaving(log), "leaving", on_exit=lambda _, error: exits.append(error))
    await host.start()
    call = asyncio.create_task(host.run("crash"))
    await asyncio.sleep(1)
    assert log.entries == ["enter 1", "crash"]  # it is being left
    if way == "halt":
        with pytest.raises(OSError, match="gone"):
            await host.halt()
    elif way == "close":
        with pytest.raises(OSError, match="gone"):
            await host.close()
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await host.close()
    assert log.entries == ["enter 1", "crash", "exit 1"]
    host.abandon(None)
    with pytest.raises(ps.ActorStopped):
        await call


@virtual
async def test_the_limit_of_a_shutdown_is_that_of_the_loop() -> None:
    log = Log()
    async with LoopHost(lambda: Leaving(log), "leaving") as host:
        assert await host.run("a") == "a by 1"
    assert log.entries == ["enter 1", "a", "exit 1"]


async def test_a_loop_that_is_halted_is_given_nothing_more() -> None:
    log = Log()
    seen: list[object] = []

    class Last(Fragile):
        async def loop(self, inbox: ps.Inbox[ps.Work[str, str]], /) -> None:
            try:
                await super().loop(inbox)
            except asyncio.CancelledError:
                seen.append(inbox.take_nowait(10))
                await inbox.get()

    host = LoopHost(lambda: Last(log), "last")
    await host.start()
    calls = [asyncio.create_task(host.run(value)) for value in ("wait", "b")]
    await testing.wait_quiescent()
    await host.halt()
    assert seen == [[]]
    assert log.entries == ["enter 1", "wait", "exit 1"]
    host.abandon(None)
    assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [ps.ActorStopped] * 2
