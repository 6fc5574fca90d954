"""Check the source of a graph for statements that would make its trace silently wrong.

A Ref raises when it is compared, iterated over or tested for truth. But a Ref cannot notice that it is used in a `try`,
that `is` compares its identity, or that `isinstance` looks at its class: the trace would be silently wrong. So the body
is read when the graph is decorated, with an abstract value for each variable. A use is only reported if the value is
certainly symbolic.

The check makes one forward pass: assignments move values between variables, and branches are joined. A loop is read
twice, where the second round starts with the variables of the first round. The traced function could take each of these
paths, so each reported problem does occur.
"""

import ast
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Final, TypeAlias, cast

from ..._errors import GraphTraceError
from ...telemetry import logs
from .abstract_values import (
    CONTROL_FLOW,
    MISSING,
    PLAIN,
    REF,
    UNKNOWN,
    AbstractValue,
    Kind,
    Names,
    foreign_of,
    is_ours,
    join,
)
from .source import FunctionNode, SourceLocation, locate

# ast.NodeVisitor chooses the names of these methods, and the syntax is their documentation.
# ruff: noqa: N815, D102

_COND: Final = "use ps.cond or ps.switch"
_FALLBACK: Final = (
    "`except` becomes `fallback=` on the node, e.g. node.with_policy(fallback=...); `finally` goes inside a node"
)
_WITH: Final = "open it with a @ps.resource, or do it inside a node"
_INSIDE: Final = "do it inside a node"
_BLIND_OPERATORS: Final[dict[type[ast.cmpop], str]] = {
    ast.Is: "`is`", ast.IsNot: "`is`", ast.In: "`in`", ast.NotIn: "`in`",
}  # fmt: skip
_MAX_OPERATION: Final = 50  # the longest operation, in characters, that a message shows
_NOT_IN_A_LAMBDA: Final = (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Starred)

# By identity, because a comparison would run the user's code.
_BLIND_BUILTINS: Final = set(map(id, (isinstance, issubclass, type, callable, hasattr, id)))
_EMPTY: Final = set(map(id, (list, dict, set)))
_COPIES: Final = set(map(id, (list, tuple, set, frozenset, sorted, reversed, iter)))
_ADDERS: Final = ("add", "append", "appendleft", "insert", "setdefault")
_EXTENDERS: Final = ("extend", "extendleft", "update")
Environment: TypeAlias = dict[str, AbstractValue]


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
        _warn_of(function)
        return
    names = Names(is_node, is_graph, function.__globals__)
    Interpreter(names, function, location, is_graph=True).interpret_graph(fn)
    if names.problems:
        listed = [names.problems[place] for place in sorted(names.problems, key=lambda place: place[:2])]
        raise GraphTraceError("\n".join((f"{function.__qualname__} cannot be traced:", *listed)))


_warned: set[tuple[str, int, str]] = set()  # by place in the source, so that a factory of graphs causes one warning


def _warn_of(function: FunctionType) -> None:
    code = function.__code__
    place = code.co_filename, code.co_firstlineno, function.__qualname__
    if place not in _warned:
        _warned.add(place)
        logs.warning(
            "graph.source_unavailable",
            function=f"{function.__module__}.{function.__qualname__}",
            file=code.co_filename,
            consequence="`try`, `with`, `is`, `match` and `isinstance` on symbolic values go unnoticed",
        )


