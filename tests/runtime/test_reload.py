"""Reloading a resource: no call is dropped, each sees one instance; the old one closes once, after its last user."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, begun, outcomes, same


class Weights:
    """One version of the weights; it counts how often it was closed."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version
        self.users = 0
        self.closed = 0


made: list[Weights] = []
problems: list[Exception] = []
gates: dict[str, asyncio.Event] = {}
unwound: dict[str, asyncio.Event] = {}  # of what was cancelled at its gate


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    made.clear()
    problems.clear()
    gates.clear()
    unwound.clear()
    yield
    assert all(one.closed == 1 for one in made)


@ps.resource
async def weights(name: str) -> AsyncIterator[Weights]:
    if name in gates:
        try:
            await gates[name].wait()
        except asyncio.CancelledError:
            await unwound.get(name, is_set()).wait()
            raise
    if problems:
        raise problems.pop()
    one = Weights(name, sum(other.name == name for other in made))
    made.append(one)
    yield one
    assert not one.users
    one.closed += 1


@ps.resource
async def unused() -> AsyncIterator[None]:
    yield


@ps.node
async def first(model: Weights, pause: asyncio.Event) -> Weights:
    model.users += 1
    try:
        assert not model.closed
        await pause.wait()
        assert not model.closed
    finally:
        model.users -= 1
    return model


@ps.node
async def second(model: Weights, before: Weights) -> tuple[int, int]:
    assert not model.closed
    await asyncio.sleep(0)
    assert not model.closed
    return before.version, model.version


