"""Rows that several items share: neither its row nor a failing neighbour changes the result of an item."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import devices, engine
from penstock.telemetry import names
from tests.conftest import EFFORT
from tests.kit import begun
from tests.tracing import Tracing, attributes_of

from .gates import Gate
from .kit import graph_of, numbers_of, refusing, row, settled
from .test_busy_devices import little_memory

WIDTH = 3
WEIGHTS = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def batch_of(**options: Any) -> devices.PackedBatch:
    return devices.PackedBatch(**{"lengths": (8, 16), "rows": 2, "items_per_row": 4, **options})


def attended(x: Any, segments: Any, positions: Any) -> Any:
    """Attention within each item, with values that depend on the place of a token."""
    values = jnp.where(jnp.isfinite(x).all(-1, keepdims=True), x, 0) @ WEIGHTS + positions[..., None]
    together = segments[..., :, None] == segments[..., None, :]
    scores = jnp.where(together, values @ values.swapaxes(-1, -2), np.finfo(np.float32).min)
    return jax.nn.softmax(scores, axis=-1) @ values


def members_of(segments: Any, items: int) -> Any:
    return segments[:, None, :] == jnp.arange(1, items + 1)[:, None]


@ps.device_node(device="cpu", batch=batch_of(max_wait_seconds=0.01))
def per_item(x: devices.Array, segments: Any = None, positions: Any = None) -> Any:
    members = members_of(segments, 4)
    is_bad = (members & ~jnp.isfinite(x).all(-1)[:, None, :]).any(-1, keepdims=True)
    return jnp.where(is_bad, jnp.nan, members @ attended(x, segments, positions)), members.sum(-1)


@ps.device_node(device="cpu", batch=batch_of(max_wait_seconds=0.01, results="tokens"))
def per_token(x: devices.Array, ids: devices.Array, scale: Any, segments: Any = None, positions: Any = None) -> Any:
    return {"hidden": attended(x, segments, positions) * scale, "ids": ids + 1}


both = graph_of(lambda x: (per_item(x), per_token(x, ids_of(x), 2.0)))


ids_of = ps.node(lambda x: np.arange(len(x), dtype=np.int16))


def alone(x: Any) -> Any:
    """Returns the result of one item without a batch, in NumPy's double precision."""
    values = np.where(np.isfinite(x).all(-1, keepdims=True), x, 0).astype(float) @ WEIGHTS
    values = values + np.arange(len(x))[:, None]
    scores = values @ values.T
    shares = np.exp(scores - scores.max(-1, keepdims=True, initial=0))
    hidden = shares / shares.sum(-1, keepdims=True) @ values
    return hidden.sum(0) if np.isfinite(x).all() else np.full(WIDTH, np.nan), hidden


def item_of(length: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(length, WIDTH)).astype(np.float32)


async def results_of(graph: Any, items: list[Any]) -> list[Any]:
    async with engine.deploy(graph) as service:
        return await settled(map(service, items))


@settings(max_examples=5 * EFFORT, deadline=None)
@given(st.lists(st.integers(0, 16), min_size=1, max_size=24), st.sets(st.integers(0, 23), max_size=2))
def test_an_item_gets_the_same_whatever_shares_its_row(lengths: list[int], bad: set[int]) -> None:
    items = [item_of(length, seed) for seed, length in enumerate(lengths)]
    for number in bad & {*range(len(items))}:
        items[number][-1:, 1] = (np.nan, np.inf)[number % 2]
    for item, result in zip(items, asyncio.run(results_of(both, items)), strict=True):
        if isinstance(result, BaseException):
            raise result
        (mean, count), tokens = result
        expected, hidden = alone(item)
        np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-4)
        assert int(count) == len(item)
        np.testing.assert_allclose(tokens["hidden"], 2 * hidden, rtol=1e-4, atol=1e-4)
        assert tokens["ids"].tolist() == [*range(1, len(item) + 1)]
        assert tokens["ids"].dtype == np.int16
        assert not tokens["ids"].flags.writeable


def ones(length: int) -> Any:
    return np.ones(length, np.float32)


