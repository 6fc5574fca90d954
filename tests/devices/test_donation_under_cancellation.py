"""State that is donated to a device and replaced by the result, while callers are cancelled."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine
from penstock.devices.engine_device import CallQueue
from tests.kit import begun, model, outcomes

from .gates import Gate
from .kit import on_the_host, refusing

LENGTH = 512


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def recorder(noted: list[int], *, ready: bool) -> Any:
    """A stateful node that donates its state to each step. For a negative number, it returns the steps seen.

    Args:
        noted: gets the steps that have begun on the device.
        ready: whether a step waits for its result.
    """
    device, state = devices.actor("cpu"), (jnp.zeros((), jnp.int32), jnp.zeros(LENGTH, jnp.int32))

    def note(number: Any) -> Any:
        noted.append(int(number))
        return np.asarray(number)

    def step(state: Any, number: jax.Array) -> Any:
        count, numbers = state
        return count + 1, numbers.at[count].set(on_the_host(note, number))

    def look(state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + 0, state)

    async def call(number: int) -> list[int]:
        nonlocal state
        if number < 0:
            count, numbers = await device.run(look, state)  # raises if the state was donated and deleted
            return [int(seen) for seen in np.asarray(numbers)[: int(count)]]
        state = await device.run(step, state, np.int32(number), donate_argnums=(0,), ready=ready)
        await asyncio.sleep(0)
        return []

    return model(call=call)


@pytest.mark.parametrize("ready", [True, False])
async def test_the_state_is_always_usable_and_has_seen_every_step_that_has_begun(ready: bool, effort: int) -> None:
    for seed in range(effort):
        chance = random.Random(seed)
        noted: list[int] = []
        async with engine.deploy(ps.graph(recorder(noted, ready=ready))) as service:
            calls: list[asyncio.Task[list[int]]] = []
            for number in range(100):
                calls.append(asyncio.ensure_future(service(number)))
                await turns(chance.choice((0, 0, 1, 1, 2, 3, 8)))
                if chance.random() < 0.6:
                    chance.choice(calls[-4:]).cancel()
                if chance.random() < 0.1:
                    seen = await service(-1)
                    assert seen == noted[: len(seen)]
            await asyncio.wait(calls)
            assert await service(-1) == noted
        cancelled = {number for number, call in enumerate(calls) if call.cancelled()}
        assert 0 < len(cancelled) < 100
        assert {*range(100)} - cancelled <= {*noted}
        assert len(noted) == len({*noted})


class Held:
    """A donating call that waits on the device until the gate opens."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.state = jnp.zeros(4)
        self.result: Any = None
        self.steps: list[str] = []
        self.opening: asyncio.Future[None] | None = None

    async def run(self) -> None:
        self.result = await devices.actor("cpu").run(self._step, self.state, donate_argnums=(0,))

    def _step(self, state: jax.Array) -> jax.Array:
        return self.gate.pass_through(state) + 1

    @property
    def is_whole(self) -> bool:
        """Whether the result of the call has been stored."""
        return self.result is not None and np.asarray(self.result).tolist() == [1] * 4

    async def ends(self, handler: Callable[[], Awaitable[None]], message: str | None = None) -> tuple[list[str], int]:
        """Runs a handler, and cancels it with a message if there is one, after the device has begun.

        Returns:
            The steps of the handler, and how many cancellations it has not taken back.
        """
        task = asyncio.ensure_future(handler())
        if message is None:
            await task
        else:
            await self.cancel_and_open(lambda: task.cancel(message))
            with pytest.raises(asyncio.CancelledError, match=message):
                await task
        assert self.is_whole
        return self.steps, task.cancelling()

    async def cancel_and_open(self, cancel: Callable[[], object]) -> None:
        """Cancels after the device has begun, and then opens the gate."""
        await self.gate.entered()
        cancel()
        await turns(10)
        assert self.result is None
        self.gate.open()


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    found = Held()
    yield found
    found.gate.open()


async def test_what_has_begun_gives_its_result_and_the_cancellation_comes_with_the_next_await(held: Held) -> None:
    async def handler() -> None:
        await held.run()
        held.steps.append("stored")
        await asyncio.sleep(30)
        held.steps.append("went on")

    assert await held.ends(handler, "why") == (["stored"], 1)


