"""Dispatch of calls to simulated workers in virtual time: each call has one outcome, whatever happens."""

import asyncio
import math
from collections import Counter
from random import Random
from time import process_time
from typing import Any

import pytest

import penstock as ps
from penstock import cluster, testing
from penstock.cluster import Call, Dispatcher
from tests.cluster.simulated import Simulated
from tests.kit import virtual


class Cluster:
    """A dispatcher with simulated workers, and callers that count their outcomes."""

    def __init__(self, seed: int, most: int, dies: float = 0.0, refuses: int = 0) -> None:
        self.transport = Simulated(Random(seed), dies, refuses)
        self.dispatcher = self.transport.dispatcher = Dispatcher(self.transport, most)
        self.outcomes: Counter[str] = Counter()
        self.begun = 0

    async def call(self, seconds: float, answer: Any = None, *, is_coroutine: bool = False, name: str = "f") -> Any:
        future = asyncio.get_running_loop().create_future()
        call = Call(name, (seconds, answer), future, is_coroutine, self._begun)
        self.outcomes["submitted"] += 1
        self.dispatcher.submit(call)
        try:
            found = await future
        except asyncio.CancelledError:
            self.outcomes["cancelled"] += 1
            await self.dispatcher.cancel(call)
            raise
        except Exception as error:
            self.outcomes[type(error).__name__] += 1
            raise
        self.outcomes["results"] += 1
        return found

    def _begun(self) -> None:
        self.begun += 1


@virtual
async def test_answers_go_to_their_callers_and_short_functions_are_sent_ahead() -> None:
    cluster = Cluster(0, most=4)
    found = await asyncio.gather(*(cluster.call(0.001, number) for number in range(500)))
    assert found == [*range(500)]
    assert cluster.transport.most_workers == 4
    assert cluster.transport.most_together <= 4
    assert cluster.begun >= 500  # the driver counts two starts for a call that was taken back
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(cluster.call(0.001) for _ in range(1000)))
    # If no calls were sent ahead, each call would also take its way to the worker and back, 2.2 ms on average.
    assert asyncio.get_running_loop().time() - began < 0.5
    await cluster.dispatcher.aclose()


@virtual
async def test_what_waits_behind_a_long_function_is_taken_back_for_another_worker() -> None:
    cluster = Cluster(1, most=2)
    # Teaches the dispatcher the mean duration.
    await asyncio.gather(*(cluster.call(0.001, name="short") for _ in range(200)))
    long = asyncio.ensure_future(cluster.call(60.0, name="short"))
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(cluster.call(0.001, name="short") for _ in range(50)))
    assert asyncio.get_running_loop().time() - began < 1.0
    assert await long is None
    await cluster.dispatcher.aclose()


@virtual
async def test_a_worker_that_dies_fails_what_had_begun_there_and_what_waits_goes_to_another() -> None:
    cluster = Cluster(2, most=1)
    calls = [asyncio.ensure_future(cluster.call(1.0, number)) for number in range(5)]
    await asyncio.sleep(2)
    [worker] = cluster.dispatcher.workers
    cluster.transport._die(worker, "it crashed")
    first, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, ps.WorkerDied)
    assert "died while it ran 'f': it crashed" in str(first)
    assert others == [1, 2, 3, 4]  # no calls are sent ahead of a call that takes a second
    await cluster.dispatcher.aclose()


@virtual
async def test_a_cancelled_function_loses_its_worker_and_no_other_call() -> None:
    cluster = Cluster(3, most=1)
    await asyncio.gather(*(cluster.call(0.001) for _ in range(100)))
    long = asyncio.ensure_future(cluster.call(1e6))
    short = [asyncio.ensure_future(cluster.call(0.001, number)) for number in range(10)]
    await asyncio.sleep(0.01)
    long.cancel()
    assert await asyncio.gather(*short) == [*range(10)]
    with pytest.raises(asyncio.CancelledError):
        await long
    assert cluster.dispatcher.died == 0
    await cluster.dispatcher.aclose()


