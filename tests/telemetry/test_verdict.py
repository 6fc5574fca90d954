"""A verdict names a planted bottleneck, its remedy and the gain; and predictions of changes come true."""

import asyncio
import contextlib
import itertools
import operator
import pkgutil
import random
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from time import sleep, thread_time
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import engine, telemetry
from tests.kit import plain, same, values_of
from tests.telemetry.test_remedies import Look, called
from tests.telemetry.virtual_time import VirtualTime, node_of, profile_of, profile_of_runs, waits

# --- Planted bottlenecks ---


@pytest.mark.parametrize("items", [8, 100])  # a few items fill no inbox, and do not wait for the source either
async def test_worker_processes_that_have_to_start(items: int) -> None:
    async with engine.Engine() as fresh:
        profile = await profile_of(fresh.stream((in_a_process(number) for number in range(items)), max_in_flight=100))
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == ("negate", "pool")
    assert "it waits for worker processes" in verdict.reason
    assert "so that workers start once" in verdict.remedy
    if items == 8:
        assert verdict.reason.endswith(", which start")
        assert verdict.factor == verdict.headroom
        assert (verdict.factor or 0) > 1


# From a module that takes no time to import, since the imports of a worker for a function are part of its first call.
in_a_process = ps.graph(ps.node(runs_on="process", name="negate")(operator.neg))


def test_a_slow_node(virtual: VirtualTime) -> None:
    def run(places: int) -> telemetry.Profile:
        pipeline = waits("fetch", 0.01, concurrency=4) >> waits("decode", 0.01, concurrency=places) >> plain
        return virtual.profile(pipeline, 200)

    profile = run(1)
    verdict, predicted = profile.verdict, profile.what_if("decode", concurrency=3)
    assert predicted.predicted_items_per_second == pytest.approx(200 / run(3).elapsed_seconds, rel=0.05)
    assert predicted.verdict.node == "decode"
    assert str(predicted).startswith('"decode" with 3 places: 29')
    assert "(3.00 times as many); then" in str(predicted)
    assert (verdict.node, verdict.limit) == ("decode", "places")
    assert "its only place is busy for 100% of the time, and its inbox is full for" in verdict.reason
    assert re.match(r"concurrency=4 at decode \(\S+:\d+\), 4\.0 times as fast; or", verdict.remedy)
    assert verdict.headroom == pytest.approx(4.0, rel=0.02)  # then fetch limits
    said = f'"decode" limits the pipeline: {verdict.reason}; {verdict.remedy}; without it up to 4.0 times as fast'
    assert str(verdict) == said


def test_it_says_which_share_was_hedged_or_taken_over(virtual: VirtualTime) -> None:
    @ps.node(concurrency=1, failover=same)
    async def fails_in_part(number: int) -> int:
        await asyncio.sleep(0.01)
        if number % 4 == 0:
            raise LookupError(number)
        return number

    hedged = waits("hedged", 0.01, hedge=ps.Hedge(after_seconds=0.005, max_share=0.5))

    def said(node: Any, **options: Any) -> str:
        verdict = virtual.profile(node >> plain, 200, **options).verdict
        assert verdict.node == node.name
        assert verdict.spent in str(verdict)
        return verdict.spent

    assert "25% of its items went on with the failover" in said(fails_in_part)
    assert "% of its items got a second attempt" in said(hedged, max_in_flight=2)


async def profile_and_bottleneck(graph: Any) -> tuple[telemetry.Profile, engine.Bottleneck | None]:
    with telemetry.profile() as profile:
        async with engine.stream(graph(number) for number in range(200)) as results:
            async for _ in results:
                pass
            bottleneck = results.statistics().bottleneck
    return profile, bottleneck


def test_a_name_that_would_drive_the_terminal_is_shown_escaped(virtual: VirtualTime) -> None:
    evil = waits("\x1b[2J\rdecode\n\x9b31m", 0.01, concurrency=1)

    async def pipeline(number: int) -> int:
        return plain(await evil(number))

    pipeline.__name__ = "\x1b]0;title\x07"
    graph = ps.graph(pipeline)
    profile, bottleneck = virtual.run(lambda: profile_and_bottleneck(graph))
    assert profile.verdict.node == evil.name
    predicted = profile.what_if(evil.name, concurrency=2)
    for said in (profile.verdict, profile.critical_path, predicted, profile, bottleneck):
        assert all(c.isprintable() or c == "\n" for c in str(said)), ascii(str(said))
    assert "\\x1b[2J decode \\x9b31m" in str(profile.verdict)
    assert "\\x1b]0;title\\x07" in str(profile.critical_path)


