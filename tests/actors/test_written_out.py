"""What is written out by hand where every call pays for it does what its original does."""

import asyncio
from contextvars import copy_context
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from penstock.actors.current import Position
from penstock.actors.frame import Frame
from penstock.actors.worker import Worker, WorkerGroup
from penstock.engine.call import RunningCall


@ps.node
async def left(x: int) -> int:
    return x


@ps.node
async def right(x: int) -> int:
    return x


@ps.graph
async def line(x: int) -> int:
    return await left(x)


@ps.graph
async def fork(x: int) -> tuple[int, int]:
    return await left(x), await right(x)


def given(value: object) -> dict[str, Any]:
    """What each object is given when it is made, where that can be compared."""
    return {name: one for name, one in vars(value).items() if isinstance(one, int | str | tuple | list | None)}


@pytest.mark.asyncio(loop_factories=["asyncio"])  # nothing runs
@pytest.mark.parametrize("graph", [line, fork])
async def test_a_call_begins_as_the_frame_and_the_group_of_workers_that_it_is(graph: ps.Graph[[int], Any]) -> None:
    loop = asyncio.get_running_loop()
    async with engine.deploy(line, fork) as service:
        wired = service._deployment.graphs.ready[graph]
    call: Any = RunningCall(loop, graph.name, ps.ExecutionOptions())
    group = WorkerGroup(loop, copy_context(), lambda _: None)
    frame = Frame(wired.program, (3,), group, call, 7, None)
    call.hire = lambda *_, **__: None
    call.launch(wired, (3,), 7)
    for original in (given(group), given(frame)):
        assert {name: getattr(call, name) for name in original} == original
    assert (call.group, call.listener) == (call, call)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # nothing runs
async def test_a_worker_begins_as_the_position_that_it_is() -> None:
    group = WorkerGroup(asyncio.get_running_loop(), copy_context(), lambda _: None)
    worker, position = Worker(group), Position()
    assert [getattr(worker, name) for name in Position.__slots__] == [
        getattr(position, name) for name in Position.__slots__
    ]
    assert group.workers == (worker,)
