"""A profile shows the work of nodes inside its block, and names the node that limits."""

import asyncio
import contextlib
import gc
import math
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, telemetry, testing
from penstock.insight.sums import EVENT_LOOP, Evidence, GilUse, ReaderSum, Sums, explained
from penstock.insight.verdict import find_verdict
from penstock.telemetry import Capacity, ScopeSnapshot, StepSnapshot
from penstock.telemetry.profiling import collectors
from penstock.telemetry.profiling.durations import Durations, OutsideSeconds
from penstock.telemetry.profiling.records import TimedReading
from tests.kit import Gate, actor, begun, model, numbers, same, values_of
from tests.telemetry.virtual_time import VirtualTime, node_of, profile_of, waits

pytestmark = pytest.mark.usefixtures("virtual")


@ps.node
def half(number: int) -> float:
    return number / 2


fetch = waits("fetch", 0.001)
middle = fetch >> waits("slow", 0.1, concurrency=2) >> half
quick = fetch >> half


# --- Which node limits ---


def test_a_reader_that_holds_the_loop_limits_although_nodes_look_busy_meanwhile(virtual: VirtualTime) -> None:
    async def read() -> telemetry.Profile:
        with telemetry.profile() as profile:
            async with engine.stream(middle(number) for number in range(40)) as results:
                async for _ in results:
                    virtual.hold(1)
        return profile

    profile = testing.run_virtual(read)
    assert (node_of(profile, "slow").busy_share or 0) > 0.8
    assert profile.verdict.reason.startswith("the reader of fetch_to_slow_to_half limits")


def test_the_limit_that_is_taken_most_tells_the_busy_share_of_a_node() -> None:
    held = waits("held", 0.1, concurrency=64)

    @ps.graph
    async def mapped(numbers: list[int]) -> list[int]:
        return await ps.map_each(held, numbers, concurrency=2)

    profile = testing.run_virtual(lambda: profile_of(engine.stream([mapped([*range(20)])])))
    assert node_of(profile, "held").busy_share == pytest.approx(1.0)


def evidence_of(*steps: StepSnapshot, **options: Any) -> Evidence:
    """Returns what a profile of 10 s has seen of some steps."""
    sums = Sums()
    sums.add(ScopeSnapshot(1, 0.0), ScopeSnapshot(1, 10.0, steps))
    return Evidence(sums, 10.0, **options)


