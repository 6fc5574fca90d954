"""Station: one device or mesh, as one Engine uses it."""

import asyncio
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from ..actors.loop_mailbox import LoopMailbox
from .compile_cache import CACHE
from .device_call import DeviceCall
from .device_queue import DeviceQueue, Lane
from .dispatch_threads import THREADS
from .jobs import Job, Route, SingleJob
from .parameters import PlacedParameters
from .placement import Placement

if TYPE_CHECKING:
    pass

# Jobs of one node that the device's thread holds ahead: enough that a burst of tiny kernels does not wait for the loop
# between two of them, few enough that a node that comes later is served soon.
_AHEAD = 16


class Station:
    """One device or mesh, as one Engine uses it: a queue, and a lease on the device's thread.

    Attributes:
        placement: which it is.
        route: the way of jobs to it and back.
    """

    def __init__(self, placement: Placement, mailbox: LoopMailbox, loop: asyncio.AbstractEventLoop) -> None:
        self.placement = placement
        self.loop = loop
        self.route = Route(THREADS.acquire(placement), CACHE, mailbox, PlacedParameters(placement))
        self._queue = DeviceQueue(placement.name, loop)
        self._lanes: dict[Hashable, Lane] = {}

    def lane(self, key: Hashable, make: "Callable[[Station], Lane]") -> Lane:
        """Return the lane of a node; the first time, make it."""
        found = self._lanes.get(key)
        if found is None:
            found = self._lanes[key] = make(self)
        return found

    def single_lane(self, name: str, parameters: tuple[int, ...] = ()) -> Lane:
        """Return a lane whose calls run one by one.

        Args:
            name: of the node.
            parameters: positions of the arguments that are parameters.
        """

        def start(calls: list[DeviceCall]) -> None:
            for call in calls:
                SingleJob(self.route, call, over, parameters).submit()

        def over(job: Job) -> None:
            for call, result in zip(job.calls, job.results, strict=False):
                call.finish(result)
            if job.error is not None:
                job.calls[0].fail(job.error)
            self._queue.returned(lane)

        lane = Lane(name, start, None, _AHEAD)
        return lane

    def submit(self, lane: Lane, call: DeviceCall) -> None:
        """Have a call run; see `DeviceQueue.submit`."""
        self._queue.submit(lane, call)

    def withdraw(self, lane: Lane, call: DeviceCall) -> None:
        """Nobody waits for a call any more: free its place at once, unless it runs."""
        self._queue.withdraw(lane, call)

    async def run(self, lane: Lane, call: DeviceCall) -> Any:
        """Run a call; returns its result."""
        self.submit(lane, call)
        try:
            return await call.result
        finally:
            self.withdraw(lane, call)

    async def close(self) -> None:
        """Wait for what runs, and give the lease back."""
        await self._queue.close()
        ended = asyncio.Event()
        THREADS.release(self.placement, lambda: self.route.mailbox.post(ended.set))
        await ended.wait()
