"""The abstract values of the source check, and how the source of a function is found."""

import ast
import linecache
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from types import FunctionType
from typing import Final, NamedTuple

MISSING: Final = object()


class Kind(Enum):
    """The kinds of abstract values: what a variable will hold while the graph is traced."""

    PLAIN = auto()  # configuration: an ordinary object without a Ref in it
    UNKNOWN = auto()  # perhaps a Ref, or an object with Refs in it: never reported
    REF = auto()  # certainly a Ref: a parameter, or the result of a node
    RESULT = auto()  # the result of an inlined graph: a Ref, or a structure of Refs
    NODE = auto()  # calling it gives a REF
    GRAPH = auto()  # calling it gives a RESULT
    EMPTY = auto()  # an empty list, set or dict
    SEQUENCE = auto()  # an ordinary list, set or iterable of `items[0]`
    MAPPING = auto()  # an ordinary dict with values `items[0]`
    TUPLE = auto()  # an ordinary tuple of `items`


@dataclass(frozen=True, slots=True)
class AbstractValue:
    """An abstract value.

    Attributes:
        kind: the kind of the value.
        items: the abstract values of its items, for the three kinds of containers.
        target: the object itself, if the name is a global or in the closure; else `MISSING`.
    """

    kind: Kind
    items: tuple["AbstractValue", ...] = ()
    target: object = field(default=MISSING, compare=False)

    @property
    def symbolic(self) -> bool:
        """Whether it is, holds or may be a Ref."""
        return self.kind in _SYMBOLIC or any(item.symbolic for item in self.items)

    @property
    def unseen(self) -> bool:
        """Whether it is certainly symbolic, so that `is` or `isinstance` would look at a Ref instead of the value."""
        return self.kind in (Kind.REF, Kind.RESULT)

    @property
    def holds_unseen(self) -> bool:
        """Whether it is certainly symbolic, or certainly holds such a value."""
        return self.unseen or any(item.holds_unseen for item in self.items)

    def element(self) -> "AbstractValue":
        """Return the abstract value of its items."""
        match self.kind:
            case Kind.REF:
                return REF
            case Kind.SEQUENCE:
                return self.items[0]
            case Kind.TUPLE:
                return join(*self.items)
            case Kind.PLAIN | Kind.EMPTY | Kind.MAPPING:  # a mapping gives its keys
                return PLAIN
            case _:
                return UNKNOWN

    def unpack(self, length: int) -> list["AbstractValue"]:
        """Return the abstract value for each of the `length` targets that it is assigned to."""
        if self.kind is Kind.TUPLE and len(self.items) == length:
            return list(self.items)
        return [self.element()] * length


PLAIN: Final = AbstractValue(Kind.PLAIN)
UNKNOWN: Final = AbstractValue(Kind.UNKNOWN)
REF: Final = AbstractValue(Kind.REF)
RESULT: Final = AbstractValue(Kind.RESULT)
NODE: Final = AbstractValue(Kind.NODE)
GRAPH: Final = AbstractValue(Kind.GRAPH)
EMPTY: Final = AbstractValue(Kind.EMPTY)
_SYMBOLIC = (Kind.REF, Kind.RESULT, Kind.UNKNOWN)
_FILLED = (Kind.SEQUENCE, Kind.MAPPING)


def sequence(item: AbstractValue) -> AbstractValue:
    """Return the abstract value of a list of such items."""
    return AbstractValue(Kind.SEQUENCE, (item,))


def mapping(item: AbstractValue) -> AbstractValue:
    """Return the abstract value of a dict with such values."""
    return AbstractValue(Kind.MAPPING, (item,))


def join(*values: AbstractValue) -> AbstractValue:
    """Return the abstract value of a variable that may hold any of these; PLAIN if there are none."""
    if not values:
        return PLAIN
    result = values[0]
    for value in values[1:]:
        result = _join_two(result, value)
    return result


def _join_two(one: AbstractValue, other: AbstractValue) -> AbstractValue:
    if one.kind is other.kind and len(one.items) == len(other.items):
        items = tuple(map(_join_two, one.items, other.items))
        return AbstractValue(one.kind, items, one.target if one.target is other.target else MISSING)
    if one.kind is Kind.EMPTY and other.kind in _FILLED:
        return other
    if other.kind is Kind.EMPTY and one.kind in _FILLED:
        return one
    if one.symbolic or other.symbolic or Kind.NODE in (one.kind, other.kind):
        return UNKNOWN
    return PLAIN


def combined(left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Return the abstract value of the result of a binary operator."""
    kinds = (left.kind, right.kind)
    if Kind.REF in kinds or Kind.RESULT in kinds:
        return REF
    if Kind.NODE in kinds or Kind.GRAPH in kinds:  # a >> b
        return NODE
    if left.kind is right.kind is Kind.SEQUENCE or Kind.EMPTY in kinds:
        return join(left, right)
    return UNKNOWN if left.symbolic or right.symbolic else PLAIN


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class SourceLocation(NamedTuple):
    """A function's syntax tree and the file, or notebook cell, that it was parsed from.

    Attributes:
        node: the function in the tree of the whole file.
        filename: the name of the file, as in the code object.
        lines: the lines of the whole file; `lines[0]` is line 1.
    """

    node: FunctionNode
    filename: str
    lines: list[str]


def locate(fn: FunctionType) -> SourceLocation | None:
    """Find the source of a function.

    Args:
        fn: a Python function or lambda, from a file or from anything that `linecache` knows (a notebook cell, a
            doctest, a zip file).

    Returns:
        The location; None if there is no source, or if the file has changed so that it has no such function there.
    """
    code = fn.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, fn.__globals__)
    try:
        functions = _functions_by_line("".join(lines))
    except (SyntaxError, ValueError):  # not Python, perhaps since an edit, or with a null byte in it
        return None
    found = [node for node in functions.get(code.co_firstlineno, ()) if _name(node) == code.co_name]
    if len(found) > 1:  # several lambdas on one line: columns tell them apart
        spans = set(code.co_positions())
        found = [node for node in found if isinstance(node, ast.Lambda) and _span(node.body) in spans]
    return SourceLocation(found[0], code.co_filename, lines) if len(found) == 1 else None


# Graphs are decorated module by module, so the tree of the last file is the one that is needed again.
@lru_cache(maxsize=2)
def _functions_by_line(source: str) -> dict[int, list[FunctionNode]]:
    """Return all functions by the first line of their code objects, which is that of the first decorator."""
    functions: dict[int, list[FunctionNode]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.setdefault(min([node.lineno, *(one.lineno for one in node.decorator_list)]), []).append(node)
        elif isinstance(node, ast.Lambda):
            functions.setdefault(node.lineno, []).append(node)
    return functions


def _name(node: FunctionNode) -> str:
    return "<lambda>" if isinstance(node, ast.Lambda) else node.name


def _span(node: ast.expr) -> tuple[int | None, int | None, int | None, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
