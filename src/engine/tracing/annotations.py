"""Annotations of functions: the types of parameters and results, as far as they can be resolved."""

import functools
import inspect
import re
import sys
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from typing import Any, cast

from .template import Access

if sys.version_info >= (3, 14):
    # Annotations are evaluated when they are read, and may use names that exist only for type checkers.
    from annotationlib import Format, get_annotations

    def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
        """Return the signature of a function, also where the names in its annotations do not exist at run time."""
        return inspect.signature(fn, annotation_format=Format.FORWARDREF)

    def annotation_text(fn: Callable[..., Any], name: str) -> object:
        """Return the annotation of a parameter as it is written, if it may not be resolved; None without one."""
        return get_annotations(fn, format=Format.STRING).get(name)

else:
    signature_of = inspect.signature

    def annotation_text(fn: Callable[..., Any], name: str) -> object:
        """Return the annotation of a parameter as it is written, if it may not be resolved; None without one."""
        return getattr(fn, "__annotations__", {}).get(name)


Hint = Callable[[], Any]  # returns an annotation; resolved only when needed, since few annotations are needed

_STREAMS = (AsyncIterator, AsyncIterable, AsyncGenerator)
_STREAM_TEXT = re.compile(r"[\w.]*\bAsync(Iterator|Iterable|Generator)\b")


def unwrapped(fn: Any) -> Any:
    """Return the function or class that a partial calls; return any other object itself."""
    while isinstance(fn, functools.partial):
        fn = cast("Any", fn).func
    return fn


def hints_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the resolved annotations of a function, by name; empty if an annotation cannot be resolved."""
    return _resolved(fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__call__)


def parameters_of_body(fn: Callable[..., Any], count: int) -> list[tuple[str, Hint]]:
    """Return the names of the parameters that the body of a control-flow construct takes, with their hints."""
    inner = inspect.unwrap(fn)  # the function of a node or a graph
    try:
        names = list(signature_of(fn).parameters)[:count]
    except (TypeError, ValueError):  # some builtins have no signature
        names = []
    names += ["value"] * (count - len(names))
    return [(name, hint_of(inner, name)) for name in names]


def hint_of(fn: Callable[..., Any], name: str) -> Hint:
    """Return a function that returns the annotation of a parameter."""
    return lambda: hints_of(fn).get(name)


def result_hint(fn: Callable[..., Any]) -> Any:
    """Return the annotation of the result of a function, node or graph."""
    return hints_of(inspect.unwrap(fn)).get("return")


def is_stream_parameter(fn: Callable[..., Any], name: str) -> bool:
    """Whether a parameter is annotated as an async iterator; decided by the text if it does not resolve."""
    hints = hints_of(fn)
    if name in hints:
        return (typing.get_origin(hints[name]) or hints[name]) in _STREAMS
    text = annotation_text(fn, name)
    return isinstance(text, str) and _STREAM_TEXT.match(text) is not None


def members_of(hint: Any) -> list[Any] | None:
    """Return the member types of an annotation with a length: tuple[A, B] or a NamedTuple; None for others."""
    if typing.get_origin(hint) is tuple:
        members = typing.get_args(hint)
        return None if Ellipsis in members else [*members]
    fields: tuple[str, ...] | None = getattr(hint, "_fields", None)
    if fields is not None and inspect.isclass(hint) and issubclass(hint, tuple):
        hints = _resolved(cast("object", hint))
        return [hints.get(field) for field in fields]
    return None


def hint_inside(hint: Any, access: Access) -> Any:
    """Return the annotation of an attribute or item of a value with this annotation; None if unknown."""
    how, what = access
    if how == "attribute":
        return _resolved(hint).get(what) if isinstance(hint, type) else None
    members = members_of(hint)
    if members is not None and isinstance(what, int) and -len(members) <= what < len(members):
        return members[what]
    return None


def _resolved(annotated: Any) -> dict[str, Any]:
    with suppress(Exception):  # names may not exist at run time (TYPE_CHECKING), or fail in any other way
        return typing.get_type_hints(annotated)
    return {}
