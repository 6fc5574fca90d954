"""Abstract values of the names in the source of a graph, and the remedies for objects that must not be used in it."""

import builtins
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import FunctionType, ModuleType
from typing import Final, cast

MISSING: Final = object()
_PARALLEL: Final = "just await each: nodes that do not need each other's results already run in parallel"
_TIMEOUT: Final = "use `timeout_seconds=` on the node, e.g. node.with_policy(timeout_seconds=...), or on the call"
_FOREIGN: Final = ("asyncio", "_asyncio", "anyio", "trio")
_FOREIGN_REMEDIES: Final = {
    **dict.fromkeys(("gather", "wait", "as_completed", "create_task", "ensure_future"), _PARALLEL),
    **dict.fromkeys(("TaskGroup", "create_task_group", "open_nursery"), _PARALLEL),
    **dict.fromkeys(("timeout", "timeout_at", "wait_for", "fail_after", "fail_at"), _TIMEOUT),
    **dict.fromkeys(("move_on_after", "move_on_at", "CancelScope"), _TIMEOUT),
    **dict.fromkeys(("sleep", "sleep_until", "sleep_forever"), "sleep inside a node"),
    **dict.fromkeys(("to_thread", "run_sync", "to_thread_run_sync"), 'use a node with runs_on="thread"'),
}
_PACKAGE: Final = __name__.partition(".")[0]
CONTROL_FLOW: Final = ("cond", "switch", "while_loop", "map_each", "fold")


class Kind(Enum):
    """The kinds of abstract values: the kinds of objects that a variable will hold while the graph is traced."""

    PLAIN = auto()  # configuration: an ordinary object without a Ref in it
    UNKNOWN = auto()  # perhaps a Ref, or an object with Refs in it: never reported
    REF = auto()  # certainly a Ref: a parameter, or the result of a node
    RESULT = auto()  # the result of an inlined graph: a Ref, or a structure of Refs
    NODE = auto()  # calling it gives a REF
    GRAPH = auto()  # calling it gives a RESULT
    FUNCTION = auto()  # a function inside the graph; `target` is its syntax tree
    LIST = auto()  # an ordinary list, set or iterable; `items` are the different values in it
    DICT = auto()  # an ordinary dict; `items` are its different values
    TUPLE = auto()  # an ordinary tuple of `items`


@dataclass(frozen=True, slots=True)
class AbstractValue:
    """An abstract value.

    Attributes:
        kind: the kind of the value.
        items: for the three kinds of containers, the abstract values of the items.
        target: the object itself, if the name is a global or in the closure; `MISSING` otherwise.
    """

    kind: Kind
    items: tuple["AbstractValue", ...] = ()
    target: object = field(default=MISSING, compare=False)

    @property
    def is_ref(self) -> bool:
        """Whether the value is certainly symbolic: `is` or `isinstance` would look at a Ref instead of the value."""
        return self.kind in (Kind.REF, Kind.RESULT)

    @property
    def holds_ref(self) -> bool:
        """Whether the value is certainly symbolic, or certainly holds a symbolic value."""
        return self.is_ref or any(item.holds_ref for item in self.items)

    @property
    def symbolic(self) -> bool:
        """Whether the value is, holds or may be a Ref."""
        return self.is_ref or self.kind is Kind.UNKNOWN or any(item.symbolic for item in self.items)

    def element(self) -> "AbstractValue":
        """Return the abstract value of the items of this value."""
        if self.kind in (Kind.REF, Kind.LIST, Kind.TUPLE):
            return REF if self.kind is Kind.REF else join(self.items)
        return PLAIN if self.kind in (Kind.PLAIN, Kind.DICT) else UNKNOWN  # a dict gives its keys


PLAIN: Final = AbstractValue(Kind.PLAIN)
UNKNOWN: Final = AbstractValue(Kind.UNKNOWN)
REF: Final = AbstractValue(Kind.REF)


def join(values: Iterable[AbstractValue]) -> AbstractValue:
    """Return the abstract value of a variable that may hold any of these values; PLAIN without values."""
    first, *others = values = tuple(values) or (PLAIN,)
    if all(other == first for other in others):
        is_one = all(other.target is first.target for other in others)
        return first if is_one else AbstractValue(first.kind, first.items)
    kinds, lengths = {value.kind for value in values}, {len(value.items) for value in values}
    if kinds == {Kind.TUPLE} and len(lengths) == 1:
        return AbstractValue(Kind.TUPLE, tuple(map(join, zip(*(value.items for value in values), strict=True))))
    if kinds in ({Kind.LIST}, {Kind.DICT}):
        return AbstractValue(first.kind, tuple(dict.fromkeys(item for value in values for item in value.items)))
    return UNKNOWN if Kind.NODE in kinds or any(value.symbolic for value in values) else PLAIN


