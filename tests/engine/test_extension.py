"""Nodes that run somewhere else: the promises of `penstock.extension` to packages that add executions."""

import asyncio
import contextvars
import pickle
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import penstock as ps
from penstock import engine, extension, testing
from penstock.telemetry import names
from tests.kit import Gate, Gauge, begun, outcomes, plain, same, values_of, virtual
from tests.telemetry.collected import collecting

HOW_TO = Path(__file__).parents[2] / "docs/how-to"


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program of the how-to, under the name that workers import it by."""
    monkeypatch.syspath_prepend(str(HOW_TO))
    import behind_pipes  # type: ignore[import-not-found]

    yield behind_pipes
    for name in ("behind_pipes", "pipes"):
        del sys.modules[name]


async def test_functions_coroutines_generators_and_classes_run_on_workers(pipes: Any) -> None:
    async with engine.Engine() as e:
        async with e.stream(pipes.all_kinds(item) for item in range(3)) as stream:
            found = [result async for result in stream]
        assert [(later, total) for _, later, total in found] == [(0, 100), (10, 101), (20, 103)]
        assert [where.partition(", ")[2] for where, _, _ in found] == ["item 0", "item 1", "item 2"]
        actors = {one.node: one for one in stream.statistics().actors}
        assert (actors["later"].retried, actors["later"].figures) == (1, (extension.Figure("sent", "{call}", 4),))
        assert actors["where"].concurrency == 2
        assert "sent" in str(stream.statistics())
        assert await values_of(e.stream(ps.graph(pipes.count)(3))) == [0, 1, 2]
        async with e.stream(ps.graph(pipes.count)(10**9)) as numbers:
            assert [await anext(numbers), await anext(numbers)] == [0, 1]
        async with e.deploy(ps.graph(pipes.total)) as service:
            assert await service(1) == 101
            with pytest.raises(ValueError, match="-1"):
                await service(-1)
            assert await service(1) == 101  # of the new instance, which has replaced the crashed one
            assert service.statistics().actors[0].restarts == 1


async def test_what_has_timed_out_on_a_worker_ends_there_and_keeps_its_place_until_then(pipes: Any) -> None:
    async with engine.Engine() as e:
        with pytest.raises(ps.NodeTimeoutError):
            await e.run(ps.graph(pipes.slow)(1))
        # These calls ask both workers: the worker whose item was cancelled answers again.
        assert len({(await e.run(ps.graph(pipes.where)(0))).partition(",")[0] for _ in range(4)}) == 1


async def test_a_worker_is_told_that_its_item_was_cancelled(pipes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "slow", pipes.slow.with_policy(timeout_seconds=None))  # no deadline ends its work
    async with engine.Engine() as e, e.deploy(ps.graph(pipes.slow)) as service:
        [call] = await begun(service(1))
        call.cancel()
        assert await outcomes(call) == [asyncio.CancelledError]
        assert service.statistics().actors[0].in_flight == 1
        await service.drain()  # waits until the item gives back its place
        assert service.statistics().actors[0].in_flight == 0


class InTasks(extension.Execution):
    """Runs coroutines in tasks, which a test can hold back; keeps a list of the attempts that it was given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.attempts: list[extension.Attempt] = []
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self.ended: list[asyncio.Future[Any]] = []

    def check(self, node: ps.Node[..., Any]) -> None:
        if not node.is_async:
            raise TypeError(f"node {node.name!r} is no coroutine")

    def places(self, node: ps.Node[..., Any], scope: extension.Scope) -> extension.Places:
        return extension.Places(2, key=self)

    def bind(self, site: extension.Site) -> extension.Bound:
        return InTask(self, site)


class InTask(extension.Bound):
    begins_later = True

    def __init__(self, execution: InTasks, site: extension.Site) -> None:
        super().__init__()
        self.execution, self.fn, self.name = execution, site.node.fn, site.name

    async def run(self, attempt: extension.Attempt) -> Any:
        self.execution.attempts.append(attempt)
        await self.execution.may_begin.wait()
        attempt.begun()
        with extension.working_on(pickle.loads(pickle.dumps(attempt.info))):
            work = asyncio.ensure_future(self.fn(*attempt.args, **attempt.kwargs))
        self.execution.ended.append(work)
        attempt.keeps_place_until(work)
        return await asyncio.shield(work)

    def figures(self) -> list[extension.Figure]:
        return [extension.Figure("load", "By", 1.5)]

    def held_bytes(self) -> int:
        return 12345


