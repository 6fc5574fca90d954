"""The speed rows: seconds of the workloads that a change of the hot paths may slow down."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from statistics import median

import penstock as ps
from penstock import engine

from .baselines.calls import call_from_many, call_in_turn, median_call_seconds
from .harness import Sample
from .servers import process
from .servers.__main__ import PENSTOCK, ROWS
from .workloads.fan_out import BRANCHES, suspending_fan_out
from .workloads.graphs import chain, plain_chain, stream_seconds

Samples = dict[str, Sample]

NODES = 10
CALLERS = 64
TEXTS = 200


def same(value: int) -> int:
    return value


def spin(value: int) -> int:
    """Compute for 0.6 ms."""
    until = time.perf_counter() + 0.0006
    while time.perf_counter() < until:
        pass
    return value


def hold_the_loop(value: int) -> int:
    """Hold the event loop for 40 ms with one item of fifty."""
    if not value % 50:
        time.sleep(0.04)
    return value


def make_bytes(size: int) -> bytes:
    return bytes(size)


async def pass_on(value: int) -> int:
    return value


async def wait_once(value: int) -> int:
    await asyncio.sleep(0)
    return value


@ps.node
class Echo(ps.Actor[int, int]):
    async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
        while True:
            work = await inbox.get()
            work.finish(work.value)


# A microsecond, so that the second attempt begins in the next turn of the loop, and the row measures work, not waiting.
@ps.node(hedge=ps.Hedge(after_seconds=1e-6, max_share=1))
async def let_second_win(attempts: list[asyncio.Event]) -> None:
    attempts.append(asyncio.Event())
    if len(attempts) == 1:
        await attempts[0].wait()


@ps.node(retry=ps.Retry(attempts=2))
async def count(value: int) -> AsyncIterator[int]:
    for number in range(value):
        yield number


@ps.graph
async def counted(value: int) -> AsyncIterator[int]:
    return count(value)


def with_policies(function: Callable[[int], Awaitable[int]]) -> ps.Graph[[int], int]:
    return chain(NODES, ps.node(concurrency=16, timeout_seconds=60, retry=ps.Retry(attempts=2))(function))


@asynccontextmanager
async def on_the_loop() -> AsyncIterator[Samples]:
    cached, hundred = chain(NODES, ps.node(cache=ps.Cache(max_bytes=1_000_000))(pass_on)), chain(100)

    async def cache_hits() -> float:
        began = time.perf_counter()
        async with engine.stream(cached(1) for _ in range(2_000)) as results:
            async for _ in results:
                pass
        return time.perf_counter() - began

    async def wire() -> None:
        async with engine.deploy(hundred):
            pass

    async def start() -> float:
        began = time.perf_counter()
        async with engine.Engine(max_processes=2) as own, own.deploy(ps.graph(in_processes)) as service:
            await asyncio.gather(*map(service, range(4)))
            return time.perf_counter() - began

    in_processes, spinning = ps.node(runs_on="process")(same), ps.graph(ps.node(runs_on="process")(spin))
    async with (
        engine.deploy(ps.graph(ps.node(runs_on="process")(make_bytes))) as making,
        engine.deploy(chain(NODES)) as deployed,
        engine.deploy(suspending_fan_out) as fan_out,
        engine.deploy(ps.graph(ps.node(runs_on="thread")(same))) as in_thread,
        engine.deploy(ps.graph(in_processes)) as in_process,
        engine.deploy(ps.graph(Echo())) as own_loop,
        engine.deploy(ps.graph(let_second_win)) as hedged,
        engine.deploy(counted) as streaming,
    ):

        async def first_value() -> None:
            async with streaming.stream(counted(100)) as values:
                await anext(values)

        yield {
            "chain": partial(stream_seconds, chain(NODES), 8_000),
            "waiting chain": partial(stream_seconds, chain(NODES, ps.node(concurrency=16)(wait_once)), 1_500),
            "plain chain": partial(stream_seconds, plain_chain(NODES), 12_000),
            "deployed call": partial(call_from_many, deployed, 6_000, CALLERS),
            "suspended fan-out": partial(call_in_turn, fan_out, 300, lambda value: BRANCHES * value),
            "stream item": partial(stream_seconds, chain(1), 20_000),
            "timeout and retry": partial(stream_seconds, with_policies(pass_on), 2_000),
            "timeout and retry, suspended": partial(stream_seconds, with_policies(wait_once), 1_000),
            "thread call": partial(median_call_seconds, partial(in_thread, 1), 1_000),
            "process call": partial(median_call_seconds, partial(in_process, 1), 1_000),
            "processes, streamed": partial(stream_seconds, ps.graph(in_processes), 2_000),
            "processes, 0.6 ms streamed": partial(stream_seconds, spinning, 1_000),
            "processes, beside 40 ms on the loop": partial(stream_seconds, spinning >> ps.node(hold_the_loop), 500),
            "start of two processes": start,
            "400 MB of bytes from a process": partial(median_call_seconds, partial(making, 400_000_000), 2),
            "actor that owns its loop": partial(median_call_seconds, partial(own_loop, 1), 2_000),
            "cache hit": cache_hits,
            "hedged call": partial(median_call_seconds, lambda: hedged([]), 1_000),
            "first value of a stream with retry": partial(median_call_seconds, first_value, 1_000),
            "wiring of 100 nodes": partial(median_call_seconds, wire, 50),
        }


@asynccontextmanager
async def on_a_device() -> AsyncIterator[Samples]:
    import jax
    import numpy as np

    from examples.embedding import embed

    from .devices.batching import WIDTH, call_batched
    from .encoders.shared import IN_FLIGHT, documents

    @ps.device_node(device="cpu")
    def tiny(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    x = jax.device_put(np.ones(16, np.float32))
    row = np.ones(WIDTH, np.float32)
    texts = documents(TEXTS)
    async with (
        engine.deploy(ps.graph(tiny)) as small,
        engine.deploy(call_batched, max_in_flight=2 * CALLERS) as batched,
        engine.deploy(embed, max_in_flight=IN_FLIGHT) as embedding,
    ):

        async def caller() -> None:
            for _ in range(20):
                await batched(row)

        async def many_callers() -> float:
            began = time.perf_counter()
            await asyncio.gather(*(caller() for _ in range(CALLERS)))
            return time.perf_counter() - began

        async def embed_all() -> float:
            began = time.perf_counter()
            async with embedding.stream((embed(text) for text in texts), ordered=False) as vectors:
                assert len([vector async for vector in vectors]) == TEXTS
            return time.perf_counter() - began

        yield {
            "device latency": partial(median_call_seconds, partial(small, x), 400),
            "64 batched callers": many_callers,
            "embedding": embed_all,
        }


@asynccontextmanager
async def in_a_tuned_server() -> AsyncIterator[Samples]:
    """Give seconds for a request under load by wrk; each sample is a new process, which is warmed up."""

    async def one(row: str) -> float:
        with process.server(PENSTOCK, row, tuned=True) as (url, pid):
            process.ask(url)
            process.load(url, pid, 1)
            return 1 / process.load(url, pid, 2).requests_per_second

    yield {f"server, {row}": partial(one, row) for row in ROWS}


async def measured(*, servers: bool) -> dict[str, float]:
    """Return the seconds of each row, on the running loop, with the `penstock` that this process imports."""
    taken: dict[str, float] = {}
    for opened in (in_a_tuned_server,) if servers else (on_the_loop, on_a_device):
        async with opened() as rows:
            for name, sample in rows.items():
                if servers:
                    taken[name] = await sample()
                    continue
                await sample()  # a warm-up: imports, traces, threads and caches are not measured
                taken[name] = median([await sample() for _ in range(3)])
    return taken
