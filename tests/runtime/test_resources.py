"""Resources: opened once, shared, closed in reverse order; after a failed or hanging opening, a caller can retry."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import structlog

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS, begun, cancelled_at_every_step, model, outcomes, same, values_of

pytestmark = pytest.mark.timeout(20)  # what is lost might never come back


class World:
    """The shared state of the resources: a log of what they did, and settings that make them fail or wait."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_opening: list[BaseException] = []
        self.fail_closing: dict[str, Exception] = {}
        self.is_open: set[str] = set()
        self.count = 0


world = World()


@pytest.fixture(autouse=True)
def new_world() -> Iterator[None]:
    global world  # noqa: PLW0603 - nodes of a module cannot use a fixture
    world = World()
    yield
    assert not world.is_open


class Client:
    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.closed = False


@asynccontextmanager
async def connected(name: str) -> AsyncIterator[Client]:
    world.log.append(f"opening {name}")
    async with anyio.create_task_group():  # the task that entered it must leave it
        await world.gate.wait()
        if world.fail_opening:
            raise world.fail_opening.pop()
        world.count += 1
        client = Client(name, world.count)
        world.is_open.add(name)
        world.log.append(f"open {name}")
        try:
            yield client
        finally:
            client.closed = True
            world.is_open.discard(name)
            world.log.append(f"close {name}")
            await asyncio.sleep(0)
    if name in world.fail_closing:
        raise world.fail_closing[name]


@ps.resource
async def http(base: str) -> AsyncIterator[Client]:
    async with connected(base) as client:
        yield client


@ps.resource
async def pool(size: int = 4, *, name: str = "pool") -> AsyncIterator[Client]:
    async with connected(f"{name}{size}") as client:
        yield client


@ps.node
async def fetch(client: Client, url: str) -> str:
    assert not client.closed
    await asyncio.sleep(0)
    assert not client.closed
    return f"{client.name}/{url}"


@ps.node
def shout(client: Client, text: str) -> str:
    assert not client.closed
    return text.upper()


@ps.graph
async def search(url: str) -> str:
    return await fetch(await http("web"), url)


@ps.graph
async def both(url: str) -> tuple[str, str]:
    return await fetch(await http("web"), url), await fetch(await pool(), url)


class Lost:
    """A resource that the test holds back or ends, and a graph that uses it."""

    def __init__(self) -> None:
        self.opened = 0
        self.is_open = False
        self.task: asyncio.Task[object] | None = None
        self.gate, self.may_close, self.is_broken = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.may_close.set()
        self.refusal: Exception | None = None

        @ps.resource
        async def line() -> AsyncIterator[int]:
            self.task = asyncio.current_task()
            try:
                await self.gate.wait()
                if self.refusal is not None:
                    raise self.refusal
                self.opened += 1
                self.is_open = True
                try:
                    async with asyncio.TaskGroup() as group:
                        watcher = group.create_task(self._watch())
                        yield self.opened
                        watcher.cancel()
                finally:
                    self.is_open = False
            finally:
                await self.may_close.wait()

        @ps.node
        async def use(number: int) -> int:
            assert self.is_open
            return number

        @ps.graph
        async def graph() -> int:
            return await use(await line())

        self.resource, self.graph = line, graph

    async def _watch(self) -> None:
        await self.is_broken.wait()
        self.is_broken.clear()
        raise ConnectionError("the line is down")

    async def lose(self) -> None:
        """Cancels the task of the resource, as code outside the engine may do."""
        self.task.cancel()
        await testing.wait_quiescent()
        assert not self.is_open

    async def fail(self) -> None:
        """Lets the resource fail while it is open."""
        self.is_broken.set()
        await testing.wait_quiescent()
        assert not self.is_open


@pytest.fixture
def lost() -> Iterator[Lost]:
    lost = Lost()
    yield lost
    assert not lost.is_open


@asynccontextmanager
async def losing(own: Any = engine) -> AsyncIterator[tuple[Lost, engine.Service[[], int]]]:
    """A deployment that has lost its resource after the first call."""
    lost = Lost()
    async with own.deploy(lost.graph) as service:
        assert await service() == 1
        await lost.lose()
        yield lost, service


def opened() -> int:
    return sum(line.startswith("open ") for line in world.log)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_graph_gets_what_the_resource_yields(scheduler: Any) -> None:
    assert await engine.run(both("x"), scheduler=scheduler) == ("web/x", "pool4/x")
    assert world.log[-2:] == ["close pool4", "close web"]


