"""Options of `Batch` and `DeviceBatch`, and the nodes that accept them."""

import dataclasses
import re
from typing import Any

import pytest

import penstock as ps
from penstock import devices


def test_a_batch_is_a_value_that_nobody_changes() -> None:
    axes = {"tokens": 0}
    batch = devices.DeviceBatch(8, buckets=(1, 4), pad_axes=axes, length_buckets=(16, 128))
    axes["tokens"] = 1
    assert batch.pad_axes == {"tokens": 0}
    same = devices.DeviceBatch(8, buckets=(1, 4), pad_axes={"tokens": 0}, length_buckets=(16, 128))
    assert (batch, hash(batch)) == (same, hash(same))
    assert batch != dataclasses.replace(batch, pad_axes={"tokens": (0, 1)})
    with pytest.raises(TypeError):
        batch.pad_axes["tokens"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"buckets": [1, 2]}, TypeError, '"powers_of_two" or a tuple'),
        ({"buckets": "squares"}, TypeError, '"powers_of_two" or a tuple'),
        ({"buckets": ()}, ValueError, "ascending"),
        ({"buckets": (2, 1)}, ValueError, "ascending"),
        ({"buckets": (2, 2)}, ValueError, "ascending"),
        ({"buckets": (0, 2)}, ValueError, "at least 1"),
        ({"buckets": (1, 2.0)}, ValueError, "whole numbers"),
        ({"buckets": (1, "2")}, ValueError, "whole numbers"),
        ({"buckets": (1, 16)}, ValueError, "no bucket may be above max_size=8"),
        ({"pad_axes": "tokens"}, TypeError, "a mapping"),
        ({"pad_axes": {1: 0}}, TypeError, "{1: 0}"),
        ({"pad_axes": {"x": -1}}, ValueError, "'x': -1"),
        ({"pad_axes": {"x": True}}, ValueError, "'x': True"),
        ({"pad_axes": {"x": ()}}, ValueError, "an axis"),
        ({"pad_axes": {"x": (0, 0)}}, ValueError, "(0, 0)"),
        ({"length_buckets": (8, 4), "pad_axes": {"x": 0}}, ValueError, "ascending"),
        ({"length_buckets": (8, 16)}, ValueError, "pad_axes="),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        devices.DeviceBatch(8, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": 256}, "lengths=256): a tuple of whole numbers of at least 1, in ascending order"),
        ({"lengths": "powers_of_two"}, "a tuple of whole numbers"),
        ({"lengths": (256, 128)}, "ascending"),
        ({"lengths": ()}, "ascending"),
        ({"rows": 0}, "rows=0): a whole number of at least 1"),
        ({"items_per_row": 1.5}, "items_per_row=1.5): a whole number"),
        ({"results": "rows"}, "results='rows'): one of 'items', 'tokens'"),
        ({"max_wait_seconds": -1}, "max_wait_seconds=-1"),
    ],
)
def test_wrong_options_of_packed_rows_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.OptionsError, match=re.escape(message)):
        devices.PackedBatch(**{"lengths": (256,), **options})


def test_a_packed_batch_is_a_batch_that_counts_its_items() -> None:
    batch = devices.PackedBatch(lengths=(128, 256), rows=2, items_per_row=16)
    assert isinstance(batch, ps.Batch)
    assert (batch.max_size, batch.max_cost) == (32, None)
    assert dataclasses.replace(batch, rows=3).max_size == 48
    assert hash(batch) == hash(devices.PackedBatch(lengths=(128, 256), rows=2, items_per_row=16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_cost": 10}, "max_cost=10, cost=None): give both"),
        ({"cost": len}, "give both"),
        ({"max_cost": 0, "cost": len}, "max_cost=0): a finite number above 0"),
        ({"max_cost": 1, "cost": 2}, "cost=2): a function"),
    ],
)
def test_a_cost_and_its_limit_belong_together(options: dict[str, Any], message: str) -> None:
    for batch in ps.Batch, devices.DeviceBatch:
        with pytest.raises(ps.OptionsError, match=re.escape(message)):
            batch(8, **options)


def test_what_is_for_device_nodes_is_refused_for_a_function_of_a_list() -> None:
    def double(items: list[int]) -> list[int]:
        return items * 2

    with pytest.raises(TypeError, match=r"node 'double'.*DeviceBatch is for device_node.*use penstock.Batch here"):
        ps.node(batch=devices.DeviceBatch(8))(double)


def test_a_batch_of_device_nodes_is_a_batch() -> None:
    assert isinstance(devices.DeviceBatch(8), ps.Batch)
    names = ["max_size", "max_wait_seconds", "max_queue", "max_cost", "cost"]
    assert [field.name for field in dataclasses.fields(ps.Batch)] == names
