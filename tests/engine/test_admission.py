"""Admission against plain lists: which callers hold a place, wait or are refused, and which rate is measured."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
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
from penstock.engine.admission import Admission, FairAdmission, FairShares, Share
from penstock.testing import run_virtual, wait_quiescent
from tests.kit import virtual
from tests.loops import LOOPS, by_loop


class HandClock:
    """The part of an event loop that admission uses, with a clock that tests move."""

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


async def enters(admission: Admission, caller: "Caller | FairCaller", share: Share | None = None) -> None:
    """Wait for a place, as a caller, or as an item of a stream."""
    if not caller.patient:
        await admission.reserve(caller.priority, "search", share)
        return
    waiter = admission.stand_aside(share, caller.priority)
    try:
        assert await waiter
    except asyncio.CancelledError:
        admission.leave_line(share, waiter, caller.priority)
        raise


class AdmissionMachine(RuleBasedStateMachine):
    """Callers come, hold a place, leave and give up; the loop runs only when a rule lets it run."""

    new_loop: Callable[[int], asyncio.AbstractEventLoop]

    @initialize(seed=st.integers(0, 1000), max_in_flight=st.integers(1, 3), max_queue=st.sampled_from([None, 0, 1, 2]))
    def open(self, seed: int, max_in_flight: int, max_queue: int | None) -> None:
        self.loop = self.new_loop(seed)
        self.clock = HandClock(self.loop)
        self.max_in_flight = max_in_flight
        self.max_queue = max_queue
        self.admission = Admission(cast(asyncio.AbstractEventLoop, self.clock), max_in_flight, max_queue)
        self.in_flight = self.holding = self.refused = self.admitted = 0
        self.line: list[Caller] = []
        self.left = 0  # calls still in flight since all places were taken
        self.held = 0.0  # seconds for which places were held since such a call ended
        self.together: list[tuple[float, int]] = []  # seconds, and calls that ended together; newest first
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
        elif (
            self.max_queue is not None
            and sum(not one.patient for one in self.line) >= self.max_queue
            and not caller.patient
        ):
            caller.state = "refused"
            self.refused += 1
        else:
            caller.state = "waiting"
            self.line.append(caller)
        retry_after_seconds = self.expected_seconds(len(self.line) + 1)
        try:
            await enters(self.admission, caller)
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
        """The mean seconds of a call; a call counts a little less than the calls that ended after it."""
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


@by_loop
def test_admission_behaves_like_a_counter_with_a_line_before_it(loop: str) -> None:
    class OnLoop(AdmissionMachine):
        new_loop = staticmethod(LOOPS[loop])

    run_state_machine_as_test(OnLoop)


@pytest.mark.parametrize("together", [1, 2, 16])
@pytest.mark.parametrize("pause", [0.0, 0.001, 1000.0])
async def test_the_rate_is_right_when_places_are_filled_again_later(together: int, pause: float) -> None:
    clock = HandClock(asyncio.get_running_loop())
    entrance = Admission(cast(asyncio.AbstractEventLoop, clock), 16, None)
    while entrance.reserve_nowait():
        pass
    for _ in range(10 * 16 // together):
        clock.now += 0.2 * together / 16  # so that each call takes 0.2 s
        for _ in range(together):
            entrance.release()
            clock.now += 0.000_01
        if together == 16:  # the service is idle for `pause` seconds
            clock.now += pause
        for _ in range(together):
            assert entrance.reserve_nowait()
    assert entrance.statistics().calls_per_second == pytest.approx(16 / 0.2, rel=0.01)


@pytest.mark.parametrize(("places", "batch"), [(2, 1), (16, 16)])
@virtual
async def test_a_deployment_whose_callers_come_back_by_themselves_shows_what_it_does(places: int, batch: int) -> None:
    @ps.node(batch=ps.Batch(batch), concurrency=2)
    async def double(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.2)
        return [2 * number for number in numbers]

    async def caller() -> None:
        for number in range(20):
            await service(number)
            await asyncio.sleep(0.01)

    async with engine.deploy(ps.graph(double), max_in_flight=places) as service:
        await asyncio.gather(*(caller() for _ in range(places)))
        assert service.statistics().admission.calls_per_second == pytest.approx(places / 0.2, rel=0.05)


# Fair shares.

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.5}
CLOSE = 1e-6


@dataclass(eq=False)
class FairCaller:
    key: str
    priority: int
    patient: bool
    state: str = "waiting"  # then holding, refused or gone
    task: "asyncio.Task[None] | None" = None


@dataclass(eq=False)
class PlainKey:
    """The record of one key, call by call."""

    weight: float
    waiting: list[FairCaller] = field(default_factory=list[FairCaller])
    began: list[float] = field(default_factory=list[float])  # begins of the calls that hold a place, in any order
    held: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    expected: float = 0.0
    start: float = 0.0
    period: int = 0
    competes: bool = False
    admitted: int = 0
    refused: int = 0


class FairAdmissionMachine(RuleBasedStateMachine):
    """Callers of four keys come, hold a place, leave and give up. The model has no heaps, and forgets nothing.

    If several keys have the lowest level, the model follows the choice of the implementation.
    """

    new_loop: Callable[[int], asyncio.AbstractEventLoop]

    @initialize(
        seed=st.integers(0, 1000),
        max_in_flight=st.integers(1, 4),
        max_queue=st.sampled_from([None, 0, 1, 3, 5]),
        of_key=st.sampled_from([(sys.maxsize, sys.maxsize), (1, sys.maxsize), (2, 2), (sys.maxsize, 1)]),
    )
    def open(self, seed: int, max_in_flight: int, max_queue: int | None, of_key: tuple[int, int]) -> None:
        self.loop = self.new_loop(seed)
        self.clock = HandClock(self.loop)
        self.max_in_flight, self.max_queue, (self.most, self.longest) = max_in_flight, max_queue, of_key
        shares = FairShares(lambda graph, arguments: arguments[0], WEIGHTS, *of_key)
        self.admission = FairAdmission(cast(asyncio.AbstractEventLoop, self.clock), max_in_flight, max_queue, shares)
        self.keys = {name: PlainKey(weight) for name, weight in WEIGHTS.items()}
        self.callers: list[FairCaller] = []
        self.period, self.period_began, self.level_of_last = 0, 0.0, 0.0
        self.may_look = True  # whether a refusal looks for the key furthest over its share

    # The model.

    @property
    def free(self) -> int:
        return self.max_in_flight - sum(len(key.began) for key in self.keys.values())

    @property
    def queued(self) -> int:
        return sum(len(key.waiting) for key in self.keys.values())

    @property
    def is_full(self) -> bool:
        waiting = [one for key in self.keys.values() for one in key.waiting if not one.patient]
        return self.max_queue is not None and len(waiting) >= self.max_queue

    def mean(self) -> float:
        rate = self.admission.statistics().calls_per_second
        return self.max_in_flight / rate if rate else 0.0

    def level(self, key: PlainKey) -> float:
        now, since = self.clock.now, self.period_began
        past = sum(max(0.0, end - max(begin, since)) for begin, end in key.held)
        present = sum(now - max(begin, since) for begin in key.began)
        return (past + present + key.expected) / key.weight + key.start

    def last_turn(self, key: PlainKey, more: int = 0) -> tuple[float, float]:
        self.take_part(key)
        calls = (len(key.waiting) + more) / key.weight
        return self.level(key) + calls * self.mean(), calls

    def begin_period(self) -> None:
        self.period += 1
        self.period_began, self.level_of_last = self.clock.now, 0.0
        self.may_look = True

    def take_part(self, key: PlainKey) -> None:
        if key.period != self.period:
            key.period, key.start, key.expected = self.period, 0.0, len(key.began) * self.mean()

    def changed(self, key: PlainKey) -> None:
        competes = bool(key.waiting) and len(key.began) < self.most
        if competes and not key.competes:
            if not any(other.competes for other in self.keys.values()):
                self.begin_period()
            self.take_part(key)
            key.start += max(0.0, self.level_of_last - self.level(key))
        key.competes = competes

    def ended(self, key: PlainKey) -> None:
        if any(other.competes for other in self.keys.values()):
            self.take_part(key)
            key.expected -= key.expected / len(key.began)
        key.held.append((key.began.pop(), self.clock.now))
        self.changed(key)

    def next_key(self) -> PlainKey | None:
        """Return the key that has got the place, and check that its level was one of the lowest."""
        competing = [key for key in self.keys.values() if key.competes]
        taken = [self.keys[cast(str, one.key)] for one in self.admission.statistics().keys
                 if one.in_flight > len(self.keys[cast(str, one.key)].began)]  # fmt: skip
        if not competing:
            assert not taken
            return None
        [key] = taken
        assert key.competes
        assert self.level(key) <= min(map(self.level, competing)) + CLOSE
        return key

    def admitted(self, key: PlainKey) -> FairCaller:
        caller = max(key.waiting, key=lambda caller: caller.priority)  # the earliest of the highest priority
        key.waiting.remove(caller)
        self.level_of_last = max(self.level_of_last, self.level(key))
        key.expected += self.mean()
        key.began.append(self.clock.now)
        key.admitted += 1
        self.changed(key)
        return caller

    # The rules of the machine.

    @rule(
        name=st.sampled_from("aaabcd"),
        priority=st.sampled_from([0, 0, 1]),
        patient=st.sampled_from([False, False, False, True]),
        number=st.integers(1, 4),
    )
    def callers_come(self, name: str, priority: int, patient: bool, number: int) -> None:
        for _ in range(number):
            caller, key = FairCaller(name, priority, patient), self.keys[name]
            before = {one: one.state for one in self.callers}
            self.callers.append(caller)
            caller.task = self.loop.create_task(self.call(caller))
            self.settle()
            refused = [one for one in self.callers if one.state == "refused" and before.get(one) != "refused"]
            if self.free and len(key.began) < self.most:
                key.began.append(self.clock.now)
                key.admitted += 1
                assert caller.state == "holding"
                assert not refused
                continue
            if patient:
                assert not refused
            elif len(key.waiting) >= self.longest:
                assert refused == [caller]
            elif self.is_full:
                self.check_who_makes_room(caller, refused)
            for one in refused:
                self.keys[one.key].refused += 1
            if caller.state == "refused":
                continue
            key.waiting.append(caller)
            if len(key.waiting) == 1:
                self.changed(key)

    def check_who_makes_room(self, caller: FairCaller, refused: list[FairCaller]) -> None:
        if self.may_look and not any(key.competes for key in self.keys.values()):
            self.begin_period()
        self.may_look = not self.queued
        own, [one] = self.last_turn(self.keys[caller.key], 1), refused
        turns = {
            name: self.last_turn(key)
            for name, key in self.keys.items()
            if name != caller.key and not all(waiting.patient for waiting in key.waiting)
        }
        if one is caller:
            assert all(turn[0] < own[0] + CLOSE for turn in turns.values())
            return
        assert turns[one.key][0] > own[0] - CLOSE
        assert turns[one.key][0] > max(turns.values())[0] - CLOSE
        key = self.keys[one.key]
        hasty = [waiting for waiting in key.waiting if not waiting.patient]
        lowest = min(waiting.priority for waiting in hasty)
        assert one is [waiting for waiting in hasty if waiting.priority == lowest][-1]
        key.waiting.remove(one)
        self.changed(key)

    async def call(self, caller: FairCaller) -> None:
        try:
            share = self.admission.share_of(held, (caller.key,))
            await enters(self.admission, caller, share)
        except Overloaded:
            caller.state = "refused"
        except asyncio.CancelledError:
            caller.state = "gone"
            raise
        else:
            caller.state = "holding"

    def of_state(self, state: str) -> list[FairCaller]:
        return [caller for caller in self.callers if caller.state == state]

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.may_look = True

    @precondition(lambda self: self.of_state("holding"))
    @rule(number=st.integers(0, 10), gives_up=st.sampled_from([False, False, True]))
    def a_caller_leaves(self, number: int, gives_up: bool) -> None:
        holding = self.of_state("holding")
        caller = holding[number % len(holding)]
        self.callers.remove(caller)
        self.ended(self.keys[caller.key])
        self.admission.release(self.admission.share_of(held, (caller.key,)))
        key = self.next_key()
        if key is not None:
            following = self.admitted(key)
            if gives_up:  # the caller is admitted and cancelled in the same turn of the loop
                assert following.task is not None
                following.task.cancel()
                self.settle()
                assert following.state == "gone"
                self.ended(key)
                key = self.next_key()
                if key is not None:
                    following = self.admitted(key)
            self.settle()
            assert key is None or following.state == "holding"
        self.time_passes(0.001)  # the expected time of calls has changed

    @precondition(lambda self: self.of_state("waiting"))
    @rule(number=st.integers(0, 10))
    def a_caller_gives_up(self, number: int) -> None:
        waiting = self.of_state("waiting")
        caller = waiting[number % len(waiting)]
        assert caller.task is not None
        caller.task.cancel()
        self.settle()
        assert caller.state == "gone"
        key = self.keys[caller.key]
        key.waiting.remove(caller)
        self.changed(key)

    def settle(self) -> None:
        self.loop.run_until_complete(wait_quiescent())

    @invariant()
    def statistics_are_as_expected(self) -> None:
        statistics = self.admission.statistics()
        assert statistics.in_flight == self.max_in_flight - self.free
        assert statistics.queued == self.admission.queued == self.queued
        assert {one.key for one in statistics.keys} == {
            name for name, key in self.keys.items() if key.admitted or key.refused or key.waiting
        } | {one.key for one in statistics.keys if not (one.in_flight or one.queued or one.admitted or one.refused)}
        for one in statistics.keys:
            key = self.keys[cast(str, one.key)]
            assert (one.weight, one.in_flight, one.queued) == (key.weight, len(key.began), len(key.waiting))
            assert (one.admitted, one.refused) == (key.admitted, key.refused)
            held = sum(end - begin for begin, end in key.held) + sum(self.clock.now - begin for begin in key.began)
            assert one.held_seconds == pytest.approx(held)
            assert one.in_flight <= self.most
            assert not self.free or not key.waiting or one.in_flight == self.most  # no idle place

    def teardown(self) -> None:
        try:
            while self.of_state("holding"):
                self.a_caller_leaves(0, gives_up=False)
                self.statistics_are_as_expected()
            assert not self.of_state("waiting")
            assert self.admission.statistics().in_flight == 0
        finally:
            self.loop.close()


@by_loop
def test_fair_admission_gives_each_place_to_a_key_that_has_had_least_for_its_weight(loop: str) -> None:
    class OnLoop(FairAdmissionMachine):
        new_loop = staticmethod(LOOPS[loop])

    run_state_machine_as_test(OnLoop)


@ps.node
async def hold(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@ps.graph
async def held(tenant: str, seconds: float) -> float:
    return await hold(seconds)


def tenant_of(tenant: str, seconds: float) -> str:
    return tenant


def in_flight_of(service: "engine.Service[..., Any]") -> dict[Hashable, int]:
    return {one.key: one.in_flight for one in service.statistics().admission.keys}


def test_a_tenant_with_few_calls_waits_for_its_own_share_and_not_for_the_queue_of_another() -> None:
    waits: list[float] = []

    async def main() -> None:
        clock = asyncio.get_running_loop().time

        async def call(tenant: str) -> None:
            came = clock()
            await service(tenant, 1.0)
            if tenant == "b":
                waits.append(round(clock() - came - 1.0, 6))

        async with engine.deploy(held, key=tenant_of, max_in_flight=4) as service, asyncio.TaskGroup() as callers:
            for _ in range(1000):
                callers.create_task(call("a"))
            await asyncio.sleep(10.25)
            for _ in range(10):
                callers.create_task(call("b"))

    run_virtual(main, timeout_seconds=10_000)
    # The key has a share of two places: a call waits for the queue of its own key, and for the calls in flight when it
    # comes.
    assert waits == sorted(waits)
    assert all(wait <= number / 2 + 0.75 for number, wait in enumerate(waits))
    assert waits[-1] > 2  # it shares the places


@pytest.mark.parametrize("weight", [1, 3])
@virtual
async def test_what_counts_is_for_how_long_places_are_held(weight: int) -> None:
    async def callers(tenant: str, seconds: float) -> None:
        async with asyncio.TaskGroup() as calls:
            for _ in range(4000):
                calls.create_task(service(tenant, seconds))

    async with engine.deploy(held, key=tenant_of, weights={"streams": weight}, max_in_flight=8) as service:
        tasks = [asyncio.create_task(callers("streams", 20.0)), asyncio.create_task(callers("short", 0.5))]
        await asyncio.sleep(400)
        held_seconds = {one.key: one.held_seconds for one in service.statistics().admission.keys}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert sum(held_seconds.values()) == pytest.approx(8 * 400)
        assert held_seconds["streams"] / held_seconds["short"] == pytest.approx(weight, rel=0.1)


@virtual
async def test_a_key_that_was_away_has_saved_nothing_up() -> None:
    order: list[str] = []

    async def call(tenant: str) -> None:
        await service(tenant, 1.0)
        order.append(tenant)

    async with engine.deploy(held, key=tenant_of, max_in_flight=1) as service, asyncio.TaskGroup() as callers:
        for _ in range(60):
            callers.create_task(call("a"))
        await asyncio.sleep(30.5)
        for _ in range(20):
            callers.create_task(call("b"))
    assert order[:30].count("a") == 30
    assert order[30:50].count("a") == pytest.approx(10, abs=1)


async def test_when_the_queue_is_full_the_newest_call_of_the_greediest_key_makes_room() -> None:
    async with engine.deploy(held, key=tenant_of, max_in_flight=1, max_queue=3) as service:
        calls = {name: asyncio.create_task(service(name[0], 1000.0)) for name in ("a0", "a1", "a2", "a3", "b1")}
        await wait_quiescent()
        with pytest.raises(Overloaded, match=r"3 wait .* key 'a'"):
            await calls.pop("a3")
        assert {one.key: (one.queued, one.refused) for one in service.statistics().admission.keys} == {
            "a": (2, 1),
            "b": (1, 0),
        }
        with pytest.raises(Overloaded, match="key 'a'") as refused:
            await service("a", 0.0)
        assert refused.value.key == "a"
        for call in calls.values():
            call.cancel()
        await asyncio.wait(calls.values())
    seen = service.statistics()
    assert (seen.cancelled, seen.admission.refused, seen.admission.queued) == (4, 2, 0)


async def test_only_a_key_that_asks_for_too_much_is_told_that_it_was_the_reason() -> None:
    async with engine.deploy(held, key=tenant_of, max_in_flight=1, max_queue=1) as service:
        calls = [asyncio.create_task(service(name, 1000.0)) for name in "ab"]
        await wait_quiescent()
        with pytest.raises(Overloaded) as full:
            await service("c", 0.0)
        assert full.value.key is None
        assert "over its share" not in str(full.value)
        with pytest.raises(Overloaded, match="key 'a', which is over its share") as greedy:
            await service("a", 0.0)
        assert greedy.value.key == "a"
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


@virtual
async def test_a_key_has_no_more_places_and_no_longer_queue_than_it_may() -> None:
    options: dict[str, Any] = {"max_in_flight_per_key": 2, "max_queue_per_key": 1}
    async with engine.deploy(held, key=tenant_of, max_in_flight=4, **options) as service:
        first = [asyncio.create_task(service("a", 1.0)) for _ in range(3)]
        await wait_quiescent()
        assert in_flight_of(service) == {"a": 2}
        with pytest.raises(Overloaded, match="1 of them of key 'a'"):
            await service("a", 1.0)
        assert await service("b", 0.5) == 0.5  # other keys have free places
        await first[0]
        await wait_quiescent()
        assert in_flight_of(service) == {"a": 1, "b": 0}
        more = [asyncio.create_task(service("a", 5.0)) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            await more.pop()
        # Two calls are queued before this call, and a call takes a second.
        assert refused.value.retry_after_seconds is None  # never full, so no rate was measured
        await asyncio.gather(*first, *more)


@ps.node
class Tenant(ps.Actor[float, object]):
    async def loop(self, inbox: ps.Inbox[ps.Work[float, object]], /) -> None:
        while True:
            work = await inbox.get()
            work.finish(work.key)


@ps.node
class Tenants(ps.StreamActor[float, object]):
    async def loop(self, inbox: ps.Inbox[ps.StreamWork[float, object]], /) -> None:
        while True:
            work = await inbox.get()
            work.put_nowait(work.key)
            work.finish()


asked, streamed = Tenant(), Tenants()


@ps.graph
async def who(tenant: str, *, number: float) -> list[object]:
    return [await asked(await hold(0.0)), await ps.map_each(asked, [number, number])]


@ps.graph
async def who_streams(tenant: str) -> AsyncIterator[object]:
    return streamed(1.0)


async def test_actors_see_the_key_at_any_depth_and_in_streams() -> None:
    def name(tenant: str, *, number: float) -> tuple[str, float]:
        return tenant, number

    key = ("a", 2.0)
    async with engine.deploy(who, key=name) as service:
        assert await service("a", number=2.0) == [key, [key, key]]
        assert await service.map([who("a", number=2.0)]) == [[key, [key, key]]]
        assert [(one.key, one.admitted) for one in service.statistics().admission.keys] == [(key, 2)]
    async with engine.deploy(who) as service:
        assert await service("a", number=2.0) == [None, [None, None]]


async def test_several_graphs_share_the_places_and_their_key_is_given_the_call() -> None:
    async with engine.deploy(who, who_streams, key=lambda call: (call.graph.name, call.arguments[0])) as service:
        assert (await service("a", number=2.0))[0] == ("who", "a")
        async with service.stream(who_streams("b")) as keys:
            assert [key async for key in keys] == [("who_streams", "b")]
        assert {one.key: one.in_flight for one in service.statistics().admission.keys} == {
            ("who", "a"): 0,
            ("who_streams", "b"): 0,
        }


def unhashable(tenant: Any) -> Any:
    return [tenant]


def missing(tenant: Any) -> Any:
    return tenant.missing


async def awaited(tenant: str, seconds: float = 0.0) -> str:
    return tenant


def swapped(seconds: float, tenant: str) -> str:
    return tenant


@pytest.mark.parametrize("key", [unhashable, missing, awaited])
async def test_a_call_without_a_key_fails_and_is_counted(key: Callable[[Any], Hashable]) -> None:
    async with engine.deploy(held, who_streams, key=lambda call: key(call.arguments[0])) as service:
        with pytest.raises((TypeError, AttributeError)) as failed:
            async with service.stream(who_streams("a")) as keys:
                await anext(keys)
        assert "key= of the deployment" in failed.value.__notes__[0]
        with pytest.raises((TypeError, AttributeError)):
            await service("a", 0.0)
        with pytest.raises((TypeError, AttributeError)):
            await service.map([held("a", 0.0)])
    assert service.statistics().failed == 3


class Named:
    """A key whose hash changes with its name; without a name, `hash` raises an error."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name

    def __hash__(self) -> int:
        assert self.name is not None
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.name == self.name


