"""No silently wrong trace: the operations that a symbolic value refuses; every error names file, line and remedy."""

import asyncio
import copy
import dataclasses
import functools
import json
import math
import os
import pickle
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

import penstock as ps
from penstock import data, engine
from tests.engine.tracing import assert_names_line_and_remedy, body, define, refusal
from tests.kit import numbers

CONTROL_FLOW = ["ps.cond", "ps.switch"]
NODE = ["inside a node"]
ARITHMETIC = ["+", "-", "*", "@", "/", "//", "%", "**", "<<", ">>", "&", "^", "|"]


@dataclasses.dataclass
class Box:
    value: object


# Text of the message, words of its remedy, and lines with the Ref `v` that cause it.
REFUSED: list[tuple[str, list[str], list[str]]] = [
    ("truth value", ["ps.cond", "ps.while_loop"], ["bool(v)"]),
    ("truth value", ["ps.cond"], [
        "1 if v else 2", "v and 1", "v or 1", "not v", "if v: pass", "while v: pass", "assert v",
    ]),
    ("comparing it", CONTROL_FLOW, [
        *(f"v {sign} 1" for sign in ('==', '!=', '<', '<=', '>', '>=')), "1 == v", "0 < v < 3", "max(v, 1)",
        "sorted([v, 1])", "v in [1]",
    ]),
    ("arithmetic", NODE, [
        "sorted([v, v + 0])", *(f"v {sign} 1" for sign in ARITHMETIC), *(f"1 {sign} v" for sign in ARITHMETIC),
        "divmod(v, 2)", "-v", "+v", "~v", "abs(v)", "round(v)", "math.floor(v)", "math.ceil(v)", "math.trunc(v)",
        "v += 1",
    ]),
    ("`in`", CONTROL_FLOW, ["1 in v"]),
    ("int()", NODE, ["int(v)"]),
    ("float()", NODE, ["float(v)", "math.sqrt(v)"]),
    ("complex()", NODE, ["complex(v)"]),
    ("bytes()", NODE, ["bytes(v)"]),
    ("len()", NODE, ["len(v)"]),
    ("iterating", ["ps.map_each", "tuple[A, B]"], [
        "list(v)", "[item for item in v]", "for item in v: pass", "first, *rest = v", "a, b = v",
    ]),
    ("iterating", ["ps.map_each"], ["[*v]", "sum(v)", "iter(v)", "enumerate(v)"]),
    ("calling it", NODE, ["dict(v)"]),
    ("next()", NODE, ["next(v)"]),
    ("backwards", NODE, ["reversed(v)"]),
    ("text", NODE, ["str(v)", "f'{v}'", "f'{v:>10}'", "'%s' % v", "'{}'.format(v)", "print(v)"]),
    ("dict key", ["take a key that is known"], [
        "{v}", "{v: 1}", "hash(v)", "functools.lru_cache(lambda value: value)(v)",
    ]),
    ("calling it", ["inside a node"], ["v()"]),
    ("calling it", ["a method of a value is not a node"], ["v.strip()"]),
    ("index", NODE, ["[1, 2][v]", "[1, 2, 3][v:]"]),
    ("number of rounds", [*NODE, "repeat with ps.while_loop"], ["range(v)"]),
    ("indexing it with a value that is not known", NODE, ["y[v]", "y[v:]", "y[0, v]"]),
    ("assigning to an item", NODE, ["v[0] = 1"]),
    ("deleting an item", NODE, ["del v[0]"]),
    ("assigning to its attribute .name", NODE, ["v.name = 1"]),
    ("deleting an attribute", NODE, ["del v.name"]),
    ("`with`", [], ["with v: pass"]),
    ("`async with`", [], ["async with v: pass"]),
    ("`async for`", [], ["async for item in v: pass"]),
    ("path", NODE, ["os.fspath(v)", "open(v)"]),
    ("copying", NODE, ["copy.copy(v)", "copy.deepcopy([v])"]),
    ("pickling", NODE, ["pickle.dumps(v)"]),
    ("awaiting it", ["remove the await"], ["await v"]),
]  # fmt: skip
OPERATIONS = [(line, what, remedies) for what, remedies, lines in REFUSED for line in lines]
MODULES = {module.__name__: module for module in (asyncio, copy, dataclasses, functools, math, os, pickle)}

