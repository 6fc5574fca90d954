"""A verdict says what to type, where, and how much it gains; a program that follows it gains as much, within 25 %."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import penstock as ps
from penstock import engine, telemetry
from tests.telemetry.virtual_time import VirtualTime, profile_of, waits


def check(verdict: telemetry.Verdict, option: str, line: str, gain: float) -> None:
    """Assert that a verdict advises an option, at a line of a test, with a gain: how many times as fast it makes."""
    assert verdict.remedy.startswith(option), verdict.remedy
    if line:
        found = re.search(r"tests/telemetry/(\w+\.py):(\d+)", verdict.remedy)
        assert found is not None, verdict.remedy
        assert line in Path(__file__).with_name(found[1]).read_text().splitlines()[int(found[2]) - 1]
    assert verdict.factor == pytest.approx(gain, rel=0.25)
    if verdict.node is not None:
        assert f", {verdict.factor:.1f} times as fast" in verdict.remedy


# Fifteen programs whose limit is known, each as a function of the option; some in real time, below.
Program = Callable[..., telemetry.Profile]
programs: dict[str, tuple[Program, dict[str, Any], str, str]] = {}


def follow(option: str, line: str = "", **options: Any) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        programs[f"{program.__name__}, {option}"] = program, options, option, line
        return program

    return add


fetch = waits("fetch", 0.01, concurrency=3)


@follow("concurrency=3 at parse ", "@ps.node(concurrency=places)  # parse", places=3)
def a_node_with_one_place(virtual: VirtualTime, places: int = 1) -> telemetry.Profile:
    @ps.node(concurrency=places)  # parse
    async def parse(number: int) -> int:
        await asyncio.sleep(0.01)
        return number

    job = fetch >> parse
    return virtual.profile(job, 200)


@follow("max_workers=6, ", threads=6)
def a_thread_pool(virtual: VirtualTime, threads: int = 2) -> telemetry.Profile:
    @ps.node(runs_on="thread")
    def parse(number: int) -> int:
        virtual.hold_thread(0.02)
        return number

    return virtual.profile_in_threads(fetch >> parse, 120, threads)


@follow('runs_on="thread" at parse ', "@ps.node(runs_on=place)", place="thread")
def a_blocked_loop(virtual: VirtualTime, place: str = "loop") -> telemetry.Profile:
    @ps.node
    def clean(number: int) -> int:  # one chain with the next: where its time is spent, the profile says all the same
        virtual.hold(0.0002)
        return number

    @ps.node(runs_on=place)
    def parse(number: int) -> int:
        (virtual.hold if place == "loop" else virtual.hold_thread)(0.02)
        return number

    return virtual.profile_in_threads(fetch >> clean >> parse, 120)


@follow("map_each(concurrency=128) at ", "concurrency=places)  # pages", places=128)
def a_list(virtual: VirtualTime, places: int = 32) -> telemetry.Profile:
    parse = waits("parse", 0.01)

    @ps.node
    async def listed(count: int) -> list[int]:
        await asyncio.sleep(0.02)
        return [count] * count

    @ps.graph
    async def job(count: int) -> list[int]:
        return await ps.map_each(parse, await listed(count), concurrency=places)  # pages

    async def run() -> telemetry.Profile:
        with telemetry.profile() as profile:
            await engine.run(job(1000))
        return profile

    return virtual.run(run)


@follow("batch=ps.Batch(32) at embed ", "@ps.node(batch=ps.Batch(size))", size=32)
def a_batch_that_is_too_small(virtual: VirtualTime, size: int = 8) -> telemetry.Profile:
    @ps.node(batch=ps.Batch(size))
    async def embed(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.02 + 0.0001 * len(numbers))
        return numbers

    return virtual.profile(ps.graph(embed), 640)


@follow("concurrency=2 at parse ", "@ps.node(concurrency=places)", places=2)
def a_node_before_batches_that_take_half_as_long(virtual: VirtualTime, places: int = 1) -> telemetry.Profile:
    @ps.node(concurrency=places)
    async def parse(number: int) -> int:
        await asyncio.sleep(0.01)
        return number

    @ps.node(batch=ps.Batch(8))
    async def embed(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.04)
        return numbers

    job = parse >> embed
    return virtual.profile(job, 400)


@follow("max_in_flight=128 at ", "async with stream as results:", size=64, in_flight=128)
def a_batch_that_needs_places_for_the_next(
    virtual: VirtualTime, size: int = 32, in_flight: int = 64
) -> telemetry.Profile:
    @ps.node
    def parse(number: int) -> int:
        virtual.hold(0.0004)
        return number

    @ps.node(batch=ps.Batch(size))
    async def embed(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.025)
        return numbers

    return virtual.profile(parse >> embed, 1280, max_in_flight=in_flight)


@follow("capacity=16 at parse ", "@ps.node(capacity=capacity)", capacity=16)
def a_small_inbox(virtual: VirtualTime, capacity: int = 1) -> telemetry.Profile:
    @ps.node(capacity=capacity)
    async def parse(number: int) -> int:
        await asyncio.sleep(0.055 if number % 8 == 0 else 0.001)
        return number

    return virtual.profile(waits("read", 0.005) >> parse, 400, max_workers=1)


@follow("max_in_flight=32 at ", "async with stream as results:", in_flight=32)
def a_batch_that_waits(virtual: VirtualTime, in_flight: int = 16) -> telemetry.Profile:
    @ps.node(batch=ps.Batch(32, max_wait_seconds=0.05))
    async def embed(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.02)
        return numbers

    return virtual.profile(ps.graph(embed), 640, max_in_flight=in_flight)


@follow("max_wait_seconds=0 in the batch= at embed ", "@ps.node(batch=ps.Batch(32, max", waits=0.0)
def a_batch_that_waits_for_callers(virtual: VirtualTime, waits: float = 0.05) -> telemetry.Profile:
    @ps.node(batch=ps.Batch(32, max_wait_seconds=waits))
    async def embed(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.02)
        return numbers

    return virtual.run(lambda: called(ps.graph(embed), 8))


@follow("have the source give items sooner", "async with stream as results:", seconds=0.0)
def a_slow_source(virtual: VirtualTime, seconds: float = 0.008) -> telemetry.Profile:
    job = ps.graph(fetch)

    async def source() -> AsyncIterator[ps.Call[int]]:
        for number in range(100):
            await asyncio.sleep(seconds)
            yield job(number)

    return virtual.run(lambda: profile_of(engine.stream(source())))


@follow("do less for each item outside of the graph", "async with stream as results:", seconds=0.0)
def a_slow_reader(virtual: VirtualTime, seconds: float = 0.008) -> telemetry.Profile:
    calls = (ps.graph(fetch)(number) for number in range(100))
    return virtual.run(lambda: profile_of(engine.stream(calls), seconds))


@follow("4 calls at a time, ", count=4)
def callers(virtual: VirtualTime, count: int = 1) -> telemetry.Profile:
    ask = waits("ask", 0.02)
    return virtual.run(lambda: called(ask >> ask, count))


async def called(graph: ps.Graph[[int], int], count: int) -> telemetry.Profile:
    async def call(service: engine.Service[[int], int]) -> None:
        for number in range(64 // count):
            await service(number)

    async with engine.deploy(graph) as service:
        with telemetry.profile() as profile:
            await asyncio.gather(*(call(service) for _ in range(count)))
    return profile


class Look:
    """Stands for a profile in programs that take a live look instead."""

    def __init__(self) -> None:
        self.monitor = telemetry.Monitor()
        self.monitor.snapshot()
        self.lately: telemetry.Profile | None = None

    def __enter__(self) -> "Look":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.lately = self.monitor.snapshot().lately
        self.monitor.close()


@pytest.mark.parametrize("program", programs)
def test_who_follows_the_advice_finds_the_gain_that_was_predicted_and_a_look_names_the_same(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    run, options, option, line = programs[program]
    before, after = run(virtual), run(virtual, **options)
    gain = before.elapsed_seconds / after.elapsed_seconds
    assert gain > 1.3
    check(before.verdict, option, line, gain)
    monkeypatch.setattr(telemetry, "profile", Look)
    look: Any = run(virtual)
    assert (look.lately.verdict.node, look.lately.verdict.limit) == (before.verdict.node, before.verdict.limit)


def test_threads_bring_no_more_than_one_gil_lets_compute(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.telemetry.profiling.watching.thread_seconds", lambda thread: 0.4 * virtual())
    verdict = a_blocked_loop(virtual).verdict
    assert verdict.remedy.startswith('runs_on="thread" at parse ')
    assert verdict.factor == pytest.approx(1 / 0.4, rel=0.05)


def test_of_a_batch_that_can_never_be_full_it_says_why(virtual: VirtualTime) -> None:
    @ps.node(batch=ps.Batch(32, max_wait_seconds=0.015))
    async def embed(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.005)
        return numbers

    def of_step_before(places: int) -> telemetry.Verdict:
        return virtual.profile(waits("read", 0.01, concurrency=places) >> embed, 200).verdict

    said = (
        '; the batches of "embed" hold 32, and wait for more in vain, 15.0 ms each time: "read" gives it 8 in that time'
    )
    assert of_step_before(4).reason.endswith(said)
    assert "in vain" not in str(of_step_before(16))

    async def deployed(places: int) -> telemetry.Profile:
        async with engine.deploy(ps.graph(embed), max_in_flight=places) as service:
            with telemetry.profile() as profile:
                await asyncio.gather(*map(service, range(200)))
        return profile

    verdict = virtual.run(lambda: deployed(8)).verdict
    assert verdict.reason.endswith("; its batches hold 32, and wait for more in vain for 75% of the time")
    assert verdict.remedy.startswith("max_in_flight=32, ")
    assert "or max_wait_seconds=0 in its batch=" in verdict.remedy
    assert "in vain" not in str(virtual.run(lambda: deployed(64)).verdict)


def test_where_two_limit_as_much_the_options_of_both_are_named(virtual: VirtualTime) -> None:
    def run(places: int, seconds: float = 0.0) -> telemetry.Profile:
        async def source() -> AsyncIterator[ps.Call[int]]:
            for number in range(400):
                await asyncio.sleep(seconds)
                yield job(number)

        @ps.node(concurrency=places)  # step
        async def step(number: int) -> int:
            await asyncio.sleep(0.01)
            return number

        @ps.node(concurrency=places)  # step
        async def other(number: int) -> int:
            await asyncio.sleep(0.01)
            return number

        job = step >> other
        return virtual.run(lambda: profile_of(engine.stream(source())))

    before, after = run(3), run(6)
    assert re.match(r"concurrency=6 at \w+ \(.*\) together with concurrency=6 at \w+ \(", before.verdict.remedy)
    check(before.verdict, "concurrency=6", "# step", before.elapsed_seconds / after.elapsed_seconds)
    slow = run(3, seconds=0.0032).verdict
    assert re.match(r'concurrency=\d+ at step \(.*\), alone no faster, as "other" limits as much', slow.remedy)


def test_of_a_node_without_a_line_of_its_own_the_line_of_its_call_is_named(virtual: VirtualTime) -> None:
    lent = ps.node(concurrency=1)(asyncio.sleep)

    @ps.graph
    async def job(seconds: float) -> None:
        await lent(seconds)  # called

    verdict = virtual.run(lambda: profile_of(engine.stream(job(0.01) for _ in range(50)))).verdict
    check(verdict, "concurrency=4 at sleep ", "# called", 4.0)


# --- In real time, on an idle machine ---


def spin(number: int) -> int:
    return sum(index * number % 7 for index in range(100_000))


def nap(number: int) -> int:
    time.sleep(0.02)
    return number


in_threads, in_processes = (ps.graph(ps.node(runs_on=place, concurrency=4)(spin)) for place in ("thread", "process"))
napping = ps.graph(ps.node(runs_on="process")(nap))  # napping


async def faster(before: Callable[[], Awaitable[telemetry.Profile]], after: Callable[[], Awaitable[Any]]) -> Any:
    """Return the verdict, and the gain: the median of some pairs."""
    pairs = [(await before(), await after()) for _ in range(5)]
    gains = sorted(one.elapsed_seconds / other.elapsed_seconds for one, other in pairs)
    return pairs[0][0].verdict, gains[2]


async def warm(own: engine.Engine, *graphs: ps.Graph[[Any], Any]) -> None:
    for graph in graphs:
        async with own.stream(graph(1) for _ in range(8)) as results:
            async for _ in results:
                pass


ON_AN_IDLE_MACHINE = pytest.mark.skipif(
    os.getloadavg()[0] > (os.cpu_count() or 1) / 2, reason="gains in real time need idle cores"
)


@pytest.mark.long
@ON_AN_IDLE_MACHINE
async def test_worker_processes_and_the_gil() -> None:
    async with engine.Engine(max_processes=1) as one, engine.Engine(max_processes=2) as two:
        await warm(one, napping)
        await warm(two, napping, in_threads, in_processes)
        calls = [napping(number) for number in range(40)]
        verdict, gain = await faster(lambda: profile_of(one.stream(calls)), lambda: profile_of(two.stream(calls)))
        check(verdict, "Engine(max_processes=2), ", "", gain)
        threads, processes = ([graph(number) for number in range(100)] for graph in (in_threads, in_processes))
        verdict, gain = await faster(lambda: profile_of(two.stream(threads)), lambda: profile_of(two.stream(processes)))
        assert (verdict.node, verdict.limit) == ("spin", "gil")
        check(verdict, 'runs_on="process" at spin ', "def spin", gain)


@pytest.mark.long
@ON_AN_IDLE_MACHINE
async def test_a_device() -> None:
    def graph_of(turns: int) -> ps.Graph[[Any], Any]:
        @ps.device_node(device="cpu")
        def powers(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, turns, lambda _, y: x @ y, x)

        return ps.graph(powers)

    x, slow, quick = np.full((300, 300), 1e-3, np.float32), graph_of(20), graph_of(10)
    async with engine.Engine() as own:
        await own.run(slow(x))
        await own.run(quick(x))
        verdict, gain = await faster(
            lambda: profile_of(own.stream(slow(x) for _ in range(60))),
            lambda: profile_of(own.stream(quick(x) for _ in range(60))),
        )
    assert (verdict.node, verdict.limit) == ("powers", "device")
    check(verdict, "twice the devices (mesh=), ", "", gain)
