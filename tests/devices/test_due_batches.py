"""A batch begins when it is due, whatever else waits, and for which device."""

import asyncio

from penstock.actors.batching import Batch
from penstock.devices.device_queue import DeviceCall, DeviceQueue, Lane, share
from penstock.testing import run_seeded


def test_a_batch_begins_when_it_is_due_although_another_node_waits_for_another_device() -> None:
    started: list[Lane] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def call(size_bytes: int = 0) -> DeviceCall:
            made = DeviceCall(loop, None, (), size_bytes=size_bytes)  # type: ignore[arg-type]
            made.result = loop.create_future()
            return made

        full, other = DeviceQueue("full", loop, window_bytes=1), DeviceQueue("other", loop)

        def lane(queue: DeviceQueue, batch: Batch | None) -> Lane:
            made = Lane("node", queue, lambda _: started.append(made), batch, 8)
            return made

        one_full, one_other, single = lane(full, None), lane(other, None), lane(other, Batch(2, max_wait_seconds=0.5))
        shared = [lane(queue, Batch(2, max_wait_seconds=0)) for queue in (full, other)]
        share(shared)
        full.submit(one_full, call(size_bytes=1))
        for _ in range(2):
            other.submit(one_other, call())
        full.submit(shared[0], call())  # nobody takes it: one device is the next, and has no room for more bytes
        other.submit(single, call())
        await asyncio.sleep(2)
        assert single in started
        assert shared[1] in started  # a device that has room

    run_seeded(main, seed=0)
