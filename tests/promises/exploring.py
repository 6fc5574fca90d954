"""Many interleavings of one scenario; one command replays any of them.

A test takes the fixture `explore` and gives it an async function. Under each seed, the seeded loop draws the order of
steps, and `World.of_running_loop` draws the items, so the seed alone decides the run. The error of a failed run
contains the command that runs its seed again.
"""

import asyncio
import os
import random
import shlex
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from penstock import testing

T = TypeVar("T")

# The interleavings of each promise in `make test`. `make test-long` runs twice its effort as many, 20,000 or more.
INTERLEAVINGS = 250
SEED = "PENSTOCK_SEED"


class Explorer:
    """Runs scenarios for one test.

    Args:
        test: the test, as pytest names it on its command line.
        effort: multiplies the number of interleavings.
        only: the seed to replay; None for all of them.
    """

    def __init__(self, test: str, effort: int, only: int | None) -> None:
        self._test = test
        self._effort = effort
        self._only = only

    def __call__(
        self,
        main: Callable[[], Coroutine[Any, Any, T]],
        *,
        reaches: Mapping[str, Callable[[T], bool]] | None = None,
        count: int = INTERLEAVINGS,
    ) -> int:
        """Runs `main()` under `count` seeds, times the effort; returns the number of seeds.

        Each condition in `reaches` must hold for the result of at least one run: a check of a limit means nothing if no
        run reaches the limit. The names of the conditions are for the error.
        """
        effort = 1 if self._effort == 1 else 2 * self._effort
        seeds = range(count * effort) if self._only is None else [self._only]
        not_reached = dict(reaches or {})
        for seed in seeds:
            try:
                result = testing.run_seeded(main, seed=seed, timeout_seconds=3600)
            except BaseException as error:
                error.add_note(f"replay: {SEED}={seed} python -m pytest {shlex.quote(self._test)}")
                raise
            # Drop the result: 20,000 worlds would fill the memory.
            not_reached = {name: is_reached for name, is_reached in not_reached.items() if not is_reached(result)}
        if self._only is None:
            assert not not_reached, f"no interleaving reached: {', '.join(not_reached)}"
        return len(seeds)


def random_of_loop(*, has_eager_tasks: bool = False) -> random.Random:
    """Returns a generator that draws as the seed of the running loop says, so that one seed replays everything.

    With `has_eager_tasks`, some seeds use eager tasks, where Python has them.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, testing.SeededLoop)
    if has_eager_tasks and sys.version_info >= (3, 12) and loop.seed % 4 == 3:
        loop.set_task_factory(asyncio.eager_task_factory)
    return random.Random(loop.seed)


def seed_to_replay() -> int | None:
    """Returns the seed in the environment; None if there is none."""
    text = os.environ.get(SEED)
    return None if text is None else int(text)
