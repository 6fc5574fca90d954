"""Many interleavings of one scenario, each replayable by one command.

A test takes the fixture `explore` and gives it an async function. Under each seed, the seeded loop draws the order of
steps, and `World.of_running_loop` the items, so the seed alone decides what happens. When one fails, the error says
which command runs that seed again, and nothing else.
"""

import os
import shlex
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from penstock import testing

T = TypeVar("T")

# What `make test` tries for each promise; `make test-long` multiplies it by twice its effort, to 20,000 or more.
INTERLEAVINGS = 250
SEED = "PENSTOCK_SEED"


class Explorer:
    """Runs scenarios for one test.

    Args:
        test: the test, as pytest names it on its command line.
        effort: how many times more interleavings.
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
        """Runs `main()` under `count` seeds, times the effort; returns how many those were.

        At least one of them has to come to each of `reaches`, conditions of what `main` returns by their names: a check
        means nothing where its limit is never reached.
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
            # Nothing else of it is kept: 20,000 worlds would fill the memory.
            not_reached = {name: is_reached for name, is_reached in not_reached.items() if not is_reached(result)}
        if self._only is None:
            assert not not_reached, f"no interleaving reached: {', '.join(not_reached)}"
        return len(seeds)


def seed_to_replay() -> int | None:
    """Returns the seed that the environment asks for; None if it asks for none."""
    text = os.environ.get(SEED)
    return None if text is None else int(text)
