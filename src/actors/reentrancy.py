"""Re-entrancy: a node whose places are all held by handlers that wait for a place of the same node."""

from typing import TYPE_CHECKING
from weakref import ref

from .._errors import ReentrantCallError

if TYPE_CHECKING:
    from .crew import Member
    from .frame import Frame
    from .node_actor import NodeActor
    from .places import Places


def refuse_if_endless(actor: "NodeActor", frame: "Frame") -> None:
    """Fail a frame that has begun to wait at shared places, if nobody will ever leave one of them.

    That is so if each place is held by a handler that has started a run which waits here. It takes a frame that begins
    to wait to complete such a circle, so this is the moment to look; and it is seen only where the circle leads
    through one limit: two nodes that wait for each other's places are not.
    """
    places = actor.places
    if frame.state != "running" or actor not in frame.queues() or not _holders(frame, places):
        return
    frames = [other for reference in places.nested or () if (other := reference()) is not None]
    waiting = [other for other in frames if other is not frame and _waits(other, places)] + [frame]
    places.nested = [ref(other) for other in waiting]
    holders: set[Member] = set()
    for other in waiting:
        holders |= _holders(other, places)
    if len(holders) >= places.limit:
        actor.failed += 1
        frame.fail(_error(actor, frame), actor)


def _waits(frame: "Frame", places: "Places") -> bool:
    return frame.state == "running" and any(actor.places is places for actor in frame.queues())


def _holders(frame: "Frame", places: "Places") -> "set[Member]":
    """Return the workers that hold one of the places in a handler around the frame."""
    holders: set[Member] = set()
    while frame.parent is not None:
        caller, frame = frame.crew.caller, frame.parent
        if caller is not None and caller.places is places:
            # It may have ended without waiting for what it started; then it holds nothing.
            holders.update(worker for worker in frame.crew.workers if worker.is_in(frame, caller))
    return holders


def _error(actor: "NodeActor", frame: "Frame") -> ReentrantCallError:
    limit = actor.places.limit
    chain = [_place(actor, frame)]
    inner = frame
    while inner.parent is not None:
        caller, inner = inner.crew.caller, inner.parent
        if caller is not None:
            chain.insert(0, _place(caller, inner))
    held = "the only place is" if limit == 1 else f"all {limit} places are"
    return ReentrantCallError(
        f"{' → '.join(chain)}: {held} held by handlers that wait, by way of a nested call, for a place of the same "
        "node, which would never end; call the graph inside the graph instead of running it inside the node, move "
        f"the nested call to a node without `concurrency`, or set a `concurrency` above {limit}"
    )


def _place(actor: "NodeActor", frame: "Frame") -> str:
    return f"node {actor.name!r} of graph {frame.layout.name!r}"
