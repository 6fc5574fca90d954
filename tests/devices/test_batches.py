"""Batches on devices: when they begin, which items fail, and that each item gets the result that it gets alone."""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import devices, engine, telemetry
from penstock.devices.arguments import Stacker, split
from penstock.devices.device_batch import batch_sizes
from penstock.devices.engine_device import batch_size
from penstock.devices.programs import current
from tests.conftest import EFFORT
from tests.kit import values_of

from .kit import graph_of, on_the_host

MOST = 16


def refuse(x: Any) -> Any:
    if (np.asarray(x) < 0).any():
        raise ValueError(f"refused {sorted({*np.asarray(x).ravel().tolist()})}")
    return np.asarray(x)


@ps.device_node(device="cpu", batch=ps.Batch(MOST, max_wait_seconds=0.2))
def refusing(x: Any) -> Any:
    return on_the_host(refuse, x) * 2


async def test_items_that_fail_are_found_in_few_runs_and_no_others_are_blamed(effort: int) -> None:
    chance, cases = random.Random(7), [(MOST, {place}) for place in (0, 6, MOST - 1)]
    cases += [(1, {0}), (MOST, set(range(MOST)))]
    for _ in range(4 * effort):
        count = chance.randint(1, MOST)
        cases.append((count, {chance.randrange(count) for _ in range(chance.randint(1, count))}))
    async with engine.deploy(ps.graph(refusing)) as service:
        for count, bad in cases:
            before = refusing.batch_statistics()
            values = [np.float32(-1 - n if n in bad else n) for n in range(count)]
            results = await asyncio.gather(*map(service, values), return_exceptions=True)
            for number, result in enumerate(results):
                if number in bad:  # its own error, from a run in which it was alone
                    assert f"refused [{-1.0 - number}]" in str(result)
                else:
                    assert result == 2 * number
            runs = refusing.batch_statistics().batches - before.batches
            assert runs <= 1 + min(2 * len(bad) * math.ceil(math.log2(count)) if count > 1 else 0, 2 * count)


WIDTH, ROUNDS = 32, 12


async def test_the_device_gets_no_batch_of_one_between_two_of_all_others() -> None:
    sizes: list[int] = []

    def slow(values: Any) -> Any:
        sizes.append(len(values))
        time.sleep(0.004)
        return values

    async def numbers() -> AsyncIterator[Any]:
        for number in range(WIDTH * ROUNDS):
            yield np.float32(number)

    model = ps.device_node(device="cpu", batch=ps.Batch(WIDTH))(lambda value: on_the_host(slow, value))

    @ps.graph
    async def graph(values: AsyncIterator[Any]) -> AsyncIterator[Any]:
        return ps.map_each(model, values)

    one = ps.graph(model)
    async with engine.Engine() as own, own.deploy(one) as service:
        for count in (1, 2, 4, 8, 16, 32):  # compiles the program for each size
            await service.run(one(np.float32(0)))
            warm = own.stream((one(np.float32(0)) for _ in range(count)), max_in_flight=count)
            assert len(await values_of(warm)) == count
        before = model.batch_statistics().batches
        assert [*map(float, await values_of(own.stream(graph(numbers()))))] == list(range(WIDTH * ROUNDS))
        assert model.batch_statistics().batches - before <= ROUNDS * 1.7, sizes


BATCH = devices.DeviceBatch(6, buckets=(2, 6))
DTYPES: list[Any] = [np.float32, np.int32, np.bool_, ml_dtypes.bfloat16]
SHAPES: list[tuple[int, ...]] = [(), (2, 3)]
STRUCTURES: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "arrays": lambda x, y: (x, y),
    "nested": lambda x, y: ({"a": (x, None), "b": [y]}, 2),
    "one": lambda x, y: ((y, x),),
}


# The building blocks of random functions: each takes two arrays of one shape and returns a third.
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "plus": lambda x, y: x + y,
    "times": lambda x, y: x * y,
    "where_greater": lambda x, y: jnp.where(x > y, x, y * 2),
    "sorted_rows": lambda x, y: jnp.sort(jnp.atleast_1d(x), axis=-1).reshape(x.shape) + y,
    "less_mean": lambda x, y: x - jnp.mean(y),
    "at_least_the_largest": lambda x, y: jnp.maximum(jnp.max(x), y),
    "cumulated": lambda x, y: jnp.cumsum(jnp.atleast_1d(x), axis=-1).reshape(x.shape) - y,
    "smooth": lambda x, y: jnp.tanh(x.astype(jnp.float32)) + y,
    "chosen": lambda x, y: jax.lax.cond(jnp.max(x) > jnp.max(y), lambda: x + y, lambda: x - y),
    "looped": lambda x, y: jax.lax.fori_loop(0, 3, lambda _, z: z + y, x),
    "product": lambda x, y: jnp.dot(x.reshape(-1), y.reshape(-1)) * jnp.ones_like(y),
    "taken": lambda x, y: jnp.take(x.reshape(-1), jnp.argsort(y.reshape(-1)), axis=0).reshape(x.shape),
}


