"""Nodes on Ray: a program that runs all scenarios with one local Ray, and writes their results to a file.

`python -m tests.cluster.scenarios FILE`; a test for each scenario reads the file, so that Ray starts once.
"""

import asyncio
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from opentelemetry import trace

import penstock as ps
from penstock import cluster, engine
from tests.kit import values_of
from tests.workers.both import BOTH, ONE, WORKERS, children_end

Array = Any
SCENARIOS: list[Callable[[], Awaitable[None]]] = []
KEEPER = cluster.ray(workers=1, num_cpus=0, name="keeper")


def mark(name: str) -> None:
    Path(os.environ["PENSTOCK_TEST_FOLDER"], name).touch()


def marks() -> set[str]:
    return {one.name for one in Path(os.environ["PENSTOCK_TEST_FOLDER"]).iterdir()}


def scenario(fn: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    SCENARIOS.append(fn)
    return fn


@ps.node(runs_on=WORKERS)
def double(number: int) -> int:
    return 2 * number


@ps.node(runs_on=WORKERS)
async def later(number: int) -> tuple[int, str, int, int]:
    await asyncio.sleep(0.001)
    item = ps.current()
    return 10 * number, item.node, item.item, item.attempt


@ps.node(runs_on=WORKERS)
async def count(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield number


@ps.node(runs_on=WORKERS, batch=ps.Batch(4, max_wait_seconds=1))
def sizes(items: list[int]) -> list[int]:
    return [len(items) for _ in items]


@ps.node(runs_on=KEEPER)
def pid() -> int:
    return os.getpid()


@scenario
async def functions_coroutines_generators_and_batches_run_on_workers() -> None:
    @ps.graph
    async def both(number: int) -> tuple[int, tuple[int, str, int, int]]:
        return double(number), await later(number)

    async with engine.Engine() as e:
        found = await values_of(stream := e.stream(both(number) for number in range(50)))
        assert found == [(2 * number, (10 * number, "later", number, 1)) for number in range(50)], found
        figures = {one.name: one.value for one in stream.statistics().actors[0].figures}
        assert figures["calls"] == 50, figures
        assert [value async for value in e.stream(ps.graph(count)(1000))] == [*range(1000)]
        async with e.stream(ps.graph(count)(10**9)) as values:
            assert [await anext(values), await anext(values)] == [0, 1]
        async with e.deploy(ps.graph(sizes)) as service:
            assert await asyncio.gather(*map(service, range(4))) == [4] * 4


class Refused(Exception):
    pass


@ps.node(runs_on=WORKERS, retry=ps.Retry(2))
def second_time(number: int) -> int:
    if ps.current().attempt < 2:
        raise Refused(number)
    return number


@ps.node(runs_on=WORKERS)
def refuse(number: int) -> int:
    raise Refused(number)


@scenario
async def errors_are_those_of_the_node_with_their_remote_traceback() -> None:
    async with engine.Engine() as e:
        assert await e.run(ps.graph(second_time)(7)) == 7
        with pytest.raises(Refused) as found:
            await e.run(ps.graph(refuse)(8))
        assert found.value.args == (8,)
        assert "raise Refused(number)" in str(found.value.__cause__)


@ps.node(runs_on=ONE)
async def forks_on_the_loop(number: int) -> int:
    return os.fork()


@scenario
async def a_child_that_comes_back_from_a_coroutine_ends_and_answers_nothing() -> None:
    async with engine.Engine() as e:
        await children_end(e, ps.graph(forks_on_the_loop))


@ps.node(runs_on=WORKERS)
async def waits(number: int) -> int:
    try:
        mark("begun")
        await asyncio.sleep(600)
    finally:
        mark("cancelled")
    return number


@scenario
async def a_coroutine_is_cancelled_on_its_worker() -> None:
    async with engine.Engine() as e, e.deploy(ps.graph(waits)) as service:
        call = asyncio.ensure_future(service(1))
        while "begun" not in marks():
            await asyncio.sleep(0.01)
        call.cancel()
        await service.drain()  # waits until the worker has ended the call
        assert "cancelled" in marks()
        assert call.cancelled()


@ps.node(runs_on=WORKERS)
def make(size: int) -> Array:
    return np.ones(size)


@ps.node(runs_on=WORKERS)
def increase(array: Array) -> Array:
    assert not array.flags.writeable
    return array + 1


@ps.node
def seen(array: Array) -> tuple[float, bool]:
    return float(array.sum()), array.flags.writeable


@scenario
async def results_stay_on_workers_until_they_are_needed_here() -> None:
    chain = make >> increase >> increase >> seen
    async with engine.Engine() as e:
        for size in (10, 1_000_000):
            stream = e.stream([chain(size)])
            assert await values_of(stream) == [(3.0 * size, False)]
            by = {one.node: {figure.name: figure.value for figure in one.figures} for one in stream.statistics().actors}
            assert by["make"]["by value"] == 0
            assert by["increase"]["by reference"] > 8 * size
        assert await e.run(ps.graph(increase)(np.zeros(1_000_000))) is not None  # a large argument


@ps.node(runs_on=WORKERS)
def summed(array: Array) -> float:
    return float(array.sum())


def received() -> int:
    """Returns how many bytes the networks of this machine have received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[0]) for line in lines if ":" in line)


def memory() -> int:
    """Returns how many bytes this process holds."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@scenario
async def no_byte_of_an_array_passes_the_driver() -> None:
    count, size = 6, 5_000_000

    chain = make >> increase >> summed
    async with engine.Engine() as e:
        assert await e.run(chain(size)) == 2 * size
        before, held, most = received(), memory(), 0
        async for each in e.stream(chain(size) for _ in range(count)):
            assert each == 2 * size
            most = max(most, memory())
        moved = received() - before
    assert moved < 2 * count * 8 * size / 20
    assert most - held < 8 * size


@ps.device_node(runs_on=WORKERS)
def tells_whether_traced(number: Any) -> Any:
    return number * 2 if isinstance(number, float) else number * 3  # compiled code gets a tracer, which is no float


@ps.device_node(runs_on=WORKERS, device="cpu", batch=ps.Batch(4, max_wait_seconds=1))
def scaled(array: Array) -> Array:
    return 2 * array


@scenario
async def a_device_node_is_compiled_in_the_worker() -> None:
    async with engine.Engine() as e:
        assert float(await e.run(ps.graph(tells_whether_traced)(2.0))) == 6
        async with e.deploy(ps.graph(scaled)) as service:
            found = await asyncio.gather(*(service(np.full(3, number, np.float32)) for number in range(4)))
        assert [one.tolist() for one in found] == [[2.0 * number] * 3 for number in range(4)]


@ps.node(runs_on=WORKERS, effectful="unordered")
async def tells(number: int) -> int:
    await ps.emit(f"begin {number}")
    await ps.emit(f"end {number}")
    return number


@ps.resource
async def where() -> AsyncIterator[int]:
    yield os.getpid()


@ps.node(runs_on=WORKERS)
def is_here(opened_in: int) -> bool:
    return opened_in == os.getpid()


@ps.node(runs_on=WORKERS)
def traced() -> tuple[int, float | None]:
    return trace.get_current_span().get_span_context().trace_id, ps.current().remaining_seconds()


@scenario
async def events_resources_deadlines_and_traces_reach_workers() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())

    @ps.graph
    async def with_resource() -> bool:
        return is_here(await where())

    async with engine.Engine() as e:
        assert [event.value async for event in e.stream(ps.graph(tells)(1), events=str)] == ["begin 1", "end 1"]
        assert await e.run(with_resource())
        with trace.get_tracer("test").start_as_current_span("call") as span:
            trace_id, remaining = await e.run(ps.graph(traced)(), timeout_seconds=50)
        assert trace_id == span.get_span_context().trace_id
        assert remaining is not None
        assert 0 < remaining <= 50


@scenario
async def what_cannot_be_placed_is_an_error_that_says_what_was_asked() -> None:
    nowhere = cluster.ray(workers=1, resources={"gold": 1}, placement_timeout_seconds=2)

    @ps.node(runs_on=nowhere, name="digs")
    def digs(number: int) -> int:
        return number

    async with engine.Engine() as e:
        with pytest.raises(
            ps.ClusterError, match=r"it needs .*resources=\{'gold': 1\}, and of the cluster is free: CPU"
        ):
            await e.run(ps.graph(digs)(1))


async def whole() -> dict[str, str]:
    """Runs all scenarios while one Engine keeps Ray running; returns the traceback of each, "" for success."""
    outcomes: dict[str, str] = {}
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.excepthook
    root = [*logging.getLogger().handlers]
    async with engine.Engine() as keeper:
        await keeper.run(ps.graph(pid)())
        for number, each in enumerate([*SCENARIOS, *map(_of_both, BOTH)]):
            new = [asyncio.new_event_loop, uvloop.new_event_loop][number % 2]
            began = time.monotonic()
            try:
                await asyncio.to_thread(_run, each, new)
                outcomes[each.__name__] = ""
            except Exception:  # noqa: BLE001 - its test shows it
                outcomes[each.__name__] = traceback.format_exc()
            print(each.__name__, f"{time.monotonic() - began:.1f} s", outcomes[each.__name__], flush=True)
    ray: Any = importlib.import_module("ray")
    outcomes["it_ends"] = "Ray goes on" if ray.is_initialized() else ""
    found = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.excepthook
    if found != handlers or logging.getLogger().handlers != root:
        outcomes["it_ends"] += f" {found} were {handlers}"
    return outcomes


def _of_both(each: Callable[[str, Path], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await each("cluster", Path(tempfile.mkdtemp(dir=os.environ["PENSTOCK_TEST_FOLDER"])))

    run.__name__ = each.__name__
    return run


def _run(each: Callable[[], Awaitable[None]], new: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        await asyncio.wait_for(each(), 90)

    with asyncio.Runner(loop_factory=new) as runner:
        runner.run(main())


if __name__ == "__main__":
    os.environ["PENSTOCK_TEST_FOLDER"] = sys.argv[1]
    scenarios = importlib.import_module("tests.cluster.scenarios")  # workers import the scenarios under this name
    Path(sys.argv[1], "outcomes.json").write_text(json.dumps(asyncio.run(scenarios.whole())))
