"""Functions of `devices.actor`: which Engine runs them, and how callers wait for the device."""

import asyncio
import re
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog

import penstock as ps
from penstock import devices, engine
from penstock.actors.tasks import ResumingFuture
from penstock.devices.device_errors import ORIGINS, Origin, Origins
from tests.kit import actor, model

from .compiled import configured, open_pools
from .gates import Gate, HeldTrace
from .kit import refusing, row


async def negative(number: float) -> float:
    return float((await devices.actor("cpu").run(jnp.negative, np.full(2, number, np.float32)))[0])


@ps.node
async def task_of_a_handler(number: float) -> float:
    return await asyncio.create_task(negative(number))


async def looping(inbox: ps.Inbox[ps.Work[float, float]]) -> None:
    while True:
        work = await inbox.get()
        work.finish(await negative(work.value))


entered = model(enter=lambda: negative(1), call=negative, leave=lambda: negative(1))


@pytest.mark.parametrize("node", [ps.node(negative), task_of_a_handler, entered, actor(looping)])
@pytest.mark.parametrize("inside", [False, True])
async def test_a_function_runs_in_the_engine_that_runs_its_node(node: Any, inside: bool) -> None:
    of = ps.graph(node)

    @ps.node
    async def run_in_another(number: float) -> float:
        async with engine.Engine() as inner:
            result = await inner.run(of(number))
            assert len(open_pools()) == 1
        assert not open_pools()
        return result

    async with engine.Engine() as own:
        assert await own.run(ps.graph(run_in_another)(5) if inside else of(5)) == -5
        assert len(open_pools()) == (0 if inside else 1)
    assert not open_pools()  # a pool of the default Engine would still be open


async def test_a_task_that_outlives_the_engine_gets_an_error() -> None:
    closed = asyncio.Event()
    tasks: list[asyncio.Task[float]] = []

    async def late() -> float:
        await closed.wait()
        return await negative(1)

    @ps.node
    async def start(number: float) -> float:
        tasks.append(asyncio.create_task(late()))
        return number

    async with engine.Engine() as own:
        await own.run(ps.graph(start)(1))
    closed.set()
    with pytest.raises(ps.EngineClosedError):
        await tasks[0]


@pytest.mark.parametrize("donated", [(), (0,)])
async def test_actors_on_one_device_take_turns(donated: tuple[int, ...]) -> None:
    gate = Gate()
    busy, other = (devices.actor("cpu").bind(gate.pass_through, donate_argnums=donated) for _ in range(2))
    calls = [asyncio.ensure_future(busy(row(number))) for number in range(60)]
    await gate.entered()
    calls += [asyncio.ensure_future(other(row(-number))) for number in (1, 2)]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(*calls)
    # Calls that the device already held run first; after them, the flood and the function take turns.
    assert max(gate.values.index([-number, -number]) for number in (1, 2)) <= 20
    assert [one for one in gate.values if one[0] >= 0] == [[number, number] for number in range(60)]


def many_products(x: Any) -> Any:
    """Take a while, without a callback: JAX on a CPU dispatches this asynchronously."""
    return jax.lax.fori_loop(0, 40, lambda _, y: y @ x, x)


@pytest.mark.parametrize("inside", [False, True])
async def test_results_are_read_off_the_loop_while_the_next_step_has_begun(inside: bool) -> None:
    step = devices.actor("cpu").bind(many_products, ready=False)
    key = jax.random.key(0)

    async def read(x: Any) -> list[Any]:
        await step.warmup((x,))
        first = await step(x)
        reading = asyncio.ensure_future(devices.to_host({"x": first, "key": key, "name": "a"}))
        second = await step(first)
        assert not reading.done()
        found = await reading
        assert (found["key"], found["name"]) == (key, "a")
        return [found["x"], await devices.to_host(second), await devices.to_host(5.0)]

    async with engine.Engine() as own:
        x = np.eye(512, dtype=np.float32)
        results = await (own.run(ps.graph(ps.node(read))(x)) if inside else read(x))
    assert [type(one) for one in results] == [np.ndarray, np.ndarray, float]
    assert all((result == x).all() for result in results[:2])


