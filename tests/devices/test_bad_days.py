"""Failures of device nodes: which caller gets which error, and that other calls are not affected."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog

import penstock as ps
from penstock import devices, engine
from penstock.devices import device_errors, dispatch

from .gates import Gate
from .processes import run_program

LARGE = 512  # a product of such matrices takes long enough to be computed after its dispatch


def refuse(x: Any) -> Any:
    if np.asarray(x).flat[0] < 0:
        raise ValueError("a negative number")
    return np.asarray(x)


def refusing(x: jax.Array) -> jax.Array:
    """Returns `x`; the computation fails if `x` begins with a negative number."""
    return jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="broadcast_all")


def test_without_jax_the_error_names_the_extra() -> None:
    program = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import asyncio
import penstock as ps
from penstock import devices
def attempts():
    yield lambda: ps.device_node(lambda x: x)
    yield lambda: devices.select("cpu")
    yield lambda: asyncio.run(devices.actor("cpu").run(abs, 1))
for attempt in attempts():
    try:
        attempt()
    except ps.MissingExtraError as error:
        print(error)
"""
    assert run_program(program).count('pip install "penstock[jax]"') == 3


async def test_a_function_that_cannot_be_traced_names_the_node_and_the_remedy() -> None:
    @ps.device_node(device="cpu")
    def branching(x: jax.Array) -> jax.Array:
        return x if x > 0 else -x

    @ps.graph
    async def of(x: jax.Array) -> jax.Array:
        return branching(x)

    for _ in range(2):  # a failed compilation is not cached, and the next call gets the same note
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            await engine.run(of(np.float32(1)))
        assert "depends on the value of the argument x" in str(caught.value)
        notes = "\n".join(caught.value.__notes__)
        assert "while compiling node 'branching' for cpu:0 with (x: float32[])" in notes
        assert "jnp.where" in notes
        assert "in node 'branching' of graph 'of', item 0, attempt 1" in notes


async def test_a_side_effect_of_python_happens_with_the_trace_and_not_with_the_call() -> None:
    seen: list[Any] = []

    @ps.device_node(device="cpu")
    def counted(x: jax.Array) -> jax.Array:
        seen.append(x)
        return x + 1

    # Side effects in a traced function run once: documented, not detected.
    async with engine.deploy(ps.graph(counted)) as service:
        assert [float(await service(np.float32(n))) for n in range(3)] == [1, 2, 3]
    assert len(seen) == 1


@contextmanager
def debug_nans() -> Iterator[None]:
    jax.config.update("jax_debug_nans", True)
    try:
        yield
    finally:
        jax.config.update("jax_debug_nans", False)


async def test_with_debug_nans_the_error_is_at_the_node_that_made_them() -> None:
    @ps.device_node(device="cpu", pure=False)
    def logarithm(x: jax.Array) -> jax.Array:
        return jnp.log(x)

    @ps.device_node(device="cpu", pure=False)
    def after(x: jax.Array) -> jax.Array:
        return x + 1

    @ps.graph
    async def of(x: jax.Array) -> jax.Array:
        return after(logarithm(x))

    with debug_nans(), pytest.raises(FloatingPointError, match="'logarithm' gave a NaN") as caught:
        await engine.run(of(np.float32(-1)))
    assert "in node 'logarithm' of graph 'of', item 0, attempt 1" in caught.value.__notes__


async def test_with_debug_nans_only_the_items_of_a_batch_fail_that_have_some() -> None:
    @ps.device_node(device="cpu", batch=ps.Batch(8, max_wait_seconds=0.1))
    def logarithm(x: jax.Array) -> jax.Array:
        return jnp.log(x)

    with debug_nans():
        async with engine.deploy(ps.graph(logarithm)) as service:
            results = await asyncio.gather(
                *(service(np.float32(-1 if n in (2, 5) else 1)) for n in range(8)), return_exceptions=True
            )
    assert [isinstance(result, FloatingPointError) for result in results] == [n in (2, 5) for n in range(8)]
    assert [float(result) for result in results if not isinstance(result, BaseException)] == [0.0] * 6


@pytest.fixture
def few_programs() -> Iterator[None]:
    devices.set_program_cache(max_programs=6)
    yield
    devices.set_program_cache()


