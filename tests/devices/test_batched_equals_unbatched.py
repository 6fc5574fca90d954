"""Oracle: for any function, each item of a batch gets the result that it gets alone."""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
jnp = jax.numpy
ml_dtypes = pytest.importorskip("ml_dtypes")

import penstock as ps  # noqa: E402 - what follows needs JAX
from penstock import devices, engine, telemetry  # noqa: E402
from penstock.devices.arguments import (  # noqa: E402
    BatchLog,
    Stacker,
    split,
)
from penstock.devices.device_batch import batch_sizes  # noqa: E402
from penstock.devices.engine_device import batch_size  # noqa: E402
from penstock.devices.programs import current  # noqa: E402
from tests.conftest import EFFORT  # noqa: E402

BATCH = devices.DeviceBatch(6, buckets=(2, 6))
DTYPES: list[Any] = [np.float32, np.int32, np.bool_, ml_dtypes.bfloat16]
SHAPES: list[tuple[int, ...]] = [(), (2, 3)]
STRUCTURES: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "arrays": lambda x, y: (x, y),
    "nested": lambda x, y: ({"a": (x, None), "b": [y]}, 2),
    "one": lambda x, y: ((y, x),),
}


# The building blocks of random functions: each takes two arrays of one shape and returns a third.
STEPS: dict[str, Callable[[Any, Any], Any]] = {}


def step(fn: Callable[[Any, Any], Any]) -> None:
    STEPS[fn.__name__] = fn


@step
def plus(x: Any, y: Any) -> Any:
    return x + y


@step
def times(x: Any, y: Any) -> Any:
    return x * y


@step
def where_greater(x: Any, y: Any) -> Any:
    return jnp.where(x > y, x, y * 2)


@step
def sorted_rows(x: Any, y: Any) -> Any:
    return jnp.sort(jnp.atleast_1d(x), axis=-1).reshape(x.shape) + y


@step
def less_mean(x: Any, y: Any) -> Any:
    return x - jnp.mean(y)


@step
def at_least_the_largest(x: Any, y: Any) -> Any:
    return jnp.maximum(jnp.max(x), y)


@step
def cumulated(x: Any, y: Any) -> Any:
    return jnp.cumsum(jnp.atleast_1d(x), axis=-1).reshape(x.shape) - y


@step
def smooth(x: Any, y: Any) -> Any:
    return jnp.tanh(x.astype(jnp.float32)) + y


@step
def chosen(x: Any, y: Any) -> Any:
    return jax.lax.cond(jnp.max(x) > jnp.max(y), lambda: x + y, lambda: x - y)


@step
def looped(x: Any, y: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, z: z + y, x)


@step
def product(x: Any, y: Any) -> Any:
    return jnp.dot(x.reshape(-1), y.reshape(-1)) * jnp.ones_like(y)


@step
def taken(x: Any, y: Any) -> Any:
    return jnp.take(x.reshape(-1), jnp.argsort(y.reshape(-1)), axis=0).reshape(x.shape)


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


@settings(max_examples=20 * EFFORT, suppress_health_check=[HealthCheck.too_slow])
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


@pytest.fixture(scope="module")
def pooled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def mean_of_real(table: Any, tokens: Any, mask: Any = None) -> Any:
        rows = table[tokens]
        real = jnp.ones(tokens.shape, bool) if mask is None else mask
        scores = jax.nn.softmax(jnp.where(real, rows.sum(-1), -1e30))
        return {"mean": (rows * real[:, None]).sum(0) / jnp.maximum(real.sum(), 1), "scores": scores @ rows}

    return jax.jit(mean_of_real), jax.jit(jax.vmap(mean_of_real, in_axes=(None, 0, 0)))


@settings(max_examples=10 * EFFORT)
@given(st.lists(st.sampled_from([1, 7, 8, 9, 16, 17, 31, 40]), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_ragged_items_give_what_they_give_without_padding(
    pooled: tuple[Callable[..., Any], Callable[..., Any]], lengths: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    table = random.normal(size=(50, 5)).astype(np.float32)
    fn, batched = pooled
    stacker = Stacker("fn", ["tokens"], devices.DeviceBatch(4, pad_axes={"tokens": 0}))
    padding = BatchLog("padding")
    groups: dict[Any, list[Any]] = {}
    for length in lengths:
        tokens = random.integers(0, 50, length)
        item = stacker.item([tokens], current())
        groups.setdefault(item.signature, []).append((tokens, item))
    for members in groups.values():
        for first in range(0, len(members), 4):
            part = members[first : first + 4]
            stacked = stacker.stack([item for _, item in part], batch_size(len(part), (1, 4)))
            padding.add(stacked)
            results = split(batched(table, *stacked.arguments, *stacked.masks), stacked, "fn")
            for result, (tokens, _) in zip(results, part, strict=True):
                alone = fn(table, tokens)
                for name, value in alone.items():
                    np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-5)
    assert padding.statistics().real_elements == sum(lengths)


NUMBERS: list[Any] = [2, 2.5, True, np.int32(2), np.float32(2.5), np.array(2, np.int16), jnp.asarray(2)]


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, jnp.bfloat16, np.float32])
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


