"""Stateful nodes that crash: the fate of the items, of the instances, and of waiting callers."""

# ruff: noqa: PT012 - the end of an `async with` raises, and the block holds most of a test

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Self

import pytest
from structlog.testing import capture_logs

import penstock as ps
from penstock import engine, testing
from tests.kit import SCHEDULERS, Gate, begun, cancelled_at_every_step, model, outcomes, plain, values_of, virtual

tenant: ContextVar[str] = ContextVar("tenant")


class Broken(Exception):
    """The instance cannot be used again."""


class Life:
    """A record of the instances of a node: how many were entered and left, and the items that they handled."""

    def __init__(self, name: str, journal: list[str] | None = None) -> None:
        self.name = name
        self.journal: list[str] = [] if journal is None else journal
        self.entered = 0
        self.left = 0
        self.handled: list[tuple[int, Any]] = []  # (instance, item)
        self.left_with: list[BaseException | None] = []
        self.failing_starts = 0
        self.failing_stops = 0
        self.on_start: Callable[[Machine], object] = lambda machine: None
        self.may_start = asyncio.Event()  # holds the start of later instances
        self.may_stop = asyncio.Event()
        self.go_on = asyncio.Event()
        self.may_start.set()
        self.may_stop.set()

    @property
    def is_even(self) -> bool:
        return self.entered == self.left

    async def hangs(self) -> None:
        """Waits until a start hangs."""
        while f"{self.name} hangs" not in self.journal:
            await asyncio.sleep(0.01)


class Machine:
    """A stateful node without policy; its items tell it what to do."""

    def __init__(self, life: Life) -> None:
        self.life = life

    async def __aenter__(self) -> Self:
        self.life.on_start(self)
        if self.life.entered and self.life.failing_starts:
            self.life.failing_starts -= 1
            self.life.journal.append(f"{self.life.name} fails")
            raise ConnectionError("not yet")
        if self.life.entered and not self.life.may_start.is_set():
            self.life.journal.append(f"{self.life.name} hangs")
            await self.life.may_start.wait()
        self.life.entered += 1
        self.number = self.life.entered
        self.task = asyncio.current_task()
        self.life.journal.append(f"{self.life.name} starts")
        return self

    async def __aexit__(self, exc_type: object, error: BaseException | None, traceback: object) -> None:
        assert asyncio.current_task() is self.task
        await self.life.may_stop.wait()
        self.life.left += 1
        self.life.left_with.append(error)
        self.life.journal.append(f"{self.life.name} stops")
        if self.life.failing_stops:
            self.life.failing_stops -= 1
            raise OSError(f"cannot close {self.life.name}")

    async def __call__(self, item: Any) -> Any:
        assert self.life.entered == self.number == self.life.left + 1, "it works while it is acquired"
        self.life.handled.append((self.number, item))
        await asyncio.sleep(0)
        if item == "crash":
            raise Broken(item)
        if item == "error":
            raise ValueError(item)
        if item == "wait":
            await self.life.go_on.wait()
        return item


def machine(life: Life, **policy: Any) -> Any:
    """Returns an instance of a node with this policy, crashing with `Broken`."""
    policy = {"restart_on": (Broken,), "name": life.name} | policy
    return ps.node(**policy)(type(life.name, (Machine,), {}))(life)


@pytest.fixture
def life() -> Iterator[Life]:
    """A record of the instances of "machine", each of which has been left at the end."""
    life = Life("machine")
    yield life
    assert life.is_even


def restarts(service: engine.Service[..., Any]) -> dict[str, int]:
    return {actor.node: actor.restarts for actor in service.statistics().actors}


def states(service: engine.Service[..., Any]) -> list[str | None]:
    return [actor.state for actor in service.statistics().actors]


async def test_an_instance_is_restarting_until_its_successor_is_entered(life: Life) -> None:
    temporary = ps.graph(machine(Life("brief"), restart="temporary"))
    async with engine.deploy(ps.graph(machine(life)), temporary, ps.graph(plain)) as service:
        assert states(service) == ["running", "running", None]
        life.may_start.clear()
        await outcomes(service("crash"), service.run(temporary("crash")))
        assert states(service) == ["restarting", "stopped", None]
        life.may_start.set()
        assert await service("fine") == "fine"
        assert states(service) == ["running", "stopped", None]
        await outcomes(service("crash"))
        life.may_start.clear()
    assert states(service) == ["stopped", "stopped", None]


