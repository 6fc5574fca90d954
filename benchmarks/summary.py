"""From samples to a number with its spread: medians and bootstrap intervals, and whether a limit is met."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

RESAMPLES = 2_000

Verdict = Literal["aim", "must", "missed", ""]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A limit that must be kept, and an aim; either may be None. Upper bounds, or lower bounds if `at_least`."""

    must: float | None = None
    aim: float | None = None
    at_least: bool = False


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median, and the range with the medians of 95 % of the resampled runs."""

    median: float
    low: float
    high: float


def interval(samples: Sequence[float]) -> Interval:
    """Return the median of `samples` with a bootstrap interval of 95 %.

    The percentile bootstrap (Efron, 1979): medians of samples drawn with replacement. The seed is fixed, so that the
    same samples always print the same interval.
    """
    if len(samples) == 1:
        return Interval(median=samples[0], low=samples[0], high=samples[0])
    chooser = random.Random(0)
    medians = sorted(statistics.median(chooser.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    return Interval(
        median=statistics.median(samples), low=medians[RESAMPLES // 40], high=medians[RESAMPLES - RESAMPLES // 40 - 1]
    )


def ratio(subject: Sequence[float], reference: Sequence[float]) -> Interval:
    """Return the median ratio of paired samples, on a logarithmic scale: 2x and 0.5x are equally far from 1."""
    logs = interval([math.log(a / b) for a, b in zip(subject, reference, strict=True)])
    return Interval(median=math.exp(logs.median), low=math.exp(logs.low), high=math.exp(logs.high))


def verdict(value: float, limits: Limits | None) -> Verdict:
    """Return the best limit that `value` keeps, "aim" or "must"; "missed" for neither, and empty without a must."""
    if limits is None:
        return ""
    if limits.aim is not None and _keeps(value, limits.aim, limits):
        return "aim"
    if limits.must is None:
        return ""
    return "must" if _keeps(value, limits.must, limits) else "missed"


def _keeps(value: float, limit: float, limits: Limits) -> bool:
    return value >= limit if limits.at_least else value <= limit
