"""One call on its way, whichever verb has made it: how it begins, how it is launched, and how it ends."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextvars import Context, copy_context
from time import perf_counter
from typing import Any

from opentelemetry.trace import Span

from ..actors.current import calling_actor, enclosing_frame, is_detached, source
from ..actors.frame import AnyDeployment, Frame, Listener
from ..actors.invocation import Carrier, DetachedStep, outcome_of
from ..actors.node_actor import NodeActor
from ..actors.tasks import EagerStarts
from ..actors.threads import ThreadShare
from ..actors.worker import NOTHING_READY, WorkerGroup
from ..telemetry import metrics, spans
from .options import ExecutionOptions
from .program import Wired
from .scope import Scope


class RunningCall(Frame, WorkerGroup):
    """One call with workers of its own.

    It is its own frame and its own group of workers, in one object, because neither is ever without the other: making
    objects is a large part of what a short call costs. It begins before it has actors to go through, since it may have
    to wait for a place, for resources or for stateful nodes: its span, its deadline and its duration cover that, too.

    Args:
        loop: the running loop.
        graph: name of its graph.
        options: its options.
        headers: of the trace that it goes on from; None for that of its caller.
        context: what its handlers see, of which it takes a copy; that of its caller by default; only then does the
            call belong to the handler that makes it.
        timeout_seconds: how long it may take; None without a limit.
        item: its index in a stream; None if it is in none.
        stream: the span of that stream.

    Attributes:
        run_span: its span; None if it has none.
        timeout_seconds: the same.
        scope: what waits for its workers; None if it waits for them itself.
    """

    # An object has room for 30 attributes in Python 3.11, and with more it would carry a dict: what is rarely set has
    # its default here.
    run_span: Span | None = None
    traced = False
    timeout_seconds: float | None = None
    ends_at: float | None = None
    threads: ThreadShare | None = None
    scope: Scope | None = None
    is_exclusive = True
    _is_detached = False
    _listener: Listener | None = None
    _began: float | None = None  # when, if it counts in metrics
    _in_flight: "Counter[str] | None" = None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        graph: str,
        options: ExecutionOptions,
        headers: Mapping[str, str] | None = None,
        *,
        context: Context | None = None,
        timeout_seconds: float | None = None,
        item: int | None = None,
        stream: Span | None = None,
    ) -> None:
        # `WorkerGroup.__init__` and, with `launch`, `Frame.__init__` are written out.
        self._graph = graph
        self.loop = loop
        if context is None:
            self.context = context = copy_context()
            if source.get() is not None:
                self._belong()
        else:
            self.context = context = context.copy()
        self.ready = NOTHING_READY
        self.workers = ()
        self.feed = None
        self.runnable = 0
        self.armed = self.closed = False
        if headers is not None or (options.trace_execution and spans.tracer_provider() is not None):
            self.run_span, self.traced = spans.start_run(
                graph, context, is_wanted=options.trace_execution, headers=headers, item=item, stream=stream,
                begins_trace=item is not None and options.trace_items,
            )  # fmt: skip
        if timeout_seconds is not None:
            self.timeout_seconds = timeout_seconds
            self.ends_at = loop.time() + timeout_seconds
        self.state = "running"
        self.priority = options.priority
        self.queued_at = None
        self.further_queues = ()
        self.timer = None
        self.unwinding = 0

    # Not attributes: an object that refers to itself is there until the garbage collector comes.
    @property
    def group(self) -> WorkerGroup:  # type: ignore[override]
        """Its workers."""
        return self

    @property
    def listener(self) -> Listener:
        """Who is told how it ended: itself, or the stream that it is an item of."""
        return self._listener or self

    @listener.setter
    def listener(self, listener: Listener) -> None:
        self._listener = listener

    @property
    def service(self) -> AnyDeployment | None:
        """The deployment that it is made to."""
        return None

    def count(self, in_flight: "Counter[str] | None" = None) -> None:
        """Have it count in metrics.

        Args:
            in_flight: the calls in flight, by graph; None if something else counts those.
        """
        self._began = perf_counter()
        if in_flight is not None:
            self._in_flight = in_flight
            in_flight[self._graph] += 1

    def join(self, scope: Scope) -> None:
        """Have a scope wait for its workers, and bound its threads; before it is launched."""
        self.scope = scope
        if scope.threads is not None:
            self.threads = scope.threads
        scope.groups.add(self)

    def launch(
        self, wired: Wired, arguments: tuple[Any, ...], item: int, eager_starts: EagerStarts | None = None
    ) -> None:
        """Send it through the actors of its graph.

        If its first step is carried out elsewhere, such as on a device, that begins now, and no worker is needed until
        it is over. Else its first worker takes the places when it runs, and not now: until then, others may come.

        Args:
            wired: the actors.
            arguments: of the call.
            item: its number.
            eager_starts: says whether its first worker begins at once; None for later.
        """
        self.layout = program = wired.program
        self.item = item
        self.values = [*arguments, *program.blank]
        if not program.is_line:
            self.missing = program.countdown.copy()
            self.readers = program.readers.copy()
            self.sinks_left = program.sinks
        if self.traced and self.run_span is not None:
            self.span = spans.FrameSpan(self.run_span)
        if self.ends_at is not None and self.timeout_seconds is not None:
            self.expire_at(self.ends_at, self.timeout_seconds)
        if self._is_detached:
            self.expire_with_parent()
        if self.state != "running":
            return
        entries = wired.entries
        carrier = entries[0].carrier if len(entries) == 1 and self.span is None else None
        if carrier is None or not self._sent_away(entries[0], carrier):
            # Not in a handler: calls in calls in calls would each take a part of the stack.
            if eager_starts is None or self.parent is not None or not eager_starts.may_start():
                self.hire(self, entries)
                return
            caller = asyncio.current_task(self.loop)
            cancels = 0 if caller is None else caller.cancelling()
            self.hire(self, entries, eagerly=True)
            # A handler that cancels the caller in the midst of its own step would do so a turn too late.
            if caller is not None and caller.cancelling() > cancels:
                self.cancel()

    def _sent_away(self, entry: NodeActor, carrier: Carrier) -> bool:
        limiter = entry.limiter
        if limiter.free <= 0:
            return False
        limiter.free -= 1
        self.detached = DetachedStep(self, entry, self)
        if self.detached.begin(carrier):
            return True
        self.detached = None
        limiter.release()
        return False

    def _belong(self) -> None:
        """Note the handler that makes the call, if it is made in one."""
        parent = enclosing_frame()
        if parent is not None:
            self.parent = parent
            self.deadline = parent.deadline
            self.caller = calling_actor()
            self._is_detached = is_detached()

    def frame_done(self, frame: Frame) -> None:
        """The outcome is known; see `Listener`."""
        self.close()

    def frame_settled(self, frame: Frame) -> None:
        """Nothing runs for it any more; see `Listener`."""

    def ended(self) -> None:
        """Its last worker has ended, or there was none."""
        if self.scope is not None:
            self.scope.groups.discard(self)

    def report(self, state: str | None = None, error: BaseException | None = None) -> None:
        """Say in its span and in metrics how it has ended.

        Args:
            state: "running" if it got no further than to wait for a place; by default that of its frame.
            error: what it ended with; by default that of its frame.
        """
        span = self.run_span
        if self._in_flight is not None:
            self._in_flight[self._graph] -= 1
        if span is None and (self._began is None or metrics.meter_provider() is None):
            return
        if state is None:
            state, error = self.state, self.error
        outcome = outcome_of(state, error)
        spans.end_run(span, outcome, error)
        if self._began is not None:
            metrics.run_ended(self._graph, perf_counter() - self._began, outcome, error, span)
