"""Ray: actors called one into the other, and the same actors as a compiled graph.

Every actor is a process. Sixteen items are in flight in the chain, 64 for `io`; a compiled graph has no async actors
and no threads, so it is in `chain` and `call` only.
"""

import os
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Read when Ray is imported: nothing leaves this machine.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.dag import InputNode

from ..baselines import calls, pools
from ..baselines.chain import BUFFER
from ..harness import Contenders
from .shared import BRANCHES, IO_IN_FLIGHT, IO_ITEMS, STAGES, THREAD_ITEMS, THREADS, joined, per_item

ACTORS = "Ray, actors"
COMPILED = "Ray, compiled graph"
BRANCH_ACTORS = 4  # each runs eight branches: with 32 processes, memory would limit the speed


@ray.remote(num_cpus=0)
class Stage:
    def pass_on(self, value: int) -> int:
        return value

    def join(self, *parts: int) -> int:
        return calls.join(parts)


@ray.remote(num_cpus=0, max_concurrency=IO_IN_FLIGHT)
class Waiting:
    async def wait(self, value: int) -> int:
        return await pools.wait_for_io(value)


@ray.remote(num_cpus=0, max_concurrency=THREADS)
class Threaded:
    def sleep(self, value: int) -> int:
        return pools.release_by_sleeping(value)


async def windowed_seconds(submit, items: int, in_flight: int) -> float:
    """Yield results in input order, with at most `in_flight` unanswered calls."""
    window = deque()
    total = 0
    started = time.perf_counter()
    for value in range(items):
        if len(window) == in_flight:
            total += ray.get(window.popleft())
        window.append(submit(value))
    while window:
        total += ray.get(window.popleft())
    assert total == sum(range(items))
    return time.perf_counter() - started


async def call_seconds(submit, items: int) -> float:
    started = time.perf_counter()
    for value in range(items):
        assert ray.get(submit(value)) == joined(value)
    return time.perf_counter() - started


@asynccontextmanager
async def cluster() -> AsyncIterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def open_chain(quick: bool) -> AsyncIterator[Contenders]:
    async with cluster():
        stages = [Stage.remote() for _ in range(STAGES)]

        def submit(value: int):
            for stage in stages:
                value = stage.pass_on.remote(value)
            return value

        with InputNode() as node:
            for stage in [Stage.remote() for _ in range(STAGES)]:
                node = stage.pass_on.bind(node)
        compiled = node.experimental_compile(_max_inflight_executions=BUFFER)
        actor_items, compiled_items = (50, 200) if quick else (200, 1_000)
        try:
            yield {
                ACTORS: per_item(actor_items, lambda items: windowed_seconds(submit, items, BUFFER)),
                COMPILED: per_item(compiled_items, lambda items: windowed_seconds(compiled.execute, items, BUFFER)),
            }
        finally:
            compiled.teardown()


@asynccontextmanager
async def open_call(quick: bool) -> AsyncIterator[Contenders]:
    async with cluster():
        branches = [Stage.remote() for _ in range(BRANCH_ACTORS)]
        last = Stage.remote()

        def submit(value: int):
            return last.join.remote(
                *[branches[index % BRANCH_ACTORS].pass_on.remote(value) for index in range(BRANCHES)]
            )

        compiled_branches = [Stage.remote() for _ in range(BRANCH_ACTORS)]
        compiled_last = Stage.remote()
        with InputNode() as node:
            parts = [compiled_branches[index % BRANCH_ACTORS].pass_on.bind(node) for index in range(BRANCHES)]
            total = compiled_last.join.bind(*parts)
        compiled = total.experimental_compile()
        items = 10 if quick else 50
        try:
            yield {
                ACTORS: per_item(items, lambda items: call_seconds(submit, items)),
                COMPILED: per_item(items, lambda items: call_seconds(compiled.execute, items)),
            }
        finally:
            compiled.teardown()


@asynccontextmanager
async def open_io(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    async with cluster():
        waiting = Waiting.remote()
        yield {ACTORS: lambda: windowed_seconds(waiting.wait.remote, IO_ITEMS, IO_IN_FLIGHT)}


@asynccontextmanager
async def open_threads(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    async with cluster():
        threaded = Threaded.remote()
        yield {ACTORS: lambda: windowed_seconds(threaded.sleep.remote, THREAD_ITEMS, THREADS)}


WORKLOADS = {"chain": open_chain, "call": open_call, "io": open_io, "threads": open_threads}
