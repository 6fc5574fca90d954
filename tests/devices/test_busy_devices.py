"""Devices under load: calls that are cancelled, expired, refused or closed; priorities, memory limits, and leaks."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine, telemetry, testing
from penstock.devices import compiling, device_pool, dispatch, engine_device
from tests.kit import begun

from .compiled import each_call, open_device, open_pools, refuse_memory
from .gates import Gate, HeldTrace, gated
from .kit import doubling, live_bytes, numbers_of, on_the_host, refusing, row, settled


def calls_of(service: Any, values: Any) -> list[asyncio.Future[Any]]:
    """Begins a call with a row of each value."""
    return [asyncio.ensure_future(service(row(value))) for value in values]


async def begun_calls(service: Any, values: Any) -> list[asyncio.Task[Any]]:
    """Begins a call with a row of each value, and returns when no task can go on."""
    return await begun(*[service(row(value)) for value in values])


def refusing_graph(**options: Any) -> Any:
    return ps.graph(ps.device_node(device="cpu", **options)(refusing))


async def test_one_caller_of_a_batch_is_cancelled_and_the_others_are_unharmed() -> None:
    gate = Gate()
    async with engine.deploy(gated(gate, batch=ps.Batch(32, max_wait_seconds=0.2))) as service:
        calls = calls_of(service, range(32))
        await gate.entered()
        calls[7].cancel()
        await asyncio.wait([calls[7]])
        assert calls[7].cancelled()
        gate.open()
        assert numbers_of(await settled(calls)) == [None if n == 7 else n for n in range(32)]
    assert len(gate.values) == 1


async def test_what_has_not_started_is_skipped_and_closing_waits_for_what_runs() -> None:
    gate = Gate()
    of = gated(gate)
    async with engine.Engine() as own:
        calls = [asyncio.ensure_future(own.run(of(row(n)))) for n in range(5)]
        await gate.entered()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        [closing] = await begun(own.__aexit__(None, None, None))
        assert not closing.done()
        gate.open()
        await closing
    assert gate.values == [[0, 0]]


async def test_an_item_that_expires_while_the_loop_is_held_still_raises_its_deadline() -> None:
    gate = Gate()
    of = gated(gate, batch=ps.Batch(4), prefetch=1)
    async with engine.deploy(of) as service:
        running = asyncio.ensure_future(service(row(0)))
        await gate.entered()
        [late] = await begun(service.run(of(row(1)), timeout_seconds=0.05))
        gate.open()
        time.sleep(0.1)  # noqa: ASYNC251 - the result of the first and the deadline of the second come to the loop together
        with pytest.raises(ps.DeadlineExceeded):
            await late
        await running
    assert gate.values == [[[0, 0]]]


async def test_higher_priorities_go_first() -> None:
    gate = Gate()
    of = gated(gate, batch=ps.Batch(1), prefetch=1)
    async with engine.deploy(of) as service:
        calls = calls_of(service, [0])
        await gate.entered()
        calls += await begun(*[service.run(of(row(n)), priority=n % 3) for n in range(1, 7)])
        gate.open()
        await asyncio.gather(*calls)
    assert [batch[0][0] for batch in gate.values] == [0, 2, 5, 1, 4, 3, 6]


async def test_a_node_that_had_much_before_is_not_kept_waiting_for_what_is_new() -> None:
    gate = Gate()
    old, new = gated(gate), gated(gate)
    async with engine.deploy(old, new) as service:
        gate.open()
        await asyncio.gather(*(service.run(old(row(n))) for n in range(50)))
        await service.run(new(row(0)))
        open_device()._window = 1
        gate.close()
        gate.values.clear()
        calls = await begun(*[service.run(new(row(n))) for n in range(20)])
        calls += await begun(service.run(old(row(-1))))
        gate.open()
        await asyncio.gather(*calls)
    assert gate.values.index([-1, -1]) <= 4


async def test_a_device_is_opened_once_for_all_who_are_first(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    original = device_pool.placements_of

    def counted(device: Any, replicas: int) -> Any:
        opened.append(device)
        return original(device, replicas)

    monkeypatch.setattr(device_pool, "placements_of", counted)
    calls = [asyncio.ensure_future(devices.actor("cpu").run(jnp.negative, row(n))) for n in range(20)]
    await asyncio.sleep(0)
    calls[0].cancel()
    assert numbers_of(await settled(calls)) == [None, *(-n for n in range(1, 20))]
    assert opened == ["cpu"]
    errors = await settled(devices.actor("cpu:99").run(jnp.negative, row(n)) for n in range(3))
    assert [type(error) for error in errors] == [ps.DeviceError] * 3
    assert len({id(error) for error in errors}) == 3
    assert opened == ["cpu", "cpu:99"]


async def test_a_full_queue_begins_what_is_due_before_it_refuses_a_call() -> None:
    """The device is idle, so a burst fills two batches for the device, the next batch, and the queue."""
    async with engine.deploy(doubling(batch=ps.Batch(2, max_queue=1), prefetch=2)) as service:
        await asyncio.gather(*calls_of(service, range(2)))
        *fine, refused = await settled(calls_of(service, range(8)))
    assert numbers_of(fine) == [2 * n for n in range(7)]
    assert isinstance(refused, ps.Overloaded)
    assert "node 'doubled' refuses an item: 3 items wait already" in str(refused)


async def test_a_full_queue_begins_only_what_makes_room() -> None:
    """The remaining calls are a small batch that is due, too; it waits, and later calls join it."""
    async with batches_of_8(max_queue=2) as (service, gate, device):
        with held(device):
            results = settled(calls_of(service, range(20)))
            await testing.wait_quiescent()
        assert None not in numbers_of(await results)
    assert sorted(map(len, gate.values)) == [4, 8, 8]


async def test_a_batch_of_an_impure_function_is_not_run_again() -> None:
    sizes: list[int] = []

    def refuse(x: Any) -> Any:
        sizes.append(len(x))
        raise ValueError("never")

    node = ps.device_node(device="cpu", batch=ps.Batch(8, max_wait_seconds=0.2), pure=False)
    async with engine.deploy(ps.graph(node(lambda x: on_the_host(refuse, x)))) as service:
        results = await settled(calls_of(service, range(8)))
    assert all("never" in str(result) for result in results)
    assert len({id(result) for result in results}) == 8  # each caller has an error of its own, with its own notes
    assert sizes == [8]


@contextmanager
def little_memory(monkeypatch: pytest.MonkeyPatch, rows: int, *, late: bool) -> Iterator[list[int]]:
    """Makes programs for more than `rows` rows run out of memory, at dispatch or later; gives the size of each call."""
    original_wait = dispatch.wait_until_ready
    sizes: list[int] = []

    def refuse(size: int) -> None:
        sizes.append(size)
        if size > rows:
            refuse_memory()

    def wait(arrays: Any) -> None:
        original_wait(arrays)
        if late:
            refuse(arrays[0].shape[0])

    with monkeypatch.context() as patch, each_call(lambda args: late or refuse(args[0].shape[0])):
        patch.setattr(dispatch, "wait_until_ready", wait)
        yield sizes


@pytest.mark.parametrize("late", [False, True])
async def test_a_batch_that_does_not_fit_is_halved_and_the_limit_remembered(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    async with engine.deploy(doubling(batch=ps.Batch(16, max_wait_seconds=0.2))) as service:
        with little_memory(monkeypatch, 4, late=late) as sizes:
            for _ in range(2):
                assert numbers_of(await asyncio.gather(*calls_of(service, range(16)))) == [2 * n for n in range(16)]
        assert sizes == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4]


async def test_after_a_shortage_of_memory_batches_are_as_large_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy() -> None:
        assert numbers_of(await asyncio.gather(*calls_of(service, range(64)))) == [2 * n for n in range(64)]

    monkeypatch.setattr(engine_device, "LIMIT_SECONDS", 0.0)
    async with engine.deploy(doubling(batch=ps.Batch(16)), max_in_flight=64) as service:
        with little_memory(monkeypatch, 4, late=False):
            for _ in range(2):
                await busy()
        with little_memory(monkeypatch, 16, late=False) as sizes:
            await busy()  # the limit ends with a batch
            sizes.clear()
            await busy()
        assert sizes == [16] * 4


@pytest.mark.parametrize("fits_at_first", [False, True])
async def test_an_item_that_fails_in_a_batch_whose_parts_do_not_fit_fails_alone(fits_at_first: bool) -> None:
    bad, sizes = (5, 6, 12), list[int]()

    def call(args: Any) -> None:
        sizes.append(args[0].shape[0])
        if sizes[-1] > 4 and not (fits_at_first and len(sizes) == 1):
            refuse_memory()

    async with engine.deploy(refusing_graph(batch=ps.Batch(16, max_wait_seconds=0.2))) as service:
        with each_call(call):
            results = await settled(calls_of(service, [-1 if n in bad else n for n in range(16)]))
    assert numbers_of(results) == [None if n in bad else n for n in range(16)]
    assert all("a negative number" in str(results[n]) for n in bad)


async def test_what_is_too_large_is_remembered_of_its_own_kind_only() -> None:
    shapes: list[tuple[int, ...]] = []

    def call(args: Any) -> None:
        shapes.append(args[0].shape)
        if args[0].size >= 1000:
            refuse_memory()

    with each_call(call):
        async with engine.deploy(doubling(batch=ps.Batch(4, max_wait_seconds=0.2))) as service:
            for _ in range(2):
                lengths = (400, 400, 400, 400, 1000)
                results = await settled(service(np.zeros(length, np.float32)) for length in lengths)
                assert [type(result) for result in results if isinstance(result, Exception)] == [ps.DeviceError]
                shapes.append(())
                await asyncio.gather(*calls_of(service, range(4)))
    attempts = [shapes[: shapes.index(())], shapes[shapes.index(()) + 1 :]]
    assert sorted(attempts[0]) == [(1, 1000), (2, 400), (2, 400), (4, 400)]
    assert sorted(attempts[1]) == [(), (1, 1000), (2, 400), (2, 400), (4, 2), (4, 2)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("batch", [None, ps.Batch(4)])
async def test_one_item_that_does_not_fit_fails_with_its_sizes(
    monkeypatch: pytest.MonkeyPatch, batch: ps.Batch | None, late: bool
) -> None:
    message = r"'doubled' does not fit the memory of cpu:0: .*float32\[2\].* 8 bytes"
    async with engine.deploy(doubling(batch=batch)) as service:
        with little_memory(monkeypatch, 0, late=late), pytest.raises(ps.DeviceError, match=message):
            await service(row(1))
        assert float((await service(row(1)))[0]) == 2


async def test_a_device_goes_on_while_a_program_for_it_is_compiled() -> None:
    trace = HeldTrace()
    of, of_other = ps.graph(ps.device_node(device="cpu")(trace.compute)), doubling()
    async with engine.deploy(of, of_other) as service:
        await service.run(of_other(row(1)))
        waiting = asyncio.ensure_future(service.run(of(row(1))))
        await trace.entered()
        try:
            async with asyncio.timeout(60):
                for n in range(20):
                    assert float((await service.run(of_other(row(n))))[0]) == 2 * n
        finally:
            trace.go_on()
        assert float((await waiting)[0]) == 2


async def test_an_engine_is_closed_while_a_program_is_compiled() -> None:
    trace = HeldTrace()
    async with engine.Engine() as own, own.deploy(ps.graph(ps.device_node(device="cpu")(trace.compute))) as service:
        call = asyncio.ensure_future(service(row(1)))
        await trace.entered()
        aborting = asyncio.ensure_future(service.abort())
        await asyncio.wait([call])
        trace.go_on()
        await aborting
    assert call.cancelled() or call.exception() is not None


@pytest.mark.parametrize("how", ["calls", "warm-up"])
async def test_what_waits_to_be_compiled_is_not_once_nobody_waits_for_it(how: str) -> None:
    trace = HeldTrace()
    batch = ps.Batch(8) if how == "warm-up" else None
    of = ps.graph(ps.device_node(device="cpu", batch=batch, sample_input=(np.ones(1, np.float32),))(trace.compute))

    async def warm() -> None:
        async with own.deploy(of, warmup=True):
            pass

    async with engine.Engine() as own:
        work = [warm()] if how == "warm-up" else [own.run(of(np.ones(n, np.float32))) for n in range(1, 9)]
        tasks = [asyncio.ensure_future(one) for one in work]
        await trace.entered()
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        asyncio.get_running_loop().call_later(0.1, trace.go_on)
        await asyncio.wait(tasks)
    assert trace.traced == [1]


class Held:
    """A job that occupies the thread of a device until it is released; it computes nothing."""

    def __init__(self, *, ends_with: BaseException | None = None) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self._error = ends_with

    def begin(self) -> bool:
        self.entered.set()
        assert self.go_on.wait(30)
        if self._error is not None:
            raise self._error
        return False


@contextmanager
def held(device: Any) -> Iterator[None]:
    job = Held()
    device.thread.submit(job)
    assert job.entered.wait(30)
    try:
        yield
    finally:
        job.go_on.set()


@asynccontextmanager
async def batches_of_8(max_queue: int | None = None) -> AsyncIterator[tuple[engine.Service[[Any], Any], Gate, Any]]:
    """Deploys one node whose program for one row is compiled; gives the service, its gate (open), and the device."""
    gate = Gate()
    gate.open()
    async with engine.deploy(gated(gate, batch=ps.Batch(8, max_queue=max_queue))) as service:
        await service(row(0))
        gate.values.clear()
        yield service, gate, open_device()


async def test_a_batch_that_has_not_begun_takes_what_comes() -> None:
    async with batches_of_8() as (service, gate, device):
        calls: list[asyncio.Future[Any]] = []
        with held(device):
            for first, end in (0, 3), (3, 5), (5, 10):
                calls += await begun_calls(service, range(first, end))
            calls[4].cancel()
            await testing.wait_quiescent()
        assert numbers_of(await settled(calls)) == [0, 1, 2, 3, None, 5, 6, 7, 8, 9]
    assert sorted(map(len, gate.values)) == [2, 8]  # the second batch has the calls that did not fit into the first


async def test_calls_of_another_shape_or_while_the_device_holds_enough_wait_for_a_batch_of_their_own() -> None:
    async with batches_of_8() as (service, gate, device):
        with held(device):
            calls = await begun_calls(service, [1])
            calls += await begun(service(np.ones(3, np.float32)))
            device._window_bytes = 1
            calls += await begun_calls(service, [2])
            assert device.running == 2
            device._window_bytes = engine_device.DEFAULT_WINDOW_BYTES
        await asyncio.gather(*calls)
    assert sorted(map(len, gate.values)) == [1, 1, 1]
    assert device._held_bytes == 0


@pytest.mark.parametrize("seconds", [None, 0.01], ids=["cancelled", "expired"])
async def test_callers_who_leave_before_the_thread_begins_make_room_and_cost_the_device_nothing(
    seconds: float | None,
) -> None:
    async with batches_of_8() as (service, gate, device):
        [graph] = service._graphs
        with held(device):
            calls = calls_of(service, [0])
            leaving = await begun(*[service.run(graph(row(n)), timeout_seconds=seconds) for n in range(1, 7)])
            if seconds is None:
                for call in leaving:
                    call.cancel()
            await settled(leaving)
            calls += await begun_calls(service, range(10, 17))
        assert numbers_of(await asyncio.gather(*calls)) == [0, *range(10, 17)]
        await testing.wait_quiescent()
        assert (device.running, device._held_bytes) == (0, 0)
    assert [sorted(one[0] for one in values) for values in gate.values] == [[0, *range(10, 17)]]


async def test_an_error_after_a_call_was_handed_over_ends_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler, for example, may raise at that point."""
    submit = engine_device.BatchCallQueue.submit

    def raise_late(self: engine_device.BatchCallQueue, call: Any) -> None:
        submit(self, call)
        raise LookupError("a signal")

    async with batches_of_8() as (service, _, device):
        with monkeypatch.context() as patch:
            patch.setattr(engine_device.BatchCallQueue, "submit", raise_late)
            with pytest.raises(LookupError):
                await service(row(1))
        assert float((await service(row(2)))[0]) == 2
        await testing.wait_quiescent()
        (actor,) = service.statistics().actors
        assert (actor.completed, actor.failed, actor.in_flight) == (2, 1, 0)
        assert (device.running, device._held_bytes) == (0, 0)


