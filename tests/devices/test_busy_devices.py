"""Devices under load: calls that are cancelled, expired, refused or closed; priorities, memory limits, and leaks."""

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine, telemetry, testing
from penstock.devices import device_errors, device_pool, dispatch, engine_device

from .compiled import each_call, refuse_memory
from .gates import Gate, gated


def row(value: float) -> Any:
    return np.full(2, value, np.float32)


def refusing_negative(x: jax.Array) -> jax.Array:
    """Returns `x`; the computation fails if a number in `x` is negative."""

    def refuse(x: Any) -> Any:
        if (np.asarray(x) < 0).any():
            raise ValueError("a negative number")
        return np.asarray(x)

    return jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="broadcast_all")


async def test_one_caller_of_a_batch_is_cancelled_and_the_others_are_unharmed() -> None:
    gate = Gate()
    of = gated(gate, batch=ps.Batch(32, max_wait_seconds=0.2))
    async with engine.deploy(of) as service:
        calls = [asyncio.ensure_future(service(row(n))) for n in range(32)]
        await gate.entered()
        calls[7].cancel()
        await asyncio.wait([calls[7]])
        assert calls[7].cancelled()
        gate.open()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [None if isinstance(r, BaseException) else float(r[0]) for r in results] == [
        None if n == 7 else n for n in range(32)
    ]
    assert len(gate.values) == 1


async def test_a_thousand_callers_are_cancelled_at_once() -> None:
    gate = Gate()
    of = gated(gate, batch=ps.Batch(16), concurrency=1000)
    async with engine.deploy(of, max_in_flight=1000) as service:
        calls = [asyncio.ensure_future(service(row(n))) for n in range(1000)]
        await gate.entered()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        gate.open()
        assert [float((await service(row(n)))[0]) for n in range(3)] == [0, 1, 2]
    computed = len(gate.values)
    assert computed <= 5  # the calls that had begun, and the last three


async def test_what_has_not_started_is_skipped_and_closing_waits_for_what_runs() -> None:
    gate = Gate()
    of = gated(gate)
    own = engine.Engine()
    async with own:
        calls = [asyncio.ensure_future(own.run(of(row(n)))) for n in range(5)]
        await gate.entered()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        closing = asyncio.ensure_future(own.__aexit__(None, None, None))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        gate.open()
        await closing
    assert gate.values == [[0, 0]]


async def test_expired_items_are_dropped_before_they_cost_device_time() -> None:
    gate = Gate()
    of = gated(gate, batch=ps.Batch(4), prefetch=1)
    async with engine.deploy(of) as service:
        running = asyncio.ensure_future(service(row(0)))
        await gate.entered()
        late = [asyncio.ensure_future(service.run(of(row(n)), timeout_seconds=0.02)) for n in range(1, 9)]
        results = await asyncio.gather(*late, return_exceptions=True)
        gate.open()
        await running
        assert float((await service(row(9)))[0]) == 9
    assert [type(result) for result in results] == [ps.DeadlineExceeded] * 8
    assert [value for batch in gate.values for value in np.ravel(batch)] == [0, 0, 9, 9]


async def test_an_item_that_expires_while_the_loop_is_held_still_raises_its_deadline() -> None:
    gate = Gate()
    of = gated(gate, batch=ps.Batch(4), prefetch=1)
    async with engine.deploy(of) as service:
        running = asyncio.ensure_future(service(row(0)))
        await gate.entered()
        late = asyncio.ensure_future(service.run(of(row(1)), timeout_seconds=0.05))
        for _ in range(10):
            await asyncio.sleep(0)
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
        calls = [asyncio.ensure_future(service(row(0)))]
        await gate.entered()
        calls += [asyncio.ensure_future(service.run(of(row(n)), priority=n % 3)) for n in range(1, 7)]
        for _ in range(10):
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*calls)
    assert [batch[0][0] for batch in gate.values] == [0, 2, 5, 1, 4, 3, 6]