def summing(change: Callable[[Any], Any] = lambda x: x, device: Any = "cpu", **options: Any) -> Any:
    """Makes a node that changes all rows, and sums the numbers of each item."""
    batch = batch_of(**{"lengths": (8,), "max_wait_seconds": 0.2, **options})

    @ps.device_node(device=device, batch=batch, prefetch=1, sample_input=(np.zeros(3, np.float32),))
    def total(x: devices.Array, segments: Any = None) -> Any:
        return jnp.einsum("ril,rl->ri", members_of(segments, 4), change(x))

    return total


async def test_there_is_a_program_for_all_rows_and_one_for_a_single_row() -> None:
    total = summing()
    graph = ps.graph(total)
    async with engine.deploy(graph, warmup=True) as service:
        before = total.compile_statistics()
        results = await asyncio.gather(*(service(ones(n)) for n in (5, 3, 7, 1)))
        assert numbers_of(results) == [5, 3, 7, 1]
        assert isinstance(results[0], np.ndarray)
        full = total.batch_statistics()
        assert (full.batches, full.rows, full.calls, full.item_tokens, full.tokens, full.fill) == (1, 2, 4, 16, 16, 1)
        assert float(await service(ones(2))) == 2
        one = total.batch_statistics()
        assert (one.batches, one.rows, one.tokens, one.fill) == (2, 3, 24, 0.75)
    after = total.compile_statistics()
    assert (before.programs, after.programs, after.misses) == (2, 2, before.misses)
    assert "cpu, 2 rows of 8" in str(graph)


async def test_an_item_that_fits_no_row_fails_alone() -> None:
    results = await results_of(ps.graph(summing(lengths=(8, 16))), [ones(n) for n in (2, 17, 16, 8)])
    assert numbers_of(results) == [2, None, 16, 8]
    assert isinstance(results[1], ValueError)
    assert "argument 'x': its length is 17 along axis 0, and the last of lengths=(8, 16) is shorter" in str(results[1])


async def test_items_of_one_length_of_rows_do_not_fill_others() -> None:
    total = summing(lengths=(8, 16))
    await results_of(ps.graph(total), [ones(n) for n in (4, 4, 8, 9, 16)])
    found = total.batch_statistics()
    assert (found.batches, found.rows, found.tokens) == (2, 4, 2 * 8 + 2 * 16)


async def test_items_that_have_left_or_are_late_are_not_computed() -> None:
    gate = Gate()
    of = ps.graph(summing(gate.pass_through, rows=1, max_wait_seconds=0))
    async with engine.deploy(of) as service:
        first = asyncio.ensure_future(service(np.full(8, 1, np.float32)))
        await gate.entered()
        gone = asyncio.ensure_future(service(np.full(2, 2, np.float32)))
        late = asyncio.ensure_future(service.run(of(np.full(2, 3, np.float32)), timeout_seconds=0.01))
        left = [asyncio.ensure_future(service(np.full(n, 4, np.float32))) for n in (2, 6)]
        with pytest.raises(ps.DeadlineExceeded):
            await late
        gone.cancel()
        await asyncio.wait([gone])
        gate.open()
        assert [float(await one) for one in (first, *left)] == [8, 8, 24]
    assert gate.values[1:] == [[[4.0] * 8]]  # the two cancelled items left their places to the items behind them


async def test_higher_priorities_go_first_and_the_first_of_them_is_in_the_next_batch() -> None:
    gate = Gate()
    of = ps.graph(summing(gate.pass_through, rows=1, max_wait_seconds=0))
    async with engine.deploy(of) as service:
        calls = [asyncio.ensure_future(service(np.full(8, 0, np.float32)))]
        await gate.entered()
        for value, (length, priority) in enumerate([(4, 0), (3, 0), (5, 1), (4, 0), (2, 1)], 1):
            calls += await begun(service.run(of(np.full(length, value, np.float32)), priority=priority))
        gate.open()
        await asyncio.gather(*calls)
    rows = [only for (only,) in gate.values[1:]]
    # First the two items of priority 1; no other item fits beside them. Then the others as they came; one has to wait.
    assert rows == [[3.0] * 5 + [5.0] * 2 + [0.0], [1.0] * 4 + [2.0] * 3 + [0.0], [4.0] * 4 + [0.0] * 4]


