"""Nodes on Ray beside Ray by hand, on this machine: `make bench-cluster`. It needs the extra `penstock[ray]`.

The driver by hand uses asyncio and a pool of actors without coroutines. It passes references between steps, and has up
to 32 calls ahead. Rounds alternate, and the driver by hand is measured twice: the difference of the two is noise.
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from statistics import median, quantiles
from typing import Any

import numpy as np

import penstock as ps
from penstock import cluster, engine

WORKERS = cluster.ray(workers=2, num_cpus=0, name="bench: two workers")
FOUR = cluster.ray(workers=4, num_cpus=0, name="bench: four workers")
Measure = Callable[[], Awaitable[float]]


@ps.node(runs_on=WORKERS)
def nothing(number: int) -> int:
    return number


@ps.node(runs_on=FOUR)
def five_ms(number: int) -> int:
    time.sleep(0.005)
    return number


@ps.node(runs_on=WORKERS)
def make(number: int) -> Any:
    return np.full(6_250_000, float(number))


@ps.node(runs_on=WORKERS)
def more(array: Any) -> Any:
    return array + 1


@ps.node(runs_on=WORKERS)
def total(array: Any) -> float:
    return float(array[0])


@ps.graph
async def three(number: int) -> float:
    return total(more(make(number)))


@ps.node(runs_on=WORKERS)
async def values(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield number


class ByHand:
    """The same work without Penstock."""

    def __init__(self, ray: Any) -> None:
        class Actor:
            def nothing(self, number: int) -> int:
                return number

            def five_ms(self, number: int) -> int:
                time.sleep(0.005)
                return number

            def make(self, number: int) -> Any:
                return np.full(6_250_000, float(number))

            def more(self, array: Any) -> Any:
                return array + 1

            def total(self, array: Any) -> float:
                return float(array[0])

            def values(self, most: int) -> Any:
                for number in range(most):  # noqa: UP028 - Ray calls `send` on this generator
                    yield number

        self.actors = [ray.remote(num_cpus=0)(Actor).remote() for _ in range(4)]

    async def calls(self, name: str, actors: int, count: int, ahead: int) -> float:
        numbers, places = iter(range(count)), asyncio.Semaphore(ahead)

        async def lane(method: Any) -> None:
            for number in numbers:
                async with places:
                    await method.remote(number)

        began = time.perf_counter()
        methods = [getattr(actor, name) for actor in self.actors[:actors]]
        await asyncio.gather(*(lane(methods[number % actors]) for number in range(ahead)))
        return count / (time.perf_counter() - began)

    async def three(self) -> float:
        one, two = self.actors[:2]
        began = time.perf_counter()
        for number in range(4):
            assert await one.total.remote(two.more.remote(one.make.remote(number))) == number + 1
        return 4 / (time.perf_counter() - began)

    async def values(self) -> float:
        method = self.actors[0].values.options(num_returns="streaming", _generator_backpressure_num_objects=16)
        began, found = time.perf_counter(), 0
        async for each in method.remote(1000):
            found += await each == found
        assert found == 1000
        return 1000 / (time.perf_counter() - began)


async def of_a_stream(e: engine.Engine, graph: Any, count: int, most: int) -> float:
    began, found = time.perf_counter(), 0
    async with e.stream((graph(number) for number in range(count)), max_in_flight=most) as results:
        async for _ in results:
            found += 1
    assert found == count
    return count / (time.perf_counter() - began)


async def of_values(e: engine.Engine) -> float:
    began = time.perf_counter()
    async with e.stream(ps.graph(values)(20_000)) as found:
        assert len([value async for value in found]) == 20_000
    return 20_000 / (time.perf_counter() - began)


async def compare(name: str, ours: Measure, by_hand: Measure, rounds: int, must: float) -> None:
    ratios: list[float] = []
    control: list[float] = []
    for number in range(rounds + 1):
        first, ours_now, second = await by_hand(), await ours(), await by_hand()
        if number:  # the first round starts workers
            ratios.append(2 * ours_now / (first + second))
            control.append(first / second)
    low, _, high = quantiles(ratios, n=4)
    print(f"| {name} | {median(ratios):.2f} | {low:.2f} to {high:.2f} | {median(control):.2f} | {must} |", flush=True)


async def main(rounds: int) -> None:
    ray: Any = import_module("ray")
    ray.init(include_dashboard=False, num_cpus=4, _node_ip_address="127.0.0.1", log_to_driver=False)
    hand = ByHand(ray)
    print("| a second, over by hand | median | quartiles | by hand over itself | must |")
    print("| --- | --- | --- | --- | --- |")
    async with engine.Engine() as e:
        count = 1000
        rows: list[tuple[str, Measure, Measure, float]] = [
            ("no-op calls, 64 in flight", lambda: of_a_stream(e, ps.graph(nothing), count, 64),
             lambda: hand.calls("nothing", 2, count, 64), 0.85),
            ("calls of 5 ms on 4 workers", lambda: of_a_stream(e, ps.graph(five_ms), 400, 64),
             lambda: hand.calls("five_ms", 4, 400, 32), 0.85),
            ("three nodes over 50 MB", lambda: of_a_stream(e, three, 4, 1), hand.three, 0.77),
            ("values of a generator", lambda: of_values(e), hand.values, 5.0),
        ]  # fmt: skip
        for name, ours, by_hand, must in rows:
            await compare(name, ours, by_hand, rounds, must)
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    asyncio.run(main(parser.parse_args().rounds))