@pytest.mark.parametrize("calls", ["of a stream", "of a deployment", "in a row"])
def test_an_async_node_that_blocks_the_loop(virtual: VirtualTime, calls: str) -> None:
    @ps.node
    async def blocking(number: int) -> int:
        virtual.hold(0.005)
        return number

    search = waits("fetch", 0.001) >> blocking

    async def profile() -> telemetry.Profile:
        if calls == "of a stream":
            return await profile_of(engine.stream(search(number) for number in range(60)))
        if calls == "of a deployment":
            return await called(search, 8)
        with telemetry.profile() as profile:
            await asyncio.gather(*(engine.run(search(number)) for number in range(60)))
        return profile

    verdict = virtual.run(profile).verdict
    assert (verdict.node, verdict.limit) == ("blocking", "loop")
    assert verdict.remedy.startswith('runs_on="thread" at blocking (')
    assert "as a plain `def`" in verdict.remedy


def test_a_node_that_waits_is_not_blamed_for_what_else_blocks_the_loop(virtual: VirtualTime) -> None:
    pipeline = waits("fetch", 0.03, concurrency=1) >> waits("decode", 0.005, concurrency=2) >> plain

    async def other() -> None:
        while True:
            virtual.hold(0.02)
            await asyncio.sleep(0.004)

    async def run() -> telemetry.Profile:
        task = asyncio.create_task(other())
        try:
            return await profile_of(engine.stream(pipeline(number) for number in range(100)))
        finally:
            task.cancel()

    verdict = virtual.run(run).verdict
    assert (verdict.node, verdict.limit) == ("fetch", "places")


def test_a_slow_item_that_holds_up_the_order(virtual: VirtualTime) -> None:
    @ps.node
    async def ask(number: int) -> int:
        await asyncio.sleep(1.0 if number % 20 == 0 else 0.05)
        return number

    ordered, as_they_come = (
        virtual.profile(ask >> plain, 200, max_in_flight=8, ordered=is_ordered) for is_ordered in (True, False)
    )
    verdict = ordered.verdict
    assert (verdict.node, verdict.limit) == ("ask", "order")
    assert "have ended, and wait for one before them" in verdict.reason
    assert verdict.remedy.startswith("ordered=False at ")
    assert as_they_come.elapsed_seconds < ordered.elapsed_seconds / 2
    assert as_they_come.verdict.limit != "order"
    assert verdict.factor == pytest.approx(ordered.elapsed_seconds / as_they_come.elapsed_seconds, rel=0.25)


def test_few_items_in_flight_of_a_graph_of_several_nodes(virtual: VirtualTime) -> None:
    pipeline = waits("first", 0.01) >> waits("second", 0.01) >> waits("third", 0.01)
    before, after = (virtual.profile(pipeline, 90, max_in_flight=size) for size in (3, 12))
    verdict = before.verdict
    assert verdict.limit == "in_flight"
    assert verdict.remedy.startswith("max_in_flight=12 at ")
    assert verdict.factor == pytest.approx(before.elapsed_seconds / after.elapsed_seconds, rel=0.25)
    assert verdict.headroom == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(
    ("places", "threads", "limit", "reason", "remedy"),
    [
        (1, 8, "places", "its only place is busy for 100%", "concurrency=.*; or move it to"),
        (2, 2, "pool", "the 2 threads are busy", ".+"),  # the threads limit rather than as many places
    ],
)
def test_the_places_of_a_node_in_threads(
    virtual: VirtualTime, places: int, threads: int, limit: str, reason: str, remedy: str
) -> None:
    @ps.node(runs_on="thread", concurrency=places)
    def read(number: int) -> int:
        virtual.hold_thread(0.01)
        return number

    verdict = virtual.profile_in_threads(ps.graph(read), 30, threads).verdict
    assert (verdict.node, verdict.limit) == ("read", limit)
    assert verdict.reason.startswith(reason)
    assert re.match(remedy, verdict.remedy)