class Names:
    """The abstract values of the names in a body, and the problems that were found.

    Attributes:
        is_node: returns whether a call of an object gives a Ref.
        is_graph: returns whether a call of an object gives a structure of Refs.
        namespace: the globals of the graph; plain functions in it are interpreted as well.
        problems: the lines of the message, by file, line and remedy, so that each problem is reported once.
        helpers: the plain functions interpreted so far. The keys are a function and the abstract values of its
            arguments; the values are its result and how often it used a symbolic value.
    """

    def __init__(
        self, is_node: Callable[[object], bool], is_graph: Callable[[object], bool], namespace: dict[str, object]
    ) -> None:
        self.is_node = is_node
        self.is_graph = is_graph
        self.namespace = namespace
        self.problems: dict[tuple[str, int, str], str] = {}
        self.helpers: dict[object, tuple[AbstractValue, int]] = {}

    def meaning(self, target: object) -> AbstractValue:
        """Return the abstract value of an object that a global or closure name refers to."""
        if isinstance(target, staticmethod | classmethod):
            target = cast("staticmethod[..., object]", target).__func__
        kind = Kind.PLAIN
        if self.is_graph(target):
            kind = Kind.GRAPH
        elif is_ours(target, (*CONTROL_FLOW, "apply")) or (self.is_node(target) and not inspect.isclass(target)):
            kind = Kind.NODE
        return AbstractValue(kind, target=target)

    def look_up(self, function: FunctionType, name: str) -> AbstractValue:
        """Return the abstract value of a name that a function uses but does not assign."""
        free = function.__code__.co_freevars
        if name in free and function.__closure__ is not None:
            try:
                return self.meaning(function.__closure__[free.index(name)].cell_contents)
            except ValueError:  # not assigned yet
                return UNKNOWN
        return self.meaning(function.__globals__.get(name, getattr(builtins, name, MISSING)))

    def attribute(self, base: AbstractValue, name: str) -> AbstractValue:
        """Return the abstract value of an attribute, without running a property."""
        if base.is_ref or base.kind is Kind.UNKNOWN:
            return base
        if base.kind is not Kind.PLAIN or base.target is MISSING:
            return PLAIN
        if isinstance(base.target, ModuleType) and base.target.__name__.partition(".")[0] in _FOREIGN:
            return self.meaning(getattr(base.target, name, MISSING))  # anyio loads its names on first use
        return self.meaning(inspect.getattr_static(base.target, name, MISSING))

    def item(self, base: AbstractValue, key: object) -> AbstractValue:
        """Return the abstract value of an item of a plain container, e.g. of a table of nodes."""
        held: object = base.target
        if type(held) not in (list, tuple, dict):
            return PLAIN
        try:
            return self.meaning(cast("Mapping[object, object]", held)[key])
        except (LookupError, TypeError):
            return PLAIN

    def element(self, base: AbstractValue) -> AbstractValue:
        """Return the abstract value of the items of `base`; a plain list of nodes has nodes as items."""
        held: object = base.target
        if base.kind is Kind.PLAIN and isinstance(held, list | tuple):
            return join(map(self.meaning, cast("Sequence[object]", held)))
        return base.element()


def is_ours(target: object, names: tuple[str, ...]) -> bool:
    """Whether an object is a function of this package with one of these names, such as `penstock.cond`."""
    package = str(getattr(target, "__module__", "")).partition(".")[0]
    return package == _PACKAGE and isinstance(target, FunctionType) and target.__name__ in names


def foreign_of(value: AbstractValue) -> tuple[str | None, str | None]:
    """Return the name of an object of another async library, e.g. `asyncio.gather`, and the remedy for calling it."""
    module = getattr(value.target, "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in _FOREIGN:
        return None, None
    name = getattr(value.target, "__qualname__", type(value.target).__qualname__)
    return f"{module.partition('.')[0].lstrip('_')}.{name}", _FOREIGN_REMEDIES.get(name)