async def test_a_flood_of_one_node_delays_another_by_a_window_at_most() -> None:
    gate = Gate()
    flooding = gated(gate)

    @ps.device_node(device="cpu", pure=False)
    def quick(x: jax.Array) -> jax.Array:
        return jax.pure_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def note(x: Any) -> Any:
        gate.values.append(np.asarray(x).tolist())
        return np.asarray(x)

    one = ps.graph(quick)

    async with engine.Engine() as own:
        await own.run(one(row(-2)))  # compiles the program
        calls = [asyncio.ensure_future(own.run(flooding(row(n)))) for n in range(300)]
        await gate.entered()
        calls.append(asyncio.ensure_future(own.run(one(row(-1)))))
        for _ in range(20):
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*calls)
    assert gate.values.index([-1, -1]) <= 33


async def test_a_node_that_had_much_before_is_not_kept_waiting_for_what_is_new() -> None:
    gate = Gate()
    old, new = gated(gate), gated(gate)
    async with engine.deploy(old, new) as service:
        gate.open()
        await asyncio.gather(*(service.run(old(row(n))) for n in range(50)))
        await service.run(new(row(0)))
        (device,) = _devices()
        device._window = 1
        gate.close()
        gate.values.clear()
        calls = [asyncio.ensure_future(service.run(new(row(n)))) for n in range(20)]
        for _ in range(20):
            await asyncio.sleep(0)
        calls.append(asyncio.ensure_future(service.run(old(row(-1)))))
        for _ in range(20):
            await asyncio.sleep(0)
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
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [float(result[0]) for result in results[1:]] == [-n for n in range(1, 20)]
    assert opened == ["cpu"]
    missing = [devices.actor("cpu:99").run(jnp.negative, row(n)) for n in range(3)]
    errors = await asyncio.gather(*missing, return_exceptions=True)
    assert [type(error) for error in errors] == [ps.DeviceError] * 3
    assert len({id(error) for error in errors}) == 3
    assert opened == ["cpu", "cpu:99"]


async def test_more_than_max_queue_are_refused() -> None:
    gate = Gate()
    of = gated(gate, batch=ps.Batch(2, max_queue=3), prefetch=1)
    async with engine.deploy(of) as service:
        calls = [asyncio.ensure_future(service(row(0)))]
        await gate.entered()
        calls += [asyncio.ensure_future(service(row(n))) for n in range(1, 10)]
        for _ in range(20):
            await asyncio.sleep(0)
        gate.open()
        results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ps.Overloaded)]
    assert len(refused) == 4
    assert "node 'guarded' refuses an item: 5 items wait already" in str(refused[0])
    assert [float(r[0]) for r in results if not isinstance(r, BaseException)] == [0, 1, 2, 3, 4, 5]


async def test_a_full_queue_begins_what_is_due_before_it_refuses_a_call() -> None:
    """The device is idle, so a burst fills two batches for the device, the next batch, and the queue."""

    @ps.device_node(device="cpu", batch=ps.Batch(2, max_queue=1), prefetch=2)
    def same(x: jax.Array) -> jax.Array:
        return x * 1

    async with engine.deploy(ps.graph(same)) as service:
        await asyncio.gather(*[service(row(n)) for n in range(2)])
        results = await asyncio.gather(*[service(row(n)) for n in range(8)], return_exceptions=True)
    assert [isinstance(result, ps.Overloaded) for result in results] == [False] * 7 + [True]


async def test_a_full_queue_begins_only_what_makes_room() -> None:
    """The remaining calls are a small batch that is due, too; it waits, and later calls join it."""
    async with batches_of_8(max_queue=2) as (service, gate, device):
        with held(device):
            results = asyncio.gather(*[service(row(n)) for n in range(20)], return_exceptions=True)
            await testing.wait_quiescent()
        assert [type(result) for result in await results].count(ps.Overloaded) == 0
    assert sorted(map(len, gate.values)) == [4, 8, 8]


