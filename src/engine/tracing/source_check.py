"""Check the source of a graph for statements that would make its trace silently wrong.

A Ref raises when it is compared, tested for truth, iterated over or changed. But a Ref cannot notice that it is used in
a `try`, that `is` compares its identity, or that `isinstance` looks at its class: the trace would be silently wrong. So
the body is read when the graph is decorated. A use is only reported if the value is certainly symbolic.

The source is read once, in order. A value is the object itself where a name outside the function tells it. Otherwise,
a value is a `Kind`, a container of values, or None for an object without a Ref in it. A variable that two branches
leave with unlike values counts as unknown. The body of a loop is read twice, for values of the round before.
"""

import ast
import builtins
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from itertools import islice, repeat
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, cast

from ..._errors import GraphTraceError
from ...telemetry import logs
from .references import MISSING, cell_contents
from .source import FunctionNode, SourceLocation, locate

# ast.NodeVisitor chooses the names of these methods, and the syntax is their documentation.
# ruff: noqa: N815

_COND: Final = "use ps.cond or ps.switch"
_FALLBACK: Final = (
    "`except` becomes `fallback=` on the node, e.g. node.with_policy(fallback=...); `finally` goes inside a node"
)
_WITH: Final = "open it with a @ps.resource, or do it inside a node"
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
_CONTROL_FLOW: Final = ("cond", "switch", "while_loop", "map_each", "fold")
_CONTAINERS: Final = (list, tuple, dict, set, deque)  # other classes may have code of their own
_FUNCTIONS: Final = (FunctionType, staticmethod, classmethod)
_MAX_ITEMS: Final = 100  # how many items of a container in a global are read
_MAX_OPERATION: Final = 50  # the longest operation, in characters, that a message shows
_NOT_IN_A_LAMBDA: Final = (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Starred)

# By identity, because a comparison would run the user's code.
_BLIND_BUILTINS: Final = set(map(id, (isinstance, type, callable, hasattr, id)))
_COPIES: Final = set(map(id, (list, tuple, set, frozenset, sorted, reversed, iter, zip, enumerate)))
_ADDERS: Final = ("add", "append", "appendleft", "insert", "setdefault", "extend", "extendleft", "update")


class Kind(Enum):
    """The values that are known by their kind only."""

    MAYBE = auto()  # perhaps a Ref, or an object with Refs in it: never reported
    REF = auto()  # certainly a Ref: a parameter, or the result of a node
    RESULT = auto()  # the result of an inlined graph: a Ref, or a structure of Refs
    NODE = auto()  # a call of it gives a REF
    GRAPH = auto()  # a call of it gives a RESULT


@dataclass(eq=False)
class Container:
    """A container.

    Attributes:
        type: `tuple`, whose items stay in place; `dict`, with its values; or `list`, also for sets and iterables.
        values: the values of the items.
        outlives: whether the container is in a global, a closure or an attribute, so that it outlives the trace.
    """

    type: type
    values: list[object]
    outlives: bool = False


_REFS: Final = (Kind.REF, Kind.RESULT)
_SYMBOLIC: Final = (Kind.REF, Kind.RESULT, Kind.MAYBE)


