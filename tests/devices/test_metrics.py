"""Metrics of devices: batches, padding, compilations, busy time; and the page that lists all metrics."""

import asyncio
import contextlib
import gc
import re
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics.export import Histogram, Sum

import penstock as ps
from penstock import engine
from penstock.devices import dispatch
from penstock.devices.compiling import CACHE, CompileCache
from penstock.telemetry import names
from tests.devices.compiled import called, dying_once, leased, program
from tests.docs.snippets import ROOT
from tests.telemetry.collected import Collected, collecting

from .gates import Gate
from .kit import doubling, row


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    with collecting(monkeypatch) as found:
        found.registry.opened(CACHE)  # the cache was opened when its module was imported
        yield found


async def test_batches_of_a_node_that_is_gone_still_count(collected: Collected) -> None:
    async with engine.Engine() as own:
        await own.run(doubling(batch=ps.Batch(4, max_wait_seconds=0))(row(1)))
    gc.collect()
    assert collected.total(names.METRIC_BATCH_RUNS, node="doubled") == 1
    assert collected.total(names.METRIC_BATCH_ITEMS, node="doubled") == 1


async def test_batches_tell_their_size_and_their_padding(collected: Collected) -> None:
    gate = Gate()

    batched = ps.device_node(device="cpu:0", batch=ps.Batch(4, max_wait_seconds=0), name="batched")(gate.pass_through)
    async with engine.Engine() as own, own.deploy(ps.graph(batched)) as service:
        gate.open()
        await service(row(1))
        gate.close()
        first = asyncio.create_task(service(row(1)))
        await gate.entered(2)
        others = [asyncio.create_task(service(row(1))) for _ in range(3)]
        gate.open()
        await asyncio.gather(first, *others)
        real = collected.total(names.METRIC_BATCH_ELEMENTS, node="batched", padding=False)
        padding = collected.total(names.METRIC_BATCH_ELEMENTS, node="batched", padding=True)
        counted = batched.batch_statistics()  # type: ignore[attr-defined]
        assert collected.total(names.METRIC_BATCH_RUNS, node="batched") == counted.batches
        assert collected.total(names.METRIC_BATCH_ITEMS, node="batched") == counted.calls == 5
        assert (real, padding) == (10, counted.elements - 10)
        assert padding / (real + padding) == pytest.approx(counted.padding_share)
    assert collected.total(names.METRIC_BATCH_ITEMS, node="batched") == 5


async def test_compilations_hits_and_busy_time_stay_when_the_device_is_given_back(collected: Collected) -> None:
    single = ps.device_node(device="cpu:0", name="single")(lambda x: x * 3)
    # Hits that the same test counted on another event loop.
    hits_before = collected.total(names.METRIC_COMPILE_CACHE_HITS, node="single")
    busy: list[float] = []
    for _ in range(2):
        async with engine.Engine() as own:
            for _ in range(3):
                await own.run(ps.graph(single)(row(1)))
            busy.append(collected.total(names.METRIC_DEVICE_BUSY_TIME, device="cpu:0"))
        busy.append(collected.total(names.METRIC_DEVICE_BUSY_TIME, device="cpu:0"))
    assert 0 < busy[0] <= busy[1] < busy[2] <= busy[3]
    counted = single.compile_statistics()  # type: ignore[attr-defined]
    assert collected.total(names.METRIC_COMPILE_PROGRAMS, node="single") == 1
    assert collected.total(names.METRIC_COMPILE_CACHE_MISSES, node="single") == counted.misses == 1
    assert collected.total(names.METRIC_COMPILE_CACHE_HITS, node="single") - hits_before == counted.hits == 5
    assert collected.total(names.METRIC_COMPILE_TIME, node="single") == pytest.approx(counted.seconds)
    assert collected.total(names.METRIC_DEVICE_RESTARTS, device="cpu:0") == 0


async def test_a_thread_of_a_device_that_dies_counts(collected: Collected) -> None:
    async with engine.Engine() as own:
        with dying_once(dispatch, "are_ready"), pytest.raises(ps.ActorRestarted):
            await own.run(doubling(batch=ps.Batch(4, max_wait_seconds=0))(row(1)))
    assert collected.total(names.METRIC_DEVICE_RESTARTS, device="cpu:0") == 1


def test_programs_that_were_dropped_keep_their_hits(collected: Collected) -> None:
    first, second = program(lambda x: x + 1, name="dropped"), program(lambda x: x - 1, name="dropped")
    with leased(CompileCache(capacity=1)) as cache:
        for node in (first, first, first, second):
            called(cache, node, row(1))
        assert collected.total(names.METRIC_COMPILE_CACHE_EVICTIONS, node="dropped") == 1
        hits = first.log.statistics().hits + second.log.statistics().hits
        assert collected.total(names.METRIC_COMPILE_CACHE_HITS, node="dropped") == hits >= 2
        assert collected.total(names.METRIC_COMPILE_PROGRAMS, node="dropped") == 2


@ps.node
async def blank(x: int) -> bytes:
    return b""


@ps.node(failover=blank, hedge=ps.Hedge(after_seconds=60), cache=ps.Cache(max_bytes=100))
async def page(x: int) -> bytes:
    return b"x" * x


@ps.node(retry=ps.Retry(attempts=2, backoff_seconds=0), concurrency=1, max_bytes=100)
async def weigh(page: bytes) -> int:
    if not page:
        raise ValueError("nothing")
    return len(page)


@ps.node
class Keeps:
    async def __call__(self, size: int) -> int:
        return size


keeps = Keeps()


whole = page >> weigh >> keeps


def listed() -> dict[str, tuple[str, str, set[str]]]:
    """Returns kind, unit and attributes of each metric on the page, except the metrics of consumers."""
    page = (ROOT / "docs/how-to/metrics.md").read_text()
    found = re.findall(r"^\| `(penstock\.[\w.]+)` \| (\w+) \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    return {
        name: (kind, unit, {key.strip("`").removeprefix("penstock.") for key in attributes.split(", ")})
        for name, kind, unit, attributes in found
        if not name.startswith("penstock.consumer.")
    }


def emitted(collected: Collected) -> dict[str, tuple[str, str, set[str]]]:
    """Returns kind, unit and attributes of each metric that is emitted now."""
    found: dict[str, tuple[str, str, set[str]]] = {}
    for name, metric in collected.metrics().items():
        if isinstance(metric.data, Histogram):
            kind = "histogram"
        else:
            assert isinstance(metric.data, Sum)
            kind = "counter" if metric.data.is_monotonic else "level"
        keys = {key.removeprefix("penstock.") for point in metric.data.data_points for key in point.attributes or ()}
        found[name] = kind, metric.unit or "", keys
    return found


async def test_the_page_lists_exactly_what_is_emitted(collected: Collected) -> None:
    batched = doubling(batch=ps.Batch(4, max_wait_seconds=0))
    with leased(CompileCache(capacity=1)) as cache:
        for _ in range(2):
            called(cache, program(lambda x: x + 1), row(1))
    async with engine.Engine() as own:
        for x in (0, 3):
            with contextlib.suppress(ValueError):
                await own.run(whole(x))
            with contextlib.suppress(ValueError):
                assert [result async for result in own.stream([whole(x)])] == [3]
        async with own.deploy(whole, batched) as service, service.stream([whole(1)]) as results:
            await service.run(batched(row(1)))
            assert await anext(results) == 1
            assert emitted(collected) == listed()
