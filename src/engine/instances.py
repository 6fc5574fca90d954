"""Instances: the stateful nodes of one scope, acquired when it starts and released when it ends."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

from .node import Node
from .planning import Plan
from .stateful import fresh_instance
from .uninterrupted import uninterrupted

Handler = Callable[..., Any]


class Instances:
    """One instance of each stateful node that a scope uses, shared by all of its call sites.

    Each group is entered and left by a task of its own, since `__aenter__` may open a task group or a cancel scope,
    which must be left by the task that entered it.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._hosts: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    def handler(self, node: Node[..., Any]) -> Handler:
        """Return what handles an item of a stateful node in this scope."""
        return self._handlers[id(node.template)]

    async def open(self, plan: Plan) -> None:
        """Make and enter the instances that a plan uses and that are not there yet.

        Raises:
            Exception: what an `__aenter__` raised; the instances entered with it are left again.
        """
        nodes = {id(node.template): node for node in stateful_nodes(plan)}
        missing = [node for key, node in nodes.items() if key not in self._handlers]
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
        if errors:
            raise errors[0]

    async def _host(self, nodes: list[Node[..., Any]], opened: asyncio.Event, closing: asyncio.Event) -> None:
        entering = nodes[0]
        try:
            async with AsyncExitStack() as stack:
                for entering in nodes:
                    instance, handler = fresh_instance(entering.template)
                    if hasattr(instance, "__aenter__"):
                        await stack.enter_async_context(instance)
                    self._handlers[id(entering.template)] = handler
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


def stateful_nodes(plan: Plan) -> Iterator[Node[..., Any]]:
    """Yield the stateful nodes of a plan and of the bodies of its control flow."""
    plans = [plan]
    while plans:
        current = plans.pop()
        for step in current.steps:
            plans.extend(step.bodies)
            for link in step.chain:
                callee = link.callee
                if isinstance(callee, Node) and callee.template is not None and callee.origin.replacement is None:
                    yield callee
