"""`python -m benchmarks.looks`: what one live look a second costs a process, verdict included, pair by pair.

One process runs one workload. Each pair has three sides, in an order that turns: nobody looks, nobody looks again (the
control), and a client in a process of its own looks once a second, as `penstock top` does. On each side, the process
measures how much processor time an item takes, all of its threads included, and by how much the event loop is late at
worst.
"""

import argparse
import asyncio
import contextlib
import itertools
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import penstock as ps
from penstock import engine, telemetry
from penstock.telemetry.live import protocol

from . import report
from .summary import ratio

LIMIT = 1.03
LATE_LIMIT_SECONDS = 0.005
SIDES = ("alone", "control", "looked at")
STEPS, SCOPES, CALLERS = 300, 50, 64
_LAG_SECONDS = 0.002


@ps.node
async def passing(number: int) -> int:
    return number


@ps.node
async def waiting(number: int) -> int:
    await asyncio.sleep(0)
    return number


@ps.node(concurrency=64)
async def limited(number: int) -> int:
    await asyncio.sleep(0)
    return number


@ps.graph
async def chain(number: int) -> int:
    for _ in range(10):
        number = await passing(number)
    return number


@ps.graph
async def waiting_chain(number: int) -> int:
    for _ in range(10):
        number = await waiting(number)
    return number


