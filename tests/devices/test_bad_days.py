"""Failures of device nodes: which caller gets which error, and that other calls are not affected."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog

import penstock as ps
from penstock import devices, engine
from penstock.devices import device_errors, dispatch
from tests.kit import begun, without_the_collector

from .compiled import configured, dying_once
from .gates import Gate
from .kit import doubling, graph_of, live_bytes, numbers_of, refusing, resource_of, row, settled

LARGE = 512  # a product of such matrices takes long enough to be computed after its dispatch


async def test_a_function_that_cannot_be_traced_names_the_node_and_the_remedy() -> None:
    of = ps.graph(ps.device_node(device="cpu", name="branching")(lambda x: x if x > 0 else -x))
    for _ in range(2):  # a failed compilation is not cached, and the next call gets the same note
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            await engine.run(of(np.float32(1)))
        assert "depends on the value of the argument x" in str(caught.value)
        notes = "\n".join(caught.value.__notes__)
        assert "while compiling node 'branching' for cpu:0 with (x: float32[])" in notes
        assert "jnp.where" in notes
        assert "in node 'branching' of graph 'branching', item 0, attempt 1" in notes


@pytest.mark.parametrize("options", [{"pure": False}, {"batch": ps.Batch(8, max_wait_seconds=0.1)}])
async def test_with_debug_nans_only_the_items_fail_that_have_some_at_the_node_that_made_them(options: Any) -> None:
    logarithm = ps.device_node(device="cpu", name="logarithm", **options)(jnp.log)
    of = logarithm >> ps.device_node(device="cpu", pure=False)(lambda x: x + 1)
    with configured("jax_debug_nans", True):
        async with engine.deploy(of) as service:
            results = await settled(service(np.float32(-1 if n in (2, 5) else 1)) for n in range(8))
    assert numbers_of(results) == [None if n in (2, 5) else 1 for n in range(8)]
    for error in (results[2], results[5]):
        assert isinstance(error, FloatingPointError)
        assert "'logarithm' gave a NaN" in str(error)
        assert "in node 'logarithm' of graph" in "".join(error.__notes__)


@pytest.fixture
def few_programs() -> Iterator[None]:
    devices.set_program_cache(max_programs=6)
    yield
    devices.set_program_cache()


async def test_shapes_without_end_are_explained_warned_of_once_and_bounded(few_programs: None) -> None:
    total = ps.device_node(device="cpu")(lambda x: x.sum())
    with structlog.testing.capture_logs() as logs:
        async with engine.deploy(ps.graph(total)) as service:
            for length in range(1, 21):
                assert float(await service(np.ones(length, np.float32))) == length
    statistics = total.compile_statistics()
    assert statistics.programs <= 6
    assert statistics.evictions == len(statistics.evicted) >= 14
    with pytest.raises(ps.OptionsError, match="max_programs"):
        devices.set_program_cache(max_programs=0)
    assert statistics.recompilations[-1].argument == "x"
    assert statistics.recompilations[-1].after == "float32[20]"
    assert len([entry for entry in logs if entry["event"] == "program.many_shapes"]) == 1
    (remedy,) = [entry["remedy"] for entry in logs if entry["event"] == "program.many_shapes"]
    assert "batch=devices.DeviceBatch(buckets=...)" in remedy


async def test_what_is_no_array_names_the_node_and_the_argument() -> None:
    with pytest.raises(TypeError, match="node 'doubled': x is an array of <U1"):
        await engine.run(doubling()(np.array(["a"])))
    async with engine.deploy(doubling(batch=ps.Batch(4))) as service:
        fine, *refused = await settled(map(service, (row(1), np.array(["a"]), object())))
    assert fine.tolist() == [2, 2]
    assert [type(error) for error in refused] == [TypeError] * 2
    assert "node 'doubled', argument 'x'" in str(refused[0])


@pytest.mark.parametrize("what", ["alone", "batched", "function", "put", "warmup"])
async def test_x64_of_the_thread_of_a_caller_is_refused(what: str) -> None:
    """The device thread does not see the caller's x64: results would silently be float32, or the call would fail."""

    def made(x: jax.Array) -> jax.Array:
        return x + jnp.arange(2.0)

    batched = ps.device_node(device="cpu", name="batched", batch=ps.Batch(4))(made)
    of, of_batch, actor = ps.graph(ps.device_node(device="cpu")(made)), ps.graph(batched), devices.actor("cpu")
    remedy = r'jax\.config\.update\("jax_enable_x64", True\)'
    async with engine.deploy(of, of_batch) as service:
        calls: dict[str, Any] = {
            "alone": lambda x: service.run(of(x)),
            "batched": lambda x: service.run(of_batch(x)),
            "function": actor.bind(made),
            "put": actor.put,
            "warmup": batched.warmup,
        }
        call, value = calls[what], np.ones(2, np.float32)
        for _ in range(2):  # the first call opens the device
            with jax.enable_x64(True), pytest.raises(ps.DeviceError, match=remedy):
                await call(value)
            await call(value)
            with jax.enable_x64(False):  # the same value as in the process
                await call(value)
        with configured("jax_enable_x64", True), jax.enable_x64(True):
            result = await call(value)
            assert what in ("warmup", "put") or str(result.dtype) == "float64"