@pytest.fixture
def tasks(request: pytest.FixtureRequest) -> InTasks:
    return InTasks(request.node.name)


async def test_an_execution_is_told_what_it_works_on(tasks: InTasks) -> None:
    @ps.node(runs_on=tasks, retry=ps.Retry(2))
    async def elsewhere(text: str, *, suffix: str) -> tuple[str, ps.ItemInfo]:
        item = ps.current()
        if item.attempt == 1:
            raise OSError
        return text + suffix, item

    @ps.graph
    async def whole(text: str) -> tuple[str, ps.ItemInfo]:
        return await elsewhere(text, suffix="!")

    async with engine.Engine() as e:
        text, item = await e.run(whole("a"), timeout_seconds=60)
    [attempt, again] = tasks.attempts
    assert attempt is again or attempt.args == again.args
    assert (text, attempt.args, attempt.kwargs) == ("a!", ("a",), {"suffix": "!"})
    assert (item.graph, item.node, item.item, item.attempt) == ("whole", "elsewhere", 0, 2)
    remaining = item.remaining_seconds()
    assert remaining is not None
    assert 0 < remaining <= 60
    assert attempt.deadline is not None
    assert attempt.trace_context() == {}
    assert ps.current().graph == ""  # this task works on no item


@virtual
async def test_a_timeout_counts_from_when_the_work_begins(tasks: InTasks) -> None:
    @ps.node(runs_on=tasks, timeout_seconds=0.05)
    async def elsewhere(item: int) -> int:
        await asyncio.sleep(0 if item else 60)
        return item

    async with engine.Engine() as e:
        tasks.may_begin.clear()
        run = asyncio.ensure_future(e.run(ps.graph(elsewhere)(1)))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(run), 0.2)
        tasks.may_begin.set()
        assert await run == 1
        with pytest.raises(ps.NodeTimeoutError):
            await e.run(ps.graph(elsewhere)(0))
        tasks.ended[-1].cancel()


async def test_a_cancelled_item_keeps_its_place_until_the_work_has_ended(tasks: InTasks) -> None:
    gate = Gate()
    async with engine.Engine() as e, e.deploy(gate.graph(runs_on=tasks)) as service:
        call = asyncio.ensure_future(service(1))
        await gate.has(1)
        call.cancel()
        assert await outcomes(call) == [asyncio.CancelledError]
        assert tasks.attempts[0].is_cancelled
        assert service.statistics().actors[0].in_flight == 1
        gate.open()
        await tasks.ended[0]
        assert await service(2) == 2
        assert service.statistics().actors[0].in_flight == 0


async def test_nodes_share_places_by_the_key_of_their_execution(tasks: InTasks) -> None:
    gauge = Gauge()

    async def handle(item: int) -> int:
        with gauge:
            await asyncio.sleep(0.001)
        return item

    first, second = ps.node(runs_on=tasks, name="first")(handle), ps.node(runs_on=tasks, name="second")(handle)

    @ps.graph
    async def both(item: int) -> tuple[int, int]:
        return await first(item), await second(item)

    assert await values_of(engine.stream(both(item) for item in range(20))) == [(item, item) for item in range(20)]
    assert gauge.peak == 2


async def test_its_figures_are_metrics_and_are_seen_by_those_who_look(
    tasks: InTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = ps.node(runs_on=tasks)(same.fn)
    with collecting(monkeypatch) as collected:
        async with engine.Engine() as e, e.deploy(ps.graph(elsewhere)) as service:
            assert await service(1) == 1
            of = {"graph": "same", "node": "same", "figure": "load", "unit": "By"}
            assert collected.total(names.METRIC_NODE_FIGURE, **of) == 1.5
            assert service.statistics().actors[0].figures == (extension.Figure("load", "By", 1.5),)
            monkeypatch.setenv("COLUMNS", "300")  # xdist sets it to 80
            assert str(service.statistics()).endswith("1.50")
    report = await engine.memory(ps.graph(elsewhere)(1))
    assert report.in_flight_bytes is not None
    assert report.in_flight_bytes >= 12345


def test_a_node_that_cannot_run_there_is_refused_where_it_is_declared(tasks: InTasks) -> None:
    with pytest.raises(TypeError, match="'plain' is no coroutine"):
        ps.node(runs_on=tasks)(plain.fn)
    with pytest.raises(ps.OptionsError, match=r"runs_on='gpu': .* an Execution of penstock.extension"):
        ps.node(runs_on="gpu")(abs)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="does not apply to runs_on='test_a_node_that_cannot"):
        ps.node(runs_on=tasks, batch=ps.Batch(2))(same.fn)