def check_source(
    fn: Callable[..., object],
    *,
    is_node: Callable[[object], bool],
    is_graph: Callable[[object], bool] = lambda _: False,
) -> None:
    """Check the body of a graph, or of a body of control flow, for statements that a trace cannot represent.

    The functions inside the body are checked as well, and the plain functions of the same module that it calls, because
    their bodies run while tracing. Names are looked up now. A name that is not bound yet counts as unknown; the check
    before the first trace knows more names.

    Args:
        fn: a function, lambda or bound method; other objects have no source and are not checked. The first parameter
            of a method is configuration, all other parameters are symbolic.
        is_node: returns whether a call of an object gives a Ref, as a call of a node does; also true for the class of a
            stateful node.
        is_graph: returns whether an object is a graph, whose call gives a structure of Refs; `is_node` may also be true
            for a graph.

    Raises:
        GraphTraceError: the body has such statements; the message has a line for each statement, with file, line,
            source and remedy.
    """
    function = inspect.unwrap(getattr(fn, "__func__", fn))
    if not isinstance(function, FunctionType):
        return
    location = locate(function)
    if location is None:
        code = function.__code__
        _warn_of(f"{function.__module__}.{function.__qualname__}", code.co_filename, code.co_firstlineno)
        return
    reader = _Reader(is_node, is_graph)
    # A lambda is a body, and control flow passes no argument that has a default.
    defaults = repeat(None if isinstance(location.node, ast.Lambda) else Kind.REF)
    variables = _parameters(location.node, Kind.REF, defaults)
    if isinstance(fn, MethodType):
        variables[next(iter(variables), "")] = fn.__self__
    reader.read_function(function, location, variables)
    texts: dict[tuple[str, int, str], str] = {}
    for place, text in reader.problems:
        texts.setdefault(place, text)
    if texts:
        listed = [texts[place] for place in sorted(texts, key=lambda place: place[:2])]
        raise GraphTraceError("\n".join((f"{function.__qualname__} cannot be traced:", *listed)))


@cache  # by place in the source, so that a factory of graphs causes one warning
def _warn_of(function: str, file: str, line: int) -> None:
    consequence = "`try`, `with`, `is`, `match` and `isinstance` on symbolic values go unnoticed"
    logs.warning("graph.source_unavailable", function=function, file=file, consequence=consequence)


