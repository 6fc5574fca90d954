"""Symbolic values where a template cannot see them: in attributes, partials, closures, bound methods."""

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, cast

from .ref import PendingRef, Ref

# A Ref that a graph put somewhere is near the surface; beyond, large constants must not make tracing slow.
_MAX_OBJECTS = 1000
_PLAIN = (type, types.ModuleType, types.CodeType, int, float, complex, str, bytes, range, type(None))


def hidden_ref(value: object, max_objects: int = _MAX_OBJECTS) -> Ref | PendingRef | None:
    """Return a symbolic value inside `value`, the one nearest to the surface; None if there is none.

    Args:
        value: any object.
        max_objects: how many objects to look at.
    """
    queue: deque[object] = deque([value])
    seen: set[int] = set()
    while queue and len(seen) < max_objects:
        current = queue.popleft()
        if isinstance(current, Ref | PendingRef):
            return current
        if not isinstance(current, _PLAIN) and id(current) not in seen:
            seen.add(id(current))
            queue.extend(islice(_inside(current), max_objects))
    return None


def _inside(value: object) -> Iterable[object]:
    members: Iterable[object] = ()
    whole = value
    if isinstance(value, Mapping):
        members = cast("Mapping[object, object]", value).values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        members = cast("Iterable[object]", value)
    return chain(list(members), _behind(whole))


def _behind(value: object) -> Iterable[object]:
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        return (value.__self__,)
    if isinstance(value, types.FunctionType):
        defaults = (value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
        return chain(closure_values(value), *defaults)
    if isinstance(value, types.GeneratorType):
        return () if value.gi_frame is None else value.gi_frame.f_locals.values()
    if isinstance(value, types.CoroutineType):
        return () if value.cr_frame is None else value.cr_frame.f_locals.values()
    return _attributes(value)


def _attributes(value: object) -> Iterator[object]:
    """Yield what the attributes hold, without running properties."""
    yield from list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = vars(cls).get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    yield descriptor.__get__(value)
                except AttributeError:  # not assigned
                    continue


def closure_values(function: types.FunctionType) -> Iterator[Any]:
    """Yield what the closure of a function holds."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that is assigned later
            continue