@pytest.mark.parametrize("name", ["other", None])
@virtual
async def test_a_key_whose_hash_changes_gives_its_place_back(name: str | None) -> None:
    def key_of(tenant: Any, seconds: float) -> Hashable:
        return tenant

    async with engine.deploy(held, key=key_of, max_in_flight=1) as service:
        keys = [Named(f"tenant {number}") for number in range(1100)]
        calls = [asyncio.create_task(service(cast(Any, key), 1.0)) for key in keys]
        items = asyncio.create_task(service.map(held(cast(Any, key), 1.0) for key in keys[:2]))
        await wait_quiescent()
        for key in keys:
            key.name = name and f"{name} {key.name}"
        assert await asyncio.gather(*calls) == [1.0] * 1100
        if name is None:
            with pytest.raises(AssertionError):
                await items
        else:
            assert await items == [1.0] * 2
            assert len(service.statistics().admission.keys) == 1000
        seen = service.statistics().admission
        assert (seen.in_flight, seen.queued) == (0, 0)


async def test_an_item_without_a_key_fails_alone() -> None:
    def key_of(tenant: str, seconds: float) -> str:
        return {"a": "key of a"}[tenant]

    calls = [held("a", 0.0), held("b", 0.0), held("a", 0.25)]
    async with engine.deploy(held, key=key_of, max_in_flight=2) as service:
        async with service.stream(calls) as results:
            outcomes = [outcome async for outcome in results.outcomes()]
        assert [outcome.error is None for outcome in outcomes] == [True, False, True]
        assert isinstance(outcomes[1].error, KeyError)
        assert "key= of the deployment" in outcomes[1].error.__notes__[0]
        assert await service.map(calls, on_error="skip") == [0.0, 0.25]
        with pytest.raises(KeyError):
            await service.map(calls)
        with pytest.raises(KeyError):
            await service("b", 0.0)
        assert await service("a", 0.0) == 0.0
        seen = service.statistics()
    assert (seen.completed + seen.cancelled, seen.failed, seen.admission.in_flight) == (7, 4, 0)


