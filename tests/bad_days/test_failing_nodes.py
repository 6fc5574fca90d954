"""Failing nodes: the caller gets the error, with a note of its node, graph and item; other items continue."""

import asyncio
import gc
import traceback
import weakref
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Literal, Self

import pytest

import penstock as ps
from penstock import engine
from tests.bad_days import process_nodes
from tests.kit import begun, model, numbers, outcomes, outcomes_of, plain, same, values_of

SCHEDULERS = ["auto", "actors", "parallel", "wave", "sequential"]


@ps.node
async def raise_later(x: int) -> int:
    await asyncio.sleep(0)
    raise LookupError(x)


@ps.node
def raise_inline(x: int) -> int:
    raise LookupError(x)


async def raise_for(x: int) -> int:
    raise LookupError(x)


class Raiser:
    @ps.node
    async def raise_method(self, x: int) -> int:
        raise LookupError(x)


@ps.node
async def true(x: int) -> bool:
    return True


RAISERS = {
    "raise_async": ps.node(name="raise_async")(raise_for),
    "raise_later": raise_later,
    "raise_inline": raise_inline,
    "raise_in_thread": ps.node(name="raise_in_thread", runs_on="thread")(raise_inline.fn),
    "raise_it": process_nodes.raise_it,
    "raise_limited": ps.node(name="raise_limited", concurrency=2)(raise_for),
    "Model": model(call=raise_for),
    "raise_method": Raiser().raise_method,
}


@pytest.mark.parametrize("node", RAISERS)
async def test_a_raise_in_every_kind_of_node_under_every_scheduler(node: str) -> None:
    graph = same >> RAISERS[node] >> same
    name = graph.name
    async with engine.Engine() as own:  # one Engine, so that worker processes start once
        for scheduler in SCHEDULERS:
            with pytest.raises(LookupError) as raised:
                await own.run(graph(3), scheduler=scheduler)
            assert raised.value.args == (3,)
            assert raised.value.__notes__ == [f"in node {node!r} of graph {name!r}, item 0, attempt 1"]

            outcomes = await outcomes_of(own.stream((graph(x) for x in range(2)), scheduler=scheduler))
            assert [repr(outcome.error) for outcome in outcomes] == ["LookupError(0)", "LookupError(1)"]
            assert [outcome.error.__notes__ for outcome in outcomes if outcome.error is not None] == [
                [f"in node {node!r} of graph {name!r}, item {item}, attempt 1"] for item in range(2)
            ]

            async with own.deploy(graph, scheduler=scheduler) as service:
                for item in range(2):
                    with pytest.raises(LookupError) as raised:
                        await service(item)
                    assert raised.value.__notes__ == [f"in node {node!r} of graph {name!r}, item {item}, attempt 1"]


