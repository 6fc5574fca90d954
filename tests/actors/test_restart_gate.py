"""Who may pass a gate, and in which order."""

import asyncio
from typing import Any

import pytest

from penstock import ActorStopped
from penstock.actors.loop_host import RestartGate
from penstock.testing import wait_quiescent


class FakeWorker:
    """What a gate knows of a worker."""

    outside_call = None
    cancels = 0

    def __init__(self) -> None:
        self.task = asyncio.current_task()


def make_gate() -> RestartGate:
    return RestartGate("node", (), lambda error: None)


async def passing(gate: RestartGate, name: str, journal: list[str]) -> None:
    worker: Any = FakeWorker()
    async with gate.admit(worker):
        journal.append(name)


async def test_those_who_wait_go_in_one_after_the_other_before_all_who_come_later() -> None:
    gate, journal = make_gate(), list[str]()
    waiting = [asyncio.create_task(passing(gate, name, journal)) for name in "abc"]
    await wait_quiescent()
    assert journal == []
    gate.open()
    await passing(gate, "d", journal)  # it is here before those who wait have had their turn
    assert journal == ["a", "b", "c", "d"]
    await asyncio.gather(*waiting)


async def test_a_gate_that_is_closed_again_keeps_the_order() -> None:
    gate, journal = make_gate(), list[str]()
    waiting = [asyncio.create_task(passing(gate, name, journal)) for name in "abc"]
    await wait_quiescent()
    gate.open()
    gate.hold()  # before "a" has had its turn
    await wait_quiescent()
    assert journal == []
    gate.open()
    await asyncio.gather(*waiting)
    assert journal == ["a", "b", "c"]


@pytest.mark.parametrize("when", ["waiting", "at its turn"])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_one_who_leaves_the_line_keeps_nobody_back(number: int, when: str) -> None:
    gate, journal = make_gate(), list[str]()
    waiting = [asyncio.create_task(passing(gate, name, journal)) for name in "abc"]
    await wait_quiescent()
    if when == "waiting":
        waiting[number].cancel()
    gate.open()
    if when == "at its turn":
        waiting[number].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert journal == [name for name in "abc" if name != "abc"[number]]


async def test_a_gate_closed_for_good_tells_everybody_and_may_be_opened_again() -> None:
    gate, journal = make_gate(), list[str]()
    waiting = [asyncio.create_task(passing(gate, name, journal)) for name in "ab"]
    await wait_quiescent()
    cause = ValueError("broken")
    gate.stop(cause)
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, ActorStopped)
        assert outcome.__cause__ is cause
    with pytest.raises(ActorStopped):
        await passing(gate, "c", journal)
    gate.open()
    await passing(gate, "d", journal)
    assert journal == ["d"]