class _Reader(ast.NodeVisitor):
    """Reads the body of a function; a copy reads a function inside of it, or a plain function that it calls.

    Attributes:
        is_node, is_graph: see `check_source`.
        problems: the lines of the message, each with its file, line and remedy; the same problem may be found again.
        results: the result of each plain function that was read, by the function and the shapes of its arguments;
            with its uses of symbolic values, and with the arguments, so that their identities stay unique.
        touches: the uses of symbolic values.
        functions: the function, after the graph and the plain functions around its call.
        location: the source of the function.
        outside: the names in the closure of the function, in its module and in the builtins.
        assigned: all variables, with the variables of the functions inside.
        variables: the value of each variable at this point.
        declared_outer: the names under `global` or `nonlocal`.
        returned: the values that the function has returned so far.
    """

    location: SourceLocation
    outside: dict[str, object]
    assigned: set[str]
    variables: dict[str, object]
    declared_outer: set[str]
    returned: list[object]

    def __init__(self, is_node: Callable[[object], bool], is_graph: Callable[[object], bool]) -> None:
        self.is_node = is_node
        self.is_graph = is_graph
        self.problems: list[tuple[tuple[str, int, str], str]] = []
        self.results: dict[object, tuple[object, list[ast.expr], object]] = {}
        self.touches: list[ast.expr] = []
        self.functions: tuple[FunctionType, ...] = ()

    def read_function(self, function: FunctionType, location: SourceLocation, variables: dict[str, object]) -> object:
        """Read a function with these values of its parameters; return the value of its result."""
        reader = copy(self)
        reader.functions = (*self.functions, function)
        reader.location = location
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: cell_contents(cell) for name, cell in cells}
        reader.outside = {**vars(builtins), **function.__globals__, **closure}
        reader.assigned = {
            one.arg if isinstance(one, ast.arg) else one.id
            for one in ast.walk(location.node)
            if isinstance(one, ast.arg) or (isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        }
        return reader.read(location.node, variables)

    def read(self, node: FunctionNode, variables: dict[str, object]) -> object:
        """Read the body of a function; return the value of its result."""
        self.variables, self.declared_outer, self.returned = variables, set(), []
        if isinstance(node, ast.Lambda):
            return self.value(node.body)
        self.block(node.body)
        return _join(self.returned if isinstance(node.body[-1], ast.Return | ast.Raise) else [*self.returned, None])

    def read_inside(self, node: FunctionNode, value: object) -> None:
        """Read a function inside of this function, with this value for each parameter that has no default."""
        defaults = self.values([*node.args.defaults, *filter(None, node.args.kw_defaults)])
        copy(self).read(node, self.variables | _parameters(node, value, defaults))

    def meaning(self, target: object) -> object:
        """Return the value of an object that has a name outside the function."""
        if (kind := type(target)) in _CONTAINERS:
            items = cast("dict[object, object]", target).values() if kind is dict else cast("list[object]", target)
            values = [one if type(one) in _CONTAINERS else self.meaning(one) for one in islice(items, _MAX_ITEMS)]
            return Container(kind, values, outlives=True)
        if self.is_graph(target):
            return Kind.GRAPH
        return Kind.NODE if self.is_node(target) and not inspect.isclass(target) else target

    def attribute(self, base: object, name: str) -> object:
        """Return the value of an attribute, without running a property."""
        if base is None or isinstance(base, Kind | Container | ast.AST):
            return base if _is(base, _SYMBOLIC) else None
        if isinstance(base, ModuleType):  # anyio loads its names on first use
            is_foreign = base.__name__.partition(".")[0] in _FOREIGN
            return self.meaning(getattr(base, name, None) if is_foreign else vars(base).get(name))
        stored: Any = inspect.getattr_static(base, name, MISSING)
        if isinstance(base, type):
            stored = stored.__get__(None, base) if type(stored) in _FUNCTIONS else stored
        elif type(stored) in _FUNCTIONS and stored is inspect.getattr_static(type(base), name, None):
            stored = stored.__get__(base)
        return self.meaning(stored)

    def elements(self, value: object) -> object:
        """Return the value of the items that an iteration gives."""
        if isinstance(value, Container):
            return None if value.type is dict else self.meaning(_join(value.values))  # a dict gives its keys
        return Kind.MAYBE if value is Kind.RESULT else value if _is(value, _SYMBOLIC) else None

    def value(self, node: ast.expr) -> object:
        """Return the value of an expression, and report the problems in it."""
        value = self.visit(node)
        if _is(value, _REFS):
            self.touches.append(node)
        return value

    def values(self, nodes: Iterable[ast.expr]) -> list[object]:
        return [self.value(node) for node in nodes]

    def generic_visit(self, node: ast.AST) -> object:
        values = self.values(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        return Kind.MAYBE if _holds(values, _SYMBOLIC) else None

    def visit_Name(self, node: ast.Name) -> object:
        if node.id in self.variables or node.id in self.assigned - self.declared_outer:
            return self.variables.get(node.id, Kind.MAYBE)
        target = self.outside.get(node.id)
        return Kind.MAYBE if target is MISSING else self.meaning(target)  # a variable of a closure, assigned later

    def visit_Attribute(self, node: ast.Attribute) -> object:
        return self.attribute(self.value(node.value), node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> object:
        base, _ = self.value(node.value), self.value(node.slice)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if base is None or isinstance(base, Kind | ast.AST):
            return base if _is(base, _SYMBOLIC) else None
        if not isinstance(base, Container):
            return MISSING  # an object that outlives the trace
        if isinstance(node.slice, ast.Slice):
            return Container(list, [*base.values])
        is_place = base.type is tuple and isinstance(key, int) and key < len(base.values)
        item = self.meaning(base.values[cast("int", key)] if is_place else _join(base.values))
        return MISSING if item is None and base.outlives else item

    def visit_Await(self, node: ast.Await) -> object:
        value = self.value(node.value)
        self.touches.append(node)
        foreign, remedy = _foreign_of(value)
        if foreign and not remedy:
            self.report(node, f"awaits {foreign} while tracing, not for each item", "do it inside a node")
        return value if isinstance(value, Kind | Container) else Kind.MAYBE

    def visit_Starred(self, node: ast.Starred) -> object:
        return self.elements(self.value(node.value))

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> object:
        is_tuple = isinstance(node, ast.Tuple) and not any(isinstance(item, ast.Starred) for item in node.elts)
        return Container(tuple if is_tuple else list, self.values(node.elts))

    visit_List = visit_Set = visit_Tuple

    def visit_Dict(self, node: ast.Dict) -> object:
        self.values(filter(None, node.keys))
        values = self.values(node.values)
        return Container(dict, [Kind.MAYBE] if None in node.keys else values)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> object:
        reader = copy(self)
        reader.variables = self.variables.copy()
        for generator in node.generators:
            construct = "an async comprehension" if generator.is_async else "a comprehension"
            reader.bind(generator.target, reader.iterated(node, generator.iter, construct))
            for condition in generator.ifs:
                reader.truth(condition, "`if`")
        if isinstance(node, ast.DictComp):
            reader.value(node.key)
            return Container(dict, [reader.value(node.value)])
        return Container(list, [reader.value(node.elt)])

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_IfExp(self, node: ast.IfExp) -> object:
        self.truth(node.test, "a conditional expression")
        return _join(self.values((node.body, node.orelse)))

    def visit_BoolOp(self, node: ast.BoolOp) -> object:
        word = "`and`" if isinstance(node.op, ast.And) else "`or`"
        return _join([*(self.truth(one, word, node) for one in node.values[:-1]), self.value(node.values[-1])])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> object:
        if not isinstance(node.op, ast.Not):
            return self.value(node.operand)
        self.truth(node.operand, "`not`", node)
        return None

    def visit_BinOp(self, node: ast.BinOp | ast.AugAssign) -> object:
        """Return the value of the result of an operator: of `+` between lists, or of `>>` between nodes."""
        left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        values = self.values((left, right))
        if any(_is(value, _REFS) for value in values):
            return Kind.REF
        return Kind.NODE if any(_is(value, (Kind.NODE, Kind.GRAPH)) for value in values) else _join(values)

    def visit_Compare(self, node: ast.Compare) -> object:
        operands, result = [node.left, *node.comparators], None
        refs = [operand for operand in operands if _is(self.value(operand), _REFS)]
        for operator, *pair in zip(node.ops, operands, operands[1:], strict=False):
            blind = [operand for operand in pair if operand in refs]
            if blind and isinstance(operator, ast.Is | ast.IsNot):
                self.report_blind("`is`", blind[0], node)
            elif pair[0] in refs and isinstance(operator, ast.In | ast.NotIn):
                self.report_blind("`in`", pair[0], node)
            elif blind:
                result = Kind.REF
        return result

    def visit_Call(self, node: ast.Call) -> object:
        base: object = None
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            callee = self.attribute(base, node.func.attr)
        else:
            callee = self.value(node.func)
        arguments = self.values(node.args)
        keywords = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        passed = [*arguments, *keywords.values()]
        if is_symbolic := _holds(passed, _SYMBOLIC):
            self.touches.append(node)
        if _is_ours(callee, _CONTROL_FLOW):
            self.read_bodies(passed)
        if _is(callee, (Kind.NODE, Kind.REF)) or _is_ours(callee, (*_CONTROL_FLOW, "apply")):
            return Kind.REF
        if _is(callee, (Kind.GRAPH, Kind.RESULT)):
            return Kind.RESULT
        foreign, remedy = _foreign_of(callee)
        if remedy:
            self.report(node, f"{foreign} would act while tracing, not on each item", remedy)
        if foreign and not inspect.isclass(callee):
            return callee  # so that an `await` of the result is noticed
        is_blind = id(callee) in _BLIND_BUILTINS and (callee is not type or len(arguments) == 1)
        if is_blind and arguments and _is(arguments[0], _REFS):
            self.report_blind(_named(node.func), node.args[0], node)
        known = self.plain(node, base, callee, arguments, keywords)
        is_unknown = is_symbolic or callee is Kind.MAYBE or isinstance(callee, FunctionNode)
        return Kind.MAYBE if known is None and is_unknown else known

    def plain(
        self,
        node: ast.Call,
        base: object,
        callee: object,
        arguments: list[object],
        keywords: dict[str | None, object],
    ) -> object:
        """Return the result of a call that is no step; None if unknown."""
        if isinstance(node.func, ast.Attribute) and isinstance(base, (Kind, Container, *_CONTAINERS, type(None))):
            return self.method(node.func, cast("object", base), arguments)
        if inspect.isclass(callee) and self.is_node(callee):
            return Kind.NODE
        known = self.built_in(callee, arguments)
        if known is None and not any(isinstance(one, ast.Starred) for one in node.args):
            known = self.helper(callee, arguments, keywords)
        return known

    def read_bodies(self, values: Iterable[object]) -> None:
        """Read the functions that are passed to control flow: their parameters are symbolic."""
        for value in values:
            if isinstance(value, Container):
                self.read_bodies(value.values)
            elif isinstance(value, FunctionNode):
                self.read_inside(value, Kind.REF)

    def built_in(self, function: object, arguments: list[object]) -> object:
        """Return the result of a built-in function that passes items on; None for another function."""
        elements: list[object] = [*map(self.elements, arguments)]
        if function is getattr and arguments and _is(arguments[0], _REFS):
            return arguments[0]
        if function is zip:
            elements = [Container(tuple, elements)]
        if function is enumerate:
            elements = [Container(tuple, [None, *elements])]
        if function is dict:
            return Container(dict, [Kind.MAYBE for _ in arguments])
        return Container(list, elements[:1]) if id(function) in _COPIES else None

    def method(self, function: ast.Attribute, base: object, arguments: list[object]) -> object:
        """Return the result of a method of a container, or a copy of a node; None if unknown."""
        name = function.attr
        if _is(base, (Kind.NODE, Kind.GRAPH)):
            return base if name in ("with_policy", "named") else None
        if arguments and name in _ADDERS:
            is_whole = name in ("extend", "extendleft", "update")
            self.store(function.value, self.elements(arguments[0]) if is_whole else arguments[-1])
        if not isinstance(base, Container):
            return None
        item = _join(base.values)
        if base.type is dict and name in ("values", "items"):
            return Container(list, [*base.values] if name == "values" else [Container(tuple, [None, item])])
        if base.type is list and name in ("pop", "popleft"):  # pop() of a dict may give a default
            return item
        return Container(base.type, [*base.values]) if name == "copy" else None

    def helper(self, function: object, arguments: list[object], keywords: dict[str | None, object]) -> object:
        """Return the result of a plain function of the same module, whose body runs while tracing; None if unknown.

        The function is read once for the same shapes of its arguments.
        """
        if isinstance(function, MethodType):
            arguments = [function.__self__, *arguments]
            function = cast("object", function.__func__)
        if not isinstance(function, FunctionType) or function.__globals__ is not self.functions[0].__globals__:
            return None
        location, parameters = locate(function), function.__code__.co_varnames[: function.__code__.co_argcount]
        if location is None or function in self.functions or None in keywords or len(arguments) > len(parameters):
            return None
        given = dict(zip(parameters, arguments, strict=False)) | cast("dict[str, object]", keywords)
        call = function, _shape(given.values())
        if call not in self.results:
            before = len(self.touches)
            result = self.read_function(
                function, location, _parameters(location.node, Kind.MAYBE, repeat(None)) | given
            )
            result = Kind.MAYBE if inspect.isgeneratorfunction(function) else result
            self.results[call] = result, self.touches[before:], given
        result, touches, _ = self.results[call]
        self.touches += touches
        return result

    def bind(self, target: ast.expr, value: object) -> None:
        """Assign a value to a variable, or to several, or into an object."""
        match target:
            case ast.Name(name):
                if name in self.declared_outer and (len(self.functions) == 1 or _holds([value], _SYMBOLIC)):
                    wrong = f"assigns `{name}` outside the function once, while tracing, and not for each item"
                    self.report(target, wrong, "return the value instead")
                self.variables[name] = value
            case ast.Tuple(targets) | ast.List(targets):
                values = value.values if isinstance(value, Container) and value.type is tuple else []
                values = values if len(values) == len(targets) else [self.elements(value)] * len(targets)
                for one, item in zip(targets, values, strict=True):
                    self.bind(one, item)
            case ast.Starred(inner):
                self.bind(inner, Container(list, [value]))
            case ast.Attribute(base):
                self.store(base, value)
            case ast.Subscript(base, index):
                self.value(index)
                self.store(base, value)
            case _:
                pass

    def store(self, place: ast.expr, value: object) -> None:
        """Put a value into an object; an object that outlives the trace must not hold a symbolic value."""
        base = self.value(place)
        if isinstance(base, Container) and not base.outlives:
            base.values.append(_flat(value))
        elif base is None and isinstance(place, ast.Name) and _holds([value], _SYMBOLIC):
            self.variables[place.id] = Kind.MAYBE
        elif not (base is None or isinstance(base, Kind | ast.AST) or _foreign_of(base)[0]) and _holds([value], _REFS):
            wrong = f"stores a symbolic value in {_named(place)}, which outlives the trace"
            self.report(place, wrong, "return the value, or store it inside a node")

    def report(self, node: ast.expr | ast.stmt, wrong: str, remedy: str) -> None:
        """Note a problem at a statement or expression."""
        file, line = self.location.filename, node.lineno
        text = f"{file}:{line}: `{self.location.lines[line - 1].strip()}`: {wrong}; {remedy}"
        self.problems.append(((file, line, remedy), text))

    def report_blind(self, word: str, operand: ast.expr, whole: ast.expr) -> None:
        """Report an operation that looks at a Ref."""
        wrong = f"{word} would look at the symbolic value {_named(operand)}, not at an item"
        self.report(whole, wrong, self.or_applied(_COND, whole, ast.unparse(whole)))

    def truth(self, node: ast.expr, construct: str, whole: ast.expr | None = None, remedy: str = "") -> object:
        """Return the value of an expression whose truth is tested, and report it if it is symbolic.

        Args:
            node: the expression.
            construct: the construct that tests the expression, for the message.
            whole: the expression around it that tests it and has a value of its own, such as `not x`; None otherwise.
            remedy: the text to write instead; empty for a branch, or a step.
        """
        value = self.value(node)
        if value is Kind.REF:
            step = whole or node
            text = ast.unparse(step)
            operation = (
                text if isinstance(step, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.BinOp) else f"bool({text})"
            )
            remedy = remedy or self.or_applied(_COND, step, operation)
            self.report(node, f"{construct} on the symbolic value {_named(node)}", remedy)
        return value

    def iterated(self, node: ast.expr | ast.stmt, iterable: ast.expr, construct: str) -> object:
        """Return the value of the items of an iterable, and report it if it is symbolic."""
        value = self.value(iterable)
        if value is Kind.REF:
            is_whole = isinstance(node, ast.expr) and not isinstance(node, ast.GeneratorExp)
            text = ast.unparse(node) if is_whole else f"[item for item in {ast.unparse(iterable)}]"
            remedy = self.or_applied(
                "use ps.map_each", node if isinstance(node, ast.expr) and is_whole else iterable, text
            )
            remedy = "write a node that takes the AsyncIterator" if "async" in construct else remedy
            self.report(node, f"{construct} over the symbolic value {_named(iterable)}", remedy)
        return self.elements(value)

    def or_applied(self, remedy: str, node: ast.expr, operation: str) -> str:
        """Return a remedy with a second remedy: a step with `ps.apply`, written out if a lambda can do the operation.

        Args:
            remedy: the remedy.
            node: the expression whose variables the operation needs.
            operation: the source of the operation.
        """
        parts = [*ast.walk(node)]
        own = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        names = dict.fromkeys(part.id for part in parts if isinstance(part, ast.Name) and part.id not in own)
        taken = ", ".join(name for name in names if _holds([self.variables.get(name)], _SYMBOLIC))
        calls = self.values(part.func for part in parts if isinstance(part, ast.Call))
        if _holds(calls, (Kind.NODE, Kind.GRAPH)) or any(isinstance(part, _NOT_IN_A_LAMBDA) for part in parts):
            taken = ""
        if not taken or len(operation) > _MAX_OPERATION:
            taken, operation = taken or "value", "..."
        return f"{remedy}; an operation of one line is a step with ps.apply(lambda {taken}: {operation}, {taken})"

    def visit_Lambda(self, node: ast.Lambda) -> object:
        self.read_inside(node, Kind.MAYBE)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.variables[node.name] = Kind.MAYBE
        if not node.decorator_list:  # a decorated function is a separate node or graph, or unknown
            self.read_inside(node, Kind.MAYBE)
            self.variables[node.name] = node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.variables[node.name] = Kind.MAYBE

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def branches(self, *blocks: Sequence[ast.stmt]) -> None:
        """Read blocks of which one runs, and join the variables that they leave."""
        before, after = self.variables, list[dict[str, object]]()
        for statements in blocks:
            self.variables = before.copy()
            self.block(statements)
            after.append(self.variables)
        names = dict.fromkeys(name for left in after for name in left)
        self.variables = {name: _join([left[name] for left in after if name in left]) for name in names}

    def visit_Return(self, node: ast.Return) -> None:
        self.returned.append(self.value(node.value) if node.value else None)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> object:
        if not node.value:  # an annotation without a value
            return None
        value = self.value(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
            self.bind(target, value)
        return value

    visit_AnnAssign = visit_NamedExpr = visit_Assign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.bind(node.target, self.visit_BinOp(node))

    def visit_Assert(self, node: ast.Assert) -> None:
        self.truth(node.test, "`assert`", remedy="check it inside a node, which may raise")

    def visit_If(self, node: ast.If) -> None:
        self.truth(node.test, "`if`")
        self.branches(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.truth(node.test, "`while`", remedy="use ps.while_loop")
        self.branches([], [*node.body, *node.body])
        self.block(node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        item = self.iterated(node, node.iter, "`for`" if isinstance(node, ast.For) else "`async for`")
        for _ in range(2):
            self.bind(node.target, item)
            self.branches([], node.body)
        self.block(node.orelse)

    visit_AsyncFor = visit_For

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        known, before = len(self.problems), len(self.touches)
        for item in node.items:
            manager = self.value(item.context_expr)
            foreign, remedy = _foreign_of(manager)
            if foreign and isinstance(node, ast.AsyncWith) and not remedy:
                self.report(node, f"{foreign} would be entered while tracing, not for each item", _WITH)
            if item.optional_vars:
                self.bind(item.optional_vars, Kind.MAYBE if _holds([manager], _SYMBOLIC) else None)
        self.block(node.body)
        if len(self.touches) > before and len(self.problems) == known:
            self.report(node, "`with` would be left before any node runs", _WITH)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        before = len(self.touches)
        self.block(node.body)
        if len(self.touches) > before:
            self.report(node, "`try` would be left before any node runs and could not catch its error", _FALLBACK)
        self.variables |= {handler.name: None for handler in node.handlers if handler.name}
        self.branches(node.orelse, *(handler.body for handler in node.handlers))
        self.block(node.finalbody)

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        if _holds([self.value(node.subject)], _REFS):
            self.report(node, f"`match` would see the symbolic value {_named(node.subject)}, not an item", _COND)
        patterns = [pattern for case in node.cases for pattern in ast.walk(case.pattern)]
        names = [getattr(pattern, "name", None) or getattr(pattern, "rest", None) for pattern in patterns]
        self.variables |= {name: Kind.MAYBE for name in names if isinstance(name, str)}
        for guard in filter(None, [case.guard for case in node.cases]):
            self.truth(guard, "`case ... if`")
        self.branches([], *(case.body for case in node.cases))

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.declared_outer.update(node.names)

    visit_Nonlocal = visit_Global

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            module = sys.modules.get(alias.name if alias.asname else top)  # nothing is imported here
            self.variables[alias.asname or top] = None if module is None else self.meaning(module)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = None if node.level else sys.modules.get(node.module or "")
        for alias in node.names:
            self.variables[alias.asname or alias.name] = module and self.attribute(module, alias.name)


def _is(value: object, kinds: tuple[Kind, ...]) -> bool:
    return isinstance(value, Kind) and value in kinds


def _holds(values: Iterable[object], kinds: tuple[Kind, ...]) -> bool:
    """Whether a value is of one of these kinds, or certainly holds such a value."""
    return any(_is(one, kinds) or (isinstance(one, Container) and _holds(one.values, kinds)) for one in values)


def _flat(value: object) -> object:
    """Return a value without lists and dicts in it, so that no container can hold itself."""
    if isinstance(value, Container) and value.type is tuple:
        return Container(tuple, [*map(_flat, value.values)])
    return (Kind.MAYBE if _holds([value], _SYMBOLIC) else None) if isinstance(value, Container) else value


def _shape(values: Iterable[object]) -> tuple[object, ...]:
    """Return a key for values: containers by their items, objects by identity."""
    return tuple([(one.type, _shape(one.values)) if isinstance(one, Container) else id(one) for one in values])


def _join(values: Sequence[object]) -> object:
    """Return the value of a variable that may hold any of these values; None without values."""
    first, *others = values or (None,)
    if all(other is first for other in others):
        return first
    containers = [value for value in values if isinstance(value, Container)]
    shapes = {(one.type, len(one.values) if one.type is tuple else 0) for one in containers}
    if len(containers) == len(values) and len(shapes) == 1:
        if containers[0].type is tuple:
            return Container(tuple, [*map(_join, zip(*(one.values for one in containers), strict=True))])
        return Container(containers[0].type, [item for one in containers for item in one.values])
    return Kind.MAYBE if _holds(values, (*_SYMBOLIC, Kind.NODE, Kind.GRAPH)) else None


def _is_ours(target: object, names: tuple[str, ...]) -> bool:
    """Whether an object is a function of this package with one of these names, such as `penstock.cond`."""
    package = str(getattr(target, "__module__", "")).partition(".")[0]
    return package == _PACKAGE and isinstance(target, FunctionType) and target.__name__ in names


def _foreign_of(value: object) -> tuple[str | None, str | None]:
    """Return the name of an object of another async library, e.g. `asyncio.gather`, and the remedy for calling it."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in _FOREIGN:
        return None, None
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{module.partition('.')[0].lstrip('_')}.{name}", _FOREIGN_REMEDIES.get(name)


def _named(node: ast.expr) -> str:
    """Return an expression as the user wrote it, shortened to fit into a message."""
    text = ast.unparse(node)
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"


def _parameters(node: FunctionNode, value: object, defaults: Iterable[object]) -> dict[str, object]:
    """Return the variables of the parameters: `value`, or the next of `defaults` for a parameter with a default."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    optional = [*positional[len(positional) - len(arguments.defaults) :], *(one for one, given in keyword if given)]
    result: dict[str, object] = {one.arg: value for one in (*positional, *arguments.kwonlyargs)}
    result |= {one.arg: default for one, default in zip(optional, defaults, strict=False)}
    variadic = (arguments.vararg, list), (arguments.kwarg, dict)
    return result | {one.arg: Container(kind, [value]) for one, kind in variadic if one}