async def test_a_donated_buffer_cannot_be_read_again() -> None:
    def step(state: jax.Array) -> jax.Array:
        return state + 1

    device = devices.actor("cpu")
    state = await device.run(step, np.zeros(4, np.float32))
    newer = await device.run(step, state, donate_argnums=(0,))
    for donated in ((0,), ()):
        with pytest.raises(ps.DeviceError, match="'step': the memory of argument 'state' was donated to an earlier"):
            await device.run(step, state, donate_argnums=donated)
    assert np.asarray(newer).tolist() == [2, 2, 2, 2]


def large(value: float) -> Any:
    return np.full(LARGE, value, np.float32)


def slow(x: jax.Array) -> jax.Array:
    """Returns `x` with the first number everywhere, after a while."""
    product = jnp.outer(x, x)
    for _ in range(8):
        product = jnp.sin(product @ product)
    return jnp.where(product > 2, product, x[0])[0]


def five_nodes(device_of_fourth: str = "cpu", **policy: Any) -> "ps.Graph[[Any], Any]":
    first = ps.device_node(device="cpu", pure=False)(lambda x: x + 1)
    second = ps.device_node(device="cpu", pure=False)(lambda x: slow(x) - 1)
    third = ps.device_node(device="cpu", pure=False, name="third", **policy)(refusing)
    fourth = ps.device_node(device=device_of_fourth, pure=False)(lambda x: x * 2)
    fifth = ps.device_node(device=device_of_fourth, pure=False)(lambda x: x * 3)
    return graph_of(lambda x: fifth(fourth(third(second(first(x))))))


@pytest.mark.several_devices
@pytest.mark.parametrize("device", ["cpu", "cpu:1"])
async def test_an_error_in_the_third_of_five_nodes_names_the_third_and_is_forgotten(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # JAX logs the error of a callback, and pytest keeps the log record with all objects that the traceback refers to.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)
    async with engine.deploy(five_nodes(device)) as service:
        for _ in range(3):
            failed, fine = await settled(map(service, (large(-5), large(5))))
            assert isinstance(failed, jax.errors.JaxRuntimeError)
            assert "a negative number" in str(failed)
            (note,) = failed.__notes__
            assert note.startswith("in node 'third' of graph 'of', item ")
            assert float(fine[0]) == 30
    del failed, fine
    async with asyncio.timeout(60):  # the threads of the device forget their last results a little later
        while device_errors.ORIGINS._results:
            gc.collect()
            await asyncio.sleep(0.01)


@pytest.mark.several_devices
async def test_an_error_that_arrives_a_moment_before_its_input_is_ready_names_the_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_errors, "is_ready", lambda array: False)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        await engine.run(five_nodes("cpu:1")(large(-5)))
    (note,) = caught.value.__notes__
    assert note.startswith("in node 'third' of graph 'of', item ")


async def test_the_policy_of_a_node_sees_its_asynchronous_error() -> None:
    of = five_nodes(fallback=lambda error: large(7))
    assert float((await engine.run(of(large(-5))))[0]) == 42


class Custom(Exception):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


async def test_a_batch_that_cannot_be_compiled_fails_each_item_with_an_exception_of_its_own() -> None:
    @ps.device_node(device="cpu", batch=ps.Batch(64, max_wait_seconds=60))
    def broken(x: jax.Array) -> jax.Array:
        raise Custom(7, why="not for jax")

    graph = ps.graph(broken)
    calls = (graph(np.ones(3, np.float32)) for _ in range(64))
    errors = [outcome.error async for outcome in engine.stream(calls, max_in_flight=64).outcomes()]
    assert len(set(map(id, errors))) == 64
    for index, error in enumerate(errors):
        assert isinstance(error, Custom)
        assert (str(error), error.code) == ("7: not for jax", 7)
        assert [note for note in error.__notes__ if "item" in note] == [
            f"in node 'broken' of graph 'broken', item {index}, attempt 1"
        ]


async def test_an_error_that_a_batch_reads_fails_its_item_alone() -> None:
    checked = ps.device_node(device="cpu", pure=False, name="checked")(refusing)
    doubled = ps.device_node(device="cpu", batch=ps.Batch(8, max_wait_seconds=0.05))(lambda x: x * 2)
    async with engine.deploy(checked >> doubled) as service:
        results = await settled(service(row(-1 if n == 3 else n)) for n in range(8))
    assert numbers_of(results) == [None if n == 3 else 2 * n for n in range(8)]
    assert "in node 'checked'" in str(results[3].__notes__)


async def test_an_unready_error_that_a_caller_passes_to_a_batch_fails_its_item_alone() -> None:
    device = devices.actor("cpu")
    async with engine.deploy(doubling(batch=ps.Batch(4, max_wait_seconds=0.2))) as service:
        negative = await device.run(lambda x: slow(slow(slow(-x))), large(1), ready=False)
        bad = await device.run(refusing, negative, ready=False)
        results = await settled(map(service, [bad, *map(large, range(3))]))
    assert numbers_of(results) == [None, 0, 2, 4]
    assert "a negative number" in str(results[0])


