"""Nodes on workers that are threads of this process, without Ray: values travel as they do to a cluster."""

import asyncio
import os
import platform
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import engine, telemetry, testing
from tests.cluster import scenarios
from tests.cluster.scenarios import WORKERS, count, increase, make, sizes
from tests.tracing import Tracing

Array = Any


@pytest.fixture(autouse=True)
def in_threads() -> Iterator[None]:
    with testing.workers_in_threads(WORKERS):
        yield


@ps.node(runs_on=WORKERS)
def write(array: Array) -> Array:
    array += 1
    return array


@ps.node
def writes_here(array: Array) -> Array:
    array += 1
    return array


@pytest.mark.parametrize("size", [10, 100_000])
async def test_arrays_that_have_travelled_are_read_only(size: int) -> None:
    @ps.graph
    async def there(size: int) -> Array:
        return write(make(size))

    @ps.graph
    async def here(size: int) -> Array:
        return writes_here(make(size))

    @ps.graph
    async def copied(size: int) -> Array:
        return increase(make(size))

    async with engine.Engine() as e:
        for graph in (there, here):
            with pytest.raises(ValueError, match="read-only"):
                await e.run(graph(size))
        assert (await e.run(copied(size))).sum() == 2 * size
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


async def test_a_stream_that_comes_without_an_annotation_is_refused_as_well() -> None:
    @ps.graph
    async def reads(most: int) -> Any:
        return await untold(count(most))

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


@ps.graph
async def lengths(number: int) -> int:
    return length(meets(number))


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
        async with e.stream(ps.graph(count)(1000)) as values:
            async for _ in values:
                pass
            [of_values] = values.statistics().actors
    assert sum(one.value for one in of_batches.figures if one.name == "calls") == 2
    found = {one.name: one.value for one in of_values.figures}
    assert found["calls"] == 1
    assert found["busy"] > 0
    assert found["by value"] > 1000