async def test_it_is_opened_once_for_a_hundred_concurrent_first_users() -> None:
    world.gate.clear()
    async with engine.Engine() as e:
        runs = await begun(*(e.run(search(str(n))) for n in range(100)))
        assert world.log == ["opening web"]
        world.gate.set()
        assert await asyncio.gather(*runs) == [f"web/{n}" for n in range(100)]
        assert await e.run(search("again")) == "web/again"
        assert len([result async for result in e.stream(search(str(n)) for n in range(10))]) == 10
        async with e.deploy(search, both) as service:
            assert await service("a") == "web/a"
            assert await service.run(both("b")) == ("web/b", "pool4/b")
        assert world.log == ["opening web", "open web", "opening pool4", "open pool4"]
    assert world.log[4:] == ["close pool4", "close web"]


@pytest.mark.parametrize("is_reloaded", [False, True])
async def test_it_does_not_keep_the_deployment_that_opened_it(is_reloaded: bool) -> None:
    """Objects of an ended deployment are not public, so the test watches a context variable of its caller."""

    class Request:
        """An object that only the context of the deployment's begin refers to."""

    request: ContextVar[Request] = ContextVar("request")

    async def serve() -> weakref.ref[Request]:
        mine = Request()
        request.set(mine)
        async with e.deploy(search) as service:
            if is_reloaded:
                await service.reload(http)
            assert await service("a") == "web/a"
        return weakref.ref(mine)

    async with engine.Engine() as e:
        task = asyncio.create_task(serve())
        mine = await task
        del task
        await asyncio.sleep(0)  # the callback that wakes this task refers to the awaited task
        gc.collect()
        assert mine() is None
        assert await e.run(search("again")) == "web/again"
        assert opened() == 1 + is_reloaded


async def test_the_default_engine_closes_it_when_the_last_scope_that_uses_it_ends() -> None:
    async with engine.deploy(search) as service:
        assert await service("a") == "web/a"
        assert await engine.run(both("b")) == ("web/b", "pool4/b")
        assert world.is_open == {"web"}
        assert [result async for result in engine.stream([search("c")])] == ["web/c"]
        assert world.is_open == {"web"}
    assert world.log == ["opening web", "open web", "opening pool4", "open pool4", "close pool4", "close web"]
    await engine.run(search("again"))
    assert opened() == 3


async def test_what_is_closed_is_let_go_and_opened_again_by_the_next_run() -> None:
    held: list[weakref.ref[Client]] = []

    @ps.node
    async def hold(client: Client) -> int:
        held.append(weakref.ref(client))
        return client.number

    @ps.graph
    async def use() -> int:
        return await hold(await http("web"))

    for number in (1, 2, 3):
        assert await engine.run(use) == number
        gc.collect()
        assert held[-1]() is None


async def test_it_sees_nothing_of_the_context_of_whoever_comes_first() -> None:
    variable = ContextVar("variable", default="")

    @ps.resource
    async def seen() -> AsyncIterator[str]:
        yield variable.get()

    variable.set("the first caller's")
    assert await engine.run(ps.graph(seen)) == ""


async def test_equal_arguments_are_one_and_others_are_others() -> None:
    @ps.graph
    async def many(url: str) -> list[Client]:
        one = await pool(1)
        return [
            one, await pool(size=1), await pool(1, name="pool"), await pool(True), await pool(2), await http("a"),
        ]  # fmt: skip

    async with engine.Engine() as e:
        first = await e.run(many(""))
        assert [client.number for client in first] == [1, 1, 1, 2, 3, 4]
        assert await e.run(many("")) == first


async def test_it_is_one_step_of_no_graph_and_costs_no_actor() -> None:
    @ps.graph
    async def twice(url: str) -> tuple[str, str]:
        return await fetch(await http("a"), url), await fetch(await http("a"), url)

    assert len(engine.plan(twice).steps) == 2
    assert engine.plan(search)._program("actors").is_line
    assert str(twice).count("□") == 1


async def test_bodies_of_control_flow_and_graphs_inside_share_it() -> None:
    async def elsewhere(url: str) -> str:
        return await fetch(await http("other"), url)

    async def is_short(url: str) -> bool:
        return shorter(await pool(), url)

    @ps.node
    def shorter(client: Client, url: str) -> bool:
        return len(url) < 12

    @ps.graph
    async def everywhere(urls: list[str]) -> list[object]:
        return [
            await ps.map_each(search, urls),
            await ps.cond(shorter(await pool(), urls[0]), search, elsewhere, urls[0]),
            await ps.switch(1, (search, elsewhere), urls[1]),
            await ps.while_loop(is_short, search, urls[0]),
            await search(urls[0]),
        ]

    expected = [["web/a", "web/b"], "web/a", "other/b", "web/web/web/a", "web/a"]
    for run in (engine.run, lambda call: call):
        world.log.clear()
        assert await run(everywhere(["a", "b"])) == expected
        opened = {line for line in world.log if line.startswith("open ")}
        assert (opened, len(world.log)) == ({"open other", "open pool4", "open web"}, 9)
    async with engine.deploy(everywhere, search) as service:
        assert await service.map([everywhere(["a", "b"])] * 3) == [expected] * 3


