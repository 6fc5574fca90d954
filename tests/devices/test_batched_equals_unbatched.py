"""Oracle: whatever a function computes, a batch of its items gives what each of them gives alone."""

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
from penstock.devices.batches.batch_statistics import BatchLog  # noqa: E402
from penstock.devices.batches.buckets import batch_size, batch_sizes  # noqa: E402
from penstock.devices.batches.stacking import Stacker, split  # noqa: E402
from penstock.devices.programs.configuration import current  # noqa: E402
from tests.conftest import EFFORT  # noqa: E402

BATCH = ps.Batch(6, buckets=(2, 6))
DTYPES: list[Any] = [np.float32, np.int32, np.bool_, ml_dtypes.bfloat16]
SHAPES: list[tuple[int, ...]] = [(), (2, 3)]
STRUCTURES: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "arrays": lambda x, y: (x, y),
    "nested": lambda x, y: ({"a": (x, None), "b": [y]}, 2),
    "one": lambda x, y: ((y, x),),
}


# What random functions are made of: each takes two arrays of one shape and gives a third.
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
    """Returns a step that is compiled once for a shape and dtype, and not for each function that has it."""
    return jax.jit(lambda x, y: STEPS[name](x, y).astype(x.dtype))


def compose(names: list[str]) -> Callable[..., Any]:
    """Returns a function of any arguments that hold two arrays, and of numbers to add."""

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


@settings(max_examples=200 * EFFORT, suppress_health_check=[HealthCheck.too_slow])
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


@settings(max_examples=20 * EFFORT)
@given(st.lists(st.sampled_from([1, 7, 8, 9, 16, 17, 31, 40]), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_ragged_items_give_what_they_give_without_padding(
    pooled: tuple[Callable[..., Any], Callable[..., Any]], lengths: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    table = random.normal(size=(50, 5)).astype(np.float32)
    fn, batched = pooled
    stacker = Stacker("fn", ["tokens"], ps.Batch(4, pad_axes={"tokens": 0}))
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
