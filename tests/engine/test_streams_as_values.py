"""Streams as values: the values they give under every scheduler, and graphs that are refused."""

import asyncio
import re
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable
from textwrap import indent
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.engine.tracing import define, double, refusal
from tests.kit import (
    SCHEDULERS,
    Gauge,
    cancelled_at_every_step,
    counted,
    listed,
    negative,
    outcomes_of,
    summed,
    values_of,
)
from tests.kit import numbers as count


@ps.node
async def zipped(left: AsyncIterator[int], right: AsyncIterator[int]) -> AsyncIterator[tuple[int, int]]:
    async for number in left:
        yield number, await anext(right)


@ps.node
async def first(values: AsyncIterator[int]) -> int:
    return await anext(values)


@ps.graph
async def doubled(limit: int) -> AsyncIterator[int]:
    return ps.map_each(double, count(limit))


@ps.graph
async def collected(limit: int) -> list[int]:
    values: list[int] = await listed(count(limit))
    return values


async def closing(closed: list[str]) -> AsyncIterator[int]:
    """Gives ten numbers, and says when it is closed."""
    try:
        for number in range(10):
            yield number
    finally:
        closed.append("numbers")


async def test_an_argument_may_be_a_stream() -> None:
    closed: list[str] = []

    @ps.graph
    async def total(values: AsyncIterator[int]) -> list[int]:
        result: list[int] = await listed(ps.map_each(double, values))
        return result

    @ps.graph
    async def passed(values: AsyncIterable[int]) -> AsyncIterator[int]:
        return ps.map_each(double, values)

    @ps.graph
    async def returned(values: AsyncIterator[int]) -> AsyncIterator[int]:
        return values

    assert await engine.run(total(closing(closed))) == [2 * number for number in range(10)]
    for graph in (passed, returned):
        assert len(await values_of(engine.stream(graph(closing(closed))))) == 10
    assert closed == ["numbers"] * 3
    assert await engine.run(ps.graph(first)(closing(closed))) == 0
    assert closed == ["numbers"] * 4
    async with engine.stream(doubled(5)) as inner, engine.stream(passed(inner)) as outer:
        assert [value async for value in outer] == [0, 4, 8, 12, 16]
    with pytest.raises(TypeError, match=r"parameter 'values' of graph 'total' is a stream: pass an async iterator"):
        await engine.run(total([1, 2]))  # type: ignore[arg-type]


async def test_an_argument_that_nobody_reads_is_closed() -> None:
    closed: list[str] = []

    @ps.graph
    async def other(values: AsyncIterator[int], number: int) -> int:
        return await double(number)

    given = closing(closed)
    assert await anext(given) == 0
    assert await engine.run(other(given, 2)) == 4
    assert closed == ["numbers"]


async def test_without_an_engine_the_end_of_a_map_closes_what_it_reads() -> None:
    closed: list[str] = []

    mapped: Any = ps.map_each(negative, closing(closed))
    assert await anext(mapped) == 0
    await mapped.aclose()
    assert closed == ["numbers"]


async def test_graphs_with_streams_are_inlined() -> None:
    @ps.graph
    async def outer(limit: int) -> list[int]:
        result: list[int] = await listed(ps.map_each(negative, await doubled(limit)))
        return result

    assert await engine.run(outer(4)) == [0, -2, -4, -6]


async def test_current_is_known_in_a_generator_and_in_its_tasks() -> None:
    async def inner() -> ps.ItemInfo:
        await asyncio.sleep(0)
        return ps.current()

    @ps.node
    async def whereabouts() -> AsyncIterator[ps.ItemInfo]:
        yield ps.current()
        yield await inner()
        yield await asyncio.create_task(inner())

    infos = await values_of(engine.stream(ps.graph(whereabouts)(), timeout_seconds=60))
    where = "whereabouts", "whereabouts", 0, 1
    assert [(info.graph, info.node, info.item, info.attempt) for info in infos] == [where] * 3
    assert all(info.remaining_seconds() for info in infos)


