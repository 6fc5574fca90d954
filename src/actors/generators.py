"""Generators: the task that runs a generator node for one item, and fills the buffer that its reader reads."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Any, cast

from .._errors import NodeCancelledError, with_cause
from ..telemetry import logs, names, spans
from .attempts import HedgeBudget, Race, compose, handled
from .current import starts_tasks
from .execution import STOPPED, Around, Attempt, Bound, Run, TracedExecution, cut_short, end_calls, tell_consumers
from .frame import MemberTask
from .loop_host import GatedAttempt, LoopStream
from .policy import Policy
from .stream_buffer import Reader, SplitBuffer, StreamBuffer
from .supervision import Child
from .tasks import close_stream

if TYPE_CHECKING:
    from .frame import Frame
    from .loop_host import RestartGate
    from .node_actor import NodeActor
    from .worker import Worker


# A step that gives a stream is done once the stream is opened. From then on, a `GeneratorTask` drives the generator and
# puts its values into the buffer. The task counts as one of the workers of the frame: the end of the frame cancels the
# task, and the group of workers does not end before the task.

# Makes the iterator of one attempt.
Start = Callable[[], Any]

_END: Any = object()
_NOTHING_TO_LEAVE: AbstractAsyncContextManager[Any] = nullcontext()


def waits_for_itself(buffer: StreamBuffer[Any]) -> bool:
    """Detect a deadlock: the reader of this full buffer waits, perhaps through other streams, for its producer.

    Each task waits for one thing, so this follows the waits from task to task. A task that waits for something unknown,
    and a step that has not begun, count as able to go on.
    """
    first, seen = buffer.filled_by, set[int]()
    while buffer.read_by is not None and id(buffer) not in seen:
        seen.add(id(buffer))
        member, reads = cast("tuple[Worker | GeneratorTask, Sequence[Reader[Any]]]", buffer.read_by)
        while True:
            actor, wait = member.position.actor, getattr(member.task, "_fut_waiter", None)
            if wait is None or wait.done() or actor is None or starts_tasks(actor.fn):
                return False  # the task runs, or a task that it has started may read another stream
            asked = next((one.buffer for one in reads if one.buffer.waiter is wait), None)
            if asked is None or asked.reader_is_busy or asked.filled_by is None:
                break
            producer = member = cast("GeneratorTask", asked.filled_by)
            if producer is first:
                return True
            reads = producer.readers
        full = [one for one in member.buffers if one.putter is wait] if isinstance(member, GeneratorTask) else []
        if not full:
            return False
        [buffer] = full
    return False


class GeneratorTask(MemberTask):
    """A task that drives one stream; it is a member of the group of workers of its frame.

    Args:
        actor: the actor that opens the stream; the stream holds a place of the actor until the stream has ended.
        frame: the frame that the stream belongs to.
        buffer: the buffer that holds values of the stream for its reader, or the buffers of a split.
        start: makes the iterator of one attempt.
        readers: the streams that the generator itself reads; it leaves them when it ends.
        given: an iterator that was passed as an argument; it has to be closed even if no value is ever read.
        failover: makes the iterator that takes over after the last attempt; None without a failover.
        first: gets the iterator and its first value, with the policy of the node; None without a policy.
        counts_values: whether the iterator counts its values in the actor, so that the stream itself does not count.

    Attributes:
        buffer: the buffer that the task fills, or the buffers of a split.
        start: makes the iterator of one attempt.
        readers: the streams that the generator itself reads.
        given: an iterator that was passed as an argument; None without such an argument.
        inside: for a node that may be restarted: the context managers to leave when the stream has ended.
        failover: makes the iterator that takes over after the last attempt; None without a failover.
    """

    __slots__ = (
        "_begun", "_counts_values", "_first", "_frame", "_has_failed", "_is_second", "buffer", "failover", "given",
        "inside", "readers", "start",
    )  # fmt: skip

    _is_pending = True

    def __init__(
        self,
        actor: "NodeActor",
        frame: "Frame",
        buffer: StreamBuffer[Any] | SplitBuffer[Any],
        start: Start,
        readers: Sequence[Reader[Any]] = (),
        given: Any = None,
        failover: Start | None = None,
        first: "Run | None" = None,
        *,
        counts_values: bool = False,
    ) -> None:
        super().__init__(actor, frame.group, frame)
        self.failover = failover
        self._first = first or OPENING
        self._counts_values = counts_values
        self.inside = _NOTHING_TO_LEAVE
        self.start: Start = start
        self._frame = frame
        self.buffer = buffer
        self.readers = readers
        self.given = given
        self._begun = False
        self._has_failed = False  # whether the generator has failed, and its error waits in the buffer for the reader
        self._is_second = False  # whether this is a second attempt that has no value yet

    def open(self) -> Any:
        """Start the task; return the reader, or the readers of several streams."""
        if self._frame.span is not None:
            tell_consumers(self._frame.span, self._actor)
        self._actor.completed -= 1  # the worker is about to count the step, but the stream counts when it ends
        for reader in self.readers:
            reader.buffer.read_by = self, self.readers
        self._go()
        return self.buffer.reader()

    def begin_second(self, first: Run) -> "GeneratorTask":
        """Begin a second attempt beside this one, and return it; it has a buffer of its own until its first value."""
        second = GeneratorTask(self._actor, self._frame, StreamBuffer[Any](), self.start, first=first)
        second._is_second = True
        second._go()
        return second

    def hand_over(self, second: "GeneratorTask") -> None:
        """Let the second attempt, which has the first value, fill the buffer."""
        second.buffer, second._is_second = self.buffer, False
        second._fill()
        self._fills_nothing()

    def lose(self) -> None:
        """End the task, since the other attempt had the first value; the task keeps its place until its end."""
        self._fills_nothing()
        self._stop()

    def _fills_nothing(self) -> None:
        self.buffer, self._counts_values, self._is_second = StreamBuffer[Any](), True, False
        self.buffer.abandon()

    def _fill(self) -> None:
        self.buffer.on_abandoned = self._reader_left
        for buffer in self.buffers:
            buffer.filled_by = self

    def _go(self) -> None:
        self._fill()
        self._begin(self._run(), "stream", self.group.context.copy())

    @property
    def buffers(self) -> Sequence[StreamBuffer[Any]]:
        """The buffers that the task fills."""
        return [self.buffer] if isinstance(self.buffer, StreamBuffer) else self.buffer.parts

    def cancel_if_in(self, frame: "Frame") -> None:
        """End the stream of a frame that has ended: drop the values that were not read, and close the iterator."""
        if self.position.frame is frame:
            self.buffer.fail(asyncio.CancelledError(f"item {frame.item} has ended"))
            self._stop()

    def _reader_left(self) -> None:
        if not self._has_failed:
            self._stop()
        elif self.buffer.error is not None and self.buffer.error is not self._frame.error:
            self._log_unread(self.buffer.error)

    def _stop(self) -> None:
        # A task that is cancelled before its first step would never run, and so not close the iterator.
        if self._begun:
            cut_short(self, STOPPED)

    async def _run(self) -> None:
        self._begun = True
        self.position.task = self.task
        self.position.remember()  # for the tasks that the generator starts
        try:
            if self._frame.span is None or self.given is not None:  # a stream from an argument has no node, so no span
                await self._drive()
            else:
                with TracedExecution(self._frame.span, self._frame, self._actor) as execution:
                    await self._drive()
                    execution.was_cancelled = self.cut is not None
            self._actor.completed += not (self._counts_values or self._is_second)
        except asyncio.CancelledError as error:
            told = f"the task of stream {self._actor.name!r} was cancelled, not by the engine"
            self._fail(with_cause(NodeCancelledError(told), error))
        except BaseException as error:  # noqa: BLE001 - any exception of the generator is raised at its reader
            self._fail(error)
        finally:
            self.buffer.end()
            await end_calls(self.position)

    async def _drive(self) -> None:
        buffer = self.buffer
        try:
            if buffer.abandoned or buffer.ended:
                await close_stream(self.given)
                return
            iterator, first = await self._first(Attempt(self, self._actor, self._frame, self.readers, ((), {})))
            if self._frame.span is not None and first is not _END:
                spans.happened(names.FIRST_VALUE, self._actor.name)
            buffer = self.buffer  # by now, a second attempt fills the buffer of the first, and a lost attempt its own
            async with self.inside:
                try:
                    if first is _END or not await buffer.put(first):
                        return
                    del first  # so that this frame does not keep the value alive until the end of the stream
                    if isinstance(iterator, LoopStream):
                        assert isinstance(buffer, StreamBuffer)
                        await iterator.pour(buffer)
                        return
                    async for item in iterator:
                        if not buffer.put_nowait(item) and not await buffer.put(item):
                            return
                        del item
                finally:
                    await close_stream(iterator)
        except asyncio.CancelledError:
            if self.cut is None:
                raise

    def _fail(self, error: BaseException) -> None:
        frame, actor, buffer = self._frame, self._actor, self.buffer
        if self._is_second and isinstance(error, Exception):
            handled(Attempt(self, actor, frame, (), ((), {})), "hedge", error)  # the first attempt decides
            return
        actor.failed += 1
        if frame.state != "running" or not isinstance(error, Exception):
            frame.fail(error, actor, self.position.attempt)
            return
        error = frame.annotated(error, actor, self.position.attempt)
        if buffer.abandoned:
            self._log_unread(error)
        else:
            self._has_failed = True
            buffer.end(error)

    def _log_unread(self, error: BaseException) -> None:
        """Log an error that the reader will not see, because the reader has left."""
        logs.warning(
            "stream.unread_error", graph=self._frame.layout.name, node=self._actor.name, item=self._frame.item,
            error=error,
        )  # fmt: skip

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.buffer.end(NodeCancelledError(f"the task of stream {self._actor.name!r} was cancelled before it began"))
        if not self._has_failed:  # after a failure, the callback logs the error if the reader leaves without reading it
            self.buffer.on_abandoned = None
        for buffer in self.buffers:
            buffer.filled_by = None
        for reader in self.readers:
            reader.buffer.read_by = None
            reader.leave()
        self.readers, self.start, self.given, self.failover = (), lambda: None, None, None
        super()._ended(task)


class Opening(Bound):
    """Runs the attempts up to the first value. No attempt begins after that: the reader may have the value already.

    Args:
        instance: as for `Bound`.
        elsewhere: opens a stream whose values come from outside of the loop; None for a generator.
    """

    __slots__ = ("_elsewhere",)

    can_emit = _goes_on = True

    def __init__(self, instance: Child | None = None, elsewhere: Bound | None = None) -> None:
        super().__init__(instance)
        self._elsewhere = elsewhere

    def run(self, attempt: Attempt) -> Awaitable[tuple[AsyncIterator[Any], Any]]:
        """Return the iterator of an attempt, and its first value."""
        made = cast("GeneratorTask", attempt._member).start()
        if self._elsewhere is not None:
            attempt.args, attempt.kwargs = made
            made = self._elsewhere.open(attempt)
        return _begin(aiter(made))


def staying_inside(gate: "RestartGate") -> Around:
    """Return a layer as `through_gate` does; all values of a stream come from the instance of its first value."""

    def around(run: Run) -> Run:
        async def admitted(attempt: Attempt) -> Any:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(GatedAttempt(gate, attempt._member))
                first = await run(attempt)
                cast("GeneratorTask", attempt._member).inside = stack.pop_all()
                return first

        return admitted

    return around


def hedged_stream(after_seconds: float, budget: HedgeBudget) -> Around:
    """Return a layer that begins a second attempt beside an attempt without a value; the attempt with a value wins.

    Each attempt has a task of its own, from its first step to its last. The task of the winner goes on to fill the
    buffer, and the task of the loser closes its iterator.
    """

    def around(run: Run) -> Run:
        async def attempts(attempt: Attempt) -> Any:
            if attempt._position.attempt == 1:
                budget.called()
            async with Race(attempt, after_seconds, budget, begin_second):
                return await run(attempt)
            attempt._member.cut = STOPPED  # the second attempt had the first value
            raise asyncio.CancelledError

        def begin_second(race: Race) -> GeneratorTask:
            async def second_value(attempt: Attempt) -> Any:
                second = cast("GeneratorTask", attempt._member)
                second.position.attempt = first.position.attempt
                found = await run(attempt)
                if race.wins():
                    first.hand_over(second)
                return found

            first = cast("GeneratorTask", race.first._member)
            return first.begin_second(second_value)

        return attempts

    return around


async def fail_over(attempt: Attempt) -> tuple[AsyncIterator[Any], Any]:
    """Begin the failover of a stream; return its iterator, and its first value."""
    owner = cast("GeneratorTask", attempt._member)
    assert owner.failover is not None
    return await _begin(aiter(owner.failover()))


def values_of(fallback: Callable[[Exception], Any], name: str) -> Callable[[Exception], Any]:
    """Return a function that calls the fallback of a stream, and returns its iterator and its first value."""

    async def begin(error: Exception) -> tuple[AsyncIterator[Any], Any]:
        values: Any = fallback(error)
        return await _begin(_iterated(await values if inspect.isawaitable(values) else values, name))

    return begin


# The attempts of a stream without a policy.
OPENING: Run = compose(Policy(), bound=Opening())


async def _begin(iterator: AsyncIterator[Any]) -> tuple[AsyncIterator[Any], Any]:
    try:
        return iterator, await anext(iterator, _END)
    except BaseException:
        await close_stream(iterator)
        raise


def _iterated(value: Any, name: str) -> AsyncIterator[Any]:
    """Return an async iterator over the values of a fallback."""
    if hasattr(value, "__aiter__"):
        iterator: AsyncIterator[Any] = aiter(value)
        return iterator
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray):
        return _each(value)  # pyright: ignore[reportUnknownArgumentType]
    raise TypeError(
        f"the fallback of {name!r}, which gives a stream, returned {value!r}; return a list of values or an async "
        "iterator"
    )


async def _each(values: Iterable[Any]) -> AsyncIterator[Any]:
    for value in values:
        yield value
