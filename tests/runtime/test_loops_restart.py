"""Actors that own their loop and crash: the fate of their work, their inbox and their siblings."""

# ruff: noqa: PT012 - the end of an `async with` raises, and the block holds most of a test

import asyncio
from typing import Any, Self

import pytest
from structlog.testing import capture_logs

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS, virtual


class Books:
    """A record of the loops of an actor."""

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0
        self.taken: list[tuple[int, Any]] = []  # (instance, item)
        self.failing_starts = 0
        self.left_with: Exception | None = None


class Looping(ps.Actor[Any, Any]):
    """An actor whose items tell its loop how to go on or end."""

    def __init__(self, books: Books) -> None:
        self.books = books

    async def __aenter__(self) -> Self:
        if self.books.entered and self.books.failing_starts:
            self.books.failing_starts -= 1
            raise ConnectionError("not yet")
        self.books.entered += 1
        self.number = self.books.entered
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.books.left += 1
        if self.books.left_with is not None:
            raise self.books.left_with

    async def loop(self, inbox: ps.Inbox[ps.Work[Any, Any]], /) -> None:
        while True:
            work = await inbox.get()
            self.books.taken.append((self.number, work.value))
            if work.value == "crash":
                raise OSError("the loop is broken")
            if work.value == "return":
                return
            if work.value != "keep":
                work.finish(work.value)


def looping(books: Books, **policy: Any) -> ps.Graph[[Any], Any]:
    node: Any = ps.node(**policy)(type("Looping", (Looping,), {}))(books)

    return ps.graph(node)


async def outcomes(*calls: Any) -> list[Any]:
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [type(result) if isinstance(result, BaseException) else result for result in results]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("ending", ["crash", "return"])
async def test_the_inbox_of_a_loop_that_ends_waits_in_order_for_the_next(ending: str, scheduler: Any) -> None:
    books = Books()
    items = ["keep", 1, ending, *range(3, 12)]
    async with engine.deploy(looping(books), scheduler=scheduler) as service:
        results = await outcomes(*map(service, items))
        assert [actor.restarts for actor in service.statistics().actors] == [1]
    assert results == [ps.ActorRestarted, 1, ps.ActorRestarted, *range(3, 12)]
    assert [item for _, item in books.taken] == items
    assert [number for number, _ in books.taken] == [1] * 3 + [2] * 9
    assert (books.entered, books.left) == (2, 2)


async def test_work_that_was_taken_is_given_again_if_its_retry_says_so() -> None:
    books = Books()
    async with engine.deploy(looping(books, retry=ps.Retry(attempts=2, retry_on=ps.ActorRestarted))) as service:
        keep = asyncio.create_task(service("keep"))
        await testing.wait_quiescent()
        results = await outcomes(service("crash"))
        assert results == [ps.ActorRestarted]  # the retry crashed the second loop as well
        keep.cancel()
    assert [number for number, item in books.taken if item == "crash"] == [1, 2]


@pytest.mark.parametrize(
    ("restart", "ending", "stops"),
    [
        ("transient", "return", True),
        ("transient", "crash", False),
        ("temporary", "return", True),
        ("temporary", "crash", True),
    ],
)
async def test_how_a_loop_ends_decides_whether_it_is_restarted(restart: Any, ending: str, stops: bool) -> None:
    books = Books()
    async with engine.deploy(looping(books, restart=restart), max_restarts=1) as service:
        results = await outcomes(service(ending), service("fine"))
        assert results == ([ps.ActorStopped] * 2 if stops else [ps.ActorRestarted, "fine"])
        assert service.state == "ready"
    assert books.entered == books.left == (1 if stops else 2)


@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
async def test_a_loop_is_restarted_with_a_sibling(strategy: Any) -> None:
    books = Books()
    loop = looping(books)

    @ps.node(restart_on=(LookupError,))
    class Fragile:
        def __call__(self, item: Any) -> Any:
            raise LookupError

    fragile = Fragile()

    async with engine.deploy(ps.graph(fragile), loop, strategy=strategy) as service:
        keep = asyncio.create_task(service.run(loop("keep")))
        await testing.wait_quiescent()
        books.left_with = OSError("not left")
        with capture_logs() as logs:
            assert await outcomes(service("crash")) == [LookupError]
            assert await outcomes(keep) == [ps.ActorRestarted]
            books.left_with = None
            assert await service.run(loop("fine")) == "fine"
        assert [log["error"] for log in logs if log["event"] == "actor.not_released"] == ["OSError('not left')"]
    assert books.entered == books.left == 2


