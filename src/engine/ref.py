"""Ref: what stands for a value while a graph is traced."""

import os
import sys
import types
import typing
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from .._errors import GraphTraceError
from .template import Access, Read

if TYPE_CHECKING:
    from .tracer import Tracer

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep


def call_location() -> str:
    """Return "file:line" of the innermost caller outside this package: the line of the user's graph."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and os.path.realpath(frame.f_code.co_filename).startswith(_PACKAGE):
        frame = frame.f_back
    return "<unknown>:0" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Ref:
    """A symbolic value: the result of a node, or a parameter, while a graph is traced.

    It can be passed on, put into lists, tuples, dicts and dataclasses, and its attributes and items can be taken.
    Whatever would need the value itself raises `GraphTraceError` with the remedy.
    """

    # Every attribute of a Ref that is not listed here is one of the value that it stands for.
    __slots__ = ("_penstock_annotation", "_penstock_label", "_penstock_path", "_penstock_source", "_penstock_tracer")

    def __init__(
        self,
        tracer: "Tracer",
        source: int,
        label: str,
        path: tuple[Access, ...] = (),
        annotation: Callable[[], Any] | None = None,
    ) -> None:
        self._penstock_tracer = tracer
        self._penstock_source = source
        self._penstock_label = label
        self._penstock_path = path
        self._penstock_annotation = annotation

    def __getattr__(self, name: str) -> "Ref":
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # protocols are asked for by name; a Ref has none but those below
        return self._penstock_inside(f"{self._penstock_label}.{name}", ("attribute", name))

    def __getitem__(self, key: Any) -> "Ref":
        if isinstance(key, Ref):
            _refuse(self, "indexing with a value that is not known yet", "index inside a node")
        return self._penstock_inside(f"{self._penstock_label}[{key!r}]", ("item", key))

    def _penstock_inside(self, label: str, access: Access, annotation: Callable[[], Any] | None = None) -> "Ref":
        return Ref(
            self._penstock_tracer, self._penstock_source, label, (*self._penstock_path, access), annotation
        )

    def __iter__(self) -> "Iterator[Ref]":
        members = _members(self._penstock_annotation) if self._penstock_annotation is not None else None
        if members is None:
            _refuse(
                self, "iterating over it",
                "use ps.map_each(node, items), or annotate it as tuple[A, B] if it is unpacked",
            )  # fmt: skip
        return iter([
            self._penstock_inside(f"{self._penstock_label}[{index}]", ("item", index), lambda member=member: member)
            for index, member in enumerate(members)
        ])  # fmt: skip

    def __await__(self) -> Generator[Any, Any, "Ref"]:
        _refuse(self, "awaiting it", "it is the value of a plain `def` or was awaited already: remove the await")

    def __repr__(self) -> str:
        return f"<Ref {self._penstock_label}>"


class PendingRef:
    """The result of an `async def` node that is not awaited yet, as a coroutine in plain Python is."""

    __slots__ = ("_penstock_pending", "_penstock_ref")

    def __init__(self, ref: Ref, pending: "dict[int, str]") -> None:
        self._penstock_ref = ref
        self._penstock_pending = pending
        pending[ref._penstock_source] = call_location()

    def __await__(self) -> Generator[Any, Any, Ref]:
        if self._penstock_pending.pop(self._penstock_ref._penstock_source, None) is None:
            _refuse(self._penstock_ref, "awaiting it twice", "await it once and keep the result in a variable")
        return self._penstock_ref
        yield  # a generator, as __await__ must be; it never suspends

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        _refuse(self._penstock_ref, f"taking .{name} of it before it is awaited", "write (await ...) around the call")

    def __iter__(self) -> NoReturn:
        _refuse(self._penstock_ref, "iterating over it before it is awaited", "await the call first")

    def __repr__(self) -> str:
        return f"<Ref {self._penstock_ref._penstock_label}, not awaited>"


def read_of(ref: Ref) -> Read:
    """Return what a Ref stands for in its own trace."""
    return Read(ref._penstock_source, ref._penstock_path)


def _members(annotation: Callable[[], Any]) -> list[Any] | None:
    """Return the member types of an annotation that gives a length: tuple[A, B] or a NamedTuple; None for others."""
    hint = annotation()
    if typing.get_origin(hint) is tuple:
        members = typing.get_args(hint)
        if Ellipsis not in members:
            return [*members]
    fields = getattr(hint, "_fields", None)
    if isinstance(hint, type) and issubclass(hint, tuple) and fields is not None:
        hints = typing.get_type_hints(hint)
        return [hints.get(field) for field in fields]
    return None


def _refuse(ref: Ref, what: str, remedy: str) -> NoReturn:
    raise GraphTraceError(
        f"{call_location()}: {what} is not possible in a graph: {ref!r} stands for a value that is not known while "
        f"the graph is traced; {remedy}"
    )


def _forbid(what: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any) -> NoReturn:
        _refuse(self._penstock_ref if isinstance(self, PendingRef) else self, what, remedy)

    return refuse


_COND = "compute it in a node, and branch with ps.cond or ps.switch"
_NODE = "do it inside a node"
_FORBIDDEN: dict[str, tuple[str, str]] = {
    "__bool__": ("using its truth value (`if`, `while`, `and`, `or`, `not`)", "use ps.cond, ps.switch or ps.while_loop"),
    "__len__": ("taking its len()", _NODE),
    "__contains__": ("testing `in` on it", _COND),
    "__str__": ("formatting it as text (`str`, f-string, `print`)", _NODE),
    "__format__": ("formatting it as text (`str`, f-string, `print`)", _NODE),
    "__hash__": ("using it in a set or as a dict key", "key by something that is known, or do it inside a node"),
    "__call__": ("calling it", "call it inside a node; a method of a value is not a node"),
    "__index__": ("using it as an index or size", _NODE),
    "__setitem__": ("assigning to an item of it", "values are not changed in a graph; " + _NODE),
    "__delitem__": ("deleting an item of it", "values are not changed in a graph; " + _NODE),
    "__enter__": ("`with` on it", "use it as a context manager inside a node"),
    "__aenter__": ("`async with` on it", "use it as a context manager inside a node"),
    "__aiter__": ("`async for` over it", "write a node that takes the AsyncIterator"),
    "__next__": ("taking next() of it", _NODE),
}  # fmt: skip
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _FORBIDDEN[f"__{_name}__"] = ("comparing it", _COND)
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "xor", "or"):  # fmt: skip
    _FORBIDDEN[f"__{_name}__"] = _FORBIDDEN[f"__r{_name}__"] = ("arithmetic on it", _NODE)
for _name in ("neg", "pos", "abs", "invert", "int", "float", "complex", "round", "bytes", "reversed"):
    _FORBIDDEN[f"__{_name}__"] = ("arithmetic on it", _NODE)
for _name, (_what, _remedy) in _FORBIDDEN.items():
    setattr(Ref, _name, _forbid(_what, _remedy))
    setattr(PendingRef, _name, _forbid(_what, _remedy))


def _refuse_assignment(self: Ref, name: str, value: Any) -> None:
    if name.startswith("_penstock_"):
        object.__setattr__(self, name, value)
    else:
        _refuse(self, f"assigning to its attribute .{name}", "values are not changed in a graph; " + _NODE)


Ref.__setattr__ = _refuse_assignment  # type: ignore[method-assign]