async def test_shapes_without_end_are_explained_warned_of_once_and_bounded(few_programs: None) -> None:

    @ps.device_node(device="cpu")
    def total(x: jax.Array) -> jax.Array:
        return x.sum()

    with structlog.testing.capture_logs() as logs:
        async with engine.deploy(ps.graph(total)) as service:
            for length in range(1, 21):
                assert float(await service(np.ones(length, np.float32))) == length
    statistics = total.compile_statistics()
    assert statistics.programs <= 6
    assert statistics.evictions >= 14
    assert statistics.recompilations[-1].argument == "x"
    assert statistics.recompilations[-1].after == "float32[20]"
    assert len([entry for entry in logs if entry["event"] == "program.many_shapes"]) == 1
    (remedy,) = [entry["remedy"] for entry in logs if entry["event"] == "program.many_shapes"]
    assert "batch=devices.DeviceBatch(buckets=...)" in remedy


async def test_what_is_no_array_names_the_node_and_the_argument() -> None:
    @ps.device_node(device="cpu")
    def alone(x: jax.Array) -> jax.Array:
        return x

    @ps.device_node(device="cpu", batch=ps.Batch(4))
    def batched(x: jax.Array) -> jax.Array:
        return x * 2

    with pytest.raises(TypeError, match="node 'alone': x is an array of <U1"):
        await engine.run(ps.graph(alone)(np.array(["a"])))
    async with engine.deploy(ps.graph(batched)) as service:
        results = await asyncio.gather(
            service(np.ones(2, np.float32)), service(np.array(["a"])), service(object()), return_exceptions=True
        )
    assert np.asarray(results[0]).tolist() == [2, 2]
    assert isinstance(results[1], TypeError)
    assert "node 'batched', argument 'x'" in str(results[1])
    assert isinstance(results[2], TypeError)


async def test_x64_on_and_off() -> None:
    @ps.device_node(device="cpu")
    def alone(x: jax.Array) -> jax.Array:
        return x + 1

    @ps.device_node(device="cpu", batch=ps.Batch(4))
    def batched(x: jax.Array) -> jax.Array:
        return x + 1

    @ps.graph
    async def of(x: Any) -> tuple[Any, Any]:
        return alone(x), batched(x)

    value = np.array([2.0**40], np.float64)
    found: list[tuple[Any, Any]] = []
    for enabled in (False, True, False):
        jax.config.update("jax_enable_x64", enabled)
        try:
            found.append(await engine.run(of(value)))
        finally:
            jax.config.update("jax_enable_x64", False)
    assert [[str(one.dtype) for one in pair] for pair in found] == [["float32"] * 2, ["float64"] * 2, ["float32"] * 2]
    assert [float(one[0]) for one in found[1]] == [2.0**40 + 1] * 2
    assert alone.compile_statistics().programs == 2


@pytest.mark.parametrize("what", ["alone", "batched", "function", "put", "warmup"])
async def test_x64_of_the_thread_of_a_caller_is_refused(what: str) -> None:
    """The device thread does not see the caller's x64: results would silently be float32, or the call would fail."""

    def made(x: jax.Array) -> jax.Array:
        return x + jnp.arange(2.0)

    alone = ps.device_node(device="cpu", name="alone")(made)
    batched = ps.device_node(device="cpu", name="batched", batch=ps.Batch(4))(made)

    of = ps.graph(alone)
    of_batch = ps.graph(batched)
    bound = devices.actor("cpu").bind(made)
    async with engine.deploy(of, of_batch) as service:
        calls: dict[str, Any] = {
            "alone": lambda x: service.run(of(x)),
            "batched": lambda x: service.run(of_batch(x)),
            "function": bound,
            "put": devices.actor("cpu").put,
            "warmup": batched.warmup,
        }
        call, value = calls[what], np.ones(2, np.float32)
        for _ in range(2):  # the first call opens the device
            with (
                jax.enable_x64(True),
                pytest.raises(ps.DeviceError, match=r'jax\.config\.update\("jax_enable_x64", True\)'),
            ):
                await call(value)
            await call(value)
            with jax.enable_x64(False):  # the same value as in the process
                await call(value)
        jax.config.update("jax_enable_x64", True)
        try:
            with jax.enable_x64(True):
                result = await call(value)
            assert what in ("warmup", "put") or str(result.dtype) == "float64"
        finally:
            jax.config.update("jax_enable_x64", False)


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


