"""What exists outside of a graph, told from what its body makes anew for each call.

A list written in the body of a graph is a new one for each item, as in plain Python. A list that a global or a closure
names is the same for all, and a node that appends to it must append to that one.
"""

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import unwrap
from typing import cast

from .hidden import closure_values

# Configuration is small; beyond, what a very large global holds in its depth would be copied.
_MAX_OBJECTS = 100_000
_PLAIN = (type, int, float, complex, str, bytes, range, type(None))


class Outside:
    """The objects that the names of traced functions lead to; looked up at the first question, as few graphs ask."""

    def __init__(self) -> None:
        self._functions: list[Callable[..., object]] = []
        self._codes: set[types.CodeType] = set()
        self._found: set[int] | None = None

    def add(self, fn: Callable[..., object]) -> None:
        """Add what the names of a function mean."""
        if fn not in self._functions:
            self._functions.append(fn)
            self._found = None

    def __contains__(self, value: object) -> bool:
        if self._found is None:
            self._found = self._search()
        return id(value) in self._found

    def _search(self) -> set[int]:
        roots = [function for fn in self._functions if (function := _function_of(fn)) is not None]
        codes = {code for function in roots for code in inner_codes(function.__code__)}
        names = {name for code in (*codes, *(function.__code__ for function in roots)) for name in code.co_names}
        queue: deque[object] = deque()
        for fn in self._functions:
            queue.extend([fn.__self__] if isinstance(fn, types.MethodType) else [])
        for function in roots:
            # A function made by the body of a graph closes over what that body made.
            queue.extend(_named(function, with_closure=function.__code__ not in codes))
        seen: set[int] = set()
        while queue and len(seen) < _MAX_OBJECTS:
            current = queue.popleft()
            if isinstance(current, _PLAIN) or id(current) in seen:
                continue
            seen.add(id(current))
            queue.extend(_inside(current, names))
        return seen


def _function_of(fn: object) -> types.FunctionType | None:
    fn = unwrap(fn) if callable(fn) else fn
    fn = fn.__func__ if isinstance(fn, types.MethodType) else fn
    return fn if isinstance(fn, types.FunctionType) else None


def inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of the functions defined inside."""
    stack = [code]
    while stack:
        for constant in stack.pop().co_consts:
            if isinstance(constant, types.CodeType):
                yield constant
                stack.append(constant)


def _named(function: types.FunctionType, *, with_closure: bool) -> Iterator[object]:
    codes = (function.__code__, *inner_codes(function.__code__))
    for name in {name for code in codes for name in code.co_names}:
        if name in function.__globals__:
            yield function.__globals__[name]
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if with_closure:
        yield from closure_values(function)


def _inside(value: object, names: set[str]) -> Iterable[object]:
    if isinstance(value, dict):
        return list(cast("dict[object, object]", value).values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(cast("Iterable[object]", value))
    if isinstance(value, types.FunctionType):
        return _named(value, with_closure=True)
    # Of an object or a module, what the functions ask for by name.
    found: list[Mapping[str, object]] = [vars(cls) for cls in type(value).__mro__]
    if hasattr(value, "__dict__"):
        found.append(vars(value))
    named = [namespace[name] for namespace in found for name in names & namespace.keys()]
    slots = [one for one in named if isinstance(one, types.MemberDescriptorType)]
    return [*named, *(getattr(value, slot.__name__, None) for slot in slots if not isinstance(value, type))]
