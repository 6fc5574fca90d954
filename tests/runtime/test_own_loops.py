"""Actors that own their loop, in scopes: one loop for each scope, exactly one outcome per item, nothing left behind."""

import asyncio
import contextlib
from typing import Any, Self

import numpy as np
import pytest
from structlog.testing import capture_logs

import penstock as ps
from penstock import engine, testing
from penstock.telemetry import names
from tests.kit import SCHEDULERS, Scheduler, Taken, actor, begun, cancelled_at_every_step, numbers, same, virtual
from tests.telemetry.collected import collecting

IntInbox = ps.Inbox[ps.Work[int, int]]


@ps.node
class Doubler(ps.Actor[int, int]):
    async def loop(self, inbox: IntInbox, /) -> None:
        while True:
            work = await inbox.get()
            work.finish(work.value * 2)


double = Doubler()


def logging_actor(log: list[str]) -> Any:
    @ps.node
    class Logging(Doubler):
        async def __aenter__(self) -> Self:
            log.append("enter")
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            log.append("exit")

        async def loop(self, inbox: IntInbox, /) -> None:
            log.append("loop")
            await super().loop(inbox)

    return Logging()


twice = double >> double


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_items_get_their_results_under_every_scheduler(scheduler: Scheduler) -> None:
    assert await engine.run(twice(3), scheduler=scheduler) == 12
    async with engine.stream(map(twice, range(50)), scheduler=scheduler) as results:
        assert [result async for result in results] == [4 * x for x in range(50)]
    async with engine.deploy(twice, scheduler=scheduler) as service:
        assert await asyncio.gather(*(service(x) for x in range(50))) == [4 * x for x in range(50)]


async def test_a_scope_starts_one_loop_and_ends_it() -> None:
    log: list[str] = []
    node = logging_actor(log)
    graph = node >> node
    async with engine.deploy(graph) as service:
        assert await asyncio.gather(*(service(x) for x in range(5))) == [4 * x for x in range(5)]
        assert log == ["enter", "loop"]
    assert log == ["enter", "loop", "exit"]
    assert await engine.run(graph(1)) == 4
    assert log == ["enter", "loop", "exit"] * 2


async def test_outside_a_graph_each_call_has_a_loop_and_an_instance_of_its_own() -> None:
    seen: list[object] = []

    class Seen(ps.Actor[int, int]):
        async def loop(self, inbox: IntInbox, /) -> None:
            seen.append(self)
            work = await inbox.get()
            work.finish(work.value + 1)
            await inbox.get()

    assert await Seen()(1) == 2  # though the class is no node
    seen.clear()
    node = ps.node(Seen)()
    assert await asyncio.gather(node(1), node(2)) == [2, 3]
    assert len({id(instance) for instance in [node, *seen]}) == 3
    assert await ps.graph(node)(3) == 4
    log: list[str] = []
    assert await logging_actor(log)(1) == 2
    assert log == ["enter", "loop", "exit"]


async def test_a_loop_works_for_no_item_in_particular() -> None:
    names: list[str] = []

    async def nameless(inbox: IntInbox) -> None:
        work = await inbox.get()
        names.append(ps.current().node)
        work.finish(work.value)
        await inbox.get()

    inner = ps.graph(actor(nameless))

    @ps.node
    async def outer(x: int) -> int:
        names.append(ps.current().node)
        return await engine.run(inner(x))

    assert await engine.run(ps.graph(outer)(1)) == 1
    assert names == ["outer", ""]


async def test_items_are_settled_in_any_order() -> None:
    async def reversing(inbox: IntInbox) -> None:
        held: list[ps.Work[int, int]] = []
        while True:
            held.append(await inbox.get())
            held += inbox.take_nowait(100)
            if len(held) == 10:
                while held:
                    work = held.pop()
                    work.finish(work.value + 1)

    graph = ps.graph(actor(reversing))
    assert [result async for result in engine.stream(graph(x) for x in range(10))] == list(range(1, 11))


