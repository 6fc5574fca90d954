"""Actors that own their loop and crash: the fate of their work, their inbox and their siblings."""

import asyncio
from collections.abc import Iterator
from typing import Any, Self

import pytest
from structlog.testing import capture_logs

import penstock as ps
from penstock import engine, testing
from tests.kit import actor, begun, model, outcomes, virtual


class Uncommon(BaseException):
    """An exception that `except Exception` does not catch."""


class Books:
    """A record of the loops of an actor."""

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0
        self.taken: list[tuple[int, Any]] = []  # (instance, item)
        self.left_with: Exception | None = None


class Looping(ps.Actor[Any, Any]):
    """An actor whose items tell its loop how to go on or end."""

    def __init__(self, books: Books) -> None:
        self.books = books

    async def __aenter__(self) -> Self:
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
            if work.value == "crash uncommonly":
                raise Uncommon
            if work.value == "return":
                return
            if work.value != "keep":
                work.finish(work.value)


@pytest.fixture
def books() -> Iterator[Books]:
    """A record of the loops of an actor, each of which has been left at the end."""
    books = Books()
    yield books
    assert books.entered == books.left


def looping(books: Books, **policy: Any) -> ps.Graph[[Any], Any]:
    node: Any = ps.node(**policy)(type("Looping", (Looping,), {}))(books)
    return ps.graph(node)


@ps.node(restart_on=(LookupError,))
class Fragile:
    """A node without a loop; each of its items is a crash."""

    async def __call__(self, item: Any) -> Any:
        await asyncio.sleep(0)
        raise LookupError


@pytest.mark.parametrize("ending", ["crash", "crash uncommonly", "return"])
async def test_the_inbox_of_a_loop_that_ends_waits_in_order_for_the_next(books: Books, ending: str) -> None:
    items = ["keep", 1, ending, *range(3, 12)]
    async with engine.deploy(looping(books)) as service:
        results = await outcomes(*map(service, items))
        assert [actor.restarts for actor in service.statistics().actors] == [1]
    assert results == [ps.ActorRestarted, 1, ps.ActorRestarted, *range(3, 12)]
    assert books.taken == [(1 if place < 3 else 2, item) for place, item in enumerate(items)]
    assert books.entered == 2


async def test_work_that_was_taken_is_given_again_if_its_retry_says_so(books: Books) -> None:
    async with engine.deploy(looping(books, retry=ps.Retry(attempts=2, retry_on=ps.ActorRestarted))) as service:
        assert await outcomes(service("crash")) == [ps.ActorRestarted]  # the retry crashed the second loop as well
    assert books.taken == [(1, "crash"), (2, "crash")]


@pytest.mark.parametrize(
    ("restart", "ending", "stops"),
    [
        ("transient", "return", True),
        ("transient", "crash", False),
        ("temporary", "return", True),
        ("temporary", "crash", True),
    ],
)
async def test_how_a_loop_ends_decides_on_its_restart(books: Books, restart: Any, ending: str, stops: bool) -> None:
    async with engine.deploy(looping(books, restart=restart), max_restarts=1) as service:
        results = await outcomes(service(ending), service("fine"))
        assert results == ([ps.ActorStopped] * 2 if stops else [ps.ActorRestarted, "fine"])
        assert service.state == "ready"
    assert books.entered == (1 if stops else 2)


@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
async def test_a_loop_is_restarted_with_a_sibling(books: Books, strategy: Any) -> None:
    loop = looping(books)
    async with engine.deploy(ps.graph(Fragile()), loop, strategy=strategy) as service:
        [keep] = await begun(service.run(loop("keep")))
        books.left_with = OSError("not left")
        with capture_logs() as logs:
            assert await outcomes(service("crash")) == [LookupError]
            assert await outcomes(keep) == [ps.ActorRestarted]
            books.left_with = None
            assert await service.run(loop("fine")) == "fine"
        assert [log["error"] for log in logs if log["event"] == "actor.not_released"] == ["OSError('not left')"]
    assert books.entered == 2