CONTROL: dict[str, Any] = {
    "cond": lambda x: ps.cond(x, raise_later, same, x),
    "switch": lambda x: ps.switch(x, (same, raise_later), x),
    "while_loop": lambda x: ps.while_loop(true, raise_later, x),
    "map_each": lambda x: ps.map_each(raise_later, [x, x]),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("control", CONTROL)
async def test_a_raise_in_a_body_of_control_flow_under_every_scheduler(control: str, scheduler) -> None:
    @ps.graph
    async def graph(x: int) -> object:
        return await CONTROL[control](x)

    with pytest.raises(LookupError) as raised:
        await engine.run(graph(1), scheduler=scheduler)
    assert "in node 'raise_later'" in raised.value.__notes__[0]


async def test_a_plain_function_that_returns_a_coroutine_by_mistake_is_an_error_that_says_so() -> None:
    async def forgotten(x: int) -> int:
        return x

    @ps.node
    def mistaken(x: int) -> object:
        return forgotten(x)

    graph = ps.graph(mistaken)

    @ps.graph
    async def chained(x: int) -> object:
        return plain(plain(mistaken(x)))  # type: ignore[arg-type]

    for call in (graph(1), chained(1)):
        for use in (engine.run(call), anext(engine.stream([call]))):
            with pytest.raises(TypeError, match=r"mistaken.*async def"):
                await use


async def test_a_node_whose_own_awaited_task_was_cancelled_fails_and_is_not_cancelled() -> None:
    @ps.node
    async def waits_for_a_cancelled_task(x: int) -> int:
        task = asyncio.ensure_future(asyncio.sleep(3600))
        task.cancel()
        await task
        return x

    graph = ps.graph(waits_for_a_cancelled_task)

    assert [type(one.error) for one in await outcomes_of(engine.stream(map(graph, range(2))))] == [
        ps.NodeCancelledError
    ] * 2
    with pytest.raises(ps.NodeCancelledError) as raised:
        await engine.run(graph(1))
    name = "waits_for_a_cancelled_task"
    assert raised.value.__notes__ == [f"in node '{name}' of graph '{name}', item 0, attempt 1"]


def failing_in(place: str) -> ps.Graph[[int], int]:
    """Returns a graph whose node fails for 1,000 items in one way."""
    error = FileNotFoundError(2, "no such file", "/weights")
    batch = ps.Batch(1000, max_wait_seconds=60)

    @ps.node
    async def alone(x: int) -> int:
        raise error

    @ps.node(batch=batch)
    async def on_loop(xs: list[int]) -> list[int]:
        raise error

    @ps.node(batch=batch, runs_on="thread")
    def in_thread(xs: list[int]) -> list[int]:
        raise error

    @ps.node(batch=batch)
    async def returned(xs: list[int]) -> list[int | BaseException]:
        return [error] * len(xs)

    return ps.graph({fn.name: fn for fn in (alone, on_loop, in_thread, returned)}[place])  # type: ignore[return-value]


def length_of(raised: TracebackType | None) -> int:
    return 0 if raised is None else 1 + length_of(raised.tb_next)


@pytest.mark.parametrize("place", ["alone", "on_loop", "in_thread", "returned"])
async def test_a_thousand_items_that_fail_in_one_way_have_an_exception_each(place: str) -> None:
    graph = failing_in(place)
    outcomes = await outcomes_of(engine.stream((graph(x) for x in range(1000)), max_in_flight=1000))
    errors = [outcome.error for outcome in outcomes]
    assert len(set(map(id, errors))) == 1000
    for index, error in enumerate(errors):
        assert isinstance(error, FileNotFoundError)
        assert str(error) == "[Errno 2] no such file: '/weights'"
        assert error.filename == "/weights"
        assert error.__notes__ == [f"in node {place!r} of graph {place!r}, item {index}, attempt 1"]
        assert length_of(error.__traceback__) < 20


@pytest.mark.parametrize("runs_on", ["loop", "thread"])
async def test_the_fallback_of_each_item_of_a_batch_is_given_an_exception_of_its_own(
    runs_on: Literal["loop", "thread"],
) -> None:
    errors: list[Exception] = []

    def fall_back(error: Exception) -> int:
        errors.append(error)
        return len(errors)

    def fail(xs: list[int]) -> list[int]:
        raise LookupError("gone")

    graph = ps.graph(ps.node(batch=ps.Batch(100, max_wait_seconds=60), runs_on=runs_on, fallback=fall_back)(fail))

    assert await values_of(engine.stream((graph(x) for x in range(100)), max_in_flight=100)) == list(range(1, 101))
    assert len(set(map(id, errors))) == 100
    assert {length_of(error.__traceback__) for error in errors} == {length_of(errors[0].__traceback__)}
    where = traceback.extract_tb(errors[99].__traceback__)
    assert "fail" in [entry.name for entry in where]


def failing_with(error: BaseException) -> ps.Graph[[int], int]:
    @ps.node
    async def fail(x: Any) -> int:
        raise error

    return ps.graph(fail)


class Picky(Exception):
    """An error that cannot be made from its arguments."""

    __slots__ = ("reason",)

    def __init__(self, text: str, *, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class Unique(Exception):
    """An error that cannot be made a second time."""

    def __new__(cls, *args: object) -> Self:
        if args == ("made",):
            return super().__new__(cls, *args)
        raise TypeError("there is one of it")

    def __init__(self, text: str) -> None:
        super().__init__()


@pytest.mark.parametrize(
    "error",
    [
        Picky("refused", reason="no"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ExceptionGroup("both", [ValueError(1), OSError(2)]),
        KeyError("k"),
    ],
    ids=repr,
)
async def test_the_exception_of_another_item_is_equal(error: Exception) -> None:
    graph = failing_with(error)
    async with engine.stream(graph(x) for x in range(2)) as stream:
        first, second = [outcome.error async for outcome in stream.outcomes()]
    assert first is error
    assert second is not error
    assert (type(second), repr(second), str(second)) == (type(error), repr(error), str(error))
    assert getattr(second, "reason", None) == getattr(error, "reason", None)


async def test_an_exception_that_cannot_be_copied_is_the_cause_of_another() -> None:
    error = Unique("made")
    graph = failing_with(error)
    outcomes = await outcomes_of(engine.stream(graph(x) for x in range(3)))
    assert outcomes[0].error is error
    assert error.__notes__ == ["in node 'fail' of graph 'fail', item 0, attempt 1"]
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, ps.NodeError)
        assert outcome.error.__cause__ is error
        assert outcome.error.__notes__ == [f"in node 'fail' of graph 'fail', item {outcome.index}, attempt 1"]


async def test_one_exception_object_raised_by_many_items_does_not_keep_their_values() -> None:
    class Value:
        pass

    made: list[weakref.ref[Value]] = []

    @ps.node
    async def make(x: int) -> Value:
        value = Value()
        made.append(weakref.ref(value))
        return value

    graph: Any = make >> failing_with(LookupError("the same"))
    assert await values_of(engine.stream((graph(x) for x in range(100)), on_error="skip")) == []
    gc.collect()
    assert sum(ref() is not None for ref in made) <= 1


def stopping_at_one(kind: type[BaseException]) -> ps.Node[[int], Any]:
    """Returns a node that ends the program at the item 1, and waits for ever at all others."""

    @ps.node
    async def stop_at_one(x: int) -> int:
        if x == 1:
            raise kind
        await asyncio.sleep(3600)
        return x

    return stop_at_one


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_what_ends_the_program_ends_the_scope_of_its_item(kind: type[BaseException]) -> None:
    """Raised in a task, this would stop the loop. Here, the code that awaits the item gets it."""
    graph = ps.graph(stopping_at_one(kind))

    for use in (
        lambda: engine.run(graph(1)),
        lambda: anext(engine.stream(map(graph, [1, 2]))),
        lambda: anext(engine.stream(map(graph, [1, 2])).outcomes()),
    ):
        with pytest.raises(kind):
            await use()
    async with engine.deploy(graph) as service:
        [other] = await begun(service(2))
        with pytest.raises(kind):
            await service(1)
        assert await outcomes(other) == [ps.EngineClosedError]
        assert service.state == "stopped"
        with pytest.raises(ps.EngineClosedError):
            await service(2)


class Panic(BaseException):
    """The error of a panic in an extension written in Rust."""


def panic_at_one(x: int) -> int:
    if x == 1:
        raise Panic("a bug in Rust")
    return x


async def panic_at_one_later(x: int) -> int:
    return panic_at_one(x)


def panic_at_ones(xs: list[int]) -> list[int]:
    return list(map(panic_at_one, xs))


@pytest.mark.parametrize(
    "node",
    [
        ps.node(panic_at_one_later), ps.node(runs_on="thread")(panic_at_one),
        ps.node(batch=ps.Batch(1))(panic_at_ones), ps.node(batch=ps.Batch(1), runs_on="thread")(panic_at_ones),
    ],
    ids=["loop", "thread", "batch", "batch in a thread"],
)  # fmt: skip
async def test_a_panic_ends_its_own_call_of_a_deployment_and_no_other(node: Any) -> None:
    graph = ps.graph(node)
    async with engine.deploy(graph) as service:
        for call in (service, lambda x: anext(aiter(service.stream([graph(x)], on_error="skip")))):
            with pytest.raises(Panic):
                await call(1)
            assert await call(2) == 2
        statistics = service.statistics()
        assert (service.state, statistics.completed, statistics.failed) == ("ready", 2, 2)
    with pytest.raises(Panic):
        await engine.run(graph(1))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("over", ["list", "stream"])
async def test_what_ends_the_program_does_not_wait_for_its_turn_in_a_body(over: str, kind: type[BaseException]) -> None:
    stop_at_one = stopping_at_one(kind)

    @ps.graph
    async def over_list() -> list[int]:
        return await ps.map_each(stop_at_one, [0, 1, 2])

    @ps.graph
    async def over_stream() -> AsyncIterator[int]:
        return ps.map_each(stop_at_one, numbers(3))

    with pytest.raises(kind):
        async with asyncio.timeout(60):
            await (engine.run(over_list()) if over == "list" else anext(engine.stream(over_stream())))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Panic])
