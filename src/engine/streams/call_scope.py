"""Where a call that gives a stream runs: in a scope of its own, or in a deployment."""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from ..._errors import DeadlineExceeded
from ...actors.frame import AnyDeployment, Frame
from ..graph import Call
from ..options import ExecutionOptions
from ..planning import ChosenScheduler
from ..scope import Scope
from ..wiring import Wired

if TYPE_CHECKING:
    from ..deployment import Deployment
    from ..runtime import Runtime


class CallScope(Protocol):
    """The scope of one call, from its admission to its end."""

    @property
    def runtime(self) -> "Runtime":
        """The inside of the Engine."""
        ...

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment; None for a scope of its own."""
        ...

    async def admit(self, call: Call[Any], priority: int, deadline: float | None) -> tuple[Scope, Wired, int]:
        """Wait until the call may begin; returns the scope, the actors of the graph, and the number of the call.

        Raises:
            DeadlineExceeded: it could not begin in time.
        """
        ...

    def withdrawn(self) -> None:
        """The call was closed before it could ask for anything."""
        ...

    def begun(self, frame: Frame, /) -> None:
        """The call is in flight."""
        ...

    def settled(self, frame: Frame, /) -> None:
        """Nothing runs for the call any more."""
        ...

    def abort_soon(self) -> object:
        """KeyboardInterrupt or SystemExit ends everything."""
        ...

    async def call_ended(self) -> None:
        """The call has ended, or was not admitted."""
        ...


class OwnScope:
    """A scope for one call alone."""

    service = None

    def __init__(self, runtime: "Runtime", options: ExecutionOptions) -> None:
        self.runtime = runtime
        self._options = options
        self._scope: Scope | None = None

    async def admit(self, call: Call[Any], priority: int, deadline: float | None) -> tuple[Scope, Wired, int]:
        """Start the stateful nodes of the graph."""
        scheduler: ChosenScheduler = "parallel" if self._options.scheduler == "auto" else self._options.scheduler
        self._scope = Scope(self.runtime, self._options, scheduler, is_one_call=True)
        timer = asyncio.timeout_at(deadline)
        try:
            async with timer:
                plan = call.graph._planned(is_cached=self._options.enable_caching)
                return self._scope, await self._scope.prepare(plan), 0
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise DeadlineExceeded(
                f"the resources and stateful nodes of graph {call.graph.name!r} did not start within "
                f"{self._options.timeout_seconds:g} s"
            ) from error

    def withdrawn(self) -> None:
        """Nothing was started."""

    def begun(self, frame: Frame) -> None:
        """The call fails when its stateful nodes crash too often."""
        assert self._scope is not None
        self._scope.on_failed = lambda make_error: frame.fail(make_error("the stream"))

    def settled(self, frame: Frame) -> None:
        """Nothing counts calls here."""
        assert self._scope is not None
        self._scope.on_failed = None

    def abort_soon(self) -> None:
        """The frame has ended, and there is nothing else."""

    async def call_ended(self) -> None:
        """End the scope."""
        if self._scope is not None:
            await self._scope.close()


class DeploymentScope:
    """The scope of a deployment, for one of its calls.

    Attributes:
        service: the deployment.
        runtime: the inside of its Engine.
    """

    def __init__(self, deployment: "Deployment") -> None:
        self.service = deployment
        self.runtime = deployment.runtime
        _, self._in_flight = deployment.check_callable()

    async def admit(self, call: Call[Any], priority: int, deadline: float | None) -> tuple[Scope, Wired, int]:
        """Wait for a place."""
        scope, in_flight = self.service.check_callable()
        wired = await self.service.restored(self.service.graphs.values(call.graph), call.graph, deadline)
        await in_flight.reserve(call.graph.name, priority, deadline)
        self.service.check_admitted(in_flight)
        in_flight.items += 1
        return scope, wired, in_flight.items - 1

    def withdrawn(self) -> None:
        """It counts as a call whose caller went away."""
        self._in_flight.counts["cancelled"] += 1

    def begun(self, frame: Frame) -> None:
        """The end of the deployment ends it."""
        self._in_flight.live.add(frame)

    def settled(self, frame: Frame) -> None:
        """Count it, and give its place back."""
        self._in_flight.settled(frame)

    def abort_soon(self) -> None:
        """End the deployment."""
        self.service.abort_soon()

    async def call_ended(self) -> None:
        """The deployment goes on."""
