"""Interleaved rounds: every contender once a round, every second round in reverse order, all in one process.

A ratio of two samples taken next to each other cancels what both suffer alike (a busy neighbour, a slow clock); the
alternating order cancels what the first does to the second (ABBA). The control is one contender measured twice a
round as if it were two: the interval of its ratio to itself shows what this machine can tell apart at all.
"""

import gc
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from .summary import Interval, Limits, Verdict, interval, ratio, verdict

Sample = Callable[[], Awaitable[float]]
Contenders = Mapping[str, Sample]

CONTROL = "(the control again)"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a contender's own number, or its ratio to another's.

    Attributes:
        title: What is measured.
        subject: Name of the contender.
        reference: Name of the contender that it is divided by; None for the number itself.
        unit: What the number counts; empty for a plain ratio.
        limits: What the number is held against; None where it only informs.
    """

    title: str
    subject: str
    reference: str | None = None
    unit: str = ""
    limits: Limits | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Contenders that do the same work, and the rows that compare them.

    Attributes:
        name: What `--only` takes.
        contenders: Opens the contenders on the running loop; takes whether the run is a quick one.
        rows: The lines of the table.
        control: Name of the contender measured twice; None where a sample is too long to take it twice.
        rounds: Samples of each contender, and of a quick run.
        fresh_process: Whether every sample needs an interpreter of its own (resident memory does).
    """

    name: str
    contenders: Callable[[bool], AbstractAsyncContextManager[Contenders]]
    rows: tuple[Row, ...]
    control: str | None = None
    rounds: tuple[int, int] = (15, 5)
    fresh_process: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row with its number.

    Attributes:
        control: The control's ratio to itself in the same rounds.
        verdict: The best limit that is kept.
    """

    workload: str
    loop: str
    row: Row
    value: Interval
    control: Interval | None
    rounds: int
    verdict: Verdict


async def measure(workload: Workload, loop: str, *, quick: bool) -> list[Measured]:
    """Measures a workload on the running loop.

    Args:
        workload: What to measure.
        loop: The name of the running loop, for the table.
        quick: Whether to take fewer and shorter samples.
    """
    rounds = workload.rounds[1 if quick else 0]
    async with workload.contenders(quick) as contenders:
        samples = await _sample(contenders, workload.control, rounds)
    return evaluate(workload.name, workload.rows, loop, samples, workload.control)


async def _sample(contenders: Contenders, control: str | None, rounds: int) -> dict[str, list[float]]:
    entries = dict(contenders)
    if control is not None:
        entries[CONTROL] = entries[control]
    samples: dict[str, list[float]] = {name: [] for name in entries}
    for contender in contenders.values():
        await contender()  # warm-up: imports, traces, threads and caches are not what is measured
    for turn in range(rounds):
        order = list(entries)
        for name in order if turn % 2 == 0 else reversed(order):
            # The collector stays on, as it does for users; no row pays for the garbage of the one before.
            gc.collect()
            samples[name].append(await entries[name]())
    return samples


def evaluate(
    name: str, rows: Iterable[Row], loop: str, samples: Mapping[str, list[float]], control: str | None
) -> list[Measured]:
    """Samples of every contender, round by round, as rows with their numbers."""
    noise = ratio(samples[CONTROL], samples[control]) if control is not None and CONTROL in samples else None
    measured: list[Measured] = []
    for row in rows:
        subject = samples[row.subject]
        value = interval(subject) if row.reference is None else ratio(subject, samples[row.reference])
        measured.append(
            Measured(
                workload=name,
                loop=loop,
                row=row,
                value=value,
                control=noise,
                rounds=len(subject),
                verdict=verdict(value.median, row.limits),
            )
        )
    return measured
