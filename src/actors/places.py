"""Places: how many items may be in flight in a node, and who comes next when one leaves."""

from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from .frame import Frame
    from .node_actor import NodeActor

# "No limit" is a number too, so that the hot path has one rule and no branch.
UNLIMITED = 1 << 60


class Places:
    """The free places of one node, of one call site or (`shared`) of all that a limit covers.

    Invariant: while a place is free, no inbox behind these places holds a frame. So whoever finds `free > 0` may
    take a place without looking at any queue, and order is kept.

    `free` may be negative: a thread that nobody waits for any more still holds its place, while the worker that left
    it gives back one too (see `owe`).
    """

    __slots__ = ("free", "limit", "nested", "shared", "waiting")

    def __init__(self, limit: int = UNLIMITED, *, shared: bool = False) -> None:
        self.limit = limit
        self.shared = shared
        self.free = limit
        # The actors whose inbox is not empty, each once: they take turns item by item. A list, because they are few and
        # an empty deque takes 760 bytes, of which an idle deployment has no use.
        self.waiting: list[NodeActor] = []
        # The frames that waited here at the last look while a handler around them held one of these places.
        self.nested: list[ref[Frame]] | None = None

    @property
    def in_flight(self) -> int:
        """Places taken now."""
        return self.limit - self.free

    def release(self) -> None:
        """Give a place back: the next queued frame gets it, if there is one."""
        waiting = self.waiting
        if not waiting or self.free < 0:
            self.free += 1
            return
        actor = waiting[0]
        inbox = actor.inbox
        frame = inbox.get_nowait()
        if not inbox.count:
            del waiting[0]
        elif len(waiting) > 1:
            waiting.append(waiting.pop(0))
        # `Frame.dequeued` and `Crew.enqueue` written out, for a frame that waited nowhere else: whatever waits for a
        # place comes by here.
        if frame.further_queues:
            frame.dequeued(actor)
        else:
            frame.queued_at = None
        crew = frame.crew
        crew.ready.append((actor, frame))
        if not crew.armed:
            crew.arm()

    def owe(self) -> None:
        """Hold one place more, for a thread that runs on after its worker has left; `release` ends it."""
        self.free -= 1
