"""The check of options: which values each option accepts, and the error for all others.

Each class or function with options declares which values they accept, and calls `check`. So a wrong value is refused
where it is passed, and does not cause an error later, where it is used.
"""

import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from numbers import Real
from typing import Any, TypeGuard, cast, get_args

from .._errors import OptionsError
from ..telemetry.logs import shown

_MISSING = object()


class OptionRule:
    """The values that an option accepts.

    Attributes:
        text: a description of these values, for the error.
        fits: whether a value is one of them.
    """

    __slots__ = ("fits", "text")

    def __init__(self, text: str, fits: Callable[[object], bool]) -> None:
        self.text = text
        self.fits = fits


def check(option: str, value: object, accepted: OptionRule, before: str = "") -> None:
    """Check the value of an option.

    Args:
        option: the name of the option.
        value: the value.
        accepted: the values that the option accepts.
        before: text to put before the name in the error, such as "Retry(".

    Raises:
        OptionsError: the option does not accept the value.
    """
    if not accepted.fits(value):
        after = ")" if before.endswith("(") else ""
        raise OptionsError(f"{before}{option}={shown(value)}{after}: {accepted.text}")


def check_fields(record: object, accepted: Mapping[str, OptionRule], before: str = "") -> None:
    """Check the fields of a record of options. Fields that have their default are not checked, which saves time.

    Raises:
        OptionsError: an option does not accept its value.
    """
    defaults = vars(type(record))
    for option, value in vars(record).items():
        if value is not defaults.get(option, _MISSING):
            check(option, value, accepted[option], before)


def is_text(value: str) -> bool:
    """Whether a text has no lone surrogates, which neither UTF-8 nor a database can write."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_unknown(given: Iterable[str], known: Iterable[str], name: str) -> None:
    """Refuse options that a function does not have.

    Args:
        given: the names of the options that were given.
        known: the names of all options of the function.
        name: the name of the function, for the error.

    Raises:
        OptionsError: the function does not have one of the options.
    """
    known = sorted(known)
    for option in given:
        if option not in known:
            from difflib import get_close_matches  # an import of 6 ms, for an error alone

            meant = "".join(f" (did you mean {like}?)" for like in get_close_matches(option, known, 1))
            raise OptionsError(f"{option!r} is no option of {name}{meant}; it takes {', '.join(known)}")


def refuse_beside(fn: object, options: Iterable[str], name: str) -> None:
    """Refuse options of a decorator that also gets the function.

    Args:
        fn: the function; None if the decorator is called without a function.
        options: the names of the options that were given.
        name: the name of the decorator, for the error.

    Raises:
        TypeError: a function and options were given.
    """
    shown = ", ".join(f"{option}=..." for option in options)
    if fn is not None and shown:
        function = getattr(fn, "__name__", "fn")
        raise TypeError(f"{name} takes a function or options, got both: write {name}({shown})({function})")


def is_whole(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `least`.

    True and False are refused, though Python counts them as numbers: the caller has probably mixed up two options.
    """
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def whole(least: int) -> OptionRule:
    """Accept whole numbers from `least` on."""
    return OptionRule(f"a whole number of at least {least}", lambda value: is_whole(value, least))


def number(text: str, fits: Callable[[float], bool]) -> OptionRule:
    """Accept real numbers for which `fits` is true, also fractions and numbers of NumPy, but not True and False.

    A `Decimal` is refused, because Python cannot add a `Decimal` to a float, such as the time of a clock.
    """

    def is_number(value: object) -> bool:
        try:
            return not isinstance(value, bool) and isinstance(value, Real) and bool(fits(float(value)))
        except OverflowError:  # a whole number that is too large
            return False

    return OptionRule(text, is_number)


def one_of(literal: Any) -> OptionRule:
    """Accept the members of a `Literal`."""
    members: tuple[str, ...] = get_args(literal)
    text = f"one of {', '.join(map(repr, members))}"
    return OptionRule(text, lambda value: isinstance(value, str) and value in members)


def instance(kind: type[Any], text: str) -> OptionRule:
    """Accept the instances of a class."""
    return OptionRule(text, lambda value: isinstance(value, kind))


def optional(accepted: OptionRule) -> OptionRule:
    """Accept None as well."""
    return OptionRule(f"{accepted.text}, or None", lambda value: value is None or accepted.fits(value))


def are_exceptions(value: object) -> bool:
    """Whether a value is a tuple of exception classes."""
    classes = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (None,)
    return all(isinstance(one, type) and issubclass(one, Exception) for one in classes)


def is_read_at_once(function: object) -> bool:
    """Whether `function` is a function that returns its result when called, unlike an `async def`."""
    call = function.__call__ if callable(function) else None
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return call is not None and not any(kind(one) for kind in kinds for one in (function, call))


def refuse_awaitable(key: object, option: str = "key") -> None:
    """Refuse an awaitable as a key: no two awaitables are equal, so every call would have a key of its own.

    Args:
        key: the key.
        option: the name of the option whose function has returned it.

    Raises:
        TypeError: the key is an awaitable; if it is a coroutine, this closes it.
    """
    if hasattr(type(key), "__await__"):
        if isinstance(key, Coroutine):
            key.close()
        raise TypeError(f"{option}= returned {key!r:.100}, which nobody awaits: a key is what a plain function returns")


SWITCH = instance(bool, "True or False")
NAME = OptionRule(
    "a text that is not empty and can be written as UTF-8",
    lambda value: isinstance(value, str) and bool(value) and is_text(value),
)
FUNCTION = OptionRule("a function", callable)
KEY = OptionRule("a function that is not async, because a key is not awaited", is_read_at_once)
POSITIVE = number("a finite number above 0", lambda value: 0 < value < math.inf)
FINITE = number("a finite number", math.isfinite)
NOT_NEGATIVE = number("a finite number that is not negative", lambda value: 0 <= value < math.inf)
TIMEOUT = optional(number("a number of seconds, 0 or more", lambda value: value >= 0))
SHARE = number("a share between 0 and 1", lambda value: 0 <= value <= 1)
