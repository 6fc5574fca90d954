"""`make soak MINUTES=10`: a deployment under load for a while, with faults, cancels and disconnects.

It measures the capacity of the deployment, then loads it with 0.8 and 1.5 times as much, in turns. Every call must have
one outcome, and memory, tasks, threads, children and files at rest must not grow from round to round. Exits with 1 if a
check fails.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from multiprocessing import resource_tracker

import structlog

from penstock import engine
from tests.soak.clients import OUTCOMES, Clients
from tests.soak.watch import Sample, growth
from tests.soak.world import GRAPHS, random_faults

LOADS = (0.8, 1.5)
# Rounds whose samples do not count, since pools and caches still fill.
WARM_UP_ROUNDS = 2
MAX_THREADS = 8
COLUMNS = ("round", "load", "calls/s", *OUTCOMES, "lost", "faults", "MiB", "tasks", "threads", "children", "files")


async def capacity(service: engine.Service[..., int], rng: random.Random, seconds: float) -> float:
    """Return how many calls a second the deployment finishes while more calls wait than it has places."""
    clients = Clients(service, rng)
    await clients.come(4000, seconds / 4)
    before, began = _ended(service), time.monotonic()
    await clients.come(4000, seconds)
    per_second = (_ended(service) - before) / (time.monotonic() - began)
    await clients.gone()
    return per_second


def _ended(service: engine.Service[..., int]) -> int:
    """Return the number of calls that have given their places back."""
    admission = service.statistics().admission
    return admission.admitted - admission.in_flight


async def soak(seconds: float, seed: int) -> list[str]:
    """Run the soak; return the failures that it found, one line each."""
    rng = random.Random(seed)
    wrong: list[str] = []
    samples: list[Sample] = []
    rounds = max(6, int(seconds / 15) // 2 * 2)
    measuring = min(4.0, seconds / 8)
    total: Counter[str] = Counter()
    resource_tracker.ensure_running()  # a helper process of the interpreter, which stays
    before = await Sample.take()
    with random_faults(rng) as injections:
        async with (
            engine.Engine(max_workers=MAX_THREADS) as own,
            own.deploy(*GRAPHS, max_in_flight=24, max_queue=24, max_restarts=50) as service,
        ):
            idle = await Sample.take()
            full = await capacity(service, rng, measuring)
            print(f"seed {seed}; capacity {full:.0f} calls/s; {rounds} rounds", flush=True)
            print(_row(COLUMNS), flush=True)
            for number in range(rounds):
                load = LOADS[number % 2]
                clients = Clients(service, rng)
                faults = sum(map(len, injections))
                refused = service.statistics().admission.refused
                began = time.monotonic()
                await clients.come(load * full, (seconds - measuring) / rounds)
                took = time.monotonic() - began
                await clients.gone()
                sample = await Sample.take()
                samples.append(sample)
                wrong += _wrong(clients, service, number, refused)
                total += clients.ledger.counts
                counts, happened = clients.ledger.counts, sum(map(len, injections)) - faults
                print(
                    _row(
                        (
                            number, load, round(counts["submitted"] / took), *(counts[kind] for kind in OUTCOMES),
                            clients.ledger.lost, happened, round(sample.rss_mib), sample.tasks, sample.threads,
                            sample.children, sample.descriptors,
                        )
                    ),
                    flush=True,
                )  # fmt: skip
        never = [repr(one) for one in injections if not one]
    after = await Sample.take()
    workers = len(os.sched_getaffinity(0))
    # Each worker process has a thread, a socket, a queue of three descriptors, and a handle to wait for it.
    bounds = Sample(
        0, idle.tasks, idle.threads + MAX_THREADS + workers, idle.children + workers, idle.descriptors + 5 * workers
    )
    wrong += growth(samples[WARM_UP_ROUNDS:], bounds)
    wrong += [f"after the end: {line}" for line in growth([after], before)[:4] if "memory" not in line]
    if seconds >= 60:  # in a shorter soak, a rare fault or outcome may not happen
        wrong += [f"no call was {one}, so nothing was shown about those" for one in OUTCOMES if not total[one]]
        wrong += [f"never happened: {line}" for line in never]
    return wrong


def _wrong(clients: Clients, service: engine.Service[..., int], number: int, refused_before: int) -> list[str]:
    ledger, statistics = clients.ledger, service.statistics()
    wrong = [f"round {number}: {surprise}" for surprise in ledger.surprises]
    if ledger.lost:
        wrong.append(f"round {number}: {ledger.lost} calls were lost, or had two outcomes")
    if statistics.admission.in_flight or statistics.admission.queued:
        wrong.append(f"round {number}: places are still taken: {statistics.admission}")
    wrong += [
        f"round {number}: {actor.in_flight} in flight and {actor.inbox.depth} queued in {actor.node!r} at rest"
        for actor in statistics.actors
        if actor.in_flight or actor.inbox.depth
    ]
    refused, told = statistics.admission.refused - refused_before, ledger.counts["refused"]
    # A client may leave in the same turn of the loop in which it is refused.
    if not told <= refused <= told + ledger.counts["cancelled"] + ledger.counts["expired"]:
        wrong.append(f"round {number}: {refused} calls were refused, and {told} clients were told")
    return wrong


def _row(cells: tuple[object, ...]) -> str:
    return " ".join(f"{cell!s:>{max(6, len(name))}}" for cell, name in zip(cells, COLUMNS, strict=True))


def main() -> int:
    """Run the soak with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--seed", type=int, default=None, help="of the clients and faults; drawn if not given")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio", help="event loop (asyncio)")
    arguments = parser.parse_args()
    structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
    seed = random.randrange(1 << 20) if arguments.seed is None else arguments.seed
    factory = asyncio.new_event_loop
    if arguments.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        wrong = runner.run(soak(arguments.minutes * 60, seed))
    for line in dict.fromkeys(wrong):
        print(f"FAILED {line}")
    if not wrong:
        print("passed: every call had one outcome, and nothing grew")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
