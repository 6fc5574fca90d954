"""Stages of a stream that run as one program, and are counted, saved and found in errors as if each ran by itself."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._errors import add_note
from ..actors.execution import TracedExecution
from ..actors.frame import Frame, State
from ..actors.node_actor import NodeActor
from ..actors.worker import Worker
from .bodies import StreamMap, _ListMap
from .control import Control, Outcome
from .program import Wired


class Stage(NamedTuple):
    """One of the stages that run as one.

    Attributes:
        actor: counts its values.
        body: returns its body, which runs only to find the stage in which a value fails.
    """

    actor: NodeActor
    body: Callable[[], Wired]


async def pass_on(worker: Worker, actor: NodeActor, frame: Frame) -> Any:
    """Return the stream that a stage reads, for the later stage that it runs as a part of."""
    actor.completed -= 1  # it counts values, and the worker is about to count the step
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
    """One of the stages, for one stream.

    Attributes:
        actor: counts its values.
        left_out: how many values have failed in a stage before it, and were left out.
    """

    def __init__(self, stage: Stage, whole: "JoinedMap", parent: Frame) -> None:
        self.actor, self._body = stage
        self.left_out = 0
        self._whole = whole
        self._parent = parent
        self._outside = stage.actor.arguments(parent.values)[0][1:]

    def state(self) -> Any:
        """Return how many values it has taken."""
        return {"count": self._whole.state()["count"] - self.left_out}

    def restore(self, state: Any) -> None:
        """Go on with the next value; the first stage says with which value all begin."""
        if self is self._whole.holders[0]:
            self._whole.restore(state)
        self.left_out = self._whole.state()["count"] - state["count"]

    async def run(self, value: Any, item: int) -> Outcome[Any]:
        """Run it by itself, for one value that it does not count."""
        wired = self._body()
        outside = self._outside[: len(wired.program.plan.captures)]
        control = Control("map_each", on_error="return")
        runs = _ListMap(None, wired, self._parent, outside, control, self.actor, self.actor.name)
        outcome: Outcome[Any] = (await runs.run([value], 1, item - self.left_out))[0]
        self.actor.completed += outcome.error is not None
        self.actor.failed -= outcome.error is not None
        return outcome


class JoinedMap(StreamMap):
    """Runs one body for several stages; arguments behind the stages as of `StreamMap`."""

    frame_class = _KeepingFrame
    has_stages = True

    def __init__(self, stages: Sequence[Stage], *args: Any) -> None:
        super().__init__(*args)
        self.drains = self._on_error != "raise"
        self._stages = [_StageAtWork(stage, self, self._parent) for stage in stages]
        self._failed = 0  # the number of the stage in which the last value has failed

    @property
    def holders(self) -> Sequence[Any]:
        """What has the states of its stages."""
        return self._stages

    async def passed(self, frame: Frame) -> None:
        """Count a value in the stages that it has passed; of one that has failed, find the stage."""
        await super().passed(frame)
        stages = self._stages
        passed = len(stages) - 1  # the last one counts by itself
        if isinstance(frame.error, Exception):
            passed = self._failed = await self._find(frame, frame.error)
        for stage in stages[:passed]:
            stage.actor.completed += 1
        if frame.error is not None and self._on_error == "raise":  # it ends the streams of all that are behind
            for stage in stages[passed:-1]:
                stage.actor.failed += 1
                frame.error = self._parent.annotated(frame.error, stage.actor, 1)

    async def _find(self, frame: Frame, error: Exception) -> int:
        """Run the stages one by one for the value that has failed; return the number of the one that fails."""
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
