"""Promise 5: a cancelled item emits nothing. Its place is free at once if it is queued; if it runs, once unwound."""

import asyncio
import contextlib
import weakref

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, begun, outcomes


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
        calls = await begun(*map(service, range(4)))
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
        assert await outcomes(*calls) == [0, asyncio.CancelledError, 2, asyncio.CancelledError]
        assert gate.came == [0, 2]
    actors = {actor.node: actor for actor in service.statistics().actors}
    assert actors["narrow"].completed == 2
    assert actors["narrow"].in_flight == actors["make"].in_flight == 0


async def test_promise_5_a_caller_in_the_admission_queue_frees_its_place_at_once() -> None:
    gate = Gate()
    async with engine.deploy(gate.graph(), max_in_flight=1, max_queue=1) as service:
        first, second = await begun(service(1), service(2))
        with pytest.raises(ps.Overloaded):
            await service(3)
        second.cancel()
        await testing.wait_quiescent()
        assert service.statistics().admission.queued == 0
        [fourth] = await begun(service(4))
        gate.open()
        assert [await first, await fourth] == [1, 4]


async def test_promise_5_a_running_item_keeps_its_place_until_it_has_unwound() -> None:
    unwinding, go_on = asyncio.Event(), asyncio.Event()
    came: list[int] = []

    @ps.node(concurrency=1)
    async def narrow(item: int) -> int:
        came.append(item)
        if item == 1:
            try:
                await asyncio.Event().wait()
            finally:
                unwinding.set()
                await go_on.wait()
        return item

    async with engine.deploy(ps.graph(narrow), max_in_flight=4) as service:
        first, second = await begun(service(1), service(2))
        first.cancel()
        await unwinding.wait()
        await testing.wait_quiescent()
        assert came == [1]  # the place is still taken
        assert service.statistics().admission.in_flight == 2
        go_on.set()
        assert await second == 2
        await asyncio.wait([first])
        assert service.statistics().cancelled == 1


@pytest.mark.parametrize("remedy", ["retry", "fallback", "failover"])
async def test_promise_5_no_remedy_begins_for_an_item_whose_handler_makes_another_error_of_the_cancel(
    remedy: str,
) -> None:
    """Task groups of Python 3.11 raise another error if one of their tasks has already failed."""
    came: list[str] = []

    async def other(item: int) -> int:
        came.append(remedy)
        return item

    policies = {"retry": ps.Retry(3), "fallback": other, "failover": ps.node(other)}

    @ps.node(**{remedy: policies[remedy]})
    async def asks(item: int) -> int:
        came.append("asks")
        try:
            if came == ["asks"]:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError("the peer is gone") from None
        return item

    [caller] = await begun(engine.run(ps.graph(asks)(1)))
    caller.cancel()
    assert await outcomes(caller) == [asyncio.CancelledError]
    assert came == ["asks"]


async def test_promise_5_a_late_result_is_discarded() -> None:
    """A handler that swallows its cancel may return anything: its item has already ended."""
    after = Gate()

    @ps.node
    async def stubborn(x: int) -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return x

    async with engine.deploy(stubborn >> after.node()) as service:
        [call] = await begun(service(1))
        call.cancel()
        assert await outcomes(call) == [asyncio.CancelledError]
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
            assert await outcomes(call) == [asyncio.CancelledError]  # the caller is released at once
            [second] = await begun(service(2))
            assert not second.done()  # the thread keeps the only place until it returns
            gate.open()
            assert await second == 2
        assert after.came == [2]
        pool = own.statistics().threads
        assert pool is not None
        assert pool.discarded == 1
