"""Interception: tests have functions called before steps of the engine; unused, an interception costs nothing."""

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

from ..actors import loop_host
from ..actors.chains import Link
from ..actors.execution import Attempt, Bound
from ..actors.node_actor import NodeActor
from ..actors.own_loops import Mailbox
from ..actors.tasks import close_stream
from . import node as nodes
from . import wiring
from .graph import outdate_traces
from .node import Node

Before = Callable[[str], Awaitable[None]]


class Interception(NamedTuple):
    """Functions that the engine calls before its steps. Each takes a node's name in the plan: "fetch", "fetch#2".

    Attributes:
        entering: awaited before a stateful node is entered; may raise.
        calling: awaited before each attempt of a node, and may raise; for a plain `def`, see `calling_plain`.
        calling_plain: called before each call of a plain `def`, in the thread or on the loop; may raise.
        giving: awaited before a call leaves this process; returns whether the process that gets it has to die.
    """

    entering: Before | None = None
    calling: Before | None = None
    calling_plain: Callable[[str], None] | None = None
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
    wiring.fault_at_wiring = None if interception.calling is None else _wired
    nodes.fault_at_giving = interception.giving
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
        self._links, self._emits, self._spans_others = inner._links, inner._emits, inner._spans_others

    @property
    def _inbox(self) -> Mailbox[Any] | None:
        return self._inner._inbox

    async def run(self, attempt: Attempt) -> Any:
        await _before(self._name)
        return await self._inner.run(attempt)


def _wired(actor: NodeActor, node: Node[..., Any]) -> None:
    """Have `calling` or `calling_plain` called before each attempt of an actor."""
    is_here = node.runs_on._is_here
    if not is_here and node.gives_stream:
        actor.invoke = _awaited(actor.invoke, actor.name)
    elif not is_here:
        actor.bound, actor.begin = _Intercepted(actor.bound, actor.name), None
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
