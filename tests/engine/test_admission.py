"""Admission against plain lists: who holds a place, who waits, who is refused, and what the measured rate says."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest
import uvloop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import penstock as ps
from penstock import Overloaded, engine
from penstock.engine.admission import Admission
from penstock.testing import SeededLoop, run_virtual, wait_quiescent


class HandClock:
    """What admission asks of a loop, with a clock that tests move."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.create_future = loop.create_future
        self.now = 0.0

    def time(self) -> float:
        return self.now


@dataclass(eq=False)
class Caller:
    priority: int
    patient: bool
    state: str = "new"  # then waiting, admitted, holding, refused or gone
    cancelled: bool = False


class AdmissionMachine(RuleBasedStateMachine):
    """Callers come, hold a place, leave, give up; the loop runs only when a rule lets it."""

    new_loop: Callable[[int], asyncio.AbstractEventLoop]

    @initialize(
        seed=st.integers(0, 1000),
        max_in_flight=st.integers(1, 3),
        max_queue=st.sampled_from([None, 0, 1, 2]),
    )
    def open(self, seed: int, max_in_flight: int, max_queue: int | None) -> None:
        self.loop = self.new_loop(seed)
        self.clock = HandClock(self.loop)
        self.max_in_flight = max_in_flight
        self.max_queue = max_queue
        self.admission = Admission(cast(asyncio.AbstractEventLoop, self.clock), max_in_flight, max_queue)
        self.in_flight = self.holding = self.refused = self.admitted = 0
        self.line: list[Caller] = []
        self.left = 0  # of the calls that were in flight when all places were taken
        self.held = 0.0  # seconds for which places were held since one of these ended
        self.together: list[tuple[float, int]] = []  # calls that ended together, and how long that took, newest first
        self.callers: dict[asyncio.Task[None], Caller] = {}

    @rule(
        priority=st.sampled_from([0, 0, 1, -1]),
        patient=st.sampled_from([False, False, False, True]),
        number=st.integers(1, 3),
        run=st.booleans(),
    )
    def callers_come(self, priority: int, patient: bool, number: int, run: bool) -> None:
        for _ in range(number):
            caller = Caller(priority, patient)
            self.callers[self.loop.create_task(self.call(caller))] = caller
        if run:
            self.loop.run_until_complete(asyncio.sleep(0))

    async def call(self, caller: Caller) -> None:
        if self.in_flight < self.max_in_flight:
            self.model_take(caller)
        elif self.max_queue is not None and len(self.line) >= self.max_queue and not caller.patient:
            caller.state = "refused"
            self.refused += 1
        else:
            caller.state = "waiting"
            self.line.append(caller)
        retry_after_seconds = self.expected_seconds(len(self.line) + 1)
        try:
            await self.admission.reserve(caller.priority, "search", patient=caller.patient)
        except Overloaded as refusal:
            assert caller.state == "refused"
            self.check_refusal(refusal, retry_after_seconds)
        except asyncio.CancelledError:
            if caller.state == "admitted":
                self.model_pass_on()
            elif caller in self.line:
                self.line.remove(caller)
            caller.state = "gone"
            raise
        else:
            assert caller.state == "admitted"
            caller.state = "holding"
            self.holding += 1

    def check_refusal(self, refusal: Overloaded, retry_after_seconds: object) -> None:
        assert "'search'" in str(refusal)
        assert refusal.retry_after_seconds == retry_after_seconds

    @rule()
    def a_caller_that_does_not_wait_comes(self) -> None:
        free = self.in_flight < self.max_in_flight
        assert self.admission.reserve_nowait() == free
        if free:
            self.model_take(Caller(0, False))
            self.holding += 1

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds
        if self.left:
            self.held += seconds * self.in_flight

    @precondition(lambda self: self.holding)
    @rule()
    def a_caller_leaves(self) -> None:
        if self.left:
            seconds, self.held = self.held / self.max_in_flight, 0.0
            if not self.together or seconds > 0.1 * self.mean_seconds():
                self.together.insert(0, (seconds, 1))
            else:
                before, calls = self.together[0]
                self.together[0] = before + seconds, calls + 1
        self.holding -= 1
        self.model_pass_on()
        self.admission.release()

    @precondition(lambda self: self.callers)
    @rule(number=st.integers(0, 10))
    def a_caller_gives_up(self, number: int) -> None:
        task, caller = [*self.callers.items()][number % len(self.callers)]
        task.cancel()
        caller.cancelled = caller.state == "waiting"

    def model_take(self, caller: Caller) -> None:
        caller.state = "admitted"
        self.in_flight += 1
        self.admitted += 1
        if self.in_flight == self.max_in_flight:
            self.left = self.max_in_flight

    def model_pass_on(self) -> None:
        self.in_flight -= 1
        while self.line:
            caller = max(self.line, key=lambda caller: caller.priority)  # the earliest of the highest priority
            self.line.remove(caller)
            if not caller.cancelled:
                self.model_take(caller)
                return
        self.left = max(0, self.left - 1)
        self.held = self.held if self.left else 0.0

    def expected_seconds(self, calls: int) -> object:
        return pytest.approx(calls * self.mean_seconds()) if self.together else None

    def mean_seconds(self) -> float:
        """Of the calls so far, each counting a little less than those that ended after it."""
        fade = 1 - 1 / max(10, 2 * self.max_in_flight)
        weight, weighted_seconds, weighted_calls = 1.0, 0.0, 0.0
        for age, (seconds, calls) in enumerate(self.together):
            weight *= fade**calls if age else 1.0
            weighted_seconds += weight * seconds
            weighted_calls += weight * calls
        return weighted_seconds / weighted_calls

    @rule()
    def come_to_rest(self) -> None:
        self.loop.run_until_complete(wait_quiescent())
        for task in [task for task in self.callers if task.done()]:
            self.callers.pop(task)
            if not task.cancelled():
                task.result()
        assert self.in_flight == self.holding
        assert set(self.callers.values()) == set(self.line)
        assert not self.line or self.in_flight == self.max_in_flight  # nobody waits while a place is free

    @invariant()
    def statistics_are_as_expected(self) -> None:
        statistics = self.admission.statistics()
        assert statistics.in_flight == self.in_flight <= self.max_in_flight
        assert statistics.queued == len(self.line)
        assert (statistics.admitted, statistics.refused) == (self.admitted, self.refused)
        rate, seconds = statistics.calls_per_second, self.expected_seconds(1)
        if rate is not None:
            assert 1 / rate == seconds
        else:
            assert seconds is None or seconds == 0

    def teardown(self) -> None:
        try:
            self.come_to_rest()
            while self.holding:
                self.a_caller_leaves()
                self.come_to_rest()
            assert not self.callers
            assert self.admission.statistics().in_flight == 0
        finally:
            self.loop.close()