async def test_it_may_be_returned_and_its_attributes_read() -> None:
    @ps.graph
    async def give(url: str) -> tuple[Client, str]:
        client = await http("web")
        return client, shout(client, client.name)

    client, name = await engine.run(give(""))
    assert client.closed
    assert name == "WEB"


async def test_an_opening_that_fails_tells_every_caller_in_its_own_words() -> None:
    error = ConnectionError("refused")
    world.gate.clear()
    world.fail_opening.append(error)
    async with engine.Engine() as e:
        runs = await begun(*map(e.run, [search("a"), both("b"), search("c")]))
        world.gate.set()
        errors: list[Any] = await asyncio.gather(*runs, return_exceptions=True)
        assert len({*map(id, errors)}) == 3
        for other, graph in zip(errors, ("search", "both", "search"), strict=True):
            assert isinstance(other, ExceptionGroup)  # raised by a task group
            assert other.exceptions == (error,)
            assert other.__notes__ == [f"while resource 'http' was opened for graph {graph!r}"]
        assert await e.run(search("d")) == "web/d"
    assert world.log == ["opening web", "opening web", "open web", "close web"]


async def test_a_deployment_and_a_stream_raise_what_the_opening_raised() -> None:
    world.fail_opening = [ConnectionError("one"), ConnectionError("two")]
    with pytest.raises(ExceptionGroup):
        async with engine.deploy(search):
            pass
    with pytest.raises(ExceptionGroup):
        async with engine.stream([search("a")]) as results:
            await anext(results)
    assert await engine.run(search("b")) == "web/b"


async def test_an_opening_that_hangs_ends_with_the_deadline_of_its_only_caller() -> None:
    world.gate.clear()
    async with engine.Engine() as e:
        with pytest.raises(ps.DeadlineExceeded, match=r"resources and stateful nodes of graph 'search' did not start"):
            await e.run(search("a"), timeout_seconds=0.01)
        [patient] = await begun(e.run(search("b")))
        with pytest.raises(TimeoutError):
            await e.run(search("a"), timeout_seconds=0.01)  # this caller leaves, and the other one still waits
        world.gate.set()
        assert await patient == "web/b"
    assert world.log == ["opening web", "opening web", "open web", "close web"]


async def test_the_opening_is_cancelled_with_the_last_caller_and_not_before() -> None:
    world.gate.clear()
    async with engine.Engine() as e:
        runs = await begun(*(e.run(search(str(n))) for n in range(3)))
        runs[0].cancel()
        await testing.wait_quiescent()
        assert [run.done() for run in runs] == [True, False, False]
        runs[1].cancel()
        runs[2].cancel()
        assert await outcomes(*runs) == [asyncio.CancelledError] * 3
        world.gate.set()
        await testing.wait_quiescent()
        assert world.log == ["opening web"]
        assert await e.run(search("d")) == "web/d"


async def test_a_new_opening_waits_until_a_cancelled_one_has_unwound(lost: Lost) -> None:
    lost.gate.clear()
    lost.may_close.clear()
    async with engine.Engine() as e:
        [first] = await begun(e.run(lost.graph))
        first.cancel()
        await testing.wait_quiescent()
        lost.gate.set()
        [second] = await begun(e.run(lost.graph))
        assert (lost.opened, second.done()) == (0, False)
        lost.may_close.set()
        assert await second == 1
        assert first.cancelled()


async def test_everything_is_closed_in_reverse_order_although_closings_raise() -> None:
    world.fail_closing = {"pool4": LookupError("first"), "web": LookupError("second")}
    with pytest.raises(LookupError, match="first"):
        async with engine.Engine() as e:
            await e.run(both("a"))
    assert world.log[-2:] == ["close pool4", "close web"]
    with pytest.raises(LookupError, match="first"):
        await engine.run(both("a"))
    with pytest.raises(LookupError, match="first"):
        await both("a")
    assert world.log[-2:] == ["close pool4", "close web"]


