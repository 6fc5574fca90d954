"""Promise 5: a cancelled item emits nothing. Its place is free at once if it is queued; if it runs, once unwound."""

import asyncio
import contextlib
import weakref

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate


class Token:
    """An input of which a test can hold a weak reference."""


async def test_promise_5_a_queued_item_frees_its_place_its_values_and_the_producer_that_waits_for_it() -> None:
    gate = Gate()
    tokens: dict[int, weakref.ref[Token]] = {}

    @ps.node
    async def make(item: int) -> tuple[int, Token]:
        token = Token()
        tokens[item] = weakref.ref(token)
        return item, token

    @ps.node(concurrency=1, capacity=1)
    async def narrow(value: tuple[int, Token]) -> int:
        return await gate.wait(value[0])

    def inbox() -> tuple[int, int]:
        [found] = [actor.inbox for actor in service.statistics().actors if actor.node == "narrow"]
        return found.depth, found.waiting_putters

    async with engine.deploy(make >> narrow) as service:
        calls = []
        for item in range(4):
            calls.append(asyncio.create_task(service(item)))
            await testing.wait_quiescent()
        assert (gate.came, inbox()) == ([0], (1, 2))  # 1 is queued; 2 and 3 wait before the inbox
        calls[1].cancel()
        await testing.wait_quiescent()
        assert inbox() == (1, 1)  # 2 has moved into the inbox
        assert tokens[1]() is None
        assert service.statistics().cancelled == 1
        calls[3].cancel()  # 3 waits before the inbox
        await testing.wait_quiescent()
        assert tokens[3]() is None
        gate.open()
        assert [await calls[0], await calls[2]] == [0, 2]
        assert gate.came == [0, 2]
        await asyncio.wait(calls)
        assert [call.cancelled() for call in calls] == [False, True, False, True]
    actors = {actor.node: actor for actor in service.statistics().actors}
    assert actors["narrow"].completed == 2
    assert actors["narrow"].in_flight == actors["make"].in_flight == 0


async def test_promise_5_a_caller_in_the_admission_queue_frees_its_place_at_once() -> None:
    gate = Gate()
    async with engine.deploy(gate.graph(), max_in_flight=1, max_queue=1) as service:
        first = asyncio.create_task(service(1))
        await testing.wait_quiescent()
        second = asyncio.create_task(service(2))
        await testing.wait_quiescent()
        with pytest.raises(ps.Overloaded):
            await service(3)
        second.cancel()
        await testing.wait_quiescent()
        assert service.statistics().admission.queued == 0
        fourth = asyncio.create_task(service(4))
        await testing.wait_quiescent()
        gate.open()
        assert [await first, await fourth] == [1, 4]


async def test_promise_5_a_running_item_keeps_its_place_until_it_has_unwound() -> None:
    unwinding, go_on = asyncio.Event(), asyncio.Event()
    begun: list[int] = []

    @ps.node(concurrency=1)
    async def narrow(item: int) -> int:
        begun.append(item)
        if item == 1:
            try:
                await asyncio.Event().wait()
            finally:
                unwinding.set()
                await go_on.wait()
        return item

    async with engine.deploy(ps.graph(narrow), max_in_flight=4) as service:
        first = asyncio.create_task(service(1))
        await testing.wait_quiescent()
        second = asyncio.create_task(service(2))
        await testing.wait_quiescent()
        first.cancel()
        await unwinding.wait()
        await testing.wait_quiescent()
        assert begun == [1]  # the place is still taken
        assert service.statistics().admission.in_flight == 2
        go_on.set()
        assert await second == 2
        with contextlib.suppress(asyncio.CancelledError):
            await first
        assert service.statistics().cancelled == 1


@pytest.mark.parametrize("remedy", ["retry", "fallback", "failover"])
async def test_promise_5_no_remedy_begins_for_an_item_whose_handler_makes_another_error_of_the_cancel(
    remedy: str,
) -> None:
    """Task groups of Python 3.11 raise another error if one of their tasks has already failed."""
    begun: list[str] = []
    waits = asyncio.Event()

    async def other(item: int) -> int:
        begun.append(remedy)
        return item

    policies = {"retry": ps.Retry(3), "fallback": other, "failover": ps.node(other)}

    @ps.node(**{remedy: policies[remedy]})
    async def asks(item: int) -> int:
        begun.append("asks")
        try:
            if not waits.is_set():
                waits.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError("the peer is gone") from None
        return item

    caller = asyncio.create_task(engine.run(ps.graph(asks)(1)))
    await waits.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert begun == ["asks"]


async def test_promise_5_a_late_result_is_discarded() -> None:
    """A handler that swallows its cancel may return anything: its item has already ended."""
    after = Gate()

    @ps.node
    async def stubborn(x: int) -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return x

    async with engine.deploy(stubborn >> after.node()) as service:
        call = asyncio.create_task(service(1))
        await testing.wait_quiescent()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert after.came == []
    assert (service.statistics().completed, service.statistics().cancelled) == (0, 1)


async def test_promise_5_the_late_result_of_a_thread_is_discarded() -> None:
    gate, after = Gate(), Gate()
    after.open()

    @ps.node(runs_on="thread", concurrency=1)
    def block(x: int) -> int:
        return gate.block(x) if x == 1 else x

    async with engine.Engine() as own:
        async with own.deploy(block >> after.node()) as service:
            call = asyncio.create_task(service(1))
            await gate.has()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call  # the caller is released at once
            second = asyncio.create_task(service(2))
            await testing.wait_quiescent()
            assert not second.done()  # the thread keeps the only place until it returns
            gate.open()
            assert await second == 2
        assert after.came == [2]
        pool = own.statistics().threads
        assert pool is not None
        assert pool.discarded == 1