def calls_of_python(refusals: int, tenants: int) -> int:
    """Return how many Python functions run while a deployment with a full queue of many tenants refuses calls."""
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1

    async def main() -> None:
        async with engine.deploy(held, key=tenant_of, max_in_flight=1, max_queue=tenants - 1) as service:
            calls = [asyncio.create_task(service(f"tenant {number}", 1.0)) for number in range(tenants)]
            await wait_quiescent()
            with pytest.raises(Overloaded):
                await service("tenant 1", 1.0)
            for _ in range(refusals):
                refused = asyncio.create_task(service("tenant 1", 1.0))
                sys.setprofile(count)
                await asyncio.wait([refused])
                sys.setprofile(None)
                assert isinstance(refused.exception(), Overloaded)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

    run_virtual(main)
    return counted


def test_a_refusal_does_not_look_at_all_keys() -> None:
    assert calls_of_python(10, tenants=500) < 2 * calls_of_python(10, tenants=5)


def test_calls_that_wait_for_a_place_get_the_end_at_once() -> None:
    unwound = asyncio.Event()

    @ps.node
    async def hangs_on(tenant: str) -> str:
        try:
            await asyncio.sleep(1000)
        finally:
            await unwound.wait()
        return tenant

    graph = ps.graph(hangs_on)

    async def main(**options: Any) -> None:
        unwound.clear()
        async with engine.deploy(graph, max_in_flight=1, **options) as service:
            running, *waiting = [asyncio.create_task(service(tenant)) for tenant in "abb"]
            await wait_quiescent()
            items = [asyncio.create_task(service.map([graph(tenant)])) for tenant in "ab"]
            await wait_quiescent()
            gone = waiting.pop()
            ending = asyncio.create_task(service.abort())
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait([running, gone, *waiting, *items])
            assert not ending.done()
            assert gone.cancelled()
            for call in (running, *waiting, *items):
                assert isinstance(call.exception(), ps.EngineClosedError)
            unwound.set()
            await ending
            seen = service.statistics()
            # The items of the streams are cancelled with their streams.
            assert (seen.failed, seen.cancelled, seen.admission.queued, seen.admission.in_flight) == (2, 3, 0, 0)

    run_virtual(main)
    run_virtual(lambda: main(key=lambda tenant: tenant))


