"""One running call of `run`, of a service or of a stream: how the call begins, how it is launched, and how it ends."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from contextvars import Context, copy_context
from time import perf_counter
from typing import Any, TypeAlias

from opentelemetry.trace import Span

from ..actors.current import calling_actor, enclosing_frame, is_detached, source
from ..actors.execution import OutsideCall, begin_detached, outcome_of
from ..actors.frame import Frame, Listener, Place
from ..actors.node_actor import NOTHING_READY
from ..actors.tasks import EagerStarts
from ..actors.threads import ThreadShare
from ..actors.worker import WorkerGroup
from ..telemetry import metrics, names, spans
from .graph import Call
from .keeping import Keeper
from .options import ExecutionOptions
from .program import Wired
from .scope import Scope


class RunningCall(Frame, WorkerGroup, Listener):
    """One call with workers of its own.

    The call, its frame and its group of workers are one object, because making objects is a large part of the cost of
    a short call. The object is made before the call is launched: a call may first wait for a place, for resources or
    for stateful nodes, and its span, its deadline and its duration cover that wait.

    Args:
        loop: the running loop.
        graph: the name of the graph.
        options: the options of the call.
        headers: the headers of the trace that the call continues; None for the trace of the caller.
        context: the context of which the handlers see a copy. None stands for the context of the caller; then, if the
            caller is a handler, the call belongs to the item of that handler.
        timeout_seconds: how long the call may take, in seconds; None without a limit.
        ends_at: the deadline of a call that has begun before, on the clock of the event loop.
        item: the index of the call in a stream; None outside of a stream.
        stream: the span of that stream.

    Attributes:
        run_span: the span of the call; None for a call without a span.
        timeout_seconds: the argument of the same name.
        is_reported: whether `report` has to be called at the end: the call has a span, or metrics count it.
    """

    # Slots, because in Python 3.11 an object with more than 30 attributes of its own would carry a dict, which takes a
    # microsecond.
    __slots__ = ("_is_plain", "is_reported", "key")
    # Attributes that few calls set have their default in the class, for the same reason.
    run_span: Span | None = None
    traced = False
    timeout_seconds: float | None = None
    ends_at: float | None = None
    threads: ThreadShare | None = None
    is_exclusive = True
    # Attributes of workers, with defaults for a call without a worker; `launch` assigns them for a call with a worker.
    ready = NOTHING_READY
    feed = None
    runnable = 0
    armed = False
    queues = ()
    _is_detached = False
    _listener: Listener | None = None
    _began: float | None = None  # the time of its beginning, if metrics count the call
    _in_flight: "Counter[str] | None" = None
    late_scope: Scope | None = None  # the scope of `new_scope`, once it was needed

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        graph: str,
        options: ExecutionOptions,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        *,
        ends_at: float | None = None,
        context: Context | None = None,
        item: int | None = None,
        stream: Span | None = None,
    ) -> None:
        # `WorkerGroup.__init__` and `Frame.__init__` are written out, here and in `launch`: this is a hot path.
        self._graph = graph
        self.loop = loop
        self.is_reported = False
        # Whether the call has no span, no deadline and no item around it. Every launch reads this one attribute: to
        # read three defaults from the class would take longer than a function call.
        self._is_plain = timeout_seconds is None
        if context is None:
            self.context = context = copy_context()
            if source.get() is not None:
                self._is_plain = False
                self._belong()
        else:
            self.context = context = context.copy()
        self.workers = ()
        self.closed = False
        if headers is not None or (options.trace_execution and spans.tracer_provider() is not None):
            self.run_span, self.traced = spans.start_run(
                graph, context, is_wanted=bool(options.trace_execution), headers=headers, item=item, stream=stream,
                begins_trace=item is not None and options.trace_items,
            )  # fmt: skip
            self.traced = self.traced and options.trace_execution is True
            self.is_reported = self.run_span is not None
            self._is_plain = False
        if timeout_seconds is not None:
            self.timeout_seconds = timeout_seconds
            self.ends_at = loop.time() + timeout_seconds if ends_at is None else ends_at
        self.state = "running"
        self.key: Hashable = None
        self.priority = options.priority
        self.timer = self.unread = None
        self.unwinding = 0

    # Properties, because an object with an attribute that refers to itself lives until the garbage collector runs.
    @property
    def group(self) -> WorkerGroup:  # type: ignore[override]
        """The call itself, which is its group of workers."""
        return self

    @property
    def listener(self) -> Listener:
        """The object that is told how the call ended: the call itself, or the stream with the call as an item."""
        return self._listener or self

    @listener.setter
    def listener(self, listener: Listener) -> None:
        self._listener = listener

    def count(self, in_flight: "Counter[str] | None" = None) -> None:
        """Have metrics count the call.

        Args:
            in_flight: the numbers of calls in flight by graph, to which this call is added; None if another object
                counts the calls in flight.
        """
        self._began = perf_counter()
        self.is_reported = True
        if in_flight is not None:
            self._in_flight = in_flight
            in_flight[self._graph] += 1

    def keep(self, keeper: Keeper) -> None:
        """Have a keeper asked before each step of the call."""
        self._place = Place(keeper)

    def new_scope(self) -> Scope:
        """Return a scope for the nodes that handlers call, for a call whose actors all runs of the graph share."""
        raise NotImplementedError

    def join(self, scope: Scope) -> None:
        """Have a scope wait for the workers of the call, and bound its threads; call this before `launch`."""
        self.waited_for_in = scope.groups
        if scope.threads is not None:
            self.threads = scope.threads

    def launch(
        self, wired: Wired, arguments: tuple[Any, ...], item: int, eager_starts: EagerStarts | None = None
    ) -> None:
        """Send the call through the actors of its graph.

        If the first step runs outside of the loop, such as on a device, it begins now, and the call needs no worker
        until the step has ended. Otherwise the call gets a worker. The worker takes its place in the first actor when
        it runs, not now; other calls may come first.

        Args:
            wired: the actors of the graph.
            arguments: the arguments of the call.
            item: the number of the call.
            eager_starts: decides whether the first worker begins at once; None for a later turn of the loop.
        """
        self.item = item
        self.layout = program = wired.program  # now looks see the call
        self.values = [*arguments, *program.blank]
        if not program.is_line:
            self.missing = program.countdown.copy()
            self.readers = program.readers.copy()
            self.sinks_left = program.sinks
        if not self._is_plain:
            if self.traced and self.run_span is not None:
                self.span = spans.FrameSpan(self.run_span)
            if self.ends_at is not None and self.timeout_seconds is not None:
                self.expire_at(self.ends_at, self.timeout_seconds)
            if self._is_detached:
                self.expire_with_parent()
        if self.state != "running":
            return
        entries = wired.entries
        is_alone = len(entries) == 1 and entries[0].begin is not None and (self._is_plain or self.span is None)
        if is_alone and begin_detached(entries[0], self):
            return
        # The attributes that workers read; see `RunningCall.ready`.
        self.ready, self.feed, self.runnable, self.armed = NOTHING_READY, None, 0, False
        self.queues = ()
        # A call that a handler makes never begins at once: nested calls would each take a part of the stack.
        if eager_starts is None or self.parent is not None or not eager_starts.may_start():
            self.start_worker(self, entries)
            return
        caller = asyncio.current_task(self.loop)
        cancels = 0 if caller is None else caller.cancelling()
        self.start_worker(self, entries, eagerly=True)
        # The handler has cancelled the caller in its very first step. The caller would notice the cancellation at its
        # next await, which is a turn too late: so end the call now.
        if caller is not None and caller.cancelling() > cancels:
            self.cancel()

    def wait(self, wired: Wired, item: int) -> None:
        """Set the attributes that the call needs if it ends before `launch`."""
        self.item = item
        self.layout = wired.program
        self.values = []
        if self.traced and self.run_span is not None:
            self.span = spans.FrameSpan(self.run_span)

    def _belong(self) -> None:
        """Note the item and the node whose handler makes the call, and take over the deadline of the item."""
        parent = enclosing_frame()
        if parent is not None:
            self.parent = parent
            self.deadline = parent.deadline
            self.caller = calling_actor()
            self._is_detached = is_detached()

    def frame_done(self, frame: Frame) -> None:
        """End the group of workers; see `Listener`."""
        self.close()

    def ended(self) -> None:
        """Leave the scope: the last worker of the call has ended, or the call had no worker."""
        if self.waited_for_in is not None:
            self.waited_for_in.discard(self)

    def report(self, state: str | None = None, error: BaseException | None = None) -> None:
        """Record in the span and in metrics how the call has ended.

        Args:
            state: "running" for a call that was never launched; by default the state of the call.
            error: the error of the call; by default the error that its frame has.
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
            metrics.ended(names.METRIC_RUN_DURATION, self._graph, perf_counter() - self._began, outcome, error, span)


