"""Copies of functions that are written out for speed do the same as their originals."""

import asyncio
import contextlib
import traceback
import weakref
from contextvars import copy_context
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from penstock.actors.current import Position
from penstock.actors.frame import Frame
from penstock.actors.worker import Worker, WorkerGroup
from penstock.engine.call import RunningCall
from tests.kit import Gate, begun, paused, same


@ps.node
def negated(x: int) -> int:
    return -x


line, plain = ps.graph(same), ps.graph(negated)


@ps.graph
async def fork(x: int) -> tuple[int, int]:
    return await same(x), await paused(x)


def given(value: object) -> dict[str, Any]:
    """The attributes of an object whose values can be compared."""
    return {name: one for name, one in vars(value).items() if isinstance(one, int | str | tuple | list | None)}


@pytest.mark.asyncio(loop_factories=["asyncio"])  # no call runs, whatever the loop
@pytest.mark.parametrize("graph", [line, fork])
async def test_a_call_begins_as_the_frame_and_the_group_of_workers_that_it_is(graph: ps.Graph[[int], Any]) -> None:
    loop = asyncio.get_running_loop()
    async with engine.deploy(line, fork) as service:
        wired = service._deployment.ready[graph]
    call: Any = RunningCall(loop, graph.name, ps.ExecutionOptions())
    group = WorkerGroup(loop, copy_context(), lambda _: None)
    frame = Frame(wired.program, (3,), group, call, 7, None)
    call.start_worker = lambda *_, **__: None
    call.launch(wired, (3,), 7)
    for original in (given(group), given(frame)):
        assert {name: getattr(call, name) for name in original} == original
    assert (call.group, call.listener) == (call, call)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # no call runs, whatever the loop
async def test_a_worker_begins_as_the_position_that_it_is() -> None:
    group = WorkerGroup(asyncio.get_running_loop(), copy_context(), lambda _: None)
    worker, position = Worker(group), Position()
    assert [getattr(worker, name) for name in Position.__slots__] == [
        getattr(position, name) for name in Position.__slots__
    ]
    assert group.workers == (worker,)


Numbers = tuple[int, ...]


def stage(number: int, failing: int, concurrency: int | None, *, hangs: bool, is_plain: bool) -> Any:
    """Return a node of a line; at the failing node, some items fail, and some wait for ever or for one turn."""

    def step(x: int) -> int:
        if number == failing and x % 3 == 1:
            raise ValueError(x)
        return x + 1000 * (ps.current().node == f"stage{number}")

    async def pass_on(x: int) -> int:
        if number == failing and x % 3 == 2 and hangs:
            await asyncio.Event().wait()
        elif x % 5 == 0:
            await asyncio.sleep(0)
        return step(x)

    if is_plain:
        return ps.node(name=f"stage{number}")(step)
    return ps.node(name=f"stage{number}", concurrency=concurrency if number % 2 else None)(pass_on)


def line_of(stages: int, failing: int, plain_ones: Numbers, concurrency: int | None, *, hangs: bool) -> Any:
    """Return a graph of stages in a row."""
    nodes = [
        stage(number, failing, concurrency, hangs=hangs, is_plain=number in plain_ones) for number in range(stages)
    ]

    @ps.graph
    async def whole(x: int) -> int:
        for node in nodes:
            step = node(x)
            x = await step if node.is_async else step
        return x

    return whole


async def after_a_storm(stages: int, failing: int, plain_ones: Numbers, *, concurrency: int | None) -> list[object]:
    """Send items through a line of nodes, where some fail and some are cancelled; return all observations."""
    whole = line_of(stages, failing, plain_ones, concurrency, hangs=True)
    async with engine.deploy(whole, max_in_flight=30) as service:
        calls = await begun(*map(service, range(30)))
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        actors = [(one.node, one.completed, one.failed, one.in_flight) for one in service.statistics().actors]
    errors = [one for one in outcomes if isinstance(one, ValueError)]
    tracebacks = [[entry.name for entry in traceback.extract_tb(one.__traceback__)][-2:] for one in errors]
    return [[repr(one) for one in outcomes], [one.__notes__ for one in errors], tracebacks, actors]


