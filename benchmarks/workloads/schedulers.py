"""Schedulers side by side: one call of graphs of six shapes, with nodes that wait, and with nodes that do nothing."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import penstock as ps
from penstock import engine
from penstock.engine.options import ChosenScheduler

from ..harness import Contenders, Row, Sample, Workload

SCHEDULERS: tuple[ChosenScheduler, ...] = ("sequential", "wave", "parallel", "actors")
UNIT_SECONDS = 0.01
COST = "cost"


@dataclass(frozen=True)
class Shape:
    """A graph.

    Attributes:
        nodes: for each node, the earlier nodes that it reads, and for how many units of time it waits; the last node is
            the result.
    """

    nodes: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def longest_path(self) -> int:
        """The shortest possible time of a call, in units of time."""
        ends: list[int] = []
        for inputs, units in self.nodes:
            ends.append(max((ends[number] for number in inputs), default=0) + units)
        return ends[-1]

    def graph(self, *, waits: bool) -> ps.Graph[[int], int]:
        """Make the graph."""

        @ps.graph
        async def shaped(value: int) -> int:
            values: list[int] = []
            for inputs, units in self.nodes:
                values.append(await step([values[number] for number in inputs] or [value], units * waits))
            return values[-1]

        return shaped


@ps.node
async def step(values: list[int], units: int) -> int:
    if units:
        await asyncio.sleep(units * UNIT_SECONDS)
    return max(values)


def line(length: int) -> Shape:
    return Shape((((), 1), *(((number,), 1) for number in range(length - 1))))


def fan_out(branches: int) -> Shape:
    return Shape((((), 1), *(((0,), 1) for _ in range(branches)), (tuple(range(1, branches + 1)), 1)))


def diamonds(number: int) -> Shape:
    nodes: list[tuple[tuple[int, ...], int]] = [((), 1)]
    for _ in range(number):
        top = len(nodes) - 1
        nodes += [((top,), 1), ((top,), 1), ((top + 1, top + 2), 1)]
    return Shape(tuple(nodes))


def tree(leaves: int) -> Shape:
    nodes: list[tuple[tuple[int, ...], int]] = [((), 1)] * leaves
    nodes += [((first, first + 1), 1) for first in range(0, 2 * leaves - 2, 2)]
    return Shape(tuple(nodes))


def random_dag(length: int) -> Shape:
    """Return a graph in which each node reads up to three earlier nodes, and the last reads all unread nodes.

    A third of the nodes wait longer.
    """
    chooser = random.Random(3)
    nodes: list[tuple[tuple[int, ...], int]] = []
    for number in range(length - 1):
        inputs = chooser.sample(range(number), min(number, chooser.randrange(4)))
        nodes.append((tuple(inputs), chooser.choice([1, 1, 3])))
    unread = set(range(length - 1)).difference(*(inputs for inputs, _ in nodes))
    return Shape((*nodes, (tuple(unread), 1)))


def uneven(branches: int) -> Shape:
    """Return branches of the same total time, each with its slow node on another level."""
    nodes: list[tuple[tuple[int, ...], int]] = [((), 1)]
    ends: list[int] = []
    for branch in range(branches):
        for level in range(branches):
            nodes.append(((len(nodes) - 1 if level else 0,), 6 if level == branch else 1))
        ends.append(len(nodes) - 1)
    return Shape((*nodes, (tuple(ends), 1)))


SHAPES = {
    "line of 12": line(12),
    "fan-out of 16": fan_out(16),
    "4 diamonds": diamonds(4),
    "tree of 16 leaves": tree(16),
    "random, 40 nodes": random_dag(40),
    "4 uneven branches": uneven(4),
}

# `tables.py` and `picture.py` read these names.
CONTESTS = [f"{shape}, {scheduler}" for shape in SHAPES for scheduler in SCHEDULERS]


async def times_longest_path(shape: Shape, graph: ps.Graph[[int], int], scheduler: ChosenScheduler) -> float:
    """Return the time of a call over the time of its longest path."""
    began = time.perf_counter()
    await engine.run(graph(1), scheduler=scheduler)
    return (time.perf_counter() - began) / (shape.longest_path * UNIT_SECONDS)


async def microseconds_of_a_node(
    shape: Shape, graph: ps.Graph[[int], int], scheduler: ChosenScheduler, calls: int
) -> float:
    """Return the cost of a node that does nothing, in time of the loop's thread."""
    began = time.thread_time()
    for _ in range(calls):
        await engine.run(graph(1), scheduler=scheduler)
    return (time.thread_time() - began) / calls / len(shape.nodes) * 1e6


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    calls = 50 if quick else 200
    found: dict[str, Sample] = {}
    for name, shape in SHAPES.items():
        waiting, idle = shape.graph(waits=True), shape.graph(waits=False)
        for scheduler in SCHEDULERS:
            found[f"{name}, {scheduler}"] = partial(times_longest_path, shape, waiting, scheduler)
            found[f"{name}, {scheduler}, {COST}"] = partial(microseconds_of_a_node, shape, idle, scheduler, calls)
    yield found


SCHEDULING = Workload(
    name="schedulers",
    contenders=contenders,
    rows=(
        *(Row(title=f"{contest}: time over that of the longest path", subject=contest) for contest in CONTESTS),
        *(
            Row(title=f"{contest}: a node that does nothing", subject=f"{contest}, {COST}", unit="µs")
            for contest in CONTESTS
        ),
    ),
)
