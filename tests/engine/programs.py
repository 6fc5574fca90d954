"""Random graph functions: a program as data, its source, and the calls it makes if the passes keep their promises."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from hypothesis import strategies as st


@dataclass(frozen=True)
class Kind:
    """A node: its function of numbers and containers of numbers, and its declared options."""

    compute: Any
    arity: int = 2
    is_async: bool = True
    pure: bool = False
    effectful: bool | Literal["unordered"] = False


def flat(value: Any) -> Iterator[int]:
    """The numbers in a nested container."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for member in value:
            yield from flat(member)
    else:
        yield value


def total(value: Any) -> int:
    return sum(place * number for place, number in enumerate(flat(value), 1)) % 97


KINDS: dict[str, Kind] = {
    "increment": Kind(lambda a: (total(a) + 1) % 97, 1, is_async=False),
    "double": Kind(lambda a: (2 * total(a)) % 97, 1, is_async=False),
    "mix": Kind(lambda a, b: total([a, b])),
    "note": Kind(total, 1, effectful="unordered"),
    "book": Kind(lambda a: (total(a) + 7) % 97, 1, effectful=True),
    "stamp": Kind(lambda a, b: total([b, a, b]), is_async=False, effectful=True),
    "pure_increment": Kind(lambda a: (total(a) + 3) % 97, 1, is_async=False, pure=True),
    "pure_mix": Kind(lambda a, b: total((b, a)), pure=True),
    "pair": Kind(lambda a: (total(a), (total(a) * 5) % 97), 1, is_async=False),
}
# Nodes that control flow calls.
HELPERS: dict[str, Kind] = {
    "odd": Kind(lambda a: total(a) % 2, 1),
    "branch": Kind(lambda a, count: total(a) % count, is_async=False),
    "upto": Kind(lambda a: list(range(total(a) % 4)), 1),
    "unfinished": Kind(lambda state: state[0] < 3, 1, pure=True),
    "counted": Kind(lambda a: a + 1, 1, is_async=False, pure=True),
}
# The helper that computes the first argument of a construct; it is not pure.
FIRST = {"cond": "odd", "switch": "branch", "map_each": "upto"}
# The least and the largest number of bodies of each control flow function.
BODIES = {"cond": (2, 2), "switch": (1, 3), "while_loop": (1, 1), "map_each": (1, 1)}


@dataclass(frozen=True)
class Var:
    """A variable; with `item`, one member of a variable that is a pair."""

    name: str
    item: int | None = None


@dataclass(frozen=True)
class Box:
    """A list, tuple or dict of operands."""

    kind: str
    members: "tuple[Operand, ...]"


Operand: TypeAlias = Var | Box | int


@dataclass(frozen=True)
class Line:
    """`target = function(operands)`, or control flow with its condition (if it has one), its operand and its bodies.

    A late line is called here. It is awaited after the next line, if the next line does not read its value.
    """

    target: str
    function: str
    operands: tuple[Operand, ...]
    bodies: "tuple[Program, ...]" = ()
    late: bool = False


@dataclass(frozen=True)
class Program:
    """A function as data: its parameters, lines and result."""

    name: str
    parameters: tuple[str, ...]
    lines: tuple[Line, ...]
    result: Operand


