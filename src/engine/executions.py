"""Executions: how the steps of nodes run: on the event loop, in threads, or in loops of their own."""

import functools
import types
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

from ..actors import attempts
from ..actors.attempts import hedged
from ..actors.batching import Batch, ThreadBatcher
from ..actors.chains import watched
from ..actors.current import starts_tasks
from ..actors.execution import ASYNC, GENERAL, INLINE, Around, Bound, invoke_plain
from ..actors.executions import Inline, InOwnLoop, InThread, OnLoop, StartsTasks
from ..actors.generators import Opening, fail_over, hedged_stream, staying_inside, values_of
from ..actors.loop_host import LoopHost, OwnsLoop
from ..actors.node_actor import NO_LIMIT, NodeActor, Places, report_blocking
from ..actors.stream_buffer import DEFAULT_CAPACITY
from .bodies import failing_over, opening, stream_failing_over
from .node import Execution, Node, Scope, Site, is_async
from .source import in_input_order
from .stateful import recipe_of

if TYPE_CHECKING:
    from ..telemetry.profiling.records import Bound as LimitedBy


class OnTheLoop(Execution):
    """Calls handlers on the event loop: `runs_on="loop"`."""

    _is_here = _is_inline = True

    def check(self, node: Node[..., Any]) -> None:
        """Refuse a timeout or a hedge of a plain `def`, which holds the loop so that nothing could end it."""
        policy = node.policy
        if node._reads_streams or (policy.timeout_seconds is None and policy.hedge is None):
            return
        why = "nothing can time it out" if policy.hedge is None else "no second attempt begins beside it"
        raise TypeError(
            f"node {node.name!r} is a plain `def` that runs on the event loop, where {why}; "
            'use runs_on="thread" or runs_on="process", or an `async def`'
        )

    def places(self, node: Node[..., Any], scope: Scope) -> Places:
        """Return, in a pipeline, one place for a plain `def`, and the places of the scope for an `async def`."""
        if node.gives_stream or scope._max_workers is None:
            return NO_LIMIT  # a stream holds its place until it has ended, and streams may wait for each other
        return _places(scope._max_workers if node.is_async else 1)

    def bind(self, site: Site) -> Bound:
        """Return the `Bound` that calls the handler."""
        node = site.node
        if node.gives_stream:
            return Opening(site._instance)
        if not node.is_async:
            return Inline(site._instance)
        return (StartsTasks if starts_tasks(node._target) else OnLoop)(site._instance)

    def _bound_by(self, node: Node[..., Any]) -> "LimitedBy":
        return "max_workers" if node.is_async else "loop"

    def bind_batch(
        self, fn: Callable[[list[Any]], Any], name: str, scope: Scope
    ) -> Callable[[list[Any]], Awaitable[Sequence[Any]]]:
        """Return a function that calls `fn` on the event loop."""
        report = functools.partial(report_blocking, fn, name, None)

        def in_steps(items: list[Any]) -> Awaitable[Any]:
            work: Any = fn(items)
            return watched(report, work) if work.__class__ is types.CoroutineType else work

        async def inline(items: list[Any]) -> Any:
            began = perf_counter()
            results = fn(items)
            report(perf_counter() - began)
            return results

        return in_steps if is_async(fn) else inline

    def _directly(self, actor: NodeActor) -> None:
        """Let workers themselves call a plain `def`, or await an `async def` that starts no tasks."""
        if actor.bound._links:
            actor.mode = INLINE
        elif not isinstance(actor.bound, StartsTasks):
            actor.mode, actor.invoke = ASYNC, invoke_plain


class InThreads(Execution):
    """Calls plain functions in the threads of the Engine: `runs_on="thread"`."""

    _is_here = True
    needs_plain_def = True
    pool = "threads"

    def places(self, node: Node[..., Any], scope: Scope) -> Places:
        """Return as many places as the scope has threads."""
        if not scope._has_places_in_threads:
            return Places()
        return Places(scope._pools.max_threads if scope._threads is None else scope._threads.limit)

    def bind(self, site: Site) -> Bound:
        """Return the `Bound` that calls the function in a thread."""
        return InThread(site.scope._pools.threads, site._instance)

    def _batcher(self, fn: Callable[..., Any], batch: Batch, most: int, name: str, scope: Scope) -> OwnsLoop:
        return ThreadBatcher(fn, batch, most, name, scope._pools.threads, scope._threads)


class InLoopsOfTheirOwn(Execution):
    """Gives items to actors that own their loop, one for each scope."""

    _runs_loop = _gathers = True

    def bind(self, site: Site) -> Bound:
        """Return the `Bound` that puts items into the inbox of the loop."""
        return InOwnLoop(cast("LoopHost", site._instance))

    def _make_loop(self, node: Node[..., Any], scope: Scope) -> OwnsLoop:
        template = cast("Any", node.template)
        if template._penstock_is_shared:
            return cast("OwnsLoop", template)
        cls, args, kwargs = recipe_of(template)
        return cast("OwnsLoop", cls(*args, **kwargs))