class Interpreter(ast.NodeVisitor):
    """Interprets the body of one function with abstract values.

    Attributes:
        names: gives the abstract values of objects, and collects problems.
        function: the function; names are looked up in its namespaces.
        location: the source of the function.
        is_graph: whether the function is a graph or a body of control flow; False for a plain function that they call.
        inside: the function that is being interpreted now: `function`, or a function inside of it.
        variables: the abstract value of each variable at this point.
        declared_outer: the names under `global` or `nonlocal`.
        returned: the abstract values that the function has returned so far.
        assigned: all variables, including the variables of inner functions.
        touches: how often a symbolic value was used so far.
        callees: the abstract value of the callee of each call so far.
    """

    def __init__(self, names: Names, function: FunctionType, location: SourceLocation, is_graph: bool) -> None:
        self.names = names
        self.function = function
        self.location = location
        self.is_graph = is_graph
        self.inside: FunctionNode = location.node
        self.variables: Environment = {}
        self.declared_outer: set[str] = set()
        self.returned: list[AbstractValue] = []
        self.assigned = {
            one.arg if isinstance(one, ast.arg) else one.id
            for one in ast.walk(location.node)
            if isinstance(one, ast.arg) or (isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        }
        self.touches: int = 0
        self.callees: dict[ast.expr, AbstractValue] = {}

    def interpret_graph(self, fn: Callable[..., object]) -> None:
        """Interpret the function as a graph: its parameters are symbolic, the receiver of a bound method is not."""
        node = self.location.node
        # A lambda is a body, and control flow passes no argument that has a default.
        variables = _parameters(node, REF, PLAIN if isinstance(node, ast.Lambda) else REF)
        if isinstance(fn, MethodType):
            variables[next(iter(variables), "")] = AbstractValue(Kind.PLAIN, target=fn.__self__)
        self.interpret(node, variables)

    def interpret(self, node: FunctionNode, variables: Environment) -> AbstractValue:
        """Interpret the function, or a function inside of it; return the abstract value of the result."""
        before = self.inside, self.variables, self.declared_outer, self.returned
        self.inside, self.variables, self.declared_outer, self.returned = node, variables, set(), []
        if isinstance(node, ast.Lambda):
            self.returned.append(self.value(node.body))
        else:
            self.block(node.body)
            if not isinstance(node.body[-1], ast.Return | ast.Raise):
                self.returned.append(PLAIN)
        result = join(self.returned)
        self.inside, self.variables, self.declared_outer, self.returned = before
        return result

    def interpret_nested(self, node: FunctionNode, value: AbstractValue) -> AbstractValue:
        """Interpret an inner function with this value for each parameter; return its own abstract value."""
        given = {name: self.value(default) for name, default in _defaults(node.args).items()}
        self.interpret(node, self.variables | _parameters(node, value) | given)
        return AbstractValue(Kind.FUNCTION, target=node)

    def value(self, node: ast.expr) -> AbstractValue:
        """Return the abstract value of an expression, and report the problems in it."""
        value = cast("AbstractValue", self.visit(node))
        self.touches += value.is_ref
        return value

    def generic_visit(self, node: ast.AST) -> AbstractValue:
        values = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return UNKNOWN if any(value.symbolic for value in values) else PLAIN

    def visit_Name(self, node: ast.Name) -> AbstractValue:
        if node.id in self.variables:
            return self.variables[node.id]
        return UNKNOWN if node.id in self.assigned else self.names.look_up(self.function, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> AbstractValue:
        return self.names.attribute(self.value(node.value), node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> AbstractValue:
        base, _ = self.value(node.value), self.value(node.slice)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else MISSING
        if base.is_ref or base.kind is Kind.UNKNOWN:
            return base
        if base.kind is Kind.TUPLE and isinstance(key, int) and key < len(base.items):
            return base.items[key]
        if base.items:
            return AbstractValue(Kind.LIST, base.items) if isinstance(node.slice, ast.Slice) else join(base.items)
        return self.names.item(base, key)

    def visit_Await(self, node: ast.Await) -> AbstractValue:
        value = self.value(node.value)
        self.touches += 1
        foreign, remedy = foreign_of(self.callees.get(node.value, value))
        if foreign and not remedy:
            self.report(node, f"awaits {foreign} while tracing, not for each item", _INSIDE)
        return UNKNOWN if value.kind is Kind.PLAIN else value

    def visit_Starred(self, node: ast.Starred) -> AbstractValue:
        return self.names.element(self.value(node.value))

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> AbstractValue:
        is_tuple = isinstance(node, ast.Tuple) and not any(isinstance(item, ast.Starred) for item in node.elts)
        return AbstractValue(Kind.TUPLE if is_tuple else Kind.LIST, tuple(map(self.value, node.elts)))

    visit_List = visit_Set = visit_Tuple

    def visit_Dict(self, node: ast.Dict) -> AbstractValue:
        for key in filter(None, node.keys):
            self.value(key)
        values = [self.value(value) for value in node.values]
        whole = [UNKNOWN if value.symbolic else PLAIN for value in values]  # for `**value`
        parts = zip(node.keys, values, whole, strict=True)
        return AbstractValue(Kind.DICT, tuple(value if key else spread for key, value, spread in parts))

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> AbstractValue:
        before = self.variables
        self.variables = dict(before)
        for generator in node.generators:
            construct = "an async comprehension" if generator.is_async else "a comprehension"
            self.bind(generator.target, self.iterated(node, generator.iter, construct))
            for condition in generator.ifs:
                self.truth(condition, "`if`")
        if isinstance(node, ast.DictComp):
            self.value(node.key)
            result = AbstractValue(Kind.DICT, (self.value(node.value),))
        else:
            result = AbstractValue(Kind.LIST, (self.value(node.elt),))
        self.variables = before
        return result

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_IfExp(self, node: ast.IfExp) -> AbstractValue:
        self.truth(node.test, "a conditional expression")
        return join((self.value(node.body), self.value(node.orelse)))

    def visit_BoolOp(self, node: ast.BoolOp) -> AbstractValue:
        word = "`and`" if isinstance(node.op, ast.And) else "`or`"
        tested = [self.truth(operand, word, whole=node) for operand in node.values[:-1]]
        return join((*tested, self.value(node.values[-1])))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> AbstractValue:
        if isinstance(node.op, ast.Not):
            self.truth(node.operand, "`not`", whole=node)
            return PLAIN
        return self.value(node.operand)

    def visit_BinOp(self, node: ast.BinOp) -> AbstractValue:
        return self.combined(self.value(node.left), self.value(node.right))

    def combined(self, left: AbstractValue, right: AbstractValue) -> AbstractValue:
        """Return the abstract value of the result of a binary operator."""
        if left.is_ref or right.is_ref:
            return REF
        if Kind.NODE in (kinds := (left.kind, right.kind)) or Kind.GRAPH in kinds:  # a >> b
            return AbstractValue(Kind.NODE)
        return join((left, right))

    def visit_Compare(self, node: ast.Compare) -> AbstractValue:
        operands = [node.left, *node.comparators]
        refs = [self.value(operand).is_ref for operand in operands]
        result = PLAIN
        for index, operator in enumerate(node.ops):
            word = _BLIND_OPERATORS.get(type(operator))
            blind = next((at for at in (index, index + 1) if refs[at]), None)
            if blind is not None and word:
                remedy = f"compare inside a node and {_COND}" if word == "`in`" else _COND
                wrong = f"{word} would look at the symbolic value {_named(operands[blind])}, not at an item"
                self.report(node, wrong, self.or_applied(remedy, node))
            elif blind is not None:
                result = REF
        return result

    def visit_Call(self, node: ast.Call) -> AbstractValue:
        function, base = node.func, None
        if isinstance(function, ast.Attribute):
            base = self.value(function.value)
            callee = self.names.attribute(base, function.attr)
        else:
            callee = self.value(function)
        self.callees[node] = callee
        arguments = [self.value(argument) for argument in node.args]
        keywords = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        is_symbolic = any(value.symbolic for value in (*arguments, *keywords.values()))
        self.touches += is_symbolic
        if is_ours(callee.target, CONTROL_FLOW):
            self._bodies((*arguments, *keywords.values()))
        if callee.kind in (Kind.NODE, Kind.REF):
            return REF
        if callee.kind in (Kind.GRAPH, Kind.RESULT):
            return AbstractValue(Kind.RESULT)
        self._check_callee(node, callee, arguments)
        if base is not None and isinstance(function, ast.Attribute):
            known = self._method(function, base, arguments)
            stored = inspect.getattr_static(base.target, function.attr, None)
            is_method = isinstance(stored, FunctionType) and not isinstance(base.target, type | ModuleType)
            if is_method or isinstance(stored, classmethod):
                arguments.insert(0, base)
        else:
            known = self._built_in(callee.target, arguments)
        known = known or self._helper(node, callee.target, arguments, keywords)
        if known is None and inspect.isclass(callee.target) and self.names.is_node(callee.target):
            known = AbstractValue(Kind.NODE)
        return known or (UNKNOWN if is_symbolic or callee.kind in (Kind.UNKNOWN, Kind.FUNCTION) else PLAIN)

    def _bodies(self, values: Iterable[AbstractValue]) -> None:
        """Interpret the functions that are passed to control flow: their parameters are symbolic."""
        for value in values:
            self._bodies(value.items)
            if isinstance(value.target, FunctionNode):
                self.interpret_nested(value.target, REF)

    def _check_callee(self, node: ast.Call, callee: AbstractValue, arguments: list[AbstractValue]) -> None:
        foreign, remedy = foreign_of(callee)
        if remedy:
            self.report(node, f"{foreign} would act while tracing, not on each item", remedy)
        is_blind = id(callee.target) in _BLIND_BUILTINS and (callee.target is not type or len(arguments) == 1)
        if is_blind and arguments and arguments[0].is_ref:
            wrong = f"{_named(node.func)} would look at the symbolic value {_named(node.args[0])}, not at an item"
            self.report(node, wrong, self.or_applied(_COND, node))

    def _method(
        self, function: ast.Attribute, base: AbstractValue, arguments: list[AbstractValue]
    ) -> AbstractValue | None:
        """Return the result of a method of a built-in container, or a copy of a node; None if unknown."""
        name = function.attr
        if base.kind in (Kind.NODE, Kind.GRAPH):
            return base if name in ("with_policy", "named") else None
        is_own = isinstance(function.value, ast.Name) and base.target is MISSING
        if arguments and (is_own or isinstance(base.target, list | dict | set | deque)):
            if name in _ADDERS:
                kind = Kind.DICT if name == "setdefault" else Kind.LIST
                self.store(function.value, AbstractValue(kind, (arguments[-1],)))
            elif name in _EXTENDERS:
                self.store(function.value, arguments[0])
        item = join(base.items)
        if base.kind is Kind.LIST:
            return {"copy": base, "pop": item, "popleft": item}.get(name)
        if base.kind is Kind.DICT:  # whose pop() may give a default
            pairs = AbstractValue(Kind.TUPLE, (PLAIN, item))
            views = {"values": AbstractValue(Kind.LIST, base.items), "items": AbstractValue(Kind.LIST, (pairs,))}
            return {"copy": base, **views}.get(name)
        return None

    def _built_in(self, target: object, arguments: list[AbstractValue]) -> AbstractValue | None:
        if not arguments:
            return AbstractValue(Kind.DICT if target is dict else Kind.LIST) if id(target) in _EMPTY else None
        if target is getattr and arguments[0].is_ref:
            return arguments[0]
        elements = [self.names.element(value) for value in arguments]
        if target is enumerate:
            return AbstractValue(Kind.LIST, (AbstractValue(Kind.TUPLE, (PLAIN, elements[0])),))
        if target is zip:
            return AbstractValue(Kind.LIST, (AbstractValue(Kind.TUPLE, tuple(elements)),))
        return AbstractValue(Kind.LIST, (elements[0],)) if id(target) in _COPIES else None

    def _helper(
        self, node: ast.Call, target: object, arguments: list[AbstractValue], keywords: dict[str | None, AbstractValue]
    ) -> AbstractValue | None:
        """Return the result of a plain function of the same module, whose body runs while tracing; None if unknown.

        The function is interpreted once for the same abstract values of its arguments.
        """
        if not isinstance(target, FunctionType) or target.__globals__ is not self.names.namespace:
            return None
        location = locate(target)
        parameters = target.__code__.co_varnames[: target.__code__.co_argcount]
        is_known = None not in keywords and not any(isinstance(one, ast.Starred) for one in node.args)
        if location is None or not is_known or len(arguments) > len(parameters):
            return None  # there is no source, or it is unknown which parameter gets which argument
        given = dict(zip(parameters, arguments, strict=False)) | cast("Environment", keywords)
        call = target, tuple(sorted(given.items(), key=lambda argument: argument[0]))
        if call not in self.names.helpers:
            self.names.helpers[call] = UNKNOWN, 0  # for a recursive call
            helper = Interpreter(self.names, target, location, is_graph=False)
            value = helper.interpret(location.node, _parameters(location.node, UNKNOWN, PLAIN) | given)
            value = UNKNOWN if inspect.isgeneratorfunction(target) else value
            self.names.helpers[call] = value, helper.touches
        value, touches = self.names.helpers[call]
        self.touches += touches
        return value

    def bind(self, target: ast.expr, value: AbstractValue) -> None:
        """Assign a value to a variable, or to several, or into an object."""
        match target:
            case ast.Name(name):
                if name in self.declared_outer and (self.is_graph or value.symbolic):
                    wrong = f"assigns `{name}` outside the function once, while tracing, and not for each item"
                    self.report(target, wrong, "return the value instead")
                self.variables[name] = value
            case ast.Tuple(targets) | ast.List(targets):
                is_whole = value.kind is Kind.TUPLE and len(value.items) == len(targets)
                for index, one in enumerate(targets):
                    self.bind(one, value.items[index] if is_whole else value.element())
            case ast.Starred(inner):
                self.bind(inner, AbstractValue(Kind.LIST, (value,)))
            case ast.Attribute(base):
                self.store(base, value if value.is_ref or not value.symbolic else UNKNOWN)
            case ast.Subscript(base, index):
                self.value(index)
                is_list = self.value(base).kind is Kind.LIST
                self.store(base, AbstractValue(Kind.LIST if is_list else Kind.DICT, (value,)))
            case _:
                pass

    def store(self, place: ast.expr, value: AbstractValue) -> None:
        """Put a value into an object: a variable then holds it; an object that outlives the trace must not."""
        if self.value(place).is_ref:
            self.report(place, f"changes the symbolic value {_named(place)}, once and while tracing", _INSIDE)
            return
        root = place
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if not isinstance(root, ast.Name):
            return
        known = self.value(root)
        if known.target is MISSING or known.kind is Kind.FUNCTION:
            self.variables[root.id] = join((known, value if place is root and value.items else UNKNOWN))
        elif value.holds_ref:
            wrong = f"stores a symbolic value in {_named(place)}, which outlives the trace"
            self.report(place, wrong, "return the value, or store it inside a node")

    def truth(
        self, node: ast.expr, construct: str, remedy: str = _COND, *, whole: ast.expr | None = None
    ) -> AbstractValue:
        """Return the abstract value of an expression whose truth is tested, and report it if it is symbolic.

        Args:
            node: the expression.
            construct: the construct that tests the expression, for the message.
            remedy: the text to write instead.
            whole: the expression around it that tests it and has a value of its own, such as `not x`; None otherwise.
        """
        value = self.value(node)
        if value.kind is Kind.REF:
            if remedy is _COND:
                step = whole or node
                is_operation = isinstance(step, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.BinOp)
                remedy = self.or_applied(remedy, step, "" if is_operation else f"bool({ast.unparse(step)})")
            self.report(node, f"{construct} on the symbolic value {_named(node)}", remedy)
        return value

    def iterated(self, node: ast.AST, iterable: ast.expr, construct: str) -> AbstractValue:
        """Return the abstract value of the items of an iterable, and report it if it is symbolic."""
        value = self.value(iterable)
        if value.kind is Kind.REF:
            remedy = "write a node that takes the AsyncIterator"
            if "async" not in construct:
                is_whole = isinstance(node, ast.expr) and not isinstance(node, ast.GeneratorExp)
                text = "" if is_whole else f"[item for item in {ast.unparse(iterable)}]"
                remedy = self.or_applied("use ps.map_each", node if isinstance(node, ast.expr) else iterable, text)
            self.report(node, f"{construct} over the symbolic value {_named(iterable)}", remedy)
        return self.names.element(value)

    def or_applied(self, remedy: str, node: ast.expr, operation: str = "") -> str:
        """Return a remedy with a second remedy: a step with `ps.apply`, written out if a lambda can do the operation.

        Args:
            remedy: the remedy.
            node: the expression whose variables the operation needs.
            operation: the source of the operation; empty for the source of the expression.
        """
        parts = list(ast.walk(node))
        own = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        names = [part.id for part in parts if isinstance(part, ast.Name) and part.id not in own]
        taken = ", ".join(dict.fromkeys(name for name in names if self.variables.get(name, PLAIN).symbolic))
        calls = [self.callees.get(part, PLAIN).kind for part in parts if isinstance(part, ast.Call)]
        operation = operation or ast.unparse(node)
        if Kind.NODE in calls or Kind.GRAPH in calls or any(isinstance(part, _NOT_IN_A_LAMBDA) for part in parts):
            taken = ""
        if not taken or len(operation) > _MAX_OPERATION:
            taken, operation = taken or "value", "..."
        return f"{remedy}; an operation of one line is a step with ps.apply(lambda {taken}: {operation}, {taken})"

    def report(self, node: ast.AST, wrong: str, remedy: str) -> None:
        """Note a problem at a statement or expression."""
        line: int = getattr(node, "lineno", self.location.node.lineno)
        place, source = f"{self.location.filename}:{line}", self.location.lines[line - 1].strip()
        self.names.problems.setdefault(
            (self.location.filename, line, remedy), f"{place}: `{source}`: {wrong}; {remedy}"
        )

    def visit_Lambda(self, node: ast.Lambda) -> AbstractValue:
        return self.interpret_nested(node, UNKNOWN)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.variables[node.name] = UNKNOWN
        if not node.decorator_list:  # a decorated function is a separate node or graph, or unknown
            self.variables[node.name] = self.interpret_nested(node, UNKNOWN)

    visit_AsyncFunctionDef = visit_FunctionDef

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def branches(self, *blocks: Sequence[ast.stmt]) -> None:
        """Interpret blocks of which one runs, and join the variables that they leave."""
        before, after = self.variables, list[Environment]()
        for statements in blocks:
            self.variables = dict(before)
            self.block(statements)
            after.append(self.variables)
        names = dict.fromkeys(name for left in after for name in left)
        self.variables = {name: join(left[name] for left in after if name in left) for name in names}

    def visit_Return(self, node: ast.Return) -> None:
        self.returned.append(self.value(node.value) if node.value else PLAIN)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> AbstractValue:
        value = PLAIN
        if node.value:  # None for an annotation without a value
            value = self.value(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                self.bind(target, value)
        return value

    visit_AnnAssign = visit_NamedExpr = visit_Assign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        before = self.variables.get(node.target.id, PLAIN) if isinstance(node.target, ast.Name) else PLAIN
        self.bind(node.target, self.combined(before, self.value(node.value)))

    def visit_If(self, node: ast.If) -> None:
        self.truth(node.test, "`if`")
        self.branches(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.truth(node.test, "`while`", "use ps.while_loop")
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
        known, before = len(self.names.problems), self.touches
        for item in node.items:
            manager = self.value(item.context_expr)
            foreign, remedy = foreign_of(self.callees.get(item.context_expr, manager))
            if foreign and isinstance(node, ast.AsyncWith) and not remedy:
                self.report(node, f"{foreign} would be entered while tracing, not for each item", _WITH)
            if item.optional_vars:
                self.bind(item.optional_vars, UNKNOWN if manager.symbolic else PLAIN)
        self.block(node.body)
        if self.touches > before and len(self.names.problems) == known:
            self.report(node, "`with` would be left before any node runs", _WITH)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        before = self.touches
        self.block(node.body)
        if self.touches > before:
            self.report(node, "`try` would be left before any node runs and could not catch its error", _FALLBACK)
        self.variables |= {handler.name: PLAIN for handler in node.handlers if handler.name}
        self.branches(node.orelse, *(handler.body for handler in node.handlers))
        self.block(node.finalbody)

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        subject = self.value(node.subject)
        if subject.holds_ref:
            self.report(node, f"`match` would see the symbolic value {_named(node.subject)}, not an item", _COND)
        for case in node.cases:
            for pattern in ast.walk(case.pattern):
                name = getattr(pattern, "name", None) or getattr(pattern, "rest", None)
                if isinstance(name, str):
                    self.variables[name] = UNKNOWN if subject.symbolic else PLAIN
            if case.guard:
                self.truth(case.guard, "`case ... if`")
        self.branches([], *(case.body for case in node.cases))

    def visit_Assert(self, node: ast.Assert) -> None:
        self.truth(node.test, "`assert`", "check it inside a node, which may raise")

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.declared_outer.update(node.names)

    visit_Nonlocal = visit_Global

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Look up the names that the function itself imports, if their modules are loaded already."""
        for alias in node.names:
            first = alias.name.partition(".")[0]
            if isinstance(node, ast.Import):
                value = self.names.meaning(sys.modules.get(alias.name if alias.asname else first, MISSING))
            else:  # a relative import is left unknown
                module = sys.modules.get((node.module or "") if not node.level else "", MISSING)
                value = self.names.attribute(self.names.meaning(module), alias.name)
            self.variables[alias.asname or first] = value

    visit_ImportFrom = visit_Import

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.variables[node.name] = UNKNOWN

    def visit_Yield(self, node: ast.Yield | ast.YieldFrom) -> AbstractValue:
        if self.is_graph and self.inside is self.location.node:
            self.report(
                node, "an async generator is not a graph", "return the stream of a node that is an async generator"
            )
        return self.generic_visit(node)

    visit_YieldFrom = visit_Yield


def _named(node: ast.expr) -> str:
    """Return an expression as the user wrote it, shortened to fit into a message."""
    text = ast.unparse(node)
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"


def _parameters(node: FunctionNode, value: AbstractValue, default: AbstractValue | None = None) -> Environment:
    """Return the variables of the parameters: `value`, `default` for a parameter with a default, or a container."""
    arguments = node.args
    result = {one.arg: value for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    result |= dict.fromkeys(_defaults(arguments), value if default is None else default)
    if arguments.vararg:
        result[arguments.vararg.arg] = AbstractValue(Kind.LIST, (value,))
    if arguments.kwarg:
        result[arguments.kwarg.arg] = AbstractValue(Kind.DICT, (value,))
    return result


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    """Return the default of each parameter that has one."""
    positional = zip([*arguments.posonlyargs, *arguments.args][::-1], arguments.defaults[::-1], strict=False)
    pairs = [*positional, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {one.arg: default for one, default in pairs if default}