@pytest.mark.parametrize("places", [(1, 4, 2), (4, 1, 2), (4, 2, 1), (2, 2, 4)])
def test_statistics_name_the_same_node_if_they_name_any(virtual: VirtualTime, places: tuple[int, ...]) -> None:
    first, second, third = nodes = [
        waits(f"of_{count}_places_{index}", 0.01, concurrency=count) for index, count in enumerate(places)
    ]
    pipeline, limiting = first >> second >> third, nodes[places.index(min(places))].name
    profile, bottleneck = virtual.run(lambda: profile_and_bottleneck(pipeline))
    assert profile.verdict.node == limiting
    assert bottleneck is None or bottleneck.node == limiting


# --- The GIL ---


@pytest.mark.parametrize("victim", ["spin", "wait"])
def test_the_verdict_names_the_holder_of_the_gil(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """In virtual time, the test says which thread holds the GIL: the tests below see that in real time."""
    gil = pkgutil.resolve_name("penstock.insight.sums:GilUse")({("line", "spin"): 0.8}, 0.02)
    monkeypatch.setattr("penstock.insight.watching.explained", lambda evidence, _: replace(evidence, gil=gil))
    monkeypatch.setattr("penstock.actors.sampler.perf_counter", virtual)
    monkeypatch.setattr("penstock.actors.sampler.thread_time", lambda: 0.6 * virtual())

    @ps.node(runs_on="thread", concurrency=1)
    def spin(number: int) -> int:
        virtual.hold_thread(0.01 if victim == "spin" else 0.002)
        return number

    @ps.node(runs_on="thread", concurrency=1)
    def wait(number: int) -> int:
        virtual.hold_thread(0.01 if victim == "wait" else 0.002)
        return number

    @ps.graph
    async def line(number: int) -> int:
        return wait(spin(number))

    profile = virtual.profile_in_threads(line, 50)
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == ("spin", "gil"), str(verdict)
    assert "hold the GIL for 80% of the time" in verdict.reason
    assert ('and "wait" waits for it for' in verdict.reason) == (victim == "wait")
    assert verdict.remedy.startswith('runs_on="process" at spin ')
    assert "concurrency=" not in str(verdict)


# In real time, and so in `make test-timed`:


ITEMS = 100
SPIN_SECONDS = 0.003
ANGLES = np.linspace(0.0, 1.0, 40_000)


@ps.node(runs_on="thread", concurrency=1)
def spin(number: int) -> int:
    until = thread_time() + SPIN_SECONDS
    while thread_time() < until:
        pass
    return number


@ps.node(runs_on="thread", concurrency=2)
def sleep_in_c(number: int) -> int:
    sleep(0.001)
    return number


@ps.node(runs_on="thread", concurrency=1)
def compute_in_numpy(number: int) -> float:
    return float(np.sin(ANGLES).max()) + number


wait = waits("wait", 0.001, concurrency=1)


async def profile_beside(victim: Any, *, is_spinning: bool = True, items: int = ITEMS) -> telemetry.Profile:
    """Profile a node beside one that spins in a thread."""
    spinning, alone, over = ps.graph(spin), ps.graph(victim), asyncio.Event()
    until_over = itertools.takewhile(lambda _: not over.is_set(), itertools.count() if is_spinning else ())
    with telemetry.profile() as profile:
        async with asyncio.TaskGroup() as beside:
            beside.create_task(values_of(engine.stream(map(spinning, until_over))))
            await values_of(engine.stream(alone(number) for number in range(items)))
            over.set()
    return profile


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else says what the threads of a process do")
@pytest.mark.timed
async def test_a_live_look_names_the_node_that_holds_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "profile", Look)
    look: Any = await profile_beside(sleep_in_c)
    verdict = look.lately.verdict
    assert (verdict.node, verdict.limit) == ("spin", "gil"), str(verdict)
    assert 'runs_on="process"' in verdict.remedy


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else says what the threads of a process do")
@pytest.mark.timed
@pytest.mark.parametrize("victim", [sleep_in_c, compute_in_numpy, wait], ids=lambda node: node.name)
async def test_a_node_that_holds_the_gil_is_named_and_not_those_that_wait_for_it(victim: Any) -> None:
    profile = await profile_beside(victim)
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == ("spin", "gil"), str(verdict)
    assert "hold the GIL" in verdict.reason
    assert 'runs_on="process"' in verdict.remedy
    assert "concurrency=" not in str(verdict)
    assert (node_of(profile, "spin").gil_held_share or 0) > (node_of(profile, victim.name).gil_held_share or 0)
    assert (node_of(profile, victim.name).gil_share or 0) > 0.1  # 0.2 to 0.9, by the load of the machine
    # More places, however many, are of no use to a node that holds the GIL.
    assert profile.what_if("spin", concurrency=8).factor < 4