async def test_an_error_that_is_read_is_that_of_the_step() -> None:
    device, given = devices.actor("cpu"), -np.eye(512, dtype=np.float32)
    failing = device.bind(refusing, ready=False)
    # Otherwise the products would end while the function is compiled.
    await failing.warmup((jax.ShapeDtypeStruct(given.shape, given.dtype),))
    slow = await device.run(many_products, given, ready=False)
    bad = await failing(slow)
    with pytest.raises(Exception, match="a negative number"):
        await devices.to_host([bad])
    gone = jnp.ones(2) + 1
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        await devices.to_host(gone)


async def test_shapes_that_were_announced_are_compiled_before_and_are_no_recompilations() -> None:
    traced: list[tuple[int, ...]] = []
    told: list[tuple[int, int]] = []

    def announced_step(x: Any) -> Any:
        traced.append(x.shape)
        return x + 1

    def other_step(x: Any) -> Any:
        return x - 1

    step = devices.actor("cpu").bind(announced_step)
    samples = [(jax.ShapeDtypeStruct((size,), np.float32),) for size in (1, 2, 4, 4)]
    with structlog.testing.capture_logs() as logs:
        assert await step.warmup(*samples, on_progress=lambda done, of: told.append((done, of))) == 3
        assert (traced, told) == ([(1,), (2,), (4,)], [(1, 3), (2, 3), (3, 3)])
        for size in (1, 2, 4):
            assert len(await step(np.ones(size, np.float32))) == size
        assert len(traced) == 3
        assert logs == []
        await step(np.ones(3, np.float32))
        for size in (1, 3):
            await devices.actor("cpu").run(other_step, np.ones(size, np.float32))
    told_of = [(log["event"], log["node"], log["cause"]) for log in logs]
    assert told_of == [("program.recompiled", name, "shape") for name in ("announced_step", "other_step")]
    with pytest.raises(TypeError, match="announced_step"):
        await step.warmup(("no array",))
    sample: Any = np.ones(1, np.float32)
    with pytest.raises(TypeError, match=r"announced_step.* got ndarray; write warmup\(\(x,\)\)"):
        await step.warmup((sample,), sample)


@jax.tree_util.register_pytree_node_class
class Flattened:
    """A pytree node that notes the threads that flatten it."""

    threads: ClassVar[set[int]] = set()

    def __init__(self, x: Any, may_go_on: threading.Event | None = None) -> None:
        self.x = x
        self.may_go_on = may_go_on

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        self.threads.add(threading.get_ident())
        if self.may_go_on is not None:
            self.may_go_on.wait(60)
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "Flattened":
        return cls(*children)


@pytest.mark.several_devices
async def test_weights_are_put_on_a_mesh_off_the_loop_and_are_not_moved_again() -> None:
    mesh = devices.DeviceMesh(shape=(4, 2), axis_names=("data", "model"), device="cpu")
    host = {"w": np.ones((8, 4), np.float32), "b": Flattened(jnp.arange(4.0)), "scale": 2.0}
    Flattened.threads.clear()
    device = devices.actor(mesh)
    placed: Any = await device.put(host, {"w": jax.P("data", "model"), "b": jax.P("model"), "scale": None})
    assert Flattened.threads
    assert threading.get_ident() not in Flattened.threads
    assert [placed["w"].sharding.spec, placed["b"].x.sharding.spec] == [jax.P("data", "model"), jax.P("model")]
    assert placed["scale"].sharding.is_fully_replicated
    host["w"][:] = 0
    assert np.asarray(placed["w"]).sum() == 32
    times = device.bind(lambda tree: tree["w"] * tree["scale"])
    with configured("jax_transfer_guard", "disallow_explicit"):  # applies in the thread of the device, too
        result = await times(placed)
    assert result.sharding == placed["w"].sharding
    again: Any = await devices.actor("cpu:3").put(placed)
    assert {device.id for leaf in jax.tree.leaves(again) for device in leaf.devices()} == {3}
    with pytest.raises(ValueError, match=r"the value\['w'\] has 6 elements along axis 0.*no multiple of 4"):
        await device.put({"w": np.ones(6)}, jax.P("data"))
    with pytest.raises(ValueError, match="splits an array over a mesh, and cpu:0 is one device"):
        await devices.actor("cpu").put(np.ones(6), jax.P("data"))


