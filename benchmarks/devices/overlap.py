"""Loading and computing that take equally long: how well they overlap."""

import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import data, engine
from penstock.devices import select

from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .device import DEVICE, repeats

SIZE = 256


def computation(count: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ x), x)


def loading_seconds(items: int, pause: float) -> float:
    began = time.perf_counter()
    for _ in range(items):
        time.sleep(pause)
    return time.perf_counter() - began


@dataclass
class Slow:
    """Data in which each record takes `pause` seconds to read."""

    items: int
    pause: float
    value: "np.ndarray[tuple[int, int], np.dtype[np.float32]]"

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
        time.sleep(self.pause)
        return self.value


def seconds_by_hand(source: Slow, compiled: Callable[[jax.Array], jax.Array]) -> float:
    """Return the seconds of a loop by hand: a thread loads and places two records ahead, and this thread computes."""
    device = select(DEVICE)
    ahead: queue.Queue[jax.Array] = queue.Queue(2)

    def read() -> None:
        for index in range(len(source)):
            ahead.put(jax.device_put(source[index], device))

    began = time.perf_counter()
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(len(source)):
        compiled(ahead.get()).block_until_ready()
    reader.join()
    return time.perf_counter() - began


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    items = 30 if quick else 100
    x = np.ones((SIZE, SIZE), np.float32) / SIZE
    compute = computation(repeats(computation, x, 0.003))
    compiled, step = jax.jit(compute), ps.device_node(device=DEVICE, pure=False, name="compute")(compute)
    placed = jax.device_put(x, select(DEVICE))
    compiled(placed).block_until_ready()
    seconds: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        compiled(placed).block_until_ready()
        seconds.append(time.perf_counter() - began)
    pause = median(seconds)

    @ps.node(runs_on="thread", concurrency=1)
    def load(number: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
        time.sleep(pause)  # stands for a disk or a network, and needs no processor
        return x

    @ps.graph
    async def train(number: int) -> jax.Array:
        return step(load(number))

    async def pipeline() -> float:
        began = time.perf_counter()
        async with engine.stream((train(number) for number in range(items)), max_in_flight=8) as results:
            async for _ in results:
                pass
        return time.perf_counter() - began

    @ps.node
    def value_of(record: data.Record[jax.Array]) -> jax.Array:
        return record.value

    @ps.graph
    async def training(source: Slow) -> AsyncIterator[jax.Array]:
        placed = data.order(source, shuffle_seed=0) >> data.read(source) >> data.to_device(DEVICE)
        return placed >> value_of >> step

    async def feed() -> float:
        began = time.perf_counter()
        async with engine.stream(training(Slow(items, pause, x))) as results:
            async for _ in results:
                pass
        return time.perf_counter() - began

    async def by_hand() -> float:
        return seconds_by_hand(Slow(items, pause, x), compiled)

    async def slower() -> float:
        """Return the seconds of the slower of the two, alone."""
        began = time.perf_counter()
        for _ in range(items):
            compiled(x).block_until_ready()
        computing = time.perf_counter() - began
        return max(computing, loading_seconds(items, pause))

    yield {"pipeline": pipeline, "feed": feed, "by hand": by_hand, "slower": slower}


OVERLAP = Workload(
    name="overlap",
    contenders=contenders,
    rows=(
        Row(
            title="load and compute of equal length, over the slower one",
            subject="pipeline",
            reference="slower",
            limits=Limits(must=1.1, aim=1.05, at_least=False),
        ),
        Row(
            title="the same as a feed, by data.to_device",
            subject="feed",
            reference="slower",
            limits=Limits(must=1.12, at_least=False),
        ),
        Row(title="the same by hand, in two threads", subject="by hand", reference="slower"),
        Row(title="the feed over the one by hand", subject="feed", reference="by hand"),
    ),
)