# A statement cannot be written as the lambda of a step, and an awaited call needs no step.
NO_STEP = "assigning to", "deleting", "`with`", "`async with`", "`async for`", "awaiting it"


@pytest.mark.parametrize(("line", "what", "remedies"), OPERATIONS, ids=[one[0] for one in OPERATIONS])
def test_a_value_that_is_not_known_refuses_and_the_error_writes_the_step(
    line: str, what: str, remedies: list[str]
) -> None:
    message = refusal(lambda: body("v = await double(x)", line, "return v", **MODULES))
    assert_names_line_and_remedy(message, 4, what, remedies)
    if what.startswith(NO_STEP):
        return
    [(parameters, operation)] = re.findall(r"ps\.apply\(lambda ([\w, ]+): (.*), \1\)", message)
    compile(operation, "<remedy>", "eval")
    assert "value" in parameters
    if (found := re.fullmatch(r"(v|1) (\S+) (v|1)", line)) and found[2] in ARITHMETIC:
        assert operation == (f"value {found[2]} other" if found[1] == "v" else f"other {found[2]} value")


@pytest.mark.parametrize(
    ("expression", "remedy"),
    [
        ("f'{v}'", 'ps.apply(lambda value: f"{value}", value)'),
        ("v.strip()", "ps.apply(lambda value: value.strip(), value)"),
        ("v.name.replace('a', 'b')", "ps.apply(lambda value: value.replace(...), value)"),
        ("len(v)", "ps.apply(lambda value: len(value), value)"),
        ("1 if v else 2", "ps.apply(lambda value: not value, value)"),
        ("json.loads(v)", "ps.apply(lambda value: ..., value)"),
        ("[x for x in v]", "ps.apply(lambda value: [item for item in value], value)"),
        ("v > 3", "ps.apply(lambda value, other: value > other, value, other)"),
        ("3 / v", "ps.apply(lambda value, other: other / value, value, other)"),
        ("y[v]", "ps.apply(lambda value, key: value[key], value, key)"),
        ("double.with_policy(name=repr(v))(repr(v))", 'ps.apply(lambda value: f"{value!r}", value)'),
        ("ps.apply(v.strip)", "ps.apply(lambda value: value.method(), value)"),
    ],
)
def test_the_step_that_an_error_suggests(expression: str, remedy: str) -> None:
    assert remedy in refusal(lambda: body("v = await double(x)", f"return {expression}", json=json))


PENDING = [one[0] for one in OPERATIONS if one[0] not in ("await v", "y[v]", "y[v:]", "y[0, v]")]


@pytest.mark.parametrize("line", [*PENDING, "v[0]", "v.name"])
def test_a_call_that_is_not_awaited_refuses(line: str) -> None:
    message = refusal(lambda: body("v = double(x)", line, "return v", **MODULES))
    assert_names_line_and_remedy(message, 4, "before it is awaited", ["await"])


@pytest.mark.parametrize(
    ("lines", "line", "cause"),
    [
        (["return add(' '.join([x, y]))"], 3, TypeError),
        (["return add(json.loads(x))"], 3, TypeError),
        (["text = re.sub('a', 'b', x)", "return add(text)"], 3, TypeError),
        (["return issubclass(x, int)"], 3, TypeError),
        (["return add(sum([1, 2]) + {}['missing'])"], 3, KeyError),
        (["if limit > 2:", "    raise LookupError('too many')", "return add(x)"], 4, LookupError),
        (["return add(x) if double.with_policy(retry=3) else x"], 3, ps.OptionsError),
        (["return add(1 / (limit - 3))"], 3, ZeroDivisionError),
        (["return Broken(x)"], 2, RuntimeError),
    ],
)
async def test_what_else_is_raised_while_tracing_says_where(
    lines: list[str], line: int, cause: type[Exception]
) -> None:
    @dataclasses.dataclass
    class Broken:
        value: object

        def __getattribute__(self, name: str) -> Any:
            if name == "value":
                raise RuntimeError("of a property")
            return super().__getattribute__(name)

    graph = body(*lines, json=json, re=re, limit=3, Broken=Broken)
    message = refusal(lambda: graph)
    if cause is not RuntimeError:  # a RuntimeError comes from this file, when the result is taken apart
        assert_names_line_and_remedy(message, line, f"tracing graph 'g' raised {cause.__name__}: ", ["into a node"])
    for run in (engine.run(graph(1, 2)), engine.stream([graph(1, 2)]).__anext__()):
        with pytest.raises(ps.GraphTraceError, match=r"\.\w+:\d+: |<graph>:\d+: ") as caught:
            await run
        assert type(caught.value.__cause__) is cause