@pytest.mark.several_devices
async def test_a_caller_that_leaves_does_not_wait_for_weights_that_are_put() -> None:
    device, may_go_on = devices.actor("cpu:1"), threading.Event()
    await device.put(1.0)  # opens the device
    Flattened.threads.clear()
    async with engine.Engine() as own:

        @ps.node
        async def place(x: float) -> Any:
            return await device.put(Flattened(np.full(2, x), may_go_on))

        call = asyncio.create_task(own.run(ps.graph(place)(2.0)))
        while not Flattened.threads:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not may_go_on.is_set()
        may_go_on.set()
        assert (await own.run(ps.graph(place)(3.0))).x.tolist() == [3.0, 3.0]


async def test_a_result_that_comes_in_the_turn_in_which_its_caller_is_cancelled_is_not_lost() -> None:
    gate, stored = Gate(), list[Any]()
    step = devices.actor("cpu").bind(gate.pass_through, donate_argnums=(0,))

    async def handler() -> None:
        stored.append(await step(jnp.ones(4)))

    task = asyncio.ensure_future(handler())
    await gate.entered()
    gate.open()
    (pool,) = open_pools()
    while not len(pool._mailbox):
        time.sleep(0.001)  # noqa: ASYNC251 - the loop stands still, so that the result waits for it
    task.cancel()
    await task
    assert np.asarray(stored[0]).tolist() == [1] * 4


def test_an_error_names_its_computation_while_that_is_noted_as_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(dict[Origin, Any]):
        """A dictionary that notes removals: no result may go while another thread may ask for it."""

        def pop(self, *args: Any) -> Any:
            removed.append(args[0])
            return super().pop(*args)

    removed: list[Origin] = []
    origins, array = Origins(), jnp.ones(3)
    monkeypatch.setattr(origins, "_results", Watched())
    origins.add([array], origin := Origin("first", ()))
    origins.over(origin, ValueError("no"))
    assert removed == []
    assert origin in origins._results
    del array
    assert removed == [origin]
    assert not origins._results


async def test_what_is_handed_on_and_donated_without_another_result_is_computed_to_its_end() -> None:
    step = devices.actor("cpu").bind(lambda x: jnp.sin(x @ x), donate_argnums=(0,), ready=False)
    x = jnp.eye(64) * 0.5
    wanted = jnp.copy(x)
    plain = jax.jit(lambda x: jnp.sin(x @ x))
    for _ in range(100):
        x = await step(x)
        wanted = plain(wanted)
    np.testing.assert_allclose(np.asarray(x), np.asarray(wanted), rtol=1e-5)
    del x
    async with asyncio.timeout(60):  # the thread of the device removes the result a little later
        while ORIGINS._results:
            await asyncio.sleep(0.001)


@pytest.mark.several_devices
async def test_a_function_that_was_called_often_takes_nothing_for_what_it_is_not() -> None:
    def double(x: Any, y: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2 + y, x)

    bound, usual = devices.actor("cpu").bind(double), (jnp.ones(3), np.ones(3, np.float32))
    unlike: list[tuple[Any, Any]] = [
        (jnp.ones(3, jnp.int32), usual[1]),
        (jnp.ones(4), np.ones(4, np.float32)),
        (usual[0], 2),
        (usual[0], 2.0),
        (usual[0], True),
        (jnp.broadcast_to(jnp.asarray(1.0), 3), usual[1]),  # a weak type
        ([usual[0]], usual[1]),
        ({"a": usual[0]}, usual[1]),
        (jax.device_put(usual[0], jax.devices("cpu")[1]), usual[1]),
        (usual[1], usual[0]),
    ]
    for number, one in enumerate([*unlike, *unlike]):
        for _ in range(3 if number < len(unlike) else 0):  # later, the calls are unlike each other
            assert np.asarray(await bound(*usual)).tolist() == [3, 3, 3]
        wanted, found = jax.jit(double)(*one), await bound(*one)
        assert jax.tree.structure(wanted) == jax.tree.structure(found)
        for leaf, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            assert (leaf.dtype, leaf.weak_type) == (other.dtype, other.weak_type)
            assert other.devices() == {jax.devices("cpu")[0]}
            np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": 3}, "fn=3: a function"),
        ({"donate_argnums": "x"}, "donate_argnums='x': a tuple of positions of arguments, from 0"),
        ({"donate_argnums": (-1,)}, "donate_argnums=(-1,): a tuple of positions"),
        ({"ready": "no"}, "ready='no': True or False"),
    ],
)
async def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"fn": jnp.negative, **options}
    fn, device = given.pop("fn"), devices.actor("cpu")
    calls: list[Any] = [lambda: device.bind(fn, **given), lambda: device.run(fn, 1.0, **given)]
    for call in calls:
        with pytest.raises(ps.OptionsError, match=re.escape(f"devices.actor(...): {message}")):
            await call()


