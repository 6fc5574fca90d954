"""Which parameters take masks, and the errors where no mask can be made."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine


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

    @ps.graph
    async def embedded() -> Any:
        return node(*arguments)

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