async def test_statistics_by_key_are_bounded_and_subtracted() -> None:
    async with engine.deploy(held, key=tenant_of) as service:
        await service("first", 0.0)
        await service("a", 0.0)
        earlier = service.statistics()
        await service("a", 0.0)
        await service("b", 0.0)
        keys = {one.key: one.admitted for one in service.statistics().since(earlier).admission.keys}
        assert keys == {"first": 0, "a": 1, "b": 1}
        for number in range(1200):
            await service(f"tenant {number}", 0.0)
        await service("a", 0.0)
        keys = {one.key: one.admitted for one in service.statistics().since(earlier).admission.keys}
        assert len(keys) == 1000
        assert "first" not in keys


WRONG: Iterable[tuple[dict[str, Any], str]] = [
    ({"weights": {"a": 2}}, "weights=.* needs key="),
    ({"max_in_flight_per_key": 2}, "max_in_flight_per_key=2: this needs key="),
    ({"max_queue_per_key": 0}, "max_queue_per_key=0: this needs key="),
    ({"key": "tenant"}, "key='tenant': a function"),
    ({"key": awaited}, "a function that is not async"),
    ({"key": missing}, r"it takes the parameters of graph 'held' \(tenant, seconds\), but too many"),
    ({"key": swapped}, "in their order"),
    ({"key": tenant_of, "weights": {"a": 0}}, r"weights\['a'\]=0: a finite number above 0"),
    ({"key": tenant_of, "weights": ["a"]}, "weights=.*: a mapping"),
    ({"key": tenant_of, "max_in_flight_per_key": 0}, "max_in_flight_per_key=0: a whole number of at least 1"),
    ({"key": tenant_of, "max_queue_per_key": -1}, "max_queue_per_key=-1: a whole number of at least 0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
async def test_wrong_options_of_fair_shares_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.OptionsError, match=message):
        engine.deploy(held, **options)


async def test_overloaded_says_when_those_that_wait_will_be_in() -> None:
    clock = HandClock(asyncio.get_running_loop())
    entrance = Admission(cast(asyncio.AbstractEventLoop, clock), 1, 1)
    assert entrance.reserve_nowait()
    for expected in (None, pytest.approx(6)):  # nothing is measured before a call has ended
        waiting = asyncio.create_task(entrance.reserve(0, "search"))
        await wait_quiescent()
        with pytest.raises(Overloaded, match=r"1 calls are in flight .* 1 wait") as refused:
            await entrance.reserve(9, "search")
        assert refused.value.retry_after_seconds == expected
        clock.now += 3
        entrance.release()
        await waiting


@virtual
async def test_a_refused_key_is_told_when_its_own_calls_will_be_in() -> None:
    async with engine.deploy(held, key=tenant_of, max_in_flight=1, max_queue_per_key=1) as service:
        for expected in (None, pytest.approx(6)):
            calls = [asyncio.create_task(service("a", 3.0)) for _ in range(2)]
            await wait_quiescent()
            with pytest.raises(Overloaded) as refused:
                await service("a", 3.0)
            assert refused.value.retry_after_seconds == expected
            await asyncio.wait(calls)
