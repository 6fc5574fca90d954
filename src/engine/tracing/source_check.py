"""Check the source of a graph for statements that would make its trace silently wrong.

A Ref refuses every operation that calls one of its methods, such as a comparison or a loop. But a Ref cannot notice
that it is used in a `try`, that `is` compares its identity, or that `isinstance` looks at its class: the trace would be
silently wrong. So the source is read. A use is only reported if the value is certainly symbolic.

The source is read once, in order. A value is the object itself where a name outside the function tells it. Otherwise,
a value is a `Kind`, a tuple of values, `Items`, or None, which stands for all other values. A variable that two
branches leave with unlike values is None.
"""

import ast
import builtins
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from itertools import repeat
from types import FunctionType, MethodType, ModuleType
from typing import Final, TypeAlias, cast

from typing_extensions import TypeIs

from ..._errors import GraphTraceError
from ...actors.current import codes_of
from ...telemetry import logs
from ...telemetry.text import shorten
from .ref import compared, is_users
from .references import MISSING, cell_contents
from .source import FunctionNode, SourceLocation, locate

# ast.NodeVisitor chooses the names of these methods, and the syntax is their documentation.
# ruff: noqa: N815

_FALLBACK: Final = (
    "`except` becomes `fallback=` on the node, e.g. node.with_policy(fallback=...); `finally` goes inside a node"
)
_WITH: Final = "open it with a @ps.resource, or do it inside a node"
_PARALLEL: Final = "just await each: nodes that do not need each other's results already run in parallel"
_TIMEOUT: Final = "use `timeout_seconds=` on the node, e.g. node.with_policy(timeout_seconds=...), or on the call"
_FORGOTTEN: Final = "make it a node with `@ps.node`, or do not pass these values"
_FOREIGN: Final = ("asyncio", "_asyncio", "anyio", "trio")
_FOREIGN_REMEDIES: Final = {
    **dict.fromkeys(("gather", "wait", "as_completed", "create_task", "ensure_future"), _PARALLEL),
    **dict.fromkeys(("TaskGroup", "create_task_group", "open_nursery"), _PARALLEL),
    **dict.fromkeys(("timeout", "timeout_at", "wait_for", "fail_after", "fail_at"), _TIMEOUT),
    **dict.fromkeys(("move_on_after", "move_on_at", "CancelScope"), _TIMEOUT),
    **dict.fromkeys(("sleep", "sleep_until", "sleep_forever"), "sleep inside a node"),
    **dict.fromkeys(("to_thread", "run_sync", "to_thread_run_sync"), 'use a node with runs_on="thread"'),
}
_Test: TypeAlias = Callable[[object], bool]
_Problems: TypeAlias = list[tuple[tuple[str, int, str], str]]

_PACKAGE: Final = __name__.partition(".")[0]
_STEPS: Final = ("cond", "switch", "while_loop", "map_each", "fold", "apply")
_CONTAINERS: Final = (list, tuple, dict, set, deque)  # other classes may have code of their own
_FUNCTIONS: Final = (FunctionType, staticmethod, classmethod)
_MAX_ITEMS: Final = 20  # a larger container in a global is not read

# By identity, because a comparison would run the user's code.
_BLIND_BUILTINS: Final = set(map(id, (isinstance, type, callable, hasattr, id)))
_COPIES: Final = set(map(id, (list, tuple, reversed)))
_ADDERS: Final = ("add", "append", "appendleft", "insert", "setdefault", "extend", "update")


class Kind(Enum):
    """The values that are known by their kind only."""

    REF = auto()  # certainly a Ref: a parameter, or the result of a node
    RESULT = auto()  # the result of an inlined graph: a Ref, or a structure of Refs
    NODE = auto()  # a call of it gives a REF
    GRAPH = auto()  # a call of it gives a RESULT


@dataclass(eq=False)
class Items:
    """A container that is not a tuple, or an iterable.

    Attributes:
        values: the values of the items; for a dict, without its keys.
        is_dict: whether an iteration gives other values, the keys.
        outlives: whether the container is in a global, a closure or an attribute, so that it outlives the trace.
    """

    values: list[object]
    is_dict: bool = False
    outlives: bool = False


