"""How many calls a worker may have ahead, against a model of workers in virtual time."""

import random
from collections import deque

import pytest

from penstock.extension import CallsAhead

AHEAD_SECONDS = CallsAhead.OVERDUE_SECONDS / 2


class Model:
    """A worker that runs its calls one after the other, in virtual time, and the figures that it should have."""

    def __init__(self, means: dict[str, float]) -> None:
        self.ahead, self.means = CallsAhead(means), means
        self.calls: deque[tuple[str, float, float]] = deque()  # the name, the expected time and the real time
        self.began = 0.0

    def check(self, name: str, now: float) -> bool:
        """Compare all figures, and return whether there is room for a call."""
        expected = sum(call[1] for call in self.calls)
        assert (self.ahead.count, self.ahead.seconds) == (len(self.calls), pytest.approx(expected))
        due = self.ahead.overdue_at()
        assert due == (self.began + 2 * AHEAD_SECONDS if len(self.calls) > 1 else None)
        total = expected + self.means.get(name, AHEAD_SECONDS)
        room = not self.calls or (total <= AHEAD_SECONDS and now - self.began <= AHEAD_SECONDS)
        assert self.ahead.has_room(name, now) == room
        return room


@pytest.mark.parametrize("seed", range(8))
def test_any_calls_are_given_taken_back_and_counted_as_in_a_model(seed: int, effort: int) -> None:
    rng, means, now = random.Random(seed), dict[str, float](), 0.0
    workers = [Model(means) for _ in range(3)]
    for _ in range(300 * effort):
        worker, name = rng.choice(workers), rng.choice("abc")
        now += rng.choice((0, 0, 0.0001, 0.002, 0.02))
        if worker.check(name, now) and rng.random() < 0.8:
            if not worker.calls:
                worker.began = now
            expected = worker.ahead.sent(name, now)
            assert expected == means.get(name, AHEAD_SECONDS)
            worker.calls.append((name, expected, rng.choice((0.0001, 0.0008, 0.003, 0.04))))
        elif worker.calls and now >= worker.began + worker.calls[0][2]:
            name, expected, seconds = worker.calls.popleft()
            before = means.get(name, seconds)
            worker.ahead.ended(expected, now)
            worker.ahead.took(name, seconds)
            assert means[name] == pytest.approx(before * 7 / 8 + seconds / 8)
            worker.began = now
        elif (due := worker.ahead.overdue_at()) is not None and now >= due:
            while len(worker.calls) > 1:
                worker.ahead.taken_back(worker.calls.pop()[1])
            assert worker.ahead.overdue_at() is None
        worker.check(rng.choice("abc"), now)
