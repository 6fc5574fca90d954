"""Which parameters take masks, and what is said where there is none."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from penstock.devices.parameter_checks import mask_parameters


def found(fn: Callable[..., Any], *padded: str) -> dict[str, str]:
    return mask_parameters(inspect.signature(fn), padded, "embed")


def test_a_mask_has_the_name_of_its_parameter_or_is_the_only_one() -> None:
    def one(tokens: Any, mask: Any = None) -> None: ...
    def named(tokens: Any, scale: Any, *, tokens_mask: Any = None) -> None: ...
    def two(tokens: Any, image: Any, image_mask: Any = None, tokens_mask: Any = None) -> None: ...
    def both(tokens: Any, mask: Any, tokens_mask: Any = None) -> None: ...

    assert found(one, "tokens") == {"tokens": "mask"}
    assert found(named, "tokens") == {"tokens": "tokens_mask"}
    assert found(two, "tokens", "image") == {"tokens": "tokens_mask", "image": "image_mask"}
    assert found(both, "tokens") == {"tokens": "tokens_mask"}
    assert found(one) == {}


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
        (in_front_of_all, ["tokens"], "behind 'more'"),
        (keyword, ["tokens"], "no such parameter"),
    ],
)
def test_a_padded_parameter_without_a_mask_is_refused(fn: Callable[..., Any], padded: list[str], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        found(fn, *padded)