# An item that waits for its key or for its place, its call, the actors of its graph, and when the wait began, in
# seconds of `perf_counter`.
Waiting: TypeAlias = tuple[RunningCall, Call[Any], Wired, float]


class KeyLine:
    """The calls of one key, in a stream with `order_by=`: one call has begun, and later calls wait for its end.

    Attributes:
        key: the key.
        has_begun: whether a call of the key has begun.
        waiting: the calls that wait, in order.
    """

    __slots__ = ("has_begun", "key", "waiting")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.has_begun = False
        self.waiting: deque[Waiting] = deque()


class KeyedCall(RunningCall):
    """An item of a stream with `order_by=`, which frees its key when its last handler has returned."""

    line: KeyLine | None = None  # the line of its key, from its turn to its end
    on_key_free: Callable[[KeyLine], None]
    _outside = 0  # how many threads its handlers have left running

    def outlived_by(self, call: OutsideCall) -> None:
        """Wait for a thread that goes on although its attempt has ended."""
        self._outside += 1
        call.then(self._outside_ended)

    def _outside_ended(self) -> None:
        self._outside -= 1
        if self.closed and not self.workers:
            self.ended()

    def ended(self) -> None:
        """Leave the scope, and free the key."""
        super().ended()
        line = self.line
        if line is not None and not self._outside:
            self.line = None
            self.on_key_free(line)
