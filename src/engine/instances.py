"""Instances: the stateful nodes of one scope, acquired when it starts and released when it ends."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from typing import Any

from .node import Node
from .plan import Plan
from .stateful import fresh_instance

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

    async def open(self, plans: Iterable[Plan]) -> None:
        """Make and enter the instances that these plans use and that are not there yet.

        Raises:
            Exception: what an `__aenter__` raised; the instances entered with it are left again.
        """
        nodes = {id(node.template): node for plan in plans for node in stateful_nodes(plan)}
        missing = [node for key, node in nodes.items() if key not in self._handlers]
        if not missing:
            return
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        closing = asyncio.Event()
        host = loop.create_task(self._host(missing, opened, closing), name="penstock-instances")
        try:
            await opened
        except BaseException:
            if not host.done():
                host.cancel()
            await asyncio.wait([host])
            raise
        self._hosts.append((host, closing))

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

    async def _host(self, nodes: list[Node[..., Any]], opened: "asyncio.Future[None]", closing: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                for node in nodes:
                    instance, handler = fresh_instance(node.template)
                    if hasattr(instance, "__aenter__"):
                        await stack.enter_async_context(instance)
                    self._handlers[id(node.template)] = handler
                opened.set_result(None)
                await closing.wait()
        except BaseException as error:
            if opened.done():
                raise
            error.add_note(f"while a stateful node was started ({', '.join(node.name for node in nodes)})")
            opened.set_exception(error)  # the opener raises it; here it has done its duty


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
