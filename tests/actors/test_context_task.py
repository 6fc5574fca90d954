"""A task that keeps one thing open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from penstock import testing
from penstock.actors.tasks import ContextTask


async def test_it_is_entered_and_left_by_one_task_which_is_not_the_callers() -> None:
    tasks: list[asyncio.Task[object] | None] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[str]:
        tasks.append(asyncio.current_task())
        async with anyio.create_task_group():
            yield "value"
        tasks.append(asyncio.current_task())

    context_task = ContextTask(opened(), "kept")
    await context_task.settled()
    assert context_task.is_open
    assert context_task.value == "value"
    assert await context_task.ended() is None
    assert not context_task.is_open
    assert context_task.was_opened
    assert tasks == [context_task.task, context_task.task]


async def test_whoever_waits_is_told_that_it_cannot_be_opened() -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        raise LookupError("no such thing")
        yield

    context_task = ContextTask(opened(), "kept")
    await context_task.settled()
    assert not context_task.was_opened
    assert isinstance(context_task.error, LookupError)


@pytest.mark.timeout(10)
async def test_an_opening_that_swallows_its_cancellation_is_left() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.append("swallowed")
        yield
        log.append("left")

    context_task = ContextTask(opened(), "kept")
    await testing.wait_quiescent()
    assert await context_task.ended() is None
    assert log == ["swallowed", "left"]
    assert context_task.was_opened
    assert not context_task.is_open


async def test_one_who_is_cancelled_waits_until_it_is_left() -> None:
    release = asyncio.Event()

    @asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        yield
        await release.wait()
        raise OSError("cannot be left")

    context_task = ContextTask(opened(), "kept")
    await context_task.settled()
    ending = asyncio.create_task(context_task.ended())
    await testing.wait_quiescent()
    ending.cancel()
    await testing.wait_quiescent()
    assert not ending.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert isinstance(context_task.error, OSError)