class InBatches(InLoopsOfTheirOwn):
    """Gathers items of many calls, for one node whose function takes a list of items.

    Args:
        inner: how the function runs.
        fn: the function.
        batch: how items are gathered.
        at_once: how many calls of the function run at a time.
    """

    def __init__(self, inner: Execution, fn: Callable[..., Any], batch: Batch, at_once: int | None) -> None:
        self.name = "own loop"  # not registered, so this execution does not pickle
        self._inner, self._fn = inner, fn
        size: Any = batch.max_size
        self._batch, self._at_once, self._holds = batch, at_once, size * (at_once or 1)

    @property
    def _drawn(self) -> str:
        at_once = f"{self._at_once} at once" if self._at_once else ""
        return ", ".join(word for word in (self._inner._drawn, f"batches of {self._batch.max_size}", at_once) if word)

    @property
    def _place(self) -> str:
        return self.name if self._inner._is_here or self._inner.pool is not None else self._inner._place

    def check(self, node: Node[..., Any]) -> None:
        """Refuse hedge= and discard=."""
        if node.policy.hedge is not None or node.policy.discard is not None:
            option, why = "discard=", "a batch does not know which of its results are wanted"
            if node.policy.hedge is not None:
                option, why = "hedge=", "a second attempt would wait for a batch as well"
            raise TypeError(f"batched node {node.name!r} has {option}: {why}; leave it out")

    def _make_loop(self, node: Node[..., Any], scope: Scope) -> OwnsLoop:
        fn = self._fn if node.bound_to is None else types.MethodType(self._fn, node.bound_to)
        return self._inner._batcher(fn, self._batch, self._at_once or 1, node.origin.name, scope)


_places: Final = functools.cache(Places)  # cached, since scopes are wired again and again
BUILT_IN: Final = OnTheLoop("loop"), InThreads("thread"), InLoopsOfTheirOwn("own loop")


def wire(execution: Execution, site: Site, actor: NodeActor) -> None:
    """Make an actor run the steps of a node with the policy of the node, which is composed here."""
    policy, streams, gate = site.node.policy, site._unit.streams, site._gate
    if policy.retry is not None:
        actor.counted()
    if site.node.gives_stream:
        _open(execution, site, actor)
        return
    around: tuple[Around, ...] = () if policy.discard is None else (attempts.noting_results,)
    if gate is not None:
        around += (attempts.through_gate(gate),)
    # a second attempt could not read the values that the first attempt has read
    if policy.hedge is not None and not streams:
        budget = site.scope._pools.hedge_budget(site.node.origin, policy.hedge.max_share)
        around += (hedged(policy.hedge.after_seconds, budget),)
    failover = None if site._failover is None else failing_over(*site._failover)
    run = attempts.compose(policy, around, failover)
    actor.invoke = attempts.invoking(run, streams)
    if gate is None and not streams and policy.is_once and not policy.ordered and policy.discard is None:
        execution._directly(actor)
    # a handler that reads a stream waits for other handlers, which need places
    if site.scope._counts_handlers and not streams:
        count_handlers(actor)
    if policy.ordered and not site.node._is_replaced:
        actor.invoke = in_input_order(actor.invoke)


def count_handlers(actor: NodeActor) -> None:
    """Count the handlers of a step among the handlers that its call runs at a time."""
    if actor.mode != GENERAL:
        actor.mode, actor.invoke = GENERAL, attempts.invoking(attempts.run_once)
    actor.begin = None
    actor.invoke = attempts.within_handlers(actor.invoke)


def _open(execution: Execution, site: Site, actor: NodeActor) -> None:
    """Make an actor open the streams of a node that gives streams."""
    policy, failover, gate = site.node.policy, site._failover, site._gate
    if policy.fallback is not None:
        policy = replace(policy, fallback=values_of(policy.fallback, site.node.name))
    is_opened = not (execution._is_here or execution._runs_loop)
    bound = Opening(site._instance, actor.bound if is_opened else None)
    if is_opened:  # the iterator is made in another place, from the arguments
        actor.fn = functools.wraps(actor.fn, updated=())(lambda *args, **kwargs: (args, kwargs))
    around: tuple[Around, ...] = () if gate is None else (staying_inside(gate),)
    if policy.hedge is not None and not site._unit.streams and site._place is None:
        budget = site.scope._pools.hedge_budget(site.node.origin, policy.hedge.max_share)
        around = (hedged_stream(policy.hedge.after_seconds, budget),)
    first = attempts.compose(policy, around, None if failover is None else fail_over, bound)
    instead = None if failover is None else stream_failing_over(*failover)
    capacity, streams = site.node.policy.capacity or DEFAULT_CAPACITY, site._unit.streams
    if execution._runs_loop:
        actor.invoke = opening(capacity, streams, first, instead, None, site._instance)
    else:
        actor.invoke = opening(capacity, streams, first, instead, site._place)