def check_source(fn: Callable[..., object], *, is_body: bool, is_traced: bool, is_node: _Test, is_graph: _Test) -> bool:
    """Check the body of a graph, or of a body of control flow, for statements that a trace cannot represent.

    The plain functions of the same module that it calls are checked as well, because their bodies run while tracing.
    Names are looked up now. Of a name that is not bound yet, nothing is known.

    Args:
        fn: a function, lambda or bound method; other objects have no source and are not checked. The first parameter
            of a method is configuration, all other parameters are symbolic.
        is_body: whether the function is a body; control flow passes no argument that has a default.
        is_traced: whether the function has been traced, so that a function that it calls will not become a node later.
        is_node: returns whether a call of an object gives a Ref, as a call of a node does; also true for the class of a
            stateful node.
        is_graph: returns whether an object is a graph, whose call gives a structure of Refs; `is_node` may also be true
            for a graph.

    Returns:
        Whether the check has to be repeated when the function was traced.

    Raises:
        GraphTraceError: the body has such statements; the message has a line for each statement, with file, line,
            source and remedy.
    """
    function = inspect.unwrap(getattr(fn, "__func__", fn))
    if not isinstance(function, FunctionType):
        return False
    location, code = locate(function), function.__code__
    if location is None:
        _warn_of(f"{function.__module__}.{function.__qualname__}", code.co_filename, code.co_firstlineno)
        return False
    count = -len(function.__defaults__ or ()) if is_body else code.co_kwonlyargcount
    variables: dict[str, object] = dict.fromkeys(code.co_varnames[: code.co_argcount + count], Kind.REF)
    if isinstance(fn, MethodType):
        variables[next(iter(variables), "")] = fn.__self__
    reader = _Reader(is_node, is_graph)
    reader.read_function(function, location, variables)
    if problems := reader.problems + (reader.forgotten if is_traced else []):
        texts = dict(reversed(problems))
        listed = [texts[place] for place in sorted(texts)]
        raise GraphTraceError("\n".join((f"{function.__qualname__} cannot be traced:", *listed)))
    return bool(reader.forgotten)


@cache  # by place in the source, so that a factory of graphs causes one warning
def _warn_of(function: str, file: str, line: int) -> None:
    consequence = (
        "`try`, `with`, `is`, `match` and `isinstance` on symbolic values go unnoticed, and so does a new value of an "
        "attribute that the function reads, such as `config.limit`"
    )
    logs.warning("graph.source_unavailable", function=function, file=file, consequence=consequence)


