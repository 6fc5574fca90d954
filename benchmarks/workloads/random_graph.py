"""One call of a random layered graph of 100 nodes: the cost of a node in a graph without regular structure."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import penstock as ps
from penstock import engine

from ..baselines.chain import Stage
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits

LAYERS = 11
WIDTH = 9
NODES = LAYERS * WIDTH + 1


def random_layers(seed: int) -> list[list[tuple[int, int]]]:
    """Return for every node the two nodes of the layer before that it reads; each node has a reader."""
    chooser = random.Random(seed)
    return [[(left, chooser.randrange(WIDTH)) for left in chooser.sample(range(WIDTH), WIDTH)] for _ in range(LAYERS)]


async def larger_by_hand(left: int, right: int) -> int:
    return max(left, right)


@ps.node
async def larger(left: int, right: int) -> int:
    return max(left, right)


@ps.node
def largest(values: list[int]) -> int:
    return max(values)


def build(layers: list[list[tuple[int, int]]]) -> ps.Graph[[int], int]:
    @ps.graph
    async def layered(value: int) -> int:
        values = [value] * WIDTH
        for layer in layers:
            values = [await larger(values[left], values[right]) for left, right in layer]
        return largest(values)

    return layered


def awaited_in_turn(layers: list[list[tuple[int, int]]]) -> Stage:
    """Return a call by hand in which nodes run one after the other: the floor."""

    async def call(value: int) -> int:
        values = [value] * WIDTH
        for layer in layers:
            values = [await larger_by_hand(values[left], values[right]) for left, right in layer]
        return max(values)

    return call


def gathered(layers: list[list[tuple[int, int]]]) -> Stage:
    """Return a call by hand with one `asyncio.gather` a layer: its nodes run together, and wait for each other."""

    async def call(value: int) -> int:
        values = [value] * WIDTH
        for layer in layers:
            values = await asyncio.gather(*[larger_by_hand(values[left], values[right]) for left, right in layer])
        return max(values)

    return call


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    layers = random_layers(seed=3)
    graph = build(layers)
    calls = 100 if quick else 500

    async def run(value: int) -> int:
        return await engine.run(graph(value))

    def microseconds_per_node(call: Stage) -> Sample:
        async def sample() -> float:
            started = time.perf_counter()
            for value in range(calls):
                assert await call(value) == value
            return (time.perf_counter() - started) / calls / NODES * 1e6

        return sample

    yield {
        "run": microseconds_per_node(run),
        "gather": microseconds_per_node(gathered(layers)),
        "in turn": microseconds_per_node(awaited_in_turn(layers)),
    }


RANDOM_GRAPH = Workload(
    name="random-graph",
    contenders=contenders,
    control="gather",
    rows=(
        Row(
            title="random graph of 100 nodes, engine.run, per node",
            subject="run",
            unit="µs",
            limits=Limits(must=4, aim=2),
        ),
        Row(title="the same by hand, one gather a layer", subject="gather", unit="µs"),
        Row(title="the same awaited in turn", subject="in turn", unit="µs"),
    ),
)
