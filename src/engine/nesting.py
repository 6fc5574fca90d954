"""Calls inside of handlers: what they take over from around them, and what must not wait for itself."""

import asyncio
from collections.abc import Iterable
from contextvars import Context, ContextVar, copy_context
from typing import cast

from .._errors import ReentrantCallError
from ..actors import current
from ..actors.current import enclosing_frame
from ..actors.frame import AnyDeployment, Frame, Listener
from .pools import Pools

# For the task of an instance or a loop, which is no handler: what its Engine owns, and the handler around its scope.
_host: ContextVar[tuple[Pools, object] | None] = ContextVar("penstock_host_pools", default=None)


def host(pools: Pools) -> None:
    """Note in the running task, which keeps an instance or runs a loop, what its Engine owns."""
    _host.set((pools, current.source.get()))


def pools_around() -> Pools | None:
    """Return what the Engine owns whose node, instance or loop is calling; None outside of one.

    A task or thread that outlives the handler that has started it may get None, too.
    """
    handling, hosted = current.source.get(), _host.get()
    if hosted is not None and hosted[1] is handling:
        return hosted[0]
    actor = None if handling is None else handling.actor
    return None if actor is None else cast("Pools | None", actor.owner)


# The deployments that the task is part of: one that hosts a stateful node or runs a loop, or one started by such a
# task. Handlers need no mark, since their frames lead to the deployment.
hosts: ContextVar[tuple[AnyDeployment, ...]] = ContextVar("penstock_hosts", default=())


def host_context(deployment: AnyDeployment) -> Context:
    """Return the context in which the tasks of a deployment are started, so that they know what they are part of."""
    context = copy_context()
    context.run(hosts.set, (*hosts.get(), deployment))
    return context


def refuse_from_inside(deployment: AnyDeployment) -> None:
    """Refuse what waits for a deployment, if that waits for the caller.

    Raises:
        ReentrantCallError: the caller is one of its own handlers, or a task of one of its stateful nodes.
    """
    around_task, frame = hosts.get(), enclosing_frame()
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
    """Refuse to close a stream, if that waits for the caller.

    Args:
        listener: what listens to the frames of the stream.

    Raises:
        ReentrantCallError: the caller is a handler of one of them, or of a frame inside of it.
    """
    caller = enclosing_frame()
    if caller is not None and any(listener_of(frame) is listener for frame in caller.lineage()):
        raise ReentrantCallError(
            "a stream was closed from inside one of its own nodes, which would wait for itself for ever; let its "
            "reader close it"
        )


def _chain(around: list[AnyDeployment]) -> str:
    """Return the names of deployments from the outside in, given from the inside out."""
    return " → ".join(one.names for one in reversed(around))


# Departures: waiting until certain frames have ended and nothing runs for them any more.
#
# Nobody keeps count of that for every frame: only when somebody has to know, the frames that are in flight get a
# listener between themselves and theirs. So a frame costs nothing for it.


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
