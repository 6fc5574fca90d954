"""cond, switch, while_loop and map_each: nested, traced, and called as plain functions."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.engine.tracing import add, assert_like_plain, assert_names_line_and_remedy, collect, define, double, refusal
from tests.kit import Gauge, numbers
from tests.kit import paused as same


@ps.node
async def halve(x: int) -> int:
    return x // 2


@ps.node
async def is_even(x: int) -> bool:
    return x % 2 == 0


@ps.node
async def is_positive(x: int) -> bool:
    return x > 0


@ps.node
async def up_to(x: int) -> list[int]:
    return list(range(x))


@pytest.mark.parametrize("index", [-1, 2])
async def test_a_switch_has_no_branch_with_another_number(index: int) -> None:
    @ps.graph
    async def graph(index: int) -> object:
        return await ps.switch(index, (same, double), 1)

    for run in (graph(index), engine.run(graph(index))):
        with pytest.raises(IndexError, match=f"branches 0 to 1, got {index}"):
            await run
    with pytest.raises(ValueError, match="at least one branch"):
        ps.switch(0, (), 1)


@pytest.mark.parametrize(("start", "limit", "ends"), [(8, 3, True), (8, 2, False), (7, 0, True), (8, 0, False)])
async def test_a_while_loop_is_limited(start: int, limit: int, ends: bool) -> None:
    @ps.graph
    async def graph(x: int) -> int:
        return await ps.while_loop(is_even, halve, x, max_iterations=limit)

    if ends:
        await assert_like_plain(graph, start)
        return
    for run in (graph(start), engine.run(graph(start))):
        with pytest.raises(ps.IterationLimitError, match=f"{limit} times.*max_iterations="):
            await run
    with pytest.raises(ValueError, match="max_iterations=-1"):
        ps.while_loop(is_even, halve, 1, max_iterations=-1)


async def test_branches_and_a_predicate_take_values_from_outside() -> None:
    @ps.graph
    async def graph(x: int, words: list[str]) -> object:
        offset = await double(x)
        chosen = await ps.cond(x, lambda _: collect(offset), lambda _: collect(words), 0)  # type: ignore[arg-type]
        return collect(
            chosen, await ps.while_loop(lambda value: is_positive(add(value, x)), lambda value: add(value, -5), offset)
        )

    await assert_like_plain(graph, 2, ["a"])
    await assert_like_plain(graph, 0, ["a"])


async def test_map_each_keeps_the_order() -> None:
    @ps.graph
    async def graph(x: int) -> object:
        return collect(
            await ps.map_each(double, await up_to(x)),
            await ps.map_each(add, [x, await double(x), 3]),  # plain functions as well
            await ps.map_each(same, ()),
            await ps.map_each(halve, (x, x), concurrency=1),
        )

    assert await assert_like_plain(graph, 3) == ([0, 2, 4], [4, 7, 4], [], [1, 1])
    assert (await assert_like_plain(graph, 0))[0] == []
    with pytest.raises(ValueError, match="at least 1"):
        ps.map_each(double, [1], concurrency=0)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_map_each_runs_as_many_bodies_at_a_time_as_it_may(concurrency: int) -> None:
    gauge = Gauge()

    @ps.node
    async def body(value: int) -> int:
        with gauge:
            await asyncio.sleep(0)
        return value

    @ps.graph
    async def each(values: list[int]) -> list[int]:
        return await ps.map_each(body, values, concurrency=concurrency)

    assert await engine.run(each([*range(10)])) == [*range(10)]
    assert gauge.peak == concurrency


async def test_a_body_may_do_nothing_and_there_may_be_many_items() -> None:
    @ps.graph
    async def graph(items: list[int]) -> list[int]:
        async def itself(x: int) -> int:
            return x

        return await ps.map_each(itself, items)

    items = list(range(10_000))
    assert await engine.run(graph(items)) == items


async def test_bodies_may_be_anything_that_takes_one_value() -> None:
    class Counter:
        @ps.node
        async def method(self, x: int) -> int:
            return x + 1

    @ps.node
    class Stateful:
        def __call__(self, x: int) -> int:
            return x + 2

    inner = double >> add

    async def helper(x: int) -> int:
        return await inner(await halve(x))

    stateful, counter = Stateful(), Counter()
    bodies: list[Callable[[Any], Any]] = [
        double,
        add,
        inner,
        helper,
        counter.method,
        stateful,
        functools.partial(add, y=10),
        lambda x: double(x),  # noqa: PLW0108 - the test needs a lambda
        lambda x: add(x),  # noqa: PLW0108
        lambda x: x,
        lambda x: [x, 7],
        double.with_policy(name="named"),
    ]

    @ps.graph
    async def graph(x: int) -> list[object]:
        return [await ps.map_each(body, [x, 1]) for body in bodies]

    assert await assert_like_plain(graph, 4) == [
        [8, 2], [5, 2], [9, 3], [5, 1], [5, 2], [6, 3], [14, 11], [8, 2], [5, 2], [4, 1], [[4, 7], [1, 7]], [8, 2],
    ]  # fmt: skip


async def test_what_bodies_take_and_return_is_unpacked_by_its_annotation() -> None:
    async def swap(pair: tuple[int, int]) -> tuple[int, int]:
        first, second = pair
        return second, first

    @ps.node
    async def twice(pair: tuple[int, int]) -> tuple[int, int]:
        return pair * 2  # type: ignore[return-value]

    @ps.graph
    async def graph(x: int, y: int) -> object:
        a, b = await ps.cond(x, swap, twice, (x, y))  # type: ignore[arg-type]
        c, d = await ps.switch(0, (swap,), (a, b))
        return [a, b, c, d]

    assert await assert_like_plain(graph, 1, 2) == [2, 1, 1, 2]


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("await ps.cond(x, lambda v: v + 1, double, x)", 3),
        ("await ps.while_loop(lambda v: v > 1, double, x)", 3),
        ("await ps.map_each(lambda v: collect(double(v)), [x])", 3),
        ("await ps.map_each(later, [x])", 3),
    ],
)
def test_bodies_are_traced_like_graphs(statement: str, line: int) -> None:
    source = f"""
    @ps.graph
    async def g(x: int): return {statement}
    async def later(x):
        double(x)
        return x
    """
    message = refusal(lambda: define(source))
    assert message.startswith("<graph>:5: " if "later" in statement else f"<graph>:{line}: ")


async def plain(x: int) -> int:
    return x


# Each with the text of its error.
MISUSES = [
    ("ps.cond(True, total(1), total, x)", "ps.cond(predicate, then, otherwise, operand) got then=<Call of graph total",
     "without calling it"),
    ("ps.cond(True, total, plain(1), x)", "got otherwise=<coroutine object plain", "without calling it"),
    ("ps.cond(True, total, 3, x)", "got otherwise=3", "a node, a graph or a function"),
    ("ps.switch(0, (total, total(1)), x)", "got branches[1]=<Call of graph total", "without calling it"),
    ("ps.switch(0, total, x)", "a tuple of branches, then the operand, got <Graph total>", ""),
    ("ps.while_loop(is_even(1), halve, x)", "got predicate=<", "without calling it"),
    ("ps.while_loop(is_even, total(1), x)", "got body=<Call of graph total", "without calling it"),
    ("ps.map_each(total(1), [1])", "ps.map_each(fn, items) got fn=<Call of graph total", "without calling it"),
    ("ps.map_each([1, 2], total)", "got fn=[1, 2]", "a node, a graph or a function"),
    ("ps.map_each(total, total)", "items of <Graph total>", "a list, another iterable, or a stream"),
    ("ps.map_each(total, {'a': 1})", "items of {'a': 1}", "list(d) or list(d.items())"),
    ("ps.map_each(total, 3)", "items of 3", "a list, another iterable, or a stream"),
    ("ps.map_each(total, total(1))", "items of <Call of graph total", "write `await`"),
    ("ps.map_each(list(range(1000)), total)", "got fn=[0, 1, 2,", "a node, a graph or a function"),
]  # fmt: skip
NAMES = {"halve": halve, "is_even": is_even, "plain": plain}
TOTAL = "@ps.graph\nasync def total(x): return await double(x)\n"


@pytest.mark.parametrize(("call", "what", "remedy"), MISUSES)
async def test_a_misuse_is_refused_with_the_remedy(call: str, what: str, remedy: str) -> None:
    graph = define(f"{TOTAL}@ps.graph\nasync def g(x): return await {call}", **NAMES)
    message = refusal(lambda: graph)
    assert_names_line_and_remedy(message, 4, what, [remedy])
    assert len(message) < 400
    with pytest.raises(TypeError) as caught:
        await graph(1)
    assert what in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("call", ["ps.while_loop(is_positive, fail, x)", "ps.map_each(fail, [x])"])
async def test_a_task_group_that_fails_in_a_body_is_the_error_of_the_call(call: str) -> None:
    async def raising(x: int) -> None:
        raise ValueError(f"no {x}")

    @ps.node
    async def fail(x: int) -> int:
        async with asyncio.TaskGroup() as group:
            group.create_task(raising(x))
        return x

    graph = define(f"@ps.graph\nasync def g(x): return await {call}", fail=fail, is_positive=is_positive)
    with pytest.raises(ExceptionGroup) as caught:
        await engine.run(graph(1))
    assert isinstance(caught.value.exceptions[0], ValueError)


def test_a_value_that_is_not_known_yet_is_no_body() -> None:
    for call, what in (("map_each(x, double)", "fn=<Ref x>"), ("cond(True, double, f, x)", "otherwise=<Ref f>")):
        message = refusal(lambda call=call: define(f"@ps.graph\nasync def g(x, f): return await ps.{call}"))
        assert_names_line_and_remedy(message, 2, f"got {what}", ["known while the graph is traced"])


async def test_items_that_are_none_are_refused_also_when_they_are_known_only_later() -> None:
    @ps.graph
    async def graph(items: list[int]) -> list[int]:
        return await ps.map_each(double, items)

    wrong: Any
    for wrong in ({"a": 1}, 3, len):
        for run in (graph(wrong), engine.run(graph(wrong))):
            with pytest.raises(TypeError, match=r"ps\.map_each cannot take the items of"):
                await run
    with pytest.raises(TypeError, match="annotate its parameter as AsyncIterator"):
        await engine.run(graph(numbers(1)))  # type: ignore[arg-type]