def test_an_execution_pickles_by_its_name(tasks: InTasks) -> None:
    assert pickle.loads(pickle.dumps(tasks)) is tasks
    kept = pickle.dumps(tasks)

    class Other(InTasks):
        pass

    with pytest.raises(ps.OptionsError, match="an execution of class InTasks has that name"):
        Other(tasks.name)
    with pytest.raises(ps.OptionsError, match="has that name"):
        InTasks("thread")
    with pytest.raises(LookupError, match=r"no InTasks named"):
        pickle.loads(kept.replace(tasks.name.encode(), tasks.name[::-1].encode()))


async def test_a_pool_is_one_for_an_engine_and_is_closed_with_it(tasks: InTasks) -> None:
    closed: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        async def aclose(self) -> None:
            closed.append(self.name)

    class WithPools(extension.Execution):
        def bind(self, site: extension.Site) -> extension.Bound:
            pools = [site.scope.pool(name, lambda name=name: Named(name)) for name in ("one", "two", "one")]  # type: ignore[misc]
            assert pools[0] is pools[2]
            assert pools[0] is not pools[1]
            return InTask(tasks, site)

    execution = WithPools("with pools")

    elsewhere = ps.node(runs_on=execution)(same.fn)
    async with engine.Engine() as e:
        assert await e.run(ps.graph(elsewhere)(1)) == 1
        assert closed == []
    assert closed == ["one", "two"]


def test_an_item_is_known_without_an_engine_and_is_cancelled_when_its_time_is_over() -> None:
    item = ps.ItemInfo("graph", "node", 3, 2)
    assert pickle.loads(pickle.dumps(item)) == item
    is_cancelled = False
    with extension.working_on(item, lambda: is_cancelled) as found:
        assert ps.current() == item == found
        assert found.remaining_seconds() is None
        ps.current().check_cancelled()
        is_cancelled = True
        with pytest.raises(asyncio.CancelledError, match="item 3 of graph 'graph' has ended"):
            ps.current().check_cancelled()


async def test_streams_of_an_execution_are_closed_by_the_reader_who_leaves() -> None:
    ended: list[int] = []

    class Given(extension.Execution):
        def bind(self, site: extension.Site) -> extension.Bound:
            return Opens()

    class Opens(extension.Bound):
        async def open(self, attempt: extension.Attempt) -> AsyncIterator[int]:
            try:
                for number in range(*attempt.args):
                    yield number
            finally:
                ended.append(attempt.info.attempt)

    execution = Given("given")

    @ps.node(runs_on=execution)
    async def numbers(most: int) -> AsyncIterator[int]:
        raise NotImplementedError
        yield most

    async with engine.stream(ps.graph(numbers)(10**9)) as stream:
        assert await anext(stream) == 0
    assert ended == [1]


class Kept(NamedTuple):
    """A placeholder for a result that stays where it was made."""

    value: Any


@ps.node
async def fetched(value: Any) -> Any:
    return value.value if isinstance(value, Kept) else value