async def test_calls_of_one_turn_end_each_in_its_own_way() -> None:
    """One value cannot be stacked, and another call's caller leaves before the device has looked at the calls."""
    async with batches_of_8() as (service, gate, _):
        calls = [asyncio.ensure_future(service(value)) for value in (row(1), object(), row(2), row(3))]
        await asyncio.sleep(0)  # each call has been made
        calls[2].cancel()
        first, refused, left, last = await settled(calls)
        assert (float(first[0]), float(last[0])) == (1, 3)
        assert isinstance(refused, TypeError)
        assert isinstance(left, asyncio.CancelledError)
        assert [len(values) for values in gate.values] == [2]
        assert service.statistics().actors[0].in_flight == 0


async def test_a_caller_who_leaves_while_failures_are_searched_is_left_out_of_what_is_run() -> None:
    """Two of eight items fail. A caller of a failing item and a caller of a good item leave during the search."""
    async with engine.deploy(refusing_graph(batch=ps.Batch(8))) as service:
        await asyncio.gather(*calls_of(service, range(8)))
        device = open_device()
        with held(device):
            calls = await begun_calls(service, (0, 1, 2, -3, 4, -5, 6, 7))
        calls[6].cancel()  # the thread may have begun or not: both are fine
        calls[5].cancel()
        found = await settled(calls)
        assert [float((await service(row(8)))[0])] == [8]
        await testing.wait_quiescent()
        assert (device.running, device._held_bytes) == (0, 0)
    assert numbers_of(found) == [0, 1, 2, None, 4, None, None, 7]
    assert [isinstance(found[n], asyncio.CancelledError) for n in (3, 5, 6)] == [False, True, True]


