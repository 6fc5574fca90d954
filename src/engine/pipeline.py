"""Streams of calls: `CallsStream`, and `Pipeline`, a stream of calls with its source, its window and its workers."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Hashable, Iterable, Iterator
from contextvars import Context, copy_context
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry.trace import Span

from .._errors import (
    DeadlineExceeded,
    DeploymentFailed,
    EngineClosedError,
    NodeCancelledError,
    NotFinished,
    add_note,
    plain_error,
    with_cause,
)
from ..actors.accepted import TIMEOUT, check, refuse_awaitable
from ..actors.current import calling_actor, enclosing_frame
from ..actors.execution import Outcome, outcome_of
from ..actors.frame import Frame, Listener, foreign_cancel
from ..actors.node_actor import NodeActor
from ..actors.tasks import Condition, start_task, uninterrupted
from ..actors.worker import WorkerGroup
from ..telemetry import logs, metrics, names, spans
from ..telemetry.metrics import Reading, series
from .admission import Admission, Share, forget
from .call import KeyedCall, KeyLine, RunningCall, Waiting
from .call_stream import OpenStream, OwnStream, T_co, length_of
from .control import Outcome as ItemOutcome
from .control import Tag_co
from .graph import Call, Graph, as_call, one_value
from .nesting import refuse_to_close_from_inside
from .node import Node
from .options import ExecutionOptions
from .program import Program, Wired
from .scope import Runtime, Scope
from .source import Calls, Prepare, PulledSource, ReorderWindow, checked_call, enter, feed
from .statistics import StreamStatistics, Uptime

if TYPE_CHECKING:
    from ..telemetry.profiling.records import WindowLook


T = TypeVar("T")


class Pipeline(OpenStream):
    """Takes calls from a source through the actors of a scope.

    Args:
        scope: the scope with the actors for the items.
        calls: the source of the calls.
        options: the options of the stream.
        prepare: returns the actors of a graph; called once for each graph, so that a stream keeps its first plans.
        owns_scope: whether the scope is closed with the pipeline.
        admission: for a stream of a deployment, the admission of the deployment: each item needs a place there, too.
        context: the context of the handlers; None for a copy of the caller's context.

    Attributes:
        window: the window, with the items in flight.
        skipped: how many items were skipped.
        tags: the tags that `tagged` has given to the items, by index, until their outcomes are read.
        keys: with `order_by=`, the keys of the calls that have begun, with the calls that wait for the same key.
        on_item_settled: called with each item whose last handler has ended; may be None.
        on_closed: called with the pipeline when it has ended; may be None.
    """

    def __init__(
        self,
        scope: Scope,
        calls: Calls,
        options: ExecutionOptions,
        *,
        prepare: Prepare,
        owns_scope: bool,
        admission: Admission | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(scope.loop)
        self._scope = scope
        if owns_scope:
            scope.on_failed = self._failed
        self._options = options
        self._prepare_graph = prepare
        self._graph_name = ""
        self._owns_scope = owns_scope
        self._admission = admission
        self._context = copy_context() if context is None else context
        self._parent = enclosing_frame()
        self._caller = calling_actor()
        # The items that have workers of their own and a place; in a deployment with `key=`, with the accounts of their
        # keys.
        self._items: dict[Frame, Share | None] = {}
        # The items that wait for a place, in order, and the future that the first of them waits for. In a deployment
        # with `key=`, there is an entry for each account; otherwise, the only entry is None.
        self._lines: dict[Share | None, tuple[asyncio.Future[bool], deque[Waiting]]] = {}
        self.tags: dict[int, Any] = {}
        self.keys: dict[Hashable, KeyLine] = {}
        self._changed = Condition()
        self._wired: dict[Any, Wired] = {}
        self._exhausted = False
        self._error: BaseException | None = None  # the error that ends the whole stream, at once
        self._source_error: Exception | None = None
        self._closing: asyncio.Task[None] | None = None
        self._finishing = False
        self._draining: asyncio.Task[int] | None = None
        self._not_finished: NotFinished | None = None  # the reason for items that a drain has left
        self._left = 0  # how many items a drain has left
        self._pulled: PulledSource | None = None
        self.on_item_settled: Callable[[Frame], None] | None = None
        self.on_closed: Callable[[Pipeline], None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if options.timeout_seconds is not None:
            self._deadline = self.loop.time() + options.timeout_seconds
            self._timer = self.loop.call_at(self._deadline, self._expire, options.timeout_seconds)
        self._span: Span | None = None
        if options.trace_execution:
            # If items begin traces of their own, the span is not made current: the spans of the source would become its
            # children.
            self._span = spans.start_stream(None if options.trace_items else self._context)
        self._outcome: tuple[Outcome, BaseException | None] | None = None
        self.skipped = 0
        # Unsampled items share a context, and workers that run in it. An item that is sampled, begins a trace, or
        # belongs to a deployment has a context of its own, and so workers of its own.
        is_sampled = self._span is not None and spans.is_recorded(self._span)
        own_workers = admission is not None or options.trace_items or is_sampled or options.order_by is not None
        self._group: WorkerGroup | None = None if own_workers else scope.group(self._context, ends_at=self._deadline)
        if self._group is not None:
            self._group.caller = self._caller
        on_settled = self._item_settled if own_workers else None
        self.window = ReorderWindow(self.loop, options.max_in_flight, self.abort, on_settled, ordered=options.ordered)
        # Keeps the pipeline, and so its tasks, alive: a loop refers to its tasks weakly, and the tasks of a dropped
        # stream would be collected instead of ended.
        scope.engine.stream_opened(self)
        if options.collect_metrics:
            metrics.opened(self)
        self._source = start_task(self.loop, self._feed(calls), context=self._context.copy(), name="penstock-source")

    async def next_frame(self) -> Frame | None:
        """Wait for the item whose turn it is to end, and take it; None at the end of the stream.

        Raises:
            BaseException: the error that ended the whole stream: of the source, the deadline, KeyboardInterrupt.
        """
        return self.window.take() if await self.first_ended() is not None else None

    async def first_ended(self) -> Frame | None:
        """Wait until an item can be taken, and return it without taking it; None at the end of the stream."""
        while (frame := self.window.peek()) is None:
            has_all = self._exhausted and not self.window.in_flight
            is_over = has_all and self._draining is not None and isinstance(self._error, EngineClosedError)
            if self._error is not None and not is_over:
                error, self._error = self._error, _closed_error()
                if isinstance(error, DeadlineExceeded):
                    self._error = DeadlineExceeded(*error.args)  # `_close` and `_item_settled` read it later
                try:
                    raise error
                finally:
                    del error  # breaks a cycle: the traceback of the error refers to this stack frame
            if has_all:
                if self._source_error is not None:  # in its turn: all items before it have been taken
                    raise self._source_error
                return None
            with self.reader_wait:
                await self.window.wait()
        return frame

    @property
    def name(self) -> str:
        """The name of the graph of the items; if the items are of several graphs, the name of one graph."""
        return self._graph_name or "a stream"

    @property
    def listener(self) -> Listener:
        """The window, which listens to the frames of the items."""
        return self.window

    def look(self) -> "WindowLook":
        """Return the state of the items in flight, for a profile."""
        from ..telemetry.profiling.records import WindowLook

        window, (waiting, key) = self.window, self.waiting_for_keys()
        return WindowLook(
            size=window.size, ordered=window.ordered, in_flight=window.in_flight,
            ended=len(window.frames) - window.running, is_ready=window.peek() is not None,
            is_asking=window.asking and bool(window.reserved), waiting_for_keys=waiting, key=f"{key!r:.60}",
        )  # fmt: skip

    def waiting_for_keys(self) -> tuple[int, Hashable]:
        """Return how many items wait for earlier calls of their keys, and the key with the most waiting items."""
        lines = [line for line in list(self.keys.values()) if line.waiting]  # a copy: profiles run in other threads
        longest = max(lines, key=lambda line: len(line.waiting), default=None)
        return sum(len(line.waiting) for line in lines), None if longest is None else longest.key

    @property
    def actors_uptime(self) -> Uptime:
        """The time that the counters of the actors cover; in a deployment, longer than the stream is open."""
        return self._scope.uptime

    def tell_progress(self, total: int) -> None:
        """Tell looks how many of so many items have ended; in a deployment, streams share a scope, which has none."""
        window, wiring = self.window, self._scope.wiring
        if wiring.admitted is None:
            wiring.progress = lambda: (window.completed + window.failed, total, 0)

    def counters(self) -> Iterable[Reading]:
        """Return how many items have ended, by outcome, for metrics."""
        if self._graph_name:
            window = self.window
            failed = window.failed - window.cancelled - window.expired
            counts = {
                "done": window.completed,
                "failed": failed,
                "cancelled": window.cancelled,
                "expired": window.expired,
            }
            for outcome, count in counts.items():
                of = (names.GRAPH, self._graph_name), (names.OUTCOME, outcome)
                yield series(names.METRIC_STREAM_ITEMS, *of), count, None

    def levels(self) -> Iterable[Reading]:
        """Return how many items count in `max_in_flight` now, for metrics."""
        if self._graph_name:
            of = names.GRAPH, self._graph_name
            yield series(names.METRIC_STREAM_IN_FLIGHT, of), self.window.in_flight, None
            yield series(names.METRIC_STREAM_MAX_IN_FLIGHT, of), self.window.size, None

    def statistics(self) -> StreamStatistics:
        """Return a snapshot of the counters."""
        window = self.window
        waiting, key = self.waiting_for_keys()
        return StreamStatistics(
            window.submitted,
            window.completed,
            window.failed,
            self.skipped,
            window.position - self.skipped,
            window.in_flight,
            tuple(actor.statistics() for actor in self.actors()),
            self.uptime.seconds,
            self.actors_uptime.seconds,
            window.expired,
            waiting_for_keys=waiting,
            busiest_key=key,
        )

    def actors(self) -> list[NodeActor]:
        """Return the actors that the items go through."""
        return self._scope.wiring.actors()

    def frames(self) -> Iterator[Frame]:
        """Yield the items for which handlers may still run."""
        yield from self.window.frames.values()
        yield from self._items
        if self._group is not None:  # items whose outcome was read, but whose handlers still unwind
            for worker in self._group.workers:
                if worker.position.frame is not None:
                    yield worker.position.frame.root

    def abort(self, error: BaseException | None = None) -> None:
        """Begin to end the stream; see `OpenStream`."""
        has_left = error is None
        if self._error is None:
            self._error = error if error is not None else _closed_error()
            error = error or self._source_error
            is_complete = self._exhausted and not self.window.in_flight
            if self._outcome is None:
                self._outcome = outcome_of("done" if is_complete else "failed" if error else "cancelled", error), error
        if self._closing is None:
            self._closing = start_task(self.loop, self._close(), name="penstock-stream-close")
            if self._draining is not None:
                self._changed.notify_all()
        if has_left and self._finishing:
            self._finishing = False
            self._closing = start_task(self.loop, self._clear(self._closing), name="penstock-stream-clear")
        self.window.wake_reader()

    async def _clear(self, closing: "asyncio.Task[None]") -> None:
        """Discard the results that a drained deployment has left to the reader."""
        await uninterrupted(closing)
        groups = [frame.group for frame in self.window.frames.values()]
        self.window.clear()
        for group in groups:
            while group.workers:
                await group.members_left()

    def raised(self, error: BaseException | None) -> None:
        """Note that the error of an item is raised at the reader, which ends the stream."""
        self._outcome = outcome_of("failed", error), error

    def skip(self, frame: Frame) -> None:
        """Count and log an item that failed and is skipped."""
        self.skipped += 1
        spans.item_skipped(self._span, frame.layout.name, frame.item, frame.error)
        span = frame.run_span if isinstance(frame, RunningCall) else self._span
        with spans.current_for_logs(span):
            logs.warning("stream.item_skipped", graph=frame.layout.name, item=frame.item, error=frame.error)

    def finish(self) -> None:
        """Take no more calls from the source; items in flight go on to their ends, and can still be read."""
        self._finishing = True
        self._end_source()

    def _end_source(self) -> None:
        if self.window.closed:
            return
        self.window.closed = True
        if self.window.asking:
            self._source.cancel()
        elif self._pulled is not None:
            self._pulled.end()

    async def drain(self, timeout_seconds: float | None) -> int:
        """End the source, and wait for the end of the last item; return how many items the timeout cut off."""
        refuse_to_close_from_inside(self.window)
        if self._draining is None:
            self._end_source()
            self._draining = start_task(self.loop, self._drain(timeout_seconds), name="penstock-stream-drain")
        return await asyncio.shield(self._draining)

    def _settled_one(self, frame: Frame) -> None:
        self._changed.notify_all()

    async def _drain(self, timeout_seconds: float | None) -> int:
        if self.window.on_settled is None:
            self.window.on_settled = self._settled_one
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait_for(self._is_drained)
        except TimeoutError:
            self._not_finished = NotFinished(f"the stream was drained, which was to take {timeout_seconds:g} s at most")
            self._source.cancel()
            self._leave_lines()
            for frame in list(self.window.frames.values()):
                if frame.state == "running":
                    self._leave(frame, self._not_finished)
            await self._changed.wait_for(self._is_drained)
        return self._left

    def _leave(self, frame: Frame, error: NotFinished) -> None:
        self._left += 1
        frame.fail(NotFinished(f"item {frame.item} of graph {frame.layout.name!r} was in flight when {error}"))

    def _is_drained(self) -> bool:
        window = self.window
        if self._closing is not None:
            return True
        # An item that was read counts as in flight while its handlers unwind.
        has_all = self._exhausted and window.in_flight == len(window.frames)
        return has_all and all(frame.settled for frame in window.frames.values())

    def _leave_lines(self) -> None:
        """Drop the items that wait for a place or for their keys, so that they never begin."""
        for share, (waiter, waiting) in self._lines.items():
            assert self._admission is not None
            self._admission.leave_line(share, waiter, self._options.priority)
            for item, _, _, since in waiting:
                spans.waited(item.run_span, names.ADMISSION_WAIT, since)
        self._lines.clear()
        for line in self.keys.values():
            for item, _, _, since in line.waiting:
                spans.waited(item.run_span, names.KEY_WAIT, since)
            line.waiting.clear()

    async def gone(self) -> None:
        """Wait until the source is closed, the stateful nodes are left, and all items have ended."""
        assert self._closing is not None
        await uninterrupted(self._closing)

    async def _feed(self, calls: Calls) -> None:
        """Take calls from the source until it ends; runs in the task of the source."""
        try:
            if self._group is None or isinstance(calls, AsyncIterable):
                if not await feed(calls, self.window, self._start) and self._finishing and self._draining is None:
                    self._source_error = _cut_short()
            elif not self.window.closed:
                self._pulled = PulledSource(
                    calls, self.window, self._group, self._prepare, self._tagged, self._parent, self._deadline
                )  # fmt: skip
                await self._pulled.run()
        except Exception as error:  # noqa: BLE001 - of the source, or of a stateful node that does not start: it ends the stream
            self._source_error = plain_error(error, "the source, or the start of a stateful node,")
        except asyncio.CancelledError as error:
            if self._draining is not None:
                pass
            elif self._finishing:
                self._source_error = _cut_short()
            elif self._closing is None:
                self._source_error = with_cause(NodeCancelledError("the source of this stream was cancelled"), error)
            raise
        except BaseException as error:  # noqa: BLE001 - such as KeyboardInterrupt; the reader raises it
            self.abort(error)
        finally:
            self._exhausted, self._pulled = True, None
            self.window.wake_reader()
            if self._draining is not None:
                self._changed.notify_all()

    async def _prepare(self, call: Call[Any]) -> Wired:
        if not self._graph_name:
            self._graph_name = call.graph.name
            spans.name_stream(self._span, self._graph_name)
        try:
            return await self._prepare_graph(call.graph)
        except asyncio.CancelledError:
            if self._not_finished is not None:  # the call was taken, and has an outcome, although it has no actors
                self._tagged(call.tag)
                never_wired = Wired(Program(call.graph._planned(), self._scope.scheduler), (), ())
                if self._group is None:
                    frame: Frame = self._new_item(call, never_wired, self.window.submitted)
                else:
                    frame = self.window.new_frame(never_wired, call.arguments, self._group, self._parent)
                self._leave(frame, self._not_finished)
            raise

    def _tagged(self, tag: Any) -> None:
        """Keep the tag of the next item until its outcome is read."""
        window = self.window
        if len(self.tags) >= 2 * window.size:  # the reader takes no outcomes, but only values
            self.tags = {index: kept for index, kept in self.tags.items() if index in window.frames}
        self.tags[window.submitted] = tag

    async def _start(self, call: Any, index: int) -> None:
        graph = checked_call(call, index, trace_items=self._options.trace_items).graph
        if call.tag is not None:
            self._tagged(call.tag)
        wired = self._wired.get(graph)
        if wired is None:
            wired = self._wired[graph] = await self._prepare(call)
        if self._group is not None:
            frame = self.window.new_frame(wired, call.arguments, self._group, self._parent)
            frame.priority = self._options.priority
            if self._deadline is not None:
                frame.deadline = self._deadline
            await enter(frame, self._group.start(frame, wired.entries), self.window)
            return
        item = self._new_item(call, wired, index)
        line = None if self._options.order_by is None else _asked(self._line_of, call, self._options.order_by)
        if isinstance(line, Exception):
            add_note(line, f"while order_by= of a stream was asked for the key of a call of graph {graph.name!r}")
            item.fail(line)
        elif line is not None and line.has_begun:
            line.waiting.append((item, call, wired, perf_counter()))
        else:
            self._has_turn(item, line)
            self._admit(item, call, wired)

    def _line_of(self, call: Call[Any], order_by: Callable[[Any], Hashable]) -> KeyLine | None:
        """Return the line of the key of a call; None if it has no key.

        Raises:
            Exception: the error of `order_by=`, or of its key.
        """
        key = order_by(call)
        refuse_awaitable(key, "order_by")
        if key is None:
            return None
        line = self.keys.get(key)
        if line is None:
            line = self.keys[key] = KeyLine(key)
        return line

    def _admit(self, item: RunningCall, call: Call[Any], wired: Wired) -> None:
        """Begin an item whose key is free, now or as soon as the item has a place."""
        share: Share | None = None
        if self._admission is not None:
            found = _asked(self._admission.share_of, call.graph, call.arguments)
            if isinstance(found, Exception):
                item.fail(found)
                return
            share = found
            item.key = None if share is None else share.key
            if share in self._lines:
                self._lines[share][1].append((item, call, wired, perf_counter()))
                return
            if not self._admission.reserve_nowait(share):
                self._stand_in_line(self._admission, share, deque([(item, call, wired, perf_counter())]))
                return
        self._launch(item, call, wired, share)

    def _launch(self, item: RunningCall, call: Call[Any], wired: Wired, share: Share | None) -> None:
        """Begin an item that has a place, and whose key is free."""
        self._items[item] = share
        item.launch(wired, call.arguments, item.item)

    def _key_free(self, line: KeyLine) -> None:
        """Note that the present call of a key has ended; the next call begins in a later turn of the loop."""
        if line.waiting:
            self.loop.call_soon(self._next_of_key, line)  # so that a thousand calls that fail at once do not nest
        else:
            forget(self.keys, line.key, line)

    def _next_of_key(self, line: KeyLine) -> None:
        if self._closing is not None:
            return
        if not line.waiting:  # the waiting calls have ended meanwhile
            forget(self.keys, line.key, line)
            return
        item, call, wired, since = line.waiting.popleft()
        self._has_turn(item, line)
        spans.waited(item.run_span, names.KEY_WAIT, since)
        self._admit(item, call, wired)

    def _stand_in_line(self, admission: Admission, share: Share | None, line: deque[Waiting]) -> None:
        """Have the first of these items wait for a place, without a task.

        Only the first item waits at the admission, so that other callers of the key do not wait for a whole window.
        """
        waiter = admission.stand_aside(share, self._options.priority)
        self._lines[share] = waiter, line

        def admitted(waiter: asyncio.Future[bool]) -> None:
            if share not in self._lines or not waiter.result():  # the stream has ended, or ends with the deployment
                return
            item, call, wired, since = line.popleft()
            spans.waited(item.run_span, names.ADMISSION_WAIT, since)
            self._launch(item, call, wired, share)
            if line:
                self._stand_in_line(admission, share, line)
            else:
                del self._lines[share]

        waiter.add_done_callback(admitted)

    def _has_turn(self, item: RunningCall, line: KeyLine | None) -> None:
        """Have an item free its key when the item has ended; `line` is None for an item without a key."""
        if line is not None and isinstance(item, KeyedCall):
            item.line, item.on_key_free = line, self._key_free
            line.has_begun = True

    def _new_item(self, call: Call[Any], wired: Wired, index: int) -> RunningCall:
        """Return an item with workers of its own, which counts in the window from now on."""
        item = (RunningCall if self._options.order_by is None else KeyedCall)(
            self.loop, call.graph.name, self._options, call._trace_headers, context=self._context, item=index,
            stream=self._span,
        )  # fmt: skip
        item.listener = self.window
        item.wait(wired, index)
        item.parent, item.caller = self._parent, self._caller
        item.ends_at = item.deadline = self._deadline
        item.join(self._scope)
        self.window.started(item)
        return item

    def _item_settled(self, frame: Frame) -> None:
        frame.group.close()
        has_place = frame in self._items
        share = self._items.pop(frame, None)
        self._changed.notify_all()
        if self.on_item_settled is not None:
            self.on_item_settled(frame)
        has_span = frame.span is not None or self._options.trace_execution == "calls"
        if has_span and isinstance(frame, RunningCall):
            error = self._error if frame.expired and frame.error is None else frame.error
            spans.end_run(frame.run_span, outcome_of(frame.state, error), error)
        if self._admission is not None and has_place:
            self._admission.release(share)

    def _failed(self, make_error: Callable[[str], DeploymentFailed]) -> None:
        self.abort(make_error("the stream"))

    def _expire(self, timeout_seconds: float) -> None:
        self.abort(DeadlineExceeded(f"the stream did not end within {timeout_seconds:g} s"))

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.progress is not None:
            self.progress.end()
        self.window.closed = True
        self._source.cancel()
        had_failed = self._source_error is not None
        await asyncio.wait([self._source])
        if self._source_error is not None and not had_failed:
            logs.warning("stream.source_not_closed", error=self._source_error)
        expired = isinstance(self._error, DeadlineExceeded)
        self._leave_lines()  # before their spans end
        for frame in list(self.window.frames.values()):
            frame.cancel(expired=expired)
        if self._draining is not None:
            await asyncio.wait([self._draining])
        await self._changed.wait_for(lambda: not self._items)  # until items with workers of their own have unwound
        if not self._finishing:
            self.window.clear()
            self.tags.clear()
        if self._group is not None:
            self._group.close()
        try:
            if self._owns_scope:
                await self._scope.close()
        finally:
            try:
                await self.progress_ended()
            finally:
                self._closed()

    def _closed(self) -> None:
        self.uptime.stop()
        outcome, error = self._outcome or ("cancelled", None)
        self._outcome = self._source_error = None  # breaks cycles: their tracebacks refer to this pipeline
        if self._span is not None:
            window = self.window
            cancelled = window.cancelled + window.expired
            counts = {
                names.STREAM_ITEMS: window.submitted, names.STREAM_FAILED: window.failed - cancelled,
                names.STREAM_SKIPPED: self.skipped, names.STREAM_CANCELLED: cancelled,
            }  # fmt: skip
            spans.end_run(self._span, outcome, error, counts)
        self._scope.engine.stream_closed(self)
        if self._options.collect_metrics:
            metrics.registry.closed(self)
            if self._graph_name:
                seconds = self.uptime.seconds
                metrics.ended(names.METRIC_STREAM_DURATION, self._graph_name, seconds, outcome, error, self._span)
        if self.on_closed is not None:
            self.on_closed(self)


def _asked(ask: Callable[..., T], *args: Any) -> T | Exception:
    """Return the result of a function of the user's, or its error, which fails one item."""
    try:
        return ask(*args)
    except Exception as error:  # noqa: BLE001 - this item fails, not the stream
        return error
    except asyncio.CancelledError as error:  # from a future that the function has read: nothing is awaited here
        return foreign_cancel(error)


