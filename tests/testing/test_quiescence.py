"""wait_quiescent() returns when only time or the outside can make a task go on, and not before."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.testing import interleavings, run_virtual, wait_quiescent


async def chain_of_tasks() -> None:
    done: list[int] = []

    async def link(number: int, before: asyncio.Event, after: asyncio.Event) -> None:
        await before.wait()
        for _ in range(number):
            await asyncio.sleep(0)
        done.append(number)
        after.set()

    events = [asyncio.Event() for _ in range(11)]
    tasks = [asyncio.create_task(link(number, events[number], events[number + 1])) for number in range(10)]
    await wait_quiescent()
    assert done == []
    events[0].set()
    await wait_quiescent()
    assert done == list(range(10))
    await asyncio.gather(*tasks)


async def chain_of_callbacks() -> None:
    loop = asyncio.get_running_loop()
    reached: asyncio.Future[str] = loop.create_future()

    def hop(remaining: int) -> None:
        if remaining:
            loop.call_soon(hop, remaining - 1)
        else:
            reached.set_result("the end")

    hop(500)
    await wait_quiescent()
    assert reached.done()


async def sleeping_tasks_are_blocked() -> None:
    task = asyncio.create_task(asyncio.sleep(3600))
    await wait_quiescent()
    assert not task.done()
    task.cancel()
    await wait_quiescent()
    assert task.cancelled()


async def several_may_wait() -> None:
    order: list[str] = []

    async def wait(name: str) -> None:
        await wait_quiescent()
        order.append(name)

    async def work() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        order.append("work")

    await asyncio.gather(wait("a"), work(), wait("b"))
    assert order[0] == "work"
    assert sorted(order[1:]) == ["a", "b"]


async def a_cancelled_waiter_is_forgotten() -> None:
    waiter = asyncio.create_task(wait_quiescent())
    spinner = asyncio.create_task(spin())
    await asyncio.sleep(0)
    waiter.cancel()
    spinner.cancel()
    await wait_quiescent()
    assert waiter.cancelled()
    ran: list[None] = []
    asyncio.get_running_loop().call_soon(ran.append, None)
    await wait_quiescent()
    assert ran


async def spin() -> None:
    while True:
        await asyncio.sleep(0)


async def data_that_has_arrived_is_handled() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello")
    writer.write_eof()
    await wait_quiescent()
    assert await reader.read() == b"HELLO"
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


CASES = [
    chain_of_tasks, chain_of_callbacks, sleeping_tasks_are_blocked, several_may_wait, a_cancelled_waiter_is_forgotten,
    data_that_has_arrived_is_handled,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_on_asyncio_and_uvloop(case: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await case()


@pytest.mark.parametrize("case", CASES)
def test_in_virtual_time_and_under_many_seeds(case: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(case)
    interleavings(case, count=20, timeout_seconds=None)