# Strategies


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of two numbers."""
    return _program(draw, "g", ("x", "y"), (), 2, draw(st.integers(0, 9)))


def _program(
    draw: st.DrawFn, name: str, parameters: tuple[str, ...], around: tuple[str, ...], depth: int, size: int
) -> Program:
    known = [*around, *parameters]
    pairs: list[str] = []
    lines: list[Line] = []
    for number in range(size):
        function = draw(st.sampled_from([*KINDS, *(BODIES if depth else ())]))
        if lines and draw(st.integers(0, 4)) == 0:  # repeat an earlier call
            line = replace(draw(st.sampled_from([*lines, lines[-1]])), target=f"{name}_{number}")
            line = line if not line.bodies else Line(line.target, "note", line.operands[:1])
        elif function in KINDS:
            operands = tuple([_operand(draw, known, pairs) for _ in range(KINDS[function].arity)])
            late = KINDS[function].is_async and draw(st.booleans())
            line = Line(f"{name}_{number}", function, operands, late=late)
        else:
            count = 2 if function in ("cond", "switch") else 1
            operands = tuple([_operand(draw, known, pairs) for _ in range(count)])
            names = [f"{name}_{number}_{index}" for index in range(draw(st.integers(*BODIES[function])))]
            bodies = [
                _program(draw, one, (f"{one}_v",), tuple(known), depth - 1, draw(st.integers(0, 3))) for one in names
            ]
            line = Line(f"{name}_{number}", function, operands, tuple(bodies))
        lines.append(line)
        known.append(line.target)
        if line.function == "pair":
            pairs.append(line.target)
    result = [_operand(draw, known, pairs) for _ in range(draw(st.integers(1, 4)))]
    return Program(name, parameters, tuple(lines), Box("list", tuple(result)) if len(result) > 1 else result[0])


def _operand(draw: st.DrawFn, known: list[str], pairs: list[str], depth: int = 2) -> Operand:
    choice = draw(st.integers(0, 9))
    if choice == 0:
        return draw(st.integers(0, 3))
    if choice == 1 and pairs:
        return Var(draw(st.sampled_from(pairs)), draw(st.integers(0, 1)))
    if choice == 2 and depth:
        members = [_operand(draw, known, pairs, depth - 1) for _ in range(draw(st.integers(0, 3)))]
        return Box(draw(st.sampled_from(["list", "tuple", "dict"])), tuple(members))
    return Var(draw(st.sampled_from(known if choice < 6 else known[-3:])))


# Source


def source_of(program: Program) -> str:
    """The program as a graph."""
    return "\n".join(["@ps.graph", *_function(program)])


def _function(program: Program) -> list[str]:
    lines = [f"async def {program.name}({', '.join(program.parameters)}):"]
    called: set[str] = set()
    for line, calls in in_order(program):
        for late in calls:
            lines.append(f"    {late.target}_call = {_right_side(late).removeprefix('await ')}")
            called.add(late.target)
        for body in line.bodies:
            lines += [f"    {text}" for text in _function(body)]
        if line.function == "while_loop":
            lines.append(f"    async def {line.target}_step(state):")
            lines.append(f"        return counted(state[0]), await {line.bodies[0].name}(state[1])")
        right = f"await {line.target}_call" if line.target in called else _right_side(line)
        lines.append(f"    {line.target} = {right}")
    return [*lines, f"    return {_text(program.result)}"]


def in_order(program: Program) -> Iterator[tuple[Line, tuple[Line, ...]]]:
    """The lines in the order of plain Python, each with the lines that are called before it and awaited after it."""
    lines = list(program.lines)
    for at in range(len(lines) - 1):
        line, following = lines[at], lines[at + 1]
        if line.late and not following.late and line.target not in _read_by(following):
            lines[at], lines[at + 1] = following, line
    position = {line.target: at for at, line in enumerate(program.lines)}
    for at, line in enumerate(lines):
        before = position[line.target]
        calls = [one for one in lines[at + 1 : at + 2] if position[one.target] < before]
        yield line, tuple(calls)


def _read_by(line: Line) -> set[str]:
    inside = itertools.chain.from_iterable(_mentioned(body) for body in line.bodies)
    return {*itertools.chain.from_iterable(map(_names, line.operands)), *inside}


def _right_side(line: Line) -> str:
    operands = [_text(operand) for operand in line.operands]
    bodies = ", ".join(body.name for body in line.bodies)
    match line.function:
        case "cond":
            return f"await ps.cond(await odd({operands[0]}), {bodies}, {operands[1]})"
        case "switch":
            return f"await ps.switch(branch({operands[0]}, {len(line.bodies)}), ({bodies},), {operands[1]})"
        case "while_loop":
            return f"(await ps.while_loop(unfinished, {line.target}_step, (0, {operands[0]})))[1]"
        case "map_each":
            one_by_one = ", concurrency=1" * is_ordered(line)  # at a time, so that effects of items have an order
            return f"await ps.map_each({bodies}, await upto({operands[0]}){one_by_one})"
        case function:
            return f"{'await ' * KINDS[function].is_async}{function}({', '.join(operands)})"


def _text(operand: Operand) -> str:
    if isinstance(operand, Var):
        return operand.name if operand.item is None else f"{operand.name}[{operand.item}]"
    if isinstance(operand, int):
        return str(operand)
    members = [_text(member) for member in operand.members]
    if operand.kind == "dict":
        return "{" + ", ".join(f"'k{index}': {member}" for index, member in enumerate(members)) + "}"
    return f"[{', '.join(members)}]" if operand.kind == "list" else f"({''.join(member + ', ' for member in members)})"


# Oracle


class Oracle:
    """Computes a program in plain Python, and makes only the calls that the passes keep.

    Attributes:
        calls: how often each node was called.
    """

    def __init__(self, *, with_passes: bool) -> None:
        self.with_passes = with_passes
        self.calls: Counter[str] = Counter()

    def run(self, program: Program, given: Mapping[str, Any]) -> Any:
        """The result of a program whose parameters, and variables around it, have these values."""
        values = dict(given)
        first: dict[object, str] = {}
        equal: dict[str, str] = {}  # a merged call: the earlier call that replaces it
        live = _live(program) if self.with_passes else None
        for line in program.lines:
            if live is not None and line.target not in live:
                if line.function in FIRST:
                    self.first(line, _value(line.operands[0], values))
                continue
            call = (line.function, tuple(_renamed(operand, equal) for operand in line.operands))
            if self.with_passes and line.function in KINDS and KINDS[line.function].pure and call in first:
                equal[line.target] = first[call]
                values[line.target] = values[first[call]]
                continue
            first.setdefault(call, line.target)
            args = [_value(operand, values) for operand in line.operands]
            values[line.target] = self.compute(line, args, values)
        return _value(program.result, values)

    def first(self, line: Line, value: Any) -> Any:
        return self.call(FIRST[line.function], value, *([len(line.bodies)] if line.function == "switch" else []))

    def compute(self, line: Line, args: list[Any], values: Mapping[str, Any]) -> Any:
        def body(index: int, value: Any) -> Any:
            inner = line.bodies[index]
            return self.run(inner, {**values, inner.parameters[0]: value})

        match line.function:
            case "cond":
                return body(0 if self.first(line, args[0]) else 1, args[1])
            case "switch":
                return body(self.first(line, args[0]), args[1])
            case "while_loop":
                state = (0, args[0])
                while self.call("unfinished", state):
                    state = (self.call("counted", state[0]), body(0, state[1]))
                return state[1]
            case "map_each":
                return [body(0, value) for value in self.first(line, args[0])]
            case function:
                return self.call(function, *args)

    def call(self, name: str, *args: Any) -> Any:
        self.calls[name] += 1
        return {**KINDS, **HELPERS}[name].compute(*args)


def _live(program: Program) -> set[str]:
    """The targets of lines that run: all but lines whose value is not read, and that only call pure nodes."""
    live = set(_names(program.result))
    for line in reversed(program.lines):
        if line.target in live or not _is_pure(line):
            live |= {line.target, *_read_by(line)}
        elif line.function in FIRST:
            live.update(_names(line.operands[0]))
    return live


def is_ordered(line: Line) -> bool:
    """Whether a line is an effect that keeps the order of the source."""
    return (line.function in KINDS and KINDS[line.function].effectful is True) or any(
        is_ordered(inner) for body in line.bodies for inner in body.lines
    )


def _is_pure(line: Line) -> bool:
    return (
        KINDS[line.function].pure
        if line.function in KINDS
        else all(_is_pure(inner) for body in line.bodies for inner in body.lines)
    )


def _mentioned(program: Program) -> Iterator[str]:
    yield from _names(program.result)
    for line in program.lines:
        for operand in line.operands:
            yield from _names(operand)
        for body in line.bodies:
            yield from _mentioned(body)


def _names(operand: Operand) -> Iterator[str]:
    if isinstance(operand, Var):
        yield operand.name
    elif isinstance(operand, Box):
        for member in operand.members:
            yield from _names(member)


def _renamed(operand: Operand, equal: Mapping[str, str]) -> Operand:
    if isinstance(operand, Var):
        return Var(equal.get(operand.name, operand.name), operand.item)
    if isinstance(operand, Box):
        return Box(operand.kind, tuple(_renamed(member, equal) for member in operand.members))
    return operand


def _value(operand: Operand, values: Mapping[str, Any]) -> Any:
    if isinstance(operand, Var):
        value = values[operand.name]
        return value if operand.item is None else value[operand.item]
    if isinstance(operand, int):
        return operand
    members = [_value(member, values) for member in operand.members]
    if operand.kind == "dict":
        return {f"k{index}": member for index, member in enumerate(members)}
    return members if operand.kind == "list" else tuple(members)