async def test_a_reload_under_load_mixes_no_two_versions() -> None:
    version = 0
    weights = resource_of(lambda: {"a": np.full(3, version, np.float32), "b": np.full(3, -version, np.float32)})

    @ps.device_node(device="cpu", batch=ps.Batch(8))
    def both(parameters: Any, x: jax.Array) -> jax.Array:
        return jnp.stack([parameters["a"][0] + 0 * x, parameters["b"][0] + 0 * x])

    async def client(service: Any) -> list[Any]:
        return [np.asarray(await service(np.float32(1))).tolist() for _ in range(30)]

    async with engine.deploy(graph_of(both, weights)) as service:
        clients = [asyncio.ensure_future(client(service)) for _ in range(12)]
        for number in range(1, 6):
            await asyncio.sleep(0)
            version = number
            await service.reload(weights)
        seen = [each for some in await asyncio.gather(*clients) for each in some]
        assert np.asarray(await service(np.float32(1))).tolist() == [5, -5]
    assert all(a == -b for a, b in seen)
    assert both.compile_statistics().programs <= 4


ones = resource_of(lambda: row(1))


async def test_a_device_thread_that_cannot_go_on_with_a_call_fails_that_call_alone() -> None:
    gate = Gate()
    guarded = ps.device_node(device="cpu", pure=False, name="guarded")(lambda w, x: gate.pass_through(x) * w)
    of = graph_of(guarded, ones)
    async with engine.deploy(of) as service:
        first = asyncio.ensure_future(service(row(1)))
        await gate.entered()
        with structlog.testing.capture_logs() as logs, dying_once(dispatch, "are_ready"):
            others = await begun(*[service(row(n)) for n in range(2, 6)])
            gate.open()
            results = await settled([first, *others])
    assert numbers_of(results) == [None, 2, 3, 4, 5]
    assert isinstance(results[0], ps.ActorRestarted)
    assert isinstance(results[0].__cause__, SystemExit)
    assert "in node 'guarded' of graph 'of'" in str(results[0].__notes__)
    (entry,) = [entry for entry in logs if entry["event"] == "device.restarted"]
    assert entry["device"] == "cpu:0"


@pytest.mark.parametrize("where", [(dispatch, "are_ready"), (dispatch.DispatchThread, "_wait")])
async def test_an_attempt_on_a_device_that_died_is_made_again_if_retry_names_it(
    where: tuple[Any, str],
) -> None:
    retry = ps.Retry(3, backoff_seconds=0, retry_on=ps.ActorRestarted)
    shifted = ps.device_node(device="cpu", retry=retry)(lambda w, x: x + w)
    of = graph_of(shifted, ones)
    async with engine.deploy(of) as service:
        with dying_once(*where):
            assert np.asarray(await service(row(1))).tolist() == [2, 2]
        assert np.asarray(await service(row(0))).tolist() == [1, 1]


SIZE = 10_000


def fails_late(x: jax.Array) -> jax.Array:
    return refusing(x + 0 * slow(x[:64])[0])


def fails_while_traced(x: jax.Array) -> jax.Array:
    raise LookupError("not traceable")


def _actor(fn: Callable[..., Any], **options: Any) -> Callable[[Any], Awaitable[Any]]:
    return lambda x: devices.actor("cpu").run(fn, x, **options)


def _node(fn: Callable[..., Any], **options: Any) -> Callable[[Any], Awaitable[Any]]:
    of: Any = ps.graph(ps.device_node(device="cpu", **options)(fn))
    return lambda x: engine.run(of(x))


def _batches(fn: Callable[..., Any]) -> Callable[[Any], Awaitable[Any]]:
    call = _node(fn, batch=ps.Batch(4))

    async def three(x: Any) -> Any:
        assert numbers_of(await settled(call(x) for _ in range(3))) == [None] * 3
        raise LookupError("all of them failed")

    return three


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[[Any], Awaitable[Any]]]] = {
    "function": _actor,
    "function that donates": lambda fn: _actor(fn, donate_argnums=(0,)),
    "node": lambda fn: _node(fn, pure=False),
    "batches": _batches,
}


@pytest.fixture
async def without_collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    # JAX logs the error of a callback, and pytest keeps the log record with all objects that the traceback refers to.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)
    with without_the_collector():
        yield


@pytest.mark.parametrize("fn", [refusing, fails_late, fails_while_traced])
@pytest.mark.parametrize("way", WAYS)
async def test_a_failed_call_lets_go_of_its_arrays(way: str, fn: Callable[..., Any], without_collector: None) -> None:
    call = WAYS[way](fn)

    async def fail() -> None:
        with pytest.raises((jax.errors.JaxRuntimeError, LookupError)):
            await call(-jnp.ones(SIZE))

    await devices.actor("cpu").run(jnp.negative, np.zeros(1))  # opens the device
    before = live_bytes()
    for _ in range(3):
        await fail()
    async with asyncio.timeout(60):  # the threads of the device drop their last reference a little later
        while live_bytes() - before >= 4 * SIZE:
            await asyncio.sleep(0.001)