async def test_an_engine_that_is_closed_ends_the_openings_that_go_on() -> None:
    world.gate.clear()
    async with engine.Engine() as e:
        [run] = await begun(e.run(search("a")))
    with pytest.raises(ps.EngineClosedError, match="while resource 'http' was opened"):
        await run
    assert world.log == ["opening web"]


@pytest.mark.parametrize("end", [Lost.lose, Lost.fail])
async def test_what_ended_by_itself_is_reported_then_and_opened_again_for_who_comes_next(lost: Lost, end: Any) -> None:
    async with engine.Engine() as e:
        assert await e.run(lost.graph) == 1
        with structlog.testing.capture_logs() as logs:
            await end(lost)
        error = "its task was cancelled" if end is Lost.lose else "the line is down"
        assert [entry["event"] for entry in logs] == ["resource.ended"]
        assert error in logs[0]["error"]
        assert [await e.run(lost.graph) for _ in range(2)] == [2, 2]


@pytest.mark.parametrize("kind", ["default", "own", "eager"])
def test_a_cancel_at_every_step_leaves_nothing_open(kind: str) -> None:
    async def main() -> None:
        global world  # noqa: PLW0603
        world = World()
        if kind == "eager":
            await both("a")
        elif kind == "default":
            await asyncio.gather(engine.run(search("a")), engine.run(both("b")))
        else:
            async with engine.Engine() as e:
                await asyncio.gather(e.run(search("a")), e.run(both("b")))
                async with e.deploy(both) as service:
                    await asyncio.gather(service("c"), service.reload(http))

    for outcome in cancelled_at_every_step(main):
        assert not world.is_open, outcome
        assert outcome.cancelled == isinstance(outcome.error, asyncio.CancelledError), outcome


# --- without an engine


async def test_graphs_inside_of_one_without_an_engine_share_it() -> None:
    @ps.node
    async def nested(url: str) -> str:
        return await search(url)

    @ps.graph
    async def outer(url: str) -> tuple[str, str, str]:
        return await search(url), await search(url), await nested(url)

    assert await outer("x") == ("web/x", "web/x", "web/x")
    assert world.log == ["opening web", "open web", "close web"]


async def test_a_stream_that_a_graph_gives_without_an_engine_keeps_it_open_to_its_end() -> None:
    @ps.node
    async def pages(client: Client, url: str) -> AsyncIterator[str]:
        for page in range(3):
            assert not client.closed
            yield f"{url}{page}"

    @ps.graph
    async def read(url: str) -> AsyncIterator[str]:
        return pages(await http("web"), url)

    values = await read("a")
    assert world.is_open == {"web"}
    assert [value async for value in values] == ["a0", "a1", "a2"]
    assert not world.is_open
    assert [value async for value in engine.stream(read("b"))] == ["b0", "b1", "b2"]
    async with engine.deploy(read) as service:
        assert await values_of(service.stream(read("b"))) == ["b0", "b1", "b2"]


async def test_outside_of_a_graph_it_is_refused_and_open_is_for_tests_of_itself() -> None:
    with pytest.raises(ps.ResourceError, match=r"test_resources.py:\d+: resource 'http' is called outside of a graph"):
        await http("web")

    @ps.node
    async def late() -> Client:
        return await http("web")

    with pytest.raises(ps.ResourceError, match="call it in the graph and pass the value to the node"):
        await engine.run(ps.graph(late))
    async with http.open("web") as client:
        assert client.name == "web"
    assert world.log == ["opening web", "open web", "close web"]


# --- fakes


async def test_a_fake_is_a_resource_or_a_function_that_gives_the_value() -> None:
    closed: list[str] = []

    async def opened_fake(base: str) -> AsyncIterator[Client]:
        yield Client(f"fake-{base}", 0)
        closed.append(base)

    async def given_fake(base: str) -> Client:
        return Client(f"given-{base}", 0)

    async with engine.Engine() as e:
        assert await e.run(search("a")) == "web/a"
        with testing.replace(http, opened_fake):
            assert await e.run(search("a")) == "fake-web/a"
            assert await search("a") == "fake-web/a"
            assert closed == ["web"]
        with testing.replace(http, given_fake):
            assert await e.run(search("a")) == "given-web/a"
            assert await search("a") == "given-web/a"
        assert await e.run(search("a")) == "web/a"
        assert opened() == 1
    assert closed == ["web", "web"]


async def test_a_trace_does_not_go_stale() -> None:
    assert await engine.run(search("a")) == "web/a"

    @ps.resource
    async def other(base: str) -> AsyncIterator[Client]:
        async with connected(f"other-{base}") as client:
            yield client

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "http", other)
        assert await engine.run(search("a")) == "other-web/a"
    assert await engine.run(search("a")) == "web/a"