async def test_a_transient_loop_that_ended_well_comes_back_with_all() -> None:
    books, others = Books(), Books()
    brief, other = looping(books, restart="transient"), looping(others)
    async with engine.deploy(brief, other, strategy="one_for_all") as service:
        assert await outcomes(service("return")) == [ps.ActorStopped]
        assert await outcomes(service("fine")) == [ps.ActorStopped]
        assert await outcomes(service.run(other("crash"))) == [ps.ActorRestarted]
        assert await service.run(other("fine")) == "fine"
        assert await service("fine") == "fine"
    assert (books.entered, books.left) == (others.entered, others.left) == (2, 2)


async def test_a_loop_that_never_starts_again_fails_the_deployment() -> None:
    books = Books()
    books.failing_starts = 9
    with pytest.raises(ps.DeploymentFailed) as caught:
        async with engine.deploy(looping(books), max_restarts=2) as service:
            assert await outcomes(service("crash"), service("fine")) == [ps.ActorRestarted, ps.DeploymentFailed]
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert books.entered == books.left == 1


async def test_streams_of_a_loop_end_with_it() -> None:
    class StreamBuffer(ps.StreamActor[Any, Any]):
        async def loop(self, inbox: ps.Inbox[ps.StreamWork[Any, Any]], /) -> None:
            while True:
                work = await inbox.get()
                work.put_nowait(work.value)
                if work.value == "crash":
                    await asyncio.sleep(0.001)
                    raise OSError("the loop is broken")
                work.finish()

    node: Any = ps.node(StreamBuffer)()

    graph = ps.graph(node)
    got: list[Any] = []
    async with engine.deploy(graph) as service:
        with pytest.raises(ps.ActorRestarted):
            async with service.stream(graph("crash")) as parts:
                async for part in parts:
                    got.append(part)  # noqa: PERF401 - keeps the parts before the error
        async with service.stream(graph("fine")) as parts:
            got += [part async for part in parts]
    assert got == ["crash", "fine"]


def test_a_loop_has_no_exceptions_that_mean_a_crash() -> None:
    with pytest.raises(TypeError, match="leave out restart_on="):
        ps.node(restart_on=(OSError,))(type("Looping", (Looping,), {}))


