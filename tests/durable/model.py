"""What a store of durable runs must do, as a plain program: the oracle of `test_stores`.

Time is either long ago or far away, so the model needs no clock.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.durable.store import (
    EVENTS_KEPT,
    Answer,
    Batch,
    Cancel,
    Change,
    Entry,
    Event,
    NewRun,
    Owner,
    Question,
    Resume,
    Run,
    State,
    Store,
)

ENDED, WAITING = {"finished", "failed", "cancelled"}, {"queued", "asking", "sleeping"}
LONG = 1000.0  # seconds: what ends after this does not end, and what was due before this is due
KEYS, THREADS, GRAPHS = ["a", "b", "c", "d", "é", "e" * 512], [None, None, "t", "u"], ["g", "h"]


@dataclass
class Kept:
    """A run of the model."""

    run: int
    key: str
    graph: str
    state: str
    thread: str | None
    turn: int
    keep_seconds: float | None
    epoch: int = 0
    owner: str | None = None
    lease_is_over: bool = False
    is_due: bool = False
    cancel: bool = False
    lost: int = 0
    is_expired: bool = False
    error: bytes | None = None
    result: int | None = None
    entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    questions: dict[str, Question] = field(default_factory=dict[str, Question])
    events: dict[int, Event] = field(default_factory=dict[int, Event])

    def leave(self, state: str, *, is_due: bool = False) -> None:
        self.state, self.is_due, self.lease_is_over = state, is_due or state == "queued", False
        self.is_expired = state in ENDED and self.keep_seconds is not None and self.keep_seconds < 0

    def may_be_taken(self) -> bool:
        """Whether it waits for a worker, its thread aside."""
        return self.lease_is_over if self.state == "running" else self.state in WAITING and self.is_due


class Model:
    """All runs."""

    def __init__(self) -> None:
        self.runs: dict[str, Kept] = {}
        self.gone: set[str] = set()  # owners that have died

    def of_thread(self, thread: str | None) -> list[Kept]:
        found = [run for run in self.runs.values() if thread is not None and run.thread == thread]
        return sorted(found, key=lambda run: run.turn)

    def drop(self, key: str, states: set[str], *, expired: bool = False) -> int:
        run = self.runs.get(key)
        dropped = [] if run is None else self.of_thread(run.thread) or [run]
        if not all(one.state in states and (one.is_expired or not expired) for one in dropped):
            return 0
        for one in dropped:
            del self.runs[one.key]
        return len(dropped)

    def begin(self, new: NewRun, number: int) -> Kept:
        self.drop(new.key, ENDED, expired=True)
        if new.key in self.runs:
            return self.runs[new.key]
        before = [run for run in self.of_thread(new.thread) if run.state not in ENDED]
        if before and new.busy == "refuse":
            return before[0]
        if new.busy == "cancel":
            for run in before:
                self.cancel(run)
            before = [run for run in before if run.state not in ENDED]
        turn = 0 if new.thread is None else max([0, *(run.turn for run in self.of_thread(new.thread))]) + 1
        made = self.runs[new.key] = Kept(number, new.key, new.graph, "queued", new.thread, turn, new.keep_seconds)
        made.entries = {entry.seq: entry for entry in new.entries}
        made.is_due = True
        if new.wakes_at is not None and new.wakes_at > 0:
            made.state, made.is_due = "sleeping", False
        elif new.owner is not None and not before:
            made.state, made.is_due, made.epoch, made.owner = "running", False, 1, new.owner
            made.lease_is_over = new.lease_seconds < 0
        return made

    def claimable(self, graphs: Sequence[str], key: str | None, without: Sequence[int]) -> list[Kept]:
        for one in list(self.runs) if key is None else ():
            self.drop(one, ENDED, expired=True)
        for run in self.runs.values():
            run.lease_is_over |= run.state == "running" and run.owner in self.gone
        return [
            run
            for run in self.runs.values()
            if run.may_be_taken() and run.graph in graphs and key in (None, run.key) and run.run not in without
            if not any(one.turn < run.turn and one.state not in ENDED for one in self.of_thread(run.thread))
        ]

    def claim(self, run: Kept, owner: str, lease_seconds: float) -> None:
        run.lost += run.state == "running"
        run.state, run.owner, run.lease_is_over, run.is_due = "running", owner, lease_seconds < 0, False
        run.epoch += 1

    def write(self, batch: Batch) -> str | None:
        run = next((run for run in self.runs.values() if run.run == batch.run), None)
        if run is None or run.epoch != batch.epoch:
            return None
        if run.state != "running":
            return None if batch.state is None else run.state
        run.entries = {**{entry.seq: entry for entry in batch.entries}, **run.entries}
        run.entries = {seq: entry for seq, entry in run.entries.items() if seq not in batch.drops}
        run.questions = {**{one.token: one for one in batch.questions}, **run.questions}
        run.events = {**{event.first: event for event in batch.events}, **run.events}
        last = max((event.first + event.size for event in run.events.values()), default=0)
        run.events = {
            first: one for first, one in run.events.items() if not batch.events or first + one.size > last - EVENTS_KEPT
        }
        if batch.entries:
            run.lost = 0
        if batch.state is None:
            run.lease_is_over = batch.lease_seconds < 0
            return "running"
        state: str = batch.state
        answers = sum(one.answer is not None for one in run.questions.values())
        if state in WAITING and run.cancel:
            state = "cancelled"
        elif state in ("asking", "sleeping") and answers > batch.answers:
            state = "queued"
        run.leave(state, is_due=state in ("asking", "sleeping") and batch.wakes_at is not None and batch.wakes_at < 0)
        run.error, run.result = batch.error, batch.result
        return state

    def cancel(self, run: Kept) -> None:
        run.lease_is_over |= run.state == "running" and run.owner in self.gone
        if run.state in WAITING:
            run.leave("cancelled")
        elif run.state == "running" and run.lease_is_over:
            run.epoch += 1
            run.leave("cancelled")
        elif run.state == "running":
            run.cancel = True

    def change(self, key: str, change: Change) -> Kept | None:
        run = self.runs.get(key)
        if run is None:
            return None
        match change:
            case Answer(token, answer):
                asked = run.questions.get(token)
                if run.state not in ENDED and asked is not None and asked.answer is None:
                    run.questions[token] = asked._replace(answer=answer)
                    if run.state == "asking":
                        run.leave("queued")
            case Cancel():
                self.cancel(run)
            case Resume(forget):
                if run.state in ("failed", "cancelled"):
                    run.cancel, run.lost, run.error = False, 0, None
                    run.leave("queued")
                if run.state == "queued":
                    for seq in set(forget) & run.entries.keys():
                        run.entries[seq] = run.entries[seq]._replace(kind="forgotten")
        return run


def seen(run: Run | Kept | None) -> Any:
    """Returns what a run of a store and a run of the model have in common."""
    if run is None:
        return None
    questions = run.questions.values() if isinstance(run.questions, dict) else run.questions
    asked = sorted((one.token, one.path, one.question, one.type, one.answer) for one in questions)
    return (
        run.run, run.key, run.graph, run.state, run.thread, run.turn, run.epoch, run.owner, run.cancel, run.lost,
        run.error, run.result, asked,
    )  # fmt: skip


class Play:
    """One random sequence of calls on a store and on the model.

    Args:
        store: an empty store.
        seed: which sequence.
    """

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.model = store, Model()
        self.chosen = random.Random(seed)
        self.owners: list[Any] = [Owner(), Owner(), "of another machine"]
        self.leases: list[tuple[int, int]] = []  # runs and epochs that some owner has or had
        self.tokens: list[tuple[str, str]] = []  # of keys, with the tokens of their questions
        self.told: list[str] = []  # what was called, for a failure

    async def step(self) -> None:
        kinds, weights = ["begin", "claim", "write", "change", "die", "delete"], [4, 4, 9, 7, 2, 1]
        kind = self.chosen.choices(kinds, weights)[0]
        self.told.append(kind)
        await getattr(self, kind)()

    def owner(self) -> str:
        owner = self.chosen.choice(self.owners)
        return owner if isinstance(owner, str) else str(owner.name)

    def lease(self) -> float:
        return self.chosen.choice([LONG, LONG, -1.0])

    async def begin(self) -> None:
        pick = self.chosen.choice
        new = NewRun(
            key=pick(KEYS), graph=pick(GRAPHS), plan="p", thread=pick(THREADS),
            busy=pick(["queue", "refuse", "cancel"]), owner=pick([None, self.owner()]), lease_seconds=self.lease(),
            wakes_at=pick([None, None, -1.0, 1e12]), keep_seconds=pick([None, LONG, -1.0]),
            entries=[Entry(0, "", "arguments", 0, 0.0, b"arguments")],
        )  # fmt: skip
        self.told.append(repr(new))
        found = await self.store.begin(new)
        expected = self.model.begin(new, found.run)
        assert seen(found) == seen(expected)
        if found.state == "running":
            self.leases.append((found.run, found.epoch))
        if pick([True, False]) and not expected.is_expired:  # as after a lost connection
            assert seen(await self.store.begin(new)) == seen(expected)

    async def claim(self) -> None:
        pick = self.chosen.choice
        graphs, key, limit = pick([["g"], ["g", "h"], []]), pick([None, None, *KEYS]), pick([1, 2, 50])
        without = pick([[], [], [run.run for run in self.model.runs.values()][:2]])
        owner, lease_seconds = self.owner(), self.lease()
        self.told.append(repr((graphs, key, limit, without, owner, lease_seconds)))
        found = await self.store.claim(graphs, owner, lease_seconds, limit, key=key, without=without)
        possible = {run.run: run for run in self.model.claimable(graphs, key, without)}
        assert {run.run for run in found} <= possible.keys()
        # Of runs of a thread, which one is free may change with each claim, but only for the next call.
        assert len(found) == min(limit, len(possible))
        ranks = {"running": 0, "sleeping": 1, "asking": 2, "queued": 3}
        taken = sorted(ranks[possible[run.run].state] for run in found)
        assert taken == sorted(ranks[run.state] for run in possible.values())[: len(taken)]
        for run in found:
            self.model.claim(possible[run.run], owner, lease_seconds)
            assert seen(run) == seen(possible[run.run])
            self.leases.append((run.run, run.epoch))

    async def write(self) -> None:
        held = [(run.run, run.epoch) for run in self.model.runs.values() if run.state == "running"]
        leases = (held if held and self.chosen.random() < 0.7 else self.leases[-8:]) or [(1, 1)]
        batches = {run: self.batch(run, epoch) for run, epoch in self.chosen.choices(leases, k=2)}
        self.told.append(repr(batches))
        written = await self.store.write([*batches.values()])
        expected = [self.model.write(batch) for batch in batches.values()]
        assert [one.state for one in written] == expected
        if self.chosen.random() < 0.5:  # as after a lost connection
            again = await self.store.write([*batches.values()])
            assert [one.state for one in again] == expected

    def batch(self, run: int, epoch: int) -> Batch:
        pick = self.chosen.choice
        key = next((one.key for one in self.model.runs.values() if one.run == run), "none")
        begin = self.chosen.randrange(1, 6)
        entries = [Entry(seq, f"p{seq}", "result", seq, 1.5, b"v" * seq, pick([None, b"parts"])) for seq in (begin, 7)]
        token = f"{key} {self.chosen.randrange(4)}"
        self.tokens.append((key, token))
        known = [one for one in self.model.runs.values() if one.run == run]
        last = max((one.first + one.size for one in known[0].events.values()), default=1) if known else 1
        states: list[State | None] = [
            *[None] * 5,
            "queued",
            "asking",
            "asking",
            "sleeping",
            "finished",
            "failed",
            "cancelled",
        ]
        state = pick(states)
        return Batch(
            run=run, epoch=epoch, lease_seconds=self.lease(), entries=pick([[], entries]), drops=pick([[], [], [2, 3]]),
            questions=pick([[], [Question(token, "ask", b"?", pick([None, b"bool"]), 2.0)]]),
            events=pick([[], [Event(last, pick([1, 3, 400, 999, 1000]), b"events")]]), state=state,
            answers=pick([0, 0, 5]), wakes_at=pick([-1.0, 1e12] if state == "sleeping" else [None, -1.0, 1e12]),
            error=b"error" if state == "failed" else None, result=7 if state == "finished" else None,
        )  # fmt: skip

    async def change(self) -> None:
        pick = self.chosen.choice
        key, token = pick(self.tokens[-8:]) if self.tokens and self.chosen.random() < 0.7 else (pick(KEYS), "none")
        answer = Answer(token, pick([b"yes", b"no"]))
        changes: list[Change] = [answer, answer, answer, Cancel(), Resume(), Resume([1, 7])]
        change = pick(changes)
        self.told.append(repr((key, change)))
        expected = self.model.change(key, change)
        assert seen(await self.store.change(key, change)) == seen(expected)
        if self.chosen.random() < 0.5:
            assert seen(await self.store.change(key, change)) == seen(expected)

    async def die(self) -> None:
        """Lets an owner die, whose leases are over then, and another one come."""
        owner = self.owners.pop(0) if isinstance(self.owners[0], Owner) else None
        if owner is not None:
            self.model.gone.add(owner.name)
            self.owners.insert(1, Owner())

    async def delete(self) -> None:
        keys = self.chosen.sample(KEYS, 2)
        states = self.chosen.choice([ENDED, WAITING | ENDED])
        expected = sum(self.model.drop(key, states) for key in keys)
        assert await self.store.delete(keys, states=tuple(states)) == expected  # type: ignore[arg-type]

    async def compare(self) -> None:
        """Compares everything that is kept."""
        listed = {run.key: run for run in await self.store.list(limit=100)}
        assert listed.keys() == self.model.runs.keys()
        for key, run in self.model.runs.items():
            assert seen(await self.store.read(key)) == seen(run)
            still_open = {token: one for token, one in run.questions.items() if one.answer is None}
            assert seen(listed[key]) == seen(replace(run, questions=still_open))
            entries = [run.entries[seq] for seq in sorted(run.entries)]
            assert list(await self.store.load(run.run)) == entries
            assert list(await self.store.load(run.run, [7, 0, 99])) == [one for one in entries if one.seq in (0, 7)]
            assert listed[key].stored_bytes == sum(
                len(one.path) + len(one.value or b"") + len(one.parts or b"") for one in entries
            )
            events = [run.events[first] for first in sorted(run.events)]
            assert listed[key].last_event == max((one.first + one.size - 1 for one in events), default=0)
            after = self.chosen.randrange(3000)
            rest = [one for one in events if one.first + one.size - 1 > after]
            assert list(await self.store.events(run.run, after, 2)) == rest[:2]