EMPTY = engine.ChannelStatistics(0, 16, 0, 0, 0, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize(("waited_seconds", "node"), [(0.5, None), (2.0, "busy")])
def test_a_reader_that_never_waits_limits_whatever_nodes_show(waited_seconds: float, node: str | None) -> None:
    counters = engine.ActorStatistics("graph", "busy", 10, 0, 0, 0, 1, 1, 10.0, EMPTY)
    evidence = evidence_of(StepSnapshot(counters, "key", "loop", False, False, (Capacity("key", 1, "state"),)))
    evidence.sums.readers["graph"] = ReaderSum("graph", 10.0, waited_seconds)
    assert find_verdict(evidence).node == node


def evidence_of_a_device_node(gil: GilUse, loop_delay_seconds: float = 0.0, *, gathers: bool = False) -> Evidence:
    """A node is busy for all of 10 s. Its device computes for 1.5 s; its threads take 2 s, and compute for 1 s."""
    counters = engine.ActorStatistics("graph", "train", 1_000, 0, 0, 0, 1, 1, 10.0, EMPTY)
    outside = OutsideSeconds(0.0, 0.0, 1.5, thread_seconds=2.0, cpu_seconds=1.0, hop_seconds=6.0, hops=2_000)
    place = (Capacity("key", 1, "state"),)
    train = StepSnapshot(counters, "key", "loop", False, gathers, place, timed=TimedReading(outside=outside))
    others = engine.ActorStatistics("graph", "augment", 10, 0, 0, 0, 1, 1, 4.0, EMPTY)
    augment = StepSnapshot(others, "other", "thread", False, False, (), pool="threads")
    return evidence_of(train, augment, loop_delay_seconds=loop_delay_seconds, gil=gil)


def test_a_verdict_says_what_the_time_of_a_node_goes_into() -> None:
    verdict = find_verdict(evidence_of_a_device_node(GilUse({EVENT_LOOP: 0.1}, 0.0005), 0.002))
    assert (verdict.node, verdict.limit) == ("train", "places")
    assert verdict.spent == (
        "of that it spends 15% computing on its device, 10% computing in its threads, 16% waiting for the GIL (held "
        "most by the event loop), 15% waiting for the event loop, 35% on the way to a thread and back"
    )
    assert f"; {verdict.spent}; " in str(verdict)
    assert "waiting for the GIL" in verdict._repr_html_()


def test_a_node_that_gathers_items_spends_its_time_on_all_that_wait() -> None:
    verdict = find_verdict(evidence_of_a_device_node(GilUse(), gathers=True))
    assert verdict.spent.startswith("of the time in it, an item spends 15% computing on its device, ")


def test_who_holds_the_gil_limits_and_not_who_waits_for_it() -> None:
    gil = GilUse({("graph", "augment"): 0.4, EVENT_LOOP: 0.1}, 0.002)
    verdict = find_verdict(evidence_of_a_device_node(gil))
    assert (verdict.node, verdict.limit) == ("augment", "gil")
    assert verdict.reason == (
        'its threads hold the GIL for 40% of the time, and "train" waits for it for 50% of its own'
    )
    assert 'runs_on="process"' in verdict.remedy
    assert verdict.headroom == pytest.approx(2.0, rel=0.01)


def evidence_of_threads(
    cpu_seconds: float = 8.5, hop_seconds: float = 6.0, delay_seconds: float = 0.005, loop_cpu_seconds: float = 1.0
) -> Evidence:
    """In 10 s, threads and the loop compute, calls are on their way to a thread or back, and timers are late."""
    counters = engine.ActorStatistics("graph", "spin", 1_000, 0, 0, 0, 1, 1, 9.9, EMPTY)
    outside = OutsideSeconds(0.0, 0.0, 0.0, 9.9, cpu_seconds, hop_seconds, hops=2_000)
    places, timed = (Capacity("key", 1, "state"),), TimedReading(outside=outside)
    spin = StepSnapshot(counters, "key", "thread", False, False, places, pool="threads", timed=timed)
    return evidence_of(
        spin, loop_cpu_seconds=loop_cpu_seconds, loop_late_share=0.9, loop_delay_seconds=delay_seconds
    )  # fmt: skip


def test_threads_and_a_loop_that_use_one_core_while_calls_wait_are_limited_by_the_gil() -> None:
    evidence = explained(evidence_of_threads(), 0.5)
    assert evidence.gil.held == {("graph", "spin"): 0.85, EVENT_LOOP: 0.1}
    assert 2_000 * evidence.gil.wait_seconds == pytest.approx(6.0 - 0.1 * (9.9 + 6.0) - 0.5)
    assert evidence.loop_late_share == pytest.approx(0.0)  # nothing blocks the loop
    verdict = find_verdict(evidence)
    assert (verdict.node, verdict.limit) == ("spin", "gil")
    assert verdict.remedy.startswith('runs_on="process" at spin')


@pytest.mark.parametrize(
    ("evidence", "core_wait_seconds", "late_share"),
    [
        pytest.param(evidence_of_threads(hop_seconds=9.0), 3.2, 0.0, id="other programs use the cores"),
        pytest.param(evidence_of_threads(), None, 0.05, id="nobody knows whether other programs use the cores"),
        pytest.param(evidence_of_threads(10.5), 0.5, 0.0, id="more than one core: code that releases the GIL"),
        pytest.param(evidence_of_threads(5.5), 0.5, 0.3, id="less than one core"),
        pytest.param(evidence_of_threads(hop_seconds=4.0), 0.5, 0.0, id="nobody waits: code that releases the GIL"),
        pytest.param(evidence_of_threads(5.0, loop_cpu_seconds=4.5), 0.5, 0.35, id="calls wait for the event loop"),
        pytest.param(evidence_of_threads(delay_seconds=0.01), 0.5, 0.85, id="something blocks the loop for long"),
    ],
)
def test_otherwise_no_verdict_is_about_the_gil(
    evidence: Evidence, core_wait_seconds: float | None, late_share: float
) -> None:
    evidence = explained(evidence, core_wait_seconds)
    assert evidence.gil == GilUse()
    assert evidence.loop_late_share == pytest.approx(late_share)
    assert find_verdict(evidence).limit != "gil"


def test_a_next_limit_whose_remedy_has_no_known_gain_is_named_without_a_gain() -> None:
    busy = engine.ActorStatistics("graph", "busy", 1_000, 0, 0, 0, 1, 1, 9.9, EMPTY)
    spin = engine.ActorStatistics("graph", "spin", 1_000, 0, 0, 0, 1, 1, 9.5, EMPTY)
    verdict = find_verdict(
        evidence_of(
            StepSnapshot(busy, "busy", "loop", False, False, (Capacity("busy", 1, "concurrency"),)),
            StepSnapshot(spin, "spin", "thread", False, False, (Capacity("spin", 1, "concurrency"),), pool="threads"),
            gil=GilUse({("graph", "spin"): 0.98}),
        )
    )
    assert (verdict.node, verdict.limit) == ("busy", "places")
    assert 'concurrency=2 at busy, alone no faster, as "spin" limits as much' in verdict.remedy


def test_no_larger_inbox_is_advised_where_worker_processes_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.insight.limits._cores", lambda: 4)
    full = engine.ChannelStatistics(16, 16, 16, 0, 900, 0, 0, 8.0, 0.0)
    read = engine.ActorStatistics("graph", "read", 1_000, 0, 0, 0, 1, 1, 2.0, replace(full, put_wait_seconds=0.0))
    parse = engine.ActorStatistics("graph", "parse", 1_000, 0, 0, 0, 2, None, 19.0, full)
    blocked, places = TimedReading(blocked_seconds=8.0), (Capacity("flight", 64, "max_in_flight"),)
    evidence = evidence_of(
        StepSnapshot(read, "read", "loop", True, False, (Capacity("read", 1, "loop"),), ("parse",), timed=blocked),
        StepSnapshot(
            parse, "parse", "process", False, False, (*places, Capacity("pool", 2, "processes")), pool="processes"
        ),
    )
    verdict = find_verdict(evidence)
    assert (verdict.node, verdict.limit) == ("parse", "pool")
    assert verdict.remedy.startswith("Engine(max_processes=4), ")


def test_a_node_that_nobody_times_limits_if_items_wait_for_it_as_in_statistics() -> None:
    inbox = engine.ChannelStatistics(16, 16, 16, 0, 40, 0, 0, 30.0, 0.0)
    reads_a_stream = engine.ActorStatistics("graph", "reads", 10, 0, 0, 0, 8, 8, None, inbox)
    verdict = find_verdict(evidence_of(StepSnapshot(reads_a_stream, "key", "loop", False, False, ())))
    assert (verdict.graph, verdict.node) == ("graph", "reads")
    assert verdict.reason == "on average 3.00 items waited for room in its inbox"
    statistics = engine.StreamStatistics(0, 0, 0, 0, 0, 0, (reads_a_stream,), 10.0, 10.0)
    assert statistics.bottleneck is not None
    assert statistics.bottleneck.node == "reads"


def test_max_workers_limits_nodes_that_have_no_limit() -> None:
    stream = lambda: profile_of(engine.stream((quick(number) for number in range(64)), max_workers=2))  # noqa: E731
    verdict = testing.run_virtual(stream).verdict
    assert verdict.node == "fetch"
    assert "max_workers=" in verdict.remedy


@ps.node
async def seconds(number: float) -> float:
    await asyncio.sleep(number)
    return number


async def short(number: int) -> float:
    return await seconds(0.01)


async def long(number: int) -> float:
    return await seconds(0.1)


@ps.node
async def both(one: list[float], other: list[float]) -> list[float]:
    return [*one, *other]


@ps.graph
async def maps(numbers: list[int]) -> list[float]:
    first = await both(
        await ps.map_each(short, numbers, concurrency=1), await ps.map_each(long, numbers, concurrency=1)
    )
    return await both(first, await ps.map_each(lambda number: seconds(0.01), numbers, name="third"))


def test_bodies_of_several_map_each_are_told_apart() -> None:
    async def call() -> tuple[telemetry.Profile, engine.ServiceStatistics]:
        with telemetry.profile() as profile:
            async with engine.deploy(maps) as service:
                for _ in range(5):
                    await service([1, 2, 3])
                return profile, service.statistics()

    profile, statistics = testing.run_virtual(call)
    counts = {(node.graph, node.node): node.count for node in profile.nodes if node.node == "seconds"}
    assert counts == {("maps/short", "seconds"): 15, ("maps/long", "seconds"): 15, ("maps/third", "seconds"): 15}
    assert {(one.graph, one.node): one.completed for one in statistics.actors if one.node == "seconds"} == counts
    assert (profile.verdict.graph, profile.verdict.node) == ("maps/long", "seconds")
    assert str(profile.verdict).startswith('"long/seconds" limits the pipeline: ')
    assert [line.strip("│ ") for line in str(maps).splitlines() if line.endswith(":")] == ["short:", "long:", "third:"]


def test_a_stateful_node_limits() -> None:
    counted = fetch >> model(call=lambda number: asyncio.sleep(0.1, number))
    verdict = testing.run_virtual(lambda: profile_of(engine.stream(counted(number) for number in range(20)))).verdict
    assert verdict.node == "Model"
    assert verdict.reason.startswith("its only place is busy for ")
    assert verdict.remedy.startswith("concurrency=")
    assert "; if it may have several items at a time" in verdict.remedy


def test_a_source_that_holds_the_loop_limits(virtual: VirtualTime) -> None:
    def source() -> Iterator[ps.Call[float]]:
        for number in range(10):
            virtual.hold(1)
            yield quick_half(number)

    quick_half = same >> half
    verdict = testing.run_virtual(lambda: profile_of(engine.stream(source(), max_in_flight=1))).verdict
    assert verdict.reason.startswith("the source limits")


@ps.node
async def late_values(number: int) -> AsyncIterator[int]:
    yield number
    await asyncio.sleep(10)
    yield number


late_stream = ps.graph(late_values)


async def late_calls() -> AsyncIterator[ps.Call[float]]:
    yield quick(0)
    await asyncio.sleep(10)
    yield quick(1)


@pytest.mark.parametrize("what", ["values", "calls"])
def test_the_wait_of_a_reader_counts_from_the_beginning_of_the_profile(what: str) -> None:
    async def main() -> telemetry.Profile:
        late: Any = late_stream(0) if what == "values" else late_calls()
        async with engine.stream(late) as values:
            await anext(values)
            rest = asyncio.ensure_future(anext(values))
            await asyncio.sleep(5)
            with telemetry.profile() as profile:
                await asyncio.sleep(2)
                await engine.run(quick(2))  # if nothing ran, there is no verdict
            await rest
        return profile

    assert testing.run_virtual(main).verdict.reason.startswith("the source limits")


def test_nothing_ran() -> None:
    with telemetry.profile() as profile:
        pass
    assert profile.nodes == ()
    assert profile.critical_path is None
    assert profile.verdict.node is None
    assert str(profile.verdict) == ("nothing ran while the profile was taken; put the calls inside of its `with` block")


async def test_an_async_node_that_never_waits_is_named_by_the_time_of_the_processor(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.insight.watching.thread_seconds", lambda thread: virtual())

    @ps.node
    async def compute(number: int) -> int:
        virtual.hold(0.01)
        return number

    computed = ps.graph(compute)
    verdict = (await profile_of(engine.stream(computed(number) for number in range(20)))).verdict
    assert verdict.node == "compute"
    assert verdict.reason == "it holds the event loop for 100% of the time without a wait"
    with telemetry.profile() as profile:
        await engine.run(computed(1))
        virtual.hold(1)
    assert profile.verdict.reason.startswith("the event loop limits: it computes for 100% of the time")


# --- What counts ---


async def test_a_deployment_that_was_open_before_and_goes_on_counts_from_begin_to_end() -> None:
    async with engine.deploy(quick) as service:
        await service(1)
        with telemetry.profile() as profile:
            await service(2)
        await service(3)
        assert [node.count for node in profile.nodes] == [1, 1]
    assert [node.count for node in profile.nodes] == [1, 1]
    assert [(each.node, each.item) for each in profile.timeline.slices] == [("fetch", 1), ("half", 1)]


async def test_scopes_of_one_graph_are_added_up_also_of_other_tasks() -> None:
    async def one() -> None:
        await engine.Engine().run(quick(1))
        assert await values_of(engine.stream([quick(2), quick(3)])) == [1, 1.5]

    with telemetry.profile() as profile:
        await asyncio.gather(one(), one())
        assert [(node.node, node.count) for node in profile.nodes] == [("fetch", 6), ("half", 6)]


async def test_a_profile_inside_of_another_counts_the_calls_of_its_block() -> None:
    with telemetry.profile() as outer:
        await engine.run(quick(1))
        with telemetry.profile() as inner:
            await engine.run(quick(2))
            assert [node.count for node in outer.nodes] == [2, 2]
        await engine.run(quick(3))
    await engine.run(quick(4))
    assert [(node.node, node.count) for node in outer.nodes] == [("fetch", 3), ("half", 3)]
    assert [node.count for node in inner.nodes] == [1, 1]
    # The end of the inner profile does not end the timing for the outer.
    assert [each.item for each in outer.timeline.slices if each.node == "half"] == [0, 0, 0]


async def test_a_profile_that_is_taken_in_another_thread() -> None:
    block = telemetry.profile()
    async with engine.deploy(quick) as service:
        actor = service._deployment.scope.wiring.actors()[0]  # type: ignore[union-attr]
        await service(1)
        profile = await asyncio.to_thread(block.__enter__)
        await service(2)
        assert actor.sampler is not None
        await engine.run(quick(3))
        await asyncio.to_thread(block.__exit__, None, None, None)
        await service(4)
        await asyncio.sleep(0)
        assert actor.sampler is None
    assert [(node.node, node.count) for node in profile.nodes] == [("fetch", 2), ("half", 2)]
    assert all(node.p50_seconds is not None for node in profile.nodes)


async def test_profiles_of_another_thread_one_right_after_the_other(virtual: VirtualTime) -> None:
    @ps.node
    async def take(number: int) -> int:
        virtual.hold(1.0)
        return number

    def both() -> None:
        first.__exit__(None, None, None)
        taken.append(second.__enter__())

    first, second, taken = telemetry.profile(), telemetry.profile(), list[telemetry.Profile]()
    async with engine.deploy(ps.graph(take)) as service:
        await asyncio.to_thread(first.__enter__)
        for number in range(10):
            await service(number)
        thread = threading.Thread(target=both)
        thread.start()
        thread.join()  # so that the loop gets both at once
        await asyncio.sleep(0)
        await service(1)
        await asyncio.to_thread(second.__exit__, None, None, None)
    assert [(node.count, node.busy_seconds) for node in taken[0].nodes] == [(1, 1.0)]


async def test_it_may_be_looked_at_in_another_thread_while_scopes_come_and_go() -> None:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            assert all(node.count >= 0 for node in profile.nodes)
            assert str(profile.verdict)

    with telemetry.profile() as profile:
        looking = asyncio.create_task(asyncio.to_thread(look))
        for _ in range(60):
            assert await values_of(engine.stream([quick(1)])) == [0.5]
        is_over.set()
        await looking
    assert [node.count for node in profile.nodes] == [60, 60]


async def test_an_item_in_flight_between_two_profiles_does_not_end_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.actors.sampler._FIRST_OF_ALL", 1)
    monkeypatch.setattr("penstock.actors.sampler._LEAST_FIRST", 1)
    gate = Gate()
    async with engine.deploy(gate.graph()) as service:
        with telemetry.profile():
            [call] = await begun(service(0))
        with telemetry.profile() as profile:
            gate.open()
            await call
            await service(1)
    assert [each.item for each in profile.timeline.slices] == [1]


def test_a_profile_around_the_loop_itself() -> None:
    with telemetry.profile() as profile:
        testing.run_virtual(lambda: engine.run(quick(1)))
    assert [node.count for node in profile.nodes] == [1, 1]


async def test_a_node_that_gives_or_reads_a_stream_has_no_busy_share() -> None:
    @ps.node
    async def total(items: AsyncIterator[int]) -> int:
        return sum([item async for item in items])

    summed = numbers >> total
    with telemetry.profile() as profile:
        assert await engine.run(summed(4)) == 6
    told = [(node.node, node.busy_share, node.mean_seconds) for node in profile.nodes]
    assert told == [("numbers", None, None), ("total", None, None)]


async def test_graphs_made_for_one_call_count_and_leave_nothing_behind() -> None:
    with telemetry.profile() as profile:
        plans: list[weakref.ref[object]] = []
        for number in range(5):
            graph = fetch >> half
            await engine.run(graph(number))
            plans.append(weakref.ref(graph._planned()))
            del graph
        gc.collect()
        assert [plan() for plan in plans] == [None] * 5
        assert [node.count for node in profile.nodes] == [5, 5]
    assert [node.count for node in profile.nodes] == [5, 5]


async def test_a_profile_that_is_kept_keeps_nothing_else_alive() -> None:
    instances: list[weakref.ref[object]] = []

    @ps.node
    class Large:
        async def __call__(self, number: int) -> int:
            instances.append(weakref.ref(self))
            return number

    passed = ps.graph(Large())
    with telemetry.profile() as profile:
        assert await values_of(engine.stream([passed(1), passed(2)])) == [1, 2]
        gc.collect()
        assert [instance() for instance in instances] == [None] * 2
    assert [node.count for node in profile.nodes] == [2]


# --- What it costs, and how it looks ---


async def test_after_a_profile_nothing_is_told_and_nothing_is_timed() -> None:
    with telemetry.profile():
        await engine.run(quick(1))
    async with engine.stream([quick(1)]) as results:
        assert collectors.running == []
        assert [each async for each in results] == [0.5]
        assert results.statistics().actors[0].busy_seconds is None


async def test_a_profile_starts_no_thread() -> None:
    with telemetry.profile():
        before = threading.enumerate()
        await engine.run(quick(1))
        assert threading.enumerate() == before


async def test_it_prints_as_a_table() -> None:
    with telemetry.profile() as profile:
        await engine.run(quick(1))
    lines = str(profile).splitlines()
    assert lines[0].startswith("profile  over ")
    head, _, rows = str(profile).rpartition("─\n")
    facts, _, titles = head.partition("\n\n")
    assert " ".join(facts.split()).endswith(f" verdict {profile.verdict}")
    said = " ".join(f"{titles} {rows.partition(' rows: ')[2]}".split())
    assert all(title in said for title in ("node", "done", "failed", "mean", "p50", "p99", "wait", "occupancy"))
    assert [line.split()[:2] for line in rows.splitlines()[:2]] == [["fetch_to_half"], ["fetch", "1"]]
    assert "<th" in profile._repr_html_()


# --- Times of nodes ---


@pytest.mark.parametrize("is_open", [False, True])
async def test_functions_of_a_chain_have_a_row_each_although_they_share_an_actor(
    virtual: VirtualTime, is_open: bool
) -> None:
    def takes(name: str, seconds: float) -> ps.Node[[int], int]:
        def take(number: int) -> int:
            if (name, number) == ("second", 7):
                raise LookupError
            virtual.hold(seconds)
            return number

        take.__name__ = name
        return ps.node(take)

    async def ask(*numbers: int) -> None:
        for number in numbers:
            with contextlib.suppress(LookupError):
                await service(number)

    chain = takes("first", 1.0) >> takes("second", 3.0) >> takes("third", 2.0)
    async with engine.deploy(chain) as service:
        await ask(*range(5 if is_open else 0))
        with telemetry.profile() as profile:
            await ask(*range(10))
    first, second, third = profile.nodes
    assert (first.count, first.errors, second.errors, third.errors) == (9, 1, 0, 0)
    busy = [node.busy_seconds for node in profile.nodes]
    assert busy == [pytest.approx(seconds, rel=0.15) for seconds in (10.0, 27.0, 18.0)]
    assert second.p50_seconds == pytest.approx(3.0, rel=0.05)
    assert (profile.verdict.node, profile.what_if("second", concurrency=2).node) == ("second", "second")
    assert {one.node for one in profile.timeline.slices} == {"first", "second", "third"}
    assert [step.consumers for step in profile.steps] == [("second",), ("third",), ()]


async def test_of_a_node_that_runs_often_a_sample_is_timed_and_stands_for_all(virtual: VirtualTime) -> None:
    items = 20_000

    @ps.node
    async def computing(number: int) -> int:
        virtual.hold(0.003 if number % 20 == 7 else 0.002 if number % 2 else 0.001)
        return number

    @ps.node
    def line(number: int) -> int:
        virtual.hold(0.0005)
        return number

    busy = computing >> line
    profile = await profile_of(engine.stream(busy(number) for number in range(items)))
    found = node_of(profile, "computing")
    assert found.count == items
    told = (found.mean_seconds, found.busy_seconds, found.p50_seconds, found.p90_seconds, found.p99_seconds)
    assert told == pytest.approx((0.00155, 0.00155 * items, 0.001, 0.002, 0.003), rel=0.05)
    assert node_of(profile, "line").p50_seconds == pytest.approx(0.0005, rel=0.05)
    timed = [one for one in profile.timeline.slices if one.node == "computing"]
    assert 500 < len(timed) < items


def test_how_long_items_wait_before_a_node_and_behind_it() -> None:
    profile = testing.run_virtual(lambda: profile_of(engine.stream(middle(number) for number in range(40))))
    slow, fetch = node_of(profile, "slow"), node_of(profile, "fetch")
    assert slow.occupancy > 0.8  # slow limits: items always wait in its inbox
    assert slow.inbox_full_share > 0.3
    assert slow.queue_wait_seconds > 10
    assert fetch.blocked_seconds > 1  # finished items of fetch do not fit into the inbox of slow
    half = node_of(profile, "half")
    assert half.occupancy == half.queue_wait_seconds == half.inbox_full_share == 0  # half is starved
    assert slow.blocked_seconds == 0
    assert max(point.depth for point in profile.timeline.depths if point.node == "slow") == 16


def test_an_actor_that_owns_its_loop_tells_how_long_its_work_waits() -> None:
    async def slow(inbox: Any) -> None:
        while True:
            work = await inbox.get()
            await asyncio.sleep(0.1)
            work.finish(work.value)

    looping = ps.graph(actor(slow))
    profile = testing.run_virtual(lambda: profile_of(engine.stream(looping(number) for number in range(10))))
    [found] = profile.nodes
    assert found.count == 10
    assert found.queue_wait_seconds == pytest.approx(sum(range(10)) * 0.1, rel=0.2)
    assert found.occupancy > 0.8


async def test_the_timeline_tells_when_each_node_ran_for_which_item() -> None:
    profile = await profile_of(engine.stream(quick(number) for number in range(5)))
    slices = profile.timeline.slices
    assert sorted((one.node, one.item) for one in slices) == [*product(("fetch", "half"), range(5))]
    for item in range(5):
        fetch, half = (next(s for s in slices if (s.node, s.item) == (node, item)) for node in ("fetch", "half"))
        assert fetch.graph == "fetch_to_half"
        assert fetch.frame == half.frame
        assert 0 <= fetch.began_seconds <= fetch.ended_seconds <= half.began_seconds <= half.ended_seconds
        assert half.ended_seconds <= profile.elapsed_seconds
    assert len({one.frame for one in slices}) == 5
    assert profile.timeline.dropped == 0


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200))
def test_a_quantile_is_that_of_the_durations_within_the_width_of_a_bin(seconds: list[float]) -> None:
    durations = Durations()
    assert durations.quantile(0.5) is None
    durations.add(seconds)
    ordered = sorted(seconds)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        assert durations.quantile(share) == pytest.approx(exact, rel=0.03)
    later = durations.since(None)
    later.add([5.0], weight=3)
    assert later.since(durations).count == 3
    assert later.since(durations).quantile(0.5) == pytest.approx(5.0, rel=0.03)