async def test_what_ends_the_program_is_not_skipped_retried_or_replaced(error: type[BaseException]) -> None:
    attempts: list[int] = []

    @ps.node(retry=ps.Retry(attempts=3), fallback=lambda error: -1)
    async def stop(x: int, value: int = 0) -> int:
        attempts.append(x)
        raise error

    @ps.graph
    async def mapped(x: int) -> list[int]:
        return await ps.map_each(stop, [x], on_error="skip")

    @ps.graph
    async def folded(x: int) -> int:
        return await ps.fold(stop, numbers(1), x, on_error="skip")

    for use in (
        lambda: anext(engine.stream([ps.graph(stop)(1)], on_error="skip")),
        lambda: engine.run(mapped(2)),
        lambda: engine.run(folded(3)),
    ):
        with pytest.raises(error):
            await use()
    assert attempts == [1, 2, 3]


class RefusesAttributes(Exception):
    """Like a frozen dataclass: no attribute can be set by name, so no note, no traceback and no cause."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


@ps.node(runs_on="thread")
def refuse_in_thread(x: int) -> int:
    raise RefusesAttributes(x)


async def refuse(x: int = 1) -> int:
    raise RefusesAttributes(x)


@pytest.mark.parametrize("node", [refuse_in_thread, ps.node(refuse), model(enter=refuse)])
async def test_an_exception_that_refuses_attributes_is_the_one_that_is_raised(node: Any) -> None:
    with pytest.raises(RefusesAttributes):
        await engine.run(ps.graph(node)(1))