class Keeps(InTasks):
    """Returns a placeholder for a result if all its readers take one; handles batches, and opens resources itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.made: list[Any] = []
        self.batches: list[list[Any]] = []
        self.opened: list[Any] = []

    @property
    def fetch(self) -> ps.Node[..., Any]:
        return fetched

    def bind(self, site: extension.Site) -> extension.Bound:
        return Keep(self, site)

    def bind_batch(self, fn: Any, name: str, scope: extension.Scope) -> Any:
        async def handle(items: list[Any]) -> Any:
            self.batches.append(items)
            return await fn(items)

        return handle


class Keep(extension.Bound):
    can_emit = True

    def __init__(self, execution: Keeps, site: extension.Site) -> None:
        super().__init__()
        self.execution, self.site = execution, site

    async def run(self, attempt: extension.Attempt) -> Any:
        args = [arg.value if isinstance(arg, Kept) else arg for arg in attempt.args]
        for name, opens in self.site.resources.items():
            async with pickle.loads(pickle.dumps(opens))() as opened:
                self.execution.opened.append((name, opened))
        item: ps.ItemInfo = pickle.loads(pickle.dumps(attempt.info))

        async def work() -> Any:
            with extension.working_on(item, emit=emitted.put):
                return await self.site.node.fn(*args, **attempt.kwargs)

        emitted: asyncio.Queue[object] = asyncio.Queue()
        result = await asyncio.create_task(work(), context=contextvars.Context())  # knows no engine
        while not emitted.empty():
            await ps.emit(emitted.get_nowait())
        self.execution.made.append(result)
        return Kept(result) if self.site.keeps_result else result


@pytest.fixture
def keeps(request: pytest.FixtureRequest) -> Keeps:
    return Keeps(request.node.name)


async def test_a_result_stays_there_for_steps_that_run_there_and_is_fetched_for_others(keeps: Keeps) -> None:
    @ps.node(runs_on=keeps)
    async def double(number: int) -> int:
        return 2 * number

    @ps.node(runs_on=keeps)
    async def pair(number: int) -> tuple[int, int]:
        return number, -number

    @ps.node
    def here(number: int) -> int:
        assert isinstance(number, int)
        return number + 1

    @ps.graph
    async def chain(number: int) -> Any:
        first = await double(number)  # read by a step there and by a step here
        second = await double(first)  # read by the result alone
        first_of_pair, _ = both = await pair(first)
        third = await double(both[0])  # the part of the value is taken here
        return second, here(first), first_of_pair, third

    plan = str(engine.plan(chain))
    assert "double (" in plan
    assert plan.count("keeps its result there") == 1
    async with engine.stream(chain(number) for number in range(1, 3)) as stream:
        assert [result async for result in stream] == [(4, 3, 2, 4), (8, 5, 4, 8)]
        assert [one.node for one in stream.statistics().actors].count("fetched") == 1

    async def tenfold(number: int) -> int:
        return 10 * number

    with testing.replace(double, tenfold):  # a fake runs in this process, and returns the value itself
        assert double.runs_on is not keeps
        assert await engine.run(chain(1)) == (100, 11, 10, 100)

    twice = double >> double

    @ps.graph
    async def each(number: int) -> list[int]:
        return await ps.map_each(twice, [await double(number), number])

    assert await engine.run(each(1)) == [8, 4]


@ps.resource
async def scale() -> AsyncIterator[int]:
    yield 10


async def test_an_execution_learns_which_arguments_are_resources_and_opens_them_itself(keeps: Keeps) -> None:
    @ps.node(runs_on=keeps)
    async def scaled(number: int, factor: int) -> int:
        return number * factor

    @ps.graph
    async def whole(number: int) -> int:
        return await scaled(number, await scale())

    assert await engine.run(whole(2)) == 20
    assert keeps.opened == [("factor", 10)]


async def test_an_execution_handles_batches_and_hands_on_events(keeps: Keeps) -> None:
    @ps.node(runs_on=keeps, batch=ps.Batch(3, max_wait_seconds=1))
    async def doubled(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    async with engine.deploy(ps.graph(doubled)) as service:
        assert await asyncio.gather(*map(service, [1, 2, 3])) == [2, 4, 6]
    assert keeps.batches == [[1, 2, 3]]

    @ps.node(runs_on=keeps, effectful="unordered")
    async def telling(number: int) -> int:
        await ps.emit(f"begin {number}")
        return number

    async with engine.stream(ps.graph(telling)(1), events=str) as told:
        assert [event.value async for event in told] == ["begin 1"]


def test_an_error_of_another_process_comes_back_with_its_traceback() -> None:
    class Local(Exception):
        pass

    def fails(error: BaseException) -> bytes:
        try:
            raise error
        except BaseException as raised:  # noqa: BLE001 - as a worker does
            return extension.pack_error(raised)

    found = extension.unpack_error(fails(KeyError("gate")), "fails")
    assert isinstance(found, KeyError)
    assert "raise error" in str(found.__cause__)
    with pytest.raises(TypeError, match=r"'fails' raised .*Local, which does not survive pickling"):
        raise extension.unpack_error(fails(Local()), "fails")
    with pytest.raises(SystemExit):
        raise extension.unpack_error(fails(SystemExit()), "fails")


def test_a_device_node_that_runs_there_takes_no_option_of_a_device(tasks: InTasks) -> None:
    pytest.importorskip("jax")

    def double(x: float) -> float:
        return 2 * x

    with pytest.raises(TypeError, match=r"'double' has runs_on= and batch=, which do not go together"):
        ps.device_node(runs_on=tasks, batch=ps.Batch(2))(double)
    with pytest.raises(TypeError, match="'double' is no coroutine"):
        ps.device_node(runs_on=tasks)(double)
