"""What a supervisor does with the host of a loop: after a crash, and to restart it together with others."""

import asyncio
from typing import Self

import pytest

import penstock as ps
from penstock import testing
from penstock.actors.loop_host import LoopHost


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


def test_a_close_that_is_cancelled_ends_the_loop_first() -> None:
    async def main() -> None:
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

    testing.run_virtual(main, timeout_seconds=60)


async def test_an_abandoned_host_fails_what_waits_and_what_comes() -> None:
    log = Log()
    error = OSError("no more")
    async with LoopHost(lambda: Fragile(log), "fragile", on_exit=lambda host, _: host.abandon(error)) as host:
        results = await asyncio.gather(host.run("crash"), host.run("b"), return_exceptions=True)
        with pytest.raises(ps.ActorStopped, match="no more") as caught:
            await host.run("c")
    assert [type(result) for result in results] == [ps.ActorStopped] * 2
    assert caught.value.__cause__ is error
