"""Effects keep the order of the source: steps that wait, steps that stay in the plan, and graphs that are refused."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import data, engine, testing
from tests.engine.test_plan import line_of
from tests.kit import SCHEDULERS, values_of
from tests.kit import listed as read

Body = Callable[..., Any]
done: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_done() -> Iterator[None]:
    done.clear()
    with structlog.testing.capture_logs():  # warnings about dead steps
        yield


@ps.node
async def slow(name: str) -> str:
    """A step that takes longer than all others."""
    await testing.wait_quiescent()
    done.append(name)
    return name


@ps.node
async def fails(name: str) -> str:
    await testing.wait_quiescent()
    raise PermissionError(name)


@ps.node
def quick(name: str) -> str:
    done.append(name)
    return name


@ps.node(effectful=True)
async def book(name: str) -> str:
    done.append(f"book {name}")
    return name


@ps.node(effectful=True)
def stamp(name: str) -> str:
    done.append(f"stamp {name}")
    return name


@ps.node(effectful="unordered")
async def tell(name: str) -> str:
    done.append(f"tell {name}")
    return name


@ps.node
async def count(name: str) -> AsyncIterator[str]:
    for number in range(3):
        yield f"{name} {number}"


@ps.node(effectful=True)
async def store(values: AsyncIterator[str]) -> int:
    stored = [f"store {value}" async for value in values]
    done.extend(stored)
    return len(stored)


async def before_and_behind(x: str) -> Any:
    first = await slow("a")
    await book("b")
    second = quick("c")
    stamp("d")
    return [first, second, quick("e")]


async def in_a_graph(x: str) -> Any:
    @ps.graph
    async def inner(name: str) -> str:
        await slow("a")
        await book(name)
        return name

    call = inner("b")
    stamp("c")
    return [await call, quick("d")]


async def of_a_stream(x: str) -> Any:
    values = await read(count("v"))
    await book("b")
    return values, await store(count("w")), quick("c")


async def while_a_stream_is_open(x: str) -> Any:
    values = count("v")
    await store(count("w"))
    return await read(values)


async def of_equal_pure_calls(x: str) -> Any:
    @ps.node(pure=True)
    async def rate(name: str) -> str:
        done.append("rate")
        return name

    first = await rate(x)
    await book("b")
    return first, await rate(x)


@pytest.mark.parametrize("body", [before_and_behind, in_a_graph, of_a_stream], ids=lambda body: body.__name__)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_steps_come_in_the_order_of_plain_python(body: Body, scheduler: Any) -> None:
    graph = ps.graph(body)
    expected = await graph("x")
    in_order = done.copy()
    done.clear()
    assert await engine.run(graph("x"), scheduler=scheduler) == expected
    assert done == in_order


async def test_a_step_that_opens_a_stream_has_ended_when_it_is_open() -> None:
    assert await engine.run(ps.graph(while_a_stream_is_open)("x")) == ["v 0", "v 1", "v 2"]
    assert [one for one in done if one.startswith("store")] == ["store w 0", "store w 1", "store w 2"]


async def test_equal_pure_calls_merge_into_the_first() -> None:
    assert await engine.run(ps.graph(of_equal_pure_calls)("x")) == ("x", "x")
    assert done == ["rate", "book b"]


async def test_well_means_after_retries_failover_and_fallback() -> None:
    async def try_again(name: str) -> str:
        if not any(one.startswith("tried") for one in done):
            done.append("tried")
            raise OSError
        return name

    retried = ps.node(retry=ps.Retry(2), name="retried")(try_again)
    failed_over = ps.node(failover=slow, name="failed over")(fails.fn)
    fallen_back = ps.node(fallback=lambda error: "b", name="fallen back")(fails.fn)

    @ps.graph
    async def graph(x: str) -> list[str]:
        values = [await retried("r"), await failed_over("f"), await fallen_back("b")]
        await book("all")
        return values

    assert await engine.run(graph("x")) == ["r", "f", "b"]
    assert done == ["tried", "f", "book all"]


async def test_unordered_effects_and_items_of_a_map_go_on_side_by_side() -> None:
    meeting = asyncio.Barrier(3)

    @ps.node(effectful="unordered")
    async def ask(name: str) -> str:
        await meeting.wait()
        return name

    @ps.node(effectful=True)
    async def pay(name: str) -> str:
        await meeting.wait()
        return name

    @ps.graph
    async def graph(x: str) -> Any:
        asked = [await ask(name) for name in "abc"]
        return asked, await ps.map_each(pay, ["a", "b", "c"])

    async with asyncio.timeout(60):
        assert await engine.run(graph("x")) == (["a", "b", "c"], ["a", "b", "c"])


def test_only_the_last_steps_are_waited_for_and_nothing_is_fused_across_an_effect() -> None:
    @ps.graph
    async def graph(x: str) -> Any:
        one = quick(quick(x))
        two = await slow(one)
        stamp("d")
        three, four = quick(quick(two)), quick(one)
        return quick(three), quick(four), await book("e"), await slow(x)

    plan = engine.plan(graph)
    assert [[step.callee.name for step in planned.chain] for planned in plan.steps] == [
        ["quick", "quick"], ["slow"], ["stamp"], ["quick", "quick", "quick"], ["quick", "quick"], ["book"], ["slow"],
    ]  # fmt: skip
    program = plan._program("actors")
    consumers = {unit.step.label: unit.consumers for unit in program.units if unit.step is not None}
    assert consumers == {
        "quick": [1, 4], "slow": [2, 3], "stamp": [3, 4], "quick#3": [5], "quick#6": [5], "book": [6], "slow#2": [],
    }  # fmt: skip
    told = str(plan)
    assert (
        "  order of effects:\n"
        f"    stamp ({line_of(graph, 4)}) waits for 1 step\n"
        f"    2 steps wait for stamp ({line_of(graph, 4)})\n"
        f"    book ({line_of(graph, 6)}) waits for 2 steps\n"
        f"    1 step waits for book ({line_of(graph, 6)})\n"
    ) in told
    assert "order of effects" in plan._repr_html_()


async def _reader_behind_an_effect(x: str) -> Any:
    left, right = count(x) >> data.split(2)
    first = await read(left)
    await book("b")
    return first, await read(right)


async def _effects_that_read(x: str) -> Any:
    left, right = count(x) >> data.split(2)
    return await store(left), await store(right)


@pytest.mark.parametrize(("body", "effect"), [(_reader_behind_an_effect, "book"), (_effects_that_read, "store")])
def test_readers_of_a_split_that_would_wait_for_each_other_are_refused(body: Body, effect: str) -> None:
    with pytest.raises(ps.PlanError, match=rf"py:\d+: .*the effect of '{effect}' \(.*effectful=\"unordered\"") as found:
        engine.plan(ps.graph(body))
    assert "both read branches of one data.split" in str(found.value)


async def test_a_stream_is_handed_over_while_an_effect_reads_its_other_branch() -> None:
    @ps.graph
    async def graph(x: str) -> AsyncIterator[str]:
        left, right = count(x) >> data.split(2, ahead=1)
        await store(left)
        return right

    assert await values_of(engine.stream(graph("x"))) == ["x 0", "x 1", "x 2"]


def test_a_stream_whose_place_is_needed_before_an_effect_is_refused() -> None:
    limited = ps.node(concurrency=1, name="limited")(count.fn)

    async def body(x: str) -> Any:
        values = limited(x)
        await book(x)
        again = await read(limited(x))
        await book(x)
        return again, await read(values)

    with pytest.raises(ps.PlanError, match=r"for a stream that needs node 'limited' .*max_in_flight"):
        engine.plan(ps.graph(body))


def test_an_effect_is_awaited_where_it_is_called() -> None:
    async def body(x: str) -> Any:
        call = book(x)

        async def branch(name: str) -> Any:
            return await call

        return await ps.cond(x, branch, lambda name: name, x)  # type: ignore[arg-type]

    with pytest.raises(ps.GraphTraceError, match="'book' is called outside of this body and awaited inside"):
        engine.plan(ps.graph(body))


async def test_a_question_is_asked_when_the_steps_before_it_have_ended(tmp_path: Path) -> None:
    async def body(state: str) -> str:
        call = ps.interrupt(["how much?"])
        await slow("look")
        answer = await ps.interrupt(["whom?"])
        await fails(await call)
        return answer

    @ps.graph
    async def graph(state: str) -> str:
        return await ps.while_loop(lambda state: state, body, state, durable=ps.Durable(tmp_path / "loops.db"))

    with pytest.raises(ps.Interrupted) as asked:
        await engine.run(graph("x"), durable_key="k")
    assert (asked.value.question, done) == (["whom?"], ["look"])
    with pytest.raises(ps.Interrupted) as asked:
        await engine.run(graph("x"), durable_key="k", answer="bob")
    assert (asked.value.question, done) == (["how much?"], ["look", "look"])
    with pytest.raises(PermissionError, match="a lot"):
        await engine.run(graph("x"), durable_key="k", answer="a lot")
