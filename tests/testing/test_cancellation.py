"""cancel_at_every_step() reaches every suspension point, and shows tasks and errors that a cancel leaves behind."""

import asyncio

import pytest

from penstock.testing import cancel_at_every_step


def test_every_suspension_point_is_reached() -> None:
    reached: set[object] = set()

    async def main() -> str:
        where: object = None
        try:
            for turn in range(10):
                where = turn
                await asyncio.sleep(0)
            where = "in a timer"
            await asyncio.sleep(10)
            where = "in a task"
            await asyncio.create_task(asyncio.sleep(1))
        except asyncio.CancelledError:
            reached.add(where)
            raise
        return "finished"

    outcomes = list(cancel_at_every_step(main))
    assert reached == {*range(10), "in a timer", "in a task"}
    assert [outcome.step for outcome in outcomes] == list(range(len(outcomes)))
    assert (outcomes[-1].cancelled, outcomes[-1].result, outcomes[-1].error) == (False, "finished", None)
    assert all(outcome.cancelled for outcome in outcomes[:-1])
    assert all(isinstance(outcome.error, asyncio.CancelledError) for outcome in outcomes[:-1])
    assert not any(outcome.tasks_left or outcome.loop_errors for outcome in outcomes)


def test_a_task_that_ends_by_itself_is_not_left_behind() -> None:
    async def unwind() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            for _ in range(20):
                await asyncio.sleep(0)

    async def main() -> None:
        child = asyncio.create_task(unwind())
        try:
            await asyncio.sleep(1)
        finally:
            child.cancel()

    assert [outcome.tasks_left for outcome in cancel_at_every_step(main) if outcome.tasks_left] == []


def test_the_cancel_also_falls_between_wake_up_and_run() -> None:
    woken_but_cancelled: list[bool] = []

    async def main() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1, future.set_result, None)
        try:
            await future
        except asyncio.CancelledError:
            woken_but_cancelled.append(future.done() and not future.cancelled())
            raise

    for outcome in cancel_at_every_step(main):
        assert outcome.loop_errors == () or "InvalidStateError" in outcome.loop_errors[0]
    assert set(woken_but_cancelled) == {True, False}


def test_a_task_left_behind_is_named() -> None:
    async def orphan() -> None:
        await asyncio.sleep(3600)

    async def main() -> None:
        child = asyncio.create_task(orphan())
        await asyncio.sleep(1)
        child.cancel()

    left = [outcome.tasks_left for outcome in cancel_at_every_step(main)]
    assert left[-1] == ()
    assert any("orphan" in name for names in left for name in names)


def test_an_error_that_nobody_sees_is_reported() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            loop.call_soon(lambda: 1 / 0)
            raise

    errors = [error for outcome in cancel_at_every_step(main) for error in outcome.loop_errors]
    assert errors
    assert all("division by zero" in error for error in errors)


def test_a_swallowed_cancel_shows_as_a_result() -> None:
    async def main() -> str:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            return "swallowed"
        return "slept"

    results = {(outcome.cancelled, outcome.result) for outcome in cancel_at_every_step(main)}
    assert results >= {(True, "swallowed"), (False, "slept")}


def test_a_cancel_that_hangs_names_the_step() -> None:
    async def main() -> None:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError) as failure:
        list(cancel_at_every_step(main, timeout_seconds=60))
    assert "cancelled at step" in failure.value.__notes__[0]
