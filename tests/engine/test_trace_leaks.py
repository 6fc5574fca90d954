"""Symbolic values that leave their graph, or hide where the tracer cannot find them; and endless graphs."""

import asyncio
import collections
import functools
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.engine.tracing import add, assert_names_line_and_remedy, body, define, refusal


class Box:
    def __init__(self, value: object = None) -> None:
        self.value = value

    def method(self) -> object:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class ListOf(list[Any]):
    pass


HIDDEN = {
    "attribute": "Box(v)",
    "slot": "Slotted(v)",
    "deep": "Box({'one': [Box(v)]})",
    "closure": "(lambda: v)",
    "default": "(lambda value=v: value)",
    "partial": "functools.partial(double, v)",
    "partial keyword": "functools.partial(double, x=v)",
    "bound method": "Box(v).method",
    "subclass of list": "ListOf([v])",
    "mapping": "collections.UserDict(a=v)",
    "deque": "collections.deque([v])",
    "built-in method": "[v].append",
}


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN.keys())
def test_a_value_hidden_in_an_object_is_found(hidden: str) -> None:
    names = {"functools": functools, "Box": Box, "Slotted": Slotted, "ListOf": ListOf, "collections": collections}
    message = refusal(lambda: body("v = await double(x)", f"return collect({hidden})", **names))
    assert_names_line_and_remedy(message, 4, "hidden in an object", ["argument of its own", "dataclass"])
    returned = refusal(lambda: body("v = await double(x)", f"return {hidden}", **names))
    assert "hidden in an object" in returned


@pytest.mark.parametrize("iterator", ["(v for _ in range(2))", "map(str, [1, 2])", "iter([1])", "zip([v])"])
def test_an_iterator_would_be_used_up_by_the_first_item(iterator: str) -> None:
    message = refusal(lambda: body("v = await double(x)", f"return collect({iterator})"))
    assert_names_line_and_remedy(message, 4, "used up", ["make a list"])


def test_a_coroutine_is_not_an_argument() -> None:
    async def helper() -> int:
        return 1

    coroutine = helper()
    message = refusal(lambda: body("return collect(coroutine)", coroutine=coroutine))
    coroutine.close()
    assert_names_line_and_remedy(message, 3, "before it is awaited", ["write `await`"])


@pytest.mark.parametrize("text", ["f'{v!r}'", "repr([v])", "str((v, 1))", "'%r' % [v]"])
def test_the_text_of_a_value_is_no_text(text: str) -> None:
    message = refusal(lambda: body("v = await double(x)", f"return collect({text})"))
    assert_names_line_and_remedy(message, 4, "made from <Ref double> by repr()", ["format it inside a node"])


def test_showing_a_value_does_no_harm() -> None:
    graph = body("v = await double(x)", "print([v], repr(v))", "return collect('text', v)")
    assert asyncio.run(engine.run(graph(1, 2))) == ("text", 2)


def test_a_node_that_takes_a_value_along_is_refused() -> None:
    message = refusal(lambda: body("v = await double(x)", "late = ps.node(lambda a: a + v)", "return late(y)"))
    assert_names_line_and_remedy(message, 5, "has <Ref double> in its closure", ["pass it as an argument"])

    class Client:
        state: object = None

        @ps.node
        def fetch(self, value: int) -> int:
            return value

    message = refusal(lambda: body("client.state = x", "return client.fetch(y)", client=Client()))
    assert_names_line_and_remedy(message, 4, "has <Ref x> in its closure", ["pass it as an argument"])


@pytest.mark.parametrize("where", ["global", "attribute", "list"])
def test_a_value_that_leaked_belongs_to_no_other_graph(where: str) -> None:
    box, kept = Box(), list[object]()
    keep = {"global": "global leak; leak = v", "attribute": "box.value = v", "list": "kept.append(v)"}[where]
    leaked = {"global": "leak", "attribute": "box.value", "list": "kept[0]"}[where]
    source = f"""
    leak = None
    @ps.graph
    async def first(x: int):
        v = await double(x)
        {keep}
        return v
    @ps.graph
    async def second(x: int):
        return collect(x, {leaked})
    g = first, second
    """
    first, second = define(source, box=box, kept=kept)
    engine.plan(first)
    message = refusal(lambda: second)
    assert_names_line_and_remedy(message, 10, "belongs to the trace of 'first'", ["parameter"])


def test_a_value_that_leaked_is_refused_by_nodes_and_graphs_that_are_just_called() -> None:
    box = Box()
    graph = body("box.value = x", "return y", box=box)
    engine.plan(graph)
    for call in (lambda: add(box.value), lambda: add(1, y=box.value), lambda: graph(box.value, 1)):  # type: ignore[arg-type]
        with pytest.raises(ps.GraphTraceError, match=r"test_trace_leaks\.py:\d+: .*leaked out.*return it"):
            call()


def test_a_global_list_that_collects_values_is_found() -> None:
    message = refusal(lambda: body("kept.append(x)", "return collect(kept)", kept=[]))
    assert_names_line_and_remedy(message, 4, "hidden in an object of type list", ["made in the graph"])


@pytest.mark.parametrize(
    "lines",
    [
        ["@ps.graph", "async def g(x: int): return await g(await double(x))"],
        ["async def helper(x): return await helper(await double(x))",
         "@ps.graph", "async def g(x: int): return await helper(x)"],
        ["async def again(x): return await g(x)",
         "@ps.graph", "async def g(x: int): return await ps.cond(x, again, double, x)"],
    ],
    ids=["a graph", "a helper", "a body"],
)  # fmt: skip
def test_recursion_without_end(lines: list[str]) -> None:
    message = refusal(lambda: define("\n".join(lines)))
    assert message.startswith("<graph>:")
    assert "calls itself without end" in message
    assert "ps.while_loop" in message


async def test_what_a_graph_waits_for_by_mistake_is_left_alone() -> None:
    async def elsewhere() -> int:
        await asyncio.sleep(0)
        return 3

    task = asyncio.create_task(elsewhere())
    assert "awaits" in refusal(lambda: body("return await task", task=task))
    assert await task == 3


def test_recursion_on_a_constant_ends() -> None:
    source = """
    @ps.graph
    async def power(x: int, n: int) -> int:
        if n == 0:
            return x
        return await power(await double(x), n - 1)
    @ps.graph
    async def g(x: int) -> int:
        return await power(x, 50)
    """
    graph = define(source)
    assert len(engine.plan(graph).steps) == 50
    assert asyncio.run(engine.run(graph(1))) == 2**50
