"""Snapshots of all scopes of a process, and the work of nodes between two snapshots."""

import asyncio
import contextlib
import gc
import sys
import threading
import traceback
import types
import weakref
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import engine, telemetry
from penstock.telemetry import ScopeSnapshot
from tests.kit import Gate, begun, plain
from tests.telemetry.virtual_time import VirtualTime, waits

fetch = waits("fetch", 0, concurrency=2)


@ps.node
def half(number: int) -> float:
    if number == 0:
        raise ValueError("zero")
    return number / 2


halves = fetch >> half


def done(scope: ScopeSnapshot) -> dict[str, tuple[int, int]]:
    return {step.counters.node: (step.counters.completed, step.counters.failed) for step in scope.steps}


def lately_of(monitor: telemetry.Monitor) -> telemetry.Profile:
    """Returns the work since the snapshot before."""
    lately = monitor.snapshot().lately
    assert lately is not None
    return lately


async def test_a_snapshot_tells_of_all_open_scopes_without_timing_them() -> None:
    assert telemetry.snapshot().scopes == ()
    async with engine.deploy(halves, max_in_flight=7) as service, engine.stream([halves(1), halves(2)]) as results:
        await asyncio.gather(service(1), service(0), return_exceptions=True)
        await anext(results)
        snapshot = telemetry.snapshot()
        assert snapshot.lately is None
        scopes = {scope.admitted: scope for scope in snapshot.scopes}
        assert scopes.keys() == {(0, 7), None}
        assert len({scope.key for scope in snapshot.scopes}) == 2
        fetching, halving = scopes[0, 7].steps
        assert done(scopes[0, 7]) == {"fetch": (2, 0), "half": (1, 1)}
        assert (fetching.name, fetching.runs_on, fetching.consumers) == (("fetch_to_half", "fetch"), "loop", ("half",))
        assert [(place.bound, place.limit) for place in fetching.places] == [("concurrency", 2)]
        assert (halving.consumers, halving.timed) == ((), None)
        assert done(scopes[None])["fetch"][0] >= 1
    assert telemetry.snapshot().scopes == ()