@pytest.mark.parametrize("max_restarts", [0, 3])
async def test_a_loop_that_crashes_before_all_have_started_is_restarted(max_restarts: int) -> None:
    starts: list[int] = []
    crashed = asyncio.Event()

    @ps.node
    class Early(ps.Actor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
            starts.append(1)
            if len(starts) == 1:
                crashed.set()
                raise OSError("lost at once")
            while True:
                work = await inbox.get()
                work.finish(work.value * 2)

    @ps.node
    class Late:
        async def __aenter__(self) -> Self:
            await crashed.wait()
            await asyncio.sleep(0)
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            pass

        async def __call__(self, x: int) -> int:
            return x

    early, late = Early(), Late()

    graph = early >> late
    if max_restarts:
        async with engine.deploy(graph, max_restarts=max_restarts) as service:
            assert await asyncio.wait_for(service(3), 30) == 6
    else:
        with pytest.raises(ps.DeploymentFailed, match="lost at once"):
            async with engine.deploy(graph, max_restarts=0) as service:
                await asyncio.wait_for(service(3), 30)


async def test_no_work_is_lost_when_a_loop_with_tasks_of_its_own_is_restarted_with_a_sibling() -> None:
    class Boom(Exception):
        pass

    @ps.node
    class Workers(ps.Actor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
            async def worker() -> None:
                while True:
                    work = await inbox.get()
                    await asyncio.sleep(0)
                    work.finish(work.value * 2)

            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(worker())

    @ps.node(restart_on=(Boom,))
    class Bad:
        async def __call__(self, x: int) -> int:
            await asyncio.sleep(0)
            raise Boom

    workers, bad = Workers(), Bad()

    working = ps.graph(workers)
    breaking = ps.graph(bad)
    async with engine.deploy(working, breaking, strategy="one_for_all", max_in_flight=500) as service:
        calls = [asyncio.create_task(service.run(working(i))) for i in range(300)]
        await asyncio.sleep(0)
        with pytest.raises(Boom):
            await service.run(breaking(0))
        done, pending = await asyncio.wait(calls, timeout=30)
        assert not pending
    failed = [call for call in done if call.exception() is not None]
    assert len(failed) <= 4
    assert {type(call.exception()) for call in failed} <= {ps.ActorRestarted}


class Uncommon(BaseException):
    """An exception that `except Exception` does not catch."""


async def awaits_what_is_cancelled() -> None:
    task = asyncio.create_task(asyncio.sleep(10))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def raises_what_is_uncommon() -> None:
    raise Uncommon


async def raises_a_group() -> None:
    raise BaseExceptionGroup("group", [Uncommon()])


@pytest.mark.parametrize("own_loop", [True, False])
@pytest.mark.parametrize(
    ("fault", "comes_back"),
    [(awaits_what_is_cancelled, True), (raises_what_is_uncommon, False), (raises_a_group, False)],
)
async def test_whatever_a_restart_meets_calls_are_answered(fault: Any, comes_back: bool, own_loop: bool) -> None:
    entered: list[int] = []

    class Entered:
        async def __aenter__(self) -> Self:
            entered.append(1)
            if len(entered) == 2:
                await fault()
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            pass

    @ps.node
    class Loop(Entered, ps.Actor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
            while True:
                work = await inbox.get()
                if work.value < 0:
                    raise OSError("crash")
                work.finish(work.value)

    @ps.node(restart_on=(OSError,))
    class Called(Entered):
        async def __call__(self, x: int) -> int:
            if x < 0:
                raise OSError("crash")
            return x

    node: Any = Loop() if own_loop else Called()

    @ps.graph
    async def graph(x: int) -> int:
        result: int = await node(x)
        return result

    async def crash_and_call(service: engine.Service[[int], int]) -> int:
        with pytest.raises((OSError, ps.ActorRestarted)):
            await service(-1)
        return await asyncio.wait_for(service(3), 30)

    if comes_back:
        async with engine.deploy(graph) as service:
            assert await crash_and_call(service) == 3
        assert len(entered) == 3
    else:
        with pytest.raises(ps.DeploymentFailed, match=r"could not be restarted: .*Uncommon"):
            async with engine.deploy(graph) as service:
                await crash_and_call(service)


async def test_a_loop_that_ends_by_an_uncommon_error_has_crashed() -> None:
    @ps.node
    class Loop(ps.Actor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
            while True:
                work = await inbox.get()
                if work.value < 0:
                    raise Uncommon
                work.finish(work.value)

    node = Loop()

    async with engine.deploy(ps.graph(node)) as service:
        with pytest.raises(ps.ActorRestarted, match="Uncommon"):
            await service(-1)
        assert await asyncio.wait_for(service(3), 30) == 3


def states(service: engine.Service[Any, Any]) -> list[str | None]:
    return [actor.state for actor in service.statistics().actors]


@virtual
async def test_statistics_say_whether_a_loop_runs() -> None:
    brief, lasting = looping(Books(), restart="temporary"), looping(Books())
    async with engine.deploy(brief, lasting) as service:
        assert states(service) == ["running", "running"]
        await outcomes(service("crash"), service.run(lasting("crash")))
        assert states(service) == ["stopped", "restarting"]
        assert "● Looping restarting" in " ".join(str(service).split())
        assert await service.run(lasting("fine")) == "fine"
        await testing.wait_quiescent()
        assert states(service) == ["stopped", "running"]
        assert "running, 1 restart" in str(service.statistics())
    assert states(service) == ["stopped", "stopped"]


async def test_after_an_escalation_nothing_runs() -> None:
    graph, other = looping(Books()), looping(Books())
    with pytest.raises(ps.DeploymentFailed):
        async with engine.deploy(graph, other, max_restarts=0) as service:
            await outcomes(service("crash"))
    assert states(service) == ["stopped", "stopped"]


async def test_a_temporary_sibling_says_with_whom_it_was_stopped() -> None:
    brief, other = looping(Books(), restart="temporary"), looping(Books(), name="other")
    with capture_logs() as logs:
        async with engine.deploy(brief, other, strategy="one_for_all") as service:
            keep = asyncio.create_task(service("keep"))
            await testing.wait_quiescent()
            await outcomes(service.run(other("crash")))
            for call in (keep, service("late")):
                with pytest.raises(ps.ActorStopped) as caught:
                    await call
                assert str(caught.value) == (
                    "actor 'Looping' takes no more items: it was stopped when 'other' was restarted, and has "
                    "restart='temporary'"
                )
                assert isinstance(caught.value.__cause__, OSError)
            assert await service.run(other("fine")) == "fine"
    stopped = [entry for entry in logs if entry["event"] == "actor.stopped"]
    assert [(entry["node"], entry["after"]) for entry in stopped] == [("Looping", "other")]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_what_no_attempt_can_save_is_not_tried_again(scheduler: Any) -> None:
    books, retry = Books(), ps.Retry(attempts=9, backoff_seconds=3600)
    graph = looping(books, restart="temporary", retry=retry)
    async with engine.deploy(graph, scheduler=scheduler) as service:
        calls = [asyncio.create_task(service(item)) for item in ("keep", "crash", "queued")]
        assert await outcomes(*calls) == [ps.ActorStopped] * 3
        assert await outcomes(service("late")) == [ps.ActorStopped]
        assert [actor.retried for actor in service.statistics().actors] == [0]
        assert [item for _, item in books.taken] == ["keep", "crash"]


async def test_what_no_attempt_can_save_has_its_fallback() -> None:
    def instead(error: Exception) -> str:
        assert isinstance(error, ps.ActorStopped)
        return "instead"

    graph = looping(Books(), restart="temporary", retry=ps.Retry(attempts=9, backoff_seconds=3600), fallback=instead)
    async with engine.deploy(graph) as service:
        assert await outcomes(service("crash"), service("late")) == ["instead", "instead"]


async def test_a_stream_that_no_attempt_can_save_is_not_tried_again() -> None:
    @ps.node(restart="temporary", retry=ps.Retry(attempts=9, backoff_seconds=3600), fallback=lambda error: [-1])
    class Brief(ps.StreamActor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.StreamWork[int, int]], /) -> None:
            await inbox.get()

    brief = Brief()

    graph = ps.graph(brief)
    async with engine.deploy(graph) as service:
        for number in range(2):
            async with service.stream(graph(number)) as parts:
                assert [part async for part in parts] == [-1]
        assert [actor.retried for actor in service.statistics().actors] == [0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("crashes", [False, True])
async def test_work_that_a_loop_took_while_its_start_was_cut_short_is_not_lost(crashes: bool) -> None:
    """The supervisor cancels a start when another node crashes; the new loop may have begun, and ended, just before."""
    loops = 0
    crash = asyncio.Event()

    @ps.node(restart_on=(ConnectionError,))
    class Fragile:
        async def __call__(self, item: int) -> int:
            await crash.wait()
            crash.clear()
            raise ConnectionError

    @ps.node
    class Echo(ps.Actor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.Work[int, int]]) -> None:
            nonlocal loops
            loops += 1
            mine = loops
            while True:
                work = await inbox.get()
                if mine == 2:  # the supervisor does not know yet that this loop has started
                    crash.set()
                    if crashes:
                        raise ConnectionError
                    await asyncio.Event().wait()
                work.finish(work.value)

    fragile, echo = Fragile(), Echo()

    echoes = ps.graph(echo)
    async with engine.deploy(ps.graph(fragile), echoes, strategy="one_for_all") as service:
        first = asyncio.create_task(service(1))
        await testing.wait_quiescent()
        crash.set()
        await asyncio.wait([first])
        second = asyncio.create_task(service(2))  # waits for the restart of the node
        async with asyncio.timeout(10):
            with pytest.raises(ps.ActorRestarted):
                await service.run(echoes(3))
        with pytest.raises(ConnectionError):
            await second
        assert await service.run(echoes(4)) == 4
        await testing.wait_quiescent()
        assert [actor.state for actor in service.statistics().actors] == ["running", "running"]
    assert isinstance(first.exception(), ConnectionError)
    assert loops == 3