@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize(
    ("stages", "failing", "plain_ones"),
    [
        (1, 0, ()), (2, 0, ()), (2, 1, ()), (5, 2, ()), (19, 15, ()), (19, 16, ()), (19, 18, ()),
        (2, 1, (1,)), (5, 2, (1, 3)), (5, 3, (1, 3)), (6, 4, (0, 2, 3, 5)), (19, 16, (2, 15, 16)),
    ],
)  # fmt: skip
async def test_a_line_does_what_its_nodes_do_one_by_one(
    stages: int, failing: int, plain_ones: Numbers, concurrency: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_out = await after_a_storm(stages, failing, plain_ones, concurrency=concurrency)
    monkeypatch.setattr("penstock.engine.wiring._compose_lines", lambda actors: None)
    assert written_out == await after_a_storm(stages, failing, plain_ones, concurrency=concurrency)


async def after_a_stream(
    stages: int, failing: int, plain_ones: Numbers, *, concurrency: int | None, size: int
) -> list[object]:
    """Stream items through a line of nodes and, now and then, through other graphs; return all observations."""
    whole = line_of(stages, failing, plain_ones, concurrency, hangs=False)
    calls = ((plain if x % 97 == 0 else line if x % 31 == 0 else whole)(x) for x in range(300))
    async with engine.stream(calls, on_error="skip", max_in_flight=size) as stream:
        outcomes = [
            (one.index, one.value, repr(one.error), getattr(one.error, "__notes__", None))
            async for one in stream.outcomes()
        ]
        actors = [(one.node, one.completed, one.failed, one.in_flight) for one in stream.statistics().actors]
    return [outcomes, actors]


@pytest.mark.parametrize(("size", "concurrency"), [(1, None), (64, 2)])
@pytest.mark.parametrize(
    ("stages", "failing", "plain_ones"),
    [(1, 0, ()), (2, 0, ()), (2, 1, ()), (5, 2, ()), (19, 18, ()), (2, 1, (1,)), (5, 3, (1, 3)), (6, 5, (0, 2, 3, 5))],
)
async def test_a_line_takes_the_items_of_a_stream_as_its_nodes_do_one_by_one(
    stages: int, failing: int, plain_ones: Numbers, size: int, concurrency: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_out = await after_a_stream(stages, failing, plain_ones, concurrency=concurrency, size=size)
    assert len(written_out[0]) == 300  # type: ignore[arg-type]
    monkeypatch.setattr("penstock.engine.wiring._compose_lines", lambda actors: None)
    assert written_out == await after_a_stream(stages, failing, plain_ones, concurrency=concurrency, size=size)


class Value:
    """A value that a weak reference can watch."""


async def test_a_line_that_waits_with_an_item_has_let_go_of_the_one_before() -> None:
    values = [Value() for _ in range(4)]
    may_return = asyncio.Event()

    @ps.node
    async def wait_with_the_last(value: Value) -> Value:
        if value is values[-1]:
            await may_return.wait()
        return value

    twice = wait_with_the_last >> wait_with_the_last
    async with engine.stream(twice(value) for value in list(values)) as stream:
        for _ in range(3):
            await anext(stream)
        await testing.wait_quiescent()
        known = [weakref.ref(value) for value in values]
        kept = values.pop()
        values[:] = [kept]
        assert [one() for one in known] == [None, None, None, kept]
        may_return.set()
        assert await anext(stream) is kept


async def test_a_value_that_has_come_out_of_a_line_is_released() -> None:
    inside, gate = list[weakref.ref[Value]](), Gate()
    held = gate.node()

    @ps.node
    async def changed(value: Value) -> Value:
        value = Value()
        inside.append(weakref.ref(value))
        return value

    @ps.node(retry=ps.Retry(attempts=2))
    async def counted(value: Value) -> int:
        return len(inside)

    @ps.graph
    async def counting(value: Value) -> int:
        for _ in range(5):
            value = await changed(value)
        return await held(await counted(value))

    async with engine.stream([counting(Value())]) as stream:
        [reading] = await begun(anext(stream))
        assert [one() for one in inside] == [None] * 5
        gate.open()
        assert await reading == 5


async def test_a_value_in_the_midst_of_a_line_may_be_part_of_the_result() -> None:
    @ps.node
    async def doubled(x: int) -> int:
        return 2 * x

    @ps.graph
    async def both(x: int) -> tuple[int, int]:
        for _ in range(4):
            x = await doubled(x)
        kept = x
        for _ in range(4):
            x = await doubled(x)
        return kept, x

    expected = [(16 * x, 256 * x) for x in range(3)]
    assert [await engine.run(both(x)) for x in range(3)] == expected
    assert [one async for one in engine.stream(both(x) for x in range(3))] == expected


@pytest.mark.parametrize("last", [1, 2])
async def test_an_item_that_ends_in_a_line_goes_no_further(last: int) -> None:
    begun: list[int] = []
    calls: list[asyncio.Task[int]] = []

    def step(number: int) -> Any:
        @ps.node(name=f"step{number}")
        async def pass_on(x: int) -> int:
            if x == 8:
                begun.append(number)
                if number == last:
                    calls[x].cancel()
                    with contextlib.suppress(asyncio.CancelledError):  # a handler that swallows the cancellation
                        await asyncio.sleep(0)
            return x

        return pass_on

    whole = step(0) >> step(1) >> step(2) >> step(3)
    async with engine.deploy(whole) as service:
        for x in range(9):  # nodes are watched during their first calls, and run in a line later
            calls.append(asyncio.ensure_future(service(x)))
            await asyncio.wait(calls)
    assert [one.cancelled() for one in calls] == [False] * 8 + [True]
    assert begun == list(range(last + 1))
