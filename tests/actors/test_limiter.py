"""The hand-over of places between actors with inboxes, against plain lists: the frames that run, wait and come next."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, cast

from hypothesis import stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.actors.channel import Channel
from penstock.actors.frame import Frame, Layout, Listener
from penstock.actors.node_actor import Limiter, NodeActor
from penstock.actors.policy import Policy
from penstock.actors.worker import WorkerGroup
from penstock.testing import wait_quiescent
from tests.loops import LOOPS, by_loop


class OneStep:
    """The layout of a graph with one node."""

    name = "graph"
    is_line = True
    blank = (None,)
    countdown: ClassVar[list[int]] = []
    readers: ClassVar[list[int]] = []
    sinks = 1

    def result(self, values: list[Any]) -> Any:
        return values[0]


class RecordingGroup(Listener):
    """Stands for the workers: records which frame got a place in which actor."""

    armed = True  # no worker needs a callback

    def __init__(self) -> None:
        self.running: list[tuple[NodeActor, Frame]] = []

    @property
    def ready(self) -> list[tuple[NodeActor, Frame]]:
        return self.running

    def enqueue(self, actor: NodeActor, frame: Frame) -> None:
        self.running.append((actor, frame))

    def cancel_workers(self, frame: Frame) -> int:
        return sum(other is frame for _, other in self.running)

    def frame_done(self, frame: Frame) -> None: ...

    def frame_settled(self, frame: Frame) -> None: ...


class PlacesMachine(RuleBasedStateMachine):
    """Frames come to actors that share places, run, end or are cancelled; the loop runs only if a rule lets it."""

    new_loop: Callable[[int], asyncio.AbstractEventLoop]

    @initialize(
        seed=st.integers(0, 1000),
        limit=st.integers(1, 3),
        capacities=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    )
    def open(self, seed: int, limit: int, capacities: list[int]) -> None:
        self.loop = self.new_loop(seed)
        self.limiter = Limiter(limit)
        self.group = RecordingGroup()
        self.actors = [
            NodeActor(f"node {index}", "graph", index, Policy(), self.limiter, Channel(capacity))
            for index, capacity in enumerate(capacities)
        ]
        self.capacities = capacities
        self.inboxes: dict[NodeActor, list[Frame]] = {actor: [] for actor in self.actors}
        self.lines: dict[NodeActor, list[Frame]] = {actor: [] for actor in self.actors}
        self.turns: list[NodeActor] = []  # actors whose inbox has frames, in the order of service
        self.running: list[tuple[NodeActor, Frame]] = []
        self.owed = 0
        self.frames: list[Frame] = []
        self.producers: dict[asyncio.Task[None], tuple[NodeActor, Frame]] = {}

    @property
    def free(self) -> int:
        return self.limiter.limit - len(self.running) - self.owed

    @rule(number=st.integers(0, 2), priority=st.sampled_from([0, 0, 1]), run=st.booleans())
    def a_frame_comes(self, number: int, priority: int, run: bool) -> None:
        actor = self.actors[number % len(self.actors)]
        group = cast(WorkerGroup, self.group)
        frame = Frame(cast(Layout, OneStep()), (), group, self.group, len(self.frames), None)
        frame.priority = priority
        self.frames.append(frame)
        if not actor.enter(frame):
            assert not self.model_enter(actor, frame)
            self.producers[self.loop.create_task(self.wait_for_room(actor, frame))] = (actor, frame)
        else:
            assert self.model_enter(actor, frame)
        if run:
            self.come_to_rest()

    async def wait_for_room(self, actor: NodeActor, frame: Frame) -> None:
        if frame.state == "running" and not self.model_enter(actor, frame):
            self.lines[actor].append(frame)
        try:
            await actor.queue(frame)
        except asyncio.CancelledError:
            if frame in self.lines[actor] or frame in self.inboxes[actor]:
                self.model_withdraw(actor, frame)
            raise

    def model_enter(self, actor: NodeActor, frame: Frame) -> bool:
        if self.free > 0:
            self.running.append((actor, frame))
        elif len(self.inboxes[actor]) < self.capacities[actor.index]:
            self.put(actor, frame)
        else:
            return False
        return True

    def put(self, actor: NodeActor, frame: Frame) -> None:
        inbox = self.inboxes[actor]
        inbox.append(frame)
        inbox.sort(key=lambda frame: -frame.priority)
        if actor not in self.turns:
            self.turns.append(actor)

    def left(self, actor: NodeActor) -> None:
        """A frame has left the inbox of an actor, or the line before it: the next frame in line moves in."""
        line, inbox = self.lines[actor], self.inboxes[actor]
        line.sort(key=lambda frame: -frame.priority)
        cancelled = [frame for task, (_, frame) in self.producers.items() if task.cancelling()]
        while line and len(inbox) < self.capacities[actor.index]:
            frame = line.pop(0)
            if frame not in cancelled:
                self.put(actor, frame)

    def model_withdraw(self, actor: NodeActor, frame: Frame) -> None:
        for queue in (self.inboxes[actor], self.lines[actor]):
            if frame in queue:
                queue.remove(frame)
                self.left(actor)
        if not self.inboxes[actor] and actor in self.turns:
            self.turns.remove(actor)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 10), outlives_its_worker=st.booleans())
    def a_frame_leaves(self, number: int, outlives_its_worker: bool) -> None:
        entry = self.running.pop(number % len(self.running))
        self.group.running.remove(entry)
        if outlives_its_worker:  # its thread keeps the place until `a_thread_returns`
            self.owed += 1
            self.limiter.take_over_limit()
        self.hand_over()
        self.limiter.release()

    @precondition(lambda self: self.owed)
    @rule()
    def a_thread_returns(self) -> None:
        self.owed -= 1
        self.hand_over()
        self.limiter.release()

    def hand_over(self) -> None:
        """A place was given back: the next actor in turn gets it, if a place is free now."""
        if self.free <= 0 or not self.turns:
            return
        actor = self.turns.pop(0)
        frame = self.inboxes[actor].pop(0)
        self.running.append((actor, frame))
        self.left(actor)
        if self.inboxes[actor] and actor not in self.turns:
            self.turns.append(actor)

    @precondition(lambda self: any(self.inboxes.values()) or any(self.lines.values()))
    @rule(number=st.integers(0, 10))
    def a_queued_frame_is_cancelled(self, number: int) -> None:
        waiting = [(actor, frame) for actor in self.actors for frame in self.inboxes[actor] + self.lines[actor]]
        actor, frame = waiting[number % len(waiting)]
        frame.cancel()
        assert frame.queues == ()
        self.model_withdraw(actor, frame)

    @precondition(lambda self: self.producers)
    @rule(number=st.integers(0, 10))
    def a_producer_is_cancelled(self, number: int) -> None:
        [*self.producers][number % len(self.producers)].cancel()

    @rule()
    def come_to_rest(self) -> None:
        self.loop.run_until_complete(wait_quiescent())
        for task in [task for task in self.producers if task.done()]:
            self.producers.pop(task)
            if not task.cancelled():
                task.result()
        in_line = [frame for line in self.lines.values() for frame in line]
        for frame in self.frames:
            waits_at = [actor for actor in self.actors if frame in self.inboxes[actor] or frame in self.lines[actor]]
            assert [*frame.queues] == waits_at
        assert sorted(frame.item for _, frame in self.producers.values()) == sorted(frame.item for frame in in_line)

    @invariant()
    def places_and_inboxes_are_as_expected(self) -> None:
        assert self.group.running == self.running
        assert len(self.running) <= self.limiter.limit
        assert self.limiter.in_flight == len(self.running) + self.owed
        assert list(self.limiter.waiting) == self.turns
        for actor, capacity in zip(self.actors, self.capacities, strict=True):
            assert len(actor.inbox) == len(self.inboxes[actor]) <= capacity
            # While a place is free, no frame waits: so a frame that finds a free place may take it without checking the
            # queues.
            assert self.limiter.free <= 0 or not len(actor.inbox)

    def teardown(self) -> None:
        try:
            self.come_to_rest()
            while self.running or self.owed:
                if self.owed:
                    self.a_thread_returns()
                else:
                    self.a_frame_leaves(0, False)
                self.come_to_rest()
            assert not any(self.inboxes.values())
            assert not self.producers
            assert self.limiter.free == self.limiter.limit
        finally:
            self.loop.close()


@by_loop
def test_places_pass_from_frame_to_frame_in_turn(loop: str) -> None:
    class OnLoop(PlacesMachine):
        new_loop = staticmethod(LOOPS[loop])

    stateful.run_state_machine_as_test(OnLoop)
