"""A batch begins when it is due, whatever else waits, on any device."""

import asyncio
from typing import Any

import jax
import pytest

from penstock.actors.batching import Batch
from penstock.actors.threads import LoopMailbox
from penstock.devices import engine_device
from penstock.devices.engine_device import CallQueue, DeviceCall, EngineDevice, share
from penstock.devices.shardings import Placement
from penstock.testing import run_seeded


class NoThreads:
    """Stands for the pool of device threads: it starts no thread."""

    def acquire(self, placement: Placement) -> None:
        """Return no thread."""


class Queue(CallQueue):
    """A queue that notes when it starts a batch, and runs nothing."""

    def __init__(self, device: EngineDevice, batch: Batch | None, started: list[CallQueue]) -> None:
        super().__init__("node", device, batch, 8)
        self.started = started

    def start(self, calls: list[DeviceCall]) -> None:
        self.started.append(self)


def test_a_batch_begins_when_it_is_due_although_another_node_waits_for_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_device, "THREADS", NoThreads())
    started: list[CallQueue] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def device(**limits: Any) -> EngineDevice:
            return EngineDevice(Placement.of_device(jax.devices("cpu")[0]), LoopMailbox(loop), loop, **limits)

        def call(size_bytes: int = 0) -> DeviceCall:
            made = DeviceCall(None, (), size_bytes=size_bytes)  # type: ignore[arg-type]
            made.result = loop.create_future()
            return made

        full, other = device(window_bytes=1), device()
        one_full, one_other = Queue(full, None, started), Queue(other, None, started)
        single = Queue(other, Batch(2, max_wait_seconds=0.5), started)
        shared = [Queue(one, Batch(2, max_wait_seconds=0), started) for one in (full, other)]
        share(shared)
        one_full.submit(call(size_bytes=1))
        for _ in range(2):
            one_other.submit(call())
        shared[0].submit(call())  # not taken at once: the next device has no room for more bytes
        single.submit(call())
        await asyncio.sleep(2)
        assert single in started
        assert shared[1] in started  # this device has room

    run_seeded(main, seed=0)
