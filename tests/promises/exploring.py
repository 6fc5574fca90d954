"""Many interleavings of one scenario, each replayable by one command.

A test takes the fixture `explore` and gives it an async function. Under each seed, the seeded loop draws the order of
steps, and `World.of_running_loop` the items, so the seed alone decides what happens. When one fails, the error says
which command runs that seed again, and nothing else.
"""

import os
import shlex
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from penstock import testing

T = TypeVar("T")

# What `make test` tries for each promise; `make test-long` multiplies it by its effort, to 20,000 or more.
INTERLEAVINGS = 500
SEED = "PENSTOCK_SEED"


class Explored(Generic[T]):
    """What a scenario returned under each seed."""

    def __init__(self, results: list[T], *, is_replay: bool) -> None:
        self.results = results
        self._is_replay = is_replay

    def reached(self, what: str, is_reached: Callable[[T], bool]) -> None:
        """Fails if no interleaving came there: a check means nothing where its limit is never reached."""
        assert self._is_replay or any(map(is_reached, self.results)), f"no interleaving reached this: {what}"


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

    def __call__(self, main: Callable[[], Coroutine[Any, Any, T]], *, count: int = INTERLEAVINGS) -> Explored[T]:
        """Runs `main()` under `count` seeds, times the effort."""
        seeds = range(count * self._effort) if self._only is None else [self._only]
        results: list[T] = []
        for seed in seeds:
            try:
                results.append(testing.run_seeded(main, seed=seed, timeout_seconds=3600))
            except BaseException as error:
                error.add_note(f"replay: {SEED}={seed} python -m pytest {shlex.quote(self._test)}")
                raise
        return Explored(results, is_replay=self._only is not None)


def seed_to_replay() -> int | None:
    """Returns the seed that the environment asks for; None if it asks for none."""
    text = os.environ.get(SEED)
    return None if text is None else int(text)
