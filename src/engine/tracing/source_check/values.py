"""What the source check knows about a value before anything runs: is it symbolic, or may it be, or what is in it?"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

MISSING: Final = object()


class Kind(Enum):
    """What a value will be while the graph is traced."""

    PLAIN = auto()  # configuration: an ordinary object without a Ref in it
    UNKNOWN = auto()  # a Ref, or an object that may hold Refs, or neither: never reported
    REF = auto()  # surely a Ref: a parameter, or what a node returned
    RESULT = auto()  # what an inlined graph returned: a Ref, or the structure of Refs that it built
    NODE = auto()  # calling it gives a REF
    GRAPH = auto()  # calling it gives a RESULT
    EMPTY = auto()  # an empty list, set or dict
    SEQUENCE = auto()  # an ordinary list, set or iterable of `items[0]`
    MAPPING = auto()  # an ordinary dict with values `items[0]`
    TUPLE = auto()  # an ordinary tuple of `items`


@dataclass(frozen=True, slots=True)
class Value:
    """An abstract value.

    Attributes:
        kind: what it will be.
        items: what is in it, for the three kinds of containers.
        target: the object itself, where the name that gave it is a global or in the closure; else `MISSING`.
    """

    kind: Kind
    items: tuple["Value", ...] = ()
    target: object = field(default=MISSING, compare=False)

    @property
    def symbolic(self) -> bool:
        """Whether it is, holds or may be a Ref."""
        return self.kind in _SYMBOLIC or any(item.symbolic for item in self.items)

    @property
    def unseen(self) -> bool:
        """Whether `is` or `isinstance` on it would silently ask about a Ref instead of the value."""
        return self.kind in (Kind.REF, Kind.RESULT)

    @property
    def holds_unseen(self) -> bool:
        """Whether it is one of those, or surely holds one."""
        return self.unseen or any(item.holds_unseen for item in self.items)

    def element(self) -> "Value":
        """What iterating over it gives."""
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

    def unpack(self, length: int) -> list["Value"]:
        """What assigning it to `length` targets gives each of them."""
        if self.kind is Kind.TUPLE and len(self.items) == length:
            return list(self.items)
        return [self.element()] * length


PLAIN: Final = Value(Kind.PLAIN)
UNKNOWN: Final = Value(Kind.UNKNOWN)
REF: Final = Value(Kind.REF)
RESULT: Final = Value(Kind.RESULT)
NODE: Final = Value(Kind.NODE)
GRAPH: Final = Value(Kind.GRAPH)
EMPTY: Final = Value(Kind.EMPTY)
_SYMBOLIC = (Kind.REF, Kind.RESULT, Kind.UNKNOWN)
_FILLED = (Kind.SEQUENCE, Kind.MAPPING)


def sequence(item: Value) -> Value:
    """A list of such items."""
    return Value(Kind.SEQUENCE, (item,))


def mapping(item: Value) -> Value:
    """A dict with such values."""
    return Value(Kind.MAPPING, (item,))


def join(*values: Value) -> Value:
    """What is known of something that may be any of these; nothing at all gives PLAIN."""
    if not values:
        return PLAIN
    result = values[0]
    for value in values[1:]:
        result = _join_two(result, value)
    return result


def _join_two(one: Value, other: Value) -> Value:
    if one.kind is other.kind and len(one.items) == len(other.items):
        items = tuple(map(_join_two, one.items, other.items))
        return Value(one.kind, items, one.target if one.target is other.target else MISSING)
    if one.kind is Kind.EMPTY and other.kind in _FILLED:
        return other
    if other.kind is Kind.EMPTY and one.kind in _FILLED:
        return one
    if one.symbolic or other.symbolic or Kind.NODE in (one.kind, other.kind):
        return UNKNOWN
    return PLAIN


def combined(left: Value, right: Value) -> Value:
    """The result of an operator."""
    kinds = (left.kind, right.kind)
    if Kind.REF in kinds or Kind.RESULT in kinds:
        return REF
    if Kind.NODE in kinds or Kind.GRAPH in kinds:  # a >> b
        return NODE
    if left.kind is right.kind is Kind.SEQUENCE or Kind.EMPTY in kinds:
        return join(left, right)
    return UNKNOWN if left.symbolic or right.symbolic else PLAIN