async def test_a_generator_that_waits_for_its_own_place_is_refused() -> None:
    @ps.node(concurrency=1)
    async def nested(depth: int) -> AsyncIterator[int]:
        if depth:
            async with engine.stream(graph(depth - 1)) as values:
                async for value in values:
                    yield value
        yield depth

    graph = ps.graph(nested)

    assert await values_of(engine.stream(graph(0))) == [0]
    with pytest.raises(ps.ReentrantCallError, match="the only place is held"):
        await engine.stream(graph(1)).wait_started()


@pytest.mark.parametrize("kind", ["stateful", "limited"])
async def test_a_generator_keeps_its_place_until_it_has_ended(kind: str) -> None:
    gauge = Gauge()

    class Numbered:
        async def __call__(self, limit: int) -> AsyncIterator[int]:
            with gauge:
                async for number in counted(limit):
                    yield number

    node: Any = ps.node(Numbered)() if kind == "stateful" else ps.node(concurrency=2)(Numbered().__call__)
    graph = node >> listed
    assert await values_of(engine.stream(graph(20) for _ in range(20))) == [[*range(20)]] * 20
    assert (gauge.peak, gauge.now) == (1 if kind == "stateful" else 2, 0)


async def test_a_fake_generator_takes_the_place_of_a_node() -> None:
    async def fake(limit: int) -> AsyncIterator[int]:
        yield 7

    with testing.replace(count, fake):
        assert await values_of(engine.stream(doubled(3))) == [14]


async def test_outcomes_position_and_statistics() -> None:
    @ps.node
    async def two_then_error() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise ValueError("third")

    values = engine.stream(ps.graph(two_then_error)())
    outcomes = [(one.index, one.value, repr(one.error)) for one in await outcomes_of(values)]
    assert outcomes == [(0, 1, "None"), (1, 2, "None"), (2, None, "ValueError('third')")]
    statistics = values.statistics()
    assert (values.position, statistics.yielded, statistics.failed, statistics.in_flight) == (2, 2, 1, 0)
    assert [one.node for one in statistics.actors] == ["two_then_error"]


async def test_a_call_for_another_verb_and_an_option_that_does_not_apply_are_refused() -> None:
    async with engine.deploy(doubled, collected) as service:
        own: Any = engine
        deployed: Any = service
        for use, message in (
            (lambda: own.run(doubled(3)), r"graph 'doubled' returns a stream of values, and engine.run .*stream\(dou"),
            (lambda: own.stream(collected(3)), r"'collected' returns one value: for one call, use engine\.run"),
            (lambda: anext(own.stream([doubled(3)])), r"engine\.stream of many calls takes calls that give one value"),
            (lambda: deployed(3), r"service\.run takes calls that give one value"),
            (lambda: deployed.stream(collected(3)), r"for one call, use service\.run"),
            (lambda: deployed.map([doubled(3)]), r"service\.stream of many calls"),
            (lambda: deployed.stream(ps.graph(count)(3)), "is not part of this deployment"),
            (
                lambda: own.stream(doubled(3), ordered=False),
                r"'ordered' does not apply to stream\(call\); .*timeout",
            ),
            (lambda: deployed.stream(doubled(3), max_in_flight=3), "'max_in_flight' does not apply.* priority, .*_sec"),
        ):
            with pytest.raises((ps.PlanError, ps.OptionsError), match=message):
                await use()


# Bodies of `async def g(limit: int, values: AsyncIterator[int])`.
REFUSED = [
    ("numbers = count(limit)\nreturn await listed(numbers), await first(numbers)",
     "stream 'numbers' is read by 'first' and was read before by 'listed' .*one reader: call the node once"),
    ("numbers = count(limit)\nawait first(numbers)\nreturn numbers",
     "is read by the result and was read before by 'first'"),
    ("numbers = count(limit)\nreturn await listed([numbers, numbers])",
     "is read by 'listed' and was read before by 'listed'"),
    ("numbers = count(limit)\nreturn await listed(ps.map_each(double, numbers)), await first(numbers)",
     "is read by 'first' and was read before by 'map_each'"),
    ("return await first(values), await first(values)", "stream 'values' is read by 'first' and was read before"),
    ("return negative(count(limit))", "passed to 'negative', which cannot read it: only an `async def`"),
    ("return await ps.cond(True, listed, listed, count(limit))", "passed to 'cond', which cannot read it"),
    ("numbers = count(limit)\nreturn await ps.map_each(lambda number: first(numbers), [1, 2])",
     "the body of map_each takes stream 'numbers' from outside"),
    ("return await ps.map_each(count, [limit])", "the body 'numbers' gives a stream.*read the stream inside the body"),
    ("return count(limit), limit", "stream 'numbers' is returned inside a tuple; return the stream alone"),
    ("return await listed(count(limit).closed)", "an attribute or item of stream 'numbers'"),
    ("return await listed(count.fn(3))", "used up by the first item; make its function a node"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), REFUSED, ids=[lines.splitlines()[-1] for lines, _ in REFUSED])
