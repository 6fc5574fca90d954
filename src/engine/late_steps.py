"""Late steps: with `call`, a handler runs a node or graph that is known only at run time, as a step of its item."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast, overload

from .._errors import GraphTraceError, PlanError, UnknownItemError
from ..actors.current import Handling, Position, position_outside, source
from ..actors.execution import ASYNC, GENERAL
from ..actors.frame import Frame, Place, values_inside
from ..actors.node_actor import NodeActor
from ..actors.tasks import Condition, no_item, until
from ..actors.worker import Worker
from .bodies import _ListMap
from .call import RunningCall
from .graph import Graph, graph, settled
from .keeping import Keeper
from .nesting import is_in_owner
from .node import is_node
from .options import DEFAULTS
from .program import Wired
from .scope import Scope
from .stateful import as_node
from .tracing.ref import call_location
from .tracing.tracer import active

P = ParamSpec("P")
R = TypeVar("R")


@overload
def call(called: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
@overload
def call(called: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
def call(called: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
    """Run a node or a graph that is known only at run time, such as a tool that a model has chosen.

        result = await ps.call(tools[choice.name], **choice.arguments)

    In an `async def` node, the call is a step of the present item: with the policy and the places of the called node,
    with the deadline, the priority and the key of the item, and with spans, events and questions. A stateful node uses
    the instance of the run, stream or deployment. The handler keeps its place meanwhile. A failure is raised here and
    ends nothing else. Calls in tasks that the handler has not awaited are cancelled when its attempt ends, and the
    attempt waits until they have unwound. These calls do not count in `max_workers`. Without an engine, `call` only
    awaits the node or graph.

    Args:
        called: a node, an instance of a stateful node, or a graph; it has to give one value, not a stream.
        *args: the arguments of the node or graph.
        **kwargs: the keyword arguments.

    Returns:
        A coroutine of the result.

    Raises:
        GraphTraceError: `call` was used in a graph, where a node is called directly.
        TypeError: `called` is neither a node nor a graph, or takes other arguments.
        PlanError: `call` was used in a thread, a process, a plain `def`, a batch or the loop of an actor; or the called
            node or graph gives a stream, or has a durable loop.
        ReentrantCallError: the call would wait for a place that its own item holds.
        UnknownItemError: `call` was used in a task whose handler has ended, or is not known.
    """
    if active() is not None:
        raise GraphTraceError(
            f"{call_location()}: ps.call is for nodes, which run for each item; in a graph, call the node or graph "
            "itself: its steps are known in advance"
        )
    found: Any = called if isinstance(called, Graph) else as_node(called)  # pyright: ignore[reportUnknownVariableType]
    if found is None:
        raise TypeError(f"ps.call takes a node or a graph and its arguments, got {called!r}")
    handling = handler_of(f"ps.call({found.name}, ...)")
    if handling is None:
        return _alone(cast("Any", called), args, kwargs)
    calls = _Calls.of(handling)
    calls.counts[found.name] += 1
    name = f"{handling.actor.name}: call {calls.counts[found.name]} of {found.name}"
    place = cast("Frame", handling.frame).place if handling.actor.owner.keeps else None
    if place is None:
        return calls.run(found, args, kwargs, handling, name)
    return calls.run_kept(place, found, args, kwargs, handling, name)


async def _alone(called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return await settled(called(*args, **kwargs))


def handler_of(asked: str) -> Handling | None:
    """Return the handler that makes a call; None if no handler does.

    Args:
        asked: the call, for errors.

    Raises:
        PlanError: no handler could wait for the call.
        UnknownItemError: the handler has ended.
    """
    where, place = source.get(), no_item.get()
    if place is not None or is_in_owner():
        place = place or "while a stateful node starts or ends, or in a task of its own"
        raise PlanError(f"{asked} was called {place}; call it in an `async def` node of one item")
    if where is None:
        return None
    position = where if isinstance(where, Position) else where.position
    if position.is_own:
        handling = position.remember()  # so that tasks of the handler know their item, too
        if handling is None:
            return None
    else:
        handling = where if isinstance(where, Handling) else position_outside(position, asked)
    frame = handling.frame
    if handling.actor.bound._links or (frame is not None and frame.group.loop is not asyncio._get_running_loop()):
        raise PlanError(
            f"{asked} was called in a thread or in a plain `def`, which cannot wait for the call: call it "
            "in an `async def` node"
        )
    if frame is None or not handling.is_present:
        raise UnknownItemError(f"{asked} was called in a task whose handler has ended; await the task in the handler")
    return handling


def path_of(place: Place, handling: Handling) -> str:
    """Return the path of a handler in a run whose steps are kept, with the number of its attempt."""
    return place.of(handling.actor.name) + (f"@{handling.attempt}" if handling.attempt > 1 else "")


class _Calls:
    """The calls that one attempt of a handler makes; see `actors.current.Position`.

    Args:
        handling: the attempt.

    Attributes:
        counts: how many calls there were of each name.
    """

    def __init__(self, handling: Handling) -> None:
        self.counts: Counter[str] = Counter()
        self._of = handling._frame, handling.actor, handling.attempt
        # a function that cancels each call that has begun and not ended
        self._stops: dict[object, Callable[[], object]] = {}
        self._is_over = False
        self._changed = Condition()

    @classmethod
    def of(cls, handling: Handling) -> "_Calls":
        """Return the calls of an attempt."""
        calls: _Calls | None = handling.position.calls
        if calls is None or calls._of != (handling._frame, handling.actor, handling.attempt):
            calls = handling.position.calls = cls(handling)
        return calls

    async def end(self) -> None:
        """Cancel the calls that run, and wait until they have unwound: the attempt has ended."""
        self._is_over = True
        for stop in list(self._stops.values()):
            stop()
        await until(lambda: not self._stops, self._changed.wait)

    def run_kept(
        self, place: Place, called: Any, args: Any, kwargs: Any, handling: Handling, name: str
    ) -> Coroutine[Any, Any, Any]:
        """Have the keeper of the run make the call, or give its kept outcome."""
        keeper: Keeper = place.keeper
        handler = path_of(place, handling)
        path, is_alone = keeper.name_of(handler, called.name, (args, kwargs)), is_node(called)
        inside = Place(keeper, path if is_alone else path + "/", is_alone)

        async def wait() -> Any:
            # The outcome may have to wait for its turn, and the handler may end meanwhile.
            self._wanted(handling)
            self._stops[wait] = cast("asyncio.Task[Any]", asyncio.current_task()).cancel
            try:
                return await keeper.call(handler, path, lambda: self.run(called, args, kwargs, handling, name, inside))
            finally:
                del self._stops[wait]
                self._changed.notify_all()

        return wait()

    async def run(
        self, called: Any, args: Any, kwargs: Any, handling: Handling, name: str, place: Place | None = None
    ) -> Any:
        """Open the actors of a call, and run the call like a body of control flow, in the task that awaits it."""
        frame, actor, position, call = self._wanted(handling), handling.actor, handling.position, object()
        if actor.mode == ASYNC:
            actor.mode = GENERAL  # so that later executions of the actor end the calls that they leave
        around = position if isinstance(position, Worker) else None
        if around is not None and not around.is_own:
            # If the worker calls the handler itself, `_let_others_run` comes next, and ends the remaining calls.
            around.budget, around = 0, None
        scope, is_for_this = _scope_of(actor, frame)
        self._stops[call] = cast("asyncio.Task[Any]", asyncio.current_task()).cancel
        try:
            wired, arguments = await _opened(scope, called, args, kwargs)
            self._wanted(handling)
            body = _ListMap(around, wired, frame, arguments, step=name).instead_of_handler()
            body.called = place
            body._group.caller = actor  # for `refuse_if_endless`: the handler keeps its place
            self._stops[call] = body.stop
            [value] = await body.run([()], 1, frame.item)
            frame.reads(values_inside([value]))  # a result with `discard=` belongs to the handler now
            return value
        finally:
            del self._stops[call]
            self._changed.notify_all()
            if is_for_this:
                await scope.close()

    def _wanted(self, handling: Handling) -> Frame:
        """Return the frame, if neither the attempt nor its item has ended."""
        frame = handling.frame
        if self._is_over or frame is None or frame.state != "running" or not handling.is_present:
            raise asyncio.CancelledError("the handler that has made this call, or its item, has ended")
        return frame


async def _opened(scope: Scope, called: Any, args: Any, kwargs: Any) -> tuple[Wired, tuple[Any, ...]]:
    """Open the actors of a call; return the actors and the arguments."""
    if is_node(called):  # equal copies share one graph, since each access of a method makes a new node
        key = called._identity, called.policy, called.name
        called = scope.called.get(key) or scope.called.setdefault(key, graph(called))
    of: Graph[..., Any] = called
    plan = of._planned(scope.options if scope.wiring.keeps else DEFAULTS)
    if plan._gives_stream or plan._durable is not None:
        what = "gives a stream of values, and ps.call is for one value: read it in a node"
        if not plan._gives_stream:
            what = "has a durable loop, which needs a key of its own: await engine.run(..., durable_key=...)"
        raise PlanError(f"ps.call({of.name}, ...): it {what}")
    arguments = of._arguments(args, kwargs)
    return await scope.prepare_called(plan), arguments


def _scope_of(actor: NodeActor, frame: Frame) -> tuple[Scope, bool]:
    """Return the scope of a handler, and whether it is for this call only. For actors that runs share: of the run."""
    if actor.owner.opened is not None:
        return actor.owner.opened, False
    around = list(frame.lineage())
    run = next(one for one in around if isinstance(one, RunningCall))
    if any(one.waiters for one in around[: around.index(run)]):  # a computation of a cache does not belong to one run
        return run.new_scope(), True
    if run.late_scope is None:
        run.late_scope = run.new_scope()
    return run.late_scope, False