async def test_the_error_of_a_block_is_that_of_its_work_alone() -> None:
    ends: list[BaseException] = []

    async def blocks(inbox: IntInbox) -> None:
        held: list[ps.Work[int, int]] = []
        try:
            while True:
                held.append(work := await inbox.get())
                with work:
                    work.finish(6 // work.value)
                assert work.settled
                with held[0]:
                    if work.value == 5:
                        raise OSError("it was settled, so no caller gets this")
        except BaseException as error:
            ends.append(error)
            raise

    graph = ps.graph(actor(blocks))
    outcomes = [outcome async for outcome in engine.stream(map(graph, (3, 0, 2, 5, 1))).outcomes()]
    assert [outcome.value for outcome in outcomes] == [2, None, 3, 1, 6]
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    assert "in node 'blocks' of graph 'blocks', item 1" in outcomes[1].error.__notes__[0]
    assert [type(error) for error in ends] == [OSError, ps.InboxClosed]
    # If the caller has left, the block drops the error of its work. The end of the loop itself passes through the
    # block.
    inbox, [future] = testing.inbox([1])
    work = await inbox.get()
    future.cancel()
    await asyncio.sleep(0)
    with work:
        raise OSError("nobody waits for it")
    assert work.settled
    inbox, [future] = testing.inbox([1])
    with pytest.raises(asyncio.CancelledError), await inbox.get():
        raise asyncio.CancelledError
    assert not future.done()


async def test_policies_of_the_node_hold() -> None:
    async def flaky(inbox: IntInbox) -> None:
        for _ in range(2):
            (await inbox.get()).fail(OSError("try again"))
        (await inbox.get()).finish(3)
        await inbox.get()

    assert await engine.run(ps.graph(actor(flaky, retry=ps.Retry(attempts=3)))(0)) == 3


@pytest.mark.parametrize("policy", [{}, {"retry": ps.Retry(attempts=2)}, {"timeout_seconds": 60}])
async def test_a_cancelled_call_shows_in_its_work_and_the_actor_is_told(policy: Any) -> None:
    taken, told = Taken(**policy), list[str]()
    async with engine.deploy(taken.graph) as service:
        [call] = await begun(service(1))
        work = await taken.work()
        work.on_cancelled(lambda: told.append("left"))
        assert not work.cancelled
        call.cancel()
        await asyncio.wait([call])
        assert work.cancelled
        await testing.wait_quiescent()
        work.finish(1)  # does nothing
    assert (call.cancelled(), told) == (True, ["left"])


async def test_work_that_does_not_fit_waits_outside_the_inbox_and_leaves_with_its_caller() -> None:
    taken, opened = Taken(), asyncio.Event()

    async def later(inbox: IntInbox) -> None:
        await opened.wait()
        await taken.take(inbox)

    async with engine.deploy(ps.graph(actor(later, capacity=1))) as service:
        calls = await begun(*map(service, range(3)))
        [seen] = service.statistics().actors
        assert (seen.in_flight, seen.inbox.depth, seen.inbox.waiting_putters) == (3, 1, 2)
        calls[0].cancel()  # its work is queued
        calls[1].cancel()  # its work waits for room
        await testing.wait_quiescent()
        [seen] = service.statistics().actors
        assert (seen.inbox.depth, seen.inbox.waiting_putters) == (1, 0)
        opened.set()
        work = await taken.work()
        assert work.value == 2
        work.finish(5)
        assert await calls[2] == 5


@virtual
async def test_the_deadline_of_work_is_the_earlier_of_call_and_attempt_and_frees_the_caller() -> None:
    taken = Taken(timeout_seconds=3)
    graph = taken.graph
    with pytest.raises(ps.NodeTimeoutError):
        await engine.run(graph(1), timeout_seconds=5)
    async with engine.deploy(graph) as service:
        with pytest.raises(ps.DeadlineExceeded):
            await service.run(graph(1), timeout_seconds=1, priority=3)
    assert [(work.deadline, work.priority, work.cancelled) for work in taken.works] == [(3, 0, True), (4, 3, True)]


@pytest.mark.parametrize(("policy", "unsettled"), [({}, 50), ({"concurrency": 3}, 3)])
async def test_only_an_explicit_concurrency_limits_unsettled_work(policy: Any, unsettled: int) -> None:
    taken = Taken(**policy)
    async with engine.deploy(taken.graph, max_in_flight=50, max_workers=1) as service:
        calls = await begun(*map(service, range(50)))
        assert len(taken.works) == unsettled
        while taken.works:
            work = taken.works.pop(0)
            work.finish(work.value)
            await testing.wait_quiescent()
        assert await asyncio.gather(*calls) == list(range(50))


@pytest.mark.parametrize("ending", ["raise", "return", "foreign cancel"])
async def test_the_end_of_a_loop_fails_its_items_and_names_the_actor(ending: str) -> None:
    async def closing(inbox: IntInbox) -> None:
        while (await inbox.get()).value:
            pass
        if ending == "raise":
            raise OSError("the disk is gone")
        if ending == "foreign cancel":
            lost = asyncio.get_running_loop().create_future()
            lost.cancel()
            await lost

    async with engine.deploy(ps.graph(actor(closing, restart="temporary", capacity=1))) as service:
        results = await asyncio.gather(*(service(x) for x in (1, 0, 2, 3)), return_exceptions=True)
        with pytest.raises(ps.ActorStopped, match="actor 'closing' takes no more items: its loop") as caught:
            await service(4)
    assert [type(result) for result in results] == [ps.ActorStopped] * 4  # also of those that wait for room
    assert isinstance(caught.value.__cause__, OSError) == (ending == "raise")
    assert ("awaited something that was cancelled" in str(caught.value)) == (ending == "foreign cancel")
    assert len({id(result) for result in results}) == 4


async def test_what_a_loop_that_has_ended_left_running_may_still_settle_its_work() -> None:
    works: list[ps.Work[int, int]] = []

    async def short(inbox: IntInbox) -> None:
        works.append(await inbox.get())

    async with engine.deploy(ps.graph(actor(short, restart="temporary"))) as service:
        with pytest.raises(ps.ActorStopped):
            await service(1)
        assert works[0].cancelled
        works[0].finish(1)  # does nothing


@pytest.mark.parametrize("in_a_task", [False, True])
async def test_what_the_end_of_a_loop_raises_reaches_the_scope(in_a_task: bool) -> None:
    async def work(inbox: IntInbox) -> None:
        try:
            while True:
                (await inbox.get()).finish(0)
        except ps.InboxClosed:
            raise OSError("could not flush") from None

    async def untidy(inbox: IntInbox) -> None:
        if not in_a_task:
            await work(inbox)
        async with asyncio.TaskGroup() as group:
            group.create_task(work(inbox))

    with pytest.raises(ExceptionGroup if in_a_task else OSError) as caught:
        async with engine.deploy(ps.graph(actor(untidy))) as service:
            assert await service(1) == 0
    assert "could not flush" in repr(caught.value)


@pytest.mark.parametrize("end", ["drain", "cancelled"])
@virtual
async def test_an_instance_is_left_to_its_end_however_long_that_takes(end: str) -> None:
    log: list[str] = []

    @ps.node(shutdown_seconds=30)
    class Careful(Doubler):
        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            await asyncio.sleep(60)
            log.append("left")

        async def loop(self, inbox: IntInbox, /) -> None:
            try:
                await super().loop(inbox)
            finally:
                await asyncio.sleep(10 if end == "cancelled" else 0)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1 if end == "cancelled" else None), engine.deploy(ps.graph(Careful())) as service:
            assert await service(1) == 2
    assert log == ["left"]


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [({}, 5.0), ({"shutdown_seconds": 0}, 0.0), ({"shutdown_seconds": 0.5}, 0.5), ({"shutdown_seconds": 90}, 60.0)],
)
@virtual
async def test_a_loop_that_does_not_end_with_its_inbox_is_cancelled_after_a_while(policy: Any, seconds: float) -> None:
    async def sleepy(inbox: IntInbox) -> None:
        (await inbox.get()).finish(0)
        await asyncio.sleep(60)

    async with engine.deploy(ps.graph(actor(sleepy, **policy)), max_in_flight=1) as service:
        assert await service(1) == 0
    assert asyncio.get_running_loop().time() == seconds