class _Reader(ast.NodeVisitor):
    """Reads the body of a function; a copy reads a function inside of it, or a plain function that it calls.

    Attributes:
        is_node, is_graph: see `check_source`.
        problems: the lines of the message, each with its file, line and remedy; the same problem may be found again.
        forgotten: like `problems`, for calls of functions that were probably meant to be nodes.
        results: for each plain function that was read, by the identities and sizes of its arguments: its result,
            whether it uses symbolic values, and the arguments, so that their identities stay unique.
        touches: the uses of symbolic values.
        functions: the function, after the graph and the plain functions around its call.
        location: the source of the function.
        outside: the names in the closure of the function, in its module and in the builtins.
        own: the names of all variables, with the variables of the functions inside.
        variables: the value of each variable at this point.
        declared_outer: the names under `global` or `nonlocal`.
        returned: the values that the function has returned so far.
    """

    location: SourceLocation
    outside: dict[str, object]
    own: set[str]
    variables: dict[str, object]
    declared_outer: set[str]
    returned: list[object]

    def __init__(self, is_node: _Test, is_graph: _Test) -> None:
        self.is_node = is_node
        self.is_graph = is_graph
        self.problems: _Problems = []
        self.forgotten: _Problems = []
        self.results: dict[object, tuple[object, bool, object]] = {}
        self.touches: list[ast.expr] = []
        self.functions: tuple[FunctionType, ...] = ()

    def read_function(self, function: FunctionType, location: SourceLocation, variables: dict[str, object]) -> object:
        """Read a function with these values of its parameters; return the value of its result."""
        reader, code = copy(self), function.__code__
        reader.functions = (*self.functions, function)
        reader.location = location
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: cell_contents(cell) for name, cell in cells}
        reader.outside = {**vars(builtins), **function.__globals__, **closure}
        reader.own = {name for inner in codes_of(code) for name in (*inner.co_varnames, *inner.co_cellvars)}
        return reader.read(location.node, variables)

    def read(self, node: FunctionNode, variables: dict[str, object]) -> object:
        """Read the body of a function; return the value of its result."""
        self.variables, self.declared_outer, self.returned = variables, set(), []
        if isinstance(node, ast.Lambda):
            return self.value(node.body)
        self.block(node.body)
        return _join(self.returned if isinstance(node.body[-1], ast.Return | ast.Raise) else [*self.returned, None])

    def meaning(self, target: object, depth: int = 0) -> object:
        """Return the value of an object that has a name outside the function, or is in a container there."""
        if (kind := type(target)) in _CONTAINERS:
            items = cast("dict[object, object]", target).values() if kind is dict else cast("list[object]", target)
            is_read = depth < 2 and len(items) <= _MAX_ITEMS
            values = [self.meaning(item, depth + 1) for item in (items if is_read else (None,))]
            return tuple(values) if kind is tuple else Items(values, is_dict=kind is dict, outlives=True)
        if self.is_graph(target):
            return Kind.GRAPH
        is_node = self.is_node(target) and not inspect.isclass(target)
        return Kind.NODE if is_node or _is_construct(target) else target

    def attribute(self, base: object, name: str) -> object:
        """Return the value of an attribute, without running a property."""
        if base is None or isinstance(base, Kind | Items) or _is_tuple(base):
            return base if _is_ref(base) else None
        if isinstance(base, ModuleType):  # anyio loads its names on first use
            is_foreign = base.__name__.partition(".")[0] in _FOREIGN
            return self.meaning(getattr(base, name, None) if is_foreign else vars(base).get(name))
        stored: object = inspect.getattr_static(base, name, MISSING)
        return self.meaning(getattr(base, name) if type(stored) in _FUNCTIONS else stored)

    def elements(self, value: object) -> object:
        """Return the value of the items that an iteration gives."""
        if value is Kind.REF:
            return value
        return None if isinstance(value, Items) and value.is_dict else _join(_inside(value))

    def value(self, node: ast.expr) -> object:
        """Return the value of an expression, and report the problems in it."""
        value = self.visit(node)
        if _is_ref(value):
            self.touches.append(node)
        return value

    def values(self, nodes: Iterable[ast.expr]) -> list[object]:
        return [self.value(node) for node in nodes]

    def generic_visit(self, node: ast.AST) -> object:
        """Return the value that all expressions inside have, as in `a or b`, and as a list plus a list."""
        return _join(self.values(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)))

    def visit_Name(self, node: ast.Name) -> object:
        if node.id in self.variables or node.id in self.own:
            return self.variables.get(node.id)
        return self.meaning(self.outside.get(node.id))

    def visit_Attribute(self, node: ast.Attribute) -> object:
        return self.attribute(self.value(node.value), node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> object:
        base, _ = self.value(node.value), self.value(node.slice)
        if _is_ref(base):
            return base
        if _is_tuple(base) and isinstance(key := getattr(node.slice, "value", None), int) and key < len(base):
            return base[key]
        return Items([*_inside(base)]) if isinstance(node.slice, ast.Slice) else _join(_inside(base))

    def visit_Await(self, node: ast.Await) -> object:
        value = self.value(node.value)
        self.touches.append(node)
        return value if isinstance(value, Kind | Items) or _is_tuple(value) else None

    def visit_Starred(self, node: ast.Starred) -> object:
        return self.elements(self.value(node.value))

    def visit_Tuple(self, node: ast.Tuple) -> object:
        values = self.values(node.elts)
        return Items(values) if any(isinstance(item, ast.Starred) for item in node.elts) else tuple(values)

    def visit_List(self, node: ast.List | ast.Set) -> object:
        return Items(self.values(node.elts))

    visit_Set = visit_List

    def visit_Dict(self, node: ast.Dict) -> object:
        self.values(filter(None, node.keys))
        return Items(self.values(node.values), is_dict=True)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> object:
        reader = copy(self)
        reader.variables = self.variables.copy()
        for generator in node.generators:
            reader.bind(generator.target, reader.elements(reader.value(generator.iter)))
            reader.values(generator.ifs)
        if isinstance(node, ast.DictComp):
            reader.value(node.key)
            return Items([reader.value(node.value)], is_dict=True)
        return Items([reader.value(node.elt)])

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_IfExp(self, node: ast.IfExp) -> object:
        self.value(node.test)
        return _join(self.values((node.body, node.orelse)))

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        refs = [operand for operand in operands if _is_ref(self.value(operand))]
        for operator, *pair in zip(node.ops, operands, node.comparators, strict=False):
            is_in = isinstance(operator, ast.In | ast.NotIn)
            for operand in pair[:1] if is_in else pair if isinstance(operator, ast.Is | ast.IsNot) else ():
                if operand in refs:
                    word = "in" if is_in else "is"
                    self.report_blind(f"`{word}`", operand, node, compared(f"value {word} other", "value", "other"))

    def visit_Call(self, node: ast.Call) -> object:
        base, name = None, ""
        if isinstance(node.func, ast.Attribute):
            base, name = self.value(node.func.value), node.func.attr
            callee = self.attribute(base, name)
        else:
            callee = self.value(node.func)
        arguments = self.values(node.args)
        keywords = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        if any(map(_holds_ref, (*arguments, *keywords.values()))):
            self.touches.append(node)
        if callee is Kind.NODE or callee is Kind.GRAPH:
            return Kind.REF if callee is Kind.NODE else Kind.RESULT
        if inspect.isclass(callee) and self.is_node(callee):
            return Kind.NODE
        if isinstance(base, Kind):
            return base if name in ("with_policy", "named") else self.attribute(base, name)
        self.check_foreign(node, callee)
        if id(callee) in _BLIND_BUILTINS and arguments and _is_ref(arguments[0]):
            word = ast.unparse(node.func)
            remedy = compared(f"{word}(value{', ...' if len(arguments) > 1 else ''})")
            self.report_blind(f"`{word}`", node.args[0], node, remedy)
        if callee is getattr and arguments and _is_ref(arguments[0]):
            return arguments[0]
        if isinstance(node.func, ast.Attribute) and isinstance(base, Items):
            return self.method(node.func, base, [*arguments, *keywords.values()])
        elements = [*map(self.elements, arguments)]
        if callee is zip:
            return Items([tuple(elements)])
        if callee is enumerate:
            return Items([(None, *elements[:1])])
        if id(callee) in _COPIES:
            return Items(elements[:1])
        is_known = not any(isinstance(one, ast.Starred) for one in node.args) and None not in keywords
        return self.helper(node, callee, arguments, cast("dict[str, object]", keywords)) if is_known else None

    def check_foreign(self, node: ast.Call, callee: object) -> None:
        """Report a call of another async library that would act while tracing."""
        module = str(getattr(callee, "__module__", "")).partition(".")[0]
        if module not in _FOREIGN:
            return
        name = str(getattr(callee, "__qualname__", ""))
        remedy = _FOREIGN_REMEDIES.get(name) or ("do it inside a node" if inspect.iscoroutinefunction(callee) else "")
        if remedy:
            self.report(node, f"{module.lstrip('_')}.{name} would act while tracing, not on each item", remedy)

    def method(self, function: ast.Attribute, base: Items, passed: list[object]) -> object:
        """Return the result of a method of a container; None if unknown."""
        name = function.attr
        if passed and name in _ADDERS:
            self.store(function.value, passed[-1])
        if base.is_dict and name in ("values", "items"):
            return Items([*base.values] if name == "values" else [(None, _join(base.values))])
        if name == "copy":
            return Items([*base.values], is_dict=base.is_dict)
        return _join(base.values) if name in ("pop", "popleft") and not base.is_dict else None

    def helper(self, node: ast.Call, function: object, arguments: list[object], keywords: dict[str, object]) -> object:
        """Return the result of a plain function of the same module, whose body runs while tracing; None if unknown.

        The function is read once for the same arguments. A function in another module, but the standard library, is
        read only if it uses none of the symbolic values that it gets.
        """
        function = _called(function)
        if isinstance(function, MethodType):
            arguments = [function.__self__, *arguments]
            function = cast("object", function.__func__)
        if not isinstance(function, FunctionType) or function in self.functions:
            return None
        code, is_near = function.__code__, function.__globals__ is self.functions[-1].__globals__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given: dict[str, object] = {**dict.fromkeys(names), **dict(zip(names, arguments, strict=False)), **keywords}
        refs = {name for name, value in given.items() if _holds_ref(value)}
        location = locate(function) if is_near or (refs and is_users(code.co_filename)) else None
        if location is None or not (is_near or _is_blind(location.node, refs)):
            return None
        call = function, *map(_shape, given.values())
        if call not in self.results:
            before, reader = len(self.touches), copy(self)
            reader.problems = self.problems if is_near else []
            result = reader.read_function(function, location, {**given})
            is_used = len(self.touches) > before or _holds_ref(result)
            result = result if is_near and not inspect.isgeneratorfunction(function) else None
            self.results[call] = result, is_used, given
        if self.results[call][1]:
            self.touches.append(node)
        elif refs and _is_blind(location.node, refs):
            wrong = f"{_named(node.func)} uses no symbolic value that it gets, and runs once, while tracing"
            self.report(node, wrong, _FORGOTTEN, self.forgotten)
        return self.results[call][0]

    def bind(self, target: ast.expr, value: object) -> None:
        """Assign a value to a variable, or to several, or into an object."""
        match target:
            case ast.Name(name):
                if name in self.declared_outer and (len(self.functions) == 1 or _holds_ref(value)):
                    wrong = f"assigns `{name}` outside the function once, while tracing, and not for each item"
                    self.report(target, wrong, "return the value instead")
                self.variables[name] = value
            case ast.Tuple(targets) | ast.List(targets):
                is_pairwise = _is_tuple(value) and len(value) == len(targets)
                items = _inside(value) if is_pairwise else repeat(self.elements(value))
                for one, item in zip(targets, items, strict=False):
                    self.bind(one, item)
            case ast.Starred(inner):
                self.bind(inner, Items([value]))
            case ast.Attribute(base) | ast.Subscript(base):
                self.store(base, value)
            case _:
                pass

    def store(self, place: ast.expr, value: object) -> None:
        """Put a value into an object; an object that outlives the trace must not hold a symbolic value."""
        base = self.value(place)
        if isinstance(base, Items) and not base.outlives:
            base.values.append(_flat(value))
        elif not isinstance(base, Kind | tuple | None) and _holds_ref(value):
            wrong = f"stores a symbolic value in {_named(place)}, which outlives the trace"
            self.report(place, wrong, "return the value, or store it inside a node")

    def report(self, node: ast.expr | ast.stmt, wrong: str, remedy: str, problems: "_Problems | None" = None) -> None:
        """Note a problem at a statement or expression."""
        file, line = self.location.filename, node.lineno
        text = f"{file}:{line}: `{self.location.lines[line - 1].strip()}`: {wrong}; {remedy}"
        (self.problems if problems is None else problems).append(((file, line, remedy), text))

    def report_blind(self, word: str, operand: ast.expr, whole: ast.expr | ast.stmt, remedy: str) -> None:
        """Report an operation that looks at a Ref."""
        self.report(whole, f"{word} would look at the symbolic value {_named(operand)}, not at an item", remedy)

    def visit_Lambda(self, node: FunctionNode) -> None:
        """Read a function inside of this function. A body of control flow is checked again when it is traced."""
        self.values([*node.args.defaults, *filter(None, node.args.kw_defaults)])
        parameters = {one.arg: None for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        copy(self).read(node, self.variables | parameters)

    def forget(self, node: ast.AST) -> None:
        """Note that nothing is known of the names that definitions, imports, handlers and patterns inside assign."""
        names = [getattr(part, kind, None) for part in ast.walk(node) for kind in ("name", "asname", "rest")]
        self.variables |= {name: None for name in names if isinstance(name, str)}

    visit_ClassDef = visit_Import = visit_ImportFrom = forget

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.forget(node)
        if not node.decorator_list:  # a decorated function is a separate node or graph, or unknown
            self.visit_Lambda(node)

    visit_AsyncFunctionDef = visit_FunctionDef

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
        self.bind(node.target, self.generic_visit(node))

    def visit_If(self, node: ast.If) -> None:
        self.value(node.test)
        self.branches(node.body, node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        items = None if isinstance(node, ast.While) else self.elements(self.value(node.iter))
        for _ in range(2):  # the second time with the values that the body has left
            if isinstance(node, ast.While):
                self.value(node.test)
            else:
                self.bind(node.target, items)
            self.branches([], node.body)
        self.block(node.orelse)

    visit_AsyncFor = visit_While = visit_For

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        known, before = len(self.problems), len(self.touches)
        for item in node.items:
            self.value(item.context_expr)
            if item.optional_vars:
                self.bind(item.optional_vars, None)
        self.block(node.body)
        if len(self.touches) > before and len(self.problems) == known:
            self.report(node, "`with` would be left before any node runs", _WITH)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        before = len(self.touches)
        self.block(node.body)
        if len(self.touches) > before:
            self.report(node, "`try` would be left before any node runs and could not catch its error", _FALLBACK)
        self.forget(node)
        self.branches(node.orelse, *(handler.body for handler in node.handlers))
        self.block(node.finalbody)

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        if _holds_ref(self.value(node.subject)):
            self.report_blind("`match`", node.subject, node, "match inside a node, or use ps.switch")
        self.forget(node)
        self.values(filter(None, [case.guard for case in node.cases]))
        self.branches([], *(case.body for case in node.cases))

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.declared_outer.update(node.names)

    visit_Nonlocal = visit_Global


def _called(callee: object) -> object:
    """Return the method that a call of an instance runs; other objects are returned unchanged.

    The class is searched here, because a lookup would run code of the user.
    """
    if callee is None or isinstance(callee, FunctionType | MethodType | type | Kind):
        return callee
    method = next((vars(cls)["__call__"] for cls in type(callee).__mro__ if "__call__" in vars(cls)), None)
    return MethodType(method, callee) if isinstance(method, FunctionType) else callee


def _is_blind(function: FunctionNode, refs: set[str]) -> bool:
    """Whether a function uses none of these parameters, and no parameters for any further arguments."""
    names = refs | {one.arg for one in (function.args.vararg, function.args.kwarg) if one is not None}
    return not any(isinstance(one, ast.Name) and one.id in names for one in ast.walk(function))


def _is_ref(value: object) -> bool:
    return value is Kind.REF or value is Kind.RESULT


def _holds_ref(value: object) -> bool:
    """Whether a value is a Ref, or certainly holds a Ref."""
    return _is_ref(value) or any(map(_holds_ref, _inside(value)))


def _inside(value: object) -> Sequence[object]:
    """Return the values in a container; none for another value."""
    if isinstance(value, Items):
        return value.values
    return value if _is_tuple(value) else ()


def _is_tuple(value: object) -> TypeIs[tuple[object, ...]]:
    return isinstance(value, tuple)


def _flat(value: object) -> object:
    """Return a value without `Items` in it, so that none can hold itself."""
    if _is_tuple(value):
        return tuple(map(_flat, value))
    return None if isinstance(value, Items) else value


def _shape(value: object) -> object:
    """Return a key for a value: containers by their items, other objects by identity."""
    return tuple(map(_shape, _inside(value))) if isinstance(value, Items) or _is_tuple(value) else id(value)


def _join(values: Sequence[object]) -> object:
    """Return the value of a variable that may hold any of these values; None without values."""
    first, *others = values or (None,)
    if all(other is first for other in others):
        return first
    shapes = {_is_tuple(value) and len(value) for value in values}
    if _is_tuple(first) and len(shapes) == 1:
        return tuple(map(_join, zip(*map(_inside, values), strict=True)))
    is_dict = [value.is_dict for value in values if isinstance(value, Items)]
    if len(is_dict) == len(values) and len(set(is_dict)) == 1:
        return Items([inner for value in values for inner in _inside(value)], is_dict[0])
    return None


def _is_construct(target: object) -> bool:
    """Whether an object is a function of this package that makes a step, such as `penstock.cond`."""
    package = str(getattr(target, "__module__", "")).partition(".")[0]
    return package == _PACKAGE and isinstance(target, FunctionType) and target.__name__ in _STEPS


def _named(node: ast.expr) -> str:
    """Return an expression as the user wrote it, shortened to fit into a message."""
    return f"`{shorten(ast.unparse(node), 40)}`"
