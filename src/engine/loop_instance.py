"""Loop instance: a node that owns its loop in one scope, which its supervisor can restart."""

from functools import partial
from typing import Any

from .._errors import ActorRestarted, add_note
from ..actors.loop_host import LoopHost, OwnsLoop
from ..actors.supervision import ActorState, ExitKind, RestartMode
from ..actors.supervisor import Supervisor
from . import around
from .node import MakeLoop, Node
from .pools import Pools


class LoopInstance:
    """A node that owns its loop, and its successors: another kind of child of the scope's supervisor.

    Its inbox takes work also while no loop runs, so there is nothing to hold back.

    Attributes:
        name: name of the node.
        restart: which exits it is restarted after.
        restarts: how often its loop was started again.
        host: runs the loop.
    """

    def __init__(self, node: Node[..., Any], make_loop: MakeLoop, pools: Pools, supervisor: Supervisor) -> None:
        self.name = node.name
        self.restart: RestartMode = node.policy.restart
        self.restarts = 0

        def make() -> OwnsLoop:  # in the task that runs the loop
            around.host(pools)
            return make_loop(node, pools)

        self.host = LoopHost(
            make,
            node.name,
            capacity=None if node.gives_stream else node.policy.capacity,  # there it is that of the stream
            max_bytes=node.policy.max_bytes,
            shutdown_seconds=node.policy.shutdown_seconds,
            on_exit=self._exited,
        )
        self._supervisor = supervisor
        self._has_run = False
        self._is_supervised = False
        self._early_exit: tuple[ExitKind, BaseException | None] | None = None

    @property
    def state(self) -> ActorState:
        """Whether it runs, or will run again."""
        return self._supervisor.state_of(self)

    async def start(self) -> None:
        """Make an instance, enter it, and begin its loop.

        Raises:
            Exception: what its `__init__` or `__aenter__` raised.
        """
        try:
            await self.host.start()
        except BaseException as error:
            # One that is cancelled, for another restart, may have begun its loop a moment ago, and that taken work.
            self.host.fail_taken(partial(self._restarted_error, error))
            add_note(error, f"while stateful node {self.name!r} was started")
            raise
        self.restarts += self._has_run
        self._has_run = True

    async def stop(self, cause: BaseException | None) -> None:
        """End the loop now, and what it has taken; the inbox keeps the rest."""
        self.host.fail_taken(lambda: self._restarted_error(cause))
        try:
            await self.host.halt()
        finally:  # a task of the loop may have been given work just before
            self.host.fail_taken(lambda: self._restarted_error(cause))

    async def close(self) -> None:
        """End the loop, once it has done what its inbox holds."""
        await self.host.close()

    def hold(self) -> None:
        """Work waits in the inbox."""

    def resume(self) -> None:
        """The loop runs."""

    def supervised(self) -> None:
        """Its supervisor knows it now: tell it of an end of the loop that was too early for that."""
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
        error = ActorRestarted(f"actor {self.name!r} was restarted while it worked on this item, after: {cause!r}")
        error.__cause__ = cause
        return error
