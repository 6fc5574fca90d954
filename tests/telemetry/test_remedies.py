"""A verdict says what to type, where, and how much it gains; a program that follows it gains as much, within 25 %."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import engine, telemetry
from tests.kit import values_of
from tests.telemetry.virtual_time import VirtualTime, profile_of, profile_of_runs, waits


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


# Programs whose limit is known, each as a function of the option.
Program = Callable[..., telemetry.Profile]
programs: dict[str, tuple[Program, dict[str, Any], str, str]] = {}


def follow(option: str, line: str = "", **options: Any) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        programs[f"{program.__name__}, {option}"] = program, options, option, line
        return program

    return add


fetch = waits("fetch", 0.01, concurrency=3)


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

    return virtual.run(lambda: profile_of_runs([job(1000)]))


@follow("concurrency=2 at parse ", "@ps.node(concurrency=places)", places=2)
def a_node_before_batches_that_take_half_as_long(virtual: VirtualTime, places: int = 1) -> telemetry.Profile:
    @ps.node(concurrency=places)
    async def parse(number: int) -> int:
        await asyncio.sleep(0.01)
        return number

    return virtual.profile(parse >> waits("embed", 0.04, batch=ps.Batch(8)), 400)


@follow("max_in_flight=128 at ", "async with stream as results:", size=64, in_flight=128)
def a_batch_that_needs_places_for_the_next(
    virtual: VirtualTime, size: int = 32, in_flight: int = 64
) -> telemetry.Profile:
    @ps.node
    def parse(number: int) -> int:
        virtual.hold(0.0004)
        return number

    embed = waits("embed", 0.025, batch=ps.Batch(size))
    return virtual.profile(parse >> embed, 1280, max_in_flight=in_flight)


@follow("capacity=16 at parse ", "@ps.node(capacity=capacity)", capacity=16)
def a_small_inbox(virtual: VirtualTime, capacity: int = 1) -> telemetry.Profile:
    @ps.node(capacity=capacity)
    async def parse(number: int) -> int:
        await asyncio.sleep(0.055 if number % 8 == 0 else 0.001)
        return number

    return virtual.profile(waits("read", 0.005) >> parse, 400, max_workers=1)


@follow("max_wait_seconds=0 in the batch= at embed ", "@ps.node(batch=ps.Batch(32, max", waits=0.0)
def a_batch_that_waits_for_callers(virtual: VirtualTime, waits: float = 0.05) -> telemetry.Profile:
    @ps.node(batch=ps.Batch(32, max_wait_seconds=waits))
    async def embed(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0.02)
        return numbers

    return virtual.run(lambda: called(ps.graph(embed), 8))


@follow("have the source give items sooner", "async with stream as results:", seconds=0.0)
def a_slow_source_although_a_node_is_busy_for_most_of_the_time(
    virtual: VirtualTime, seconds: float = 0.11
) -> telemetry.Profile:
    job = ps.graph(waits("fetch", 0.08, concurrency=1))

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


async def called(graph: Any, count: int, *, gives_a_stream: bool = False, **options: Any) -> telemetry.Profile:
    """Returns the profile of a deployment that so many callers call, one call after the other."""

    async def call(service: engine.Service[[int], Any]) -> None:
        for number in range(64 // count):
            if gives_a_stream:
                await values_of(service.stream(graph(number)))
            else:
                await service(number)

    async with engine.deploy(graph, **options) as service:
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
    monkeypatch.setattr("penstock.insight.watching.thread_seconds", lambda thread: 0.4 * virtual())
    verdict = a_blocked_loop(virtual).verdict
    assert "as a plain `def`" not in verdict.remedy
    assert verdict.remedy.startswith('runs_on="thread" at parse ')
    assert verdict.factor == pytest.approx(1 / 0.4, rel=0.05)


def test_of_a_batch_that_can_never_be_full_it_says_why(virtual: VirtualTime) -> None:
    embed = waits("embed", 0.005, batch=ps.Batch(32, max_wait_seconds=0.015))

    def of_step_before(places: int) -> telemetry.Verdict:
        return virtual.profile(waits("read", 0.01, concurrency=places) >> embed, 200).verdict

    assert of_step_before(4).reason.endswith(
        '; the batches of "embed" hold 32, and wait for more in vain, 15.0 ms each time: "read" gives it 8 in that time'
    )
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

        job = waits("step", 0.01, concurrency=places) >> waits("other", 0.01, concurrency=places)
        return virtual.run(lambda: profile_of(engine.stream(source())))

    before, after = run(3), run(6)
    assert re.match(r"concurrency=6 at \w+ \(.*\) together with concurrency=6 at \w+ \(", before.verdict.remedy)
    check(before.verdict, "concurrency=6", "", before.elapsed_seconds / after.elapsed_seconds)
    slow = run(3, seconds=0.0032).verdict
    assert re.match(r'concurrency=\d+ at step \(.*\), alone no faster, as "other" limits as much', slow.remedy)


def test_of_a_node_without_a_line_of_its_own_the_line_of_its_call_is_named(virtual: VirtualTime) -> None:
    lent = ps.node(concurrency=1)(asyncio.sleep)

    @ps.graph
    async def job(seconds: float) -> None:
        await lent(seconds)  # called

    verdict = virtual.run(lambda: profile_of(engine.stream(job(0.01) for _ in range(50)))).verdict
    check(verdict, "concurrency=4 at sleep ", "# called", 4.0)