def test_what_a_trace_refuses(lines: str, message: str) -> None:
    head = "@ps.graph\nasync def g(limit: int, values: AsyncIterator[int]):\n"
    said = refusal(lambda: define(head + indent(lines, "    "), **globals()))
    assert re.search(message, said)
    assert "<graph>:" in said


def test_a_stream_that_nobody_reads() -> None:
    @ps.node(effectful=True)
    async def ticks() -> AsyncIterator[int]:
        yield 1

    @ps.graph
    async def unread(limit: int) -> int:
        _, _ = count(limit), ticks()
        return negative(limit)

    assert [step.label for step in engine.plan(unread).steps] == ["negative"]


def test_annotations_of_parameters_that_cannot_be_resolved() -> None:
    async def later(values: "AsyncIterator[NotHere]") -> Any:  # type: ignore[name-defined] # noqa: F821
        return await first(values), await first(values)

    with pytest.raises(ps.GraphTraceError, match="one reader"):
        engine.plan(ps.graph(later))


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated lazily from Python 3.14 on")
async def test_annotations_that_only_type_checkers_can_evaluate() -> None:
    @ps.node
    async def total(values: AsyncIterator[NotHere], start: NotHere = 0) -> int:  # type: ignore[name-defined] # noqa: F821
        return start + sum([value async for value in values])

    @ps.node(batch=ps.Batch(4))
    async def doubled(numbers: list[NotHere]) -> list[NotHere]:  # type: ignore[name-defined] # noqa: F821
        return [2 * number for number in numbers]

    assert await engine.run(ps.graph(total)(count(4))) == 6  # the annotation's text tells that it is a stream
    assert await engine.run(ps.graph(doubled)(4)) == 8


@ps.node(concurrency=4)
async def limited(values: AsyncIterator[int]) -> AsyncIterator[int]:
    async for value in values:
        yield value


limited_total = ps.node(concurrency=4, name="limited_total")(summed.fn)


@ps.node
class Total:
    async def __call__(self, values: AsyncIterator[int]) -> int:
        return await summed.fn(values)


stateful_total = Total()


async def _reads_what_a_branch_of_a_body_gives(limit: int) -> Any:
    async def read(number: int) -> int:
        return await limited_total(count(number))

    async def leave(number: int) -> int:
        return number

    async def body(number: Any) -> int:
        return await ps.cond(number, read, leave, number)

    return await limited_total(limited(ps.map_each(body, count(limit))))


async def _an_instance_that_reads_itself(limit: int) -> Any:
    async def body(number: int) -> int:
        return await stateful_total(count(number))

    return await stateful_total(ps.map_each(body, count(limit)))


@ps.node(concurrency=1)
async def limited_largest(values: AsyncIterator[int]) -> int:
    return max([value async for value in values], default=0)


async def _total_of_a_body(limit: int) -> int:
    return await limited_total(count(limit))


async def _largest_of_a_body(limit: int) -> int:
    return await limited_largest(count(limit))


async def _limited_of_a_body(limit: int) -> int:
    return await first(limited(count(limit)))


async def _three_in_a_circle(limit: int) -> Any:
    total = await limited_total(ps.map_each(_largest_of_a_body, count(limit)))
    largest = await limited_largest(ps.map_each(_limited_of_a_body, count(limit)))
    return total, largest, await listed(ps.map_each(_total_of_a_body, limited(count(limit))))