async def test_an_aborted_deployment_ends_its_loops() -> None:
    taken = Taken()
    async with engine.deploy(taken.graph) as service:
        [call] = await begun(service(1))
        await service.abort()
    with pytest.raises(ps.EngineClosedError):
        await call
    assert taken.works[0].cancelled


def test_a_cancel_at_every_step_leaves_nothing_behind() -> None:
    for outcome in cancelled_at_every_step(lambda: engine.run(twice(3))):
        assert outcome.error or outcome.result == 12


def test_every_item_has_one_outcome_under_many_interleavings(effort: int) -> None:
    async def slow(inbox: IntInbox) -> None:
        while True:
            for work in [await inbox.get(), *inbox.take_nowait(1)]:
                await asyncio.sleep(0.01)
                work.finish(work.value)

    async def main() -> None:
        async with engine.deploy(ps.graph(actor(slow, capacity=2))) as service:
            calls = [asyncio.create_task(service(x)) for x in range(8)]
            await asyncio.sleep(0.015)
            for call in calls[::3]:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            for x, result in enumerate(results):
                assert result == x or (x % 3 == 0 and isinstance(result, asyncio.CancelledError))
            counts = service.statistics()
            assert counts.completed + counts.cancelled + counts.failed == 8

    testing.interleavings(main, count=50 * effort)