def _closed_error() -> EngineClosedError:
    return EngineClosedError("this stream was closed")


def _cut_short() -> EngineClosedError:
    return EngineClosedError("the deployment was drained, so this stream takes no more calls from its source")


class CallsStream(OwnStream[Pipeline, T_co, Tag_co]):
    """The results of many calls."""

    def __init__(
        self,
        calls: Calls,
        options: ExecutionOptions,
        make_pipeline: Callable[[Calls, ExecutionOptions], Pipeline],
        *,
        shows_progress: bool = False,
    ) -> None:
        if not hasattr(calls, "__iter__") and not hasattr(calls, "__aiter__"):
            if isinstance(calls, Graph | Node | Coroutine):
                as_call(calls, "engine.stream")  # raises an error with the remedy
            raise TypeError(
                f"engine.stream takes an iterable of calls, such as (search(u) for u in urls), got {calls!r}"
            )
        self._options = options

        def begin() -> Pipeline:
            total = length_of(calls) if shows_progress else None
            pipeline = make_pipeline(calls, options)
            if shows_progress:
                pipeline.show_progress(total)
            if isinstance(calls, (list, tuple, range)):
                pipeline.tell_progress(len(calls))
            return pipeline

        super().__init__(begin)

    async def __anext__(self) -> T_co:
        """Return the next result.

        Raises:
            Exception: the error of this item, with on_error="raise"; the stream is closed then.
        """
        window = (self._work or self._start()).window
        while not self._closed:
            frame = window.take() or await self._next()
            if frame is None:
                break
            if frame.state == "done":
                result: T_co = frame.result
                return result
            pipeline = self._start()
            if self._options.on_error == "raise" or not isinstance(frame.error, Exception):
                pipeline.raised(frame.error)
                try:
                    frame.outcome()
                finally:
                    await self.aclose()
            pipeline.skip(frame)
        raise StopAsyncIteration

    async def outcomes(self) -> AsyncIterator[ItemOutcome[T_co, Tag_co]]:
        """Iterate over one `Outcome` for each item. The error of an item is in its outcome, and is not raised."""
        pipeline = self._start()
        while not self._closed and (frame := pipeline.window.take() or await self._next()) is not None:
            error = frame.tell_error()
            # KeyboardInterrupt or SystemExit, not the error of an item
            if error is not None and not isinstance(error, Exception):
                await self.aclose()
                raise error
            else:
                outcome: ItemOutcome[T_co, Tag_co] = ItemOutcome(frame.item, frame.result, error)
                if pipeline.tags:
                    outcome.__dict__["_tag"] = pipeline.tags.pop(frame.item, None)
                yield outcome

    async def wait_started(self) -> None:
        """Wait for the first item without taking it out; for a server, before it sends its headers.

        Raises:
            Exception: the error of the first item, or the error that ended the stream before it.
        """
        frame = await self._next(takes=False)
        if frame is not None and frame.state != "done" and self._options.on_error == "raise":
            try:
                frame.outcome()
            finally:
                await self.aclose()

    async def drain(self, timeout_seconds: float | None = None) -> int:
        """Take no more calls from the source, and wait until the calls in flight have ended; see `Stream`."""
        check("timeout_seconds", timeout_seconds, TIMEOUT, "drain(")
        return 0 if self._closed else await self._start().drain(timeout_seconds)

    @property
    def position(self) -> int:
        """How many items the reader has taken, with skipped items.

        With `ordered=True` this is the index of the next item: the place in the input to go on from after a restart.
        With `ordered=False` it is only a count: `outcomes()` says which items they were.
        """
        return 0 if self._work is None else self._work.window.position

    async def _next(self, *, takes: bool = True) -> Frame | None:
        """Wait for the next item that has ended, and take it if `takes`; None at the end of the stream."""
        pipeline = self._start()
        if pipeline.window.has_reader:
            raise RuntimeError("this stream is being read by another task; a stream has one reader")
        try:
            frame = await (pipeline.next_frame() if takes else pipeline.first_ended())
        except asyncio.CancelledError:
            raise  # the reader was cancelled, which does not end the stream
        except BaseException:
            await self.aclose()
            raise
        if frame is None and takes:
            await self.aclose()
        return frame


def own_pipeline(runtime: Runtime, calls: Calls, options: ExecutionOptions) -> Pipeline:
    """Begin a stream of calls in a scope of its own."""
    runtime.check_loop()
    scope = Scope(runtime, options, "actors" if options.scheduler == "auto" else options.scheduler)
    return Pipeline(
        scope, calls, options, prepare=lambda graph: scope.prepare(one_value(graph, options)), owns_scope=True
    )