@virtual
async def test_coroutines_run_beside_each_other_and_beside_a_function() -> None:
    cluster = Cluster(4, most=2)
    began = asyncio.get_running_loop().time()
    many = [cluster.call(1.0, number, is_coroutine=True) for number in range(2 * 64 + 1)]
    found = await asyncio.gather(cluster.call(3.0, "function"), *many)
    assert found == ["function", *range(2 * 64 + 1)]
    assert 3 < asyncio.get_running_loop().time() - began < 5.5
    await cluster.dispatcher.aclose()


@virtual
async def test_calls_fail_if_no_worker_can_be_placed_and_wait_if_one_can() -> None:
    none = Cluster(5, most=2, refuses=2)
    found = await asyncio.gather(none.call(1.0), none.call(1.0), return_exceptions=True)
    assert [str(one) for one in found] == ["no room", "no room"]
    assert await none.call(1.0, "later") == "later"
    some = Cluster(6, most=2, refuses=1)
    assert [*await asyncio.gather(some.call(1.0, 1), some.call(1.0, 2))] == [1, 2]
    await none.dispatcher.aclose()
    await some.dispatcher.aclose()
    with pytest.raises(ps.EngineClosedError):
        await some.call(1.0)


@pytest.mark.parametrize("seed", range(12))
@virtual
async def test_each_call_has_one_outcome_whoever_dies_or_leaves(seed: int, effort: int) -> None:
    for further in range(effort):
        random = Random(100 * seed + further)
        cluster = Cluster(random.randrange(10**6), most=random.randint(1, 5), dies=random.choice([0.0, 0.02, 0.2]))
        calls: list[asyncio.Task[Any]] = []
        for _ in range(200):
            seconds = random.choice([0.0001, 0.001, 0.01, 0.1, 3.0])
            is_coroutine, name = random.random() < 0.3, random.choice("ab")
            calls.append(asyncio.ensure_future(cluster.call(seconds, is_coroutine=is_coroutine, name=name)))
            if random.random() < 0.2:
                random.choice(calls).cancel()
            if random.random() < 0.3:
                await asyncio.sleep(random.uniform(0, 0.05))
        if random.random() < 0.3:
            await asyncio.sleep(random.uniform(0, 2))
            await cluster.dispatcher.aclose()
        await asyncio.gather(*calls, return_exceptions=True)
        outcomes = cluster.outcomes
        assert outcomes["submitted"] == outcomes.total() - outcomes["submitted"]
        assert outcomes["submitted"] + sum(call.cancelled() for call in calls) - outcomes["cancelled"] == 200
        await cluster.dispatcher.aclose()
        assert cluster.dispatcher.workers == set() == cluster.transport.alive
        assert cluster.transport.together == 0


@pytest.mark.timed
def test_a_thousand_workers_cost_the_driver_no_more_for_a_call() -> None:
    seconds: dict[int, float] = {}
    for most in (10, 1000):

        async def main(most: int = most) -> None:
            cluster = Cluster(7, most)
            await asyncio.gather(*(cluster.call(0.05) for _ in range(2 * most)))
            assert cluster.transport.most_workers == most
            before = process_time()
            await asyncio.gather(*(cluster.call(0.05) for _ in range(3_000)))
            seconds[most] = process_time() - before
            await cluster.dispatcher.aclose()

        testing.run_virtual(main)
    assert seconds[1000] < 8 * seconds[10]  # a search through all workers would take 100 times as long


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [("workers", value, "a whole number of at least 1") for value in (0, -1, "2", 2.5, True)]
    + [("num_cpus", value, "a finite number that is not negative") for value in (-2, math.nan)]
    + [("num_gpus", "1", "a finite number that is not negative")],
)
def test_a_number_of_workers_cores_or_gpus_that_makes_no_sense_is_refused(
    option: str, value: Any, accepted: str
) -> None:
    options: dict[str, Any] = {"workers": 2, option: value}
    with pytest.raises(ps.OptionsError, match=f"{option}={value!r}: {accepted}"):
        cluster.ray(**options)