async def test_at_the_end_what_is_being_left_still_runs_and_nothing_is_restarted(life: Life) -> None:
    slow = Life("slow")
    life.may_start.clear()
    slow.may_stop.clear()
    service = engine.deploy(ps.graph(machine(life)), ps.graph(machine(slow)))
    await service.__aenter__()
    await outcomes(service("crash"))
    assert states(service) == ["restarting", "running"]
    [closing] = await begun(service.__aexit__(None, None, None))
    assert states(service) == ["stopped", "running"]
    slow.may_stop.set()
    await closing
    assert states(service) == ["stopped", "stopped"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_crash_is_the_error_of_its_item_and_the_next_finds_a_new_instance(life: Life, scheduler: Any) -> None:
    restart = "transient" if scheduler == "parallel" else "permanent"
    async with engine.deploy(ps.graph(machine(life, restart=restart)), scheduler=scheduler) as service:
        assert set(await outcomes(*(service("error") for _ in range(20)))) == {ValueError}
        assert restarts(service) == {"machine": 0}  # the error of an item is no crash
        with pytest.raises(Broken) as caught:
            await service("crash")
        assert "in node 'machine' of graph 'machine', item 20, attempt 1" in caught.value.__notes__
        assert await service("fine") == "fine"
        assert restarts(service) == {"machine": 1}
    assert life.handled[-2:] == [(1, "crash"), (2, "fine")]
    assert life.journal == ["machine starts", "machine stops"] * 2
    assert life.left_with == [caught.value, None]


@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_the_items_behind_a_crash_begin_in_order(life: Life, concurrency: int) -> None:
    items = ["crash", *["wait"] * (concurrency - 1), *range(20)]
    async with engine.deploy(ps.graph(machine(life, concurrency=concurrency))) as service:
        assert await outcomes(*map(service, items)) == [Broken, *[ps.ActorRestarted] * (concurrency - 1), *range(20)]
    assert life.handled == [(1 if place < concurrency else 2, item) for place, item in enumerate(items)]


@pytest.mark.parametrize("turns", range(8))
async def test_a_call_that_comes_when_an_instance_is_back_begins_behind_those_that_wait(life: Life, turns: int) -> None:
    async with engine.deploy(ps.graph(machine(life, concurrency=9))) as service:
        assert await outcomes(service("crash")) == [Broken]
        waiting = [asyncio.create_task(service(number)) for number in range(4)]
        while life.entered < 2:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert await outcomes(*waiting, service(4)) == [0, 1, 2, 3, 4]
    assert [item for _, item in life.handled] == ["crash", 0, 1, 2, 3, 4]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_what_is_in_flight_in_a_crashed_instance_ends(life: Life, scheduler: Any) -> None:
    async with engine.deploy(ps.graph(machine(life, concurrency=3)), scheduler=scheduler) as service:
        waiting = await begun(*(service("wait") for _ in range(2)))
        with pytest.raises(Broken) as crash:
            await service("crash")
        for task in waiting:
            with pytest.raises(ps.ActorRestarted, match="'machine' was restarted") as ended:
                await task
            assert ended.value.__cause__ is crash.value
        assert await service("fine") == "fine"


async def test_what_was_in_flight_runs_again_if_its_retry_says_so(life: Life) -> None:
    retry = ps.Retry(attempts=2, retry_on=ps.ActorRestarted)
    async with engine.deploy(ps.graph(machine(life, concurrency=2, retry=retry))) as service:
        [waiting] = await begun(service("wait"))
        assert await outcomes(service("crash")) == [Broken]  # the retry names another exception
        life.go_on.set()
        assert await waiting == "wait"
    assert life.handled == [(1, "wait"), (1, "crash"), (2, "wait")]


async def test_a_fallback_stands_in_for_an_ended_attempt(life: Life) -> None:
    node = machine(life, concurrency=2, fallback=lambda error: type(error).__name__)
    async with engine.deploy(ps.graph(node)) as service:
        [waiting] = await begun(service("wait"))
        assert await service("crash") == "Broken"
        assert await waiting == "ActorRestarted"


async def test_an_ended_attempt_leaves_no_cancellation_behind(life: Life) -> None:
    seen: list[int] = []

    @ps.node(restart_on=(Broken,), concurrency=2, timeout_seconds=60, retry=ps.Retry(attempts=3))
    class Careful(Machine):
        async def __call__(self, item: Any) -> Any:
            task = asyncio.current_task()
            seen.append(task.cancelling())
            async with asyncio.timeout(30):
                return await Machine.__call__(self, "wait" if item == "wait" and self.number < 3 else item)

    async with engine.deploy(ps.graph(Careful(life))) as service:
        [waiting] = await begun(service("wait"))
        task = asyncio.create_task(service("crash"))
        life.go_on.set()
        life.go_on.clear()
        with pytest.raises(Broken):
            await task
        life.go_on.set()
        assert await waiting == "wait"
    assert set(seen) == {0}


async def test_a_handler_that_swallows_its_end_ends_all_the_same(life: Life) -> None:

    @ps.node(restart_on=(Broken,), concurrency=2)
    class Stubborn(Machine):
        async def __call__(self, item: Any) -> Any:
            try:
                return await Machine.__call__(self, item)
            except asyncio.CancelledError:
                return "late"

    async with engine.deploy(ps.graph(Stubborn(life))) as service:
        assert await outcomes(service("wait"), service("crash"), service("fine")) == [ps.ActorRestarted, Broken, "fine"]


@virtual
async def test_restarts_wait_longer_and_longer(life: Life) -> None:
    times: list[float] = []
    life.on_start = lambda machine: times.append(asyncio.get_running_loop().time())
    async with engine.deploy(ps.graph(machine(life))) as service:
        for _ in range(3):
            assert await outcomes(service("crash")) == [Broken]
            assert await service("fine") == "fine"
        await asyncio.sleep(5.1)  # the window has passed: pauses start again from the shortest
        assert await outcomes(service("crash")) == [Broken]
        assert await service("fine") == "fine"
    assert times == pytest.approx([0.0, 0.05, 0.15, 0.35, 5.5])


async def test_a_first_start_that_fails_fails_the_scope_and_what_was_started_is_left() -> None:
    lives = [Life("first"), Life("second")]
    lives[1].failing_stops = 1

    async def refuse() -> None:
        raise ConnectionError("nobody there")

    line = machine(lives[0]) >> machine(lives[1]) >> model(enter=refuse, restart_on=(Broken,))
    with capture_logs() as logs, pytest.raises(ConnectionError) as caught:
        async with engine.deploy(line):
            raise AssertionError("it was entered")
    assert caught.value.__notes__ == ["while stateful node 'Model' was started"]
    assert [(entry["event"], entry["node"]) for entry in logs] == [("actor.not_released", "second")]
    assert [life.journal for life in lives] == [["first starts", "first stops"], ["second starts", "second stops"]]


async def test_all_instances_are_left_at_the_end_although_some_raise() -> None:
    journal: list[str] = []
    lives, nodes, _ = three(journal)
    lives[1].failing_stops = lives[2].failing_stops = 1
    with pytest.raises(OSError, match="cannot close b"):
        async with engine.deploy(nodes[0] >> nodes[1] >> nodes[2]) as service:
            assert await service("fine") == "fine"
    assert journal[3:] == ["c stops", "b stops", "a stops"]


async def test_a_start_that_swallows_its_cancellation_is_left(life: Life) -> None:

    @ps.node
    class Deaf(Machine):
        async def __aenter__(self) -> Self:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
            return await Machine.__aenter__(self)

    with pytest.raises(ps.DeadlineExceeded):
        await engine.run(ps.graph(Deaf(life))(1), timeout_seconds=0.01)
    assert life.entered == 1


async def test_a_failure_while_an_instance_is_left_is_logged_and_the_restart_goes_on(life: Life) -> None:
    life.failing_stops = 1
    with capture_logs() as logs:
        async with engine.deploy(ps.graph(machine(life))) as service:
            assert await outcomes(service("crash"), service("fine")) == [Broken, "fine"]
    assert [entry["event"] for entry in logs] == ["actor.not_released", "actor.restarted"]


class Subscriber:
    """A node that reads in a background task, until the peer breaks the connection or quits."""

    def __init__(self, made: list["Subscriber"]) -> None:
        self.made = made
        self.peer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_open = False

    async def __aenter__(self) -> Self:
        self.made.append(self)
        self.group = await asyncio.TaskGroup().__aenter__()
        self.reader = self.group.create_task(self.read())
        self.is_open = True
        return self

    async def read(self) -> None:
        await self.peer

    async def __aexit__(self, exc_type: Any, error: Any, traceback: Any) -> None:
        self.is_open = False
        self.reader.cancel()
        await self.group.__aexit__(exc_type, error, traceback)

    async def __call__(self, item: Any) -> Any:
        assert self.is_open
        if item == "wait":
            await asyncio.Event().wait()
        return item, len(self.made)


async def test_an_instance_that_ends_by_itself_has_crashed() -> None:
    made: list[Subscriber] = []
    node = ps.node(restart_on=(Broken,))(type("subscriber", (Subscriber,), {}))(made)
    with capture_logs() as logs:
        async with engine.deploy(ps.graph(node)) as service:
            assert await service(0) == (0, 1)
            [waiting] = await begun(service("wait"))
            made[-1].peer.set_exception(OSError("reset"))
            with pytest.raises(ps.ActorRestarted, match="reset"):
                await waiting
            assert await service(1) == (1, 2)
            assert restarts(service) == {"subscriber": 1}
    assert [entry["event"] for entry in logs] == ["actor.restarted"]
    assert not any(one.is_open for one in made)


async def test_a_deployment_fails_with_an_instance_that_ends_by_itself_and_is_never_restarted() -> None:
    made: list[Subscriber] = []
    node = ps.node(type("subscriber", (Subscriber,), {}))(made)
    message = r"'subscriber' ended by itself, and has no restart_on=.*reset"
    with capture_logs() as logs, pytest.raises(ps.DeploymentFailed, match=message) as caught:
        async with engine.deploy(ps.graph(node)) as service:
            assert await service(0) == (0, 1)
            made[-1].peer.set_exception(OSError("reset"))
            assert await outcomes(service("wait")) == [ps.DeploymentFailed]
            assert await outcomes(service(1)) == [ps.DeploymentFailed]
    assert logs == []  # no error but the raised one
    assert not getattr(caught.value, "__notes__", [])
    assert [one.is_open for one in made] == [False]


async def test_calls_that_come_while_a_temporary_instance_is_left_are_refused_once_it_has_gone() -> None:
    made, leave = list[Subscriber](), asyncio.Event()

    @ps.node(restart_on=(Broken,), restart="temporary")
    class Slow(Subscriber):
        async def __aexit__(self, exc_type: Any, error: Any, traceback: Any) -> None:
            await leave.wait()
            await super().__aexit__(exc_type, error, traceback)

    async with engine.deploy(ps.graph(Slow(made))) as service:
        made[-1].peer.set_exception(OSError("reset"))
        await testing.wait_quiescent()
        waiting = await begun(*map(service, range(2)))
        leave.set()
        assert await outcomes(*waiting) == [ps.ActorStopped] * 2


async def test_an_instance_that_was_replaced_is_not_kept(life: Life) -> None:
    instances: list[weakref.ref[Machine]] = []
    life.on_start = lambda machine: instances.append(weakref.ref(machine))
    async with engine.deploy(ps.graph(machine(life))) as service:
        assert await outcomes(service("crash"), service("fine")) == [Broken, "fine"]
        life.left_with.clear()  # the traceback of the crash refers to the instance
        await testing.wait_quiescent()
        gc.collect()
        assert [instance() is not None for instance in instances] == [False, True]


async def test_tasks_that_a_restartable_node_starts_know_their_item(life: Life) -> None:
    async def work() -> str:
        return ps.current().node

    @ps.node(restart_on=(Broken,), name="starter")
    class Starter(Machine):
        async def __call__(self, item: Any) -> Any:
            return await asyncio.create_task(work())

    assert await engine.run(ps.graph(Starter(life))("fine")) == "starter"


async def test_each_restart_is_logged_once() -> None:
    both = machine(Life("machine")) >> machine(Life("other"))
    with capture_logs() as logs:
        async with engine.deploy(both, strategy="one_for_all") as service:
            assert await outcomes(service("crash"), service("fine")) == [Broken, "fine"]
            assert restarts(service) == {"machine": 1, "other": 1}
    why = {"after": "machine", "pause_seconds": 0.05, "error": "Broken('crash')"}
    assert logs == [
        {"event": "actor.restarted", "log_level": "warning", "node": name, **why} for name in ("machine", "other")
    ]


def three(journal: list[str]) -> tuple[list[Life], list[Any], list[ps.Graph[[Any], Any]]]:
    """Returns three nodes, started in this order, in two graphs; the second graph uses the last node."""
    lives = [Life(name, journal) for name in ("a", "b", "c")]
    nodes = [machine(life, concurrency=2) for life in lives]

    @ps.graph
    async def first(items: dict[str, Any]) -> Any:
        return [await nodes[0](items["a"]), await nodes[1](items["b"])]

    return lives, nodes, [first, ps.graph(nodes[2])]


ALL = ["c stops", "b stops", "a stops", "a starts", "b starts", "c starts"]
STOPPED_AND_STARTED = {
    ("one_for_one", "a"): ["a stops", "a starts"],
    ("one_for_one", "c"): ["c stops", "c starts"],
    ("one_for_all", "b"): ALL,
    ("one_for_all", "c"): ALL,
    ("rest_for_one", "a"): ALL,
    ("rest_for_one", "b"): ["c stops", "b stops", "b starts", "c starts"],
    ("rest_for_one", "c"): ["c stops", "c starts"],
}


@pytest.mark.parametrize(("strategy", "crashing"), STOPPED_AND_STARTED)
@virtual
async def test_a_strategy_takes_siblings_of_all_graphs_along(strategy: Any, crashing: str) -> None:
    journal = list[str]()
    lives, _, (first, second) = three(journal)
    async with engine.deploy(first, second, strategy=strategy) as service:
        [elsewhere] = await begun(service.run(second("wait")))
        journal.clear()
        crash = second("crash") if crashing == "c" else first({"a": "fine", "b": "fine", crashing: "crash"})
        assert await outcomes(service.run(crash)) == [Broken]
        assert await service({"a": 1, "b": 2}) == [1, 2]
        assert await service.run(second("fine")) == "fine"
        lives[2].go_on.set()
        assert await outcomes(elsewhere) == [ps.ActorRestarted if "c stops" in journal else "wait"]
        assert journal == STOPPED_AND_STARTED[strategy, crashing]
    assert all(life.is_even for life in lives)


async def test_siblings_without_policy_are_restarted_too(life: Life) -> None:
    plain = Life("plain")
    node = machine(life)

    @ps.node
    class Plain:
        def __init__(self, life: Life) -> None:
            self.life = life
            life.entered += 1

        def __call__(self, item: Any) -> Any:
            self.life.handled.append((self.life.entered, item))
            return item

    inline = Plain(plain)
    plain.entered = 0
    async with engine.deploy(inline >> node, strategy="one_for_all") as service:
        assert await outcomes(service("crash")) == [Broken]
        assert await service("fine") == "fine"
    assert plain.handled == [(1, "crash"), (2, "fine")]


async def test_a_later_crash_overtakes_a_restart_that_it_covers() -> None:
    # The start of `c` may hang because `a` is broken, so the crash of `a` must not wait for this start.
    journal: list[str] = []
    lives, _, (first, second) = three(journal)
    lives[2].may_start = asyncio.Event()  # never set
    async with engine.deploy(first, second, strategy="rest_for_one") as service:
        assert await outcomes(service.run(second("crash"))) == [Broken]
        await lives[2].hangs()
        assert await outcomes(service({"a": "crash", "b": "fine"})) == [Broken]
        lives[2].may_start = lives[1].may_start
        assert await service.run(second("fine")) == "fine"
        assert journal == [
            *("a starts", "b starts", "c starts", "c stops", "c hangs"),
            *("b stops", "a stops", "a starts", "b starts", "c starts"),
        ]
    assert all(life.is_even for life in lives)


async def test_restarts_that_overlap_stop_in_the_reverse_of_the_start_order() -> None:
    journal: list[str] = []
    lives, nodes, graphs = three(journal)
    only_b = ps.graph(nodes[1])
    lives[2].may_stop.clear()
    async with engine.deploy(*graphs, only_b, strategy="rest_for_one") as service:
        assert await outcomes(service.run(only_b("crash"))) == [Broken]
        assert await outcomes(service({"a": "crash", "b": "fine"})) == [Broken]
        await testing.wait_quiescent()
        assert journal == ["a starts", "b starts", "c starts"]
        lives[2].may_stop.set()
        assert await service({"a": 1, "b": 2}) == [1, 2]
        assert journal[3:] == ALL


async def test_a_start_that_is_cancelled_from_within_is_tried_again(life: Life) -> None:
    starts: list[Machine] = []

    def cancel_the_second(machine: Machine) -> None:
        starts.append(machine)
        if len(starts) == 2:
            raise asyncio.CancelledError

    life.on_start = cancel_the_second
    with capture_logs() as logs:
        async with engine.deploy(ps.graph(machine(life))) as service:
            assert await outcomes(service("crash"), service("fine")) == [Broken, "fine"]
    assert "the start of stateful node 'machine' was cancelled" in logs[0]["error"]


async def test_later_instances_start_in_the_context_of_the_scope(life: Life) -> None:
    seen: list[str] = []
    life.on_start = lambda machine: seen.append(tenant.get())
    tenant.set("deployer")
    async with engine.deploy(ps.graph(machine(life))) as service:
        tenant.set("caller")
        assert await outcomes(service("crash"), service("fine")) == [Broken, "fine"]
    assert seen == ["deployer", "deployer"]


@pytest.mark.parametrize("first", ["restart", "cancel"])
async def test_neither_a_restart_nor_a_cancel_breaks_into_what_unwinds_already(life: Life, first: str) -> None:
    unwinding, go_on = asyncio.Event(), asyncio.Event()

    @ps.node(restart_on=(Broken,), concurrency=2)
    class Slow(Machine):
        async def __call__(self, item: Any) -> Any:
            try:
                return await Machine.__call__(self, item)
            except asyncio.CancelledError:
                unwinding.set()
                await go_on.wait()
                life.journal.append("cleaned up")
                raise

    with capture_logs() as logs:
        async with engine.deploy(ps.graph(Slow(life))) as service:
            [waiting] = await begun(service("wait"))
            if first == "restart":
                assert await outcomes(service("crash")) == [Broken]
            else:
                waiting.cancel()
            await unwinding.wait()
            if first == "restart":
                waiting.cancel()
            else:
                assert await outcomes(service("crash")) == [Broken]
            await testing.wait_quiescent()
            assert life.left == 0  # the instance waits for its handler
            go_on.set()
            assert await outcomes(waiting, service("fine")) == [asyncio.CancelledError, "fine"]
    assert life.journal == ["machine starts", "cleaned up", *["machine stops", "machine starts"], "machine stops"]
    assert [entry["event"] for entry in logs] == ["actor.restarted"]


async def test_a_crash_while_a_deployment_is_aborted_is_nobodys_news() -> None:
    slow, journal = asyncio.Event(), list[str]()

    async def fragile(item: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if item == "slow":
                await slow.wait()
            raise Broken from None

    node = model(journal, call=fragile, restart_on=(Broken,), concurrency=2)
    async with engine.deploy(ps.graph(node), max_restarts=0) as service:
        waiting = await begun(*map(service, ("quick", "slow")))
        [aborting] = await begun(service.abort())
        assert not aborting.done()
        slow.set()
        await aborting
        assert await outcomes(*waiting, service("fine")) == [ps.EngineClosedError] * 3
    assert journal == ["entered", "left"]


async def test_a_temporary_node_is_not_restarted(life: Life) -> None:
    other = Life("other")
    node, two = machine(life, restart="temporary", concurrency=2, retry=ps.Retry(attempts=9)), ps.graph(machine(other))
    with capture_logs() as logs:
        async with engine.deploy(ps.graph(node), two, max_restarts=0) as service:
            results = await outcomes(service("wait"), service("crash"), service("fine"), service("fine"))
            assert results == [ps.ActorStopped, Broken, ps.ActorStopped, ps.ActorStopped]
            with pytest.raises(ps.ActorStopped, match="'machine' takes no more items") as caught:
                await service("fine")
            assert isinstance(caught.value.__cause__, Broken)
            assert life.journal == ["machine starts", "machine stops"]
            assert await service.run(two("fine")) == "fine"
            assert service.state == "ready"
    assert other.is_even
    assert [(entry["event"], entry["node"]) for entry in logs] == [("actor.stopped", "machine")]


async def test_a_temporary_sibling_of_a_node_that_is_restarted_is_stopped(life: Life) -> None:
    other = Life("other")
    one, brief = ps.graph(machine(life)), ps.graph(machine(other, restart="temporary"))
    async with engine.deploy(one, brief, strategy="one_for_all") as service:
        [waiting] = await begun(service.run(brief("wait")))
        assert await outcomes(service("crash"), service("fine")) == [Broken, "fine"]
        for call in (waiting, service.run(brief("late"))):
            with pytest.raises(ps.ActorStopped, match="was stopped when 'machine' was restarted, and has restart="):
                await call
    assert (other.entered, other.left) == (1, 1)


async def test_too_many_restarts_fail_the_deployment_for_everybody(life: Life) -> None:
    one, two = ps.graph(machine(life, concurrency=1)), ps.graph(machine(Life("other")))
    message = "the deployment of machine, other failed: node 'machine'"
    with pytest.raises(ps.DeploymentFailed, match=message) as caught:
        async with engine.deploy(one, two, max_restarts=1, max_in_flight=8) as service:
            [elsewhere] = await begun(service.run(two("wait")))
            calls = [asyncio.create_task(service("crash")) for _ in range(12)]  # 7 in flight, 5 wait for a place
            assert await outcomes(*calls) == [Broken, Broken, *[ps.DeploymentFailed] * 10]
            assert await outcomes(elsewhere, service("fine"), service.wait_ready()) == [ps.DeploymentFailed] * 3
            with pytest.raises(ps.DeploymentFailed):
                service.stream([one("fine")])
            assert service.state == "stopped"
    assert isinstance(caught.value.__cause__, Broken)
    assert await outcomes(service("fine")) == [ps.DeploymentFailed]


async def test_a_start_that_never_succeeds_escalates(life: Life) -> None:
    life.failing_starts = 9
    with pytest.raises(ps.DeploymentFailed) as caught:
        async with engine.deploy(ps.graph(machine(life)), max_restarts=2) as service:
            assert await outcomes(service("crash"), service("fine")) == [Broken, ps.DeploymentFailed]
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert life.journal == ["machine starts", "machine stops", "machine fails", "machine fails"]


@pytest.mark.parametrize("error", [LookupError(), asyncio.CancelledError(), None], ids=repr)
async def test_a_failed_deployment_says_so_unless_its_caller_was_cancelled(error: BaseException | None) -> None:
    expected = asyncio.CancelledError if isinstance(error, asyncio.CancelledError) else ps.DeploymentFailed
    with pytest.raises(expected) as caught:
        async with engine.deploy(ps.graph(machine(Life("machine"))), max_restarts=0) as service:
            stopped = asyncio.create_task(service.wait_stopped())
            assert await outcomes(service("crash"), stopped) == [Broken, ps.DeploymentFailed]
            mine = error or (await asyncio.gather(service("fine"), return_exceptions=True))[0]
            raise mine
    assert isinstance(error, LookupError) or caught.value is mine
    assert not isinstance(error, LookupError) or caught.value.__context__ is error


@pytest.mark.parametrize("end", ["async with", "drain", "abort"])
async def test_a_node_that_cannot_be_left_does_not_hide_why_the_deployment_failed(life: Life, end: str) -> None:
    life.failing_stops = 1
    service = engine.deploy(ps.graph(machine(life)), max_restarts=0)
    with pytest.raises(ps.DeploymentFailed) as caught:
        async with service:
            assert await outcomes(service("crash")) == [Broken]
            await testing.wait_quiescent()
            if end != "async with":
                await (service.drain() if end == "drain" else service.abort())
    assert isinstance(caught.value.__cause__, Broken)
    assert "cannot close" in "".join(caught.value.__notes__)


async def test_streams_of_a_failed_deployment_fail(life: Life) -> None:
    call = ps.graph(machine(life))
    with pytest.raises(ps.DeploymentFailed):
        async with engine.deploy(call, max_restarts=0) as service:
            stream = service.stream(map(call, [0, 1, "crash", 3, 4]), on_error="skip")
            assert await heard(stream) == [0, 1, ps.DeploymentFailed]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_stream_goes_on_after_a_crash(life: Life, scheduler: Any) -> None:
    call = ps.graph(machine(life))
    items = [0, 1, "crash", *range(3, 40)]
    async with engine.stream(map(call, items), scheduler=scheduler, max_in_flight=32, on_error="skip") as results:
        assert [result async for result in results] == [0, 1, *range(3, 40)]
        assert [actor.restarts for actor in results.statistics().actors] == [1]
    assert [item for _, item in life.handled] == items


@virtual
async def test_a_stream_whose_nodes_crash_too_often_fails_as_a_whole(life: Life) -> None:
    call = ps.graph(machine(life))
    with pytest.raises(ps.DeploymentFailed, match="the stream failed"):
        await values_of(engine.stream((call("crash") for _ in range(40)), on_error="skip"))
    assert life.entered == len(life.handled) == 4  # no item begins in an instance that is given up


@virtual
async def test_the_last_crash_of_a_run_is_its_error_if_nothing_else_is_left_to_do(life: Life) -> None:
    node = machine(life, retry=ps.Retry(attempts=4, retry_on=Broken))
    with pytest.raises(Broken):
        await engine.run(ps.graph(node)("crash"))
    assert life.entered == 4


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@virtual
async def test_a_run_whose_nodes_crash_too_often_fails(life: Life, scheduler: Any) -> None:
    node = machine(life, retry=ps.Retry(attempts=100))

    @ps.graph
    async def each(items: list[Any]) -> Any:
        return await ps.map_each(node, items)

    with pytest.raises(ps.DeploymentFailed, match="the run of graph 'each' failed"):
        await engine.run(each(["fine", "crash", "fine"]), scheduler=scheduler)
    assert life.entered == 4


class Talker(Machine):
    """A node that gives a stream."""

    async def __call__(self, items: list[Any]) -> AsyncIterator[Any]:  # type: ignore[override]
        for item in items:
            yield await Machine.__call__(self, item)


def talking(life: Life, **policy: Any) -> ps.Graph[[list[Any]], AsyncIterator[Any]]:
    policy = {"restart_on": (Broken,), "name": life.name} | policy
    node: Any = ps.node(**policy)(type(life.name, (Talker,), {"__call__": Talker.__call__}))(life)

    @ps.graph
    async def talk(items: list[Any]) -> AsyncIterator[Any]:
        return node(items)

    return talk


async def heard(stream: engine.Stream[Any]) -> list[Any]:
    """Returns the values of a stream and, if it fails, the type of its error at the end."""
    items: list[Any] = []
    try:
        async with stream:
            async for item in stream:
                items.append(item)  # noqa: PERF401 - keeps the items before an error
    except Exception as error:  # noqa: BLE001 - the test checks the error
        items.append(type(error))
    return items


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_crash_ends_all_streams_of_its_instance(life: Life, scheduler: Any) -> None:
    talk = talking(life, concurrency=3)
    async with engine.deploy(talk, scheduler=scheduler) as service:
        opened, at_once = await begun(
            heard(service.stream(talk([1, 2, "wait"]))), heard(service.stream(talk(["wait"])))
        )
        assert await heard(service.stream(talk([1, 2, "error"]))) == [1, 2, ValueError]
        assert restarts(service) == {"machine": 0}
        assert await heard(service.stream(talk([1, "crash"]))) == [1, Broken]
        assert await opened == [1, 2, ps.ActorRestarted]
        assert await at_once == [ps.ActorRestarted]
        assert await heard(service.stream(talk([1]))) == [1]
        assert restarts(service) == {"machine": 1}


async def test_a_stream_that_has_given_nothing_may_begin_again(life: Life) -> None:
    talk = talking(life, concurrency=2, retry=ps.Retry(attempts=2, retry_on=ps.ActorRestarted))
    async with engine.deploy(talk) as service:
        [waiting] = await begun(heard(service.stream(talk(["wait"]))))
        assert await heard(service.stream(talk(["crash"]))) == [Broken]
        life.go_on.set()
        assert await waiting == ["wait"]


async def test_a_stream_whose_own_nodes_crash_too_often_fails(life: Life) -> None:
    assert await heard(engine.stream(talking(life, retry=ps.Retry(attempts=9))(["crash"]))) == [ps.DeploymentFailed]
    assert life.entered == 4


@pytest.mark.parametrize("end", ["drain", "abort"])
async def test_draining_waits_for_a_restart_and_aborting_ends_it(life: Life, end: str) -> None:
    life.may_start.clear()
    async with engine.deploy(ps.graph(machine(life))) as service:
        waiting = [asyncio.create_task(service(item)) for item in ("crash", 1, 2)]
        await life.hangs()
        [ending] = await begun(service.drain() if end == "drain" else service.abort())
        assert ending.done() == (end == "abort")
        life.may_start.set()
        await ending
        assert await outcomes(*waiting) == [Broken, *([1, 2] if end == "drain" else [ps.EngineClosedError] * 2)]


async def test_a_caller_that_leaves_during_a_restart_frees_its_place(life: Life) -> None:
    life.may_start.clear()
    async with engine.deploy(ps.graph(machine(life)), max_in_flight=2) as service:
        waiting = [asyncio.create_task(service(item)) for item in ("crash", 1, 2, 3, 4)]
        await life.hangs()
        waiting[1].cancel()  # at the gate
        waiting[2].cancel()  # in the inbox
        await testing.wait_quiescent()
        assert service.statistics().cancelled == 2
        life.may_start.set()
        assert await outcomes(*waiting) == [Broken, asyncio.CancelledError, asyncio.CancelledError, 3, 4]
    assert [item for _, item in life.handled] == ["crash", 3, 4]


async def test_a_deadline_passes_during_a_restart(life: Life) -> None:
    life.may_start.clear()
    call = ps.graph(machine(life))
    async with engine.deploy(call) as service:
        assert await outcomes(service("crash")) == [Broken]
        with pytest.raises(ps.DeadlineExceeded):
            await service.run(call("late"), timeout_seconds=0.1)
        life.may_start.set()
        assert await service("fine") == "fine"
    assert [item for _, item in life.handled] == ["crash", "fine"]


@virtual
async def test_a_start_that_fails_is_tried_again_and_its_time_is_no_part_of_an_attempt(life: Life) -> None:
    life.failing_starts = 2
    async with engine.deploy(ps.graph(machine(life, timeout_seconds=0.1))) as service:
        assert await outcomes(service("crash"), service("fine")) == [Broken, "fine"]
    assert asyncio.get_running_loop().time() == pytest.approx(0.05 + 0.1 + 0.2)
    starts_and_stops = ["machine starts", "machine stops"]
    assert life.journal == [*starts_and_stops, *["machine fails"] * 2, *starts_and_stops]


async def test_a_thread_keeps_its_instance_until_it_returns(life: Life) -> None:
    gate = Gate()

    @ps.node(restart_on=(Broken,), runs_on="thread", concurrency=2)
    class Blocking(Machine):
        def __call__(self, item: str) -> str:  # type: ignore[override]
            if item == "crash":
                raise Broken
            if item == "wait":
                gate.block(item)
                life.journal.append("returned")
            return item

    async with engine.deploy(ps.graph(Blocking(life))) as service:
        waiting = asyncio.create_task(service("wait"))
        await gate.has()
        assert await outcomes(service("crash"), waiting) == [Broken, ps.ActorRestarted]  # nobody waits for the thread
        fine = asyncio.create_task(service("fine"))
        await asyncio.sleep(0.1)
        assert life.journal == ["machine starts"]
        gate.open()
        assert await fine == "fine"
        assert life.journal == ["machine starts", "returned", "machine stops", "machine starts"]


async def test_a_deployment_inside_of_a_node_is_a_supervisor_below_another(life: Life) -> None:
    inner = ps.graph(machine(life))
    entered: list[str] = []

    @ps.node(restart_on=(ps.DeploymentFailed,))
    class Outer:
        async def __aenter__(self) -> Self:
            entered.append("outer")
            self.service = await engine.deploy(inner, max_restarts=1).__aenter__()
            return self

        async def __aexit__(self, *exc_info: Any) -> None:
            await self.service.__aexit__(*exc_info)

        async def __call__(self, item: Any) -> Any:
            return await self.service(item)

    async with engine.deploy(ps.graph(Outer())) as service:
        assert await service("fine") == "fine"
        assert await outcomes(service("crash"), service("crash")) == [Broken, Broken]
        assert await outcomes(service("fine"), service("fine")) == [ps.DeploymentFailed, "fine"]
        assert restarts(service) == {"Outer": 1}
    assert entered == ["outer", "outer"]


async def test_a_fake_is_not_restarted(life: Life) -> None:
    node = machine(life)

    async def fake(item: Any) -> Any:
        raise Broken

    with testing.replace(node, fake):
        async with engine.deploy(ps.graph(node), max_restarts=0) as service:
            assert await outcomes(service(1), service(2)) == [Broken, Broken]
            assert service.state == "ready"
    assert life.entered == 0


def test_a_function_has_nothing_to_restart() -> None:
    for policy in ({"restart": "transient"}, {"restart_on": (Broken,)}):
        with pytest.raises(TypeError, match="is a function, which has nothing to restart"):
            ps.node(**policy)(plain.fn)


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
def test_under_any_interleaving_items_have_one_outcome_and_instances_are_left(strategy: Any, effort: int) -> None:
    async def main() -> None:
        journal: list[str] = []
        lives, nodes, graphs = three(journal)

        @ps.graph
        async def line(items: list[Any]) -> Any:
            return [await nodes[0](items[0]), await nodes[1](items[1]), await nodes[2](items[2])]

        ended = 0
        service = engine.deploy(*graphs, line, strategy=strategy, max_restarts=5, within_seconds=1)

        async def caller(number: int) -> None:
            nonlocal ended
            items = ["crash" if (number * 7 + place) % 11 == 0 else number for place in range(3)]
            task = asyncio.create_task(service.run(line(items)))
            if number % 5 == 0:
                for _ in range(number):
                    await asyncio.sleep(0)
                task.cancel()
            with suppress(Broken, ps.ActorRestarted, ps.DeploymentFailed, asyncio.CancelledError):
                assert await task == items
            ended += 1

        with suppress(ps.DeploymentFailed):
            async with service:
                await asyncio.gather(*(caller(number) for number in range(30)))
        assert ended == 30
        assert all(life.is_even for life in lives)
        assert service.statistics().admission.in_flight == 0

    testing.interleavings(main, count=10 * effort)


def test_a_deployment_that_is_cancelled_at_any_step_of_a_restart_leaves_nothing() -> None:
    lives: list[Life] = []

    async def main() -> None:
        lives[:], nodes, _ = three([])
        lives[1].failing_starts = 1
        async with engine.deploy(nodes[0] >> nodes[1] >> nodes[2], strategy="rest_for_one") as service:
            assert (await asyncio.gather(*map(service, ["crash", 1, 2]), return_exceptions=True))[1:] == [1, 2]

    steps = 0
    for outcome in cancelled_at_every_step(main, timeout_seconds=60):
        assert all(life.is_even for life in lives), outcome
        steps = outcome.step
    assert steps > 20
