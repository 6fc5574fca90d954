"""The rules of the source check: which objects must not be used in a graph, and the remedy for each."""

import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Final, NamedTuple, cast

from .values import GRAPH, MISSING, NODE, PLAIN, UNKNOWN, AbstractValue, Kind, SourceLocation, join

COND: Final = "use ps.cond or ps.switch"
FALLBACK: Final = (
    "`except` becomes `fallback=` on the node, e.g. node.with_policy(fallback=...); `finally` goes inside a node"
)
WITH: Final = "open it with a @ps.resource, or do it inside a node"
MAP_EACH: Final = "use ps.map_each"
INSIDE: Final = "do it inside a node"
_PARALLEL = "just await each: nodes that do not need each other's results already run in parallel"
_TIMEOUT = "use `timeout_seconds=` on the node, e.g. node.with_policy(timeout_seconds=...), or on the call"
_SLEEP = "sleep inside a node"
_THREAD = 'use a node with runs_on="thread"'

_PACKAGE = __name__.partition(".")[0]
_CONTROL_FLOW = ("cond", "switch", "while_loop", "map_each", "fold")
_FOREIGN = ("asyncio", "_asyncio", "anyio", "trio")
_FOREIGN_REMEDIES: Final = {
    **dict.fromkeys(("gather", "wait", "as_completed", "create_task", "ensure_future"), _PARALLEL),
    **dict.fromkeys(("TaskGroup", "create_task_group", "open_nursery"), _PARALLEL),
    **dict.fromkeys(("timeout", "timeout_at", "wait_for", "fail_after", "fail_at"), _TIMEOUT),
    **dict.fromkeys(("move_on_after", "move_on_at", "CancelScope"), _TIMEOUT),
    **dict.fromkeys(("sleep", "sleep_until", "sleep_forever"), _SLEEP),
    **dict.fromkeys(("to_thread", "run_sync", "to_thread_run_sync"), _THREAD),
}
_WRAPPERS: tuple[type, ...] = (staticmethod, classmethod)
_LISTS: tuple[type, ...] = (list, tuple)
_BLIND_BUILTINS: Final = (isinstance, issubclass, type, callable, hasattr, id)


class Problem(NamedTuple):
    """A place in a body that cannot be traced, with the remedy."""

    filename: str
    line: int
    source: str
    wrong: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}: `{self.source}`: {self.wrong}; {self.remedy}"


