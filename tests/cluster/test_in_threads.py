"""Nodes on workers that are threads of this process, without Ray: values travel as they do to a cluster."""

import asyncio
import os
import platform
import re
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import penstock as ps
from penstock import data, devices, engine, telemetry, testing
from penstock.cluster import remote
from tests.cluster import scenarios
from tests.cluster.scenarios import WORKERS, count, increase, make, sizes
from tests.devices.kit import graph_of
from tests.kit import same, values_of
from tests.tracing import Tracing

jax: Any = import_module("jax")
jnp: Any = jax.numpy
Array = Any
TRACED: list[tuple[int, ...]] = []  # the shapes for which workers have compiled a function


@pytest.fixture(autouse=True)
def in_threads() -> Iterator[None]:
    TRACED.clear()
    with testing.workers_in_threads(WORKERS):
        yield


def add_in_place(array: Array) -> Array:
    array += 1
    return array


write, writes_here = ps.node(runs_on=WORKERS)(add_in_place), ps.node(add_in_place)


@pytest.mark.parametrize("size", [10, 100_000])
async def test_arrays_that_have_travelled_are_read_only(size: int) -> None:
    async with engine.Engine() as e:
        for graph in (make >> write, make >> writes_here):
            with pytest.raises(ValueError, match="read-only"):
                await e.run(graph(size))
        assert (await e.run((make >> increase)(size))).sum() == 2 * size
        mine = np.zeros(size)
        with pytest.raises(ValueError, match="read-only"):
            await e.run(ps.graph(write)(mine))
        assert mine.sum() == 0


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.functions_coroutines_generators_and_batches_run_on_workers,
        scenarios.errors_are_those_of_the_node_with_their_remote_traceback,
        scenarios.a_coroutine_is_cancelled_on_its_worker,
    ],
)
async def test_what_holds_on_ray_holds_in_threads(
    scenario: Callable[[], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_FOLDER", str(tmp_path))
    await scenario()


@pytest.mark.timeout(60)
def test_a_worker_refuses_requests_from_when_it_begins_to_end() -> None:
    """Its loop would forget them, with a coroutine that nobody awaits, and a thread that waits for ever."""
    worker, is_ending, may_end = remote.Remote(), threading.Event(), threading.Event()

    async def hold_the_loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            may_end.wait()

    asyncio.run_coroutine_threadsafe(hold_the_loop(), worker._loop)
    ending = threading.Thread(target=worker.end)
    ending.start()
    is_ending.wait()
    with pytest.raises(RuntimeError, match="this worker has ended"):
        worker.leave(1)
    may_end.set()
    ending.join()
    with pytest.raises(RuntimeError, match="this worker has ended"):
        worker.close()


@ps.node(runs_on=WORKERS)
def ends(number: int) -> int:
    FOUND.append(number)
    return number


FOUND: list[int] = []


@pytest.mark.parametrize("name", ["Python", "jax", "penstock"])
async def test_a_worker_with_other_versions_is_refused_with_what_differs(name: str, monkeypatch: Any) -> None:
    found = {"Python": platform.python_version(), "jax": metadata.version("jax"), "penstock": ps.__version__}
    theirs, patch = dict(found), dict(found)
    theirs[name], patch[name] = "99.9", found[name].rpartition(".")[0] + ".99"
    monkeypatch.setattr("penstock.cluster.ray_transport.versions", lambda: theirs)
    async with engine.Engine() as e:
        with pytest.raises(ps.ClusterError, match=rf"has other versions: {name} 99\.9 here and [\w.]+ there"):
            await e.run(ps.graph(ends)(1))
    assert not FOUND
    monkeypatch.setattr("penstock.cluster.ray_transport.versions", lambda: patch)
    async with engine.Engine() as e:  # the patch level of a version is not compared
        assert await e.run(ps.graph(ends)(1)) == FOUND.pop()


async def test_a_closure_above_1_mb_is_refused_by_name() -> None:
    pytest.importorskip(
        "ray", reason='functions inside of functions travel with the extra: pip install "penstock[ray]"'
    )
    small, large = [1], bytes(1 << 20)

    @ps.node(runs_on=WORKERS)
    def first(number: int) -> int:
        return small[0] + number

    @ps.node(runs_on=WORKERS)
    def second(number: int) -> int:
        return len(large) + small[0] + number

    async with engine.Engine() as e:
        assert await e.run(ps.graph(first)(1)) == 2
        with pytest.raises(
            TypeError, match=r"node 'second' takes 1,0\d\d,\d\d\d bytes along, of which a bytes takes most"
        ):
            await e.run(ps.graph(second)(1))


def test_a_parameter_that_is_a_stream_is_refused_with_map_each_as_remedy() -> None:
    with pytest.raises(TypeError, match=r"parameter 'values' is a stream.*`ps.map_each\(node, stream\)`"):

        @ps.node(runs_on=WORKERS)
        async def refused(values: AsyncIterator[int]) -> int:
            return len([value async for value in values])

    async def as_text(values: "AsyncIterator[int]") -> int:  # as all annotations with `from __future__ import`
        return len([value async for value in values])

    with pytest.raises(TypeError, match="parameter 'values' is a stream"):
        ps.node(runs_on=WORKERS)(as_text)


async def test_a_stream_that_comes_without_an_annotation_is_refused_as_well() -> None:
    reads = graph_of(lambda most: untold(count(most)), awaits=True)
    with pytest.raises(TypeError, match=r"parameter 0 is a stream.*`ps.map_each\(node, stream\)`"):
        async with engine.Engine() as e:
            await e.run(reads(3))


@ps.node(runs_on=WORKERS)
async def untold(values: Any) -> Any:
    return values


BARRIERS: list[threading.Barrier] = []


@ps.node(runs_on=WORKERS)
def meets(number: int) -> Array:
    BARRIERS[-1].wait()
    return np.full(100_000, float(number))


@ps.node(runs_on=WORKERS)
def length(array: Array) -> int:
    return len(array)


lengths = meets >> length


async def test_figures_and_spans_name_the_machine_of_a_call(monkeypatch: Any) -> None:
    names = iter(("east", "west"))
    monkeypatch.setattr("platform.node", lambda: next(names))
    monkeypatch.setenv("COLUMNS", "200")  # a narrower table would leave columns out
    BARRIERS.append(threading.Barrier(2, timeout=30))  # so that both workers have a call at once
    with Tracing.set_up() as tracing, telemetry.profile() as profile:
        async with engine.Engine() as e, e.deploy(lengths) as service:
            assert [*await asyncio.gather(service(1), service(2))] == [100_000] * 2
            actors = {one.node: one for one in service.statistics().actors}
    figures = {name: {(one.name, one.place): one.value for one in actor.figures} for name, actor in actors.items()}
    for place in ("east", "west"):
        assert figures["meets"]["calls", place] == 1
        assert figures["meets"]["busy", place] > 0
        assert 800_000 < figures["meets"]["by reference", place] < 801_000
        assert figures["meets"]["by value", place] == 0
    assert sum(value for (name, _), value in figures["length"].items() if name == "by value") > 0
    rows = [line.split() for line in str(profile).splitlines()]
    of_meets = rows.index(next(row for row in rows if row[:1] == ["meets"]))
    assert sorted(row[:3] for row in rows[of_meets + 1 : of_meets + 3]) == [["on", "east", "1"], ["on", "west", "1"]]
    attributes = [span.attributes or {} for span in tracing.exporter.get_finished_spans() if span.name == "meets"]
    assert sorted(str(one["penstock.machine"]) for one in attributes) == ["east", "west"]
    assert {str(one["penstock.worker"]) for one in attributes} == {str(os.getpid())}
    assert "two workers" in lengths.to_mermaid()
    assert {step.runs_on for step in profile.steps} == {"two workers"}


async def test_figures_of_a_batch_and_of_a_stream_are_those_of_its_calls() -> None:
    async with engine.Engine() as e:
        with telemetry.profile() as profile:
            async with e.deploy(ps.graph(sizes)) as service:
                await asyncio.gather(*map(service, range(8)))
                [of_batches] = service.statistics().actors
        assert [step.runs_on for step in profile.steps] == ["two workers"]
        await values_of(values := e.stream(ps.graph(count)(1000)))
        [of_values] = values.statistics().actors
    assert sum(one.value for one in of_batches.figures if one.name == "calls") == 2
    found = {one.name: one.value for one in of_values.figures}
    assert found["calls"] == 1
    assert found["busy"] > 0
    assert found["by value"] > 1000


# Control flow: a value is fetched before a body takes it, and stays on workers within one body.


@ps.node(runs_on=WORKERS)
def filled(number: float) -> Array:
    return np.full(20_000, number)


@ps.node(runs_on=WORKERS)
def mean(array: Array) -> float:
    return float(array.mean())


@ps.node(runs_on=WORKERS)
def is_small(array: Array) -> bool:
    return bool(array[0] < 5)


twice, each_mean = increase >> increase, increase >> mean


@ps.graph
async def chosen(number: float) -> float:
    array = filled(number)
    return mean(await ps.cond(is_small(array), twice, same, array))


@ps.graph
async def mapped(number: float) -> list[float]:
    return await ps.map_each(each_mean, [filled(number), increase(filled(number))])


@ps.graph
async def captured(number: float) -> list[float]:
    outside = filled(number)
    return await ps.map_each(lambda factor: mean(scaled(outside, factor)), [1.0, 2.0])


@ps.node(runs_on=WORKERS)
def scaled(array: Array, factor: float) -> Array:
    return array * factor


@ps.graph
async def looped(number: float) -> float:
    return mean(await ps.while_loop(is_small, increase, filled(number)))


@pytest.mark.parametrize(
    ("graph", "expected"), [(chosen, 4.0), (mapped, [3.0, 4.0]), (captured, [2.0, 4.0]), (looped, 5.0)]
)
async def test_control_flow_gives_what_it_gives_on_one_machine(graph: Any, expected: Any) -> None:
    async with engine.Engine() as e:
        assert await e.run(graph(2.0)) == expected


async def test_values_inside_of_a_body_stay_on_workers_and_those_that_enter_one_are_fetched() -> None:
    async with engine.Engine() as e, e.deploy(mapped) as service:
        await service(2.0)
        actors = service.statistics().actors
    by_value = {
        (one.graph, one.node): sum(each.value for each in one.figures if each.name == "by value") for one in actors
    }
    [inside] = [value for (graph, node), value in by_value.items() if graph != "mapped" and node == "increase"]
    assert inside == 0
    assert {one.node for one in actors if one.graph == "mapped"} >= {"filled", "increase"}


# Feeds that workers read: order, snapshots and values are the same as on one machine.


class Pictures:
    """A source that opens no file before it is read, so it can be sent to a worker."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).random(20_000 if index % 2 else 5)


def feed(runs_on: Any) -> Any:
    @ps.graph
    async def batches(epochs: int) -> AsyncIterator[Any]:
        records = data.order(Pictures(), shuffle_seed=7, epochs=epochs)
        read = records >> data.read(Pictures(), runs_on=runs_on, concurrency=6)
        return read >> data.shuffled(8, seed=1) >> seeded

    return batches


@data.filtered
def seeded(record: Any) -> bool:
    return bool(record.seed % 5)


def found(records: list[Any]) -> list[tuple[int, int, int, int, bytes]]:
    return [(one.epoch, one.position, one.index, one.seed, one.value.tobytes()) for one in records]


async def test_workers_give_the_same_records_in_the_same_order() -> None:
    async with engine.Engine() as e:
        there, here = [await values_of(e.stream(feed(runs_on)(2))) for runs_on in (WORKERS, "thread")]
    assert found(there) == found(here)
    assert len(there) > 40


@pytest.mark.parametrize(("before", "after"), [(WORKERS, WORKERS), (WORKERS, "thread"), ("thread", WORKERS)])
async def test_a_feed_goes_on_behind_a_cut_wherever_it_is_read(before: Any, after: Any, tmp_path: Path) -> None:
    whole = await values_of(engine.stream(feed("thread")(1)))
    checkpoint = ps.Checkpoint(tmp_path, every_records=5)
    async with engine.Engine() as e:
        records: list[Any] = []
        async with e.stream(feed(before)(1), checkpoint=checkpoint) as first:
            async for record in first:
                records.append(record)
                if len(records) == 12:
                    await first.checkpoint()
                    break
        records += await values_of(e.stream(feed(after)(1), checkpoint=checkpoint))
    assert found(records) == found(whole)


async def test_a_record_that_cannot_be_read_says_which() -> None:
    class Broken(Pictures):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise OSError("no such picture")
            return super().__getitem__(index)

    read = graph_of(lambda: data.order(Broken()) >> data.read(Broken(), runs_on=WORKERS))
    with pytest.raises(OSError, match="no such picture") as raised:
        async with engine.Engine() as e:
            await values_of(e.stream(read()))
    assert any("position 3 of epoch 0, index 3 of 40" in note for note in raised.value.__notes__)


async def test_a_source_above_1_mb_is_refused_and_travels_as_a_value_of_the_graph() -> None:
    large = np.ones((4, 100_000))
    taken_along = graph_of(lambda: data.order(large) >> data.read(large, runs_on=WORKERS))
    given = graph_of(lambda source: data.order(source) >> data.read(source, runs_on=WORKERS))
    async with engine.Engine() as e:
        with pytest.raises(TypeError, match=r"node 'read' takes 3,200,\d{3} bytes along"):
            await values_of(e.stream(taken_along()))
        assert [record.value.sum() for record in await values_of(e.stream(given(large)))] == [100_000.0] * 4


def test_another_place_is_refused() -> None:
    place: Any = "process"
    with pytest.raises(ps.OptionsError, match="'thread', 'loop', or workers"):
        data.read(Pictures(), runs_on=place)


# Device nodes: each worker compiles the function, and batches are gathered in the driver.


@ps.device_node(runs_on=WORKERS, static=("power",))
def raised(x: Array, power: int = 2) -> Array:
    TRACED.append(x.shape)
    return x**power


async def test_a_function_is_compiled_where_it_is_called() -> None:
    both = graph_of(lambda x: (raised(x), raised(x, power=3)))
    async with engine.Engine() as e:
        for _ in range(3):
            two, three = await e.run(both(np.full(4, 3.0, np.float32)))
            assert (two.tolist(), three.tolist()) == ([9.0] * 4, [27.0] * 4)
    assert 2 <= len(TRACED) <= 4  # one program for each power, in each worker that was called


BATCH = ps.Batch(8, max_wait_seconds=60)


@ps.device_node(runs_on=WORKERS, batch=BATCH, shared=("table",))
def looked_up(x: Array, table: Array) -> Array:
    TRACED.append(x.shape)
    return table[x].sum() / table.shape[0]


async def test_a_batch_is_gathered_here_and_computed_by_one_program_there() -> None:
    table = np.arange(10, dtype=np.float32)
    items, before = [np.array([number, 1]) for number in range(8)], looked_up.batch_statistics()
    async with engine.Engine() as e, e.deploy(graph_of(lambda x: looked_up(x, table))) as service:
        results = await asyncio.gather(*map(service, items))
        [actor] = service.statistics().actors
    assert [float(one) for one in results] == pytest.approx([(number + 1) / 10 for number in range(8)])
    assert len(TRACED) == 1  # the eight calls are one batch of one size, so there is one program
    assert {one.name: one.value for one in actor.figures}["calls"] == 1
    found = looked_up.batch_statistics()
    assert (found.batches - before.batches, found.calls - before.calls) == (1, 8)


async def test_statistics_of_a_node_without_a_batch_are_0_and_no_device_of_this_process_runs_it() -> None:
    assert raised.batch_statistics().calls == 0
    with pytest.raises(ps.DeviceError, match="no device of this process"):
        raised.compile_statistics()


@pytest.mark.parametrize("there", [ps.device_node(device="cpu")(lambda x: x), None])
async def test_a_device_node_that_is_another_one_on_the_worker_is_named(
    there: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = remote._Callees.learn

    def learn_with_another_module(callees: Any, key: int, function: bytes) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules[__name__], "raised", there)
            learn(callees, key, function)

    monkeypatch.setattr(remote._Callees, "learn", learn_with_another_module)
    with pytest.raises(ps.DeviceError, match="device node 'raised' is another one on the worker"):
        await engine.run(ps.graph(raised)(np.ones(1, np.float32)))


@ps.device_node(runs_on=WORKERS, batch=devices.DeviceBatch(4, max_wait_seconds=60, pad_axes={"x": 0}))
def total(x: Array, mask: Array = None) -> Array:
    return x.sum() if mask is None else jnp.where(mask, x, 0).sum()


@ps.device_node(runs_on=WORKERS, batch=devices.PackedBatch(lengths=(16,), rows=1, items_per_row=3, max_wait_seconds=60))
def rows(x: Array, segments: Array = None) -> Array:
    return jax.ops.segment_sum(x[0], segments[0], 4)[None, 1:]


async def test_padded_batches_and_packed_rows_give_each_item_its_result() -> None:
    items = [np.arange(length, dtype=np.float32) for length in (3, 5, 2, 4)]
    async with engine.Engine() as e:
        async with e.deploy(ps.graph(total)) as service:
            assert [*map(float, await asyncio.gather(*map(service, items)))] == [3.0, 10.0, 1.0, 6.0]
        async with e.deploy(ps.graph(rows)) as service:
            assert [*map(float, await asyncio.gather(*map(service, items[:3])))] == [3.0, 10.0, 1.0]


async def test_an_item_that_does_not_fit_fails_alone() -> None:
    node = ps.device_node(runs_on=WORKERS, batch=devices.DeviceBatch(2, max_wait_seconds=60))(lambda x: x)
    items = [np.ones(3, np.float32), "no array"]
    async with engine.Engine() as e, e.deploy(ps.graph(node)) as service:
        good, bad = cast("list[Any]", await asyncio.gather(*map(service, items), return_exceptions=True))
    assert isinstance(bad, TypeError)
    assert good.tolist() == [1.0] * 3


@pytest.mark.parametrize("batch", [None, ps.Batch(1)])
async def test_an_error_of_a_device_node_says_what_the_error_of_the_function_says(batch: Any) -> None:
    product = ps.device_node(runs_on=WORKERS, batch=batch, name="product")(lambda x: x @ jnp.ones(3))
    async with engine.Engine() as e:
        with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as found:
            await e.run(ps.graph(product)(np.ones(4, np.float32)))
    assert "in node 'product' of graph 'product', item 0, attempt 1" in found.value.__notes__
    assert "while compiling node 'product'" in "".join(found.value.__notes__)


@ps.device_node(runs_on=WORKERS, donate=True, static=("by",))
def stepped(state: Array, by: float) -> Array:
    return state + by


async def test_donation_takes_the_memory_of_what_has_come_and_of_no_argument_here() -> None:
    state = np.zeros(1000, np.float32)
    async with engine.Engine() as e:
        for _ in range(3):
            assert (await e.run(ps.graph(stepped)(state, 1.0))).tolist() == [1.0] * 1000
    assert not state.any()


@ps.device_node(runs_on=WORKERS, donate=True)
def of_both(state: Array, by: Array) -> Array:
    return state + by.sum()


async def test_what_came_with_a_call_is_donated() -> None:
    async with engine.Engine() as e:
        # The warning does not name the other buffer, which was usable.
        with pytest.warns(UserWarning, match=r"donated buffers were not usable: float32\[3\]\."):
            await e.run(ps.graph(of_both)(np.zeros(5, np.float32), np.zeros(3, np.float32)))


DEVICE = jax.devices("cpu")[0]
MESH = jax.sharding.Mesh(np.array([DEVICE]), ("x",))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 2}, "replicas=: each worker is a replica, so say how many workers there are; leave out replicas="),
    ({"in_specs": jax.P("x")}, "in_specs=: a mesh does not reach over workers"),
    ({"out_specs": jax.P("x")}, "out_specs=: a mesh does not reach over workers"),
    ({"sample_input": (1.0,)}, "sample_input=: a worker compiles when the first call comes"),
    ({"device": MESH}, "which belongs to this process: write the name of a device that each worker has"),
    ({"device": DEVICE}, "which belongs to this process: write the name of a device that each worker has"),
    ({"batch": ps.Batch("auto")}, "a size is found on a device of this process; write the size, such as max_size=16"),
    ({"batch": ps.Batch("auto"), "sample_input": (1.0,)}, "write the size, such as max_size=16"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_belongs_to_devices_of_one_process_is_refused_with_the_reason(options: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=rf"device node 'refused' has runs_on=, and .*{re.escape(reason)}"):
        ps.device_node(runs_on=WORKERS, name="refused", **options)(lambda x: x)


def test_nodes_on_workers_do_not_become_one_program() -> None:
    assert len(engine.plan(raised >> raised).steps) >= 2
    with pytest.raises(ps.DeviceError, match="no device of this process"):
        raised.vmap()