async def test_a_transient_loop_that_ended_well_comes_back_with_all(books: Books) -> None:
    others = Books()
    brief, other = looping(books, restart="transient"), looping(others)
    async with engine.deploy(brief, other, strategy="one_for_all") as service:
        assert await outcomes(service("return")) == [ps.ActorStopped]
        assert await outcomes(service("fine")) == [ps.ActorStopped]
        assert await outcomes(service.run(other("crash"))) == [ps.ActorRestarted]
        assert await service.run(other("fine")) == "fine"
        assert await service("fine") == "fine"
    assert books.entered == others.entered == others.left == 2


def test_a_loop_has_no_exceptions_that_mean_a_crash() -> None:
    with pytest.raises(TypeError, match="leave out restart_on="):
        ps.node(restart_on=(OSError,))(type("Looping", (Looping,), {}))


@pytest.mark.parametrize("max_restarts", [0, 3])
async def test_a_loop_that_crashes_before_all_have_started_is_restarted(max_restarts: int) -> None:
    crashed = asyncio.Event()

    async def early(inbox: ps.Inbox[ps.Work[int, int]]) -> None:
        if not crashed.is_set():
            crashed.set()
            raise OSError("lost at once")
        while True:
            work = await inbox.get()
            work.finish(work.value * 2)

    async def late() -> None:
        await crashed.wait()
        await asyncio.sleep(0)

    graph = actor(early) >> model(enter=late)
    if max_restarts:
        async with engine.deploy(graph, max_restarts=max_restarts) as service:
            assert await asyncio.wait_for(service(3), 30) == 6
    else:
        with pytest.raises(ps.DeploymentFailed, match="lost at once"):
            async with engine.deploy(graph, max_restarts=0) as service:
                await asyncio.wait_for(service(3), 30)