async def test_an_item_longer_than_the_last_length_bucket_fails_alone() -> None:
    @ps.device_node(device="cpu", batch=devices.DeviceBatch(8, pad_axes={"x": 0}, length_buckets=(8, 16)))
    def total(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return jnp.sum(x)

    @ps.graph
    async def of(x: Any) -> Any:
        return total(x)

    async with engine.deploy(of) as service:
        results = await asyncio.gather(*(service(np.ones(n, np.float32)) for n in (3, 17, 16)), return_exceptions=True)
    assert [float(results[0]), float(results[2])] == [3, 16]
    assert isinstance(results[1], ValueError)
    assert "its length is 17 along axis 0, and the last of length_buckets=(8, 16)" in str(results[1])


async def test_a_batch_of_an_impure_function_is_not_run_again() -> None:
    sizes: list[int] = []

    def refuse(x: Any) -> Any:
        sizes.append(len(x))
        raise ValueError("never")

    @ps.device_node(device="cpu", batch=ps.Batch(8, max_wait_seconds=0.2), pure=False)
    def written(x: jax.Array) -> jax.Array:
        return jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="broadcast_all")

    async with engine.deploy(ps.graph(written)) as service:
        results = await asyncio.gather(*(service(row(n)) for n in range(8)), return_exceptions=True)
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
    @ps.device_node(device="cpu", batch=ps.Batch(16, max_wait_seconds=0.2))
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    async with engine.deploy(ps.graph(doubled)) as service:
        with little_memory(monkeypatch, 4, late=late) as sizes:
            for _ in range(2):
                results = await asyncio.gather(*(service(row(n)) for n in range(16)))
                assert [float(result[0]) for result in results] == [2 * n for n in range(16)]
        assert sizes == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4]


def doubling(max_size: int) -> ps.Graph[[Any], Any]:
    @ps.device_node(device="cpu", batch=ps.Batch(max_size))
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    return ps.graph(doubled)


async def busy(service: Any, times: int) -> None:
    """Runs more calls at once than any batch holds, `times` times, and checks each result."""
    for _ in range(times):
        results = await asyncio.gather(*(service(row(n)) for n in range(64)))
        assert [float(result[0]) for result in results] == [2 * n for n in range(64)]


async def test_after_a_shortage_of_memory_batches_are_as_large_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_device, "LIMIT_SECONDS", 0.0)
    async with engine.deploy(doubling(16), max_in_flight=64) as service:
        with little_memory(monkeypatch, 4, late=False):
            await busy(service, 2)
        with little_memory(monkeypatch, 16, late=False) as sizes:
            await busy(service, 1)  # the limit ends with a batch
            sizes.clear()
            await busy(service, 1)
        assert sizes == [16] * 4


async def test_an_item_that_fails_in_a_batch_that_did_not_fit_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @ps.device_node(device="cpu", batch=ps.Batch(16, max_wait_seconds=0.2))
    def checked(x: jax.Array) -> jax.Array:
        return refusing_negative(x)

    async with engine.deploy(ps.graph(checked)) as service:
        with little_memory(monkeypatch, 4, late=False):
            results = await asyncio.gather(
                *(service(row(-1 if n in (5, 6, 12) else n)) for n in range(16)), return_exceptions=True
            )
    assert [n for n, result in enumerate(results) if isinstance(result, BaseException)] == [5, 6, 12]
    assert all("a negative number" in str(results[n]) for n in (5, 6, 12))


async def test_a_batch_that_failed_is_tried_again_in_parts_that_fit() -> None:
    @ps.device_node(device="cpu", batch=ps.Batch(8, max_wait_seconds=0.2))
    def checked(x: jax.Array) -> jax.Array:
        return refusing_negative(x)

    sizes: list[int] = []

    def call(args: Any) -> None:
        sizes.append(args[0].shape[0])
        if len(sizes) > 1 and sizes[-1] > 2:  # memory suffices for the first program only
            refuse_memory()

    async with engine.deploy(ps.graph(checked)) as service:
        with each_call(call):
            calls = [service(row(-1 if n == 5 else n)) for n in range(8)]
            results = await asyncio.gather(*calls, return_exceptions=True)
    assert [n for n, result in enumerate(results) if isinstance(result, BaseException)] == [5]
    assert "a negative number" in str(results[5])


