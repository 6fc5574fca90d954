"""Interception: tests have functions called before steps of the engine; unused, an interception costs nothing."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

from ..actors import current, loop_host, processes
from ..actors.chains import Link
from ..actors.channel import Channel
from ..actors.execution import Attempt, Bound
from ..actors.frame import Frame, foreign_cancel
from ..actors.node_actor import NodeActor
from ..actors.own_loops import Mailbox
from ..actors.tasks import close_stream
from . import wiring
from .graph import outdate_traces
from .node import Node

Before = Callable[[str], Awaitable[None]]
Hold = Callable[[], Awaitable[BaseException | None]]


class Interception(NamedTuple):
    """Functions that the engine calls before its steps. Each takes a node's name in the plan: "fetch", "fetch#2".

    Attributes:
        entering: awaited before a stateful node is entered; may raise.
        calling: awaited before each attempt of a node, and may raise; for a plain `def`, see `calling_plain`.
        calling_plain: called before each call of a plain `def`, in the thread or on the loop; may raise.
        queueing: called for an item that finds no free place in a node with a bounded inbox. It returns None, or a
            function that is awaited before the item enters the inbox. The function returns the error of the item, or
            None.
        giving: awaited before a call is sent to a worker process; returns whether to kill that process.
    """

    entering: Before | None = None
    calling: Before | None = None
    calling_plain: Callable[[str], None] | None = None
    queueing: Callable[[str], Hold | None] | None = None
    giving: Callable[[str], Awaitable[bool]] | None = None


_present = Interception()


def intercept(interception: Interception) -> None:
    """Use an interception from now on, in place of the interception before; `Interception()` ends it.

    Graphs are traced and wired again. Streams and deployments that run already keep the interception of their
    beginning, except for `giving`.

    Args:
        interception: the functions; None in a field means that no function is called.
    """
    global _present  # noqa: PLW0603 - the process has one interception, like the module attributes set below
    _present = interception
    loop_host.fault_at_start = interception.entering
    is_calling = interception.calling is not None
    wiring.fault_at_wiring = _wired if is_calling else None
    wiring.bound_at_wiring = _bound if is_calling else None
    is_queueing = interception.queueing is not None
    wiring.actor_class = _HoldsUp if is_queueing else NodeActor
    wiring.inbox_class = _OneByOne if is_queueing else Channel
    processes.fault_at_call = None if interception.giving is None else _given_to_process
    outdate_traces()


async def _before(node: str) -> None:
    if _present.calling is not None:
        await _present.calling(node)


class _Intercepted(Bound):
    """Awaits `calling` before each attempt; attempts then always begin in a worker."""

    __slots__ = ("_inner", "_name", "begins_later")

    def __init__(self, inner: Bound, name: str) -> None:
        super().__init__(inner._instance)
        self._inner = inner
        self._name = name
        self.begins_later = inner.begins_later

    @property
    def _inbox(self) -> Mailbox[Any] | None:
        return self._inner._inbox

    async def run(self, attempt: Attempt) -> Any:
        await _before(self._name)
        return await self._inner.run(attempt)


def _bound(bound: Bound, node: Node[..., Any], name: str) -> Bound:
    """Wrap the execution of a node that runs outside of the loop."""
    return _Intercepted(bound, name) if wiring.runs_elsewhere(node) and not node.gives_stream else bound


def _wired(actor: NodeActor, node: Node[..., Any]) -> None:
    """Wrap the handler of an actor."""
    if wiring.runs_elsewhere(node) and node.gives_stream:
        actor.invoke = _awaited(actor.invoke, actor.name)
    elif wiring.runs_elsewhere(node):
        return
    elif node.gives_stream:
        actor.fn = _iterated(actor.fn, actor.name)
    elif node.is_async:
        actor.fn = _awaited(actor.fn, actor.name)
    else:
        bound = actor.bound
        bound._links = tuple(Link(link.name, _called(link.fn, link.name)) for link in bound._links)
        actor.fn = bound._links[0].fn


def _awaited(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(fn, updated=())
    async def call(*args: Any, **kwargs: Any) -> Any:
        await _before(name)
        return await fn(*args, **kwargs)

    return call


def _iterated(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        await _before(name)
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
        if _present.calling_plain is not None:
            _present.calling_plain(name)
        return fn(*args, **kwargs)

    return call


class _OneByOne(Channel[Frame]):
    """An inbox that has no `room` for many items at once, so that each item comes through `offer`."""

    __slots__ = ()

    @property
    def room(self) -> int:
        return 0


class _HoldsUp(NodeActor):
    """An actor that holds some frames up before they enter its inbox."""

    __slots__ = ("_held_up",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # For each frame that is held up, the function to await first; None once the function was called.
        self._held_up: dict[Frame, Hold | None] = {}

    def offer(self, frame: Frame) -> bool:
        # Only for bounded inboxes: a producer never waits for an inbox without a bound, and cannot handle such a wait.
        if frame not in self._held_up and self.inbox.capacity is not None and _present.queueing is not None:
            hold = _present.queueing(self.name)
            if hold is not None:
                self._held_up[frame] = hold
                return False  # as if the inbox were full: the producer then waits in `queue`
        return super().offer(frame)

    async def queue(self, frame: Frame, *, is_full: bool = False) -> None:
        hold = self._held_up.get(frame)
        try:
            if hold is not None and frame.state == "running":
                self._held_up[frame] = None
                error = await hold()
                if error is not None:
                    frame.fail(foreign_cancel(error) if isinstance(error, asyncio.CancelledError) else error, self)
                    return
            await super().queue(frame, is_full=is_full and hold is None)
        finally:
            self._held_up.pop(frame, None)


async def _given_to_process(target: str) -> bool:
    caller = current.source.get()
    actor = None if caller is None else caller.actor
    giving = _present.giving
    return giving is not None and await giving(target if actor is None else actor.name)