async def test_nodes_together_add_no_more_than_one_batch_to_what_the_device_may_hold() -> None:
    gate = Gate()
    gate.open()
    graphs = [gated(gate, batch=ps.Batch(8)) for _ in range(4)]
    async with engine.deploy(*graphs) as service:
        for of in graphs:
            await service.run(of(row(0)))
        device = open_device()
        with held(device):
            calls = await begun(*[service.run(of(row(1))) for of in graphs])
            device._window_bytes = device._held_bytes + 1
            calls += await begun(*[service.run(of(row(n))) for of in graphs for n in range(6)])
            assert device._held_bytes == (4 + 6) * row(0).nbytes
            device._window_bytes = engine_device.DEFAULT_WINDOW_BYTES
        await asyncio.gather(*calls)
        assert device._held_bytes == 0


@pytest.mark.several_devices
async def test_a_batch_that_is_due_begins_although_another_could_not_begin_on_a_device_that_is_full() -> None:
    full, other = doubling(), doubling(device="cpu:1")
    single = doubling(device="cpu:1", batch=ps.Batch(2, max_wait_seconds=0.05))
    spread = doubling(replicas=2, batch=ps.Batch(2, max_wait_seconds=0))
    async with engine.deploy(full, other, single, spread) as service:
        await asyncio.gather(*[service.run(graph(row(0))) for graph in (full, other, single, spread)])
        first, second = sorted(open_pools()[0]._devices.values(), key=lambda device: device.name)
        with held(first), held(second):
            first._window_bytes = 1  # full by one call, although the second device holds more calls
            calls = await begun(*[service.run(graph(row(1))) for graph in (full, other, other, spread, single)])
            async with asyncio.timeout(60):
                while second.running < 4:
                    await asyncio.sleep(0.001)
        assert numbers_of(await asyncio.gather(*calls)) == [2] * 5