async def test_a_snapshot_can_be_taken_at_each_line_that_runs_a_call(effort: int) -> None:
    """At each fourth of the lines, in the order in which they first run; at each line with more effort."""

    async def body(number: int) -> float:
        return half(await fetch(number))

    @ps.graph
    async def mapped(numbers: list[int]) -> list[float]:
        return await ps.map_each(body, numbers)

    failed: list[str] = []
    seen, lines = list[telemetry.ItemLook](), set[tuple[str, int]]()
    running = tuple(f"{Path(ps.__file__).parent / folder}/" for folder in ("actors", "engine"))

    def look(frame: types.FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(running) or file.endswith("sampler.py"):  # a look waits for the lock of a sampler
            return None
        if event == "line" and (line := (file, frame.f_lineno)) not in lines:
            lines.add(line)
            if len(lines) % 4 and effort == 1:
                return look
            try:
                seen.extend(monitor.snapshot().items)
            except Exception:  # noqa: BLE001 - it would end the tracing, and the call, in the middle of a step
                failed.append(traceback.format_exc())
        return look

    async with engine.deploy(halves, mapped, max_in_flight=1) as service:
        with closing(telemetry.Monitor()) as monitor, contextlib.ExitStack() as undo:
            undo.callback(sys.settrace, sys.gettrace())
            sys.settrace(look)
            calls = service.run(mapped([1, 2])), service.run(halves(0), timeout_seconds=60), engine.run(halves(1))
            results = await asyncio.gather(*calls, return_exceptions=True)
            streamed = await service.map([halves(1)])
    assert failed == []
    assert ([repr(one) for one in results], streamed) == (["[0.5, 1.0]", "ValueError('zero')", "0.5"], [0.5])
    assert {(one.graph, one.node, one.state) for one in seen} >= {
        ("mapped", "fetch", "working"), ("fetch_to_half", "fetch", "working"), ("fetch_to_half", "half", "working"),
    }  # fmt: skip


async def test_from_one_snapshot_to_the_next_scopes_count_that_have_ended_meanwhile() -> None:
    async with engine.deploy(halves) as service:
        await service(1)
        with closing(telemetry.Monitor()) as monitor:
            first = monitor.snapshot()
            assert (first.lately, len(first.scopes)) == (None, 1)
            async with engine.stream(halves(number) for number in (1, 2, 3)) as results:
                assert len(telemetry.snapshot().scopes) == 2
                assert [result async for result in results] == [0.5, 1.0, 1.5]
            await service(4)
            second: Any = monitor.snapshot()
            assert [(node.node, node.count) for node in second.lately.nodes] == [("fetch", 4), ("half", 4)]
            assert [step.name for step in second.lately.steps] == [*product(["fetch_to_half"], ["fetch", "half"])]
            assert second.lately.timeline.slices == ()
            [scope] = second.scopes
            assert scope.seconds > first.scopes[0].seconds
            assert done(scope) == {"fetch": (2, 0), "half": (2, 0)}
            assert all(step.timed is not None for step in scope.steps)
            assert lately_of(monitor).nodes == ()
        assert all(step.timed is None for scope in telemetry.snapshot().scopes for step in scope.steps)


def test_places_are_busy_with_items_that_have_not_left_yet(virtual: VirtualTime) -> None:
    gate = Gate()

    async def main() -> tuple[telemetry.Profile, telemetry.Profile]:
        async with engine.deploy(gate.graph(concurrency=2, name="slow")) as service:
            calls = await begun(*map(service, range(5)))
            with closing(telemetry.Monitor()) as monitor:
                monitor.snapshot()
                await asyncio.sleep(0.2)
                lately = lately_of(monitor)
            with telemetry.profile() as profile:
                await asyncio.sleep(0.05)
            gate.open()
            assert await asyncio.gather(*calls) == [0, 1, 2, 3, 4]
        return lately, profile

    for one in virtual.run(main):
        [node] = one.nodes
        assert (node.node, node.count) == ("slow", 0)
        assert node.busy_share == pytest.approx(1.0, abs=0.1)
        assert (one.verdict.node, one.verdict.limit) == ("slow", "places")


async def test_scopes_in_which_nothing_has_moved_are_not_read_again() -> None:
    async with engine.deploy(halves) as idle, engine.deploy(halves, max_in_flight=3) as used:
        await asyncio.gather(idle(1), used(1))
        with closing(telemetry.Monitor()) as monitor:
            monitor.snapshot()
            first = {scope.admitted: scope.steps for scope in monitor.snapshot().scopes}
            await used(2)
            second = {scope.admitted: scope.steps for scope in monitor.snapshot().scopes}
    assert [first[admitted] is second[admitted] for admitted in first] == [admitted != (0, 3) for admitted in first]


async def test_a_thread_that_looks_takes_turns_with_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.insight.watching._SLICE_SECONDS", -1.0)  # each slice is over
    monkeypatch.setattr("penstock.insight.watching._LONGEST_PAUSE_SECONDS", 60.0)
    turns_of_loop, seen, asked = 0, list[int](), threading.Event()

    def ask() -> bool:
        asked.set()
        return True

    def look() -> None:
        monitor.turns.asked = ask
        asked.wait()
        monitor.turns.asked = None
        monitor.turns.begin()
        for _ in range(5):
            monitor.turns.pause()
            seen.append(turns_of_loop)
        monitor.turns.end()

    with closing(telemetry.Monitor()) as monitor:
        async with engine.deploy(halves):
            looking = asyncio.create_task(asyncio.to_thread(look))
            while not looking.done():
                turns_of_loop += 1
                await asyncio.sleep(0)
    assert seen == sorted(set(seen))
    assert len(seen) == 5


async def test_a_thread_is_asked_until_its_monitor_is_closed() -> None:
    asked, is_asked_again = 0, asyncio.Event()

    def ask() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            is_asked_again.set()
        return True

    async with engine.deploy(halves):
        with closing(telemetry.Monitor()) as monitor:
            monitor.snapshot()
            monitor.turns.asked = ask
            await is_asked_again.wait()
            monitor.turns.begin()  # and the client leaves before the end of the look
        until_closed = asked
        await asyncio.sleep(0.05)  # the timer that would ask is due before
        assert asked == until_closed


def test_a_second_close_of_a_monitor_does_nothing() -> None:
    with closing(telemetry.Monitor()) as other, closing(telemetry.Monitor()) as monitor:
        monitor.snapshot()
        monitor.close()
        assert other.snapshot().scopes == ()


def test_a_monitor_keeps_no_loop_that_is_closed() -> None:
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await engine.run(halves(1))

    with closing(telemetry.Monitor()):
        for _ in range(4):
            asyncio.run(main())
        gc.collect()
        assert sum(loop() is not None for loop in loops) <= 1


async def test_a_call_that_is_over_is_not_in_flight_at_the_next_look() -> None:
    gate = Gate()
    async with engine.deploy(gate.graph(), max_in_flight=5) as service:
        with closing(telemetry.Monitor()) as monitor:
            [call] = await begun(service(1))
            assert [scope.admitted for scope in monitor.snapshot().scopes] == [(1, 5)]
            gate.open()
            await call
            for _ in range(3):
                assert [scope.admitted for scope in monitor.snapshot().scopes] == [(0, 5)]


def test_items_count_from_when_they_entered_also_beside_short_ones(virtual: VirtualTime) -> None:
    gate, ends = Gate(), asyncio.Event()

    @ps.node(concurrency=10)
    async def mixed(number: int) -> int:
        if number < 8:
            return await gate.wait(number)
        await asyncio.sleep(0.001)
        return number

    graph = ps.graph(mixed)

    async def main() -> telemetry.Profile:
        async def call_again() -> None:
            while not ends.is_set():
                await service(8)

        async with engine.deploy(graph) as service:
            calls = await begun(*map(service, range(8)))
            with closing(telemetry.Monitor()) as monitor:
                others = asyncio.gather(call_again(), call_again())
                monitor.snapshot()
                await asyncio.sleep(0.3)
                lately = lately_of(monitor)
            gate.open()
            ends.set()
            await asyncio.gather(others, *calls)
        return lately

    lately = virtual.run(main)
    [node] = lately.nodes
    assert node.count > 8
    assert 0.75 < (node.busy_share or 0) < 1.05
    assert (lately.verdict.node, lately.verdict.limit) == ("mixed", "places")


async def test_finished_items_that_wait_for_room_are_not_in_the_node(virtual: VirtualTime) -> None:
    gate = Gate()
    line = plain >> gate.node(name="narrow", concurrency=1, capacity=1)
    async with engine.stream(line(number) for number in range(40)) as results:
        reading = asyncio.ensure_future(anext(results))
        await gate.has(1)
        with closing(telemetry.Monitor()) as monitor:
            monitor.snapshot()
            virtual.hold(0.1)
            snapshot: Any = monitor.snapshot()
        gate.open()
        await reading
    [scope] = snapshot.scopes
    before, after = scope.steps
    assert snapshot.contents[after.key].working == 1
    held = snapshot.contents.get(before.key)
    assert held is None or held.working == 0
    [limits] = [node for node in snapshot.lately.nodes if node.node == "narrow"]
    assert limits.busy_share == pytest.approx(1.0, abs=0.1)


def test_a_new_verdict_counts_once_two_snapshots_agree(virtual: VirtualTime) -> None:
    graphs = {name: ps.graph(waits(name, 1, concurrency=1)) for name in ("one", "other")}

    async def look() -> list[tuple[str | None, str | None]]:
        found: list[tuple[str | None, str | None]] = []
        async with engine.deploy(*graphs.values()) as service:
            with closing(telemetry.Monitor()) as monitor:
                monitor.snapshot()
                for name in ("one", "other", "other", "one", "one"):
                    await service.run(graphs[name](0))
                    snapshot: Any = monitor.snapshot()
                    found.append((snapshot.lately.verdict.node, snapshot.verdict.node))
        return found

    assert virtual.run(look) == [
        ("one", "one"), ("other", "one"), ("other", "other"), ("one", "other"), ("one", "one"),
    ]  # fmt: skip
