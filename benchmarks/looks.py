"""`python -m benchmarks.looks`: what one live look a second costs a process, verdict included, pair by pair.

Each round is three processes in an order that turns: nobody looks, nobody looks again (the control), and a client in a
process of its own looks once a second, as `penstock top` does. A process runs one workload for some seconds and says
how much processor time an item took, all of its threads included, and by how much the event loop was late at worst.
"""

import argparse
import asyncio
import contextlib
import json
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
# The client starts its interpreter, and its first look begins the counting, before anything is measured.
_WARM_SECONDS = 2.0


async def _measure(name: str, seconds: float) -> dict[str, float]:
    """Return the processor time of an item, and by how much the loop was late at worst, once all is warm."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_LAG_SECONDS)
            lags.append(time.perf_counter() - began - _LAG_SECONDS)

    async with WORKLOADS[name]() as work:
        await work(time.perf_counter() + _WARM_SECONDS)
        watching = asyncio.ensure_future(watch())
        began = time.process_time()
        count = await work(time.perf_counter() + seconds)
        used = time.process_time() - began
        watching.cancel()
    return {"item": used / count, "late": max(lags)}


def _sample(name: str, seconds: float, *, looks: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, telemetry.expose(Path(folder, "socket")) as path:
        command = [sys.executable, "-m", "penstock", "top", str(path), "--json"]
        with contextlib.ExitStack() as stack:
            if looks:
                client = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
                stack.callback(client.terminate)
            return asyncio.run(_measure(name, seconds))


def _sample_in_child(name: str, side: str, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.looks", "--sample", name, "--seconds", str(seconds)]
    child = subprocess.run(
        [*command, *["--looks"] * (side == SIDES[2])], capture_output=True, text=True, check=True
    )  # fmt: skip
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Return 1 if a look costs more than the limits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.looks", description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each sample (default: %(default)s)")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    parser.add_argument("--looks", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.sample:
        print(json.dumps(_sample(chosen.sample, chosen.seconds, looks=chosen.looks)))
        return 0
    lines: list[tuple[str, ...]] = []
    for name in [name for name in WORKLOADS if chosen.only in name]:
        taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for turn in range(chosen.pairs):
            first = turn % len(SIDES)
            for side in (*SIDES[first:], *SIDES[:first]):
                print(f"\r{name}: {side}, pair {turn + 1} of {chosen.pairs}   ", end="", file=sys.stderr, flush=True)
                taken[side].append(_sample_in_child(name, side, chosen.seconds))
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