async def test_calls_come_while_the_thread_waits_for_the_arrays_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, go_on, on_host = threading.Event(), threading.Event(), dispatch.on_host

    def wait_for_it(item: Any) -> Any:
        waits.set()
        assert go_on.wait(30)
        return on_host(item)

    monkeypatch.setattr(dispatch, "on_host", wait_for_it)
    of, other = doubling(batch=ps.Batch(8)), ps.graph(ps.device_node(device="cpu")(lambda x: x + 1))
    async with engine.deploy(of, other) as service:
        await service.run(of(row(0)))
        await service.run(other(row(0)))
        calls = await begun(service.run(of(jnp.ones(2))))
        assert waits.wait(30)
        calls += await begun(*[service.run(graph(row(3))) for graph in (of, other)])
        go_on.set()
        assert numbers_of(await asyncio.gather(*calls)) == [2, 6, 4]


async def test_a_call_that_comes_later_into_a_batch_has_been_on_its_way_for_less_long() -> None:
    async with batches_of_8() as (service, _, device):
        await asyncio.gather(*calls_of(service, range(8)))
        await service(row(0))
        with telemetry.profile() as profile:
            with held(device):
                calls = calls_of(service, [0])
                await asyncio.sleep(0.2)
                calls += await begun_calls(service, range(1, 8))
            await asyncio.gather(*calls)
    [node] = profile.nodes
    assert node.hop_share <= 1


