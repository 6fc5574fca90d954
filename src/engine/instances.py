"""Instances of stateful nodes, and of actors that own their loop, in one scope; the supervisor can replace them."""

import functools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from .._errors import NodeError
from ..actors import loop_host
from ..actors.loop_host import LoopHost, OwnsLoop, RestartGate
from ..actors.supervision import Child, Supervisor
from ..actors.tasks import ContextTask, uninterrupted
from ..telemetry import logs
from . import nesting
from .node import Node, Scope, is_node
from .pools import Pools
from .program import Plan
from .stateful import handler_of, recipe_of

Handler = Callable[..., Any]


class Instance(Child):
    """A stateful node in one scope: its present instance, and later instances that replace it after a crash.

    Attributes:
        value: the present instance, or the object that represents an instance in another process.
        gate: the gate that every attempt passes, so that a restart can hold attempts back; None if the supervisor
            never restarts this node.
    """

    def __init__(self, node: Node[..., Any], pools: Pools, supervisor: Supervisor, scope: Scope) -> None:
        super().__init__(node.name, node.policy.restart, supervisor)
        self.gate: RestartGate | None = None
        if node.policy.restart_on or supervisor.flags.strategy != "one_for_one":
            self.gate = RestartGate(node.name, node.policy.restart_on, self._crashed)
        self._node = node
        self._pools = pools
        self._scope = scope
        self.value: Any = None
        self._handler: Handler | None = None
        self._crash: Exception | None = None

    @property
    def handler(self) -> Handler:
        """The method that handles an item; if instances can be replaced, each call looks up the present instance."""
        assert self._handler is not None
        if self.gate is None:
            return self._handler

        @functools.wraps(self._node.fn, updated=())  # wrapping the handler would keep the first instance alive
        def handle(*args: Any, **kwargs: Any) -> Any:
            assert self._handler is not None
            return self._handler(*args, **kwargs)

        return handle

    @property
    def is_stopped(self) -> bool:
        """Whether the node has ended and is not restarted, so that further attempts would fail."""
        return self.gate is not None and self.gate.is_stopped

    async def start(self) -> None:
        """Make an instance, and enter it.

        Raises:
            Exception: the error of its `__init__` or `__aenter__`.
        """
        await self._enter(ContextTask(self._entered(), f"penstock-instance-{self.name}"))

    async def stop(self, cause: BaseException | None) -> None:
        """Wait until no attempt runs in the instance, and leave the instance; do nothing without an instance."""
        self._is_up = False
        if self.gate is not None:
            await self.gate.clear(cause)
        try:
            await self._leave(cause)
        finally:
            self._crash = None

    def hold(self) -> None:
        """Hold further attempts back."""
        super().hold()
        if self.gate is not None:
            self.gate.hold()

    def resume(self) -> None:
        """Let attempts run again."""
        if self.gate is not None:
            self.gate.open()
        super().resume()

    def abandon(self, cause: BaseException | None, why: str | None = None) -> None:
        """Have all attempts fail with `ActorStopped`, now and later."""
        self._is_up = False
        if self.gate is not None:
            self.gate.stop(cause, why)

    def _crashed(self, error: Exception) -> None:
        self._crash = error
        self._supervisor.exited(self, "crash", error)

    def _ended(self, error: BaseException | None) -> None:
        """Report that an instance has ended by itself: for instance, a task of its task group has failed."""
        error = error or NodeError(f"stateful node {self.name!r} was left, although its scope goes on")
        if self.gate is not None:
            self._supervisor.exited(self, "crash", error)
        else:  # without a gate, callers hold the handler of this instance, so it cannot be replaced
            self._supervisor.give_up(self, error)

    @asynccontextmanager
    async def _entered(self) -> AsyncGenerator[None, None]:
        nesting.note_owner_engine(self._pools)
        cls, args, kwargs = recipe_of(self._node.template)
        instance = self._node.runs_on.make_instance(self._scope, cls, args, kwargs)
        handler = handler_of(instance)
        if loop_host.fault_at_start is not None:
            await loop_host.fault_at_start(self.name)
        async with AsyncExitStack() as stack:
            if hasattr(instance, "__aenter__"):
                await stack.enter_async_context(instance)
            self.value, self._handler = instance, handler
            try:
                yield
            finally:
                if self.gate is not None and self._is_up:  # the instance has ended by itself
                    self.gate.hold()  # new attempts wait for the next instance
            if self._crash is not None:
                await _leave_after(stack, self._crash)


