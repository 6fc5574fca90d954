"""`map_each` over streams: a window of frames of its body, and several stages that run as one program."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from .._errors import add_note
from ..actors.execution import TracedExecution
from ..actors.frame import Frame, State, UnreadBuffer
from ..actors.generators import GeneratorTask
from ..actors.node_actor import Invoke, NodeActor
from ..actors.stream_buffer import DEFAULT_CAPACITY, Barrier, BarrierBuffer, Reader, StreamBuffer
from ..actors.worker import Worker
from ..telemetry import logs, spans
from .bodies import _Bodies, _ListMap, buffer_of
from .checkpoint import StepCheckpoint
from .control import Control, OnError, Outcome, failed_item
from .program import Wired
from .source import ReorderWindow


class StreamMap(_Bodies):
    """Runs a body for each value of a stream, or of several streams in step, a bounded number at a time.

    A value counts in the window from before it is taken until its result is passed on, in its turn. So the stream waits
    when the window is full, and no node waits.
    """

    keeps_unread = False  # whether the stream knows which of its results no step has begun to read
    has_stages = False  # whether this object runs several stages as one
    drains = False  # whether all items before a barrier leave before an item behind it starts, also without state

    def __init__(
        self,
        wired: Wired,
        parent: Frame,
        inputs: list[StreamBuffer[Any]],
        outside: tuple[Any, ...],
        control: Control,
        actor: NodeActor,
        place: StepCheckpoint | None,
    ) -> None:
        super().__init__(wired, parent, outside, actor.name)
        self._needs_no_worker = len(wired.entries) == 1 and wired.entries[0].ends_line
        self._inputs = inputs
        # For a call that is saved: the streams with barriers; and the barriers that wait for their turn.
        self._barriers_in = [one for one in inputs if place is not None and isinstance(one, BarrierBuffer)]
        self._barriers: deque[tuple[int, Barrier]] = deque()
        self._place = place
        self._on_error: OnError = control.on_error
        self._actor = actor  # counts the items
        limit = min(control.limit, wired.entries[0].bound._most_begun) if self._needs_no_worker else control.limit
        self._window = ReorderWindow(parent.group.loop, limit, parent.fail, None, ordered=True)
        self.frames = self._window.frames

    def state(self) -> Any:
        """Return how many values were taken, at a barrier: the index of the next item."""
        return {"count": self._window.submitted}

    @property
    def holders(self) -> Sequence[Any]:
        """The objects with the states of the stages."""
        return [self]

    def restore(self, state: Any) -> None:
        """Go on with the next item."""
        self._window.go_on_from(state["count"])

    async def results(self) -> AsyncGenerator[Any, None]:
        """Yield the results, in the order of the values. Unless errors are allowed, the first error ends the stream."""
        window, inputs, parent, actor = self._window, self._inputs, self._parent, self._actor
        first, others = inputs[0], inputs[1:]
        goes_on = self._on_error != "raise"
        self._span = None if parent.span is None else spans.present()  # the span of the step that drives this
        parent.body_begun(self.stop)
        try:
            while True:
                has_failed = self._stopped or (window.failed and not goes_on)
                room = 0 if has_failed else window.limit - window.submitted
                while room and first.held and (not others or all(other.held for other in others)):
                    values = (first.pass_on(), *[other.pass_on() for other in others]) if others else (first.pass_on(),)
                    self._start(values, window.submitted, window)
                    del values  # as below
                    window.submitted += 1
                    room -= 1
                if self._barriers_in and await self._pass_barriers():
                    continue
                if (frame := window.take()) is not None:
                    if self.has_stages or frame.unread:
                        await self.passed(frame)
                    if goes_on:
                        for result in self._outcome(frame):
                            yield result
                            del result
                    else:
                        actor.completed += frame.state == "done"
                        yield frame.outcome()
                    del frame  # else its result would stay alive while this waits for the next item
                    continue
                ended = next((one for one in inputs if one.ended and not one.held), None)
                if window.frames or ended is None:
                    await window.wait(self._asked(room, ended))
                elif ended.error is not None:
                    await ended.get()  # raises it
                else:
                    return
        finally:
            parent.body_ended(self.stop)
            await self._close()

    def _asked(self, room: int, ended: StreamBuffer[Any] | None) -> Sequence[StreamBuffer[Any]]:
        """Return the streams whose next value could begin as soon as it comes."""
        return [one for one in self._inputs if not one.held] if room and ended is None else ()

    async def _pass_barriers(self) -> bool:
        """Take a barrier that comes next, and pass on the barriers before which all items have left.

        If the body has state, the items before a barrier leave first. Else the items behind the barrier start at once.

        Returns:
            Whether a barrier was taken, so that there may be values behind it.
        """
        place, window, inputs = self._place, self._window, self._barriers_in
        assert place is not None
        is_next = all(one.barrier is not None and not one.held for one in inputs)
        is_next = is_next and not (window.frames and (place.stop.called or self.drains))
        if is_next:
            self._barriers.append((window.submitted, await place.take(inputs)))
        while self._barriers and self._barriers[0][0] <= window.position:
            place.give(self._barriers.popleft()[1])
        return is_next

    def _outcome(self, frame: Frame) -> list[Any]:
        """Return the results for a value, where an error does not end the stream."""
        try:
            value = frame.outcome()
        except Exception as error:  # noqa: BLE001 - an error of user code is logged, and returned with on_error="return"
            actor, item = self.where_failed(frame)
            actor.failed += 1
            return failed_item(item, error, self._on_error)
        self._actor.completed += 1
        return [Outcome(frame.item, value, None)] if self._on_error == "return" else [value]

    async def passed(self, frame: Frame) -> None:
        """Note the end of an item that has unread results, or has passed several stages that run as one."""
        if frame.unread and self.keeps_unread:
            frame.pass_unread()

    def where_failed(self, frame: Frame) -> tuple[NodeActor, int]:
        """Return the step in which an item has failed, and the number of the item there."""
        return self._actor, frame.item

    async def _close(self) -> None:
        for frame in list(self.frames.values()):
            frame.cancel()
            if frame.error is not None:
                logs.warning(
                    "frame.late_failure", graph=frame.layout.name, node=None, item=frame.item, error=frame.error
                )
        self._window.clear()
        await self._unwound()


# Stages that run as one are counted, saved and found in errors as if each ran by itself.


class Stage(NamedTuple):
    """A stage of several that run as one.

    Attributes:
        actor: counts the values of the stage.
        body: returns the body of the stage, which runs alone only to find the stage in which a value fails.
    """

    actor: NodeActor
    body: Callable[[], Wired]


async def pass_on(worker: Worker, actor: NodeActor, frame: Frame) -> Any:
    """Return the stream that a stage reads, for the later stage that runs this stage as a part."""
    actor.completed -= 1  # the actor counts values, and the worker is about to count the step
    if frame.span is not None:
        with TracedExecution(frame.span, frame, actor):
            pass
    return actor.arguments(frame.values)[0][0]


class _KeepingFrame(Frame):
    """A frame that keeps the value of the stream if it fails."""

    given: Any = None

    def _end(self, state: State) -> None:
        self.given = self.values[0]
        super()._end(state)


class _StageAtWork:
    """A stage of several that run as one, for one stream.

    Attributes:
        actor: counts the values of the stage.
        left_out: how many values failed in an earlier stage, and were left out.
    """

    def __init__(self, stage: Stage, whole: "JoinedMap", parent: Frame) -> None:
        self.actor, self._body = stage
        self.left_out = 0
        self._whole = whole
        self._parent = parent
        self._outside = stage.actor.arguments(parent.values)[0][1:]

    def state(self) -> Any:
        """Return how many values the stage has taken."""
        return {"count": self._whole.state()["count"] - self.left_out}

    def restore(self, state: Any) -> None:
        """Go on with the next value. The first stage determines the value with which all stages begin."""
        if self is self._whole.holders[0]:
            self._whole.restore(state)
        self.left_out = self._whole.state()["count"] - state["count"]

    async def run(self, value: Any, item: int) -> Outcome[Any]:
        """Run the stage alone, for one value, without counting the value."""
        wired = self._body()
        outside = self._outside[: len(wired.program.plan.captures)]
        control = Control("map_each", on_error="return")
        runs = _ListMap(None, wired, self._parent, outside, control, self.actor, self.actor.name)
        outcome: Outcome[Any] = (await runs.run([value], 1, item - self.left_out))[0]
        self.actor.completed += outcome.error is not None
        self.actor.failed -= outcome.error is not None
        return outcome


class JoinedMap(StreamMap):
    """Runs one body for several stages; the arguments after the stages are the arguments of `StreamMap`."""

    frame_class = _KeepingFrame
    has_stages = True

    def __init__(self, stages: Sequence[Stage], *args: Any) -> None:
        super().__init__(*args)
        self.drains = self._on_error != "raise"
        self._stages = [_StageAtWork(stage, self, self._parent) for stage in stages]
        self._failed = 0  # the number of the stage in which the last value has failed

    @property
    def holders(self) -> Sequence[Any]:
        """The objects with the states of the stages."""
        return self._stages

    async def passed(self, frame: Frame) -> None:
        """Count a value in the stages that it has passed; find the stage in which a value failed."""
        await super().passed(frame)
        stages = self._stages
        passed = len(stages) - 1  # the last stage counts by itself
        if isinstance(frame.error, Exception):
            passed = self._failed = await self._find(frame, frame.error)
        for stage in stages[:passed]:
            stage.actor.completed += 1
        if frame.error is not None and self._on_error == "raise":  # the error ends the streams of all later stages
            for stage in stages[passed:-1]:
                stage.actor.failed += 1
                frame.error = self._parent.annotated(frame.error, stage.actor, 1)

    async def _find(self, frame: Frame, error: Exception) -> int:
        """Run the stages one by one for the value that has failed; return the number of the stage that fails."""
        assert isinstance(frame, _KeepingFrame)
        value, frame.given = frame.given, None
        for number, stage in enumerate(self._stages):
            outcome = await stage.run(value, frame.item)
            if outcome.error is not None:
                frame.error = outcome.error
                return number
            value = outcome.value
        add_note(error, "each of these stages by itself does not fail for this value")
        return len(self._stages) - 1

    def where_failed(self, frame: Frame) -> tuple[NodeActor, int]:
        """Return the stage in which an item has failed, and the number of the item there."""
        stage = self._stages[self._failed]
        for later in self._stages[self._failed + 1 :]:
            later.left_out += 1
        return stage.actor, frame.item - stage.left_out


def mapping(
    control: Control,
    body: Wired,
    place: StepCheckpoint | None = None,
    *,
    keeps_unread: bool = False,
    kind: Callable[..., StreamMap] = StreamMap,
) -> Invoke:
    """Return a function that opens the stream of a `map_each`; arguments as for `opening`.

    With `keeps_unread`, the stream knows which of its results no step has begun to read. `kind` is the class, or a
    function, that makes the object that runs the body.
    """
    keeps_unread = keeps_unread and place is None

    async def open_map(worker: Worker, actor: NodeActor, frame: Frame) -> Any:
        arguments, _ = actor.arguments(frame.values)
        readers: list[Reader[Any]] = list(arguments[: control.inputs])
        inputs = [reader.buffer for reader in readers]
        outside = tuple(arguments[control.inputs :])
        stream_map = kind(body, frame, inputs, outside, control, actor, place)
        stream_map.keeps_unread = keeps_unread
        capacity = control.ahead or DEFAULT_CAPACITY
        buffer, start = buffer_of(place, capacity, stream_map.results, readers, stream_map.holders)
        if keeps_unread:
            buffer = UnreadBuffer(capacity, frame)
        return GeneratorTask(actor, frame, buffer, start, readers, counts_values=True).open()

    return open_map