LOOPS: dict[str, Callable[[int], asyncio.AbstractEventLoop]] = {
    "asyncio": lambda seed: asyncio.new_event_loop(),
    "uvloop": lambda seed: uvloop.new_event_loop(),
    "seeded": SeededLoop,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_admission_behaves_like_a_counter_with_a_line_before_it(loop: str) -> None:
    class OnLoop(AdmissionMachine):
        new_loop = staticmethod(LOOPS[loop])

    usual = settings.default
    assert usual is not None
    run_state_machine_as_test(OnLoop, settings=settings(usual, max_examples=2 * usual.max_examples))


def admission(max_in_flight: int, max_queue: int | None = None) -> tuple[Admission, HandClock]:
    clock = HandClock(asyncio.get_running_loop())
    return Admission(cast(asyncio.AbstractEventLoop, clock), max_in_flight, max_queue), clock


async def test_the_rate_of_calls_that_begin_and_end_together_is_that_of_a_round() -> None:
    entrance, clock = admission(32)
    while entrance.reserve_nowait():
        pass
    for _ in range(20):
        clock.now += 2.0
        for _ in range(32):
            entrance.release()
            assert entrance.reserve_nowait()  # the next one begins at once
    assert entrance.statistics().calls_per_second == pytest.approx(16)  # 32 in two seconds


@pytest.mark.parametrize("together", [1, 2, 16])
@pytest.mark.parametrize("pause", [0.0, 0.001, 1000.0])
async def test_the_rate_is_right_when_places_are_filled_again_later(together: int, pause: float) -> None:
    entrance, clock = admission(16)
    while entrance.reserve_nowait():
        pass
    for _ in range(10 * 16 // together):
        clock.now += 0.2 * together / 16  # so that each call takes 0.2 s
        for _ in range(together):
            entrance.release()
            clock.now += 0.000_01
        if together == 16:  # the service is idle, for however long
            clock.now += pause
        for _ in range(together):
            assert entrance.reserve_nowait()
    assert entrance.statistics().calls_per_second == pytest.approx(16 / 0.2, rel=0.01)


async def test_the_rate_of_a_service_whose_callers_take_a_moment_to_come_back_is_near_what_it_does() -> None:
    entrance, clock = admission(4)
    while entrance.reserve_nowait():
        pass
    for _ in range(100):  # a caller comes back after the next call has ended
        clock.now += 0.01
        entrance.release()
        clock.now += 0.01
        entrance.release()
        assert entrance.reserve_nowait()
        clock.now += 0.01
        assert entrance.reserve_nowait()
    # It does 67, and would do more if its places were never free.
    assert entrance.statistics().calls_per_second == pytest.approx(80, rel=0.05)


async def test_calls_that_begin_in_a_service_with_free_places_say_nothing_about_the_rate() -> None:
    entrance, clock = admission(2)
    for _ in range(10):
        assert entrance.reserve_nowait()
        clock.now += 100
        assert entrance.reserve_nowait()
        clock.now += 1
        entrance.release()
        entrance.release()
        for _ in range(100):
            assert entrance.reserve_nowait()
            clock.now += 0.001
            entrance.release()
    assert entrance.statistics().calls_per_second == pytest.approx(2)


async def test_who_gives_up_on_being_admitted_passes_the_place_on_and_is_no_call_that_ended() -> None:
    entrance, clock = admission(1)
    entrance.reserve_nowait()
    first, second = [asyncio.create_task(entrance.reserve(0, "search")) for _ in range(2)]
    await wait_quiescent()
    clock.now += 5
    entrance.release()
    clock.now += 2
    first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert entrance.statistics().in_flight == 1
    assert entrance.statistics().calls_per_second == pytest.approx(1 / 5)
    clock.now += 3
    entrance.release()  # five seconds after the one before
    assert entrance.statistics().calls_per_second == pytest.approx(1 / 5)


async def test_overloaded_says_when_those_that_wait_will_be_in() -> None:
    entrance, clock = admission(1, max_queue=1)
    entrance.reserve_nowait()
    with_place = asyncio.create_task(entrance.reserve(0, "search"))
    await wait_quiescent()
    with pytest.raises(Overloaded) as unmeasured:
        await entrance.reserve(0, "search")
    assert unmeasured.value.retry_after_seconds is None
    clock.now += 3
    entrance.release()
    await with_place
    waiting = asyncio.create_task(entrance.reserve(0, "search"))
    await wait_quiescent()
    with pytest.raises(Overloaded, match=r"1 calls are in flight .* 1 wait") as measured:
        await entrance.reserve(9, "search")
    assert measured.value.retry_after_seconds == pytest.approx(6)
    entrance.release()
    await waiting


@pytest.mark.parametrize(("places", "batch"), [(2, 1), (16, 16)])
def test_a_deployment_whose_callers_come_back_by_themselves_shows_what_it_does(places: int, batch: int) -> None:
    @ps.node(batch=ps.Batch(batch), concurrency=2)
    async def double(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.2)
        return [2 * number for number in numbers]

    @ps.graph
    async def doubled(number: int) -> int:
        return await double(number)

    async def main() -> None:
        async def caller() -> None:
            for number in range(20):
                await service(number)
                await asyncio.sleep(0.01)

        async with engine.deploy(doubled, max_in_flight=places) as service:
            await asyncio.gather(*(caller() for _ in range(places)))
            assert service.statistics().admission.calls_per_second == pytest.approx(places / 0.2, rel=0.05)

    run_virtual(main)
