"""The points at which faults are injected: the slots of the engine, which are filled only while there is a fault."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..actors import current, loop_host, processes
from ..actors.channel import Channel
from ..actors.frame import Frame, foreign_cancel
from ..actors.invocation import Link
from ..actors.node_actor import NodeActor
from ..actors.stream_buffer import close_stream
from ..engine import wiring
from ..engine.graph import outdate_traces
from ..engine.node import Node

if TYPE_CHECKING:
    from .faults import Injections

Point: TypeAlias = Literal["actor.start", "node.call", "channel.put", "worker.process"]


class InjectedCancel(asyncio.CancelledError):
    """An injected cancellation; the item itself was not cancelled."""


_active: dict[Point, list["Injections"]] = {"actor.start": [], "node.call": [], "channel.put": [], "worker.process": []}


def install(point: Point, injections: "Injections") -> None:
    """Inject a fault at a point from now on."""
    _active[point].append(injections)
    _fill_slots()


def remove(point: Point, injections: "Injections") -> None:
    """End the injection of a fault at a point."""
    _active[point].remove(injections)
    _fill_slots()


def _fill_slots() -> None:
    """Fill the slots of the points that have faults, and empty the others."""
    loop_host.fault_at_start = _starts if _active["actor.start"] else None
    wiring.fault_at_wiring = _wired if _active["node.call"] else None
    has_puts = bool(_active["channel.put"])
    wiring.actor_class = _HoldsUp if has_puts else NodeActor
    wiring.inbox_class = _OneByOne if has_puts else Channel
    processes.fault_at_call = _given_to_process if _active["worker.process"] else None
    outdate_traces()


async def _pass(point: Point, node: str) -> None:
    for injections in tuple(_active[point]):
        fault: Any = injections._take(node)
        if fault is not None:
            await fault._act()


def _pass_blocking(point: Point, node: str) -> None:
    for injections in tuple(_active[point]):
        fault: Any = injections._take(node)
        if fault is not None:
            fault._act_blocking()


async def _starts(node: str) -> None:
    await _pass("actor.start", node)


def _wired(actor: NodeActor, node: Node[..., Any]) -> None:
    """Wrap the handler of an actor, so that each call passes the point before it."""
    if node._runs_loop and node.gives_stream:
        actor.invoke = _awaited(actor.invoke, actor.name)
    elif node._runs_loop:
        actor.body = _awaited(actor.body, actor.name)
        actor.carrier = None
    elif node.gives_stream:
        actor.fn = _iterated(actor.fn, actor.name)
    elif node.is_async:
        actor.fn = _awaited(actor.fn, actor.name)
    elif node._runs_in is not None or (node.policy.runs_on == "process" and node.origin._replacement is None):
        actor.body = _awaited(actor.body, actor.name)  # the function itself runs elsewhere
        actor.carrier = None
    else:
        actor.links = tuple(Link(link.name, _called(link.fn, link.name)) for link in actor.links)
        actor.fn = actor.links[0].fn


def _awaited(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(fn, updated=())
    async def call(*args: Any, **kwargs: Any) -> Any:
        await _pass("node.call", name)
        return await fn(*args, **kwargs)

    return call


def _iterated(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        await _pass("node.call", name)
        stream = fn(*args, **kwargs)
        try:
            async for value in stream:
                yield value
        finally:
            await close_stream(stream)

    return call


def _called(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        _pass_blocking("node.call", name)
        return fn(*args, **kwargs)

    return call


class _OneByOne(Channel[Frame]):
    """An inbox that has no `room` for many items at once, so that each item comes through `offer`."""

    __slots__ = ()

    @property
    def room(self) -> int:
        return 0


class _HoldsUp(NodeActor):
    """An actor that holds some frames up with a fault before they enter its inbox."""

    __slots__ = ("_held_up",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # For each frame that is held up: its fault; None once the fault has happened.
        self._held_up: dict[Frame, Any] = {}

    def offer(self, frame: Frame) -> bool:
        # Only for bounded inboxes: a producer never waits for one without a bound, and does not handle that.
        if frame not in self._held_up and self.inbox.capacity is not None:
            for injections in tuple(_active["channel.put"]):
                fault = injections._take(self.name)
                if fault is not None:
                    self._held_up[frame] = fault
                    return False  # as if the inbox were full: the producer then waits in `queue`
        return super().offer(frame)

    async def queue(self, frame: Frame, *, is_full: bool = False) -> None:
        fault = self._held_up.get(frame)
        try:
            if fault is not None and frame.state == "running":
                self._held_up[frame] = None
                try:
                    await fault._act()
                except InjectedCancel as error:
                    frame.fail(foreign_cancel(error), self)
                    return
                except Exception as error:  # noqa: BLE001 - the injected error, which is the outcome of the item
                    frame.fail(error, self)
                    return
            await super().queue(frame, is_full=is_full and fault is None)
        finally:
            self._held_up.pop(frame, None)


async def _given_to_process(target: str) -> bool:
    """Pass the point with a call; return whether the worker process of the call has to be killed."""
    caller = current.source.get()
    actor = None if caller is None else caller.actor
    kills = False
    for injections in tuple(_active["worker.process"]):
        fault: Any = injections._take(target if actor is None else actor.name)
        if hasattr(fault, "_act"):
            await fault._act()
        elif fault is not None:
            kills = True
    return kills
