"""The scope of a call whose values are streamed: a scope for this call alone, or the scope of a deployment."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from ..actors.frame import AnyDeployment, Frame
from .call import RunningCall
from .checkpoint import Checkpointer
from .graph import Call, DurableKey, check_key, durable_call
from .instances import opens
from .options import ExecutionOptions, chosen
from .program import Plan, Wired
from .scope import Runtime, Scope, started

if TYPE_CHECKING:
    from ..saving.durable import DurableCall
    from .admission import Share
    from .deployment import Deployment


class CallScope:
    """The scope of one call, from its admission to its end.

    Attributes:
        runtime: the shared state of the Engine.
        saving: the snapshots of the call; None if the call is not saved.
        service: the deployment that is called; None for a call with a scope of its own.
    """

    runtime: Runtime
    saving: Checkpointer | None = None
    service: AnyDeployment | None = None
    verb: ClassVar[str]  # the method that made the call, for errors

    def __init__(self, runtime: Runtime, asked: DurableKey) -> None:
        self.runtime = runtime
        self._asked = asked

    @abstractmethod
    def plan_of(self, call: Call[Any]) -> Plan:
        """Return the plan that a call runs."""

    def kept(self, call: Call[Any], options: ExecutionOptions) -> "DurableCall | None":
        """Return the record that keeps the durable loop of a call; None if the graph has no such loop.

        Raises:
            OptionsError: the call has a key without such a loop, or no key; or a value is not accepted.
        """
        plan = self.plan_of(call)
        check_key(plan, self.verb, self._asked)
        if plan._durable is None:
            return None
        return durable_call(plan, call, self._asked, self.runtime.pools.threads, options)

    def admit_nowait(self, call: Call[Any], frame: RunningCall) -> tuple[Scope, Wired, int] | None:
        """Return the result of `admit` if the call may begin at once; None otherwise."""

    @abstractmethod
    async def admit(self, call: Call[Any], frame: RunningCall) -> tuple[Scope, Wired, int]:
        """Wait until the call may begin; the caller launches its frame at once.

        Returns:
            The scope, the actors of the graph, and the number of the call.

        Raises:
            DeadlineExceeded: the call could not begin before its deadline.
        """

    def withdrawn(self) -> None:
        """Note that the call was closed before `admit`."""

    def settled(self, frame: Frame, /) -> None:
        """Note that the call has ended, and its last handler has unwound."""

    def abort_soon(self) -> object:
        """End everything in the scope, because a handler raised KeyboardInterrupt or SystemExit."""

    async def call_ended(self, frame: Frame, /) -> None:
        """Release the scope: the call has ended, or was not admitted."""


class OwnScope(CallScope):
    """A scope for a single call, of `engine.stream`."""

    verb = "engine.stream"

    def __init__(
        self, runtime: Runtime, options: ExecutionOptions, asked: DurableKey, saving: Checkpointer | None = None
    ) -> None:
        super().__init__(runtime, asked)
        self.saving = saving
        self._options = options
        self._plan: Plan | None = None
        self._scope: Scope | None = None

    def plan_of(self, call: Call[Any]) -> Plan:
        """Return the plan of the graph at the begin of the call."""
        self._plan = self._plan or call.graph._planned(self._options)
        return self._plan

    async def admit(self, call: Call[Any], frame: RunningCall) -> tuple[Scope, Wired, int]:
        """Open the resources and start the stateful nodes of the graph."""
        options = self._options
        scope = self._scope = Scope(self.runtime, options, chosen(options), is_one_call=True, saving=self.saving)
        plan = self.plan_of(call)
        span = frame.run_span if opens(plan) else None
        wired = await started(scope.prepare(plan), call.graph.name, frame.ends_at, options, span)
        scope.on_failed = lambda make_error: frame.fail(make_error("the stream"))
        if self.saving is not None:
            self.saving.on_failure = frame.fail
        return scope, wired, 0

    async def call_ended(self, frame: Frame) -> None:
        """Close the scope."""
        if self._scope is not None:
            self._scope.on_failed = None
            if self.saving is not None:
                self.saving.is_done = frame.state == "done"
            await self._scope.close()


class DeploymentScope(CallScope):
    """The scope of a deployment, for a call of `service.stream`.

    Attributes:
        service: the deployment.
        runtime: the shared state of its Engine.
    """

    verb = "service.stream"

    def __init__(self, deployment: "Deployment", asked: DurableKey) -> None:
        super().__init__(deployment.runtime, asked)
        self._deployment = self.service = deployment
        self._scope = deployment.check_callable()  # the deployment may be draining when the call is admitted

    def plan_of(self, call: Call[Any]) -> Plan:
        """Return the plan that the deployment started with."""
        return self._deployment.deployed(call.graph).program.plan

    def admit_nowait(self, call: Call[Any], frame: RunningCall) -> tuple[Scope, Wired, int] | None:
        """Take a place, if a place is free and the resources of the graph are open."""
        wired = self._deployment.wired[call.graph]
        if (
            self._deployment.by_key  # `admit` calls the user's function `key=`, which may fail
            or not wired.program.is_filled
            or not self._deployment.admission.reserve_nowait()
        ):
            return None
        return self._admitted(wired, frame)

    async def admit(self, call: Call[Any], frame: RunningCall) -> tuple[Scope, Wired, int]:
        """Wait until the resources are open, and for a place."""
        wired = self._deployment.wired[call.graph]
        share = await self._deployment.admit(
            call.graph, call.arguments, wired, frame.priority, frame.ends_at, frame.run_span
        )
        return self._admitted(wired, frame, share)

    def _admitted(self, wired: Wired, frame: Frame, share: "Share | None" = None) -> tuple[Scope, Wired, int]:
        self._deployment.begun(frame, share)  # so that the end of the deployment ends the call
        return self._scope, wired, next(self._deployment.numbers)

    def withdrawn(self) -> None:
        """Count the call as cancelled."""
        self._deployment.counts["cancelled"] += 1

    def settled(self, frame: Frame) -> None:
        """Count the call, and give back its place."""
        self._deployment.settled(frame)

    def abort_soon(self) -> None:
        """End the deployment."""
        self._deployment.abort_soon()
