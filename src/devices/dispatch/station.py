"""Station: one device or mesh, as one Engine uses it."""

import asyncio
from typing import TYPE_CHECKING, Any

from ...actors.loop_mailbox import LoopMailbox
from ...telemetry import spans
from ..platform.placement import Placement
from ..programs.compile_cache import CACHE
from .device_queue import DeviceQueue
from .device_use import DeviceUse
from .dispatch_threads import THREADS
from .jobs import Route
from .parameters import PlacedParameters
from .single_line import SingleLine

if TYPE_CHECKING:
    from ..arguments import Arguments
    from ..device_programs import DevicePrograms
    from ..programs.compiling import Program


class Station:
    """One device or mesh, as one Engine uses it: a queue, and a lease on the device's thread.

    Attributes:
        placement: which it is.
        loop: where its results go.
        route: the way of jobs to it and back.
        queue: what waits for it.
        others: what waits there beside nodes: functions of `devices.actor`.
    """

    def __init__(self, placement: Placement, mailbox: LoopMailbox, loop: asyncio.AbstractEventLoop) -> None:
        self.placement = placement
        self.loop = loop
        self.route = Route(THREADS.acquire(placement), CACHE, mailbox, PlacedParameters())
        self.queue = DeviceQueue(placement.name, loop)
        self._uses: dict[tuple[DevicePrograms, Arguments, tuple[int, ...]], DeviceUse] = {}
        self.others = SingleLine(self, "devices.actor").lane

    def use(
        self,
        programs: "DevicePrograms",
        arguments: "Arguments",
        replicas: "tuple[Station, ...]",
        donated: tuple[int, ...] = (),
    ) -> DeviceUse:
        """Return a node on this device.

        Args:
            programs: of the node.
            arguments: how its calls become arguments.
            replicas: the devices that have a copy of the node; this is the first.
            donated: positions of the arguments whose memory the result may take.
        """
        key = programs, arguments, donated
        if key not in self._uses:
            self._uses[key] = DeviceUse(replicas, programs, arguments, donated)
        return self._uses[key]

    def compile(self, program: "Program", args: tuple[Any, ...]) -> "asyncio.Future[None]":
        """Have a program compiled for such arguments; the future tells when it is, or why it could not be.

        It is not compiled if the future was cancelled before its turn.
        """
        done: asyncio.Future[None] = self.loop.create_future()
        mailbox, wait = self.route.mailbox, spans.waiting()
        trace = None if wait is None else wait.context
        self.route.cache.compile(
            program, args, lambda found: mailbox.post(_tell, done, found), trace, lambda: not done.cancelled()
        )  # fmt: skip
        return done

    async def close(self) -> None:
        """Wait for what runs, and give the lease back."""
        await self.queue.close()
        ended = asyncio.Event()
        THREADS.release(self.placement, lambda: self.route.mailbox.post(ended.set))
        await ended.wait()


def _tell(done: "asyncio.Future[None]", found: object) -> None:
    if done.done():
        return
    if isinstance(found, BaseException):
        done.set_exception(found)
    else:
        done.set_result(None)