async def test_what_is_too_large_is_remembered_of_its_own_kind_only() -> None:
    @ps.device_node(device="cpu", batch=ps.Batch(4, max_wait_seconds=0.2))
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    shapes: list[tuple[int, ...]] = []

    def call(args: Any) -> None:
        shapes.append(args[0].shape)
        if args[0].size >= 1000:
            refuse_memory()

    with each_call(call):
        async with engine.deploy(ps.graph(doubled)) as service:
            for _ in range(2):
                large = [service(np.zeros(length, np.float32)) for length in (400, 400, 400, 400, 1000)]
                results = await asyncio.gather(*large, return_exceptions=True)
                assert [type(result) for result in results if isinstance(result, Exception)] == [ps.DeviceError]
                shapes.append(())
                await asyncio.gather(*(service(row(n)) for n in range(4)))
    attempts = [shapes[: shapes.index(())], shapes[shapes.index(()) + 1 :]]
    assert sorted(attempts[0]) == [(1, 1000), (2, 400), (2, 400), (4, 400)]
    assert sorted(attempts[1]) == [(), (1, 1000), (2, 400), (2, 400), (4, 2), (4, 2)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("batch", [None, ps.Batch(4)])
async def test_one_item_that_does_not_fit_fails_with_its_sizes(
    monkeypatch: pytest.MonkeyPatch, batch: ps.Batch | None, late: bool
) -> None:
    @ps.device_node(device="cpu", batch=batch)
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    async with engine.deploy(ps.graph(doubled)) as service:
        with (
            little_memory(monkeypatch, 0, late=late),
            pytest.raises(
                ps.DeviceError, match=r"'doubled' does not fit the memory of cpu:0: .*float32\[2\].* 8 bytes"
            ),
        ):
            await service(row(1))
        assert float((await service(row(1)))[0]) == 2


async def test_a_device_goes_on_while_a_program_for_it_is_compiled() -> None:
    tracing, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @ps.device_node(device="cpu")
    def slow_to_trace(x: jax.Array) -> jax.Array:
        loop.call_soon_threadsafe(tracing.set)
        assert go_on.wait(20)
        return x * 2

    @ps.device_node(device="cpu")
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    of = ps.graph(slow_to_trace)
    of_other = ps.graph(doubled)

    async with engine.deploy(of, of_other) as service:
        await service.run(of_other(row(1)))
        waiting = asyncio.ensure_future(service.run(of(row(1))))
        await tracing.wait()
        try:
            async with asyncio.timeout(10):
                for n in range(20):
                    assert float((await service.run(of_other(row(n))))[0]) == 2 * n
        finally:
            go_on.set()
        assert float((await waiting)[0]) == 2


async def test_an_engine_is_closed_while_a_program_is_compiled() -> None:
    tracing, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @ps.device_node(device="cpu")
    def slow_to_trace(x: jax.Array) -> jax.Array:
        loop.call_soon_threadsafe(tracing.set)
        assert go_on.wait(20)
        return x * 2

    async with engine.Engine() as own:
        service = own.deploy(ps.graph(slow_to_trace))
        await service.__aenter__()
        call = asyncio.ensure_future(service(row(1)))
        await tracing.wait()
        aborting = asyncio.ensure_future(service.abort())
        await asyncio.wait([call])
        go_on.set()
        await aborting
        await service.__aexit__(None, None, None)
    assert call.cancelled() or call.exception() is not None


@pytest.mark.parametrize("how", ["calls", "warm-up"])
async def test_what_waits_to_be_compiled_is_not_once_nobody_waits_for_it(how: str) -> None:
    tracing, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    traced: list[int] = []

    batch = ps.Batch(8) if how == "warm-up" else None

    @ps.device_node(device="cpu", batch=batch, sample_input=(np.ones(1, np.float32),))
    def slow_to_trace(x: jax.Array) -> jax.Array:
        traced.append(x.size)
        loop.call_soon_threadsafe(tracing.set)
        assert go_on.wait(20)
        return x * 2

    of = ps.graph(slow_to_trace)

    async def warm() -> None:
        async with own.deploy(of, warmup=True):
            pass

    async with engine.Engine() as own:
        if how == "calls":
            tasks = [asyncio.ensure_future(own.run(of(np.ones(n, np.float32)))) for n in range(1, 9)]
        else:
            tasks = [asyncio.ensure_future(warm())]
        await tracing.wait()
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        loop.call_later(0.1, go_on.set)
        await asyncio.wait(tasks)
    assert traced == [1]


async def test_the_device_gets_batches_ahead_and_no_more_than_prefetch() -> None:
    gate = Gate()

    @ps.device_node(device="cpu", batch=ps.Batch(1), prefetch=3, pure=False)
    def after(x: jax.Array) -> jax.Array:
        return gate.pass_through(x)

    async with engine.deploy(ps.graph(after)) as service:
        calls = [asyncio.ensure_future(service(row(n))) for n in range(8)]
        await gate.entered()
        (device,) = _devices()
        (queue,) = device.busy
        assert (device.running, queue.free, queue.waiting.count) == (3, 0, 5)
        gate.open()
        await asyncio.gather(*calls)
        assert (device.running, queue.free) == (0, 3)


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
        (device,) = _devices()
        yield service, gate, device


async def test_a_batch_that_has_not_begun_takes_what_comes() -> None:
    async with batches_of_8() as (service, gate, device):
        calls: list[asyncio.Future[Any]] = []
        with held(device):
            for first, end in (0, 3), (3, 5), (5, 10):
                calls += [asyncio.ensure_future(service(row(n))) for n in range(first, end)]
                await testing.wait_quiescent()
            calls[4].cancel()
            await testing.wait_quiescent()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [None if isinstance(r, BaseException) else float(r[0]) for r in results] == [0, 1, 2, 3, None, 5, 6, 7, 8, 9]
    assert sorted(map(len, gate.values)) == [2, 8]  # the second batch has the calls that did not fit into the first


async def test_calls_of_another_shape_or_while_the_device_holds_enough_wait_for_a_batch_of_their_own() -> None:
    async with batches_of_8() as (service, gate, device):
        with held(device):
            calls = [asyncio.ensure_future(service(row(1)))]
            await testing.wait_quiescent()
            calls += [asyncio.ensure_future(service(np.ones(3, np.float32)))]
            await testing.wait_quiescent()
            device._window_bytes = 1
            calls += [asyncio.ensure_future(service(row(2)))]
            await testing.wait_quiescent()
            assert device.running == 2
            device._window_bytes = engine_device.DEFAULT_WINDOW_BYTES
        await asyncio.gather(*calls)
    assert sorted(map(len, gate.values)) == [1, 1, 1]
    assert device._held_bytes == 0


async def test_callers_who_have_left_make_room_in_a_batch_that_has_not_begun() -> None:
    async with batches_of_8() as (service, gate, device):
        with held(device):
            left = [asyncio.ensure_future(service(row(n))) for n in range(1, 7)]
            await testing.wait_quiescent()
            for call in left:
                call.cancel()
            await testing.wait_quiescent()
            calls = [asyncio.ensure_future(service(row(n))) for n in range(10, 18)]
            await testing.wait_quiescent()
        results = await asyncio.gather(*calls)
        assert (device.running, device._held_bytes) == (0, 0)
    assert [float(result[0]) for result in results] == [*range(10, 18)]
    assert [sorted(one[0] for one in values) for values in gate.values] == [[*range(10, 18)]]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_callers_who_leave_before_the_thread_begins_cost_the_device_nothing(how: str) -> None:
    async with batches_of_8() as (service, gate, device):
        [graph] = service._graphs
        with held(device):
            staying = asyncio.ensure_future(service(row(0)))
            seconds = 0.01 if how == "expired" else None
            leaving = [asyncio.ensure_future(service.run(graph(row(n)), timeout_seconds=seconds)) for n in range(1, 6)]
            await testing.wait_quiescent()
            if how == "cancelled":
                for call in leaving:
                    call.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        assert float((await staying)[0]) == 0
        await testing.wait_quiescent()
        assert (device.running, device._held_bytes) == (0, 0)
    assert [len(values) for values in gate.values] == [1]  # a batch of one row


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
        first, refused, left, last = await asyncio.gather(*calls, return_exceptions=True)
        assert (float(first[0]), float(last[0])) == (1, 3)
        assert isinstance(refused, TypeError)
        assert isinstance(left, asyncio.CancelledError)
        assert [len(values) for values in gate.values] == [2]
        assert service.statistics().actors[0].in_flight == 0


async def test_a_caller_who_leaves_takes_its_failure_along() -> None:
    """A waiting batch has one item that would fail it; the caller of that item leaves."""

    @ps.device_node(device="cpu", batch=ps.Batch(8))
    def refusing(x: jax.Array) -> jax.Array:
        return refusing_negative(x)

    async with engine.deploy(ps.graph(refusing)) as service:
        await asyncio.gather(*[service(row(n)) for n in range(4)])
        (device,) = _devices()
        before = refusing.batch_statistics().batches
        with held(device):
            calls = [asyncio.ensure_future(service(row(n))) for n in (1, 2, -1, 3)]
            await testing.wait_quiescent()
            calls[2].cancel()
            await asyncio.wait([calls[2]])
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [None if isinstance(one, BaseException) else float(one[0]) for one in found] == [1, 2, None, 3]
    assert refusing.batch_statistics().batches == before + 1


async def test_a_caller_who_leaves_while_failures_are_searched_is_left_out_of_what_is_run() -> None:
    """Two of eight items fail. A caller of a failing item and a caller of a good item leave during the search."""
    gate = Gate()
    gate.open()

    @ps.device_node(device="cpu", batch=ps.Batch(8))
    def refusing(x: jax.Array) -> jax.Array:
        return gate.pass_through(refusing_negative(x))

    async with engine.deploy(ps.graph(refusing)) as service:
        await asyncio.gather(*[service(row(n)) for n in range(8)])
        (device,) = _devices()
        with held(device):
            calls = [asyncio.ensure_future(service(row(n))) for n in (0, 1, 2, -3, 4, -5, 6, 7)]
            await testing.wait_quiescent()
        calls[6].cancel()  # the thread may have begun or not: both are fine
        calls[5].cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [float((await service(row(8)))[0])] == [8]
        await testing.wait_quiescent()
        assert (device.running, device._held_bytes) == (0, 0)
    values = [type(one) if isinstance(one, BaseException) else float(one[0]) for one in found]
    assert values[:3] + values[4:5] + values[7:] == [0, 1, 2, 4, 7]
    assert values[5:7] == [asyncio.CancelledError] * 2
    assert isinstance(found[3], Exception)
    assert not isinstance(found[3], asyncio.CancelledError)


async def test_nodes_together_add_no_more_than_one_batch_to_what_the_device_may_hold() -> None:
    gate = Gate()
    gate.open()
    graphs = [gated(gate, batch=ps.Batch(8)) for _ in range(4)]
    async with engine.deploy(*graphs) as service:
        for of in graphs:
            await service.run(of(row(0)))
        (device,) = _devices()
        with held(device):
            calls = [asyncio.ensure_future(service.run(of(row(1)))) for of in graphs]
            await testing.wait_quiescent()
            device._window_bytes = device._held_bytes + 1
            calls += [asyncio.ensure_future(service.run(of(row(n)))) for of in graphs for n in range(6)]
            await testing.wait_quiescent()
            assert device._held_bytes == (4 + 6) * row(0).nbytes
            device._window_bytes = engine_device.DEFAULT_WINDOW_BYTES
        await asyncio.gather(*calls)
        assert device._held_bytes == 0


async def test_calls_come_while_the_thread_waits_for_the_arrays_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, go_on, on_host = threading.Event(), threading.Event(), dispatch.on_host

    def wait_for_it(item: Any) -> Any:
        waits.set()
        assert go_on.wait(30)
        return on_host(item)

    monkeypatch.setattr(dispatch, "on_host", wait_for_it)

    @ps.device_node(device="cpu", batch=ps.Batch(8))
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    @ps.device_node(device="cpu")
    def more(x: jax.Array) -> jax.Array:
        return x + 1

    of, other = ps.graph(doubled), ps.graph(more)
    async with engine.deploy(of, other) as service:
        await service.run(of(row(0)))
        await service.run(other(row(0)))
        calls = [asyncio.ensure_future(service.run(of(jnp.ones(2))))]
        await testing.wait_quiescent()
        assert waits.wait(30)
        calls += [asyncio.ensure_future(service.run(graph(row(3)))) for graph in (of, other)]
        await testing.wait_quiescent()
        go_on.set()
        assert [float(result[0]) for result in await asyncio.gather(*calls)] == [2, 6, 4]


async def test_a_call_that_comes_later_into_a_batch_has_been_on_its_way_for_less_long() -> None:
    async with batches_of_8() as (service, _, device):
        await asyncio.gather(*[service(row(n)) for n in range(8)])
        await service(row(0))
        with telemetry.profile() as profile:
            with held(device):
                calls = [asyncio.ensure_future(service(row(0)))]
                await asyncio.sleep(0.2)
                calls += [asyncio.ensure_future(service(row(n))) for n in range(1, 8)]
                await testing.wait_quiescent()
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
            calls = [asyncio.ensure_future(service(row(1)))]
            await testing.wait_quiescent()
            calls += [asyncio.ensure_future(service(row(n))) for n in (2, 3)]
            await testing.wait_quiescent()
            failing.go_on.set()
            errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(error) for error in errors] == ["before it began"] * 3
        assert len({id(error) for error in errors}) == 3
        assert [float((await service(row(4)))[0])] == [4]
    assert len(gate.values) == 1


