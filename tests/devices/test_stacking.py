"""Items become one batch in its own buffers, padded and masked; items that cannot be stacked fail alone."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import devices, engine
from penstock.devices.arguments import Stacker, on_host, split
from penstock.devices.batch_items import BatchItem
from penstock.devices.device_batch import SHORTEST_LENGTH, DeviceBatch, batch_sizes, padded_length
from penstock.devices.engine_device import batch_size
from penstock.devices.programs import current

from .kit import graph_of


def stacker_of(*parameters: str, **options: Any) -> Stacker:
    return Stacker("embed", parameters, DeviceBatch(8, **options))


def item_of(stacker: Stacker, *arguments: Any) -> BatchItem:
    return stacker.item(arguments, current())


def test_items_become_rows_and_the_last_one_is_repeated() -> None:
    stacker = stacker_of("x", "options")
    items = [item_of(stacker, np.full((2, 3), n, np.float32), {"scale": n, "flags": (n > 1, None)}) for n in range(3)]
    stacked = stacker.stack(items, 4)
    x, options = stacked.arguments
    assert x.tolist() == [[[n] * 3] * 2 for n in (0, 1, 2, 2)]
    assert options["scale"].tolist() == [0, 1, 2, 2]
    assert options["flags"][0].tolist() == [False, False, True, True]
    assert options["flags"][1] is None
    assert (x.dtype, options["scale"].dtype, options["flags"][0].dtype) == (np.float32, np.int32, np.bool_)
    assert (stacked.count, stacked.size, stacked.masks) == (3, 4, ())


@pytest.mark.parametrize("pad_axes", [{}, {"x": 0}])
def test_a_large_batch_lies_where_a_program_takes_it_without_a_copy(pad_axes: dict[str, int]) -> None:
    stacker = stacker_of("x", pad_axes=pad_axes)
    row = np.arange(1, 60_001, dtype=np.uint8)
    stacked = stacker.stack([item_of(stacker, row)] * 2, 4)
    assert [array.ctypes.data % 64 for array in (*stacked.arguments, *stacked.masks)] == [0] * (1 + len(pad_axes))
    assert np.array_equal(stacked.arguments[0][:, :60_000], np.stack([row] * 4))
    assert not stacked.arguments[0][:, 60_000:].any()


def test_what_jax_makes_of_a_dtype_goes_into_the_batch() -> None:
    stacker = stacker_of("x")
    given = [np.float64(1.5), np.zeros(2, np.uint64), np.ones(2, ml_dtypes.bfloat16), 1 << 20, 2.5, 1j, True]
    for x64, values in ((False, given), (True, [np.float64(1.5), 1 << 40])):
        with jax.enable_x64(x64):
            for value in values:
                [array] = stacker.stack([item_of(stacker, value)], 1).arguments
                wanted = jnp.asarray(value)
                assert (array.dtype, array[0].tolist()) == (wanted.dtype, wanted.tolist())


def test_a_mask_of_two_axes_has_both_in_the_order_in_which_they_are_named() -> None:
    stacker = stacker_of("image", pad_axes={"image": (2, 0)}, length_buckets=(2, 4))
    images = [np.ones((3, 5, 2), np.float32), np.ones((4, 5, 1), np.float32)]
    stacked = stacker.stack([item_of(stacker, image) for image in images], 2)
    [mask] = stacked.masks
    assert stacked.arguments[0].shape == (2, 4, 5, 2)
    assert mask.shape == (2, 2, 4)
    assert mask[0].tolist() == [[True, True, True, False]] * 2
    assert mask[1].tolist() == [[True] * 4, [False] * 4]
    assert (stacked.arguments[0][:, :, 0, :].swapaxes(1, 2) == mask).all()


def test_arrays_of_jax_are_read_when_the_device_has_them() -> None:
    stacker = stacker_of("x")
    item = item_of(stacker, jnp.arange(3))
    assert not item.is_on_host
    assert item.signature == item_of(stacker, np.arange(3)).signature
    assert stacker.stack([on_host(item)], 1).arguments[0].tolist() == [[0, 1, 2]]
    host = item_of(stacker, np.arange(3))
    assert on_host(host) is host
    gone = jnp.arange(3)
    lost = item_of(stacker, gone)
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        on_host(lost)


def test_what_is_no_array_is_refused_with_its_place() -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
        ("text", TypeError, "argument 'x': str is not an array"),
        ({"a": [1, object()]}, TypeError, "\"x['a'][1]\": object is not an array"),
        (np.array([None]), TypeError, "an array of object"),
        (np.array(["a"]), TypeError, "an array of <U1"),
        (np.zeros(2, ">f4"), TypeError, "an array of >f4"),
        (np.ma.zeros(2), TypeError, "masked array"),
        (1 << 40, ValueError, "jax_enable_x64"),
        ({1: 0, "a": 0}, ValueError, "argument 'x'"),
        (None, TypeError, "hold no array"),
    ]
    for value, error, message in refused:
        with pytest.raises(error, match=f"node 'embed'.*{re.escape(message)}"):
            item_of(stacker_of("x"), value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(9), "length is 9 along axis 0, and the last of length_buckets=(4, 8)"),
        (np.float32(1), "names axis 0, and an array has the shape ()"),
        ([np.zeros(2), np.zeros(3)], "different lengths [(2,), (3,)] along axis 0"),
        ([], "holds no array"),
    ],
)
def test_what_cannot_be_padded_is_refused_with_sizes(value: Any, message: str) -> None:
    stacker = stacker_of("tokens", pad_axes={"tokens": 0}, length_buckets=(4, 8))
    with pytest.raises(ValueError, match=f"node 'embed', argument 'tokens'.*{re.escape(message)}"):
        item_of(stacker, value)


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_a_result_without_rows_is_refused(shape: tuple[int, ...]) -> None:
    stacker = stacker_of("x")
    stacked = stacker.stack([item_of(stacker, 1.0)] * 3, 4)
    with pytest.raises(ValueError, match=rf"node 'embed'.*{re.escape(str(shape))}.*which has 4 rows"):
        split((np.zeros(4), np.zeros(shape)), stacked, "embed")


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (DeviceBatch(1), (1,)),
        (DeviceBatch(2), (1, 2)),
        (DeviceBatch(27), (1, 2, 4, 8, 16, 27)),
        (DeviceBatch(32), (1, 2, 4, 8, 16, 32)),
        (DeviceBatch(32, buckets=(4, 8)), (4, 8, 32)),
        (DeviceBatch(8, buckets=(8,)), (8,)),
    ],
)
def test_batches_have_the_sizes_asked_for_and_the_largest(batch: DeviceBatch, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(batch) == sizes


@given(st.integers(1, 300).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most))))
def test_a_batch_is_padded_to_less_than_twice_its_items(case: tuple[int, int]) -> None:
    most, count = case
    assert count <= batch_size(count, batch_sizes(DeviceBatch(most))) < 2 * count or count == 1


def test_a_length_is_padded_to_less_than_twice_or_to_the_shortest_or_to_the_buckets_asked_for() -> None:
    for length in (*range(200), 4095, 4096, 4097, 10**6):
        padded = padded_length(length, "powers_of_two") or 0
        assert length <= padded
        assert padded == SHORTEST_LENGTH or padded < 2 * length
    assert [padded_length(length, (3, 10)) for length in (0, 3, 4, 10, 11)] == [3, 3, 10, 10, None]


def node_of(fn: Callable[..., Any], *padded: str) -> Any:
    batch = devices.DeviceBatch(8, pad_axes=dict.fromkeys(padded, 0))
    return ps.device_node(device="cpu", batch=batch, name="embed")(fn)


def one(tokens: Any, mask: Any = None) -> Any:
    return mask.sum()


def named(tokens: Any, scale: Any, *, tokens_mask: Any = None) -> Any:
    return tokens_mask.sum()


def two(tokens: Any, image: Any, image_mask: Any = None, tokens_mask: Any = None) -> Any:
    return 10 * image_mask.sum() + tokens_mask.sum()


def both(tokens: Any, mask: Any, tokens_mask: Any = None) -> Any:
    return 10 * mask + tokens_mask.sum()


@pytest.mark.parametrize(
    ("fn", "padded", "arguments", "result"),
    [
        (one, ["tokens"], [np.ones(3)], 3),
        (named, ["tokens"], [np.ones(3), 7], 3),
        (two, ["tokens", "image"], [np.ones(3), np.ones(2)], 23),
        (both, ["tokens"], [np.ones(3), 4], 43),
    ],
)
async def test_a_mask_has_the_name_of_its_parameter_or_is_the_only_one(
    fn: Callable[..., Any], padded: list[str], arguments: list[Any], result: int
) -> None:
    node = node_of(fn, *padded)
    embedded = graph_of(lambda: node(*arguments))
    assert await engine.run(embedded()) == result
    assert await engine.run(ps.graph(node)(*arguments)) == result


async def test_without_padded_parameters_a_mask_is_a_parameter_as_any_other() -> None:
    node = node_of(lambda tokens, mask=None: tokens.sum() if mask is None else mask)
    assert await engine.run(ps.graph(node)(np.ones(3))) == 3


def none(tokens: Any) -> None: ...
def two_and_one_mask(tokens: Any, image: Any, mask: Any = None) -> None: ...
def no_default(tokens: Any, mask: Any) -> None: ...
def wrong_default(tokens: Any, mask: Any = 0) -> None: ...
def by_position(tokens: Any, mask: Any = None, /) -> None: ...
def in_front(tokens: Any, mask: Any = None, scale: Any = 1) -> None: ...
def in_front_of_all(tokens: Any, mask: Any = None, *more: Any) -> None: ...
def keyword(*, tokens: Any, mask: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("fn", "padded", "message"),
    [
        (none, ["tokens"], r"'embed' pads 'tokens'.*tokens_mask=None or mask=None"),
        (two_and_one_mask, ["tokens", "image"], r"add the parameter tokens_mask=None,"),
        (none, ["words"], r"\{'words': \.\.\.\}, but no such parameter; it has tokens"),
        (no_default, ["tokens"], "make it mask=None"),
        (wrong_default, ["tokens"], "make it mask=None"),
        (by_position, ["tokens"], "passed by keyword"),
        (in_front, ["tokens"], "move the parameter 'mask' behind 'scale'"),
        (in_front_of_all, ["tokens"], r"the parameter \*more: Any has no place in a program"),
        (keyword, ["tokens"], "no such parameter"),
    ],
)
def test_a_padded_parameter_without_a_mask_is_refused(fn: Callable[..., Any], padded: list[str], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        node_of(fn, *padded)