@ps.node
class Power(ps.Actor[tuple[int, int], int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[tuple[int, int], int]], /) -> None:
        while True:
            work = await inbox.get()
            base, exponent = work.value
            work.finish(base**exponent)


async def test_several_arguments_are_one_value() -> None:
    power = Power()

    @ps.graph
    async def both(base: int) -> tuple[int, list[int]]:
        return await power(base, 3), await ps.map_each(power, [(base, 2), (base, 1)])

    assert await engine.run(both(2)) == (8, [4, 2])
    assert await asyncio.gather(power(2, 5), power((2, 4)), engine.run(ps.graph(power)((2, 3)))) == [32, 16, 8]

    async def fake(pair: tuple[int, int]) -> int:
        return -sum(pair)

    with testing.replace(power, fake):
        assert await power(2, 3) == -5
        assert await engine.run(both(1)) == (-4, [-3, -2])


async def test_several_arguments_need_no_class_that_is_known() -> None:
    @ps.node
    class Quoted(ps.Actor["tuple[int, int]", int]):
        loop = Power.loop

    @ps.node
    class Derived(Quoted):
        pass

    @ps.node
    class Untyped(ps.Actor):  # type: ignore[type-arg]
        loop = Power.loop

    assert [await Quoted()(2, 3), await Derived()(3, 2), await Untyped()(5, 1)] == [8, 9, 5]


async def test_several_arguments_are_refused_where_items_are_no_tuples() -> None:
    @ps.graph
    async def wrong(x: int) -> int:
        return await double(x, x)  # type: ignore[call-arg]

    with pytest.raises(ps.GraphTraceError, match="'Doubler' is called wrongly: too many positional arguments"):
        await engine.run(wrong(1))


