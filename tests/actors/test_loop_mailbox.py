"""The mailbox of an event loop: its promises to threads that post, and to other callbacks on the loop."""

import asyncio
import threading

import pytest

from penstock import testing
from penstock.extension import LoopMailbox


async def test_calls_that_lead_to_more_calls_leave_the_loop_to_others() -> None:
    loop = asyncio.get_running_loop()
    mailbox = LoopMailbox(loop)
    order: list[str] = []
    over = asyncio.Event()

    def step(left: int) -> None:
        order.append("step")
        if left:
            mailbox.post(step, left - 1)  # as a thread that has its next result at once
        else:
            over.set()

    mailbox.post(step, 50)
    mailbox.post(loop.call_soon, order.append, "other")
    await over.wait()
    assert order.count("step") == 51
    assert order.index("other") <= 3


async def test_a_call_that_raises_does_not_take_the_others_along() -> None:
    loop = asyncio.get_running_loop()
    mailbox = LoopMailbox(loop)
    raised: list[object] = []
    loop.set_exception_handler(lambda _, context: raised.append(context.get("exception")))
    arrived = asyncio.Event()
    error = ValueError("of a callback")

    def fail() -> None:
        raise error

    mailbox.post(fail)
    mailbox.post(arrived.set)
    await arrived.wait()
    assert raised == [error]
    assert len(mailbox) == 0


async def test_a_callback_may_empty_it() -> None:
    mailbox = LoopMailbox(asyncio.get_running_loop())
    called: list[int] = []

    def empties(number: int) -> None:
        called.append(number)
        mailbox.empty()

    for number in range(3):
        mailbox.post(empties, number)
    await testing.wait_quiescent()
    assert called == [0, 1, 2]
    assert len(mailbox) == 0


async def test_a_burst_of_a_thread_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    mailbox = LoopMailbox(loop)
    wake_ups: list[int] = []
    arrived: list[int] = []
    original = LoopMailbox.empty

    def empty(self: LoopMailbox) -> None:
        wake_ups.append(len(self))
        original(self)

    monkeypatch.setattr(LoopMailbox, "empty", empty)
    over = asyncio.Event()

    def burst() -> None:
        for number in range(100):
            mailbox.post(arrived.append, number)
        mailbox.post(over.set)

    thread = threading.Thread(target=burst)
    thread.start()
    thread.join()  # the loop gets no turn before the thread ends
    await over.wait()
    await asyncio.sleep(0)
    assert arrived == [*range(100)]
    assert wake_ups == [101]