@pytest.mark.parametrize("donate", [(), (0,)])
async def test_a_class_that_jax_refuses_is_refused_after_many_calls_as_well(donate: tuple[int, ...]) -> None:
    """JAX's C++ code would treat a masked array as a plain NumPy array, and drop its mask."""
    bound = devices.actor("cpu").bind(jnp.negative, donate_argnums=donate)
    for _ in range(8):
        assert float((await bound(np.ones(3, np.float32)))[0]) == -1
    with pytest.raises(ValueError, match="masked"):
        await bound(np.ma.masked_array(np.ones(3, np.float32), [True, False, False]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_debug_nans", True),
        ("jax_debug_infs", True),
        ("jax_optimization_level", "O1"),
        ("jax_memory_fitting_level", "O1"),
        ("jax_enable_x64", True),
        ("jax_default_matmul_precision", "float32"),
    ],
)
async def test_a_change_of_configuration_counts_after_many_calls_as_well(name: str, value: object) -> None:
    traced: list[object] = []

    def ratio(x: Any) -> Any:
        traced.append(x)
        return x / x

    bound = devices.actor("cpu").bind(ratio)
    for _ in range(8):
        assert np.isnan(await bound(np.zeros(2))).all()
    assert len(traced) == 1
    with configured(name, value):
        assert (await bound(np.ones(2))).dtype == (np.float64 if name == "jax_enable_x64" else np.float32)
        assert len(traced) == 2
        if name == "jax_debug_nans":
            with pytest.raises(FloatingPointError, match="'ratio' gave a NaN"):
                await bound(np.zeros(2))
    so_far = len(traced)  # JAX traces the function once more to find the NaN
    assert (await bound(np.ones(2))).dtype == np.float32
    assert len(traced) == so_far


@pytest.mark.parametrize("calls", [0, 8])
async def test_a_donating_call_can_be_cancelled_while_it_is_compiled_also_after_many_others(calls: int) -> None:
    trace = HeldTrace()
    trace.go_on()
    bound = devices.actor("cpu").bind(trace.compute, donate_argnums=(0,))
    state = jnp.ones(3)
    for _ in range(calls):
        state = await bound(state)
    trace.hold()
    other = jnp.ones(4)
    call = asyncio.ensure_future(bound(other))
    await trace.entered()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    trace.go_on()
    assert float((await bound(state))[0]) == 2 ** (calls + 1)
    assert not other.is_deleted()
    assert float((await bound(other))[0]) == 2


@pytest.mark.parametrize("ready", [True, False])
async def test_the_caller_goes_on_in_the_turn_of_the_loop_in_which_the_result_comes(
    monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    loop = asyncio.get_running_loop()
    order: list[str] = []
    arrive = loop.call_soon_threadsafe

    def and_others(callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        handle = arrive(callback, *args)
        arrive(order.append, "others")
        return handle

    plus_one = devices.actor("cpu").bind(lambda x: x + 1, ready=ready)
    x = await plus_one(np.ones(3, np.float32))
    monkeypatch.setattr(loop, "call_soon_threadsafe", and_others)
    await plus_one(x)
    assert not order


async def test_a_result_that_a_task_sets_resumes_the_caller_in_a_turn_of_its_own() -> None:
    future: ResumingFuture[int] = ResumingFuture(loop=asyncio.get_running_loop())
    task = asyncio.create_task(asyncio.wait_for(future, None))
    await asyncio.sleep(0)
    future.set_result(1)
    assert not task.done()
    assert await task == 1
