"""Ref: a symbolic value, which stands for an unknown value while a graph is traced; and the search for hidden Refs."""

import functools
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from ..._errors import GraphTraceError
from ...telemetry.text import printable
from .annotations import Hint, hint_inside, members_of
from .template import Access, Read

if TYPE_CHECKING:
    from .tracer import Tracer


_PACKAGE = os.path.realpath(__file__).rsplit(os.sep, 3)[0] + os.sep


def call_location() -> str:
    """Return "file:line" of the line of user code that led here, perhaps through functions of installed libraries."""
    found: types.FrameType | None = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "user" and not is_generated(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if owner == "installed":
            found = frame  # the graph itself may be installed: then it is the outermost frame inside of the tracer
        elif owner == "penstock" and found is not None:
            break
        frame = frame.f_back
    return "<unknown>:0" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def definition_location(fn: object) -> str:
    """Return "file:line" of the definition of a function; the repr of a builtin, which has no source."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(fn)


def is_users(filename: str) -> bool:
    """Whether a file is neither part of this package nor of the standard library; a cell of a notebook counts, too."""
    return _owner(filename) in ("user", "installed")


def is_generated(frame: types.FrameType) -> bool:
    """Whether the code of a frame was generated, such as the `__init__` of a dataclass: its line number is useless."""
    return frame.f_code.co_filename.startswith(("<string>", "<attrs")) and "__file__" in frame.f_globals


@cache
def _paths(*names: str) -> tuple[str, ...]:
    import sysconfig  # here, because the import takes time

    return tuple([os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names])


@lru_cache(maxsize=1024)
def _owner(filename: str) -> Literal["user", "installed", "library", "penstock"]:
    if filename.startswith("<"):
        return "library" if filename.startswith("<frozen ") else "user"
    path = os.path.realpath(filename)
    if path.startswith(_PACKAGE):
        return "penstock"
    if path.startswith(_paths("purelib", "platlib")):
        return "installed"
    return "library" if path.startswith(_paths("stdlib", "platstdlib")) else "user"


class Ref:
    """A symbolic value: the result of a node, or a parameter, while a graph is traced.

    A graph can pass a Ref on, put it into lists, tuples, dicts and dataclasses, and take its attributes and items. Any
    operation that would need the value itself raises `GraphTraceError` with the remedy.
    """

    # All other attributes of a Ref are attributes of the unknown value.
    __slots__ = ("_penstock_annotation", "_penstock_label", "_penstock_path", "_penstock_source", "_penstock_tracer")
    _penstock_annotation: Hint | None
    _penstock_label: str
    _penstock_path: tuple[Access, ...]
    _penstock_source: int
    _penstock_tracer: "Tracer"
    # Then NumPy leaves `array + ref` to the Ref, which refuses the operation.
    __array_ufunc__ = None

    def __init__(
        self, tracer: "Tracer", source: int, label: str, path: tuple[Access, ...] = (), annotation: Hint | None = None
    ) -> None:
        assign = object.__setattr__  # `__setattr__` of this class refuses
        assign(self, "_penstock_tracer", tracer)
        assign(self, "_penstock_source", source)
        assign(self, "_penstock_label", label)
        assign(self, "_penstock_path", path)
        assign(self, "_penstock_annotation", annotation)

    def __getattr__(self, name: str) -> "Ref":
        if name.startswith("__") and name.endswith("__"):
            # Python and libraries look up protocols this way; a Ref has only the protocols below
            raise AttributeError(name)
        return self._penstock_inside(f"{self._penstock_label}.{name}", ("attribute", name))

    def __getitem__(self, key: Any) -> "Ref":
        if any(isinstance(part, Ref | PendingRef) for part in _parts_of_key(key)):
            refuse(self, "indexing it with a value that is not known yet", in_a_step("value[key]", "value", "key"))
        return self._penstock_inside(f"{self._penstock_label}[{key!r}]", ("item", key))

    def __len__(self) -> int:
        return len(self._penstock_members("taking its len()", in_a_step("len(value)")))

    def __iter__(self) -> "Iterator[Ref]":
        remedy = "use ps.map_each(node, items), or annotate it as tuple[A, B] if it is unpacked, or "
        members = self._penstock_members("iterating over it", remedy + in_a_step("[item for item in value]"))
        return iter([self[index] for index in range(len(members))])

    def __await__(self) -> Generator[Any, Any, "Ref"]:
        remedy = "an argument, a result of a plain `def` and a stream are not awaited, and each call only once"
        refuse(self, "awaiting it", f"{remedy}: remove the await")

    def __rshift__(self, following: Any) -> Any:
        if not self._penstock_tracer.is_stream(self):
            refuse(self, "arithmetic on it", in_a_step("value >> other", "value", "other"))
        if not hasattr(type(cast("object", following)), "__rrshift__"):
            refuse(self, f">> {following!r}", "a stream goes on in a node, a graph or a stage of penstock.data")
        return NotImplemented  # `following` knows how it reads a stream

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a method of a value is not a node."""
        how, name = self._penstock_path[-1] if self._penstock_path else ("item", None)
        called = f"value.{name}" if how == "attribute" else "value"
        remedy = in_a_step(f"{called}({'...' if args or kwargs else ''})")
        refuse(self, "calling it", f"a method of a value is not a node: {remedy}")

    def __repr__(self) -> str:
        return self._penstock_tracer.shown(f"<Ref {printable(self._penstock_label)}>")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        refuse(self, f"assigning to its attribute .{name}", _CHANGE)

    def _penstock_inside(self, label: str, access: Access) -> "Ref":
        outer = self._penstock_annotation
        hint = None if outer is None else lambda: hint_inside(outer(), access)
        return Ref(self._penstock_tracer, self._penstock_source, label, (*self._penstock_path, access), hint)

    def _penstock_members(self, what: str, remedy: str) -> list[Any]:
        members = members_of(self._penstock_annotation()) if self._penstock_annotation is not None else None
        if members is None:
            refuse(self, what, remedy)
        return members


class Unawaited:
    """A call whose value can be used only after it was awaited: a call of an `async def` node or of a graph."""

    __slots__ = ()


class PendingRef(Unawaited):
    """A call of an `async def` node that is not awaited yet: the counterpart of the coroutine in plain Python."""

    __slots__ = ("_penstock_key", "_penstock_pending", "_penstock_ref")
    _penstock_key: object
    _penstock_pending: dict[object, str]
    _penstock_ref: Ref
    __array_ufunc__ = None

    def __init__(self, ref: Ref, location: str, pending: dict[object, str]) -> None:
        object.__setattr__(self, "_penstock_ref", ref)
        object.__setattr__(self, "_penstock_pending", pending)
        # Not the number of the value: several calls of a resource share a number, and it may belong to another trace.
        object.__setattr__(self, "_penstock_key", object())
        pending[self._penstock_key] = location

    def __await__(self) -> Generator[Any, Any, Ref]:
        if self._penstock_pending.pop(self._penstock_key, None) is None:
            refuse(self._penstock_ref, "awaiting it twice", "await it once and keep the result in a variable")
        yield from ()  # makes this a generator, which __await__ must return; it never suspends
        self._penstock_ref._penstock_tracer.begins(self._penstock_ref._penstock_source)
        return self._penstock_ref

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        refuse(self._penstock_ref, f"taking .{name} of it before it is awaited", "write (await ...) around the call")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        refuse(self._penstock_ref, f"assigning to .{name} of it before it is awaited", "await the call first")

    def __repr__(self) -> str:
        ref = self._penstock_ref
        return ref._penstock_tracer.shown(f"<Ref {printable(ref._penstock_label)}, not awaited>")


def _parts_of_key(key: object) -> Iterator[object]:
    for member in cast("tuple[object, ...]", key) if isinstance(key, tuple) else (key,):
        yield member
        if isinstance(member, slice):
            bounds = cast("slice[object, object, object]", member)
            yield from (bounds.start, bounds.stop, bounds.step)


def read_of(ref: Ref) -> Read:
    """Return the read that a Ref stands for in its own trace."""
    return Read(ref._penstock_source, ref._penstock_path)


def refuse(ref: Ref, what: str, remedy: str) -> NoReturn:
    """Raise the error for an operation that needs the value itself."""
    raise GraphTraceError(
        f"{call_location()}: {what} is not possible in a graph: {ref!r} stands for a value that is not known while "
        f"graph {ref._penstock_tracer.name!r} is traced; {remedy}"
    )


def refuse_leak(kind: str, name: str, ref: Ref | PendingRef) -> NoReturn:
    """Raise the error for a symbolic value that is passed to a node or graph outside of its trace."""
    raise GraphTraceError(
        f"{call_location()}: {kind} {name!r} is called outside a graph with {ref!r}, a value that exists only while "
        "its graph is traced: it leaked out through a global, an attribute or a cache; return it from the graph instead"
    )


def _forbid(what: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse_it(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        if isinstance(self, PendingRef):
            refuse(self._penstock_ref, f"{what} before it is awaited", "write (await ...) around the call first")
        refuse(self, what, remedy)

    return refuse_it


def in_a_step(expression: str, *names: str) -> str:
    """Return the remedy for an operation that needs values: the operation, written as a step of a graph.

    Args:
        expression: the operation.
        *names: the names of the values in the operation; by default `value`.
    """
    parameters = ", ".join(names or ("value",))
    return f"do it inside a node, or in a step of one line: ps.apply(lambda {parameters}: {expression}, {parameters})"


def compared(expression: str, *names: str) -> str:
    """Return the remedy for an operation that a branch may depend on; the arguments are those of `in_a_step`."""
    return f"{in_a_step(expression, *names)}; and branch on the result with ps.cond or ps.switch"


_CONTEXT = "use it as a context manager inside a node"
_CHANGE = "values are not changed in a graph; do it inside a node"
_TEXT = ("formatting it as text (`str`, f-string, `print`)", in_a_step('f"{value}"'))
_FORBIDDEN: dict[str, tuple[str, str]] = {
    "__bool__": (
        "using its truth value (`if`, `while`, `and`, `not`, `assert`)",
        f"use ps.cond, ps.switch or ps.while_loop; or {in_a_step('not value')}",
    ),
    "__contains__": ("testing `in` on it", compared("other in value", "value", "other")),
    "__str__": _TEXT,
    "__format__": _TEXT,
    "__hash__": (
        "using it in a set or as a dict key", f"take a key that is known, or {in_a_step('{value: 1}')}"
    ),
    "__index__": (
        "using it as an index, a size or a number of rounds",
        f"repeat with ps.while_loop; for an index, {in_a_step('items[value]', 'items', 'value')}",
    ),
    "__setitem__": ("assigning to an item of it", _CHANGE),
    "__delitem__": ("deleting an item of it", _CHANGE),
    "__delattr__": ("deleting an attribute of it", _CHANGE),
    "__enter__": ("`with` on it", _CONTEXT),
    "__exit__": ("`with` on it", _CONTEXT),
    "__aenter__": ("`async with` on it", _CONTEXT),
    "__aexit__": ("`async with` on it", _CONTEXT),
    "__aiter__": ("`async for` over it", "read it in a node, or with ps.map_each or ps.fold"),
    "__next__": ("taking next() of it", in_a_step("next(value)")),
    "__anext__": ("taking anext() of it", "do it inside a node"),
    "__fspath__": ("using it as a path", in_a_step("os.fspath(value)")),
    "__copy__": ("copying it", in_a_step("copy.copy(value)")),
    "__deepcopy__": ("copying it", in_a_step("copy.deepcopy(value)")),
    "__reduce_ex__": ("pickling it", in_a_step("pickle.dumps(value)")),
    "__array__": ("making an array of it", in_a_step("numpy.asarray(value)")),
    "__reversed__": ("iterating over it backwards", in_a_step("[*reversed(value)]")),
    "__divmod__": ("arithmetic on it", in_a_step("divmod(value, other)", "value", "other")),
    "__rdivmod__": ("arithmetic on it", in_a_step("divmod(other, value)", "value", "other")),
}  # fmt: skip
for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _FORBIDDEN[f"__{_name}__"] = ("comparing it", compared(f"value {_sign} other", "value", "other"))
for _name, _sign in {
    "add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lshift": "<<", "rshift": ">>", "and": "&", "xor": "^", "or": "|",
}.items():  # fmt: skip
    _FORBIDDEN[f"__{_name}__"] = ("arithmetic on it", in_a_step(f"value {_sign} other", "value", "other"))
    _FORBIDDEN[f"__r{_name}__"] = ("arithmetic on it", in_a_step(f"other {_sign} value", "value", "other"))
for _name, _sign in {"neg": "-", "pos": "+", "invert": "~"}.items():
    _FORBIDDEN[f"__{_name}__"] = ("arithmetic on it", in_a_step(f"{_sign}value"))
for _name, _function in {
    "abs": "abs", "round": "round", "floor": "math.floor", "ceil": "math.ceil", "trunc": "math.trunc",
}.items():  # fmt: skip
    _FORBIDDEN[f"__{_name}__"] = ("arithmetic on it", in_a_step(f"{_function}(value)"))
for _name in ("int", "float", "complex", "bytes"):
    _FORBIDDEN[f"__{_name}__"] = (f"converting it with {_name}()", in_a_step(f"{_name}(value)"))
for _name, (_what, _remedy) in _FORBIDDEN.items():
    if _name != "__rshift__":  # a stream has it: see `Ref.__rshift__`
        setattr(Ref, _name, _forbid(_what, _remedy))
    setattr(PendingRef, _name, _forbid(_what, _remedy))
for _name, _what in (
    ("len", "taking its len()"), ("iter", "iterating over it"), ("getitem", "taking an item of it"),
    ("call", "calling it"),
):  # fmt: skip
    setattr(PendingRef, f"__{_name}__", _forbid(_what, ""))


# How many objects the search examines. A Ref that a graph has put into an object is found early, since the search is
# breadth first. The limit keeps large constants from making tracing slow.
_MAX_OBJECTS = 1000
_PLAIN = (type, types.ModuleType, types.CodeType, int, float, complex, str, bytes, range, type(None))


def hidden_ref(value: object, max_objects: int = _MAX_OBJECTS) -> Ref | PendingRef | None:
    """Return the symbolic value at the smallest depth inside of `value`; None if there is no symbolic value.

    Args:
        value: any object.
        max_objects: how many objects the search examines before it gives up.
    """
    found = reachable([value], lambda one: islice(_inside(one), max_objects), max_objects, _PLAIN)
    return next((one for one in found if isinstance(one, Ref | PendingRef)), None)


def reachable(
    roots: Iterable[object],
    inside: Callable[[object], Iterable[object]],
    max_objects: int,
    plain: tuple[type, ...],
) -> Iterator[object]:
    """Yield each object that can be reached, at the smallest depth first.

    Args:
        roots: the objects to begin with.
        inside: returns the objects that an object refers to.
        max_objects: how many objects are examined.
        plain: the types of objects that are left out, since they refer to no others of interest.
    """
    queue = deque(roots)
    seen: set[int] = set()
    while queue and len(seen) < max_objects:
        current = queue.popleft()
        if not isinstance(current, plain) and id(current) not in seen:
            seen.add(id(current))
            yield current
            queue.extend(inside(current))


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
    return _attributes(value)


def _attributes(value: object) -> Iterator[object]:
    """Yield the values of the attributes, without running properties."""
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
    """Yield the values in the closure of a function."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that is assigned later
            continue