@pytest.mark.timed
@pytest.mark.parametrize("victim", [sleep_in_c, wait], ids=lambda node: node.name)
async def test_where_nobody_holds_the_gil_places_limit(victim: Any) -> None:
    profile = await profile_beside(victim, is_spinning=False)
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == (victim.name, "places"), str(verdict)
    assert "concurrency=" in verdict.remedy


BUSY = "while True: pass"
# Most of its time is in NumPy, which computes without the GIL.
MANY_ANGLES = np.linspace(0.0, 1.0, 400_000)


@ps.node(runs_on="thread", concurrency=2)
def compute_without_the_gil(number: int) -> float:
    return float(np.sin(MANY_ANGLES).max()) + number


@ps.node(runs_on="thread", concurrency=1)
def compute_alone_without_the_gil(number: int) -> float:
    return float(np.sin(MANY_ANGLES).max()) + number


@pytest.mark.timed
async def test_beside_busy_processes_no_verdict_blames_the_gil_for_what_they_take() -> None:
    """Two processes leave half of two cores, so threads without the GIL use about one core together."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            busy = await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY)
            stack.push_async_callback(busy.wait)
            stack.callback(busy.kill)
        for _ in range(20):
            for node in (compute_without_the_gil, compute_alone_without_the_gil):
                verdict = (await profile_beside(node, is_spinning=False, items=40)).verdict
                assert verdict.limit not in ("gil", "loop"), str(verdict)
            verdict = (await profile_beside(sleep_in_c, items=40)).verdict
            assert verdict.limit != "loop", str(verdict)
            assert verdict.limit != "gil" or verdict.node == "spin", str(verdict)


# --- Critical path ---


def test_of_nodes_side_by_side_the_slowest_counts(virtual: VirtualTime) -> None:
    left, right, short = waits("left", 0.05), waits("right", 0.05), waits("short", 0.01)

    @ps.node
    async def join(one: int, other: int, third: int) -> int:
        await asyncio.sleep(0.01)
        return one + other + third

    @ps.graph
    async def diamond(number: int) -> int:
        found: int = await join(await left(number), await right(number), await short(await short(number)))
        return found

    profile = virtual.run(lambda: profile_of_runs(diamond(number) for number in range(3)))
    path = profile.critical_path
    assert path is not None
    assert path.graph == "diamond"
    assert path.nodes in (("left", "join"), ("right", "join"))
    assert path.seconds == pytest.approx(0.06)
    assert str(path) == f"{path.nodes[0]} → join: 60.0 ms of each run of diamond"
    assert profile.verdict.node == path.nodes[0]
    assert profile.verdict.reason == "of the longest path through the graph it takes 83%, 50.0 ms each time"


# --- Deployments of streams, whose nodes are not timed ---


@ps.node
class Slots(ps.StreamActor[int, int]):
    """Works on four items at a time, in ten steps each."""

    async def loop(self, inbox: ps.Inbox[ps.StreamWork[int, int]], /) -> None:
        active: dict[ps.StreamWork[int, int], int] = {}
        while True:
            fresh = [] if active else [await inbox.get()]
            active |= dict.fromkeys([*fresh, *inbox.take_nowait(4 - len(active) - len(fresh))], 10)
            await asyncio.sleep(0.002)
            self.report(slots=4, step_seconds=0.002)
            for work, left in list(active.items()):
                work.put_nowait(left)
                active[work] = left - 1
                if left == 1:
                    work.finish()
                    del active[work]


@ps.node
async def spelled(number: int) -> AsyncIterator[int]:
    for part in range(10):
        await asyncio.sleep(0.002)
        yield part


@ps.node
async def plus(total: int, number: int) -> int:
    return total + number


def profile_of_callers(virtual: VirtualTime, node: Any, max_in_flight: int, callers: int, *, folds: bool) -> Any:
    @ps.graph
    async def total(number: int) -> int:
        return await ps.fold(plus, node(number), 0)

    graph = total if folds else ps.graph(node)
    return virtual.run(lambda: called(graph, callers, gives_a_stream=not folds, max_in_flight=max_in_flight))


@pytest.mark.parametrize("folds", [False, True])
def test_an_actor_limits_if_items_wait_in_its_inbox(virtual: VirtualTime, folds: bool) -> None:
    verdict = profile_of_callers(virtual, Slots(), 8, 60, folds=folds).verdict
    assert (verdict.node, verdict.limit, verdict.headroom) == ("Slots", "places", None)
    assert verdict.reason.startswith("its loop takes no more: items wait in its inbox for ")
    assert verdict.remedy == "have its loop work on more items at a time, or make it faster"
    assert verdict.spent == "it tells slots 4, step (s) 0.002"
    seldom = profile_of_callers(virtual, Slots(), 8, 2, folds=folds).verdict
    assert (seldom.node, seldom.limit) == (None, "callers")


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize(("places", "are"), [(8, "its 8 places are"), (1, "its place is")])
def test_a_deployment_limits_if_its_places_are_taken(virtual: VirtualTime, folds: bool, places: int, are: str) -> None:
    verdict = profile_of_callers(virtual, spelled, places, 60, folds=folds).verdict
    assert (verdict.node, verdict.limit) == (None, "in_flight")
    assert verdict.reason.startswith(f"max_in_flight= limits: {are} taken for ")
    assert verdict.remedy.startswith("raise max_in_flight=")
    seldom = profile_of_callers(virtual, spelled, places * 10, 4, folds=folds).verdict
    assert seldom.limit == "callers"  # not "source": a deployment has no source


# --- Batches, and the places for their items ---


LARGER_BATCH = r"batch=ps.Batch\(32\) at \S*embed \(\S+\), 4.0 .* or a larger concurrency="


@pytest.mark.parametrize(
    ("limits", "size", "batches", "places", "follow", "remedy"),
    [
        ("stream", 32, 1, 32, (64, 1, 128), r"PLACES=128\) at \S+ together with batch=ps.Batch\(64\) at \S*embed"),
        ("list", 32, 2, 64, (64, 2, 256), r"PLACES=256\) at \S+ together with batch=ps.Batch\(64\) at \S*embed"),
        ("calls", 32, 1, 32, (64, 1, 128), r"PLACES=128 at \S+ together with batch=ps.Batch\(64\) at \S*embed"),
        ("list", 64, 1, 8, (64, 1, 32), r"PLACES=32\) at \S+, "),
        ("calls", 64, 1, 8, (64, 1, 32), r"PLACES=32 at \S+, "),
        ("stream", 8, 1, 64, (32, 1, 64), LARGER_BATCH),
        ("calls", 8, 1, 64, (32, 1, 64), LARGER_BATCH),
    ],
)
def test_who_follows_the_remedy_for_a_batched_node_gains(
    virtual: VirtualTime, limits: str, size: int, batches: int, places: int, follow: tuple[int, int, int], remedy: str
) -> None:
    def profile(size: int, batches: int, places: int) -> telemetry.Profile:
        embed = waits("embed", 0.02, batch=ps.Batch(size), concurrency=batches)

        @ps.graph
        async def of_stream(numbers: AsyncIterator[int]) -> AsyncIterator[int]:
            return ps.map_each(embed, numbers, concurrency=places)

        @ps.graph
        async def of_list(numbers: list[int]) -> list[int]:
            return await ps.map_each(embed, numbers, concurrency=places)

        async def source() -> AsyncIterator[int]:
            for number in range(2_560):
                yield number

        if limits == "list":
            return virtual.run(lambda: profile_of_runs([of_list(list(range(2_560)))]))
        graph = ps.graph(embed)
        calls = (graph(number) for number in range(2_560))
        return virtual.run(
            lambda: profile_of(
                engine.stream(of_stream(source()))
                if limits == "stream"
                else engine.stream(calls, max_in_flight=places, max_workers=places)
            )
        )

    before, after = profile(size, batches, places), profile(*follow)
    named = remedy.replace("PLACES", "max_in_flight" if limits == "calls" else r"map_each\(concurrency")
    assert before.verdict.node == "embed"
    assert re.match(named, before.verdict.remedy), before.verdict.remedy
    assert ("batch" in before.verdict.remedy) == ("batch" in remedy)
    assert before.verdict.factor == pytest.approx(before.elapsed_seconds / after.elapsed_seconds, rel=0.25)


# --- What if ---


def computing(virtual: VirtualTime, factor: float) -> telemetry.Profile:
    rng = random.Random(7)

    @ps.node
    def decode(number: int) -> int:
        virtual.hold(rng.uniform(0.002, 0.006) * factor)
        return number

    return virtual.profile(waits("fetch", 0.006, concurrency=4) >> decode >> plain, 300)


def in_threads(virtual: VirtualTime, factor: float) -> telemetry.Profile:
    @ps.node(runs_on="thread", concurrency=8)
    def decode(number: int) -> int:
        virtual.hold_thread(0.02 * factor)
        return number

    @ps.node(runs_on="thread", concurrency=8)
    def resize(number: int) -> int:
        virtual.hold_thread(0.01)
        return number

    return virtual.profile_in_threads(decode >> resize, 100, 2)


def one_by_one(virtual: VirtualTime, factor: float) -> telemetry.Profile:
    pipeline = waits("fetch", 0.01) >> waits("decode", 0.03 * factor)
    return virtual.run(lambda: profile_of_runs((pipeline(number) for number in range(20)), pause_seconds=0.01))


@pytest.mark.parametrize(
    ("profile", "limit", "rel"), [(computing, "loop", 0.15), (in_threads, "pool", 0.15), (one_by_one, "path", 0.02)]
)
def test_it_predicts_how_fast_a_pipeline_is_if_a_node_takes_no_time(
    virtual: VirtualTime, profile: Callable[[VirtualTime, float], telemetry.Profile], limit: str, rel: float
) -> None:
    before, after = profile(virtual, 1.0), profile(virtual, 0.0)
    assert (before.verdict.node, before.verdict.limit) == ("decode", limit)
    assert before.verdict.headroom == pytest.approx(before.elapsed_seconds / after.elapsed_seconds, rel=rel)


@pytest.mark.parametrize(
    ("runs", "before_seconds", "limited"),
    [
        ("one after the other", 0.0, False),
        ("three at a time", 0.04, True),
        ("deployed", 0.04, False),
        ("in a stream", 0.0, True),
    ],
)
def test_it_predicts_a_map_over_a_list(virtual: VirtualTime, runs: str, before_seconds: float, limited: bool) -> None:
    def profile(places: int, seconds: float) -> telemetry.Profile:
        fetch = waits("fetch", before_seconds)
        parse = waits("parse", seconds, **({"concurrency": 64} if limited else {}))

        @ps.graph
        async def mapped(number: int) -> list[int]:
            count = await fetch(number)
            return await ps.map_each(parse, ps.apply(lambda count: [count] * 64, count), concurrency=places)

        async def call(own: engine.Engine, service: engine.Service[[int], list[int]], share: int) -> None:
            if runs == "in a stream":
                await values_of(own.stream((mapped(number) for number in range(share * 3)), max_in_flight=3))
            for number in range(0 if runs == "in a stream" else share):
                await (service(number) if runs == "deployed" else own.run(mapped(number)))

        async def calls() -> telemetry.Profile:
            async with engine.Engine() as own, own.deploy(mapped) as service:
                with telemetry.profile() as profile:
                    width = 3 if runs == "three at a time" else 1
                    await asyncio.gather(*(call(own, service, 6 // width) for _ in range(width)))
            return profile

        return virtual.run(calls)

    before = profile(2, 0.01)
    if not before_seconds:
        assert (before.verdict.node, before.verdict.limit) == ("parse", "places")
        assert before.verdict.reason.startswith("the 2 places of its map_each are busy for 100% of the time")
        assert before.verdict.remedy.startswith("map_each(concurrency=8) at ")
    predicted, after = before.what_if("parse", concurrency=8), profile(8, 0.01)
    assert predicted.factor == pytest.approx(before.elapsed_seconds / after.elapsed_seconds, rel=0.1)


def test_what_cannot_be_predicted_says_why(virtual: VirtualTime) -> None:
    fetch = waits("fetch", 0.01)
    other = fetch >> plain
    profile = virtual.run(lambda: profile_of_runs([ps.graph(fetch)(1), other(1)]))
    for name, options, told in (
        ("fetsch", {}, "no node 'fetsch' ran while the profile was taken; these nodes did: 'fetch'"),
        ("fetch", {}, "several graphs have a node 'fetch': say which, with graph= one of 'fetch', 'fetch_to_plain'"),
        ("fetch", {"graph": "fetch_to_plain", "concurrency": 0}, "at least 1"),
        ("fetch", {"graph": "fetch_to_plain", "concurrency": 1}, "node 'fetch' has no concurrency= of its own"),
    ):
        with pytest.raises(ValueError, match=told):
            profile.what_if(name, **{"concurrency": 2, **options})