async def test_an_item_that_fails_fails_alone() -> None:
    total = summing(refusing)
    values = [1, 2, -3, 4, 5, -6, 7, 8]
    results = await results_of(ps.graph(total), [*map(row, values)])
    assert ["negative number" in str(result) for result in results] == [value < 0 for value in values]
    assert numbers_of(results) == [2 * value if value > 0 else None for value in values]
    assert total.compile_statistics().programs == 1  # the parts of the batch run in the same program as the batch


async def test_the_parts_of_a_batch_that_failed_fit_its_rows() -> None:
    total = summing(refusing, rows=3)
    # The rows of a part fit only if its items keep the order of their batch; otherwise, they would need four rows.
    results = await results_of(ps.graph(total), [-ones(4), *map(ones, (6, 2, 7, 4))])
    assert "negative number" in str(results[0])
    assert numbers_of(results) == [None, 6, 2, 7, 4]
    assert total.batch_statistics().batches <= 7  # the batch, and six parts to find one bad item of five


async def test_rows_that_do_not_fit_the_memory_together_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 3, 8, 7, 1, 4, 4]
    async with engine.deploy(ps.graph(summing(rows=4))) as service:
        with little_memory(monkeypatch, 1, late=False) as sizes:
            for _ in range(2):
                assert numbers_of(await asyncio.gather(*(service(ones(n)) for n in lengths))) == lengths
        assert sizes == [4, 1, 1, 1, 1, 1, 1, 1, 1]
        with little_memory(monkeypatch, 0, late=False), pytest.raises(ps.DeviceError, match=r"one row of node 'total'"):
            await service(ones(2))


async def test_a_span_says_how_full_the_rows_are(tracing: Tracing) -> None:
    await results_of(ps.graph(summing()), [ones(n) for n in (5, 6, 1)])
    found = attributes_of(tracing.one("penstock.batch total"))
    assert (found[names.BATCH_ITEMS], found[names.BATCH_ROWS]) == (3, 2)
    assert (found[names.BATCH_ITEM_TOKENS], found[names.BATCH_TOKENS]) == (12, 16)


@pytest.mark.several_devices
async def test_the_rows_of_a_batch_are_split_over_a_mesh() -> None:
    mesh = devices.DeviceMesh(shape=(2,), axis_names=("data",), device="cpu")

    @ps.device_node(device=mesh, batch=batch_of(lengths=(8,), rows=3, max_wait_seconds=0.2), in_specs=(jax.P("data"),))
    def total(x: devices.Array, segments: Any = None, positions: Any = None) -> Any:
        return jnp.einsum("ril,rl->ri", members_of(segments, 4), x * positions)

    of = ps.graph(total)
    assert numbers_of(await results_of(of, [ones(n) for n in (8, 7, 6)])) == [28, 21, 15]
    assert total.batch_statistics().rows == 4
    # Items that fill fewer rows than a batch has run at once on all devices, not row by row.
    await results_of(of, [ones(8)] * 2)
    assert (total.batch_statistics().batches, total.batch_statistics().rows) == (2, 6)


async def test_arrays_that_all_items_share_are_passed_once() -> None:
    table = np.arange(10, dtype=np.float32)

    @ps.device_node(device="cpu", batch=batch_of(lengths=(8,), max_wait_seconds=0.2), shared=("by",))
    def looked_up(ids: devices.Array, by: Any, table: Any, segments: Any = None) -> Any:
        assert (table.shape, by.shape) == ((10,), ())
        return jnp.einsum("ril,rl->ri", members_of(segments, 4), table[ids] * by)

    of = graph_of(lambda ids: looked_up(ids, 3.0, table))
    results = await results_of(of, [np.array(ids, np.int32) for ids in ([1, 2], [9], [])])
    assert numbers_of(results) == [9, 27, 0]
    assert looked_up.batch_statistics().batches == 1


tokens = batch_of(results="tokens")
plus_one = ps.device_node(device="cpu", batch=tokens, name="plus_one")(lambda x, segments=None: x + 1)


async def test_neighbours_that_pack_stay_programs_of_their_own() -> None:
    of = graph_of(lambda x: plus_one(plus_one(x)))
    assert "plus_one stays a program of its own: it has rows of several items" in str(engine.plan(of))
    (result,) = await results_of(of, [ones(3)])
    assert result.tolist() == [3, 3, 3]