def five_nodes(device_of_fourth: str = "cpu", **policy: Any) -> "ps.Graph[[Any], Any]":
    @ps.device_node(device="cpu", pure=False)
    def first(x: jax.Array) -> jax.Array:
        return x + 1

    @ps.device_node(device="cpu", pure=False)
    def second(x: jax.Array) -> jax.Array:
        product = jnp.outer(x, x)
        for _ in range(8):
            product = jnp.sin(product @ product)
        return jnp.where(product > 2, product, x[0] - 1)[0]

    @ps.device_node(device="cpu", pure=False, **policy)
    def third(x: jax.Array) -> jax.Array:
        return refusing(x)

    @ps.device_node(device=device_of_fourth, pure=False)
    def fourth(x: jax.Array) -> jax.Array:
        return x * 2

    @ps.device_node(device=device_of_fourth, pure=False)
    def fifth(x: jax.Array) -> jax.Array:
        return x * 3

    @ps.graph
    async def of(x: jax.Array) -> jax.Array:
        return fifth(fourth(third(second(first(x)))))

    return of


@pytest.mark.parametrize("device", ["cpu", "cpu:1"])
async def test_an_error_in_the_third_of_five_nodes_names_the_third(device: str) -> None:
    of = five_nodes(device)
    async with engine.deploy(of) as service:
        for _ in range(3):
            results = await asyncio.gather(
                service(np.full(LARGE, -5, np.float32)), service(np.full(LARGE, 5, np.float32)), return_exceptions=True
            )
            assert isinstance(results[0], jax.errors.JaxRuntimeError)
            assert "a negative number" in str(results[0])
            (note,) = results[0].__notes__
            assert note.startswith("in node 'third' of graph 'of', item ")
            assert float(results[1][0]) == 30


async def test_an_error_that_arrives_a_moment_before_its_input_is_ready_names_the_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_errors, "is_ready", lambda array: False)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        await engine.run(five_nodes("cpu:1")(np.full(LARGE, -5, np.float32)))
    (note,) = caught.value.__notes__
    assert note.startswith("in node 'third' of graph 'of', item ")


async def test_the_policy_of_a_node_sees_its_asynchronous_error() -> None:
    of = five_nodes(fallback=lambda error: np.full(LARGE, 7, np.float32))
    assert float((await engine.run(of(np.full(LARGE, -5, np.float32))))[0]) == 42


async def test_a_batch_that_cannot_be_compiled_fails_each_item_with_an_exception_of_its_own() -> None:
    @ps.device_node(device="cpu", batch=ps.Batch(64, max_wait_seconds=60))
    def broken(x: jax.Array) -> jax.Array:
        raise LookupError("not for jax")

    @ps.graph
    async def graph(x: Any) -> Any:
        return broken(x)

    calls = (graph(np.ones(3, np.float32)) for _ in range(64))
    async with engine.stream(calls, max_in_flight=64) as stream:
        errors = [outcome.error async for outcome in stream.outcomes()]
    assert len(set(map(id, errors))) == 64
    for index, error in enumerate(errors):
        assert isinstance(error, LookupError)
        assert [note for note in error.__notes__ if "item" in note] == [
            f"in node 'broken' of graph 'graph', item {index}, attempt 1"
        ]


async def test_an_error_that_a_batch_reads_fails_its_item_alone() -> None:
    @ps.device_node(device="cpu", pure=False)
    def checked(x: jax.Array) -> jax.Array:
        return refusing(x)

    @ps.device_node(device="cpu", batch=ps.Batch(8, max_wait_seconds=0.05))
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    of = checked >> doubled
    async with engine.deploy(of) as service:
        results = await asyncio.gather(
            *(service(np.full(2, -1 if n == 3 else n, np.float32)) for n in range(8)), return_exceptions=True
        )
    assert [isinstance(result, Exception) for result in results] == [n == 3 for n in range(8)]
    assert "in node 'checked'" in str(results[3].__notes__)


async def test_an_unready_error_that_a_caller_passes_to_a_batch_fails_its_item_alone() -> None:
    def negative(x: jax.Array) -> jax.Array:
        product = jnp.outer(x, x)
        for _ in range(30):
            product = jnp.sin(product @ product)
        return jnp.where(product > 2, product, -1)[0]

    @ps.device_node(device="cpu", batch=ps.Batch(4, max_wait_seconds=0.2))
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    device = devices.actor("cpu")
    async with engine.deploy(ps.graph(doubled)) as service:
        bad = await device.run(
            refusing, await device.run(negative, np.ones(LARGE, np.float32), ready=False), ready=False
        )
        inputs = [bad, *(np.full(LARGE, n, np.float32) for n in range(3))]
        results = await asyncio.gather(*(service(one) for one in inputs), return_exceptions=True)
    assert "a negative number" in str(results[0])
    assert [float(result[0]) for result in results[1:] if not isinstance(result, BaseException)] == [0, 2, 4]


