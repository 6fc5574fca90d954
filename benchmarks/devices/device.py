"""The device that is measured: the device of `select("auto")`, or the device that PENSTOCK_BENCH_DEVICE names."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax

from penstock.devices import select

DEVICE = os.environ.get("PENSTOCK_BENCH_DEVICE", "auto")


def repeats(make: Callable[[int], Callable[[Any], Any]], x: Any, at_least_seconds: float) -> int:
    """Return how often to repeat arithmetic, so that a program takes at least a given time on this device.

    Args:
        make: returns the function with a given number of repeats.
        x: the argument of the function.
        at_least_seconds: how long one call takes at least, in seconds.
    """
    count, x = 1, jax.device_put(x, select(DEVICE))
    while True:
        compiled = jax.jit(make(count))
        compiled(x).block_until_ready()
        began = time.perf_counter()
        for _ in range(3):
            compiled(x).block_until_ready()
        if time.perf_counter() - began >= 3 * at_least_seconds:
            return count
        count *= 2