def without_segments(x: Any) -> Any: ...
def with_required_segments(x: Any, segments: Any) -> Any: ...
def with_segments_before(segments: Any = None, x: Any = None) -> Any: ...
def with_required_positions(x: Any, segments: Any = None, *, positions: Any) -> Any: ...


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (without_segments, r"has batch=PackedBatch\(...\), so .* add the parameter segments=None"),
        (with_required_segments, "make it segments=None"),
        (with_segments_before, "move the parameter 'segments' behind 'x'"),
        (with_required_positions, "make it positions=None"),
    ],
)
def test_a_function_that_cannot_tell_items_apart_is_refused(fn: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ps.device_node(batch=batch_of())(fn)


async def test_where_rows_do_not_belong_they_are_refused() -> None:
    with pytest.raises(TypeError, match="PackedBatch is for device_node"):
        ps.node(batch=batch_of())(without_segments)
    with pytest.raises(TypeError, match="'total' packs its items into rows"):
        await devices.fit(summing(), (ones(3),))


@pytest.mark.parametrize(
    ("results", "given", "shape"),
    [
        ("items", lambda x: x, r"\[2, 4\], and one has the shape \[2, 8\]"),
        ("tokens", lambda x: jnp.zeros((len(x), 4)), r"\[2, 8\], and one has the shape \[2, 4\]"),
        ("items", lambda _: 0.5, r"\[2, 4\], and one has the shape \[\]"),
    ],
)
async def test_a_result_of_another_shape_is_refused_when_it_is_traced(results: Any, given: Any, shape: str) -> None:
    batch = batch_of(lengths=(8,), results=results, max_wait_seconds=0.2)
    wrong = ps.device_node(device="cpu", batch=batch, name="wrong")(lambda x, segments=None: given(x))
    for error in await results_of(ps.graph(wrong), [ones(8)] * 2):
        assert isinstance(error, ValueError)
        assert re.search(rf"node 'wrong' has PackedBatch\(results='{results}'\).*{shape}", str(error))


async def test_arguments_that_are_no_sequences_of_one_length_are_refused() -> None:
    plus = ps.device_node(device="cpu", batch=tokens)(lambda x, y, segments=None: x + y)
    of = graph_of(lambda xy: plus(xy[0], xy[1]))
    x = ones(3)
    number, other, keys, fine = await results_of(
        of, [(x, 2.0), (x, ones(2)), (x, jax.random.split(jax.random.key(0), 3)), (x, x)]
    )
    assert "argument 'y': a sequence is an array with a first axis, and this is a number" in str(number)
    assert "have different lengths (x 3, y 2): name the arrays that are no sequences in shared=" in str(other)
    assert "random keys cannot be packed into rows" in str(keys)
    assert fine.tolist() == [2, 2, 2]
    weak = jnp.full(3, 2.0)
    both, one = await results_of(of, [(weak, weak), (np.ones(3, np.float16), weak)])
    assert (both.tolist(), one.tolist(), one.dtype) == ([4, 4, 4], [3, 3, 3], np.float16)


async def test_what_rows_of_several_items_cannot_do_is_refused() -> None:
    of = graph_of(lambda x: plus_one(x, segments=np.ones((1, 8), np.int32)))
    (error,) = await results_of(of, [ones(3)])
    assert "node 'plus_one': its batch makes the argument 'segments', so leave it out" in str(error)
    with pytest.raises(TypeError, match="node 'plus_one' is written for rows of several items"):
        plus_one.vmap()


async def test_a_plain_call_takes_rows_and_no_item() -> None:
    x = np.ones((3, WIDTH), np.float32)
    plain = ps.graph(per_item)
    with pytest.raises(ps.DeviceError, match=r"'per_item' has batch=PackedBatch.*engine\.run.*segments="):
        per_item(x)
    with pytest.raises(ps.DeviceError, match="'per_item' has batch=PackedBatch"):
        await plain(x)
    rows, segments = np.zeros((1, 8, WIDTH), np.float32), np.zeros((1, 8), np.int32)
    rows[0, :3], segments[0, :3] = x, 1
    positions = np.arange(8, dtype=np.int32)[None]
    by_hand = per_item(rows, segments, positions=positions), per_item(rows, segments=segments, positions=positions)
    wanted = await engine.run(plain(x))
    for result in by_hand:
        np.testing.assert_allclose(result[0][0, 0], wanted[0], rtol=1e-6)