async def test_what_the_device_holds_ahead_is_bounded_in_bytes() -> None:
    gate = Gate()
    of = gated(gate)
    async with engine.deploy(of) as service:
        calls = [asyncio.ensure_future(service(row(0)))]
        await gate.entered()
        (device,) = _devices()
        device._window_bytes = 20
        calls += [asyncio.ensure_future(service(row(n))) for n in range(1, 9)]  # 8 bytes each
        for _ in range(10):
            await asyncio.sleep(0)
        assert (device.running, device._held_bytes) == (3, 24)
        gate.open()
        assert [float(result[0]) for result in await asyncio.gather(*calls)] == list(range(9))
        assert device._held_bytes == 0


async def test_live_bytes_stay_flat_and_idle_threads_hold_no_item(effort: int) -> None:
    @ps.device_node(device="cpu")
    def first(x: jax.Array) -> jax.Array:
        return x + 1

    @ps.device_node(device="cpu", pure=False)
    def second(x: jax.Array) -> jax.Array:
        return x * 2

    @ps.device_node(device="cpu", batch=ps.Batch(16))
    def third(x: jax.Array) -> jax.Array:
        return x - 1

    of = first >> second >> third
    async with engine.deploy(of, max_in_flight=64) as service:
        await asyncio.gather(*(service(row(n)) for n in range(64)))
        gc.collect()
        gc.disable()  # garbage that only the collector frees would pile up between its runs
        try:
            before = _live_bytes()
            items = 320 if effort == 1 else 10_000  # ten thousand items take eight seconds
            for _ in range(items // 64 + 1):
                for result in await asyncio.gather(*(service(row(n)) for n in range(64))):
                    del result
            last = await service(row(1))
            watched = weakref.ref(last.base if last.base is not None else last)
            del last
            async with asyncio.timeout(20):  # the threads of the device drop their last references a little later
                while watched() is not None or _live_bytes() - before > 16 * 64:
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()


async def test_a_failure_on_a_device_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # JAX logs the error of a callback, and pytest keeps the log record with all objects that the traceback refers to.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)

    def fail(x: Any) -> Any:
        raise ValueError("no")

    @ps.device_node(device="cpu", pure=False)
    def slow(x: jax.Array) -> jax.Array:
        product = jnp.outer(x, x)
        for _ in range(8):
            product = jnp.sin(product @ product)
        return product[0]

    @ps.device_node(device="cpu", pure=False)
    def failing(x: jax.Array) -> jax.Array:
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @ps.device_node(device="cpu", pure=False)
    def after(x: jax.Array) -> jax.Array:
        return x * 2

    of = slow >> failing >> after
    async with engine.Engine() as own:
        for _ in range(3):
            with pytest.raises(jax.errors.JaxRuntimeError):
                await own.run(of(np.ones(256, np.float32)))
    await asyncio.sleep(0)
    gc.collect()
    assert not device_errors.ORIGINS._results


async def test_parameters_are_not_changed_by_writing_to_what_they_were_made_of() -> None:
    buffer = np.empty(1024 + 16, np.float32)
    offset = (-buffer.ctypes.data % 64) // 4
    weights = buffer[offset : offset + 1024]
    weights[:] = 1

    @ps.resource
    async def loaded() -> Any:
        yield weights

    @ps.device_node(device="cpu")
    def total(parameter: jax.Array, x: jax.Array) -> jax.Array:
        return parameter.sum() * x

    @ps.graph
    async def of(x: Any) -> Any:
        return total(await loaded(), x)

    async with engine.deploy(of) as service:
        assert float(await service(np.float32(1))) == 1024
        weights[:] = 2
        assert float(await service(np.float32(1))) == 1024


def chain(**options: Any) -> tuple[Any, Any, Any]:
    @ps.device_node(device="cpu", pure=False)
    def made(x: jax.Array) -> jax.Array:
        return x + 1

    @ps.device_node(device="cpu", pure=False, donate=True, **options)
    def taken(y: jax.Array) -> jax.Array:
        return y * 2

    @ps.device_node(device="cpu", pure=False)
    def looked_at(y: jax.Array, z: jax.Array) -> jax.Array:
        return y + z

    return made, taken, looked_at


@pytest.fixture
def donated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Records each compilation: its name, and the positions of its donated arguments."""
    from penstock.devices import compiling

    found: list[tuple[str, tuple[int, ...]]] = []
    build = compiling.build

    def recorded(program: Any, *args: Any) -> Any:
        found.append((program.name, program.donate_argnums))
        return build(program, *args)

    monkeypatch.setattr(compiling, "build", recorded)
    return found


async def test_a_result_that_nobody_else_reads_is_donated(donated: list[Any]) -> None:
    made, taken, _ = chain()

    of = made >> taken
    x = np.full(64, 3, np.float32)
    assert set(np.asarray(await engine.run(of(x))).tolist()) == {8.0}
    assert set(x.tolist()) == {3.0}
    assert dict(donated) == {"made": (), "taken": (0,)}


async def test_nothing_is_donated_that_somebody_else_may_read(donated: list[Any]) -> None:
    made, taken, looked_at = chain()
    _, retried, _ = chain(retry=ps.Retry(2))

    @ps.graph
    async def of(x: Any) -> Any:
        y, of_caller = made(x), taken(x)
        z = made(of_caller)
        again = retried(made(z))
        return looked_at(y, taken(y)), of_caller, again

    x = jnp.full(64, 3, jnp.float32)
    results = await engine.run(of(x))
    assert [float(result[0]) for result in results] == [12, 6, 16]
    assert float(x[0]) == 3
    assert {positions for _, positions in donated} == {()}


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def _devices() -> list[Any]:
    return [
        device
        for pool in gc.get_objects()
        if isinstance(pool, device_pool.DevicePool) and not pool._closed
        for device in pool._devices.values()
    ]


async def test_a_batch_on_a_device_is_limited_by_what_its_items_cost() -> None:
    @ps.device_node(device="cpu", batch=devices.DeviceBatch(8, max_wait_seconds=0.2, max_cost=10, cost=cost_of_item))
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    async with engine.deploy(ps.graph(doubled)) as service:
        results = await asyncio.gather(*(service(row(n)) for n in (4, 5, 3, 11, 7, -1)), return_exceptions=True)
    assert [float(r[0]) for r in results if not isinstance(r, BaseException)] == [8, 10, 6, 14]
    assert isinstance(results[3], ValueError)
    assert "refuses an item: it costs 11.0, and a whole batch may cost at most max_cost=10" in str(results[3])
    assert "cost= of its Batch returned -1.0; return a finite number that is not negative" in str(results[5])
    assert doubled.batch_statistics().batches == 2


def cost_of_item(x: Any) -> float:
    return float(x[0])
