"""Instances of stateful nodes, and of actors that own their loop, in one scope; the supervisor can replace them."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

from .._errors import ActorRestarted, NodeCancelledError, NodeError, add_note, with_cause
from ..actors import loop_host
from ..actors.loop_host import LoopHost, OwnsLoop, RestartGate
from ..actors.supervision import Child, ExitKind, Supervisor
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

    An `Instance` is a child of the scope's supervisor. Each instance is entered and left by a task of its own, since
    `__aenter__` may open a task group or a cancel scope, which must be left by the task that entered it.

    Attributes:
        name: the name of the node.
        restart: the restart mode: the kinds of exit after which the supervisor restarts the node.
        restarts: how often the instance was replaced.
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
        self._context_task: ContextTask[None] | None = None
        self._is_up = False  # whether the instance was started, and its stop has not begun

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
        context_task = self._context_task = ContextTask(self._entered(), f"penstock-instance-{self.name}")
        try:
            await context_task.settled()
        except asyncio.CancelledError:
            try:
                await context_task.ended()
            finally:
                self._context_task = None
                if context_task.error is not None:
                    logs.warning("actor.not_released", node=self.name, error=repr(context_task.error))
            raise
        if context_task.was_opened:
            context_task.task.add_done_callback(lambda _: self._ended(context_task))
            return
        self._context_task = None
        if context_task.error is None:
            raise NodeCancelledError(f"the start of stateful node {self.name!r} was cancelled, but not by the engine")
        add_note(context_task.error, f"while stateful node {self.name!r} was started")
        raise context_task.error

    async def stop(self, cause: BaseException | None) -> None:
        """Wait until no attempt runs in the instance, and leave the instance; do nothing without an instance."""
        self._is_up = False
        if self.gate is not None:
            await self.gate.clear(cause)
        context_task = self._context_task
        if context_task is None:
            return
        context_task.end_soon()
        await asyncio.wait([context_task.task])
        self._context_task = self._crash = None
        if context_task.error is not None and (cause is None or context_task.error is not cause):
            raise context_task.error

    def hold(self) -> None:
        """Hold further attempts back."""
        self._is_up = False
        if self.gate is not None:
            self.gate.hold()

    def resume(self) -> None:
        """Let attempts run again."""
        self._is_up = True
        if self.gate is not None:
            self.gate.open()
        if self._context_task is not None and self._context_task.task.done():
            self._ended(self._context_task)

    def abandon(self, cause: BaseException | None, why: str | None = None) -> None:
        """Have all attempts fail with `ActorStopped`, now and later."""
        self._is_up = False
        if self.gate is not None:
            self.gate.stop(cause, why)

    def _crashed(self, error: Exception) -> None:
        self._crash = error
        self._supervisor.exited(self, "crash", error)

    def _ended(self, context_task: ContextTask[None]) -> None:
        """Report that an instance has ended by itself: for instance, a task of its task group has failed."""
        if context_task is not self._context_task or not self._is_up:
            return
        if context_task.task.cancelled():  # the loop is being shut down, so a restart makes no sense
            self.abandon(NodeCancelledError(f"the task that keeps stateful node {self.name!r} was cancelled"))
            return
        error = context_task.error or NodeError(f"stateful node {self.name!r} was left, although its scope goes on")
        if self.gate is not None:
            self._supervisor.exited(self, "crash", error)
        else:  # without a gate, callers hold the handler of this instance, so it cannot be replaced
            self._is_up = False
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
            if self._handler is not None:
                self.restarts += 1
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


class LoopInstance(Child):
    """A node that owns its loop, in one scope: the other kind of child of the scope's supervisor.

    Attributes:
        gate: None, because the inbox also takes work while no loop runs.
        name: the name of the node.
        restart: the restart mode: the kinds of exit after which the supervisor restarts the loop.
        restarts: how often the loop was started again.
        host: the host that runs the loop.
    """

    gate: RestartGate | None = None

    def __init__(self, node: Node[..., Any], pools: Pools, supervisor: Supervisor, scope: Scope) -> None:
        super().__init__(node.name, node.policy.restart, supervisor)

        def make() -> OwnsLoop:  # called in the task that runs the loop
            nesting.note_owner_engine(pools)
            return node.runs_on._make_loop(node, scope)

        self.host = LoopHost(
            make,
            node.name,
            capacity=node.policy.inbox_capacity if node.gives_stream else node.policy.capacity,
            max_bytes=node.policy.max_bytes,
            shutdown_seconds=node.policy.shutdown_seconds,
            on_exit=self._exited,
        )
        self._has_run = False
        self._is_supervised = False
        self._early_exit: tuple[ExitKind, BaseException | None] | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the loop has ended and is not restarted, so that further attempts would fail."""
        return self.host.inbox.channel.closed

    async def start(self) -> None:
        """Make an instance, enter it, and begin its loop.

        Raises:
            Exception: the error of its `__init__` or `__aenter__`.
        """
        try:
            await self.host.start()
        except BaseException as error:
            # Another restart may cancel this start when the loop has just begun and has taken work already.
            self.host.fail_taken(partial(self._restarted_error, error))
            add_note(error, f"while stateful node {self.name!r} was started")
            raise
        self.restarts += self._has_run
        self._has_run = True

    async def stop(self, cause: BaseException | None) -> None:
        """Cancel the loop, and fail the work that it has taken; the inbox keeps the work that it has not taken."""
        self.host.fail_taken(lambda: self._restarted_error(cause))
        try:
            await self.host.halt()
        finally:  # once more, because a task of the loop may have taken work in the meantime
            self.host.fail_taken(lambda: self._restarted_error(cause))

    async def close(self) -> None:
        """End the loop when it has done all work in its inbox."""
        await self.host.close()

    def supervised(self) -> None:
        """Report exits from now on, and the exit that happened before the supervisor knew this child."""
        self._is_supervised = True
        exit_, self._early_exit = self._early_exit, None
        if exit_ is not None:
            self._supervisor.exited(self, *exit_)

    def abandon(self, cause: BaseException | None, why: str | None = None) -> None:
        """Fail all work, now and later, with `ActorStopped`."""
        self.host.abandon(cause, why)

    def _exited(self, host: LoopHost, error: BaseException | None) -> None:
        kind: ExitKind = "normal" if error is None else "crash"
        if self._is_supervised:
            self._supervisor.exited(self, kind, error)
        else:
            self._early_exit = kind, error

    def _restarted_error(self, cause: BaseException | None) -> ActorRestarted:
        told = f"actor {self.name!r} was restarted while it worked on this item, after: {cause!r}"
        return with_cause(ActorRestarted(told), cause)


