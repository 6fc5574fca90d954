"""The threads of a device: how many jobs are in flight, which thread waits for a job, and in which order jobs end."""

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, telemetry
from penstock.devices import dispatch, job_times
from penstock.devices.dispatch import LEAD_SECONDS, MAX_DEPTH, MIN_DEPTH, DispatchThread

from .compiled import each_call
from .kit import doubling, row

TIMEOUT_SECONDS = 60


class FakeJob:
    """A job whose computation ends when a test says so, and the array that it computes; it notes the thread's calls."""

    def __init__(self, number: int, events: "SimpleQueue[tuple[str, int]]", *, inline: bool = False) -> None:
        self.number = number
        self.finish = threading.Event()
        self.enqueue = threading.Event()
        self.enqueue.set()
        self.on_ready: Callable[[], None] = lambda: None
        self.is_over = inline
        self.waited_for_by = ""
        self.returns_pending = False
        self._events = events
        self._inline = inline

    def begin(self) -> bool:
        return True

    def dispatch(self) -> list[Any]:
        assert self.enqueue.wait(TIMEOUT_SECONDS)
        self._events.put(("dispatched", self.number))
        return [self]

    def is_ready(self) -> bool:
        return self.is_over

    def is_deleted(self) -> bool:
        return False

    @property
    def is_awaited(self) -> bool:
        return not self.returns_pending

    def hand_on(self, arrays: list[Any]) -> None:
        if self.returns_pending:
            self._events.put(("handed on", self.number))

    def inputs(self) -> Iterable[Any]:
        return ()

    def wait(self, arrays: list[Any], busy_until: float) -> None:
        self.waited_for_by = threading.current_thread().name
        if not self._inline:
            self._events.put(("waited for", self.number))
            assert self.finish.wait(TIMEOUT_SECONDS)

    def ready(self) -> None:
        self.on_ready()
        self._events.put(("ready", self.number))

    def failed(self, error: BaseException) -> None:
        self._events.put(("failed", self.number))