@pytest.mark.parametrize(
    ("source", "held", "needed", "remedy"),
    [
        (_reads_what_a_branch_of_a_body_gives, "limited_total", "limited_total", "leave out its concurrency="),
        (_an_instance_that_reads_itself, "Total", "Total", "another instance"),
        (_three_in_a_circle, "limited", "limited_total", "; for 'limited', .*max_in_flight"),
    ],
)
def test_limited_nodes_that_would_wait_for_each_other(
    source: Callable[..., Any], held: str, needed: str, remedy: str
) -> None:
    told = rf"{source.__name__}.*node '{held}' holds one of its places for a stream that needs "
    with pytest.raises(ps.PlanError, match=rf"{told}.*{remedy}") as caught:
        engine.plan(ps.graph(source))
    assert held == needed or f"needs node '{needed}' (" in str(caught.value)


ticks = ps.node(concurrency=1, name="ticks")(count.fn)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_limited_nodes_that_wait_in_one_order(scheduler: Any) -> None:
    @ps.node(concurrency=1)
    async def doubled(values: AsyncIterator[int]) -> AsyncIterator[int]:
        async for value in values:
            yield 2 * value

    total = ps.node(concurrency=1)(summed.fn)

    @ps.graph
    async def graph(limit: int) -> tuple[Any, ...]:
        in_a_line = await total(doubled(ticks(limit)))
        again = await total(ps.map_each(_largest_of_a_body, doubled(ticks(limit))))
        return in_a_line, again, await listed(zipped(ticks(limit), limited(count(limit))))

    expected = (12, 0 + 1 + 3 + 5, [(0, 0), (1, 1), (2, 2), (3, 3)])
    async with asyncio.timeout(60):
        calls = engine.stream((graph(4) for _ in range(20)), scheduler=scheduler)
        assert await values_of(calls) == [expected] * 20


@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_a_stream_that_is_open_before_another_of_its_node_was_read(scheduler: Any) -> None:
    @ps.node
    def together(first: list[int], second: list[int]) -> int:
        return len(first) + len(second)

    @ps.graph
    async def graph(limit: int) -> int:
        opened = ticks(limit)
        read_before = await listed(ticks(limit))
        return together(await listed(opened), read_before)

    for use in (
        lambda: engine.run(graph(100), scheduler=scheduler),
        lambda: anext(engine.stream([graph(100)], scheduler=scheduler)),
    ):
        if scheduler in ("wave", "sequential"):  # steps, or waves of steps, run one after the other
            with pytest.raises(ps.PlanError, match="for a stream that needs node 'ticks'"):
                await use()
        else:
            assert await use() == 200


async def test_a_stream_actor_without_a_limit_is_read_through_itself() -> None:
    async def finish_doubled(work: ps.StreamWork[AsyncIterator[int], int]) -> None:
        async for value in work.value:
            work.put_nowait(2 * value)
        work.finish()

    @ps.node
    class Doubled(ps.StreamActor[AsyncIterator[int], int]):
        async def loop(self, inbox: ps.Inbox[ps.StreamWork[AsyncIterator[int], int]]) -> None:
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(finish_doubled(await inbox.get()))

    doubled_by_loop = Doubled()

    graph = count >> doubled_by_loop >> doubled_by_loop
    assert await values_of(engine.stream(graph(4))) == [0, 4, 8, 12]


def test_streams_are_drawn() -> None:
    assert "numbers    stream" in str(doubled)
    assert "n1 ==> n2" in doubled.to_mermaid()
    assert "n1 -> n2 [style=bold];" in doubled.to_dot()
    assert "n0 --> n1" in doubled.to_mermaid()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python has no eager tasks")
@pytest.mark.parametrize("kind", ["asyncio's", "asyncio's in a function", "own", "own and not eager"])
def test_streams_work_under_every_kind_of_task_factory(kind: str) -> None:
    eager: Any = vars(asyncio).get("eager_task_factory")

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        if kind == "asyncio's in a function":
            made: asyncio.Task[Any] = eager(loop, work, **options)
            return made
        if kind == "own":
            options["eager_start"] = True
        return asyncio.Task(work, loop=loop, **options)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(eager if kind == "asyncio's" else factory)
        assert await engine.run(counted(5)) == [0, 1, 2, 3, 4]
        assert await values_of(engine.stream(counted(x) for x in range(3))) == [[], [0], [0, 1]]

    counted = count >> listed
    for _ in cancelled_at_every_step(main):
        pass
    testing.run_virtual(main)
