"""Whole numbers that are passed as options: one rule for what counts as one."""

from typing import TypeGuard


def is_whole(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least `least`.

    True and False are none, though Python counts them as numbers: whoever passes one has mistaken the option.
    """
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
