"""Interleaved rounds: every contender once a round, every second round in reverse order, all in one process.

A ratio of two samples taken next to each other cancels disturbances of both (a busy neighbour, a slow clock). The
alternating order cancels the influence of the first sample on the second (ABBA). The control is one contender that is
measured twice a round: the interval of its ratio to itself shows the smallest difference that this machine can tell.
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
    """One line of the table: a contender's own number, or its ratio to the number of another contender.

    Attributes:
        title: What the line measures.
        subject: The name of the contender.
        reference: The name of the contender to divide by; None for the number itself.
        unit: The unit of the number; empty for a plain ratio.
        limits: The limits of the number; None for a number without limits.
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
        name: The name of the workload, for `--only`.
        contenders: Opens the contenders on the running loop; its argument says whether the run is quick.
        rows: The lines of the table.
        control: The name of the contender that is measured twice; None if samples are too long for that.
        rounds: How many samples of each contender a full run takes, and a quick run.
        fresh_process: Whether every sample needs an interpreter of its own, as for resident memory.
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
        control: The ratio of the control to itself in the same rounds.
        verdict: The best limit that the number keeps.
    """

    workload: str
    loop: str
    row: Row
    value: Interval
    control: Interval | None
    rounds: int
    verdict: Verdict


async def measure(workload: Workload, loop: str, *, quick: bool) -> list[Measured]:
    """Measure a workload on the running loop.

    Args:
        workload: The workload.
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
        await contender()  # a warm-up: imports, traces, threads and caches are not measured
    for turn in range(rounds):
        order = list(entries)
        for name in order if turn % 2 == 0 else reversed(order):
            # The collector stays on, as for users; but no sample pays for the garbage of the sample before.
            gc.collect()
            samples[name].append(await entries[name]())
    return samples


def evaluate(
    name: str, rows: Iterable[Row], loop: str, samples: Mapping[str, list[float]], control: str | None
) -> list[Measured]:
    """Turn the samples of every contender, round by round, into rows with numbers."""
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