async def test_a_reload_under_load_mixes_no_two_versions() -> None:
    version = 0

    @ps.resource
    async def weights() -> AsyncIterator[Any]:
        yield {"a": np.full(3, version, np.float32), "b": np.full(3, -version, np.float32)}

    @ps.device_node(device="cpu", batch=ps.Batch(8))
    def both(parameters: Any, x: jax.Array) -> jax.Array:
        return jnp.stack([parameters["a"][0] + 0 * x, parameters["b"][0] + 0 * x])

    @ps.graph
    async def of(x: jax.Array) -> jax.Array:
        return both(await weights(), x)

    seen: list[tuple[float, float]] = []

    async def client(service: Any) -> None:
        for _ in range(30):
            result = np.asarray(await service(np.float32(1)))
            seen.append((float(result[0]), float(result[1])))

    async with engine.deploy(of) as service:
        clients = [asyncio.ensure_future(client(service)) for _ in range(12)]
        for number in range(1, 6):
            await asyncio.sleep(0)
            version = number
            await service.reload(weights)
        await asyncio.gather(*clients)
        last = np.asarray(await service(np.float32(1)))
    assert all(a == -b for a, b in seen)
    assert last.tolist() == [5, -5]
    assert both.compile_statistics().programs <= 4


@contextmanager
def dying_once(monkeypatch: pytest.MonkeyPatch, where: Any, function: str) -> Iterator[None]:
    """Makes the thread of a device die once, in the given function, at its next job."""
    original = getattr(where, function)
    left = [1]

    def die(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()
            raise MemoryError("the thread dies")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(where, function, die)
        yield
    assert not left


async def test_a_device_thread_that_cannot_go_on_with_a_call_fails_that_call_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()

    @ps.resource
    async def weights() -> AsyncIterator[Any]:
        yield np.ones(2, np.float32)

    @ps.device_node(device="cpu", pure=False)
    def guarded(parameter: jax.Array, x: jax.Array) -> jax.Array:
        return gate.pass_through(x) * parameter

    @ps.graph
    async def of(x: jax.Array) -> jax.Array:
        return guarded(await weights(), x)

    async with engine.deploy(of) as service:
        first = asyncio.ensure_future(service(np.full(2, 1, np.float32)))
        await gate.entered()
        with structlog.testing.capture_logs() as logs, dying_once(monkeypatch, dispatch, "are_ready"):
            others = [asyncio.ensure_future(service(np.full(2, n, np.float32))) for n in range(2, 6)]
            for _ in range(5):
                await asyncio.sleep(0)
            gate.open()
            results = await asyncio.gather(first, *others, return_exceptions=True)
    values = [None if isinstance(result, ps.ActorRestarted) else float(result[0]) for result in results]
    assert values == [None, 2, 3, 4, 5]
    assert isinstance(results[0].__cause__, MemoryError)
    assert "in node 'guarded' of graph 'of'" in str(results[0].__notes__)
    (entry,) = [entry for entry in logs if entry["event"] == "device.restarted"]
    assert entry["device"] == "cpu:0"


@pytest.mark.parametrize("where", [(dispatch, "are_ready"), (dispatch.DispatchThread, "_wait")])
async def test_an_attempt_on_a_device_that_died_is_made_again_if_retry_names_it(
    monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    @ps.resource
    async def weights() -> AsyncIterator[Any]:
        yield np.ones(2, np.float32)

    @ps.device_node(device="cpu", retry=ps.Retry(3, backoff_seconds=0, retry_on=ps.ActorRestarted))
    def shifted(parameter: jax.Array, x: jax.Array) -> jax.Array:
        return x + parameter

    @ps.graph
    async def of(x: jax.Array) -> jax.Array:
        return shifted(await weights(), x)

    async with engine.deploy(of) as service:
        with dying_once(monkeypatch, *where):
            assert np.asarray(await service(np.ones(2, np.float32))).tolist() == [2, 2]
        assert np.asarray(await service(np.zeros(2, np.float32))).tolist() == [1, 1]
