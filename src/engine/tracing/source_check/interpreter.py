"""Interpret the body of a graph with abstract values, to know what in it is symbolic.

A forward pass: assignments move values between variables, branches are joined, a loop is run twice (its second round
starts from whatever the first one left). Each pass is one that the traced function could take, so whatever is
reported does happen.
"""

# ast.NodeVisitor chooses the names of these methods, and the syntax is their documentation.
# ruff: noqa: N802, N815, D102

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Final

from . import rules as rule
from .expressions import Environment, ExpressionInterpreter, named
from .location import FunctionNode, SourceLocation, locate
from .rules import SourceRules
from .values import PLAIN, REF, UNKNOWN, Kind, Value, combined, join, mapping, sequence

_OUTSIDE: Final = Value(Kind.PLAIN, target=object())  # `self` of a method that is not bound yet


class SourceInterpreter(ExpressionInterpreter):
    """Interprets one function, and the functions inside it."""

    def __init__(self, rules: SourceRules, function: FunctionType, location: SourceLocation, is_graph: bool) -> None:
        super().__init__(rules, function, location, is_graph)
        self.depth = 0  # of functions inside the function
        self.returned: list[Value] = []
        self.bodies = set(self._bodies())

    def interpret_graph(self, receiver: Value | None) -> None:
        """Interpret the function as a graph: its parameters are symbolic, the receiver of a method is not."""
        arguments = self.location.node.args
        self.variables = parameters(arguments, REF)
        if isinstance(self.location.node, ast.Lambda):  # the body of a branch: nobody gives what has a default
            self.variables |= dict.fromkeys(defaults(arguments), PLAIN)
        positional = [*arguments.posonlyargs, *arguments.args]
        if positional and (receiver is not None or self._is_method()):
            self.variables[positional[0].arg] = receiver or _OUTSIDE
        self._run(self.location.node)

    def interpret_call(self, given: Environment) -> Value:
        """Interpret the function as a plain one that is called while tracing.

        Args:
            given: what is known of its arguments.

        Returns:
            What is known of its result.
        """
        node = self.location.node
        self.variables = parameters(node.args, UNKNOWN) | dict.fromkeys(defaults(node.args), PLAIN) | given
        self._run(node)
        if inspect.isgeneratorfunction(self.function):
            return UNKNOWN
        falls_through = not isinstance(node, ast.Lambda) and not isinstance(node.body[-1], ast.Return | ast.Raise)
        return join(*self.returned, *([PLAIN] if falls_through else []))

    def interpret_nested(self, node: FunctionNode) -> None:
        """Interpret a function inside: the body of a branch, or a helper whose arguments are not known."""
        is_body = (node if isinstance(node, ast.Lambda) else node.name) in self.bodies
        given = {name: self.value(default) for name, default in defaults(node.args).items()}
        before = self.variables, self.declared_outer, self.returned
        self.variables = self.variables | parameters(node.args, REF if is_body else UNKNOWN) | given
        self.declared_outer, self.returned = set(), []
        self.depth += 1
        self._run(node)
        self.depth -= 1
        self.variables, self.declared_outer, self.returned = before

    def interpret_helper(self, function: FunctionType, given: Environment) -> Value | None:
        """Interpret a plain function of the same module, once for the same knowledge of its arguments."""
        call = (function, tuple(sorted(given.items(), key=lambda argument: argument[0])))
        if call not in self.rules.helpers:
            location = locate(function)
            if location is None:
                return None
            self.rules.helpers[call] = UNKNOWN, 0  # for a call of itself inside
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
        """The lambdas, and the names of functions, that are given to a control-flow function."""
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
        """Whether functions given to it are traced as branches; a node may take a function for a plain argument."""
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
        if not node.decorator_list:  # else it is a node or graph of its own
            self.interpret_nested(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def branches(self, *blocks: Sequence[ast.stmt]) -> None:
        """Interpret blocks of which one runs, and join what they leave."""
        before, after = self.variables, list[Environment]()
        for statements in blocks:
            self.variables = dict(before)
            self.block(statements)
            after.append(self.variables)
        self.variables = merged(after)

    def loop(self, target: ast.expr | None, item: Value, body: Sequence[ast.stmt]) -> None:
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

    def visit_For(self, node: ast.For) -> None:
        self.loop(node.target, self.iterated(node, node.iter, "`for`"), node.body)
        self.block(node.orelse)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.loop(node.target, self.iterated(node, node.iter, "`async for`"), node.body)
        self.block(node.orelse)

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

    def visit_Yield(self, node: ast.Yield | ast.YieldFrom) -> Value:
        if self.is_graph and self.depth == 0:
            remedy = "return what a node that is an async generator gives"
            self.report(node, "an async generator is no graph", remedy)
        return self.generic_visit(node)

    visit_YieldFrom = visit_Yield


def parameters(arguments: ast.arguments, value: Value) -> Environment:
    """Every parameter with this value; `*args` and `**kwargs` hold such values."""
    named_ones = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    result = {argument.arg: value for argument in named_ones}
    if arguments.vararg:
        result[arguments.vararg.arg] = sequence(value)
    if arguments.kwarg:
        result[arguments.kwarg.arg] = mapping(value)
    return result


def defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    """The default of each parameter that has one."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    result = {argument.arg: default for argument, default in zip(with_default, arguments.defaults, strict=True)}
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return result | {argument.arg: default for argument, default in keyword_only if default}


def merged(environments: Sequence[Environment]) -> Environment:
    """What is known of each variable after one of several paths."""
    names = dict.fromkeys(name for environment in environments for name in environment)
    return {name: join(*[one[name] for one in environments if name in one]) for name in names}
