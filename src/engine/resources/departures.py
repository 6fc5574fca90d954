"""Departures: waiting until certain frames have ended and nothing runs for them any more.

Nobody keeps count of that for every frame: only when somebody has to know, the frames that are in flight get a
listener between themselves and theirs. So a frame costs nothing for it.
"""

import asyncio
from collections.abc import Iterable

from ...actors.frame import AnyDeployment, Frame, Listener


async def departed(frames: Iterable[Frame]) -> None:
    """Wait until nothing runs for any of these frames; from the first step on, none that ends is missed."""
    departures = [_Departure(frame) for frame in frames if not frame.settled]
    for departure in departures:
        await departure.gone.wait()


def listener_of(frame: Frame) -> Listener:
    """Return the listener that the frame was made with."""
    listener = frame.listener
    while isinstance(listener, _Departure):
        listener = listener.listener
    return listener


class _Departure:
    """Passes on what happens to a frame, and notes when it has settled."""

    def __init__(self, frame: Frame) -> None:
        self.gone = asyncio.Event()
        self.listener = frame.listener
        frame.listener = self

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment that the frame belongs to."""
        return self.listener.service

    def frame_done(self, frame: Frame) -> None:
        """The outcome is known."""
        self.listener.frame_done(frame)
        if frame.settled:
            self.gone.set()

    def frame_settled(self, frame: Frame) -> None:
        """The last handler has unwound."""
        self.listener.frame_settled(frame)
        self.gone.set()
