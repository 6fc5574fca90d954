"""Instances: the stateful nodes of one scope, acquired when it starts and released when it ends."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

from ..actors.loop_host import LoopHost
from .node import Node
from .planning import Plan
from .pools import Pools
from .stateful import fresh_instance
from .uninterrupted import uninterrupted

Handler = Callable[..., Any]


class Instances:
    """One instance of each stateful node that a scope uses, shared by all of its call sites.

    Each group is entered and left by a task of its own, since `__aenter__` may open a task group or a cancel scope,
    which must be left by the task that entered it. A node that owns its loop has one more task, for the loop.

    Args:
        pools: threads for those that need them.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._handlers: dict[object, Handler] = {}
        self._loops: dict[object, LoopHost] = {}
        self._hosts: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    def handler(self, node: Node[..., Any]) -> Handler:
        """Return what handles an item of a stateful node in this scope."""
        return self._handlers[instance_key(node)]

    def loop_of(self, node: Node[..., Any]) -> LoopHost:
        """Return what runs the loop of a node that owns one, in this scope."""
        return self._loops[instance_key(node)]

    async def open(self, plan: Plan) -> None:
        """Make and enter the instances that a plan uses and that are not there yet.

        Raises:
            Exception: what an `__aenter__` raised; the instances entered with it are left again.
        """
        nodes = {instance_key(node): node for node in stateful_nodes(plan)}
        missing = [node for key, node in nodes.items() if key not in self._handlers and key not in self._loops]
        if not missing:
            return
        opened, closing = asyncio.Event(), asyncio.Event()
        host = asyncio.get_running_loop().create_task(self._host(missing, opened, closing), name="penstock-instances")
        self._hosts.append((host, closing))
        try:
            await opened.wait()
        except BaseException:
            self._hosts.remove((host, closing))
            if opened.is_set():
                closing.set()
            else:
                host.cancel()
            await uninterrupted(asyncio.wait([host]))
            raise
        if host.done():  # it did not get as far as waiting for the end
            self._hosts.remove((host, closing))
            host.result()

    async def close(self) -> None:
        """Leave all instances, the last first; every one is left, also when another raises.

        Raises:
            Exception: the first that an `__aexit__` raised.
        """
        errors: list[BaseException] = []
        while self._hosts:
            host, closing = self._hosts.pop()
            closing.set()
            await asyncio.wait([host])
            if not host.cancelled() and (error := host.exception()) is not None:
                errors.append(error)
        self._handlers.clear()
        self._loops.clear()
        if errors:
            raise errors[0]

    async def _host(self, nodes: list[Node[..., Any]], opened: asyncio.Event, closing: asyncio.Event) -> None:
        entering = nodes[0]
        try:
            async with AsyncExitStack() as stack:
                for entering in nodes:
                    await self._enter(entering, stack)
                opened.set()
                await closing.wait()
        except BaseException as error:
            if not opened.is_set():
                error.add_note(f"while stateful node {entering.name!r} was started")
            raise
        finally:
            if not opened.is_set():
                # The opener looks whether this task has ended; it is woken in the next turn, when it has.
                opened.set()

    async def _enter(self, node: Node[..., Any], stack: AsyncExitStack) -> None:
        make_loop = node.make_loop
        if make_loop is not None:
            policy = node.policy
            host = LoopHost(
                lambda: make_loop(node, self._pools),
                node.name,
                capacity=None if node.gives_stream else policy.capacity,  # there it is that of the stream
                max_bytes=policy.max_bytes,
            )
            self._loops[instance_key(node)] = await stack.enter_async_context(host)
            return
        instance, handler = fresh_instance(node.template)
        if hasattr(instance, "__aenter__"):
            await stack.enter_async_context(instance)
        self._handlers[instance_key(node)] = handler


def instance_key(node: Node[..., Any]) -> object:
    """Return what tells the instances of one scope apart; copies with another policy share theirs."""
    return id(node.origin) if node.template is None else id(node.template), node.binding


def stateful_nodes(plan: Plan) -> Iterator[Node[..., Any]]:
    """Yield the nodes of a plan, and of the bodies of its control flow, of which each scope has its own instance."""
    plans = [plan]
    while plans:
        current = plans.pop()
        for step in current.steps:
            plans.extend(step.bodies)
            for link in step.chain:
                callee = link.callee
                if not isinstance(callee, Node) or callee.origin.replacement is not None:
                    continue
                if callee.template is not None or callee.make_loop is not None:
                    yield callee