def test_code_that_nobody_wrote_is_no_location() -> None:
    graph = body("return add(1 if Box(x) == Box(y) else 2)", Box=Box)
    assert_names_line_and_remedy(refusal(lambda: graph), 3, "comparing it", ["ps.cond"])


def test_what_a_graph_inside_of_a_graph_raises_is_located_there() -> None:
    inner = define("@ps.graph\nasync def inner(x):\n    return add(json.loads(x))", name="inner", json=json)
    message = refusal(lambda: body("return await inner(x)", inner=inner))
    assert_names_line_and_remedy(message, 3, "tracing graph 'inner' raised TypeError", ["into a node"])
    message = refusal(lambda: body("return await ps.cond(x, each, each, y)", each=inner.fn))
    assert_names_line_and_remedy(message, 3, "tracing graph 'inner' raised TypeError", ["into a node"])


@pytest.mark.parametrize("result", ["ps.map_each(double, xs)", "ps.map_each(double, [1, 2])", "double(xs)"])
def test_what_is_annotated_as_a_stream_and_is_none_says_why(result: str) -> None:
    source = f"@ps.graph\nasync def g(xs: list) -> AsyncIterator[int]:\n    return {result}"
    graph = define(source, AsyncIterator=AsyncIterator)
    remedies = ["`async def` with `yield`", "a parameter that is annotated as AsyncIterator"]
    assert_names_line_and_remedy(refusal(lambda: graph), 3, "'g' is annotated as a stream", remedies)


def test_numpy_cannot_swallow_a_value() -> None:
    np = pytest.importorskip("numpy")
    for expression in ("np.asarray(v)", "np.add(v, 1)", "np.ones(3) * v", "np.array([v, 1])", "np.sum(v)"):
        with pytest.raises((ps.GraphTraceError, TypeError)):
            engine.plan(body("v = await double(x)", f"return {expression}", np=np))


@pytest.mark.parametrize(
    "awaited", ["numbers(x)", "ps.map_each(double, numbers(x))", "(numbers(x) >> data.batched(2))", "y", "collect(x)"]
)
def test_awaiting_what_need_not_be_awaited_says_why(awaited: str) -> None:
    error = refusal(lambda: body(f"return await {awaited}", numbers=numbers, data=data))
    assert_names_line_and_remedy(
        error, 3, "awaiting it", ["a result of a plain `def` and a stream", "remove the await"]
    )


NOT_AWAITED = "before it is awaited"
WRITE_AWAIT = ["write `await`"]


@pytest.mark.parametrize(
    ("lines", "line", "what", "remedies"),
    [
        (["double(x)", "return y"], 3, "never awaited", WRITE_AWAIT),
        (["ps.cond(x, double, double, y)", "return y"], 3, "never awaited", WRITE_AWAIT),
        (["inner(x, y)", "return y"], 3, "never awaited", WRITE_AWAIT),
        (["v = double(x)", "await v", "return await v"], 5, "awaiting it twice", ["keep the result in a variable"]),
        (["v = double(x)", "return add(v)"], 4, NOT_AWAITED, WRITE_AWAIT),
        (["v = double(x)", "return add([v])"], 4, NOT_AWAITED, WRITE_AWAIT),
        (["return add(inner(x, y))"], 3, NOT_AWAITED, WRITE_AWAIT),
        (["v = double(x)", "return v"], 1, NOT_AWAITED, WRITE_AWAIT),
        (["return inner(x, y)"], 1, NOT_AWAITED, WRITE_AWAIT),
    ],
)
def test_each_call_is_awaited_once(lines: list[str], line: int, what: str, remedies: list[str]) -> None:
    inner = body("return add(x, y)")
    assert_names_line_and_remedy(refusal(lambda: body(*lines, inner=inner)), line, what, remedies)


def test_a_call_may_be_awaited_in_a_body() -> None:
    inner = body("return add(x, y)")
    graph = body(
        "call = inner(x, y)",
        "async def later(value): return await call",
        "return await ps.cond(x, later, double, y)",
        inner=inner,
    )
    assert asyncio.run(engine.run(graph(1, 2))) == 3