async def test_a_call_that_would_hold_up_a_cancellation_again_does_not_begin(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = CallQueue.submit

    def submit_and_begin(self: CallQueue, call: Any) -> None:
        submit(self, call)
        while held.result is not None and not call._turn.locked():  # from here on, the call waits only for its result
            time.sleep(0.001)

    monkeypatch.setattr(CallQueue, "submit", submit_and_begin)

    async def handler() -> None:
        await held.run()
        for number in range(20):
            await devices.actor("cpu").run(jnp.negative, jnp.zeros(4), donate_argnums=(0,))
            held.steps.append(f"call {number}")

    assert await held.ends(handler, "why") == ([], 1)


async def test_what_has_not_begun_is_taken_back_at_once_and_nothing_is_donated(held: Held) -> None:
    device = devices.actor("cpu")
    first = asyncio.ensure_future(held.run())
    await held.gate.entered()
    # More than the device holds, so that some calls wait on the loop.
    states = [jnp.full(4, number) for number in range(40)]
    waiting = await begun(*[device.run(jnp.negative, state, donate_argnums=(0,)) for state in states])
    for task in waiting:
        task.cancel()
    assert await outcomes(*waiting) == [asyncio.CancelledError] * 40
    held.gate.open()
    await first
    await device.run(jnp.positive, np.zeros(1))  # runs after all of them
    assert not any(state.is_deleted() for state in states)


async def test_an_error_of_what_has_begun_reaches_the_caller_and_so_does_the_cancellation() -> None:
    gate, steps = Gate(), list[str]()

    async def handler() -> None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="a negative number"):
            await devices.actor("cpu").run(
                lambda state: refusing(gate.pass_through(state)), -jnp.ones(4), donate_argnums=(0,)
            )
        steps.append("knows")
        await asyncio.sleep(30)
        steps.append("went on")

    task = asyncio.ensure_future(handler())
    await gate.entered()
    task.cancel()
    await turns(3)
    gate.open()
    assert await outcomes(task) == [asyncio.CancelledError]
    assert steps == ["knows"]


async def test_a_timeout_that_passes_meanwhile_is_raised_where_its_block_waits_next(held: Held) -> None:
    async def handler() -> None:
        async with asyncio.timeout(None) as timer:
            held.steps.append("began")
            held.opening = asyncio.ensure_future(held.cancel_and_open(lambda: timer.reschedule(0)))
            await held.run()
            await asyncio.sleep(30)
        held.steps.append("went on")

    task = asyncio.ensure_future(handler())
    with pytest.raises(TimeoutError):
        await task
    assert held.is_whole
    assert (held.steps, task.cancelling()) == (["began"], 0)


async def test_a_timeout_that_passes_meanwhile_and_whose_block_has_ended_is_over(held: Held) -> None:
    async def handler() -> None:
        async with asyncio.timeout(None) as timer:
            expiring = asyncio.ensure_future(held.cancel_and_open(lambda: timer.reschedule(0)))
            await held.run()
        assert timer.expired()
        await expiring
        await turns(5)
        held.steps.append("went on")

    assert await held.ends(handler) == (["went on"], 0)


async def test_a_timeout_takes_back_its_own_cancellation_and_not_that_of_another(held: Held) -> None:
    async def handler() -> None:
        async with asyncio.timeout(None) as timer:
            cancelling = asyncio.ensure_future(held.cancel_and_open(lambda: cancel_twice(timer)))
            await held.run()
        held.steps.append("block left")
        await cancelling
        await asyncio.sleep(30)

    def cancel_twice(timer: asyncio.Timeout) -> None:
        timer.reschedule(0)
        asyncio.get_running_loop().call_soon(task.cancel)

    task = asyncio.ensure_future(handler())
    assert await outcomes(task) == [asyncio.CancelledError]
    assert held.is_whole
    assert (held.steps, task.cancelling()) == (["block left"], 1)


async def test_a_task_group_ends_with_the_error_of_another_task(held: Held) -> None:
    async def fail() -> None:
        await held.gate.entered()
        asyncio.get_running_loop().call_later(0, held.gate.open)
        raise LookupError("another")

    async def handler() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await held.run()
                held.steps.append("stored")
                await asyncio.sleep(30)
        except* LookupError:
            held.steps.append("failed")
        await turns(5)
        held.steps.append("went on")

    assert await held.ends(handler) == (["stored", "failed", "went on"], 0)


@pytest.mark.parametrize("waits_again", [True, False])
async def test_a_cancel_scope_of_anyio_is_left_as_it_should(held: Held, waits_again: bool) -> None:
    async def handler() -> None:
        with anyio.CancelScope() as scope:
            cancelling = asyncio.ensure_future(held.cancel_and_open(scope.cancel))
            await held.run()
            held.steps.append("stored")
            if waits_again:
                await asyncio.sleep(30)
                held.steps.append("went on inside")
        assert scope.cancelled_caught == waits_again
        await cancelling
        await turns(5)
        held.steps.append("went on")

    assert await held.ends(handler) == (["stored", "went on"], 0)


async def test_a_task_group_of_anyio_whose_block_is_in_a_call_when_it_is_cancelled(held: Held) -> None:
    async def handler() -> None:
        async with anyio.create_task_group() as group:
            cancelling = asyncio.ensure_future(held.cancel_and_open(group.cancel_scope.cancel))
            group.start_soon(asyncio.sleep, 30)
            with anyio.CancelScope():
                await held.run()
            held.steps.append("stored")
            await asyncio.sleep(30)
            held.steps.append("went on inside")
        await cancelling
        await turns(5)
        held.steps.append("went on")

    assert await held.ends(handler) == (["stored", "went on"], 0)