async def test_a_batch_that_fails_before_it_has_begun_fails_what_it_has_taken_and_no_later_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with batches_of_8() as (service, gate, _):
        failing = Held(ends_with=LookupError("before it began"))
        with monkeypatch.context() as patch:
            patch.setattr(dispatch.BatchJob, "begin", failing.begin)
            calls = await begun_calls(service, [1])
            calls += await begun_calls(service, [2, 3])
            failing.go_on.set()
            errors = await settled(calls)
        assert [str(error) for error in errors] == ["before it began"] * 3
        assert len({id(error) for error in errors}) == 3
        assert [float((await service(row(4)))[0])] == [4]
    assert len(gate.values) == 1


async def test_live_bytes_stay_flat_and_idle_threads_hold_no_item(effort: int) -> None:
    first = ps.device_node(device="cpu")(lambda x: x + 1)
    second = ps.device_node(device="cpu", pure=False)(lambda x: x * 2)
    third = ps.device_node(device="cpu", batch=ps.Batch(16))(lambda x: x - 1)
    async with engine.deploy(first >> second >> third, max_in_flight=64) as service:
        await asyncio.gather(*calls_of(service, range(64)))
        gc.collect()
        gc.disable()  # garbage that only the collector frees would pile up between its runs
        try:
            before = live_bytes()
            items = 320 if effort == 1 else 10_000  # ten thousand items take eight seconds
            for _ in range(items // 64 + 1):
                for result in await asyncio.gather(*calls_of(service, range(64))):
                    del result
            last = await service(row(1))
            watched = weakref.ref(last.base if last.base is not None else last)
            del last
            async with asyncio.timeout(60):  # the threads of the device drop their last references a little later
                while watched() is not None or live_bytes() - before > 16 * 64:
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()


# --- Donation between nodes ---


made = ps.device_node(device="cpu", pure=False, name="made")(lambda x: x + 1)
looked_at = ps.device_node(device="cpu", pure=False)(lambda y, z: y + z)


def taking(**options: Any) -> Any:
    return ps.device_node(device="cpu", pure=False, donate=True, name="taken", **options)(lambda y: y * 2)


@pytest.fixture
def donated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Records each compilation: its name, and the positions of its donated arguments."""
    found: list[tuple[str, tuple[int, ...]]] = []
    build = compiling.build

    def recorded(program: Any, *args: Any) -> Any:
        found.append((program.name, program.donate_argnums))
        return build(program, *args)

    monkeypatch.setattr(compiling, "build", recorded)
    return found


async def test_a_result_that_nobody_else_reads_is_donated(donated: list[Any]) -> None:
    of = made >> taking()
    x = np.full(64, 3, np.float32)
    assert set(np.asarray(await engine.run(of(x))).tolist()) == {8.0}
    assert set(x.tolist()) == {3.0}
    assert ("taken", (0,)) in donated
    assert ("made", (0,)) not in donated


async def test_nothing_is_donated_that_somebody_else_may_read(donated: list[Any]) -> None:
    taken, retried = taking(), taking(retry=ps.Retry(2))

    @ps.graph
    async def of(x: Any) -> Any:
        y, of_caller = made(x), taken(x)
        z = made(of_caller)
        again = retried(made(z))
        return looked_at(y, taken(y)), of_caller, again

    x = jnp.full(64, 3, jnp.float32)
    assert numbers_of(await engine.run(of(x))) == [12, 6, 16]
    assert float(x[0]) == 3
    assert {positions for _, positions in donated} == {()}


async def test_a_batch_on_a_device_is_limited_by_what_its_items_cost() -> None:
    batch = devices.DeviceBatch(8, max_wait_seconds=0.2, max_cost=10, cost=lambda x: float(x[0]))
    node = ps.device_node(device="cpu", batch=batch)(lambda x: x * 2)
    async with engine.deploy(ps.graph(node)) as service:
        results = await settled(calls_of(service, (4, 5, 3, 11, 7, -1)))
    assert node.batch_statistics().batches == 2
    assert numbers_of(results) == [8, 10, 6, None, 14, None]
    assert isinstance(results[3], ValueError)
    assert "refuses an item: it costs 11.0, and a whole batch may cost at most max_cost=10" in str(results[3])
    assert "cost= of its Batch returned -1.0; return a finite number that is not negative" in str(results[5])


@pytest.mark.parametrize("kind", ["node", "function"])
async def test_the_bytes_that_calls_take_from_the_host_ahead_are_bounded(kind: str) -> None:
    gate, state = Gate(), jnp.zeros(1024)  # the state is on the device already
    step = devices.actor("cpu").bind(lambda state, x: gate.pass_through(x["x"]) + state[0])
    async with engine.deploy(gated(gate)) as service:

        def call(number: float) -> asyncio.Future[Any]:
            x = row(number)
            return asyncio.ensure_future(service(x) if kind == "node" else step(state, {"x": x}))

        calls = [call(0)]
        await gate.entered()
        device = open_device()
        device._window_bytes = 20
        calls += map(call, range(1, 9))  # 8 bytes each
        await testing.wait_quiescent()
        assert (device.running, device._held_bytes) == (3, 24)
        gate.open()
        assert numbers_of(await asyncio.gather(*calls)) == [*range(9)]
        assert device._held_bytes == 0