@ps.graph
async def wide(number: int) -> list[int]:
    found: list[int] = []
    for _ in range(STEPS // 10):
        value = number
        for _ in range(10):
            value = await limited(value)
        found.append(value)
    return found


@ps.node
async def answered(number: int) -> int:
    await asyncio.sleep(0.005)
    return number


# Runs items until a time of `perf_counter`, and returns how many.
Work = Callable[[float], Awaitable[int]]


async def _stream(graph: ps.Graph[[int], int], until: float) -> int:
    def calls() -> Iterator[ps.Call[int]]:
        number = 0
        while time.perf_counter() < until:
            yield graph(number)
            number += 1

    count = 0
    async with engine.stream(calls()) as results:
        async for _ in results:
            count += 1
    return count


async def _call(service: engine.Service[[int], Any], until: float) -> int:
    count = 0
    while time.perf_counter() < until:
        await service(count)
        count += 1
    return count


@contextlib.asynccontextmanager
async def _streaming(graph: ps.Graph[[int], int]) -> AsyncGenerator[Work, None]:
    yield lambda until: _stream(graph, until)


@contextlib.asynccontextmanager
async def _called(graph: ps.Graph[[int], Any], scopes: int = 1, callers: int = 1) -> AsyncGenerator[Work, None]:
    """Open some scopes of a graph, of which at most two are called; the others stay idle."""
    async with contextlib.AsyncExitStack() as stack:
        services = [await stack.enter_async_context(engine.deploy(graph, max_in_flight=callers)) for _ in range(scopes)]
        calling = [service for service in services[:2] for _ in range(callers)]

        async def work(until: float) -> int:
            return sum(await asyncio.gather(*[_call(service, until) for service in calling]))

        yield work


@contextlib.asynccontextmanager
async def _served() -> AsyncGenerator[Work, None]:
    with engine.tuned_for_serving():
        async with _called(ps.graph(answered), callers=CALLERS) as work:
            yield work


WORKLOADS: dict[str, Callable[[], contextlib.AbstractAsyncContextManager[Work]]] = {
    "chain": lambda: _streaming(chain),
    "waiting chain": lambda: _streaming(waiting_chain),
    f"{CALLERS} callers": lambda: _called(chain, callers=CALLERS),
    f"{SCOPES} scopes of {STEPS} steps": lambda: _called(wide, scopes=SCOPES),
    f"tuned for serving, {CALLERS} callers": _served,
}
# Nothing is measured while a client begins: its first looks read all scopes, and later looks have their usual pace.
_SETTLE_SECONDS = 0.5
_FIRST_LOOKS = 3


async def _measure(work: Work, seconds: float) -> dict[str, float]:
    """Return the processor time of an item, and by how much the loop was late at worst."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_LAG_SECONDS)
            lags.append(time.perf_counter() - began - _LAG_SECONDS)

    watching = asyncio.ensure_future(watch())
    began = time.process_time()
    count = await work(time.perf_counter() + seconds)
    used = time.process_time() - began
    watching.cancel()
    return {"item": used / count, "late": max(lags)}


async def _measure_pairs(
    name: str, pairs: int, seconds: float, switch: Callable[[bool], Callable[[], bool]]
) -> dict[str, list[dict[str, float]]]:
    """Return what was measured on each side, pair by pair.

    Args:
        name: the workload.
        pairs: how many pairs.
        seconds: how long each side of a pair is measured.
        switch: has the client look, or not; returns a function that says whether the first looks are over.
    """
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    async with WORKLOADS[name]() as work:
        for turn in range(pairs):
            first = turn % len(SIDES)
            for side in (*SIDES[first:], *SIDES[:first]):
                print(f"\r{name}: {side}, pair {turn + 1} of {pairs}   ", end="", file=sys.stderr, flush=True)
                is_ready = switch(side == SIDES[2])
                await work(time.perf_counter() + _SETTLE_SECONDS)
                while not is_ready():
                    await work(time.perf_counter() + _SETTLE_SECONDS)
                taken[side].append(await _measure(work, seconds))
    return taken


def _look_when_told(path: str) -> None:
    """Look once a second while the last line on the standard input is "on", and write a line after the first looks."""
    for line in sys.stdin:
        if line == "on\n":
            with contextlib.closing(protocol.Client(path)) as client:
                for number in itertools.count(1):
                    client.look()
                    if number == _FIRST_LOOKS:
                        print("ready", flush=True)
                    if select.select([sys.stdin], [], [], 1.0)[0]:
                        break


def _measure_in_pairs(name: str, pairs: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder, telemetry.expose(Path(folder, "socket")) as path:
        command = [sys.executable, "-m", "benchmarks.looks", "--client", str(path)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            told, answered = client.stdin, client.stdout

            def switch(is_on: bool) -> Callable[[], bool]:
                told.write("on\n" if is_on else "off\n")
                return lambda: not is_on or bool(select.select([answered], [], [], 0)[0] and answered.readline())

            try:
                return asyncio.run(_measure_pairs(name, pairs, seconds, switch))
            finally:
                told.close()


def main() -> int:
    """Return 1 if a look costs more than the limits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.looks", description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each side of a pair (default: %(default)s)")
    parser.add_argument("--only", default="", help="workloads whose name begins with this")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.client:
        _look_when_told(chosen.client)
        return 0
    lines: list[tuple[str, ...]] = []
    for name in [name for name in WORKLOADS if name.startswith(chosen.only)]:
        taken = _measure_in_pairs(name, chosen.pairs, chosen.seconds)
        items = {side: [one["item"] for one in samples] for side, samples in taken.items()}
        late = {side: statistics.median([one["late"] for one in samples]) for side, samples in taken.items()}
        cost, control = ratio(items["looked at"], items["alone"]), ratio(items["control"], items["alone"])
        is_met = cost.high <= LIMIT and late["looked at"] - late["alone"] <= LATE_LIMIT_SECONDS
        lates = [f"{1e3 * late[side]:.1f} ms" for side in ("alone", "looked at")]
        lines.append((name, *report.of_ratio(cost), *report.of_ratio(control), *lates, "must" if is_met else "missed"))
    print(file=sys.stderr)
    columns = ("workload", "looked at", "95 % interval", "control", "95 % interval", "late", "looked at", "met")
    report.print_table(f"processor time of an item with a look a second, {chosen.pairs} pairs", columns, lines)
    return 1 if any(line[-1] == "missed" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
