"""Instance: a stateful node in one scope, which its supervisor can replace."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from .._errors import NodeCancelledError, NodeError, add_note
from ..actors.gate import Gate
from ..actors.keeper import Keeper
from ..actors.supervision import ActorState, RestartMode
from ..actors.supervisor import Supervisor
from ..telemetry import logs
from . import around
from .node import Node
from .pools import Pools
from .stateful import fresh_instance

Handler = Callable[..., Any]


class Instance:
    """The instance of a stateful node in one scope, and its successors: a child of the scope's supervisor.

    Each is entered and left by a task of its own, since `__aenter__` may open a task group or a cancel scope, which
    must be left by the task that entered it.

    Attributes:
        name: name of the node.
        restart: which exits it is restarted after.
        restarts: how often it was replaced.
        gate: what attempts pass; None if the supervisor can have no reason to restart it.
    """

    def __init__(self, node: Node[..., Any], pools: Pools, supervisor: Supervisor) -> None:
        self.name = node.name
        self.restart: RestartMode = node.policy.restart
        self.restarts = 0
        self.gate: Gate | None = None
        if node.policy.restart_on or supervisor.flags.strategy != "one_for_one":
            self.gate = Gate(node.name, node.policy.restart_on, self._crashed)
        self._supervisor = supervisor
        self._node = node
        self._pools = pools
        self._handler: Handler | None = None
        self._crash: Exception | None = None
        self._keeper: Keeper[None] | None = None
        self._is_up = False  # started, and nobody is about to stop it

    @property
    def handler(self) -> Handler:
        """What handles an item: of the present instance if it is never replaced, else of whichever is there."""
        assert self._handler is not None
        if self.gate is None:
            return self._handler

        @functools.wraps(self._node.fn, updated=())  # not the handler, which would keep the first instance alive
        def handle(*args: Any, **kwargs: Any) -> Any:
            assert self._handler is not None
            return self._handler(*args, **kwargs)

        return handle

    @property
    def state(self) -> ActorState:
        """Whether it runs, or will run again."""
        return self._supervisor.state_of(self)

    async def start(self) -> None:
        """Make an instance, and enter it.

        Raises:
            Exception: what its `__init__` or `__aenter__` raised.
        """
        keeper = self._keeper = Keeper(self._entered(), f"penstock-instance-{self.name}")
        try:
            await keeper.settled()
        except BaseException:
            try:
                await keeper.ended()
            finally:
                self._keeper = None
                if keeper.error is not None:
                    logs.warning("actor.not_released", node=self.name, error=repr(keeper.error))
            raise
        if keeper.was_opened:
            keeper.task.add_done_callback(lambda _: self._ended(keeper))
            return
        self._keeper = None
        if keeper.error is None:
            raise NodeCancelledError(f"the start of stateful node {self.name!r} was cancelled, but not by the engine")
        raise keeper.error

    async def stop(self, cause: BaseException | None) -> None:
        """Wait until nothing runs in the instance, and leave it; nothing if there is none."""
        self._is_up = False
        if self.gate is not None:
            await self.gate.clear(cause)
        keeper = self._keeper
        if keeper is None:
            return
        keeper.end_soon()
        await asyncio.wait([keeper.task])
        self._keeper = self._crash = None
        if keeper.error is not None and (cause is None or keeper.error is not cause):
            raise keeper.error

    async def close(self) -> None:
        """Leave the instance at the end of the scope."""
        await self.stop(None)

    def hold(self) -> None:
        """Let no more attempts in."""
        self._is_up = False
        if self.gate is not None:
            self.gate.hold()

    def resume(self) -> None:
        """Let attempts in."""
        self._is_up = True
        if self.gate is not None:
            self.gate.open()
        if self._keeper is not None and self._keeper.task.done():
            self._ended(self._keeper)

    def abandon(self, cause: BaseException | None, why: str | None = None) -> None:
        """Let attempts fail with `ActorStopped`."""
        self._is_up = False
        if self.gate is not None:
            self.gate.stop(cause, why)

    def _crashed(self, error: Exception) -> None:
        self._crash = error
        self._supervisor.exited(self, "crash", error)

    def _ended(self, keeper: Keeper[None]) -> None:
        """What the instance has opened ended it: such as a task group, a task of which has failed."""
        if keeper is not self._keeper or not self._is_up:
            return
        if keeper.task.cancelled():  # a loop that is shut down does that: there is nothing to start any more
            self.abandon(NodeCancelledError(f"the task that keeps stateful node {self.name!r} was cancelled"))
            return
        error = keeper.error or NodeError(f"stateful node {self.name!r} was left, although its scope goes on")
        if self.gate is not None:
            self._supervisor.exited(self, "crash", error)
        else:  # those who call it know only this instance
            self._is_up = False
            self._supervisor.give_up(self, error)

    @asynccontextmanager
    async def _entered(self) -> AsyncGenerator[None, None]:
        has_started = False
        around.host(self._pools)
        try:
            instance, handler = fresh_instance(self._node.template)
            async with AsyncExitStack() as stack:
                if hasattr(instance, "__aenter__"):
                    await stack.enter_async_context(instance)
                if self._handler is not None:
                    self.restarts += 1
                self._handler = handler
                has_started = True
                try:
                    yield
                except BaseException:
                    if self.gate is not None and self._is_up:
                        self.gate.hold()  # what comes now waits for the next one
                    raise
                if self._crash is not None:
                    await _leave_after(stack, self._crash)
        except BaseException as error:
            if not has_started:
                add_note(error, f"while stateful node {self.name!r} was started")
            raise


async def _leave_after(stack: AsyncExitStack, crash: Exception) -> None:
    """Leave an instance as `async with` does when its block raises `crash`, which has been reported already."""
    try:
        await stack.__aexit__(type(crash), crash, crash.__traceback__)
    except BaseException as error:
        if not _is_only(error, crash):
            raise


def _is_only(error: BaseException, one: BaseException) -> bool:
    """Whether an error is `one`, or a group of nothing else: a task group raises again what it was left with."""
    if error is one or not isinstance(error, BaseExceptionGroup):
        return error is one
    group = cast("BaseExceptionGroup[BaseException]", error)
    return all(_is_only(inner, one) for inner in group.exceptions)
