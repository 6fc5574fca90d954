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
from penstock.engine.admission import Admission, FairAdmission, FairShares
from penstock.testing import run_virtual, wait_quiescent
from tests.kit import Renamed, actor, begun, outcomes, outcomes_of, paused, values_of, virtual
from tests.loops import LOOPS, by_loop


class HandClock:
    """The part of an event loop that admission uses, with a clock that tests move."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.create_future = loop.create_future
        self.now = 0.0

    def time(self) -> float:
        return self.now


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.5}
CLOSE = 1e-6
NO_LIMITS = (sys.maxsize, sys.maxsize)


@dataclass(eq=False)
class Caller:
    key: str
    priority: int
    patient: bool  # as the items of a stream are
    state: str = "waiting"  # then holding, refused or gone
    task: "asyncio.Task[None] | None" = None
    refusal: Overloaded | None = None


@dataclass(eq=False)
class PlainKey:
    """The record of one key, call by call."""

    weight: float
    waiting: list[Caller] = field(default_factory=list[Caller])
    began: list[float] = field(default_factory=list[float])  # begins of the calls that hold a place, in any order
    held: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    expected: float = 0.0
    start: float = 0.0
    period: int = 0
    competes: bool = False
    admitted: int = 0
    refused: int = 0


class AdmissionMachine(RuleBasedStateMachine):
    """Callers of four keys come, hold a place, leave and give up. The model has no heaps, and forgets nothing.

    Without fair shares, all callers have one key. If several keys have the lowest level, the model follows the choice
    of the implementation.
    """

    new_loop: Callable[[int], asyncio.AbstractEventLoop]

    @initialize(
        seed=st.integers(0, 1000),
        max_in_flight=st.integers(1, 4),
        max_queue=st.sampled_from([None, 0, 1, 3, 5]),
        of_key=st.sampled_from([None, NO_LIMITS, (1, sys.maxsize), (2, 2), (sys.maxsize, 1)]),
    )
    def open(self, seed: int, max_in_flight: int, max_queue: int | None, of_key: tuple[int, int] | None) -> None:
        self.loop = self.new_loop(seed)
        self.clock = HandClock(self.loop)
        self.max_in_flight, self.max_queue, (self.most, self.longest) = max_in_flight, max_queue, of_key or NO_LIMITS
        self.is_fair = of_key is not None
        self.keys = {name: PlainKey(weight) for name, weight in WEIGHTS.items() if name == "a" or self.is_fair}
        bounds: Any = (self.clock, max_in_flight, max_queue)
        shares = FairShares(lambda graph, arguments: arguments[0], WEIGHTS, self.most, self.longest)
        self.admission = FairAdmission(*bounds, shares) if self.is_fair else Admission(*bounds)
        self.callers: list[Caller] = []
        self.period, self.period_began, self.level_of_last = 0, 0.0, 0.0
        self.may_look = True  # whether a refusal looks for the key furthest over its share
        self.left = 0  # calls still in flight since all places were taken
        self.held = 0.0  # seconds for which places were held since such a call ended
        self.together: list[tuple[float, int]] = []  # seconds, and calls that ended together; newest first

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
        in_flight = {cast(str, one.key): one.in_flight for one in self.admission.statistics().keys}
        taken = [self.keys[name] for name, count in in_flight.items() if count > len(self.keys[name].began)]
        taken = taken if self.is_fair else competing
        if not competing:
            assert not taken
            return None
        [key] = taken
        assert key.competes
        assert self.level(key) <= min(map(self.level, competing)) + CLOSE
        return key

    def admitted(self, key: PlainKey) -> Caller:
        caller = max(key.waiting, key=lambda caller: caller.priority)  # the earliest of the highest priority
        key.waiting.remove(caller)
        self.level_of_last = max(self.level_of_last, self.level(key))
        key.expected += self.mean()
        self.take(key)
        self.changed(key)
        return caller

    def take(self, key: PlainKey) -> None:
        key.began.append(self.clock.now)
        key.admitted += 1
        if not self.free:
            self.left = self.max_in_flight

    def pass_on(self) -> tuple[PlainKey, Caller] | None:
        """A place that has become free goes to the next key, or stays free."""
        key = self.next_key()
        following = key and (key, self.admitted(key))
        if self.free:
            self.left = max(0, self.left - 1)
            self.held = self.held if self.left else 0.0
        return following

    def measure(self) -> None:
        """A call ends, and counts in the rate if all places were taken while it was in flight."""
        if self.left:
            seconds, self.held = self.held / self.max_in_flight, 0.0
            if not self.together or seconds > 0.1 * self.mean_seconds():
                self.together.insert(0, (seconds, 1))
            else:
                before, calls = self.together[0]
                self.together[0] = before + seconds, calls + 1

    def mean_seconds(self) -> float:
        """The mean seconds of a call; a call counts a little less than the calls that ended after it."""
        fade = 1 - 1 / max(10, 2 * self.max_in_flight)
        weight, weighted_seconds, weighted_calls = 1.0, 0.0, 0.0
        for age, (seconds, calls) in enumerate(self.together):
            weight *= fade**calls if age else 1.0
            weighted_seconds += weight * seconds
            weighted_calls += weight * calls
        return weighted_seconds / weighted_calls

    def expected_seconds(self, calls: int) -> object:
        return pytest.approx(calls * self.mean_seconds()) if self.together else None

    # The rules of the machine.

    @rule(
        name=st.sampled_from("aaabcd"),
        priority=st.sampled_from([0, 0, 1]),
        patient=st.sampled_from([False, False, False, True]),
        number=st.integers(1, 4),
    )
    def callers_come(self, name: str, priority: int, patient: bool, number: int) -> None:
        name = name if self.is_fair else "a"
        for _ in range(number):
            caller, key = Caller(name, priority, patient), self.keys[name]
            before = {one: one.state for one in self.callers}
            self.callers.append(caller)
            caller.task = self.loop.create_task(self.call(caller))
            self.settle()
            refused = [one for one in self.callers if one.state == "refused" and before.get(one) != "refused"]
            if self.free and len(key.began) < self.most:
                self.take(key)
                assert caller.state == "holding"
                assert not refused
                continue
            if not patient and len(key.waiting) >= self.longest:
                assert refused == [caller]
            elif not patient and self.is_full:
                self.check_who_makes_room(caller, refused)
            else:
                assert not refused
            for one in refused:
                self.keys[one.key].refused += 1
            if caller.state == "refused":
                continue
            key.waiting.append(caller)
            if len(key.waiting) == 1:
                self.changed(key)

    def check_who_makes_room(self, caller: Caller, refused: list[Caller]) -> None:
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
            if not self.is_fair:
                self.check_refusal(caller.refusal)
            return
        assert turns[one.key][0] > own[0] - CLOSE
        assert turns[one.key][0] > max(turns.values())[0] - CLOSE
        key = self.keys[one.key]
        hasty = [waiting for waiting in key.waiting if not waiting.patient]
        lowest = min(waiting.priority for waiting in hasty)
        assert one is [waiting for waiting in hasty if waiting.priority == lowest][-1]
        key.waiting.remove(one)
        self.changed(key)

    def check_refusal(self, refusal: Overloaded | None) -> None:
        assert refusal is not None
        in_flight = f"graph 'search': {self.max_in_flight} calls are in flight (max_in_flight)"
        assert str(refusal) == f"{in_flight} and {self.queued} wait for a place (max_queue)"
        assert refusal.retry_after_seconds == self.expected_seconds(self.queued + 1)

    async def call(self, caller: Caller) -> None:
        try:
            await self.enter(caller)
        except Overloaded as refusal:
            caller.state, caller.refusal = "refused", refusal
        except asyncio.CancelledError:
            caller.state = "gone"
            raise
        else:
            caller.state = "holding"

    async def enter(self, caller: Caller) -> None:
        """Wait for a place, as a caller, or as an item of a stream."""
        share = self.admission.share_of(held, (caller.key,))
        if not caller.patient:
            await self.admission.reserve(caller.priority, "search", share)
            return
        waiter = self.admission.stand_aside(share, caller.priority)
        try:
            assert await waiter
        except asyncio.CancelledError:
            self.admission.leave_line(share, waiter, caller.priority)
            raise

    def of_state(self, state: str) -> list[Caller]:
        return [caller for caller in self.callers if caller.state == state]

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.held += seconds * (self.max_in_flight - self.free) if self.left else 0.0
        self.may_look = True

    @precondition(lambda self: self.of_state("holding"))
    @rule(number=st.integers(0, 10), gives_up=st.sampled_from([False, False, True]))
    def a_caller_leaves(self, number: int, gives_up: bool) -> None:
        holding = self.of_state("holding")
        caller = holding[number % len(holding)]
        self.callers.remove(caller)
        self.ended(self.keys[caller.key])
        self.measure()
        self.admission.release(self.admission.share_of(held, (caller.key,)))
        following = self.pass_on()
        if following is not None and gives_up:  # it is admitted and cancelled in the same turn of the loop
            key, caller = following
            assert caller.task is not None
            caller.task.cancel()
            self.settle()
            assert caller.state == "gone"
            self.ended(key)
            following = self.pass_on()
        self.settle()
        assert following is None or following[1].state == "holding"
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
        statistics, keys = self.admission.statistics(), self.keys.values()
        assert statistics.in_flight == self.max_in_flight - self.free
        assert statistics.queued == self.admission.queued == self.queued
        assert statistics.admitted == sum(key.admitted for key in keys)
        assert statistics.refused == sum(key.refused for key in keys)
        rate, seconds = statistics.calls_per_second, self.expected_seconds(1)
        assert seconds in (None, 0) if rate is None else 1 / rate == seconds
        if not self.is_fair:
            assert not self.free or not self.queued  # no idle place
            return
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
def test_admission_behaves_like_its_model(loop: str) -> None:
    class OnLoop(AdmissionMachine):
        new_loop = staticmethod(LOOPS[loop])

    run_state_machine_as_test(OnLoop)


@pytest.mark.parametrize("pause", [0.01, 1000.0])
@pytest.mark.parametrize(("places", "batch"), [(2, 1), (16, 16)])
@virtual
async def test_a_deployment_whose_callers_come_back_by_themselves_shows_what_it_does(
    places: int, batch: int, pause: float
) -> None:
    @ps.node(batch=ps.Batch(batch), concurrency=2)
    async def double(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.2)
        return [2 * number for number in numbers]

    async def caller() -> None:
        for number in range(20):
            await service(number)
            await asyncio.sleep(pause)

    async with engine.deploy(ps.graph(double), max_in_flight=places) as service:
        await asyncio.gather(*(caller() for _ in range(places)))
        assert service.statistics().admission.calls_per_second == pytest.approx(places / 0.2, rel=0.05)


@ps.graph
@ps.node
async def held(tenant: str, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def tenant_of(tenant: str, seconds: float) -> str:
    return tenant


async def cancelled(*calls: asyncio.Task[Any]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


def in_flight_of(service: "engine.Service[..., Any]") -> dict[Hashable, int]:
    return {one.key: one.in_flight for one in service.statistics().admission.keys}


@pytest.mark.parametrize("weight", [1, 3])
@virtual
async def test_what_counts_is_for_how_long_places_are_held(weight: int) -> None:
    async def callers(tenant: str, seconds: float) -> None:
        async with asyncio.TaskGroup() as calls:
            for _ in range(1000):
                calls.create_task(service(tenant, seconds))

    async with engine.deploy(held, key=tenant_of, weights={"streams": weight}, max_in_flight=8) as service:
        tasks = [asyncio.create_task(callers("streams", 20.0)), asyncio.create_task(callers("short", 2.0))]
        await asyncio.sleep(400)
        held_seconds = {one.key: one.held_seconds for one in service.statistics().admission.keys}
        await cancelled(*tasks)
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
        *calls, newest, other = await begun(*(service(tenant, 1000.0) for tenant in "aaaab"))
        with pytest.raises(Overloaded, match=r"3 wait .* key 'a'"):
            await newest
        counts = {one.key: (one.queued, one.refused) for one in service.statistics().admission.keys}
        assert counts == {"a": (2, 1), "b": (1, 0)}
        with pytest.raises(Overloaded, match="key 'a'") as refused:
            await service("a", 0.0)
        assert refused.value.key == "a"
        await cancelled(*calls, other)
    seen = service.statistics()
    assert (seen.cancelled, seen.admission.refused, seen.admission.queued) == (4, 2, 0)


async def test_only_a_key_that_asks_for_too_much_is_told_that_it_was_the_reason() -> None:
    async with engine.deploy(held, key=tenant_of, max_in_flight=1, max_queue=1) as service:
        calls = await begun(*(service(name, 1000.0) for name in "ab"))
        with pytest.raises(Overloaded) as full:
            await service("c", 0.0)
        assert full.value.key is None
        assert "over its share" not in str(full.value)
        with pytest.raises(Overloaded, match="key 'a', which is over its share") as greedy:
            await service("a", 0.0)
        assert greedy.value.key == "a"
        await cancelled(*calls)


@virtual
async def test_a_key_has_no_more_places_and_no_longer_queue_than_it_may() -> None:
    options: dict[str, Any] = {"max_in_flight_per_key": 2, "max_queue_per_key": 1}
    async with engine.deploy(held, key=tenant_of, max_in_flight=4, **options) as service:
        first = await begun(*(service("a", 1.0) for _ in range(3)))
        assert in_flight_of(service) == {"a": 2}
        with pytest.raises(Overloaded, match="1 of them of key 'a'"):
            await service("a", 1.0)
        assert await service("b", 0.5) == 0.5  # other keys have free places
        await first[0]
        await wait_quiescent()
        assert in_flight_of(service) == {"a": 1, "b": 0}
        assert await outcomes(*(service("a", 5.0) for _ in range(3)), *first) == [5.0, 5.0, Overloaded] + [1.0] * 3


async def tells_its_key(inbox: Any) -> None:
    while True:
        work = await inbox.get()
        work.finish(work.key)


async def streams_its_key(inbox: Any) -> None:
    while True:
        work = await inbox.get()
        work.put_nowait(work.key)
        work.finish()


asked, streamed = actor(tells_its_key), actor(streams_its_key, ps.StreamActor)


@ps.graph
async def who(tenant: str, *, number: float) -> list[object]:
    return [await asked(await paused(0)), await ps.map_each(asked, [number, number])]


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
        assert await values_of(service.stream(who_streams("b"))) == [("who_streams", "b")]
        assert in_flight_of(service) == {("who", "a"): 0, ("who_streams", "b"): 0}


def missing(tenant: Any) -> Any:
    return tenant.missing


async def awaited(tenant: str, seconds: float = 0.0) -> str:
    return tenant


@pytest.mark.parametrize("key", [lambda tenant: [tenant], missing, awaited], ids=["unhashable", "error", "awaited"])
async def test_a_call_without_a_key_fails_alone_and_is_counted(key: Callable[[Any], Hashable]) -> None:
    errors = TypeError, AttributeError
    calls = [held("a", 0.0), held("b", 0.0), held("a", 0.25)]

    def key_of(call: ps.Call[Any]) -> Hashable:
        return "key of a" if call.arguments[0] == "a" else key(call.arguments[0])

    async with engine.deploy(held, who_streams, key=key_of, max_in_flight=2) as service:
        failed = [isinstance(outcome.error, errors) for outcome in await outcomes_of(service.stream(calls))]
        assert failed == [False, True, False]
        assert await service.map(calls, on_error="skip") == [0.0, 0.25]
        for call in (
            lambda: service.map(calls), lambda: service("b", 0.0), lambda: anext(service.stream(who_streams("b"))),
        ):  # fmt: skip
            with pytest.raises(errors) as caught:
                await call()
            assert "key= of the deployment" in caught.value.__notes__[0]
        assert await service("a", 0.0) == 0.0
        seen = service.statistics()
    assert (seen.completed + seen.cancelled, seen.failed, seen.admission.in_flight) == (7, 5, 0)


@pytest.mark.parametrize("name", ["other", []], ids=["another hash", "no hash"])
@virtual
async def test_a_key_whose_hash_changes_gives_its_place_back(name: Any) -> None:
    def key_of(tenant: Any, seconds: float) -> Hashable:
        return tenant

    async with engine.deploy(held, key=key_of, max_in_flight=1) as service:
        keys: list[Any] = [Renamed(f"tenant {number}") for number in range(1100)]
        *calls, items = await begun(
            *(service(key, 1.0) for key in keys), service.map(held(key, 1.0) for key in keys[:2])
        )
        for key in keys:
            key.name = name and f"{name} {key.name}"
        assert await asyncio.gather(*calls) == [1.0] * 1100
        if name:
            assert await items == [1.0] * 2
            assert len(service.statistics().admission.keys) == 1000
        else:
            assert await outcomes(items) == [TypeError]
        seen = service.statistics().admission
        assert (seen.in_flight, seen.queued) == (0, 0)


def calls_of_python(refusals: int, tenants: int) -> int:
    """Return how many Python functions run while a deployment with a full queue of many tenants refuses calls."""
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1

    async def main() -> None:
        async with engine.deploy(held, key=tenant_of, max_in_flight=1, max_queue=tenants - 1) as service:
            calls = await begun(*(service(f"tenant {number}", 1.0) for number in range(tenants)))
            with pytest.raises(Overloaded):
                await service("tenant 1", 1.0)
            for _ in range(refusals):
                refused = asyncio.create_task(service("tenant 1", 1.0))
                sys.setprofile(count)
                await asyncio.wait([refused])
                sys.setprofile(None)
                assert isinstance(refused.exception(), Overloaded)
            await cancelled(*calls)

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
            running, waiting, gone = await begun(*map(service, "abb"))
            items = await begun(*(service.map([graph(tenant)]) for tenant in "ab"))
            ending = asyncio.create_task(service.abort())
            await asyncio.sleep(0)
            gone.cancel()
            assert await outcomes(gone, running, waiting, *items) == [
                asyncio.CancelledError, *[ps.EngineClosedError] * 4,
            ]  # fmt: skip
            assert not ending.done()
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
    ({"key": lambda seconds, tenant: tenant}, "in their order"),
    ({"key": tenant_of, "weights": {"a": 0}}, r"weights\['a'\]=0: a finite number above 0"),
    ({"key": tenant_of, "weights": ["a"]}, "weights=.*: a mapping"),
    ({"key": tenant_of, "max_in_flight_per_key": 0}, "max_in_flight_per_key=0: a whole number of at least 1"),
    ({"key": tenant_of, "max_queue_per_key": -1}, "max_queue_per_key=-1: a whole number of at least 0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
async def test_wrong_options_of_fair_shares_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.OptionsError, match=message):
        engine.deploy(held, **options)


@virtual
async def test_a_refused_key_is_told_when_its_own_calls_will_be_in() -> None:
    async with engine.deploy(held, key=tenant_of, max_in_flight=1, max_queue_per_key=1) as service:
        for expected in (None, pytest.approx(6)):
            calls = await begun(*(service("a", 3.0) for _ in range(2)))
            with pytest.raises(Overloaded) as refused:
                await service("a", 3.0)
            assert refused.value.retry_after_seconds == expected
            await asyncio.wait(calls)
