"""Prefetch: the arguments of the next item go to the device while the present one computes."""

import asyncio
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import engine, telemetry
from penstock.devices import dispatch

from .compiled import each_call
from .kit import doubling, row


class InFlight:
    """Keeps computations in flight until a test ends them; notes the transfers in the meantime.

    A gate inside a program would not do: a CPU runs a program with a Python callback while it dispatches it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transferred: asyncio.Queue[float] = asyncio.Queue()
        self.finish = threading.Event()
        self.loop = asyncio.get_running_loop()
        wait = dispatch.wait_until_ready

        def compute(arrays: Any) -> None:
            assert self.finish.wait(30)
            wait(arrays)

        monkeypatch.setattr(dispatch, "wait_until_ready", compute)
        monkeypatch.setattr(dispatch, "are_ready", lambda arrays: False)  # pyright: ignore[reportUnknownLambdaType]

    def note(self, args: Any) -> None:
        """Notes that the device has the arguments; called when the call of a program has returned."""
        self.loop.call_soon_threadsafe(self.transferred.put_nowait, float(np.ravel(args[0])[0]))


@pytest.mark.parametrize("batch", [None, ps.Batch(1)])
async def test_the_next_item_is_transferred_while_the_present_one_computes(
    monkeypatch: pytest.MonkeyPatch, batch: ps.Batch | None
) -> None:
    in_flight = InFlight(monkeypatch)
    finished: list[int] = []

    of = doubling(pure=False, batch=batch, prefetch=2)
    with telemetry.profile() as profile, each_call(then=in_flight.note):
        async with engine.deploy(of) as service:

            async def item(number: int) -> None:
                assert float((await service(row(number)))[0]) == 2 * number
                finished.append(number)

            items = [asyncio.ensure_future(item(number)) for number in range(1, 9)]
            try:
                async with asyncio.timeout(20):
                    assert [await in_flight.transferred.get() for _ in range(2)] == [1, 2]
                assert not finished
            finally:
                in_flight.finish.set()
            await asyncio.gather(*items)
    assert finished == [*range(1, 9)]
    computed = [one for one in profile.timeline.device_slices if one.kind == "compute"]
    assert len(computed) == 8
    # A computation that waits behind another one has not begun.
    assert all(after.began_seconds >= before.ended_seconds for before, after in pairwise(computed))
