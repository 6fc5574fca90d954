"""Calls that handlers make: how a call finds the Engine around it, and how a call that waits for itself is refused."""

import asyncio
from collections.abc import Iterable
from contextvars import Context, ContextVar, copy_context
from typing import cast

from .._errors import ReentrantCallError
from ..actors import current
from ..actors.current import enclosing_frame
from ..actors.frame import AnyDeployment, Frame, Listener, Place
from .pools import Pools

# For the task of an instance or a loop, which is not a handler: the pools of its Engine, and the handler that opened
# the scope, if a handler did.
_owner_engine: ContextVar[tuple[Pools, object] | None] = ContextVar("penstock_owner_engine", default=None)


def note_owner_engine(pools: Pools) -> None:
    """Note the pools of the Engine in the running task, which keeps an instance or runs a loop."""
    _owner_engine.set((pools, current.source.get()))


def pools_around() -> Pools | None:
    """Return the pools of the Engine whose node, instance or loop makes this call; None outside of an Engine.

    A task or thread that outlives the handler that has started it may also get None.
    """
    handling, owner = current.source.get(), _owner_engine.get()
    if owner is not None and owner[1] is handling:
        return owner[0]
    actor = None if handling is None else handling.actor
    return None if actor is None or actor.owner is None else cast("Pools", actor.owner._pools)


def is_in_owner() -> bool:
    """Whether the caller is not a handler, but the task of an instance or a loop, or a task started by that task."""
    owner = _owner_engine.get()
    return owner is not None and owner[1] is current.source.get()


# The deployments that the running task belongs to, from the outside in. Only tasks of stateful nodes and loops, and
# tasks that these start, need this mark: the frame of a handler leads to the deployment.
owner_deployments: ContextVar[tuple[AnyDeployment, ...]] = ContextVar("penstock_owner_deployments", default=())


def context_owned_by(deployment: AnyDeployment) -> Context:
    """Return a context in which all tasks are marked as part of a deployment; see `owner_deployments`."""
    context = copy_context()
    context.run(owner_deployments.set, (*owner_deployments.get(), deployment))
    return context


def refuse_from_inside(deployment: AnyDeployment) -> None:
    """Refuse to wait for a deployment that itself waits for the caller.

    Raises:
        ReentrantCallError: the caller is a handler of the deployment, or a task of one of its stateful nodes.
    """
    around_task, frame = owner_deployments.get(), enclosing_frame()
    if frame is not None:
        services = (outer.listener.service for outer in frame.lineage())
        around = [deployment, *(service for service in services if service is not None)]
        if deployment in around[1:]:
            raise ReentrantCallError(
                f"{_chain(around[: around.index(deployment, 1) + 1])}: a deployment was called, drained or aborted "
                "from inside one of its own nodes, which would wait for itself for ever; call the graph inside the "
                "graph instead, where it is inlined, or use engine.run"
            )
    if deployment in around_task:
        around = [deployment, *reversed(around_task[around_task.index(deployment) :])]
        raise ReentrantCallError(
            f"{_chain(around)}: a deployment was called, drained or aborted by the loop of one of its own actors, or "
            "by a task that one of its own stateful nodes has started; it waits for them when it ends, so they would "
            "wait for each other for ever; to get a result, use engine.run; to end the deployment, raise an error "
            "here, or have the code that holds `async with engine.deploy(...)` leave it"
        )


def refuse_to_close_from_inside(listener: object) -> None:
    """Refuse to close a stream whose end would wait for the caller.

    Args:
        listener: the listener of the frames of the stream.

    Raises:
        ReentrantCallError: the caller is a handler of such a frame, or of a frame inside of one.
    """
    caller = enclosing_frame()
    if caller is not None and any(listener_of(frame) is listener for frame in caller.lineage()):
        raise ReentrantCallError(
            "a stream was drained or closed from inside one of its own nodes, which would wait for itself for ever; "
            "let its reader do it"
        )


def _chain(around: list[AnyDeployment]) -> str:
    """Join the names of deployments, outermost first; `around` begins with the innermost."""
    return " → ".join(one.names for one in reversed(around))


# Departures: waiting until certain frames have ended and their last handlers have returned.
#
# Frames keep no count of handlers for this purpose, which would cost time. Instead, when a caller waits, each frame in
# flight gets a `_Departure` in front of its own listener.


async def departed(frames: Iterable[Frame]) -> None:
    """Wait until all these frames have ended and their last handlers have returned."""
    departures = [_Departure(frame) for frame in frames if not frame.settled]
    for departure in departures:
        await departure.gone.wait()


def listener_of(frame: Frame) -> Listener:
    """Return the listener that the frame was made with."""
    listener = frame.listener
    while isinstance(listener, _Departure):
        listener = listener.listener
    return listener


class _Departure(Listener):
    """A listener that notes when a frame has settled, and passes all events on to the listener that it replaces."""

    def __init__(self, frame: Frame) -> None:
        self.gone = asyncio.Event()
        self.listener = frame.listener
        frame.listener = self

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment that the frame belongs to."""
        return self.listener.service

    def place_of(self, frame: Frame, around: Place) -> Place | None:
        """Return the place that the listener knows."""
        return self.listener.place_of(frame, around)

    def frame_done(self, frame: Frame) -> None:
        """Pass the end of the frame on, and note the departure if no handler is unwinding."""
        self.listener.frame_done(frame)
        if frame.settled:
            self.gone.set()

    def frame_settled(self, frame: Frame) -> None:
        """Pass the end of the last handler on, and note the departure."""
        self.listener.frame_settled(frame)
        self.gone.set()