@ps.node
class Teller(ps.Actor[int, int]):
    """Reports the sum of its items, and other figures; a negative item ends the loop."""

    async def loop(self, inbox: IntInbox, /) -> None:
        total = 0
        while True:
            work = await inbox.get()
            if work.value < 0:
                raise OSError
            total += work.value
            self.report(total=total)
            self.report(step_seconds=0.25, cache_bytes=2**20, mean=float("nan"))
            work.finish(total)


def told(service: engine.Service[..., object]) -> list[dict[tuple[str, str], float]]:
    return [{(one.name, one.unit): one.value for one in actor.figures} for actor in service.statistics().actors]


async def test_what_a_loop_tells_of_itself_shows_in_statistics_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    once = ps.graph(Teller())
    monkeypatch.setenv("COLUMNS", "300")  # xdist sets it to 80
    with collecting(monkeypatch) as collected:
        async with engine.deploy(once) as service, engine.deploy(once) as other:
            assert told(service) == [{}]
            assert [await service(3), await service(1), await other(6)] == [3, 4, 6]
            figures = {("total", "{total}"): 4, ("step", "s"): 0.25, ("cache", "By"): 2**20}
            assert told(service) == [figures]
            assert str(service.statistics()).endswith("4  0.250  1,048,576")
            of = {"graph": "Teller", "node": "Teller", "figure": "total", "unit": "{total}"}
            assert collected.total(names.METRIC_NODE_FIGURE, **of) == 4 + 6  # summed over two loops
            with pytest.raises(ps.ActorRestarted):
                await service(-1)
            assert await service(2) == 2
            assert told(service) == [{**figures, ("total", "{total}"): 2}]


async def test_call_sites_of_one_loop_tell_the_same() -> None:
    tell = Teller()
    async with engine.deploy(tell >> tell) as service:
        assert await service(3) == 6
        assert [one["total", "{total}"] for one in told(service)] == [6, 6]


async def test_only_numbers_are_told() -> None:
    tell = Teller()
    tell.report(total=3, mean=0.5)
    for wrong in ("3", None, np.arange(1), 10**400):
        with pytest.raises(ps.OptionsError, match=r"report\(total=.*: a number: int\(\) or float\(\) converts"):
            tell.report(total=wrong)  # type: ignore[arg-type]


class NoActor:
    async def __call__(self, value: int) -> int:
        return value


class NoLoop(ps.Actor[int, int]):
    pass


class NeverCalled(Doubler):
    async def __call__(self, value: int, /) -> int:
        return value


ONLY_FOR_STREAMS = "has inbox_capacity=, which is for classes derived"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (NoLoop, {}, "needs a method `async def loop"),
    (NeverCalled, {}, "would never run"),
    (NoActor, {"shutdown_seconds": 3}, "'NoActor' does not own its loop"),
    (same.fn, {"shutdown_seconds": 3}, "'same' does not own its loop"),
    (same.fn, {"shutdown_seconds": 3, "batch": ps.Batch(2)}, "'same' does not own its loop"),
    (same.fn, {"inbox_capacity": 3}, f"'same' {ONLY_FOR_STREAMS}"),
    (numbers.fn, {"inbox_capacity": 3}, f"'numbers' {ONLY_FOR_STREAMS}"),
    (Doubler, {"inbox_capacity": 3}, f"'Doubler' {ONLY_FOR_STREAMS}"),
]


@pytest.mark.parametrize(("target", "policy", "message"), REFUSED)
def test_what_is_for_loops_of_another_kind_is_refused(target: Any, policy: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ps.node(**policy)(target)


async def test_a_loop_that_crashes_outside_of_a_graph_fails_the_call_and_is_logged() -> None:
    async def crashing(inbox: IntInbox) -> None:
        await inbox.get()
        raise LookupError("broken")

    with capture_logs() as logged, pytest.raises(ps.ActorStopped, match=r"its loop raised LookupError\('broken'\)"):
        await actor(crashing)(1)
    assert [one["event"] for one in logged] == ["actor.stopped"]