@pytest.mark.parametrize("count", [1, 3])
async def test_a_number_of_python_and_an_array_never_share_a_batch(count: int) -> None:
    node = ps.device_node(device="cpu", batch=ps.Batch(8))(STEPS["times"])

    product = ps.graph(node)

    x = np.array([100], np.int8)
    calls = [k for _ in range(count) for k in (2, np.int32(2))]
    found = await asyncio.gather(*[engine.run(product(x, k)) for k in calls])
    assert [(result.dtype, result.tolist()) for result in found] == [(np.int8, [-56]), (np.int32, [200])] * count
    assert node.batch_statistics().batches == 2


UNLIKE: list[Any] = [
    np.arange(4, dtype=np.float32), np.arange(3, dtype=np.int32), np.arange(3, dtype=np.float64), np.float32(2), 2,
    jnp.arange(3, dtype=jnp.float32), [np.arange(3, dtype=np.float32)], np.int32(2), np.float64(2.5), np.bool_(True),
    np.array(2, np.float32), True,
]  # fmt: skip


@pytest.mark.parametrize("usual", [np.arange(3, dtype=np.float32), np.float32(1)])
async def test_an_item_that_is_unlike_the_one_before_is_taken_for_what_it_is(usual: Any) -> None:
    def doubled(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2, x)

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


def drawn(key: Any, scale: Any) -> Any:
    return {"uniform": jax.random.uniform(key, (2,)) * scale, "next": jax.random.split(key, 3)}


@pytest.mark.parametrize("made", [np.int64, np.array])
async def test_an_integer_of_numpy_that_is_too_large_is_what_it_is_alone_and_fails_no_other(made: Any) -> None:
    def doubled(x: Any) -> Any:
        return x * 2

    alone = ps.graph(ps.device_node(device="cpu")(doubled))
    batched = ps.graph(ps.device_node(device="cpu", batch=ps.Batch(8))(doubled))
    async with engine.deploy(alone, batched) as service:
        found = [
            await asyncio.gather(*[service.run(graph(made(number))) for number in numbers])
            for numbers in ((3, 2**40, 4), (3, 4, 2**40))
            for graph in (alone, batched)
        ]
    assert [[int(one) for one in each] for each in found] == [[6, 0, 8], [6, 0, 8], [6, 8, 0], [6, 8, 0]]


async def test_typed_random_keys_are_arguments_and_results_of_a_batch() -> None:
    node = ps.device_node(device="cpu:3", batch=devices.DeviceBatch(8, buckets=(4, 8)))(drawn)

    draw = ps.graph(node)

    keys = [jax.random.key(seed) for seed in range(3)]
    found = await asyncio.gather(*[engine.run(draw(key, 2.0)) for key in keys])
    for result, key in zip(found, keys, strict=True):
        alone = drawn(key, 2.0)
        np.testing.assert_allclose(result["uniform"], alone["uniform"], rtol=1e-6)
        assert result["next"].dtype == alone["next"].dtype
        assert (jax.random.key_data(result["next"]) == jax.random.key_data(alone["next"])).all()
    assert (node.batch_statistics().batches, node.compile_statistics().transfers) == (1, 0)
    again = await engine.run(draw(found[0]["next"][1], 2.0))
    np.testing.assert_allclose(again["uniform"], drawn(drawn(keys[0], 2.0)["next"][1], 2.0)["uniform"], rtol=1e-6)


async def test_keys_of_two_implementations_and_arrays_of_keys_are_told_apart() -> None:
    @ps.device_node(device="cpu", batch=devices.DeviceBatch(8, pad_axes={"keys": 0}))
    def summed(keys: Any, mask: Any = None) -> Any:
        values = jax.vmap(jax.random.uniform)(keys)
        return values.sum() if mask is None else (values * mask).sum()

    total = ps.graph(summed)

    given_keys = [jax.random.split(jax.random.key(seed), count) for seed, count in enumerate([5, 8, 3])]
    other_kind = jax.random.split(jax.random.key(3, impl="rbg"), 8)  # jax.vmap gives other values for keys of this kind
    *found, other = await asyncio.gather(*[engine.run(total(keys)) for keys in (*given_keys, other_kind)])
    np.testing.assert_allclose(found, [summed(keys) for keys in given_keys], rtol=1e-6)
    assert 0 < other < 8
    statistics = summed.batch_statistics()
    assert (statistics.batches, statistics.real_elements) == (2, 5 + 8 + 3 + 8)


@pytest.mark.parametrize("batch", [None, ps.Batch(2)])
async def test_typed_random_keys_go_from_node_to_node_and_to_the_caller(batch: ps.Batch | None) -> None:
    @ps.device_node(device="cpu", batch=batch, pure=False)
    def split(key: Any) -> Any:
        return jax.random.split(key)

    @ps.device_node(device="cpu", batch=batch, pure=False)
    def drawn_with_second(keys: Any) -> Any:
        return jax.random.uniform(keys[1])

    @ps.graph
    async def both(key: Any) -> Any:
        keys = split(key)
        return keys, drawn_with_second(keys)

    expected = jax.random.split(jax.random.key(3))
    with telemetry.profile():
        keys, value = await engine.run(both(jax.random.key(3)))
    assert (jax.random.key_data(keys) == jax.random.key_data(expected)).all()
    np.testing.assert_allclose(value, jax.random.uniform(expected[1]), rtol=1e-6)
