"""The items in flight, for a look from another thread: where each item is, and how many items each step holds.

Nothing is counted for looks while items run: each worker knows its present frame and actor.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..actors.frame import Frame
from ..actors.generators import GeneratorTask
from ..actors.node_actor import NodeActor
from ..actors.threads import Job
from ..actors.worker import Member
from ..telemetry.profiling.records import ItemLook, StepContents
from ..telemetry.spans import id_of

if TYPE_CHECKING:
    from .wiring import Wiring


def contents_of(frames: Iterable[Frame]) -> dict[int, StepContents]:
    """Return the contents of the steps that have items, by the ids of their actors.

    Args:
        frames: all items in flight.
    """
    inside = [inner for frame in frames for inner in _inside(frame)]
    working = Counter([id(detached._actor) for frame in inside if (detached := frame.detached) is not None])
    blocked = Counter[int]()
    found: dict[int, StepContents] = {}
    for member in _members(inside):
        here, at = member.position.frame, member.position.actor  # the worker may go on meanwhile
        if here is None or at is None:
            continue
        if isinstance(member, GeneratorTask):
            buffers = member.buffers
            given = max((buffer.position + len(buffer.held) for buffer in buffers), default=0)
            found[id(at)] = found.get(id(at), StepContents()).plus(
                buffered=sum(len(buffer.held) for buffer in buffers),
                capacity=sum(buffer.capacity for buffer in buffers), values=given,
            )  # fmt: skip
            working[id(at)] += 1
        else:
            (blocked if _has_no_room(here, at) else working)[id(at)] += 1
    for key in (*working, *blocked):
        found[key] = found.get(key, StepContents())._replace(working=working[key], blocked=blocked[key])
    return found


def described(frames: Mapping[Frame, float], wirings: "Iterable[Wiring]") -> Iterator[ItemLook]:
    """Yield the place of each item.

    Args:
        frames: the items, each with its age in seconds.
        wirings: the actors of all open scopes.
    """
    inner = {frame: list(_inside(frame))[-1] for frame in frames}
    places = {member.position.frame: member for member in _members(inner.values())}
    found: list[tuple[Frame, NodeActor | None, Member | None, bool]] = []
    for frame in frames:
        last = inner[frame]
        queues, member = last.queues, places.get(last)
        at = None if member is None else member.position.actor
        waits = at is None or member is None or _has_no_room(last, at) or _is_ahead(member)
        if (detached := last.detached) is not None:
            at, waits = detached._actor, False
        actor = queues[0] if waits and queues else at
        found.append((frame, actor, member, waits))
    needed = {actor for _, actor, _, _ in found}
    boxes = {
        site.actor: (wiring.id, site.drawing, site.boxes[0])
        for wiring in wirings
        for site in wiring.sites()
        if site.actor in needed
    }
    for frame, actor, member, waits in found:
        scope, drawing, step = ("", "", "") if actor is None else boxes.get(actor, ("", "", ""))
        deadline = None if frame.deadline is None else max(0.0, frame.deadline - frame.group.loop.time())
        traced = None if (span := frame.span) is None else id_of(span.parent)
        yield ItemLook(
            frame.layout.name, "" if actor is None else actor.name, frame.item, "waiting" if waits else "working",
            frames[frame], 1 if member is None else member.position.attempt, deadline=deadline,
            key="" if frame.key is None else _text_of(frame.key),
            trace="" if traced is None else f"{traced.trace_id:032x}", scope=scope, drawing=drawing, step=step,
        )  # fmt: skip


def _inside(frame: Frame) -> Iterator[Frame]:
    """Yield a frame, and the frames of the bodies that its steps run now; the last frame is where the work is."""
    left = [frame]
    for one in left:
        yield one
        bodies: Iterable[Any] = [getattr(stop, "__self__", None) for stop in one.bodies]
        found = [inner for body in bodies if body is not None for inner in list(body.frames.values())]
        left += [inner for inner in reversed(found) if inner.state == "running"]


def _members(frames: Iterable[Frame]) -> Iterator[Member]:
    """Yield the members of the groups of frames, each once."""
    groups = dict.fromkeys(frame.group for frame in frames)
    return chain.from_iterable(list(group.workers) for group in groups)


def _has_no_room(frame: Frame, actor: NodeActor) -> bool:
    """Whether a finished item is still in an actor, because the inbox after it has no room."""
    return any(queue in actor.consumers for queue in frame.queues)


def _is_ahead(member: Member) -> bool:
    return isinstance(member.outside_call, Job) and member.outside_call.is_ahead


def _text_of(key: object) -> str:
    """Return a key as text; only simple keys are shown, because `str` of others would run the user's code here."""
    return str(key) if type(key) in (str, int, bytes) else f"{hash(key):x}"
