"""The interpreter of the source check: it runs the body of a graph with abstract values, to find misuse of Refs.

It makes one forward pass: assignments move values between variables, branches are joined, and a loop runs twice, where
the second round starts with the variables that the first one has left. The traced function could take each of these
passes, so each problem that is reported does occur.
"""

import ast
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Final, cast

from . import rules as rule
from .rules import SourceRules
from .values import (
    EMPTY,
    MISSING,
    NODE,
    PLAIN,
    REF,
    RESULT,
    UNKNOWN,
    AbstractValue,
    FunctionNode,
    Kind,
    SourceLocation,
    combined,
    join,
    locate,
    mapping,
    sequence,
)

# ast.NodeVisitor chooses the names of these methods, and the syntax is their documentation.
# ruff: noqa: N815, D102


Environment = dict[str, AbstractValue]

_ADDERS: Final = ("add", "append", "appendleft", "insert", "setdefault")
_EXTENDERS: Final = ("extend", "extendleft", "update")
_MAX_OPERATION: Final = 50  # a longer one does not fit on a line
_NOT_IN_A_LAMBDA: Final = (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Starred)
_COPIES: Final = (list, tuple, set, frozenset, sorted, reversed, iter)


class ExpressionInterpreter(ast.NodeVisitor):
    """Interprets the expressions of one function, and the assignments of their values.

    Attributes:
        rules: gives the abstract values of objects, and collects problems.
        function: the function, in whose namespaces names are looked up.
        location: the source of the function.
        is_graph: whether the function is a graph or a body of control flow, and not a plain function that one calls.
        variables: the abstract value of each variable at this point.
        nodes: all nodes of the syntax tree of the function.
        assigned: all variables, including those of inner functions.
        declared_outer: the names under `global` or `nonlocal`.
        touches: how often a symbolic value was used so far.
        callees: the abstract value of the callee of each call so far.
    """

    def __init__(self, rules: SourceRules, function: FunctionType, location: SourceLocation, is_graph: bool) -> None:
        self.rules = rules
        self.function = function
        self.location = location
        self.is_graph = is_graph
        self.variables: Environment = {}
        self.nodes = list(ast.walk(location.node))
        self.assigned = {one.arg for one in self.nodes if isinstance(one, ast.arg)}
        self.assigned |= {one.id for one in self.nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        self.declared_outer: set[str] = set()
        self.touches: int = 0
        self.callees: dict[ast.expr, AbstractValue] = {}

    def interpret_nested(self, node: FunctionNode) -> None:
        """Interpret an inner function."""
        raise NotImplementedError

    def interpret_helper(self, function: FunctionType, given: Environment) -> AbstractValue | None:
        """Interpret a call of a plain function with these arguments; None if the function has no source."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> AbstractValue:
        """Return the abstract value of an expression, and report the problems in it."""
        value = cast("AbstractValue", self.visit(node))
        self.touches += value.unseen
        return value

    def generic_visit(self, node: ast.AST) -> AbstractValue:
        values = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return UNKNOWN if any(value.symbolic for value in values) else PLAIN

    def visit_Constant(self, node: ast.Constant) -> AbstractValue:  # the base class looks for deprecated visitors
        return PLAIN

    def visit_Name(self, node: ast.Name) -> AbstractValue:
        if node.id in self.variables:
            return self.variables[node.id]
        return UNKNOWN if node.id in self.assigned else self.rules.look_up(self.function, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> AbstractValue:
        return self.rules.attribute(self.value(node.value), node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> AbstractValue:
        base, _ = self.value(node.value), self.value(node.slice)
        match base, node.slice:
            case AbstractValue(kind=Kind.REF | Kind.RESULT), _:
                return base
            case AbstractValue(kind=Kind.SEQUENCE), ast.Slice():
                return base
            case AbstractValue(kind=Kind.SEQUENCE | Kind.MAPPING), _:
                return base.items[0]
            case AbstractValue(kind=Kind.TUPLE, items=items), ast.Constant(int(index)) if index < len(items):
                return items[index]
            case AbstractValue(kind=Kind.PLAIN), ast.Constant(key):
                return self.rules.item(base, key)
            case _:
                return UNKNOWN if base.symbolic else PLAIN

    def visit_Await(self, node: ast.Await) -> AbstractValue:
        value = self.value(node.value)
        self.touches += 1
        foreign = rule.foreign_name(self.callees.get(node.value, value))
        if foreign and not rule.foreign_remedy(foreign):
            self.report(node, f"awaits {foreign} while tracing, not for each item", rule.INSIDE)
        return UNKNOWN if value.kind is Kind.PLAIN else value

    def visit_NamedExpr(self, node: ast.NamedExpr) -> AbstractValue:
        value = self.value(node.value)
        self.bind(node.target, value)
        return value

    def visit_Starred(self, node: ast.Starred) -> AbstractValue:
        return self.rules.element(self.value(node.value))

    def visit_Tuple(self, node: ast.Tuple) -> AbstractValue:
        items = tuple(self.value(item) for item in node.elts)
        starred = any(isinstance(item, ast.Starred) for item in node.elts)
        return sequence(join(*items)) if starred else AbstractValue(Kind.TUPLE, items)

    def visit_List(self, node: ast.List | ast.Set) -> AbstractValue:
        return sequence(join(*[self.value(item) for item in node.elts])) if node.elts else EMPTY

    visit_Set = visit_List

    def visit_Dict(self, node: ast.Dict) -> AbstractValue:
        for key in node.keys:
            if key:
                self.value(key)
        whole = [key is None for key in node.keys]
        values = [self.value(value) for value in node.values]
        parts = [UNKNOWN if spread and value.symbolic else value for spread, value in zip(whole, values, strict=True)]
        return mapping(join(*parts)) if parts else EMPTY

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
        result = mapping(self.value(node.value)) if isinstance(node, ast.DictComp) else sequence(self.value(node.elt))
        self.variables = before
        return result

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_IfExp(self, node: ast.IfExp) -> AbstractValue:
        self.truth(node.test, "a conditional expression")
        return join(self.value(node.body), self.value(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> AbstractValue:
        word = "`and`" if isinstance(node.op, ast.And) else "`or`"
        tested = [self.truth(operand, word, whole=node) for operand in node.values[:-1]]
        return join(*tested, self.value(node.values[-1]))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> AbstractValue:
        if isinstance(node.op, ast.Not):
            self.truth(node.operand, "`not`", whole=node)
            return PLAIN
        return self.value(node.operand)

    def visit_BinOp(self, node: ast.BinOp) -> AbstractValue:
        return combined(self.value(node.left), self.value(node.right))

    def visit_Compare(self, node: ast.Compare) -> AbstractValue:
        operands = [node.left, *node.comparators]
        values = [self.value(operand) for operand in operands]
        result = PLAIN
        for index, operator in enumerate(node.ops):
            pair = values[index : index + 2]
            blind = next((i for i, value in enumerate(pair) if value.unseen), None)
            if blind is None:
                continue
            is_in = isinstance(operator, ast.In | ast.NotIn)
            if is_in or isinstance(operator, ast.Is | ast.IsNot):
                word, remedy = ("`in`", f"compare inside a node and {rule.COND}") if is_in else ("`is`", rule.COND)
                wrong = f"{word} would look at the symbolic value {named(operands[index + blind])}, not at an item"
                self.report(node, wrong, self.or_applied(remedy, node))
            else:
                result = REF
        return result

    def visit_Lambda(self, node: ast.Lambda) -> AbstractValue:
        self.interpret_nested(node)
        return PLAIN

    def visit_Call(self, node: ast.Call) -> AbstractValue:
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            callee = self.rules.attribute(base, node.func.attr)
        else:
            base, callee = None, self.value(node.func)
        self.callees[node] = callee
        arguments = [self.value(argument) for argument in node.args]
        keywords = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        symbolic = any(value.symbolic for value in (*arguments, *keywords.values()))
        self.touches += symbolic
        if callee.kind in (Kind.NODE, Kind.REF):
            return REF
        if callee.kind in (Kind.GRAPH, Kind.RESULT):
            return RESULT
        self._check_callee(node, callee, arguments)
        if isinstance(node.func, ast.Attribute) and base is not None:
            known = self._method(node.func, base, arguments)
            receiver = self.rules.receiver(base, node.func.attr)
        else:
            known, receiver = self._built_in(callee.target, arguments), []
        known = known or self._helper(node, callee.target, [*receiver, *arguments], keywords)
        if known is None and inspect.isclass(callee.target) and self.rules.is_node(callee.target):
            known = NODE
        return known or (UNKNOWN if symbolic or callee.kind is Kind.UNKNOWN else PLAIN)

    def _check_callee(self, node: ast.Call, callee: AbstractValue, arguments: list[AbstractValue]) -> None:
        foreign = rule.foreign_name(callee)
        remedy = rule.foreign_remedy(foreign) if foreign else None
        if remedy:
            self.report(node, f"{foreign} would act while tracing, not on each item", remedy)
        if arguments and arguments[0].unseen and rule.looks_at_identity(callee, len(arguments)):
            wrong = f"{named(node.func)} would look at the symbolic value {named(node.args[0])}, not at an item"
            self.report(node, wrong, self.or_applied(rule.COND, node))

    def _method(
        self, function: ast.Attribute, base: AbstractValue, arguments: list[AbstractValue]
    ) -> AbstractValue | None:
        """Return the result of a method of a built-in container, or a copy of a node; None if unknown."""
        name = function.attr
        if base.kind in (Kind.NODE, Kind.GRAPH):
            return base if name in ("with_policy", "named") else None
        own = isinstance(function.value, ast.Name) and function.value.id in self.variables and base.target is MISSING
        if arguments and (own or isinstance(base.target, list | dict | set | deque)):
            if name in _ADDERS:
                holds = mapping if name == "setdefault" else sequence
                self.store(function.value, holds(arguments[-1]))
            elif name in _EXTENDERS:
                self.store(function.value, arguments[0])
        if name == "copy" and base.kind in (Kind.SEQUENCE, Kind.MAPPING):
            return base
        if base.kind is Kind.MAPPING and name in ("values", "items"):
            item = base.items[0]
            return sequence(item if name == "values" else AbstractValue(Kind.TUPLE, (PLAIN, item)))
        if base.kind is Kind.SEQUENCE and name in ("pop", "popleft"):
            return base.items[0]
        return None

    def _built_in(self, target: object, arguments: list[AbstractValue]) -> AbstractValue | None:
        if not arguments:
            return EMPTY if any(target is one for one in (list, dict, set)) else None
        if target is getattr and arguments[0].unseen:
            return arguments[0]
        elements = [self.rules.element(value) for value in arguments]
        if any(target is one for one in _COPIES):
            return sequence(elements[0])
        if target is enumerate:
            return sequence(AbstractValue(Kind.TUPLE, (PLAIN, elements[0])))
        if target is zip:
            return sequence(AbstractValue(Kind.TUPLE, tuple(elements)))
        return None

    def _helper(
        self, node: ast.Call, target: object, arguments: list[AbstractValue], keywords: dict[str | None, AbstractValue]
    ) -> AbstractValue | None:
        """Return the result of a plain function of the same module, whose body runs while tracing; None if unknown."""
        if not isinstance(target, FunctionType) or target.__globals__ is not self.rules.namespace:
            return None
        names = target.__code__.co_varnames[: target.__code__.co_argcount]
        if None in keywords or any(isinstance(one, ast.Starred) for one in node.args) or len(arguments) > len(names):
            return None  # it is unknown which parameter gets which argument
        given = dict(zip(names, arguments, strict=False)) | {name: value for name, value in keywords.items() if name}
        return self.interpret_helper(target, given)

    def bind(self, target: ast.expr, value: AbstractValue) -> None:
        """Assign a value to a variable, or to several, or into an object."""
        match target:
            case ast.Name(name):
                if name in self.declared_outer and (self.is_graph or value.symbolic):
                    wrong = f"assigns `{name}` outside the function once, while tracing, and not for each item"
                    self.report(target, wrong, "return the value instead")
                self.variables[name] = value
            case ast.Tuple(targets) | ast.List(targets):
                for one, part in zip(targets, value.unpack(len(targets)), strict=True):
                    self.bind(one, part)
            case ast.Starred(inner):
                self.bind(inner, sequence(value))
            case ast.Attribute(base):
                self.store(base, UNKNOWN if value.symbolic and not value.unseen else value)
            case ast.Subscript(base, index):
                self.value(index)
                holds = sequence if self.value(base).kind in (Kind.SEQUENCE, Kind.TUPLE) else mapping
                self.store(base, holds(value))
            case _:
                pass

    def store(self, place: ast.expr, value: AbstractValue) -> None:
        """Put a value into an object: a variable then holds it; an object that outlives the trace must not."""
        if self.value(place).unseen:
            self.report(place, f"changes the symbolic value {named(place)}, once and while tracing", rule.INSIDE)
            return
        root = place
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if not isinstance(root, ast.Name):
            return
        if self.value(root).target is MISSING:
            known = self.variables.get(root.id, UNKNOWN)
            self.variables[root.id] = join(known, value if place is root and value.items else UNKNOWN)
        elif value.holds_unseen:
            wrong = f"stores a symbolic value in {named(place)}, which outlives the trace"
            self.report(place, wrong, "return the value, or store it inside a node")

    def truth(
        self, node: ast.expr, construct: str, remedy: str = rule.COND, *, whole: ast.expr | None = None
    ) -> AbstractValue:
        """Return the abstract value of an expression whose truth is tested, and report it if it is symbolic.

        Args:
            node: the expression.
            construct: what tests it.
            remedy: what to write in its place.
            whole: the expression that tests it, where it gives a value of its own.
        """
        value = self.value(node)
        if value.kind is Kind.REF:
            if remedy is rule.COND:
                step = node if whole is None else whole
                text = ast.unparse(step)
                is_operation = isinstance(step, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.BinOp)
                remedy = self.or_applied(remedy, step, text if is_operation else f"bool({text})")
            self.report(node, f"{construct} on the symbolic value {named(node)}", remedy)
        return value

    def iterated(self, node: ast.AST, iterable: ast.expr, construct: str) -> AbstractValue:
        """Return the abstract value of the items of an iterable, and report it if it is symbolic."""
        value = self.value(iterable)
        if value.kind is Kind.REF:
            remedy = "write a node that takes the AsyncIterator"
            if "async" not in construct:
                is_whole = isinstance(node, ast.expr) and not isinstance(node, ast.GeneratorExp)
                text = ast.unparse(node) if is_whole else f"[item for item in {ast.unparse(iterable)}]"
                remedy = self.or_applied(rule.MAP_EACH, node if isinstance(node, ast.expr) else iterable, text)
            self.report(node, f"{construct} over the symbolic value {named(iterable)}", remedy)
        return self.rules.element(value)

    def or_applied(self, remedy: str, node: ast.expr, operation: str = "") -> str:
        """Return a remedy with another one: the operation as a step of one line, written out where a lambda can do it.

        Args:
            remedy: the remedy.
            node: the expression whose variables the operation needs.
            operation: the source of the operation; that of the expression by default.
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
        self.rules.report(self.location, node, wrong, remedy)


def named(node: ast.expr) -> str:
    """Return an expression as the user wrote it, shortened to fit into a message."""
    text = ast.unparse(node)
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"


_OUTSIDE: Final = AbstractValue(Kind.PLAIN, target=object())  # `self` of a method that is not bound yet


class SourceInterpreter(ExpressionInterpreter):
    """Interprets the statements of one function, and its inner functions."""

    def __init__(self, rules: SourceRules, function: FunctionType, location: SourceLocation, is_graph: bool) -> None:
        super().__init__(rules, function, location, is_graph)
        self.depth = 0  # how deep in inner functions the interpreter is
        self.returned: list[AbstractValue] = []
        self.bodies = set(self._bodies())

    def interpret_graph(self, receiver: AbstractValue | None) -> None:
        """Interpret the function as a graph: its parameters are symbolic, the receiver of a method is not."""
        arguments = self.location.node.args
        self.variables = parameters(arguments, REF)
        if isinstance(self.location.node, ast.Lambda):  # a body: control flow passes no argument that has a default
            self.variables |= dict.fromkeys(defaults(arguments), PLAIN)
        positional = [*arguments.posonlyargs, *arguments.args]
        if positional and (receiver is not None or self._is_method()):
            self.variables[positional[0].arg] = receiver or _OUTSIDE
        self._run(self.location.node)

    def interpret_call(self, given: Environment) -> AbstractValue:
        """Interpret the function as a plain function that is called while tracing.

        Args:
            given: the abstract values of its arguments.

        Returns:
            The abstract value of its result.
        """
        node = self.location.node
        self.variables = parameters(node.args, UNKNOWN) | dict.fromkeys(defaults(node.args), PLAIN) | given
        self._run(node)
        if inspect.isgeneratorfunction(self.function):
            return UNKNOWN
        falls_through = not isinstance(node, ast.Lambda) and not isinstance(node.body[-1], ast.Return | ast.Raise)
        return join(*self.returned, *([PLAIN] if falls_through else []))

    def interpret_nested(self, node: FunctionNode) -> None:
        """Interpret an inner function: a body of control flow, or a helper whose arguments are unknown."""
        is_body = (node if isinstance(node, ast.Lambda) else node.name) in self.bodies
        given = {name: self.value(default) for name, default in defaults(node.args).items()}
        before = self.variables, self.declared_outer, self.returned
        self.variables = self.variables | parameters(node.args, REF if is_body else UNKNOWN) | given
        self.declared_outer, self.returned = set(), []
        self.depth += 1
        self._run(node)
        self.depth -= 1
        self.variables, self.declared_outer, self.returned = before

    def interpret_helper(self, function: FunctionType, given: Environment) -> AbstractValue | None:
        """Interpret a plain function of the same module, once for the same abstract values of its arguments."""
        call = (function, tuple(sorted(given.items(), key=lambda argument: argument[0])))
        if call not in self.rules.helpers:
            location = locate(function)
            if location is None:
                return None
            self.rules.helpers[call] = UNKNOWN, 0  # for a recursive call
            helper = SourceInterpreter(self.rules, function, location, is_graph=False)
            self.rules.helpers[call] = helper.interpret_call(given), helper.touches
        value, touches = self.rules.helpers[call]
        self.touches += touches
        return value

    def _run(self, node: FunctionNode) -> None:
        if isinstance(node, ast.Lambda):
            self.returned.append(self.value(node.body))
        else:
            self.block(node.body)

    def _is_method(self) -> bool:
        node = self.location.node
        scope = self.function.__qualname__.rpartition(".")[0]
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in decorators)
        return bool(scope) and not scope.endswith("<locals>") and not static

    def _bodies(self) -> Iterator[str | ast.expr]:
        """Yield the lambdas, and the names of functions, that are passed to control flow as bodies."""
        for call in self.nodes:
            if isinstance(call, ast.Call) and self._takes_bodies(call.func):
                waiting = [*call.args, *(keyword.value for keyword in call.keywords)]
                while waiting:
                    match waiting.pop():
                        case ast.Lambda() as body:
                            yield body
                        case ast.Name(name):
                            yield name
                        case ast.Tuple(branches) | ast.List(branches):
                            waiting += branches
                        case _:
                            pass

    def _takes_bodies(self, callee: ast.expr) -> bool:
        """Whether `callee` is control flow, which traces functions passed to it; for a node they are plain values."""
        names: list[str] = []
        while isinstance(callee, ast.Attribute):
            names.append(callee.attr)
            callee = callee.value
        if not isinstance(callee, ast.Name) or callee.id in self.assigned:
            return False
        value = self.rules.look_up(self.function, callee.id)
        for name in reversed(names):
            value = self.rules.attribute(value, name)
        return rule.is_control_flow(value.target)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.variables[node.name] = UNKNOWN
        if not node.decorator_list:  # with a decorator, it is a node or a graph of its own, or unknown
            self.interpret_nested(node)

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
        self.variables = merged(after)

    def loop(self, target: ast.expr | None, item: AbstractValue, body: Sequence[ast.stmt]) -> None:
        for _ in range(2):
            before = dict(self.variables)
            if target is not None:
                self.bind(target, item)
            self.block(body)
            self.variables = merged([before, self.variables])

    def visit_Expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        self.returned.append(self.value(node.value) if node.value else PLAIN)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.bind(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.bind(node.target, self.value(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        before = self.variables.get(node.target.id, PLAIN) if isinstance(node.target, ast.Name) else PLAIN
        self.bind(node.target, combined(before, self.value(node.value)))

    def visit_If(self, node: ast.If) -> None:
        self.truth(node.test, "`if`")
        self.branches(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.truth(node.test, "`while`", "use ps.while_loop")
        self.loop(None, PLAIN, node.body)
        self.block(node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        construct = "`for`" if isinstance(node, ast.For) else "`async for`"
        self.loop(node.target, self.iterated(node, node.iter, construct), node.body)
        self.block(node.orelse)

    visit_AsyncFor = visit_For

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        known, before = len(self.rules.problems), self.touches
        for item in node.items:
            manager = self.value(item.context_expr)
            foreign = rule.foreign_name(self.callees.get(item.context_expr, manager))
            if foreign and isinstance(node, ast.AsyncWith) and not rule.foreign_remedy(foreign):
                self.report(node, f"{foreign} would be entered while tracing, not for each item", rule.WITH)
            if item.optional_vars:
                self.bind(item.optional_vars, UNKNOWN if manager.symbolic else PLAIN)
        self.block(node.body)
        if self.touches > before and len(self.rules.problems) == known:
            self.report(node, "`with` would be left before any node runs", rule.WITH)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        before = self.touches
        self.block(node.body)
        if self.touches > before:
            self.report(node, "`try` would be left before any node runs and could not catch its error", rule.FALLBACK)
        for handler in node.handlers:
            if handler.name:
                self.variables[handler.name] = PLAIN
        self.branches(node.orelse, *(handler.body for handler in node.handlers))
        self.block(node.finalbody)

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        subject = self.value(node.subject)
        if subject.holds_unseen:
            self.report(node, f"`match` would see the symbolic value {named(node.subject)}, not an item", rule.COND)
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
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.variables[name] = self.rules.imported(node, alias, self.function)

    visit_ImportFrom = visit_Import

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.variables[node.name] = UNKNOWN

    def visit_Yield(self, node: ast.Yield | ast.YieldFrom) -> AbstractValue:
        if self.is_graph and self.depth == 0:
            remedy = "return what a node that is an async generator gives"
            self.report(node, "an async generator is not a graph", remedy)
        return self.generic_visit(node)

    visit_YieldFrom = visit_Yield


def parameters(arguments: ast.arguments, value: AbstractValue) -> Environment:
    """Return this value for each parameter; for `*args` and `**kwargs`, containers of such values."""
    named_ones = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    result = {argument.arg: value for argument in named_ones}
    if arguments.vararg:
        result[arguments.vararg.arg] = sequence(value)
    if arguments.kwarg:
        result[arguments.kwarg.arg] = mapping(value)
    return result


def defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    """Return the default of each parameter that has one."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    result = {argument.arg: default for argument, default in zip(with_default, arguments.defaults, strict=True)}
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return result | {argument.arg: default for argument, default in keyword_only if default}


def merged(environments: Sequence[Environment]) -> Environment:
    """Return the abstract value of each variable after one of several paths was taken."""
    names = dict.fromkeys(name for environment in environments for name in environment)
    return {name: join(*[one[name] for one in environments if name in one]) for name in names}
