"""Where faults are injected: the functions of the engine that stand there, replaced as long as there is a fault."""

import asyncio
import functools
import os
import signal
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..actors import current
from ..actors.channel import Channel
from ..actors.frame import Frame, foreign_cancel
from ..actors.invocation import Link
from ..actors.loop_host import LoopHost
from ..actors.node_actor import NodeActor
from ..actors.processes import ProcessPool
from ..actors.stream_buffer import close_stream
from ..engine import instances
from ..engine.graph import outdate_traces
from ..engine.stateful import node_of
from ..engine.wiring import Wiring

if TYPE_CHECKING:
    from .faults import Injections

Point: TypeAlias = Literal["actor.start", "node.call", "channel.put", "worker.process"]


class InjectedCancel(asyncio.CancelledError):
    """An injected cancel: the item itself was not cancelled."""


# Makes what stands in place of a function, out of the function.
Replace: TypeAlias = Callable[[Any], Any]

_active: dict[Point, list["Injections"]] = {"actor.start": [], "node.call": [], "channel.put": [], "worker.process": []}
_originals: dict[Point, list[tuple[Any, str, Any]]] = {}
# The fault that a frame meets before it enters an inbox; None: it has.
_held_up: dict[tuple[NodeActor, Frame], Any] = {}


def install(point: Point, injections: "Injections") -> None:
    """Have a fault happen at a point from now on."""
    if not _active[point]:
        _originals[point] = [(owner, name, vars(owner)[name]) for owner, name, _ in _REPLACED[point]]
        for owner, name, replace in _REPLACED[point]:
            setattr(owner, name, replace(vars(owner)[name]))
    _active[point].append(injections)
    outdate_traces()


def remove(point: Point, injections: "Injections") -> None:
    """Have it happen no more; after the last one, every function is what it was."""
    _active[point].remove(injections)
    if not _active[point]:
        for owner, name, original in _originals.pop(point):
            setattr(owner, name, original)
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


def _fresh_instance(original: Any) -> Any:
    def fresh_instance(template: Any) -> tuple[Any, Callable[..., Any]]:
        instance, handler = original(template)
        return _Starting(instance, node_of(template).name), handler

    return fresh_instance


class _Starting:
    """An instance of a stateful node that meets the faults before it is entered."""

    def __init__(self, instance: Any, name: str) -> None:
        self._instance = instance
        self._name = name

    async def __aenter__(self) -> None:
        await _pass("actor.start", self._name)
        if hasattr(self._instance, "__aenter__"):
            await self._instance.__aenter__()

    async def __aexit__(self, *exc_info: object) -> Any:
        if hasattr(self._instance, "__aexit__"):
            return await self._instance.__aexit__(*exc_info)
        return None


def _start(original: Any) -> Any:
    async def start(self: LoopHost) -> None:
        await _pass("actor.start", self.name)
        await original(self)

    return start


def _node_actor(original: Any) -> Any:
    def node_actor(self: Wiring, program: Any, unit: Any, step: Any, node: Any) -> NodeActor:
        actor: NodeActor = original(self, program, unit, step, node)
        if node.runs_loop and node.gives_stream:
            actor.invoke = _awaited(actor.invoke, actor.name)
        elif node.runs_loop:
            actor.body = _awaited(actor.body, actor.name)
        elif node.gives_stream:
            actor.fn = _iterated(actor.fn, actor.name)
        elif node.is_async:
            actor.fn = _awaited(actor.fn, actor.name)
        elif node.runs_in is not None or (node.policy.runs_on == "process" and node.origin.replacement is None):
            actor.body = _awaited(actor.body, actor.name)  # the function itself runs elsewhere
            actor.carrier = None
        else:
            actor.links = tuple(Link(link.name, _called(link.fn, link.name)) for link in actor.links)
            actor.fn = actor.links[0].fn
        return actor

    return node_actor


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


def _offer(original: Any) -> Any:
    def offer(self: NodeActor, frame: Frame) -> bool:
        # No producer waits before an inbox without a bound, so none is prepared to be held up there.
        if (self, frame) not in _held_up and self.inbox.statistics().capacity is not None:
            for injections in tuple(_active["channel.put"]):
                fault = injections._take(self.name)
                if fault is not None:
                    _held_up[self, frame] = fault
                    return False  # as if the inbox were full: then the one who brings it waits in `queue`
        entered: bool = original(self, frame)
        return entered

    return offer


def _queue(original: Any) -> Any:
    async def queue(self: NodeActor, frame: Frame, *, is_full: bool = False) -> None:
        fault = _held_up.get((self, frame))
        try:
            if fault is not None and frame.state == "running":
                _held_up[self, frame] = None
                try:
                    await fault._act()
                except InjectedCancel as error:
                    frame.fail(foreign_cancel(error), self)
                    return
                except Exception as error:  # noqa: BLE001 - the fault: an inbox can raise it only to the item
                    frame.fail(error, self)
                    return
            await original(self, frame, is_full=is_full and fault is None)
        finally:
            _held_up.pop((self, frame), None)

    return queue


def _run(original: Any) -> Any:
    async def run(self: ProcessPool, target: str, *call: Any) -> Any:
        caller = current.source.get()
        actor = None if caller is None else caller.actor
        for injections in tuple(_active["worker.process"]):
            fault: Any = injections._take(target if actor is None else actor.name)
            if hasattr(fault, "_act"):
                await fault._act()
            elif fault is not None:
                target = _Doomed(target)
        return await original(self, target, *call)

    return run


class _Doomed(str):
    """The target of a call whose process is killed before it has read what it is asked for."""

    __slots__ = ()


def _assign(original: Any) -> Any:
    def assign(self: ProcessPool, call: Any) -> Any:
        worker = original(self, call)
        if isinstance(call.target, _Doomed):
            os.kill(worker._process.pid, signal.SIGKILL)
        return worker

    return assign


_REPLACED: dict[Point, tuple[tuple[Any, str, Replace], ...]] = {
    "actor.start": ((instances, "fresh_instance", _fresh_instance), (LoopHost, "start", _start)),
    "node.call": ((Wiring, "_node_actor", _node_actor),),
    "channel.put": (
        (NodeActor, "offer", _offer),
        (NodeActor, "queue", _queue),
        (Channel, "room", lambda original: 0),  # items enter one by one, by `offer`
    ),
    "worker.process": ((ProcessPool, "run", _run), (ProcessPool, "_assign", _assign)),
}
