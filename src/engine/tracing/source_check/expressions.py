"""Interpret expressions with abstract values: which are symbolic, and which ask one what it cannot tell."""

# ast.NodeVisitor chooses the names of these methods, and the syntax is their documentation.
# ruff: noqa: N815, D102

import ast
import inspect
from collections import deque
from types import FunctionType
from typing import Final, cast

from . import rules as rule
from .location import FunctionNode, SourceLocation
from .rules import SourceRules
from .values import (
    EMPTY,
    MISSING,
    NODE,
    PLAIN,
    REF,
    RESULT,
    UNKNOWN,
    Kind,
    Value,
    combined,
    join,
    mapping,
    sequence,
)

Environment = dict[str, Value]

_ADDERS: Final = ("add", "append", "appendleft", "insert", "setdefault")
_EXTENDERS: Final = ("extend", "extendleft", "update")
_COPIES: Final = (list, tuple, set, frozenset, sorted, reversed, iter)


class ExpressionInterpreter(ast.NodeVisitor):
    """Interprets the expressions of one function, and what assignments of their values do.

    Attributes:
        rules: what is known of objects, and where problems are noted.
        function: the function, for what its names mean.
        location: where its source is.
        is_graph: whether it is a graph or branch, and not a plain function that one calls.
        variables: what is known of each variable at this point.
        nodes: the whole syntax tree of the function.
        assigned: all variables, also of functions inside.
        declared_outer: the names under `global` or `nonlocal`.
        touches: how often something symbolic was used so far.
        callees: what was called in each call so far.
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
        self.callees: dict[ast.expr, Value] = {}

    def interpret_nested(self, node: FunctionNode) -> None:
        """Interpret a function inside."""
        raise NotImplementedError

    def interpret_helper(self, function: FunctionType, given: Environment) -> Value | None:
        """Interpret a plain function that is called with this; None if it has no source."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> Value:
        """What is known of an expression; whatever is wrong in it is reported."""
        value = cast("Value", self.visit(node))
        self.touches += value.unseen
        return value

    def generic_visit(self, node: ast.AST) -> Value:
        values = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return UNKNOWN if any(value.symbolic for value in values) else PLAIN

    def visit_Constant(self, node: ast.Constant) -> Value:  # the base class looks for old names
        return PLAIN

    def visit_Name(self, node: ast.Name) -> Value:
        if node.id in self.variables:
            return self.variables[node.id]
        return UNKNOWN if node.id in self.assigned else self.rules.look_up(self.function, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        return self.rules.attribute(self.value(node.value), node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        base, _ = self.value(node.value), self.value(node.slice)
        match base, node.slice:
            case Value(kind=Kind.REF | Kind.RESULT), _:
                return base
            case Value(kind=Kind.SEQUENCE), ast.Slice():
                return base
            case Value(kind=Kind.SEQUENCE | Kind.MAPPING), _:
                return base.items[0]
            case Value(kind=Kind.TUPLE, items=items), ast.Constant(int(index)) if index < len(items):
                return items[index]
            case Value(kind=Kind.PLAIN), ast.Constant(key):
                return self.rules.item(base, key)
            case _:
                return UNKNOWN if base.symbolic else PLAIN

    def visit_Await(self, node: ast.Await) -> Value:
        value = self.value(node.value)
        self.touches += 1
        foreign = rule.foreign_name(self.callees.get(node.value, value))
        if foreign and not rule.foreign_remedy(foreign):
            self.report(node, f"awaits {foreign} while tracing, not for each item", rule.INSIDE)
        return UNKNOWN if value.kind is Kind.PLAIN else value

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.bind(node.target, value)
        return value

    def visit_Starred(self, node: ast.Starred) -> Value:
        return self.rules.element(self.value(node.value))

    def visit_Tuple(self, node: ast.Tuple) -> Value:
        items = tuple(self.value(item) for item in node.elts)
        starred = any(isinstance(item, ast.Starred) for item in node.elts)
        return sequence(join(*items)) if starred else Value(Kind.TUPLE, items)

    def visit_List(self, node: ast.List | ast.Set) -> Value:
        return sequence(join(*[self.value(item) for item in node.elts])) if node.elts else EMPTY

    visit_Set = visit_List

    def visit_Dict(self, node: ast.Dict) -> Value:
        for key in node.keys:
            if key:
                self.value(key)
        whole = [key is None for key in node.keys]
        values = [self.value(value) for value in node.values]
        parts = [UNKNOWN if spread and value.symbolic else value for spread, value in zip(whole, values, strict=True)]
        return mapping(join(*parts)) if parts else EMPTY

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        before = self.variables
        self.variables = dict(before)
        for generator in node.generators:
            construct = "an async comprehension" if generator.is_async else "a comprehension"
            self.bind(generator.target, self.iterated(node, generator.iter, construct))
            for condition in generator.ifs:
                self.truth(condition, "`if`")
        if isinstance(node, ast.DictComp):
            self.value(node.key)
            result = mapping(self.value(node.value))
        else:
            result = sequence(self.value(node.elt))
        self.variables = before
        return result

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        self.truth(node.test, "a conditional expression")
        return join(self.value(node.body), self.value(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> Value:
        word = "`and`" if isinstance(node.op, ast.And) else "`or`"
        return join(*[self.truth(operand, word) for operand in node.values[:-1]], self.value(node.values[-1]))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            self.truth(node.operand, "`not`")
            return PLAIN
        return self.value(node.operand)

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        return combined(self.value(node.left), self.value(node.right))

    def visit_Compare(self, node: ast.Compare) -> Value:
        operands = [node.left, *node.comparators]
        values = [self.value(operand) for operand in operands]
        result = PLAIN
        for index, operator in enumerate(node.ops):
            pair = values[index : index + 2]
            blind = next((i for i, value in enumerate(pair) if value.unseen), None)
            if blind is None:
                continue
            if isinstance(operator, ast.Is | ast.IsNot):
                wrong = f"`is` would look at the symbolic value {named(operands[index + blind])}, not at an item"
                self.report(node, wrong, rule.COND)
            elif isinstance(operator, ast.In | ast.NotIn):
                wrong = f"`in` would look at the symbolic value {named(operands[index + blind])}, not at an item"
                self.report(node, wrong, f"compare inside a node and {rule.COND}")
            else:
                result = REF
        return result

    def visit_Lambda(self, node: ast.Lambda) -> Value:
        self.interpret_nested(node)
        return PLAIN

    def visit_Call(self, node: ast.Call) -> Value:
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

    def _check_callee(self, node: ast.Call, callee: Value, arguments: list[Value]) -> None:
        foreign = rule.foreign_name(callee)
        remedy = rule.foreign_remedy(foreign) if foreign else None
        if remedy:
            self.report(node, f"{foreign} would act while tracing, not on each item", remedy)
        if arguments and arguments[0].unseen and rule.looks_at_identity(callee, len(arguments)):
            wrong = f"{named(node.func)} would look at the symbolic value {named(node.args[0])}, not at an item"
            self.report(node, wrong, rule.COND)

    def _method(self, function: ast.Attribute, base: Value, arguments: list[Value]) -> Value | None:
        """The result of a method of a built-in container, or of `with_policy` of a node."""
        name = function.attr
        if base.kind in (Kind.NODE, Kind.GRAPH):
            return base if name == "with_policy" else None
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
            return sequence(item if name == "values" else Value(Kind.TUPLE, (PLAIN, item)))
        if base.kind is Kind.SEQUENCE and name in ("pop", "popleft"):
            return base.items[0]
        return None

    def _built_in(self, target: object, arguments: list[Value]) -> Value | None:
        if not arguments:
            return EMPTY if any(target is one for one in (list, dict, set)) else None
        if target is getattr and arguments[0].unseen:
            return arguments[0]
        elements = [self.rules.element(value) for value in arguments]
        if any(target is one for one in _COPIES):
            return sequence(elements[0])
        if target is enumerate:
            return sequence(Value(Kind.TUPLE, (PLAIN, elements[0])))
        if target is zip:
            return sequence(Value(Kind.TUPLE, tuple(elements)))
        return None

    def _helper(
        self, node: ast.Call, target: object, arguments: list[Value], keywords: dict[str | None, Value]
    ) -> Value | None:
        """The result of a plain function of the same module: its body runs while tracing as well."""
        if not isinstance(target, FunctionType) or target.__globals__ is not self.rules.namespace:
            return None
        names = target.__code__.co_varnames[: target.__code__.co_argcount]
        if None in keywords or any(isinstance(one, ast.Starred) for one in node.args) or len(arguments) > len(names):
            return None  # which parameter gets what is not known
        given = dict(zip(names, arguments, strict=False)) | {name: value for name, value in keywords.items() if name}
        return self.interpret_helper(target, given)

    def bind(self, target: ast.expr, value: Value) -> None:
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

    def store(self, place: ast.expr, value: Value) -> None:
        """Put a value into an object: a variable then holds it; what outlives the trace must not."""
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

    def truth(self, node: ast.expr, construct: str, remedy: str = rule.COND) -> Value:
        """What is known of an expression that is asked for its truth."""
        value = self.value(node)
        if value.kind is Kind.REF:
            self.report(node, f"{construct} on the symbolic value {named(node)}", remedy)
        return value

    def iterated(self, node: ast.AST, iterable: ast.expr, construct: str) -> Value:
        """What is known of the items of an iterable."""
        value = self.value(iterable)
        if value.kind is Kind.REF:
            remedy = "write a node that takes the AsyncIterator" if "async" in construct else rule.MAP_EACH
            self.report(node, f"{construct} over the symbolic value {named(iterable)}", remedy)
        return self.rules.element(value)

    def report(self, node: ast.AST, wrong: str, remedy: str) -> None:
        self.rules.report(self.location, node, wrong, remedy)


def named(node: ast.expr) -> str:
    """An expression as the user wrote it, cut to what fits into a message."""
    text = ast.unparse(node)
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"