class SourceRules:
    """Turns the objects that a body names into abstract values, and collects the problems that are found.

    Attributes:
        is_node: whether a call of an object gives a Ref.
        is_graph: whether a call of an object gives a structure of Refs.
        namespace: the globals of the graph; plain functions in it are interpreted as well.
        problems: the problems, by file, line and remedy, so that each is reported once.
        helpers: for each plain function interpreted so far, and the abstract values of its arguments: its result, and
            how often it used a symbolic value.
    """

    def __init__(
        self, is_node: Callable[[object], bool], is_graph: Callable[[object], bool], namespace: dict[str, object]
    ) -> None:
        self.is_node = is_node
        self.is_graph = is_graph
        self.namespace = namespace
        self.problems: dict[tuple[str, int, str], Problem] = {}
        self.helpers: dict[object, tuple[AbstractValue, int]] = {}

    def report(self, location: SourceLocation, node: ast.AST, wrong: str, remedy: str) -> None:
        """Note a problem at a statement or expression."""
        line: int = getattr(node, "lineno", location.node.lineno)
        problem = Problem(location.filename, line, location.lines[line - 1].strip(), wrong, remedy)
        self.problems.setdefault((location.filename, line, remedy), problem)

    def meaning(self, target: object) -> AbstractValue:
        """Return the abstract value of an object that a global or closure name refers to."""
        if isinstance(target, _WRAPPERS):
            target = cast("staticmethod[..., object]", target).__func__
        if self.is_graph(target):
            return GRAPH
        if is_control_flow(target) or _is_ours(target, ("apply",)):
            return AbstractValue(Kind.NODE, target=target)
        if self.is_node(target) and not inspect.isclass(target):
            return NODE
        return AbstractValue(Kind.PLAIN, target=target)

    def look_up(self, function: FunctionType, name: str) -> AbstractValue:
        """Return the abstract value of a name that a function uses but does not assign."""
        free = function.__code__.co_freevars
        if name in free and function.__closure__ is not None:
            try:
                return self.meaning(function.__closure__[free.index(name)].cell_contents)
            except ValueError:  # not assigned yet
                return UNKNOWN
        return self.meaning(function.__globals__.get(name, getattr(builtins, name, MISSING)))

    def imported(self, node: ast.Import | ast.ImportFrom, alias: ast.alias, function: FunctionType) -> AbstractValue:
        """Return the abstract value of a name that the function itself imports, if the module is loaded already."""
        if isinstance(node, ast.Import):
            module = alias.name if alias.asname else alias.name.partition(".")[0]
            return self.meaning(sys.modules.get(module, MISSING))
        package = function.__globals__.get("__package__") or ""
        name = "." * node.level + (node.module or "")
        module = resolve_name(name, package) if node.level == 0 or package else name
        return self.attribute(self.meaning(sys.modules.get(module, MISSING)), alias.name)

    def item(self, base: AbstractValue, key: object) -> AbstractValue:
        """Return the abstract value of an item of a plain container, e.g. of a table of nodes."""
        if not isinstance(base.target, (*_LISTS, dict)):
            return PLAIN
        held = cast("Mapping[object, object]", base.target)
        try:
            return self.meaning(held[key])
        except (LookupError, TypeError):
            return PLAIN

    def attribute(self, base: AbstractValue, name: str) -> AbstractValue:
        """Return the abstract value of an attribute, without running a property."""
        if base.kind is not Kind.PLAIN:
            return {Kind.REF: base, Kind.RESULT: base, Kind.UNKNOWN: base}.get(base.kind, PLAIN)
        if base.target is MISSING:
            return PLAIN
        if isinstance(base.target, ModuleType) and base.target.__name__.partition(".")[0] in _FOREIGN:
            return self.meaning(getattr(base.target, name, MISSING))  # anyio loads its names on first use
        return self.meaning(inspect.getattr_static(base.target, name, MISSING))

    def receiver(self, base: AbstractValue, name: str) -> list[AbstractValue]:
        """Return the receiver of a method in a list, to be put before its arguments; empty for a function."""
        stored = inspect.getattr_static(base.target, name, MISSING)
        is_bound = isinstance(stored, classmethod) or (
            isinstance(stored, FunctionType) and not isinstance(base.target, type | ModuleType)
        )
        return [base] if is_bound else []

    def element(self, base: AbstractValue) -> AbstractValue:
        """Return the abstract value of the items of `base`; a plain list of nodes has nodes as items."""
        if base.kind is Kind.PLAIN and isinstance(base.target, _LISTS):
            return join(*map(self.meaning, cast("Sequence[object]", base.target)))
        return base.element()


def is_control_flow(target: object) -> bool:
    """Whether it is `penstock.cond`, `switch`, `while_loop` or `map_each`, from any module of the package."""
    return _is_ours(target, _CONTROL_FLOW)


def _is_ours(target: object, names: tuple[str, ...]) -> bool:
    package = str(getattr(target, "__module__", "")).partition(".")[0]
    return package == _PACKAGE and isinstance(target, FunctionType) and target.__name__ in names


def foreign_name(value: AbstractValue) -> str | None:
    """Return the name of an object of another async library, e.g. `asyncio.gather`; None for any other object."""
    module = getattr(value.target, "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in _FOREIGN:
        return None
    name = getattr(value.target, "__qualname__", type(value.target).__qualname__)
    return f"{module.partition('.')[0].lstrip('_')}.{name}"


def foreign_remedy(name: str) -> str | None:
    """Return the remedy for a function that must not be called in a graph; None if a call is not an error by itself."""
    return _FOREIGN_REMEDIES.get(name.partition(".")[2])


def looks_at_identity(value: AbstractValue, arguments: int) -> bool:
    """Whether it is a built-in function that would look at the Ref instead of the value, e.g. `isinstance`."""
    return any(value.target is one for one in _BLIND_BUILTINS) and (value.target is not type or arguments == 1)
