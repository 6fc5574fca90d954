"""Run an async function on virtual time, under one seed, or under many seeds."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ._seeded_loop import SeededLoop
from ._virtual_clock import VirtualClockLoop

T = TypeVar("T")


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, timeout_seconds: float | None = None) -> T:
    """Run `main()` on a new `VirtualClockLoop`, as `asyncio.run` does, and close the loop.

    Args:
        main: an async function without parameters.
        timeout_seconds: after how many virtual seconds `main` is cancelled; None without a limit. Virtual time passes
            only when all tasks are blocked, so a deadlock takes no real time and raises at once. Leave it None if
            `main` waits for threads that the loop does not know (see `VirtualClockLoop`).

    Returns:
        The result of `main`.

    Raises:
        TimeoutError: `main` did not finish within `timeout_seconds`.
    """
    return _run(VirtualClockLoop, main, timeout_seconds)


def run_seeded(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int, timeout_seconds: float | None = None) -> T:
    """Run `main()` on a new `SeededLoop`: the same seed gives the same interleaving of its tasks.

    Args:
        main: an async function without parameters.
        seed: the seed, which chooses the interleaving.
        timeout_seconds: the limit for one run, as in `run_virtual`.

    Returns:
        The result of `main`.

    Raises:
        TimeoutError: `main` did not finish within `timeout_seconds`.
    """
    return _run(functools.partial(SeededLoop, seed), main, timeout_seconds)


def interleavings(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    count: int,
    first_seed: int = 0,
    timeout_seconds: float | None = 3600.0,
) -> list[T]:
    """Run `main()` under `count` seeds, one after the other; the error of a failed run says how to replay the run.

    Args:
        main: an async function without parameters; called anew for each seed.
        count: how many seeds to use, from `first_seed` upwards.
        first_seed: the first seed.
        timeout_seconds: as in `run_virtual`, but with a default, so that a deadlock raises an error that names the
            seed. Pass None if `main` waits for threads that the loop does not know.

    Returns:
        The results of `main`, in the order of the seeds.

    Raises:
        BaseException: the first exception of `main`, with a note that names the seed.
    """
    results: list[T] = []
    for seed in range(first_seed, first_seed + count):
        try:
            results.append(run_seeded(main, seed=seed, timeout_seconds=timeout_seconds))
        except BaseException as error:
            error.add_note(f"under seed {seed}; replay with penstock.testing.run_seeded(main, seed={seed})")
            raise
    return results


def _run(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    main: Callable[[], Coroutine[Any, Any, T]],
    timeout_seconds: float | None,
) -> T:
    async def within_timeout() -> T:
        async with asyncio.timeout(timeout_seconds):
            return await main()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(within_timeout())