async def test_no_work_is_lost_when_a_loop_with_tasks_of_its_own_is_restarted_with_a_sibling() -> None:
    async def worker(inbox: ps.Inbox[ps.Work[int, int]]) -> None:
        while True:
            work = await inbox.get()
            await asyncio.sleep(0)
            work.finish(work.value * 2)

    async def workers(inbox: ps.Inbox[ps.Work[int, int]]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(worker(inbox))

    working, breaking = ps.graph(actor(workers)), ps.graph(Fragile())
    async with engine.deploy(working, breaking, strategy="one_for_all", max_in_flight=500) as service:
        calls = [asyncio.create_task(service.run(working(i))) for i in range(300)]
        await asyncio.sleep(0)
        assert await outcomes(service.run(breaking(0))) == [LookupError]
        done, pending = await asyncio.wait(calls, timeout=30)
        assert not pending
    failed = [call for call in done if call.exception() is not None]
    assert len(failed) <= 4
    assert {type(call.exception()) for call in failed} <= {ps.ActorRestarted}


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
    books = Books()

    class Faulty(Looping):
        async def __aenter__(self) -> Self:
            await super().__aenter__()
            if self.number == 2:
                await fault()
            return self

    async def call(item: Any) -> Any:
        if item == "crash":
            raise OSError("crash")
        return item

    async def enter() -> None:
        books.entered += 1
        if books.entered == 2:
            await fault()

    node = ps.node(Faulty)(books) if own_loop else model(enter=enter, call=call, restart_on=(OSError,))

    async def crash_and_call() -> None:
        async with engine.deploy(ps.graph(node)) as service:
            assert await outcomes(service("crash")) == [ps.ActorRestarted if own_loop else OSError]
            assert await asyncio.wait_for(service(3), 30) == 3

    if comes_back:
        await crash_and_call()
        assert books.entered == 3
    else:
        with pytest.raises(ps.DeploymentFailed, match=r"could not be restarted: .*Uncommon"):
            await crash_and_call()


def states(service: engine.Service[Any, Any]) -> list[str | None]:
    return [actor.state for actor in service.statistics().actors]


@virtual
async def test_statistics_say_whether_a_loop_runs() -> None:
    brief, lasting = looping(Books(), restart="temporary"), looping(Books())
    ending = looping(Books(), restart="transient")
    async with engine.deploy(brief, lasting, ending) as service:
        assert states(service) == ["running"] * 3
        await outcomes(service("crash"), service.run(lasting("crash")), service.run(ending("return")))
        assert states(service) == ["stopped", "restarting", "stopped"]
        assert "● Looping restarting" in " ".join(str(service).split())
        assert await service.run(lasting("fine")) == "fine"
        await testing.wait_quiescent()
        assert states(service) == ["stopped", "running", "stopped"]
        assert "running, 1 restart" in str(service.statistics())
    assert states(service) == ["stopped"] * 3


async def test_a_temporary_sibling_says_with_whom_it_was_stopped() -> None:
    brief, other = looping(Books(), restart="temporary"), looping(Books(), name="other")
    with capture_logs() as logs:
        async with engine.deploy(brief, other, strategy="one_for_all") as service:
            [keep] = await begun(service("keep"))
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


@pytest.mark.parametrize("fallback", [None, lambda error: f"instead of {type(error).__name__}"])
async def test_what_no_attempt_can_save_is_not_tried_again(books: Books, fallback: Any) -> None:
    retry = ps.Retry(attempts=9, backoff_seconds=3600)
    expected = "instead of ActorStopped" if fallback else ps.ActorStopped
    async with engine.deploy(looping(books, restart="temporary", retry=retry, fallback=fallback)) as service:
        assert await outcomes(*map(service, ("keep", "crash", "queued"))) == [expected] * 3
        assert await outcomes(service("late")) == [expected]
        assert [actor.retried for actor in service.statistics().actors] == [0]
        assert [item for _, item in books.taken] == ["keep", "crash"]


async def test_a_stream_that_no_attempt_can_save_is_not_tried_again() -> None:
    async def brief(inbox: ps.Inbox[ps.StreamWork[int, int]]) -> None:
        await inbox.get()

    retry = ps.Retry(attempts=9, backoff_seconds=3600)
    graph = ps.graph(actor(brief, ps.StreamActor, restart="temporary", retry=retry, fallback=lambda error: [-1]))
    async with engine.deploy(graph) as service:
        for number in range(2):
            assert [part async for part in service.stream(graph(number))] == [-1]
        assert [actor.retried for actor in service.statistics().actors] == [0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("crashes", [False, True])
async def test_work_that_a_loop_took_while_its_start_was_cut_short_is_not_lost(crashes: bool) -> None:
    """The supervisor cancels a start when another node crashes; the new loop may have begun, and ended, just before."""
    loops = 0
    crash = asyncio.Event()

    async def fragile(item: int) -> int:
        await crash.wait()
        crash.clear()
        raise ConnectionError

    async def echo(inbox: ps.Inbox[ps.Work[int, int]]) -> None:
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

    echoes = ps.graph(actor(echo))
    breaking = ps.graph(model(call=fragile, restart_on=(ConnectionError,)))
    async with engine.deploy(breaking, echoes, strategy="one_for_all") as service:
        [first] = await begun(service(1))
        crash.set()
        await asyncio.wait([first])
        second = asyncio.create_task(service(2))  # waits for the restart of the node
        async with asyncio.timeout(60):
            assert await outcomes(service.run(echoes(3))) == [ps.ActorRestarted]
        assert await outcomes(first, second) == [ConnectionError] * 2
        assert await service.run(echoes(4)) == 4
        await testing.wait_quiescent()
        assert states(service) == ["running", "running"]
    assert loops == 3


async def test_a_loop_that_ends_again_while_it_is_restarted_takes_its_siblings_along_once(books: Books) -> None:
    loops: list[Any] = []

    async def brief(inbox: ps.Inbox[ps.Work[int, int]]) -> None:
        loops.append(inbox)
        if len(loops) != 2:
            work = await inbox.get()
            if len(loops) == 3:
                work.finish(work.value)
                await inbox.get()

    first, other = ps.graph(actor(brief)), looping(books)
    async with engine.deploy(first, other, strategy="one_for_all") as service:
        assert await outcomes(service(1), service(2)) == [ps.ActorRestarted, 2]
        assert await service.run(other("fine")) == "fine"
    assert (len(loops), books.entered) == (3, 2)