@ps.node
async def slow_to_leave(model: Weights, unwound: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await unwound.wait()
        assert not model.closed


async def inside(before: Weights) -> tuple[int, int]:
    return await second(await weights("a"), before)


@ps.node
async def yes(model: Weights) -> bool:
    await asyncio.sleep(0)
    return True


@ps.graph
async def predict(pause: asyncio.Event) -> tuple[tuple[int, int], tuple[int, int]]:
    model = await weights("a")
    before = await first(model, pause)
    return await second(model, before), await ps.cond(await yes(before), inside, inside, before)


@ps.node
def total(one: Weights, other: Weights) -> int:
    return one.version + other.version


@ps.graph
async def compare(pause: asyncio.Event) -> int:
    return total(await first(await weights("a"), pause), await first(await weights("b"), pause))


def is_set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@pytest.mark.parametrize("own", [False, True], ids=["default engine", "own engine"])
async def test_a_thousand_calls_in_flight_each_see_one_instance_and_none_is_dropped(own: bool) -> None:
    async with engine.Engine() as e:
        deploy = e.deploy if own else engine.deploy
        async with deploy(predict, max_in_flight=2000, max_workers=2000) as service:
            pauses = [asyncio.Event() for _ in range(1000)]
            before = await begun(*map(service, pauses))
            assert made[0].users == 1000
            await service.reload(weights)
            assert [one.version for one in made] == [0, 1]
            after = [asyncio.create_task(service(is_set())) for _ in range(500)]
            assert await asyncio.gather(*after) == [((1, 1), (1, 1))] * 500
            for pause in pauses[:-1]:
                pause.set()
            assert await asyncio.gather(*before[:-1]) == [((0, 0), (0, 0))] * 999
            await testing.wait_quiescent()
            assert not made[0].closed
            pauses[-1].set()
            assert await before[-1] == ((0, 0), (0, 0))
            await testing.wait_quiescent()
            assert [one.closed for one in made] == [1, 0]
            assert service.statistics().completed == 1500
            assert service.statistics().failed == 0
        assert made[1].closed == (not own)


async def test_streams_runs_and_other_deployments_of_the_engine_go_over_as_well() -> None:
    async with engine.Engine() as e, e.deploy(predict) as service, e.deploy(compare) as other:
        pause = asyncio.Event()
        run = asyncio.create_task(e.run(predict(pause)))
        call = asyncio.create_task(other(pause))
        async with (
            e.stream([predict(pause), predict(pause)], max_in_flight=1) as own_stream,
            service.stream([predict(pause), predict(pause)], max_in_flight=1) as stream,
        ):
            await testing.wait_quiescent()
            assert made[0].users == 4
            await service.reload(weights)
            await testing.wait_quiescent()
            assert not made[0].closed
            pause.set()
            assert [result async for result in own_stream] == [((0, 0), (0, 0)), ((1, 1), (1, 1))]
            assert [result async for result in stream] == [((0, 0), (0, 0)), ((1, 1), (1, 1))]
        assert await run == ((0, 0), (0, 0))
        assert await call == 0
        await testing.wait_quiescent()
        assert [(one.name, one.closed) for one in made] == [("a", 1), ("b", 0), ("a", 0)]
        assert await other(pause) == 1  # one of the two resources was reloaded


async def test_items_that_wait_in_an_inbox_keep_the_old() -> None:
    one_by_one = ps.node(name="one_by_one", concurrency=1)(first.fn)

    @ps.graph
    async def queue(pause: asyncio.Event) -> Weights:
        return await one_by_one(await weights("a"), pause)

    async with engine.Engine() as e, e.deploy(queue) as service:
        pauses = [asyncio.Event() for _ in range(3)]
        async with e.stream([queue(pause) for pause in pauses]) as queued:
            await testing.wait_quiescent()
            await service.reload(weights)
            for pause in pauses:
                await testing.wait_quiescent()
                assert not made[0].closed
                pause.set()
            assert [one.version async for one in queued] == [0, 0, 0]
        await testing.wait_quiescent()
        assert made[0].closed


@pytest.mark.parametrize("verb", ["call", "stream", "stream of the engine"])
async def test_items_that_unwind_keep_the_old(verb: str) -> None:
    unwound = asyncio.Event()

    @ps.node
    async def fail(model: Weights) -> int:
        raise LookupError

    @ps.graph
    async def unwind() -> tuple[None, int]:
        model = await weights("a")
        return await slow_to_leave(model, unwound), await fail(model)

    async with engine.Engine() as e, e.deploy(unwind) as service:
        if verb == "call":
            with pytest.raises(LookupError):
                await service()
        else:
            items = (service if verb == "stream" else e).stream([unwind(), unwind()], max_in_flight=1)
            assert isinstance((await anext(items.outcomes())).error, LookupError)
        await service.reload(weights)
        await testing.wait_quiescent()
        assert not made[0].closed
        unwound.set()
        await testing.wait_quiescent()
        assert made[0].closed
        if verb != "call":
            await items.aclose()


@pytest.mark.parametrize("deployed", [True, False])
async def test_a_stream_of_values_keeps_what_it_began_with(deployed: bool) -> None:
    @ps.node
    async def versions(model: Weights, steps: asyncio.Semaphore) -> AsyncIterator[int]:
        for _ in range(4):
            await steps.acquire()
            assert not model.closed
            yield model.version

    @ps.graph
    async def count(steps: asyncio.Semaphore) -> AsyncIterator[int]:
        return versions(await weights("a"), steps)

    steps = asyncio.Semaphore(1)
    async with engine.deploy(count) as service:
        async with (service if deployed else engine).stream(count(steps)) as values:
            assert await anext(values) == 0
            await service.reload(weights)
            await testing.wait_quiescent()
            assert not made[0].closed
            for _ in range(3):
                steps.release()
            assert [value async for value in values] == [0, 0, 0]
        await testing.wait_quiescent()
        assert made[0].closed
        for _ in range(4):
            steps.release()
        assert [value async for value in service.stream(count(steps))] == [1, 1, 1, 1]


async def test_every_distinct_argument_that_the_deployment_uses_is_opened_anew() -> None:
    async with engine.deploy(compare, predict) as service:
        await service.reload(weights)
        await testing.wait_quiescent()
        assert [(one.name, one.version, one.closed) for one in made] == [
            ("a", 0, 1), ("b", 0, 1), ("a", 1, 0), ("b", 1, 0),
        ]  # fmt: skip
        assert await service(is_set()) == 2


async def test_an_opening_that_fails_leaves_the_old_in_place() -> None:
    async with engine.deploy(compare) as service:
        gates["b"] = asyncio.Event()
        [reload] = await begun(service.reload(weights))
        problems.append(LookupError("no file"))
        gates["b"].set()
        with pytest.raises(LookupError, match="no file") as caught:
            await reload
        assert caught.value.__notes__ == ["while resource 'weights' was opened for graph 'compare'"]
        assert [(one.name, one.closed) for one in made] == [("a", 0), ("b", 0), ("a", 1)]
        assert await service(is_set()) == 0
        await service.reload(weights)
        assert await service(is_set()) > 0


async def test_a_reload_that_is_cancelled_closes_all_that_it_has_opened_and_leaves_the_old_in_place() -> None:
    async with engine.deploy(compare) as service:
        gates["b"], unwound["b"] = asyncio.Event(), asyncio.Event()
        [reload] = await begun(service.reload(weights))
        assert [(one.name, one.closed) for one in made] == [("a", 0), ("b", 0), ("a", 0)]
        for _ in range(2):
            reload.cancel()
            await testing.wait_quiescent()
        assert not reload.done()
        unwound["b"].set()
        assert await outcomes(reload) == [asyncio.CancelledError]
        assert [(one.name, one.closed) for one in made] == [("a", 0), ("b", 0), ("a", 1)]
        assert await service(is_set()) == 0
        gates.clear()
        await service.reload(weights)


async def test_two_concurrent_reloads_open_one_after_the_other() -> None:
    async with engine.deploy(predict) as service:
        gates["a"] = asyncio.Event()
        both = await begun(*(service.reload(weights) for _ in range(2)))
        gates["a"].set()
        await asyncio.gather(*both)
        assert await service(is_set()) == ((2, 2), (2, 2))
        await testing.wait_quiescent()
        assert [one.closed for one in made] == [1, 1, 0]


async def test_a_reload_from_inside_a_node_does_not_wait_for_itself() -> None:
    @ps.node
    async def renew(model: Weights) -> tuple[int, int]:
        await service.reload(weights)
        assert not model.closed
        return model.version, model.closed

    @ps.graph
    async def renewing() -> tuple[int, int]:
        return await renew(await weights("a"))

    async with engine.deploy(renewing) as service:
        assert await service() == (0, 0)
        assert await service() == (1, 0)


async def test_the_old_is_not_closed_while_a_thread_works_with_it() -> None:
    gate = Gate()

    @ps.node(runs_on="thread")
    def compute(model: Weights) -> int:
        assert not gate.block(model).closed
        return model.version

    @ps.graph
    async def threaded() -> int:
        return compute(await weights("a"))

    async with engine.Engine() as e, e.deploy(threaded) as service:
        call = asyncio.create_task(service())
        await gate.has()
        call.cancel()
        assert await outcomes(call) == [asyncio.CancelledError]
        await service.reload(weights)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not made[0].closed
        gate.open()


ModelWork = ps.StreamWork[tuple[Weights, int], int]


@ps.node
class Decoder(ps.StreamActor[tuple[Weights, int], int]):
    """Gives each request several parts, each the version of its weights; has three slots, and checks each step."""

    async def loop(self, inbox: ps.Inbox[ModelWork], /) -> None:
        active: dict[ModelWork, int] = {}
        while True:
            for work in [] if active else [await inbox.get()]:
                active[work] = 0
            active |= dict.fromkeys(inbox.take_nowait(3 - len(active)), 0)
            await asyncio.sleep(0)
            for work, given in list(active.items()):
                model, parts = work.value
                assert work.cancelled or not model.closed
                if work.cancelled or given == parts:
                    work.finish()
                    del active[work]
                elif work.put_nowait(model.version):
                    active[work] += 1


def test_a_loop_is_told_of_a_reload_between_two_requests(effort: int) -> None:
    decode = Decoder()

    @ps.graph
    async def answer(parts: int) -> AsyncIterator[int]:
        return decode(await weights("a"), parts)

    async def main() -> None:
        made.clear()
        reloaded = 0
        async with engine.deploy(answer) as service:

            async def ask(number: int, wants: int) -> None:
                least = reloaded
                async with service.stream(answer(5 + number), priority=number % 2) as parts:
                    got = [await anext(parts) for _ in range(wants)]
                    most = len(made)
                    if wants == 3:  # this reader leaves
                        return
                    got += [part async for part in parts]
                assert len(got) == 5 + number
                [version] = set(got)
                assert least <= version < most

            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(ask(number, number % 4))
                    if number % 3 == 2:
                        await service.reload(weights)
                        reloaded += 1
        assert [one.closed for one in made] == [1] * 5

    testing.interleavings(main, count=40 * effort)


async def test_what_the_deployment_does_not_use_is_an_error_that_names_what_it_uses() -> None:
    async with engine.deploy(predict) as service, engine.deploy(ps.graph(same)) as other:
        with pytest.raises(ps.PlanError, match="'unused' is not used by this deployment of predict; it uses: weights"):
            await service.reload(unused)
        with pytest.raises(ps.PlanError, match="it uses: none"):
            await other.reload(weights)
        with pytest.raises(TypeError, match="takes a resource, got <Node same>"):
            await service.reload(same)
    with pytest.raises(ps.EngineClosedError):
        await service.reload(weights)


async def test_a_deployment_that_stops_meanwhile_ends_the_reload() -> None:
    service = engine.deploy(predict)
    async with service:
        gates["a"] = asyncio.Event()
        [reload] = await begun(service.reload(weights))
    with pytest.raises(ps.EngineClosedError):
        await reload


async def test_a_closing_that_raises_afterwards_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    @ps.resource
    async def cable() -> AsyncIterator[int]:
        yield 1
        if not problems:
            problems.append(LookupError())
            raise LookupError("cut")

    async with engine.deploy(ps.graph(cable)) as service:
        await service.reload(cable)
        await testing.wait_quiescent()
        assert await service() == 1
    out, err = capsys.readouterr()
    assert "resource.not_closed" in out + err


async def test_a_call_that_is_cancelled_after_a_reload_lets_the_old_go_when_it_has_unwound() -> None:
    unwound = asyncio.Event()

    @ps.graph
    async def stubborn() -> None:
        return await slow_to_leave(await weights("a"), unwound)

    async with engine.deploy(stubborn) as service:
        [call] = await begun(service())
        await service.reload(weights)
        call.cancel()
        await testing.wait_quiescent()
        assert (call.cancelled(), made[0].closed) == (True, 0)
        unwound.set()
        await testing.wait_quiescent()
        assert made[0].closed
