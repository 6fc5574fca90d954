"""Detached steps: the first step of a call, done elsewhere, such as on a device, with no task that waits."""

import asyncio
from collections.abc import Awaitable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from .._errors import NodeCancelledError
from .frame import foreign_cancel
from .invocation import OutsideCall, abandon, executed
from .own_loops import Request

if TYPE_CHECKING:
    from .frame import Frame
    from .node_actor import NodeActor
    from .worker import Worker, WorkerGroup


# DetachedStep: the first step of a call, carried out somewhere else, such as on a device. It needs no task to wait in.
#
# A worker would only hand the step over and wait for the result, and making its task costs more than all else that a
# call does on the loop. So the result itself carries the frame on: to its end, or to workers for the steps that follow.


class DetachedCall(OutsideCall, Protocol):
    """An execution that no worker waits for.

    Attributes:
        returned: whether it is over.
    """

    returned: bool

    def withdraw(self) -> None:
        """Nobody waits for it any more: it need not begin."""
        ...


class Carrier(Protocol):
    """Carries out the executions of a node somewhere else, on behalf of the event loop."""

    def __call__(
        self, worker: "Worker", actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Awaitable[Any]:
        """Carry out one, while a worker waits for it."""
        ...

    def begin(
        self,
        detached: "DetachedStep",
        actor: "NodeActor",
        frame: "Frame",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "DetachedCall | Request[Any, Any] | None":
        """Begin with one for which no worker waits; it settles `detached` when it is over, later and on the loop.

        Returns:
            None if that takes a worker, because something else has to be waited for first.
        """
        ...


class DetachedStep:
    """The first step of a frame that has a group to itself, on its way elsewhere and back.

    It has what is asked of a future by those who settle one, and takes its place.
    """

    __slots__ = ("_actor", "_began", "_call", "_frame", "_group", "_is_left", "_is_over")

    def __init__(self, group: "WorkerGroup", actor: "NodeActor", frame: "Frame") -> None:
        self._group = group
        self._actor = actor
        self._frame: Frame | None = frame
        self._call: DetachedCall | Request[Any, Any] | None = None
        self._began = perf_counter()
        self._is_over = False
        self._is_left = False

    def begin(self, carrier: Carrier) -> bool:
        """Hand the step over, whose place is taken; returns False if only a worker can."""
        frame, actor = self._frame, self._actor
        assert frame is not None
        try:
            args, kwargs = actor.arguments(frame.values)
            self._call = carrier.begin(self, actor, frame, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is its item's outcome
            # Not now: a caller whose calls fail at once would never let the loop run others.
            self._group.loop.call_soon(self.set_exception, error)
            return True
        return self._call is not None

    def leave(self) -> None:
        """The frame has ended, and waits for nothing any more."""
        self._is_over = self._is_left = True
        if self._call is not None:
            self._call.withdraw()
        actor, _ = self._over()
        actor.limiter.release()

    def done(self) -> bool:
        """Whether nobody waits for the result any more."""
        return self._is_over

    def cancelled(self) -> bool:
        """Whether the frame has ended before the step did; not after `cancel`, which fails it. On any thread."""
        return self._is_left

    def cancel(self) -> bool:
        """The step will not be carried out; returns whether somebody waits for it."""
        if self._is_over:
            return False
        self.set_exception(NodeCancelledError(f"node {self._actor.name!r} was given up by what carries it out"))
        return True

    def set_result(self, value: Any) -> None:
        """Carry the frame on: to its end, or to a worker for the steps that follow."""
        actor, frame = self._over()
        actor.completed += 1
        if actor.ends_line:
            actor.limiter.release()
            frame.end_with(value)
            return
        frame.values[actor.out] = value
        for slot in actor.reads:
            frame.release(slot)
        # The worker gives the place back when it has found room for the frame: until then, the node stands still.
        if actor.successor is not None:
            self._group.hire(frame, (actor.successor,), actor)
        elif actor.consumers:
            # It was the only step that waited for nothing, so at least one of these waits for nothing else.
            complete = tuple([consumer for consumer in actor.consumers if frame.input_came(consumer)])
            self._group.hire(frame, complete, actor)
        else:
            actor.limiter.release()
            frame.let_go()

    def set_exception(self, error: BaseException) -> None:
        """End the frame."""
        if not self._is_over:
            actor, frame = self._over()
            actor.failed += 1
            frame.fail(foreign_cancel(error) if isinstance(error, asyncio.CancelledError) else error, actor)
            actor.limiter.release()

    def _over(self) -> "tuple[NodeActor, Frame]":
        frame, actor, call = self._frame, self._actor, self._call
        assert frame is not None
        self._is_over = True
        self._frame = self._call = None  # whoever settles this still holds it
        self._group.detached = None
        # None: it could not even begin. And nothing runs outside of the loop for what is asked of an actor.
        if call is not None and not isinstance(call, Request) and not call.returned:
            abandon(call, actor)
        executed(actor, self._began, frame)
        return actor, frame