@cache
def compiled(name: str) -> Callable[[Any, Any], Any]:
    """Returns a step that is compiled once for each shape and dtype, shared by all functions that contain it."""
    return jax.jit(lambda x, y: STEPS[name](x, y).astype(x.dtype))


def compose(names: list[str]) -> Callable[..., Any]:
    """Returns a function of trees that hold two arrays, and then numbers to add."""

    def fn(*arguments: Any) -> Any:
        x, y, *more = jax.tree.leaves(arguments)
        x, y = (z.astype(jnp.int32) if z.dtype == bool else jnp.asarray(z) for z in (x, y))
        for name in names:
            x, y = y, compiled(name)(x, y)
        return {"last": (y, None), "both": [x, *more]}

    return fn


def assert_close(batched: Any, alone: Any) -> None:
    assert jax.tree.structure(batched) == jax.tree.structure(alone)
    for one, other in zip(jax.tree.leaves(batched), map(np.asarray, jax.tree.leaves(alone)), strict=True):
        assert one.shape == other.shape
        if np.dtype(one.dtype).kind in "biu":
            assert (one == other).all()
        else:
            assert one.dtype == other.dtype
            allowed = 32 * float(ml_dtypes.finfo(one.dtype).eps) * max(1.0, np.abs(other).max().astype(float))
            assert np.abs(one.astype(float) - other.astype(float)).max() <= allowed


@settings(max_examples=12 * EFFORT, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.sampled_from(sorted(STRUCTURES)),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
)
def test_a_batch_gives_what_its_items_give_alone(
    names: list[str], dtype: Any, shape: tuple[int, ...], structure: str, count: int, seed: int
) -> None:
    values = np.random.default_rng(seed).uniform(-4, 4, (count, 2, *shape)).astype(dtype)
    items = [STRUCTURES[structure](np.array(x), np.array(y)) for x, y in values]
    fn = compose(names)
    stacker = Stacker("fn", [f"argument {number}" for number in range(len(items[0]))], BATCH)
    prepared = [stacker.item(arguments, current()) for arguments in items]
    assert len({item.signature for item in prepared}) == 1
    stacked = stacker.stack(prepared, batch_size(count, batch_sizes(BATCH)))
    results = split(jax.vmap(fn)(*stacked.arguments), stacked, "fn")
    for result, arguments in zip(results, items, strict=True):
        assert_close(result, fn(*arguments))


NUMBERS: list[Any] = [2, 2.5, True, np.int32(2), np.float32(2.5), np.array(2, np.int16), jnp.asarray(2)]


@pytest.mark.parametrize(
    "dtype", [np.int8, np.bool_, *(pytest.param(dtype, marks=pytest.mark.long) for dtype in (jnp.bfloat16, np.float32))]
)
async def test_numbers_of_python_give_way_to_the_dtypes_of_arrays_as_without_a_batch(dtype: Any) -> None:
    node = ps.device_node(device="cpu", batch=ps.Batch(len(NUMBERS)))(STEPS["times"])
    product = ps.graph(node)
    await node.warmup(np.zeros(3, dtype), 2)
    programs = node.compile_statistics().programs
    x = np.array([1, 100, 0]).astype(dtype)
    found = await asyncio.gather(*[engine.run(product(x, k)) for k in NUMBERS])
    for result, k in zip(found, NUMBERS, strict=True):
        alone = jax.jit(STEPS["times"])(x, k)
        assert result.dtype == alone.dtype
        assert result.tolist() == np.asarray(alone).tolist()
    await engine.run(product(x, 3))
    # The warm-up compiled for 2 and 3; a weakly typed JAX array has the type of a Python number.
    weak_and_strong = [(np.dtype(t), w) for t, w in [(int, True), (float, True), (bool, False)]]
    strong = [("int32", False), ("float32", False), ("int16", False)]
    assert node.compile_statistics().programs - programs == len(weak_and_strong) + len(strong) - 1


UNLIKE: list[Any] = [
    np.arange(4, dtype=np.float32), np.arange(3, dtype=np.int32), np.arange(3, dtype=np.float64), np.float32(2), 2,
    jnp.arange(3, dtype=jnp.float32), [np.arange(3, dtype=np.float32)], np.int32(2), np.float64(2.5), np.bool_(True),
    np.array(2, np.float32), True,
]  # fmt: skip