async def _leave_after(stack: AsyncExitStack, crash: Exception) -> None:
    """Leave an instance as `async with` does when its block raises `crash`; do not raise `crash` again."""
    try:
        await stack.__aexit__(type(crash), crash, crash.__traceback__)
    except BaseException as error:
        if not _is_only(error, crash):
            raise


def _is_only(error: BaseException, one: BaseException) -> bool:
    """Whether an error is `one`, or a group with no other error than `one`, as a task group raises it."""
    if error is one or not isinstance(error, BaseExceptionGroup):
        return error is one
    group = cast("BaseExceptionGroup[BaseException]", error)
    return all(_is_only(inner, one) for inner in group.exceptions)


def _loop_host(node: Node[..., Any], pools: Pools, supervisor: Supervisor, scope: Scope) -> LoopHost:
    """Return the child of the supervisor for a node that owns its loop."""

    def make() -> OwnsLoop:  # called in the task that runs the loop
        nesting.note_owner_engine(pools)
        return node.runs_on._make_loop(node, scope)

    policy = node.policy
    return LoopHost(
        make,
        node.name,
        policy.restart,
        supervisor,
        capacity=policy.inbox_capacity if node.gives_stream else policy.capacity,
        max_bytes=policy.max_bytes,
        shutdown_seconds=policy.shutdown_seconds,
    )


class InstanceRegistry:
    """One instance of each stateful node that a scope uses, shared by all call sites of the node.

    Args:
        pools: the pools of the Engine.
        supervisor: restarts instances that crash, and stops all instances at the end.
    """

    def __init__(self, pools: Pools, supervisor: Supervisor) -> None:
        self._pools = pools
        self._supervisor = supervisor
        self._children: dict[object, Instance | LoopHost] = {}
        self.scope: Scope = Scope()  # the scope sets this attribute once it has its wiring

    def child_of(self, node: Node[..., Any]) -> Instance | LoopHost:
        """Return the instance of a stateful node in this scope, or the child that runs the loop of a node."""
        return self._children[instance_key(node)]

    async def open(self, plan: Plan) -> None:
        """Make and enter the instances that a plan needs and that this scope does not have yet.

        Raises:
            Exception: the error of an instance that did not start; the other instances of this call are left again.
        """
        nodes = {instance_key(node): node for node in stateful_nodes(plan)}
        opened: dict[object, Instance | LoopHost] = {}
        async with AsyncExitStack() as undo:
            undo.push_async_callback(lambda: uninterrupted(_leave_all(list(opened.values()))))
            for key, node in nodes.items():
                if key not in self._children:
                    make = _loop_host if node.runs_on._runs_loop else Instance
                    child = make(node, self._pools, self._supervisor, self.scope)
                    await child.start()
                    opened[key] = child
            undo.pop_all()
        for key, child in opened.items():
            self._children[key] = child
            self._supervisor.add(child)
        for child in opened.values():  # last, because an exit may restart other children, so all must be known
            child.resume()

    async def close(self) -> None:
        """Leave all instances, the last one first, even if leaving an instance raises.

        Raises:
            Exception: the first error of an `__aexit__`.
        """
        await self._supervisor.close()
        self._children.clear()


async def _leave_all(children: list[Instance | LoopHost]) -> None:
    """Leave instances because another instance did not start; log their errors: the caller raises the first error."""
    for child in reversed(children):
        with logs.logged("actor.not_released", node=child.name):
            await child.close()


def instance_key(node: Node[..., Any]) -> object:
    """Return the key of a node's instance within a scope; copies of a node with another policy share its instance."""
    return id(node.origin) if node.template is None else id(node.template), node._binding


def opens(plan: Plan) -> bool:
    """Return whether a call of the plan waits until resources or stateful nodes are open."""
    return bool(plan.resource_sources) or next(stateful_nodes(plan), None) is not None


def stateful_nodes(plan: Plan) -> Iterator[Node[..., Any]]:
    """Yield the nodes of a plan, bodies included, that have an instance of their own in each scope."""
    plans = [plan]
    while plans:
        current = plans.pop()
        for step in current.steps:
            plans.extend(step.bodies)
            for link in step.chain:
                callee = link.callee
                if is_node(callee) and callee._is_stateful and callee._has_instance:
                    yield callee