FOREIGN = {
    "await asyncio.sleep(0)": "sleep()",
    "await asyncio.sleep(1)": "sleep()",
    "from asyncio import sleep as wait; await wait(1)": "sleep()",
    "await helper()": "Event.wait()",
    "await asyncio.get_running_loop().create_future()": "Future",
}


@pytest.mark.parametrize("statement", FOREIGN)
@pytest.mark.parametrize("running", [True, False])
def test_foreign_awaitables_are_refused_where_they_are_awaited(statement: str, running: bool) -> None:
    async def helper() -> None:
        await asyncio.Event().wait()

    graph = body(statement, "return await double(x)", asyncio=asyncio, helper=helper)

    async def plan() -> str:
        return refusal(lambda: graph)

    if "get_running_loop" in statement and not running:
        return  # asyncio itself raises that no loop is running
    message = asyncio.run(plan()) if running else refusal(lambda: graph)
    assert "@ps.node" in message
    if "helper" in statement:  # the user's line that waits is in the helper
        assert message.startswith(f"{__file__}:{helper.__code__.co_firstlineno + 1}: ")
    else:
        assert message.startswith("<graph>:3: "), message
    if running:
        assert FOREIGN[statement] in message


def test_a_task_that_was_started_while_tracing_is_no_part_of_the_graph() -> None:
    calls: list[int] = []

    @ps.node
    async def note(value: int) -> int:
        calls.append(value)
        return value

    async def later() -> None:
        await note(1)

    tasks: list[asyncio.Task[None]] = []
    graph = body(
        "tasks.append(asyncio.get_running_loop().create_task(later()))", "return await double(x)",
        asyncio=asyncio, later=later, tasks=tasks,
    )  # fmt: skip

    async def main() -> None:
        engine.plan(graph)
        await tasks[0]

    asyncio.run(main())
    assert calls == [1]  # called as a function, after the trace has ended


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("await double()", "missing a required argument: 'x'"),
        ("await double(x, y)", "too many positional arguments"),
        ("add(x, w=y)", "unexpected keyword argument 'w'"),
        ("add(x, x=y)", "multiple values for argument 'x'"),
        ("await inner(x)", "missing a required argument: 'y'"),
        ("await inner(x, y, y)", "too many positional arguments"),
    ],
)
def test_a_wrong_number_of_arguments(call: str, what: str) -> None:
    inner = body("return x")
    message = refusal(lambda: body("z = y", f"return {call}", inner=inner))
    assert_names_line_and_remedy(message, 4, what, ["its parameters are (x: int"])


def test_calling_a_graph_wrongly_is_a_type_error_as_for_any_function() -> None:
    graph = body("return x")
    for call in (lambda: graph(1), lambda: graph(1, 2, 3), lambda: graph(1, 2, z=3)):
        with pytest.raises(TypeError, match="graph 'g' is called wrongly"):
            call()


@pytest.mark.parametrize(
    ("head", "remedy"),
    [
        ("async def g(*xs: int): return 1", "take a list"),
        ("async def g(**xs: int): return 1", "take a list"),
        ("def g(x: int): return x", "write `async def`"),
        ("async def g(x: int): yield x", "yield"),
    ],
)
def test_what_cannot_be_a_graph_says_why(head: str, remedy: str) -> None:
    for decorator in ("@ps.graph", "@ps.graph()"):
        message = refusal(lambda source=f"{decorator}\n{head}": define(source))
        assert_names_line_and_remedy(message, 1, "g", [remedy])


@pytest.mark.parametrize("receiver", ["self", "cls"])
def test_a_method_is_no_graph(receiver: str) -> None:
    source = (
        f"class Agent:\n    @ps.graph\n    async def answer({receiver}, x: int) -> int:\n        return await double(x)"
    )
    message = refusal(lambda: define(source, "Agent"))
    assert_names_line_and_remedy(message, 2, "'answer' is a method of Agent", ["def build_answer(...)"])


async def test_a_graph_in_a_class_without_a_receiver_is_a_graph() -> None:
    source = "class Graphs:\n    @ps.graph()\n    async def twice(x: int) -> int:\n        return await double(x)"
    graphs = define(source, "Graphs")
    assert await engine.run(graphs.twice(2)) == 4
    assert await engine.run(graphs().twice(2)) == 4