class Device:
    """A dispatch thread and the events of its jobs. No time passes here, unless a test lets it pass."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self.thread: Any = DispatchThread("test", lambda: None)  # it runs only fake jobs
        self.events: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.jobs: list[FakeJob] = []

    def job(self, *, inline: bool = False) -> FakeJob:
        self.jobs.append(FakeJob(len(self.jobs) + 1, self.events, inline=inline))
        return self.jobs[-1]

    def submit(self, number: int = 1) -> list[FakeJob]:
        """Submit some jobs at once, so that the thread sees them together."""
        jobs = [self.job() for _ in range(number)]
        jobs[0].enqueue.clear()
        for job in jobs:
            self.thread.submit(job)
        jobs[0].enqueue.set()
        return jobs

    def until(self, *event: object) -> list[tuple[str, int]]:
        """Wait for an event; return all events up to and including it."""
        seen = [self.events.get(timeout=TIMEOUT_SECONDS)]
        while seen[-1] != event:
            seen.append(self.events.get(timeout=TIMEOUT_SECONDS))
        return seen

    def depth(self) -> int:
        """Submit many jobs; return how many of them are in flight when the thread waits for the first one."""
        first = self.submit(2 * MAX_DEPTH)[0].number
        before = [number for what, number in self.until("waited for", first) if what == "dispatched"]
        assert before == [*range(first, first + len(before))]
        return len(before)

    def run_short_ones(self) -> None:
        """Run many short jobs, so that the thread learns that computations are short."""
        for job in self.submit(100):
            job.finish.set()
        self.until("ready", len(self.jobs))


@contextmanager
def running() -> Generator[Device]:
    device = Device()
    with patch.object(dispatch, "perf_counter", lambda: device.now_seconds):
        try:
            yield device
        finally:
            for job in device.jobs:  # a failed test leaves jobs unfinished
                job.enqueue.set()
                job.finish.set()
            device.thread.end()
            device.thread.join()


@pytest.fixture
def device() -> Iterator[Device]:
    with running() as one:
        yield one


def test_of_long_computations_few_are_in_flight(device: Device) -> None:
    assert device.depth() == MIN_DEPTH


def test_of_short_computations_so_many_are_in_flight_that_the_device_need_not_wait(device: Device) -> None:
    device.run_short_ones()
    assert device.depth() == MAX_DEPTH


def test_a_shorter_switch_interval_leaves_as_many_in_flight() -> None:
    with engine.tuned_for_serving(), running() as device:
        for _ in range(60):
            (job,) = device.submit()
            device.until("waited for", job.number)
            device.now_seconds += LEAD_SECONDS / 10.5
            job.finish.set()
            device.until("ready", job.number)
        assert device.depth() == 10


def test_a_job_that_comes_late_is_enqueued_while_the_present_one_is_computed(device: Device) -> None:
    for _ in range(2):
        (first,) = device.submit()
        device.until("waited for", first.number)
        (second,) = device.submit()
        assert device.until("dispatched", second.number) == [("dispatched", second.number)]
        first.finish.set()
        second.finish.set()
        device.until("ready", second.number)
        device.run_short_ones()  # the same must hold where the first thread itself would wait for one of several jobs


def test_what_runs_inline_ends_before_the_next_is_begun_and_needs_no_second_thread(device: Device) -> None:
    (first,) = device.submit()
    device.until("waited for", first.number)
    first.finish.set()
    device.until("ready", first.number)
    while device.thread._returned.empty():  # until the second thread reports that it is done
        threading.Event().wait(0.001)
    threads: list[str] = []
    for _ in range(3):
        job = device.job(inline=True)
        job.on_ready = lambda: threads.append(threading.current_thread().name)
        device.thread.submit(job)
    assert device.until("ready", 4) == [(what, number) for number in (2, 3, 4) for what in ("dispatched", "ready")]
    assert threads == ["penstock-device-test"] * 3


def test_what_runs_inline_does_not_overtake_what_the_second_thread_waits_for(device: Device) -> None:
    (first,) = device.submit()
    device.until("waited for", first.number)
    inline = device.job(inline=True)
    device.thread.submit(inline)
    device.until("dispatched", inline.number)
    first.finish.set()
    assert device.until("ready", inline.number) == [("ready", first.number), ("ready", inline.number)]


def test_a_thread_that_always_comes_late_learns_that_more_may_be_in_flight(device: Device) -> None:
    """A busy event loop lets the thread look rarely, and by then all jobs in flight have ended."""
    for _ in range(40):
        jobs = [device.job() for _ in range(MIN_DEPTH)]
        jobs[-1].enqueue.clear()
        for job in jobs:
            device.thread.submit(job)
        device.until("dispatched", jobs[-2].number)
        for job in jobs:
            job.finish.set()
            job.is_over = True
        device.now_seconds += LEAD_SECONDS
        jobs[-1].enqueue.set()
        device.until("ready", jobs[-1].number)
    assert device.depth() == MAX_DEPTH


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 8)), min_size=1, max_size=12))
@settings(deadline=None)
def test_results_come_in_the_order_of_the_jobs(bursts: list[tuple[int, bool, int]]) -> None:
    """Bursts of jobs, inline or not; before each burst, some of the earlier computations end."""
    with running() as device:
        waiting: list[FakeJob] = []
        for size, is_inline, ends in bursts:
            jobs = [device.job(inline=is_inline) for _ in range(size)]
            for job in jobs:
                device.thread.submit(job)
            waiting += jobs
            for job in waiting[:ends]:
                job.finish.set()
            del waiting[:ends]
        for job in waiting:
            job.finish.set()
        total = sum(size for size, _, _ in bursts)
        seen = device.until("ready", total)
    for what in ("dispatched", "ready"):
        assert [number for one, number in seen if one == what] == [*range(1, total + 1)]


def test_nobody_waits_for_what_was_handed_on_while_more_of_it_comes(device: Device) -> None:
    steps = [device.job() for _ in range(2 + 2 * MIN_DEPTH)]
    for step in steps:
        step.returns_pending = True
        step.finish.set()
    with patch.object(dispatch, "LEAD_SECONDS", TIMEOUT_SECONDS):  # the next job has to come within this time
        for number, step in enumerate(steps):
            device.thread.submit(step)
            device.until("handed on", step.number)
            if not number:
                device.until("ready", step.number)  # the first step shows how long a step takes
            step.is_over = True
        last = device.job()
        device.thread.submit(last)
        device.until("waited for", last.number)
        last.finish.set()
        device.until("ready", last.number)
    first, *others, newest = [step.waited_for_by for step in steps]
    assert first == newest == "penstock-device-test-wait"
    assert others == ["penstock-device-test"] * 2 * MIN_DEPTH


@pytest.mark.several_devices
async def test_the_threads_of_a_device_have_ended_when_their_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    work = DispatchThread._wait_for_lent

    def end_late(self: DispatchThread) -> None:
        work(self)
        threading.Event().wait(0.1)  # this comes after the thread has reported its end

    monkeypatch.setattr(DispatchThread, "_wait_for_lent", end_late)
    node = ps.device_node(device="cpu:3", name="same")(lambda x: x)
    async with engine.Engine() as own:
        await own.run(ps.graph(node)(1.0))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-device-cpu:3")]


class InFlight:
    """Keeps computations in flight until a test ends them; notes the transfers in the meantime.

    A gate inside a program would not do: a CPU runs a program with a Python callback while it dispatches it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transferred: asyncio.Queue[float] = asyncio.Queue()
        self.finish = threading.Event()
        self.loop = asyncio.get_running_loop()
        wait = dispatch.wait_until_ready

        def compute(arrays: Any) -> None:
            assert self.finish.wait(30)
            wait(arrays)

        for module in (dispatch, job_times):
            monkeypatch.setattr(module, "wait_until_ready", compute)
            monkeypatch.setattr(module, "are_ready", lambda arrays: False)  # pyright: ignore[reportUnknownLambdaType]

    def note(self, args: Any) -> None:
        """Notes that the device has the arguments; called when the call of a program has returned."""
        self.loop.call_soon_threadsafe(self.transferred.put_nowait, float(np.ravel(args[0])[0]))


@pytest.mark.parametrize("batch", [None, ps.Batch(1)])
async def test_the_next_item_is_transferred_while_the_present_one_computes(
    monkeypatch: pytest.MonkeyPatch, batch: ps.Batch | None
) -> None:
    in_flight = InFlight(monkeypatch)
    finished: list[int] = []

    of = doubling(pure=False, batch=batch, prefetch=2)
    with telemetry.profile() as profile, each_call(then=in_flight.note):
        async with engine.deploy(of) as service:

            async def item(number: int) -> None:
                assert float((await service(row(number)))[0]) == 2 * number
                finished.append(number)

            items = [asyncio.ensure_future(item(number)) for number in range(1, 9)]
            try:
                async with asyncio.timeout(60):
                    assert [await in_flight.transferred.get() for _ in range(2)] == [1, 2]
                assert not finished
            finally:
                in_flight.finish.set()
            await asyncio.gather(*items)
    assert finished == [*range(1, 9)]
    computed = [one for one in profile.timeline.device_slices if one.kind == "compute"]
    assert len(computed) == 8
    # A computation that waits behind another one has not begun.
    assert all(after.began_seconds >= before.ended_seconds for before, after in pairwise(computed))
