"""Instance registry: the stateful nodes of one scope, acquired when it starts and released when it ends."""

from collections.abc import Iterator
from typing import Any

from ..actors.supervisor import Supervisor
from ..actors.threads import ThreadShare
from ..actors.uninterrupted import uninterrupted
from ..telemetry import logs
from .instance import Instance
from .loop_instance import LoopInstance
from .node import Node
from .planning import Plan
from .pools import Pools


class InstanceRegistry:
    """One instance of each stateful node that a scope uses, shared by all of its call sites.

    Args:
        pools: what their Engine owns.
        threads: those that the scope may have busy; None for as many as the Engine has.
        supervisor: restarts those that crash, and stops all of them at the end.
    """

    def __init__(self, pools: Pools, threads: ThreadShare | None, supervisor: Supervisor) -> None:
        self._pools = pools
        self._threads = threads
        self._supervisor = supervisor
        self._instances: dict[object, Instance] = {}
        self._loops: dict[object, LoopInstance] = {}

    def instance_of(self, node: Node[..., Any]) -> Instance:
        """Return the instance of a stateful node in this scope."""
        return self._instances[instance_key(node)]

    def loop_of(self, node: Node[..., Any]) -> LoopInstance:
        """Return what runs the loop of a node that owns one, in this scope."""
        return self._loops[instance_key(node)]

    async def open(self, plan: Plan) -> None:
        """Make and enter the instances that a plan uses and that are not there yet.

        Raises:
            Exception: what an `__aenter__` raised; the instances entered with it are left again.
        """
        nodes = {instance_key(node): node for node in stateful_nodes(plan)}
        opened: dict[object, Instance | LoopInstance] = {}
        try:
            for key, node in nodes.items():
                if key not in self._instances and key not in self._loops:
                    child = self._make(node)
                    await child.start()
                    opened[key] = child
        except BaseException:
            await uninterrupted(_leave_all(list(opened.values())))
            raise
        for key, child in opened.items():
            if isinstance(child, Instance):
                self._instances[key] = child
            else:
                self._loops[key] = child
            self._supervisor.add(child)
            child.resume()
        for child in opened.values():  # the supervisor has to know all of them: one may take others along
            if isinstance(child, LoopInstance):
                child.supervised()

    async def close(self) -> None:
        """Leave all instances, the last first; every one is left, also when another raises.

        Raises:
            Exception: the first that an `__aexit__` raised.
        """
        await self._supervisor.close()
        self._instances.clear()
        self._loops.clear()

    def _make(self, node: Node[..., Any]) -> Instance | LoopInstance:
        if node.make_loop is None:
            return Instance(node, self._pools, self._supervisor)
        return LoopInstance(node, node.make_loop, self._pools, self._threads, self._supervisor)


async def _leave_all(children: list[Instance | LoopInstance]) -> None:
    """Leave instances whose scope did not start; that is what is raised, so what else goes wrong is logged."""
    for child in reversed(children):
        try:
            await child.close()
        except Exception as error:  # noqa: BLE001 - user code; the others have to be left as well
            logs.warning("actor.not_released", node=child.name, error=repr(error))


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