class InstanceRegistry:
    """One instance of each stateful node that a scope uses, shared by all call sites of the node.

    Args:
        pools: the pools of the Engine.
        supervisor: restarts instances that crash, and stops all instances at the end.
    """

    def __init__(self, pools: Pools, supervisor: Supervisor) -> None:
        self._pools = pools
        self._supervisor = supervisor
        self._children: dict[object, Instance | LoopInstance] = {}
        self.scope: Scope = Scope()  # the scope sets this attribute once it has its wiring

    def child_of(self, node: Node[..., Any]) -> Instance | LoopInstance:
        """Return the instance of a stateful node in this scope, or the child that runs the loop of a node."""
        return self._children[instance_key(node)]

    async def open(self, plan: Plan) -> None:
        """Make and enter the instances that a plan needs and that this scope does not have yet.

        Raises:
            Exception: the error of an instance that did not start; the other instances of this call are left again.
        """
        nodes = {instance_key(node): node for node in stateful_nodes(plan)}
        opened: dict[object, Instance | LoopInstance] = {}
        async with AsyncExitStack() as undo:
            undo.push_async_callback(lambda: uninterrupted(_leave_all(list(opened.values()))))
            for key, node in nodes.items():
                if key not in self._children:
                    kind = LoopInstance if node.runs_on._runs_loop else Instance
                    child = kind(node, self._pools, self._supervisor, self.scope)
                    await child.start()
                    opened[key] = child
            undo.pop_all()
        for key, child in opened.items():
            self._children[key] = child
            self._supervisor.add(child)
            child.resume()
        for child in opened.values():  # last, because an exit may restart other children, so all must be known
            if isinstance(child, LoopInstance):
                child.supervised()

    async def close(self) -> None:
        """Leave all instances, the last one first, even if leaving an instance raises.

        Raises:
            Exception: the first error of an `__aexit__`.
        """
        await self._supervisor.close()
        self._children.clear()


async def _leave_all(children: list[Instance | LoopInstance]) -> None:
    """Leave instances because another instance did not start; log their errors: the caller raises the first error."""
    for child in reversed(children):
        with logs.logged("actor.not_released", node=child.name):
            await child.close()


def instance_key(node: Node[..., Any]) -> object:
    """Return the key of a node's instance within a scope; copies of a node with another policy share its instance."""
    return id(node.origin) if node.template is None else id(node.template), node._binding


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
