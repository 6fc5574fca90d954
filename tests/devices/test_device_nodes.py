"""Device nodes: plain JAX in graphs, one by one and in batches."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine
from penstock.devices import parameters
from tests.kit import numbers, plain, same

from .gates import Gate
from .kit import graph_of, on_the_host, resource_of, row

double = ps.device_node(device="cpu", name="double")(lambda x: x * 2)
doubled = ps.graph(double)


async def test_a_device_node_is_a_plain_function_outside_of_graphs_and_gives_an_array_of_jax_inside() -> None:
    for result in (double(jnp.arange(3)), await engine.run(doubled(np.arange(3, dtype=np.float32)))):
        assert isinstance(result, jax.Array)
        assert np.asarray(result).tolist() == [0, 2, 4]


async def test_nothing_of_a_call_happens_on_the_event_loop() -> None:
    threads: set[threading.Thread] = set()

    def compute(x: Any) -> Any:
        threads.add(threading.current_thread())
        return np.asarray(x) + 1

    @ps.device_node(device="cpu")
    def traced(x: jax.Array) -> jax.Array:
        threads.add(threading.current_thread())
        return on_the_host(compute, x)

    assert np.asarray(await engine.run(ps.graph(traced)(np.zeros(2, np.float32)))).tolist() == [1, 1]
    assert threads
    assert threading.main_thread() not in threads


async def test_a_result_goes_on_before_it_is_ready_and_reaches_the_host_when_it_is() -> None:
    gate = Gate()
    slow, after = (ps.device_node(device="cpu", pure=False)(fn) for fn in (gate.pass_through, lambda x: x + 1))

    @ps.node
    async def host(x: jax.Array) -> tuple[float, bool]:
        return float(x[0]), x.is_ready()

    of = slow >> after >> host
    call = asyncio.ensure_future(engine.run(of(row(0))))
    await gate.entered()
    gate.open()
    assert await call == (1.0, True)


async def test_items_of_different_lengths_are_padded_and_masked() -> None:
    @ps.device_node(device="cpu", batch=devices.DeviceBatch(8, pad_axes={"tokens": 0}))
    def mean(tokens: Any, mask: Any = None) -> tuple[Any, Any]:
        return jnp.sum(tokens * mask) / jnp.sum(mask), jnp.sum(tokens)

    rows = [np.arange(1, length, dtype=np.float32) for length in range(2, 61)]
    async with engine.deploy(ps.graph(mean), max_in_flight=64) as service:
        results = await asyncio.gather(*(service(row) for row in rows))
    # What is behind a row is zero.
    np.testing.assert_allclose(results, [(row.mean(), row.sum()) for row in rows], rtol=1e-5)
    assert mean.compile_statistics().programs <= 4 * 4
    batches = mean.batch_statistics()
    assert (batches.calls, batches.real_elements) == (59, sum(range(1, 60)))
    assert 0 < batches.padding_share < 0.75
    assert batches.mean_size == 59 / batches.batches


async def test_parts_of_a_resource_are_placed_once_and_shared_by_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    version = 1

    weights = resource_of(
        lambda: {"a": np.full((2, 3), version, np.float32), "b": np.full(3, 10 * version, np.float32)}
    )
    batch = ps.Batch(8, max_wait_seconds=0.2)
    of_list = ps.device_node(device="cpu", batch=batch)(lambda parts, x: (parts[0][0] + parts[1]) * x)
    of_view = ps.device_node(device="cpu", batch=batch)(lambda row, x: row * x)
    alone = ps.device_node(device="cpu", pure=False)(lambda parts, x: parts["row"] * x)

    def parts(opened: Any, x: Any) -> list[Any]:
        row = opened["a"][1]
        return [of_list([opened["a"], opened["b"]], x), of_view(row, x), alone({"row": row, "other": opened["b"]}, x)]

    of = graph_of(parts, weights)
    placed: list[Any] = []
    original = parameters.put_there
    monkeypatch.setattr(parameters, "put_there", lambda *args: placed.append(args) or original(*args))
    async with engine.deploy(of) as service:
        for version in (1, 2):
            await service.reload(weights)
            rows = await asyncio.gather(*(service(np.float32(n)) for n in range(8)))
            expected = [[11 * version * n, version * n, version * n] for n in range(8)]
            assert [[float(result[0]) for result in row] for row in rows] == expected
            assert len(placed) == 3 * version
    assert (of_list.batch_statistics().batches, of_view.batch_statistics().batches) == (2, 2)
    assert [node.compile_statistics().programs for node in (of_list, of_view)] == [1, 1]


async def test_a_reload_of_parameters_with_another_shape_is_refused_and_the_old_ones_stay() -> None:
    size = 3
    scaled = ps.device_node(device="cpu", name="scaled")(lambda w, x: jax.tree.leaves(w)[0] * x)
    weights = resource_of(lambda: {"w": np.ones(size, np.float32)})

    async def opened_inside(x: Any) -> Any:
        return scaled((await weights())["w"], x)

    alone = graph_of(lambda w, xs: [scaled(w, xs[0])], weights)
    inside = graph_of(lambda xs: ps.map_each(opened_inside, xs), awaits=True)
    around = graph_of(lambda w, xs: ps.map_each(lambda x: scaled(w["w"], x), xs), weights, awaits=True)
    for of, where in ((alone, r"\['w'\]"), (inside, "the top"), (around, "the top")):
        size = 3
        async with engine.deploy(of) as service:
            assert [result.shape for result in await service([np.float32(2)])] == [(3,)]
            size = 4
            message = rf"float32\[4\] at {where}, the present ones float32\[3\]"
            with pytest.raises(ps.DeviceError, match=message) as caught:
                await service.reload(weights)
            assert "node 'scaled' uses it" in str(caught.value.__notes__)
            assert [result.shape for result in await service([np.float32(2)])] == [(3,)]


async def test_only_what_a_node_takes_of_a_resource_has_to_keep_its_shapes() -> None:
    version = 1

    def opened() -> Any:
        parameters, sign = {"w": np.full(3, version, np.float32)}, "-" if version == 3 else "+"
        return SimpleNamespace(parameters=parameters, words=["word"] * version, sign=sign)

    model = resource_of(opened)
    scaled = ps.device_node(device="cpu", static=("sign",))(lambda w, x, sign: w["w"] * (x if sign == "+" else -x))
    of = graph_of(lambda opened, x: (scaled(opened.parameters, x, opened.sign), plain(opened.words)), model)
    async with engine.deploy(of) as service:
        for version in (2, 3):
            await service.reload(model)
            result, words = await service(np.float32(2))
            assert (float(result[0]), len(words)) == (-6 if version == 3 else 4, version)


async def test_static_arguments_are_part_of_the_program() -> None:
    raised = raising(batch=None)
    of = graph_of(lambda x: [raised(x, 2), raised(x, 3), raised(x, 2), raised(x, 1), raised(x, True)])
    results = await engine.run(of(np.float32(2)), scheduler="sequential")
    assert [float(result) for result in results] == [4, 8, 4, 2, 2]
    statistics = raised.compile_statistics()
    assert statistics.programs == 4  # 1 and True are two values
    reason = statistics.recompilations[0]
    assert (reason.argument, reason.cause, reason.before, reason.after) == ("power", "static value", "2", "3")


def raising(batch: ps.Batch | None) -> Any:
    return ps.device_node(device="cpu", static=("power",), batch=batch, name="raised")(lambda x, power: x**power)


@pytest.mark.parametrize("batch", [None, ps.Batch(4)])
async def test_a_static_argument_that_is_not_hashable_is_named(batch: ps.Batch | None) -> None:
    with pytest.raises(TypeError, match="node 'raised': power is static, and a list is not hashable: pass a hashable"):
        await engine.run(ps.graph(raising(batch))(row(1), [1, 2]))


bias = resource_of(lambda: np.float32(1))


async def test_a_deployment_compiles_before_it_is_ready() -> None:
    sample = (np.zeros(3, np.float32),)
    shifted = ps.device_node(device="cpu", batch=ps.Batch(4), sample_input=sample)(lambda parameter, x: x + parameter)
    of = graph_of(lambda x: ps.map_each(body, [x, x]), awaits=True)
    body = graph_of(shifted, bias)

    async with engine.deploy(of, body, warmup=True) as service:
        before = shifted.compile_statistics()
        assert before.programs == 3  # batches of 1, 2 and 4
        results = await asyncio.gather(*(service.run(body(np.ones(3, np.float32))) for _ in range(3)))
        results += await service(np.ones(3, np.float32))
        assert [np.asarray(result).tolist() for result in results] == [[2, 2, 2]] * 5
        after = shifted.compile_statistics()
        assert (after.programs, after.misses) == (3, before.misses)


async def test_a_node_is_warmed_up_by_hand_and_by_a_deployment_only_with_a_sample() -> None:
    with pytest.raises(ps.PlanError, match=r"warmup=True: device node 'double' has no sample_input="):
        async with engine.deploy(doubled, warmup=True):
            pass
    shifted = ps.device_node(device="cpu", name="shifted")(lambda parameter, x: x + parameter)
    await shifted.warmup(np.zeros(3, np.float32), resources={"parameter": np.float32(1)})
    assert shifted.compile_statistics().programs == 1
    with pytest.raises(TypeError, match="a sample of device node 'shifted' has 3 arguments"):
        await shifted.warmup(1, 2, 3)
    with pytest.raises(TypeError, match="'shifted': resources='weights' is no parameter of it; it has parameter, x"):
        await shifted.warmup(1, resources={"weights": 1})


def test_a_batch_without_arguments_an_instance_of_a_node_and_a_function_beside_options_are_refused() -> None:
    made: Any = ps.device_node
    with pytest.raises(TypeError, match=r"goes on a function, and <penstock.RateLimit .*> is not a function: put s"):
        made(ps.RateLimit(per_second=1))
    with pytest.raises(TypeError, match="device node '<lambda>' has batch=, and no parameter whose arguments could be"):
        made(batch=ps.Batch(2))(lambda: 1)
    with pytest.raises(TypeError, match=r"write ps.device_node\(device=..., pure=...\)\(tanh\)"):
        made(jnp.tanh, device="cpu", pure=False)


@pytest.mark.parametrize("body_is_on_device", [True, False])
async def test_rows_of_an_array_that_is_mapped_over_are_computed_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, body_is_on_device: bool
) -> None:
    iterated_in: list[threading.Thread] = []
    rows = jnp.arange(12.0).reshape(6, 2)
    kind: Any = type(rows)
    iterate = kind.__iter__

    def seen(array: Any) -> Any:
        iterated_in.append(threading.current_thread())
        return iterate(array)

    monkeypatch.setattr(kind, "__iter__", seen)

    @ps.node
    async def first(row: Any) -> Any:
        assert isinstance(row, jax.Array)
        return row[0]

    of = graph_of(
        lambda array: ps.map_each((lambda row: double(row)[0]) if body_is_on_device else first, array), awaits=True
    )
    found = await engine.run(of(rows))
    assert np.asarray(found).tolist() == (np.arange(0.0, 12, 2) * (2 if body_is_on_device else 1)).tolist()
    assert len(iterated_in) == 1
    assert iterated_in[0] is not threading.current_thread()


async def test_a_device_node_fails_over_to_another_node_and_takes_over_from_one() -> None:
    @ps.node
    async def on_the_host(x: Any, factor: int = 2) -> Any:
        return np.asarray(x) * factor

    @ps.device_node(device="cpu", static=("factor",), failover=on_the_host)
    def fails(x: Any, factor: int = 2) -> Any:
        raise LookupError("while it is traced")

    on_a_device = ps.device_node(device="cpu", static=("factor",))(lambda x, factor=2: x * factor)

    @ps.node(failover=on_a_device)
    def down(x: Any, factor: int = 2) -> Any:
        raise OSError

    both = graph_of(lambda x: (fails(x, factor=3), down(x, factor=5)))
    first, second = await engine.run(both(np.ones(2, np.float32)))
    assert (first.tolist(), np.asarray(second).tolist()) == ([3, 3], [5, 5])


async def test_donation_and_failover_are_refused_together() -> None:
    donates = ps.device_node(device="cpu", donate=True, failover=same)(lambda x: x)
    with pytest.raises(ps.PlanError, match=r"failover= and donate=True.*leave out one of the two"):
        await engine.run(ps.graph(donates)(np.ones(2)))


async def test_an_array_without_rows_cannot_be_mapped_over() -> None:
    of = graph_of(lambda array: ps.map_each(double, array), awaits=True)
    assert await engine.run(of(jnp.zeros((0, 3)))) == []
    with pytest.raises(TypeError, match="iteration over a 0-d array"):
        await engine.run(of(jnp.float32(1)))


async def test_the_state_of_a_fold_stays_on_the_device() -> None:
    add = ps.device_node(device="cpu")(lambda total, number: total + number)
    summed = graph_of(lambda count: ps.fold(add, numbers(count), np.float32(0), on_error="skip"), awaits=True)
    result = await engine.run(summed(10))
    assert isinstance(result, jax.Array)
    assert float(result) == sum(range(10))
    # One program for the first state, a NumPy array, and one for later states.
    assert add.compile_statistics().programs <= 2
    assert add.compile_statistics().transfers == 0
