"""Each metric counts the work of runs, streams and deployments, and keeps its count when they have ended."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import penstock as ps
from penstock import engine, testing
from penstock.telemetry import names
from penstock.telemetry.metrics import COUNTERS, Series, instruments
from tests.kit import Gate, begun, model, numbers, same, values_of
from tests.telemetry.collected import Collected, collecting


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    with collecting(monkeypatch) as found:
        # `get_meter` was asked before there was a provider, or at an earlier test.
        monkeypatch.setattr("penstock.telemetry.metrics.meter_provider", lambda: collecting)
        yield found


@ps.node
def add(x: int) -> int:
    if x < 0:
        raise ValueError(x)
    return x + 1


@ps.node
async def twice(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


line = add >> twice


async def test_a_run_counts_by_its_outcome(collected: Collected) -> None:
    assert await engine.run(line(1)) == 4
    assert await engine.run(line(2)) == 6
    with pytest.raises(ValueError, match="-1"):
        await engine.run(line(-1))
    assert collected.by(names.METRIC_RUN_DURATION, "graph", "outcome", "error") == {
        ("add_to_twice", "done", None): 2, ("add_to_twice", "failed", "ValueError"): 1,
    }  # fmt: skip
    # An engine of an earlier test may end now, with what it has counted for its graphs.
    assert collected.by(names.METRIC_NODE_EXECUTIONS, "node", "outcome", graph="add_to_twice") == {
        ("add", "done"): 2, ("add", "failed"): 1, ("twice", "done"): 2,
    }  # fmt: skip
    assert collected.by(names.METRIC_NODE_BUSY_TIME, "node", graph="add_to_twice").keys() == {("add",)}  # `twice` waits


async def test_the_body_of_a_map_each_counts_under_its_name_and_the_map_itself_does_not(collected: Collected) -> None:
    @ps.graph
    async def maps(numbers: list[int]) -> list[int]:
        return await ps.map_each(twice, await ps.map_each(twice, numbers, name="once more"))

    assert await values_of(engine.stream([maps([1, 2]), maps([3])])) == [[4, 8], [12]]
    counts = collected.by(names.METRIC_NODE_EXECUTIONS, "graph", "node", "outcome")
    assert {place: count for place, count in counts.items() if place[0].startswith("maps")} == {
        ("maps/twice", "twice", "done"): 3, ("maps/once more", "twice", "done"): 3,
    }  # fmt: skip


async def test_a_run_that_is_cancelled_or_expires_says_so(collected: Collected) -> None:
    holding = Gate().graph(name="hold")
    with pytest.raises(TimeoutError):
        await engine.run(holding(0), timeout_seconds=0)
    [run] = await begun(engine.run(holding(1)))
    assert collected.by(names.METRIC_RUN_IN_FLIGHT, "graph") == {("hold",): 1}
    assert collected.by(names.METRIC_NODE_IN_FLIGHT, "graph", "node") == {("hold", "hold"): 1}
    run.cancel()
    await asyncio.wait([run])
    assert collected.by(names.METRIC_RUN_DURATION, "outcome", "error") == {
        ("expired", "DeadlineExceeded"): 1, ("cancelled", None): 1,
    }  # fmt: skip
    assert collected.total(names.METRIC_RUN_IN_FLIGHT) == 0


async def test_a_run_with_instances_that_do_not_start_has_failed(collected: Collected) -> None:
    async def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await engine.run(ps.graph(model(enter=fail))(1))
    assert collected.by(names.METRIC_RUN_DURATION, "outcome", "error") == {("failed", "OSError"): 1}
    assert collected.total(names.METRIC_RUN_IN_FLIGHT) == 0


async def test_a_stream_counts_its_items_while_it_is_open_and_afterwards(collected: Collected) -> None:
    for round_ in (1, 2):
        results = engine.stream((line(x) for x in (1, -1, 2)), on_error="skip", max_in_flight=3)
        assert await values_of(results) == [4, 6]
        assert collected.by(names.METRIC_STREAM_ITEMS, "graph", "outcome") == {
            ("add_to_twice", "done"): 2 * round_, ("add_to_twice", "failed"): round_,
        }  # fmt: skip
        assert collected.total(names.METRIC_NODE_EXECUTIONS, node="add") == 3 * round_
        assert collected.by(names.METRIC_STREAM_DURATION, "graph", "outcome") == {("add_to_twice", "done"): round_}
    assert collected.points(names.METRIC_STREAM_IN_FLIGHT) == []
    assert collected.points(names.METRIC_NODE_IN_FLIGHT) == []


async def test_an_open_stream_tells_how_full_it_is(collected: Collected) -> None:
    gate = Gate()
    holding = gate.graph(name="hold", concurrency=2)
    async with engine.stream((holding(x) for x in range(9)), max_in_flight=5) as results:
        await testing.wait_quiescent()
        of_stream = (names.METRIC_STREAM_IN_FLIGHT, names.METRIC_STREAM_MAX_IN_FLIGHT, names.METRIC_STREAM_ITEMS)
        assert [collected.total(name, graph="hold") for name in of_stream] == [5, 5, 0]
        of_node = (
            names.METRIC_NODE_IN_FLIGHT, names.METRIC_NODE_MAX_IN_FLIGHT, names.METRIC_QUEUE_DEPTH,
            names.METRIC_QUEUE_CAPACITY,
        )  # fmt: skip
        assert [collected.total(name, node="hold") for name in of_node] == [2, 2, 3, 16]
        gate.open()
        assert len([result async for result in results]) == 9
    assert collected.by(names.METRIC_STREAM_ITEMS, "graph", "outcome") == {("hold", "done"): 9}


async def test_a_stream_that_is_left_or_raises_says_so(collected: Collected) -> None:
    gate = Gate()
    holding = gate.graph(name="hold")
    async with engine.stream(holding(x) for x in range(3)):
        await gate.has(3)
    assert collected.by(names.METRIC_STREAM_ITEMS, "outcome") == {("cancelled",): 3}
    with pytest.raises(ValueError, match="-1"):
        await values_of(engine.stream(line(x) for x in (1, -1)))
    assert collected.by(names.METRIC_STREAM_DURATION, "graph", "outcome", "error") == {
        ("hold", "cancelled", None): 1, ("add_to_twice", "failed", "ValueError"): 1,
    }  # fmt: skip


def test_a_stream_whose_time_is_over_has_expired(collected: Collected) -> None:
    with pytest.raises(TimeoutError):
        testing.run_virtual(lambda: values_of(engine.stream([Gate().graph()(1)], timeout_seconds=60)))
    assert collected.by(names.METRIC_STREAM_DURATION, "outcome", "error") == {("expired", "DeadlineExceeded"): 1}
    assert collected.by(names.METRIC_STREAM_ITEMS, "outcome") == {("expired",): 1}


async def test_a_stream_of_one_call_is_a_run(collected: Collected) -> None:
    counting = ps.graph(numbers)
    async with engine.stream(counting(3)) as values:
        async for _ in values:
            assert collected.by(names.METRIC_RUN_IN_FLIGHT, "graph") == {("numbers",): 1}
    assert collected.total(names.METRIC_RUN_IN_FLIGHT) == 0
    async with engine.stream(counting(3)) as values:
        pass
    assert collected.by(names.METRIC_RUN_DURATION, "outcome") == {("done",): 1, ("cancelled",): 1}
    # The time of a node that gives a stream would include the time of other nodes.
    assert collected.points(names.METRIC_NODE_BUSY_TIME) == []


async def test_a_deployment_tells_its_places_and_whom_it_refused(collected: Collected) -> None:
    gate = Gate()
    holding = gate.graph(name="hold")
    async with engine.deploy(holding, max_in_flight=2, max_queue=1) as service:
        calls = await begun(*map(service, range(3)))
        with pytest.raises(ps.Overloaded):
            await service(3)
        shown = (
            names.METRIC_DEPLOYMENT_IN_FLIGHT, names.METRIC_DEPLOYMENT_MAX_IN_FLIGHT, names.METRIC_DEPLOYMENT_QUEUED,
            names.METRIC_DEPLOYMENT_REFUSED,
        )  # fmt: skip
        assert [collected.total(name, graph="hold") for name in shown] == [2, 2, 1, 1]
        gate.open()
        await asyncio.gather(*calls)
    assert collected.by(names.METRIC_RUN_DURATION, "outcome") == {("done",): 3, ("refused",): 1}
    assert collected.by(names.METRIC_NODE_EXECUTIONS, "outcome", graph="hold") == {("done",): 3}
    assert collected.points(names.METRIC_DEPLOYMENT_IN_FLIGHT) == []
    assert collected.total(names.METRIC_DEPLOYMENT_REFUSED, graph="hold") == 1


async def test_a_call_that_expires_while_it_waits_for_a_place_is_no_refusal(collected: Collected) -> None:
    gate = Gate()
    holding = gate.graph(name="hold")
    async with engine.deploy(holding, max_in_flight=1) as service:
        [first] = await begun(service(0))
        with pytest.raises(TimeoutError):
            await service.run(holding(1), timeout_seconds=0)
        gate.open()
        await first
    assert collected.total(names.METRIC_RUN_DURATION, outcome="expired", error="DeadlineExceeded") == 1
    assert collected.total(names.METRIC_DEPLOYMENT_REFUSED) == 0


async def test_items_of_a_stream_of_a_deployment_are_those_of_the_stream(collected: Collected) -> None:
    async with engine.deploy(line) as service:
        assert await service.map(line(x) for x in range(5)) == [2, 4, 6, 8, 10]
        assert collected.total(names.METRIC_STREAM_ITEMS, graph="add_to_twice", outcome="done") == 5
        assert collected.total(names.METRIC_NODE_EXECUTIONS, graph="add_to_twice", node="add") == 5
    assert collected.total(names.METRIC_NODE_EXECUTIONS, graph="add_to_twice", node="add") == 5
    assert collected.total(names.METRIC_RUN_DURATION) == 0


async def test_what_was_taken_over_hedged_and_kept(collected: Collected) -> None:
    attempts = 0

    @ps.node(failover=same)
    async def fails(x: int) -> int:
        raise LookupError(x)

    @ps.node(hedge=ps.Hedge(after_seconds=0.001))
    async def hedged(x: int) -> int:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(60 if attempts == 1 else 0)
        return x

    all_three = fails >> hedged >> same.with_policy(name="kept", cache=ps.Cache(max_bytes=600))
    async with engine.deploy(all_three) as service:
        for x in (1, 1, 2):
            await service.run(all_three(x))
        # The size of one result and its key differs between versions of Python; two results are always too large.
        assert 300 < collected.total(names.METRIC_NODE_CACHE_SIZE, node="kept") <= 600
    counted = (
        names.METRIC_NODE_FAILOVERS, names.METRIC_NODE_HEDGES, names.METRIC_NODE_HEDGES_WON,
        names.METRIC_NODE_CACHE_EVICTIONS,
    )  # fmt: skip
    assert [collected.by(name, "node") for name in counted] == [
        {("fails",): 3}, {("hedged",): 1}, {("hedged",): 1}, {("kept",): 1},
    ]  # fmt: skip
    assert collected.by(names.METRIC_NODE_CACHE_CALLS, "outcome") == {("hits",): 1, ("misses",): 2}


async def test_retries_restarts_and_time_in_threads(collected: Collected) -> None:
    @ps.node(retry=ps.Retry(attempts=3, backoff_seconds=0), runs_on="thread")
    def flaky(x: int) -> int:
        if ps.current().attempt < 3:
            raise OSError("again")
        return x

    async def keep(x: int) -> int:
        if x < 0:
            raise KeyError(x)
        return x

    unsteady = flaky >> model(call=keep, restart_on=(KeyError,))
    async with engine.deploy(unsteady) as service:
        with pytest.raises((KeyError, ps.ActorRestarted)):
            await service(-1)
        assert await service(1) == 1
    assert collected.total(names.METRIC_NODE_RETRIES, node="flaky") == 4
    assert collected.total(names.METRIC_NODE_RESTARTS, node="Model") == 1
    assert collected.total(names.METRIC_NODE_BUSY_TIME, node="flaky") > 0


async def test_inboxes_tell_bytes_and_waits(collected: Collected) -> None:
    gate = Gate()
    slow = gate.node(name="slow", concurrency=1, capacity=1, max_bytes=1000)
    weigh = ps.node(name="pages")(lambda x: b"x" * x) >> slow
    async with engine.stream(weigh(10) for _ in range(4)) as results:
        await testing.wait_quiescent()
        assert collected.total(names.METRIC_QUEUE_SIZE, node="slow") == 10
        assert collected.total(names.METRIC_QUEUE_DEPTH, node="slow") == 1
        assert collected.points(names.METRIC_QUEUE_SIZE, node="pages") == []
        gate.open()
        assert [len(result) async for result in results] == [10] * 4
    assert collected.total(names.METRIC_QUEUE_PUT_WAIT_TIME, node="slow") > 0


async def test_a_limit_that_scopes_share_counts_once(collected: Collected) -> None:
    gate = Gate()
    holding = gate.graph(name="hold", concurrency=3)
    async with engine.deploy(holding) as one, engine.deploy(holding) as two:
        calls = await begun(one(0), two(0))
        assert collected.total(names.METRIC_NODE_IN_FLIGHT, node="hold") == 2
        assert collected.total(names.METRIC_NODE_MAX_IN_FLIGHT, node="hold") == 3
        gate.open()
        await asyncio.gather(*calls)


async def test_graphs_made_for_one_call_leave_their_counts_and_nothing_else(collected: Collected) -> None:
    left: list[weakref.ref[Any]] = []
    for x in range(5):
        made = ps.graph(add.with_policy(name="made"))
        await engine.run(made(x))
        left.append(weakref.ref(engine.plan(made)))
        del made
    gc.collect()
    assert [reference() for reference in left] == [None] * 5
    assert collected.total(names.METRIC_NODE_EXECUTIONS, graph="made", node="made", outcome="done") == 5


def points(reader: InMemoryMetricReader, metric: str = names.METRIC_NODE_EXECUTIONS) -> list[Any]:
    """Returns the points of a metric that a reader collects now."""
    data = reader.get_metrics_data()
    found = [] if data is None else data.resource_metrics
    return [
        point
        for one in found
        for scope in one.scope_metrics
        for told in scope.metrics
        if told.name == metric
        for point in told.data.data_points
    ]


async def test_names_of_graphs_that_are_gone_leave_and_those_of_open_ones_never(collected: Collected) -> None:
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    provider = MeterProvider(readers, shutdown_on_exit=False)
    instruments(provider.get_meter("test"), collected.registry.values)
    lasting, count = ps.graph(add.with_policy(name="lasting")), 700
    async with engine.deploy(lasting) as service:
        await service(1)
        await engine.run(lasting(1))
        for number in range(count):
            made = ps.graph(add.with_policy(name=f"made{number}"))
            await engine.run(made(number))
            if number == 100:  # the readers know the first names
                assert [len(points(reader)) for reader in readers] == [2 * 102] * 2
            del made
        await service(1)
        gc.collect()
        for reader in readers:
            by_graph = {point.attributes[names.GRAPH]: point.value for point in points(reader) if point.value}
            assert by_graph["lasting"] == 3
            assert by_graph[f"made{count - 1}"] == 1
            assert "made0" not in by_graph
            assert 1_000 <= 3 * len(by_graph) <= 1_260  # two outcomes and the busy time of each graph
        again = ps.graph(add.with_policy(name="made0"))
        await engine.run(again(1))
        for reader in readers:
            found = [point.value for point in points(reader) if point.attributes[names.GRAPH] == "made0"]
            assert sorted(found) == [0, 1]  # counted from 0
    provider.shutdown()


async def test_an_engine_and_its_scopes_are_not_kept_alive(collected: Collected) -> None:
    async with engine.Engine() as own:
        await own.run(line(1))
        async with own.deploy(line) as service:
            await service(1)
        assert await values_of(own.stream([line(1)])) == [4]
        runtime = weakref.ref(own._runtime)
        parts = [weakref.ref(part) for part in (service._deployment, service._deployment.scope, own._runtime.pools)]
    del own, service
    await asyncio.sleep(0)
    gc.collect()
    assert runtime() is None
    gc.collect()  # the scope that runs have shared is collected with the Engine
    assert [part() for part in parts] == [None] * 3
    assert collected.total(names.METRIC_NODE_EXECUTIONS, graph="add_to_twice", node="add") == 3
    assert len(collected.registry._departed) == 0


async def test_what_shall_not_count_does_not(collected: Collected) -> None:
    @ps.graph
    async def uncounted(x: int) -> int:
        return await twice(add(x))

    @ps.graph
    async def counting(count: int) -> AsyncIterator[int]:
        return numbers(count)

    def counted() -> list[str]:  # runs of other tests, of the graphs of this file, may still be counted
        graphs = ("uncounted", "counting")
        return [name for name in collected.metrics() for one in graphs if collected.points(name, graph=one)]

    await engine.run(uncounted(1), collect_metrics=False)
    assert await values_of(engine.stream([uncounted(1)], collect_metrics=False)) == [4]
    assert await values_of(engine.stream(counting(1), collect_metrics=False)) == [0]
    async with engine.deploy(uncounted, counting, collect_metrics=False) as service:
        assert await service(1) == 4
        assert await service.map([uncounted(1)]) == [4]
        assert await values_of(service.stream(counting(1))) == [0]
        assert counted() == []
    assert counted() == []


async def test_runs_that_count_and_those_that_do_not_share_nothing_that_counts(collected: Collected) -> None:
    with ps.execution_options(collect_metrics=False):
        await engine.run(line(1))
    await engine.run(line(1))
    assert collected.total(names.METRIC_NODE_EXECUTIONS, graph="add_to_twice", node="add") == 1
    assert collected.total(names.METRIC_RUN_DURATION) == 1
    with pytest.raises(ps.OptionsError, match="collect_metrics=1: True or False"):
        ps.ExecutionOptions(collect_metrics=1)  # type: ignore[arg-type]


def test_engines_on_several_loops_are_added_up_while_others_collect(collected: Collected) -> None:
    """Collects in threads of its own, as a reader of the SDK does, while scopes open, count and close."""
    rounds, stop = 30, threading.Event()

    @ps.graph
    async def counted(x: int) -> int:  # an engine of a test before may still go, with what it has counted
        return await twice(add(x))

    async def work() -> None:
        for _ in range(rounds):
            await values_of(engine.stream(counted(x) for x in range(20)))
            await engine.run(counted(1))
            async with engine.deploy(counted) as service:
                await asyncio.gather(*(service(x) for x in range(3)))

    def collect() -> None:
        seen: dict[Series, float] = {}
        while not stop.is_set():
            for metric, values in collected.registry.totals().items():
                for series, value in values.items():
                    if metric in COUNTERS:
                        assert value >= seen.get(series, 0), (metric, series.attributes)
                        seen[series] = value
                        assert value <= 2 * rounds * 24 or "time" in metric, (metric, series.attributes, value)

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(collect) for _ in range(2)]
        workers = [threads.submit(asyncio.run, work()) for _ in range(2)]
        wait(workers)
        stop.set()
        for thread in (*workers, *readers):
            thread.result()
    assert (
        collected.total(names.METRIC_NODE_EXECUTIONS, graph="counted", node="twice", outcome="done") == 2 * rounds * 24
    )
    assert collected.total(names.METRIC_STREAM_ITEMS, graph="counted", outcome="done") == 2 * rounds * 20
    assert collected.total(names.METRIC_RUN_DURATION, graph="counted", outcome="done") == 2 * rounds * 4