@pytest.mark.parametrize("is_own", [False, True])
async def test_a_deployment_opens_it_again_for_its_next_call(is_own: bool) -> None:
    async with engine.Engine() as own, losing(own if is_own else engine) as (lost, service):
        assert await asyncio.gather(service(), service()) == [2, 2]
        assert await service() == 2
        await lost.lose()
        assert await service.map([lost.graph()]) == [3]
        assert await service() == 3
    assert not lost.is_open


async def test_a_call_that_waits_for_it_keeps_its_deadline_and_ends_with_its_deployment() -> None:
    async with losing() as (lost, service):
        lost.gate.clear()
        with pytest.raises(ps.DeadlineExceeded, match="not opened again"):
            await service.run(lost.graph(), timeout_seconds=0.01)
        [waiting] = await begun(service())
        await service.abort()
        with pytest.raises(ps.EngineClosedError, match="takes no more calls"):
            await waiting
        seen = service.statistics()
    assert (seen.completed, seen.failed, seen.expired) == (1, 1, 1)


async def test_a_call_whose_resource_is_not_opened_again_has_failed_whatever_the_reason() -> None:
    async with losing() as (lost, service):
        for lost.refusal in (OSError("down"), ps.Overloaded("another deployment has no place")):
            with pytest.raises(type(lost.refusal)):
                await service()
        seen = service.statistics()
    assert (seen.completed, seen.failed, seen.admission.refused) == (1, 2, 0)


async def test_draining_waits_for_calls_that_wait_for_it() -> None:
    async with losing() as (lost, service):
        lost.gate.clear()
        waiting, draining = await begun(service(), service.drain())
        lost.gate.set()
        assert await waiting == 2
        await draining


async def test_one_that_ends_while_a_deployment_starts_is_opened_again_for_its_first_call(lost: Lost) -> None:
    slow = model(enter=lost.lose)

    @ps.graph
    async def graph() -> int:
        return await slow(await lost.graph())

    async with engine.deploy(graph) as service:
        assert await service() == 2


@pytest.mark.parametrize("verb", ["run", "stream", "deploy", "lost again"])
async def test_one_that_is_lost_while_the_next_is_opened_is_opened_again_once(lost: Lost, verb: str) -> None:

    @ps.resource
    async def other() -> AsyncIterator[str]:
        if lost.opened == 1:
            await lost.fail()
            if verb == "lost again":
                lost.is_broken.set()
        yield "other"

    @ps.graph
    async def graph() -> tuple[int, str]:
        return await lost.resource(), await other()

    async with engine.Engine() as e:
        if verb == "lost again":
            with pytest.raises(ExceptionGroup) as caught:
                await e.run(graph)
            assert [str(error) for error in caught.value.exceptions] == ["the line is down"]
        elif verb == "deploy":
            async with e.deploy(graph) as service:
                assert await service() == (2, "other")
        else:
            results = [await e.run(graph)] if verb == "run" else await values_of(e.stream([graph()]))
            assert results == [(2, "other")]
    assert lost.opened == 2


async def test_a_call_that_comes_while_a_lost_one_unwinds_waits_and_opens_it_again(lost: Lost) -> None:
    async with engine.Engine() as e:
        assert await e.run(lost.graph) == 1
        lost.may_close.clear()
        await lost.lose()
        [waiting] = await begun(e.run(lost.resource >> same))
        assert not waiting.done()
        lost.may_close.set()
        assert await waiting == 2


async def test_a_reload_opens_one_that_was_lost_and_that_a_call_gave_up() -> None:
    async with engine.Engine() as e, losing(e) as (lost, service):
        lost.gate.clear()
        with pytest.raises(ps.DeadlineExceeded, match="not opened again"):
            await service.run(lost.graph(), timeout_seconds=0.01)
        lost.gate.set()
        await service.reload(lost.resource)
        assert await service() == lost.opened


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("caller_leaves", [False, True])
async def test_a_call_that_waits_for_one_that_was_lost_gets_what_a_reload_opens(
    caller_leaves: bool, is_own: bool
) -> None:
    async with engine.Engine() as own, losing(own if is_own else engine) as (lost, service):
        lost.gate = asyncio.Event()  # never set
        [waiting] = await begun(service())
        lost.gate = asyncio.Event()
        [reloading] = await begun(service.reload(lost.resource))
        if caller_leaves:
            waiting.cancel()
            await asyncio.wait([waiting])
        lost.gate.set()
        await reloading
        assert await (service() if caller_leaves else waiting) == 2