def doubled(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 2, x)


@pytest.mark.parametrize("usual", [np.arange(3, dtype=np.float32), np.float32(1)])
async def test_an_item_that_is_unlike_the_one_before_is_taken_for_what_it_is(usual: Any) -> None:
    node = ps.device_node(device="cpu", batch=devices.DeviceBatch(8, buckets=(8,)))(doubled)
    items = [usual, *[one for number, unlike in enumerate(UNLIKE) for one in (unlike, usual + number)]]
    async with engine.deploy(ps.graph(node)) as service:
        await service(usual)
        for item, found in zip(items, await asyncio.gather(*map(service, items)), strict=True):
            alone = jax.jit(doubled)(item)
            assert jax.tree.structure(found) == jax.tree.structure(alone)
            for result, expected in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
                assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
                assert result.tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize("made", [np.int64, np.array])
async def test_an_integer_of_numpy_that_is_too_large_is_what_it_is_alone_and_fails_no_other(made: Any) -> None:
    alone = ps.graph(ps.device_node(device="cpu")(doubled))
    batched = ps.graph(ps.device_node(device="cpu", batch=ps.Batch(8))(doubled))
    async with engine.deploy(alone, batched) as service:
        found = [
            await asyncio.gather(*[service.run(graph(made(number))) for number in numbers])
            for numbers in ((3, 2**40, 4), (3, 4, 2**40))
            for graph in (alone, batched)
        ]
    assert [[int(one) for one in each] for each in found] == [[6, 0, 8], [6, 0, 8], [6, 8, 0], [6, 8, 0]]


def bits(keys: Any) -> Any:
    return jax.random.key_data(keys).astype(jnp.float32)


@pytest.mark.several_devices
async def test_typed_random_keys_are_arguments_and_results_of_a_batch() -> None:
    batch = devices.DeviceBatch(8, buckets=(4, 8))
    node = ps.device_node(device="cpu:3", batch=batch)(lambda key: {"bits": bits(key), "next": jax.random.split(key)})
    draw, keys = ps.graph(node), [jax.random.key(seed) for seed in range(3)]
    found = await asyncio.gather(*[engine.run(draw(key)) for key in keys])
    for result, key in zip(found, keys, strict=True):
        assert result["bits"].tolist() == bits(key).tolist()
        assert result["next"].dtype == key.dtype
        assert bits(result["next"]).tolist() == bits(jax.random.split(key)).tolist()
    assert (node.batch_statistics().batches, node.compile_statistics().transfers) == (1, 0)
    again = await engine.run(draw(found[0]["next"][1]))
    assert again["bits"].tolist() == bits(jax.random.split(keys[0])[1]).tolist()


async def test_keys_of_two_implementations_and_arrays_of_keys_are_told_apart() -> None:
    @ps.device_node(device="cpu", batch=devices.DeviceBatch(8, pad_axes={"keys": 0}))
    def summed(keys: Any, mask: Any = None) -> Any:
        each = bits(keys).sum(-1)
        return each.sum() if mask is None else (each * mask).sum()

    keys = [jax.random.split(jax.random.key(0), 8)[:count] for count in (5, 8, 3)]
    keys.append(jax.random.wrap_key_data(np.arange(32, dtype=np.uint32).reshape(8, 4), impl="rbg"))
    found = await asyncio.gather(*[engine.run(ps.graph(summed)(one)) for one in keys])
    np.testing.assert_allclose(found, [summed(one) for one in keys], rtol=1e-6)
    statistics = summed.batch_statistics()
    assert (statistics.batches, statistics.real_elements) == (2, 5 + 8 + 3 + 8)


@pytest.mark.parametrize("batch", [None, ps.Batch(2)])
async def test_typed_random_keys_go_from_node_to_node_and_to_the_caller(batch: ps.Batch | None) -> None:
    split_key = ps.device_node(device="cpu", batch=batch, pure=False)(lambda key: jax.random.split(key))  # noqa: PLW0108
    of_second = ps.device_node(device="cpu", batch=batch, pure=False)(lambda keys: bits(keys[1]))

    both = graph_of(lambda key: (keys := split_key(key), of_second(keys)))
    expected = bits(jax.random.split(jax.random.key(3)))
    with telemetry.profile():
        keys, second = await engine.run(both(jax.random.key(3)))
    assert bits(keys).tolist() == expected.tolist()
    assert second.tolist() == expected[1].tolist()
