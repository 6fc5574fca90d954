"""Generators: the task that takes one opened generator through its attempts and fills the buffer beside its reader."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from .._errors import NodeCancelledError
from ..telemetry import logs
from . import current
from .invocation import Invocation, TracedExecution, invoke_with, tell_consumers
from .loop_host import LoopStream
from .stream_buffer import Reader, StreamBuffer, close_stream
from .tasks import start_task

if TYPE_CHECKING:
    from .frame import Frame
    from .invocation import OutsideCall
    from .node_actor import Invoke, NodeActor
    from .worker import Worker, WorkerGroup


# GeneratorTask: a task that drives one opened stream into the channel beside its reader.
#
# A node that gives a stream is complete once it is opened; what follows belongs to the frame. The driver counts as one
# of the frame's workers, so whatever ends the frame cancels it, and nothing ends before it has.

# Makes the iterator of one attempt.
Start = Callable[[], Any]

_END: Any = object()
_OWN_CANCEL = "penstock: the stream is not wanted any more"


def open_stream(
    actor: "NodeActor",
    frame: "Frame",
    capacity: int,
    start: Start,
    readers: Iterable[Reader[Any]] = (),
    given: Any = None,
) -> Reader[Any]:
    """Open a stream; returns its reader.

    Args:
        actor: the actor that opens it, whose place it holds until it has ended.
        frame: the frame that it belongs to.
        capacity: values that it holds for its reader.
        start: makes the iterator of one attempt.
        readers: the streams that it reads itself; they are left when it ends.
        given: what has to be closed even if nothing is ever asked of it: an iterator that came from outside.
    """
    return GeneratorTask(actor, frame, StreamBuffer(capacity), start, tuple(readers), given).open()


def reading(slots: tuple[int, ...]) -> "Invoke":
    """Return what invokes a node that reads the streams in these slots; when it ends, however it does, it leaves them.

    An attempt that has taken something from a stream is not repeated: what was read is gone.
    """

    async def invoke_reading(worker: "Worker", actor: "NodeActor", frame: "Frame") -> Any:
        readers: list[Reader[Any]] = [frame.values[slot] for slot in slots]
        try:
            return await invoke_with(Invocation(worker, actor, frame, readers))
        finally:
            for reader in readers:
                reader.leave()

    return invoke_reading


class GeneratorTask:
    """Drives one stream; a member of its frame's group.

    Attributes:
        position: where it is: in its frame and actor, for as long as it lives.
        cancels: how often the engine has cancelled its task.
        outside_call: none; a worker may have one.
        inside: what is left when the stream has ended: the instance of a node that may be restarted.
    """

    __slots__ = (
        "_actor",
        "_begun",
        "_buffer",
        "_frame",
        "_given",
        "_has_failed",
        "_readers",
        "_start",
        "cancels",
        "group",
        "inside",
        "outside_call",
        "position",
        "task",
    )  # fmt: skip

    def __init__(
        self,
        actor: "NodeActor",
        frame: "Frame",
        buffer: StreamBuffer[Any],
        start: Start,
        readers: tuple[Reader[Any], ...],
        given: Any,
    ) -> None:
        self.group: WorkerGroup = frame.group
        self.task: asyncio.Task[None] | None = None
        self.position = current.Position()
        self.position.frame, self.position.actor = frame, actor
        self.cancels = 0
        self.outside_call: OutsideCall | None = None
        self.inside = AsyncExitStack()
        self._start = start
        self._actor = actor
        self._frame = frame
        self._buffer = buffer
        self._readers = readers
        self._given = given
        self._begun = False
        self._has_failed = False  # the generator, and its reader gets the error; nothing else keeps it

    def open(self) -> Reader[Any]:
        """Start the task; returns the reader."""
        group = self.group
        self._buffer.on_abandoned = self._reader_left
        if self._frame.span is not None:
            tell_consumers(self._frame.span, self._actor)
        self._actor.limiter.owe()
        self._frame.hold()
        group.joined(self)
        context = group.context.copy()
        context.run(current.source.set, self.position)
        self.task = start_task(group.loop, self._run(), context=context, name=f"penstock-stream {self._actor.name}")
        # Not at the end of the task itself: one that is cancelled before its first step would never come there.
        self.task.add_done_callback(self._ended)
        return self._buffer.reader()

    def begin(self) -> Any:
        """Return the iterator of one attempt."""
        return self._start()

    def is_in(self, frame: "Frame", actor: "NodeActor") -> bool:
        """Whether this is the stream of `actor` for `frame`."""
        return self.position.frame is frame and self.position.actor is actor

    def cancel_if_in(self, frame: "Frame") -> None:
        """The frame has ended: what was not read is dropped, and the iterator is closed."""
        if self.position.frame is frame:
            self._buffer.fail(asyncio.CancelledError(f"item {frame.item} is not wanted any more"))
            self._stop()

    def _reader_left(self) -> None:
        if not self._has_failed:
            self._stop()
        elif self._frame.state == "running" and self._buffer.error is not None:
            self._log_unread(self._buffer.error)  # otherwise it is what the frame has ended with

    def _stop(self) -> None:
        # Before its first step a task could only be thrown away, and with it what has to be closed.
        if self._begun and not self.cancels and self.task is not None:
            self.cancels += 1
            self.task.cancel(_OWN_CANCEL)

    async def _run(self) -> None:
        self._begun = True
        self.position.task = self.task
        self.position.remember()  # for the tasks that the generator starts
        try:
            if self._frame.span is None or self._given is not None:  # an argument is no node
                await self._drive_or_close()
            else:
                with TracedExecution(self._frame.span, self._frame, self._actor) as execution:
                    await self._drive_or_close()
                    execution.was_cancelled = bool(self.cancels)
        except asyncio.CancelledError as error:
            cancelled = NodeCancelledError(f"the task of stream {self._actor.name!r} was cancelled, not by the engine")
            cancelled.__cause__ = error
            self._fail(cancelled)
        except BaseException as error:  # noqa: BLE001 - whatever the generator raises is for its reader
            self._fail(error)
        finally:
            self._buffer.end()

    async def _drive_or_close(self) -> None:
        try:
            if self._buffer.abandoned or self._buffer.ended:
                await close_stream(self._given)
            else:
                await self._drive()
        except asyncio.CancelledError:
            if not self.cancels:
                raise

    async def _drive(self) -> None:
        iterator, first = await _FirstItem(self, self._actor, self._frame, self._readers).run()
        buffer = self._buffer
        async with self.inside:
            try:
                if first is _END or not await buffer.put(first):
                    return
                del first  # it would be kept as long as the stream is open
                if isinstance(iterator, LoopStream):
                    await iterator.pour(buffer)
                    return
                async for item in iterator:
                    if not buffer.put_nowait(item) and not await buffer.put(item):
                        return
                    del item
            finally:
                await close_stream(iterator)

    def _fail(self, error: BaseException) -> None:
        frame, actor, buffer = self._frame, self._actor, self._buffer
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
        """The reader had left before it came to the error: without values in advance it would not have come up."""
        logs.warning(
            "stream.unread_error", graph=self._frame.layout.name, node=self._actor.name, item=self._frame.item,
            error=repr(error),
        )  # fmt: skip

    def _ended(self, task: "asyncio.Task[None]") -> None:
        frame, group = self._frame, self.group
        self.position.frame = None
        self._buffer.end(NodeCancelledError(f"the task of stream {self._actor.name!r} was cancelled before it began"))
        if not self._has_failed:  # else an error that nobody reads is logged
            self._buffer.on_abandoned = None
        for reader in self._readers:
            reader.leave()
        self._readers, self._start, self._given = (), _nothing, None
        self._actor.limiter.release()
        if frame.state == "running":
            frame.let_go()
        else:
            frame.leave()
        group.left(self)


class _FirstItem(Invocation):
    """The attempts up to the first value: what was given cannot be taken back, so nothing is repeated after that."""

    __slots__ = ("_attempt_number", "_owner")

    def __init__(
        self, owner: GeneratorTask, actor: "NodeActor", frame: "Frame", readers: tuple[Reader[Any], ...]
    ) -> None:
        super().__init__(owner, actor, frame, readers)
        self._owner = owner
        self._attempt_number = 1

    async def run(self) -> tuple[AsyncIterator[Any], Any]:
        """Return the iterator of the attempt that went well, and its first value."""
        try:
            first: tuple[AsyncIterator[Any], Any] = await super().run()
            return first
        finally:
            self._owner.position.attempt = self._attempt_number

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {}  # they were taken when the stream was opened

    async def _attempt(self) -> Any:
        gate = self.actor.gate
        if gate is None:
            return await self._timed_attempt()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(gate.admit(self._owner))
            first = await self._timed_attempt()
            self._owner.inside = stack.pop_all()  # the rest of the stream comes from this instance, too
            return first

    def _run_body(self) -> Awaitable[Any]:
        self._attempt_number = self._owner.position.attempt
        return _begin(aiter(self._owner.begin()))

    async def _fall_back(self, error: Exception) -> Any:
        return await _begin(_iterated(await super()._fall_back(error), self.actor.name))


async def _begin(iterator: AsyncIterator[Any]) -> tuple[AsyncIterator[Any], Any]:
    try:
        return iterator, await anext(iterator, _END)
    except BaseException:
        await close_stream(iterator)
        raise


def _iterated(value: Any, name: str) -> AsyncIterator[Any]:
    """Return the values that a fallback gives."""
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


def _nothing() -> None:
    return None
