"""What a store of durable runs keeps, and its methods: `Store`. Everything above this file is the journal's."""

import functools
import hashlib
import os
import platform
import sys
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from ..actors.accepted import OptionRule, is_text

State = Literal["queued", "running", "asking", "sleeping", "finished", "failed", "cancelled"]
Kind = Literal["begun", "result", "error", "attempt", "answer", "state", "due", "arguments", "forgotten"]
Busy = Literal["queue", "refuse", "cancel"]

ENDED: Final[tuple[State, ...]] = ("finished", "failed", "cancelled")
WAITING: Final[tuple[State, ...]] = ("queued", "asking", "sleeping")
# A run has at most this many events; older ones are deleted when newer ones are written.
EVENTS_KEPT: Final = 1000
KEY: Final = OptionRule(
    "text of 1 to 512 characters, without NUL and lone surrogates",
    lambda value: isinstance(value, str) and 0 < len(value) <= 512 and "\0" not in value and is_text(value),
)


class Entry(NamedTuple):
    """One row of a run's journal.

    Attributes:
        seq: its number, from 1; 0 is the entry with the arguments.
        path: the path of the step.
        kind: what it says; "arguments" for row 0, "forgotten" after `Resume(forget=)`: then only its parts count.
        moment: the turn of the loop in which the result was handed on, counted by the journal.
        at: when it was made, in seconds since 1970.
        value: the root of the value; None if the kind has no value.
        parts: the parts of the value that are new; None if there are none.
    """

    seq: int
    path: str
    kind: Kind
    moment: int
    at: float
    value: bytes | None = None
    parts: bytes | None = None


class Question(NamedTuple):
    """A question of a run. It is open until it has an answer, or its run has ended.

    Attributes:
        token: which question is meant; unique in the store.
        path: the path of the step that asks.
        question: the question.
        type: the type of the answer; None if any answer is taken.
        asked_at: when it was asked, in seconds since 1970.
        answer: the answer; None while there is none.
        answered_at: when it was answered, by the clock of the store; None while there is no answer.
    """

    token: str
    path: str
    question: bytes
    type: bytes | None = None
    asked_at: float = 0.0
    answer: bytes | None = None
    answered_at: float | None = None


class Event(NamedTuple):
    """Events of a run that were written together.

    Attributes:
        first: the number of the first one; the first event of a run is 1.
        size: how many there are.
        content: the events.
    """

    first: int
    size: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """A run as a store keeps it.

    Times are in seconds since 1970 by the clock of the store, `time.time()` by default. `MemoryStore` counts in the
    time of its event loop.

    Attributes:
        run: its number in the store.
        key: its key: at most 512 characters, without NUL.
        graph: the name of the graph.
        plan: the digest of the graph's plan.
        state: its state; "running" with a `lease_until` before `now` waits for another worker.
        thread: the conversation that it belongs to; None without one.
        turn: its number in the thread, from 1; 0 without a thread.
        epoch: how often a worker has claimed it.
        owner: the worker that has claimed it last.
        lease_until: when another worker may take it; None if it is not running.
        wakes_at: when it is due, for "asking" and "sleeping"; since when it waits, for "queued"; None without a time.
        cancel: whether somebody has cancelled it while it was running: its owner has to end it.
        lost: how many workers in a row have died with it, with no new entry between.
        created_at: when it was begun.
        changed_at: when its state was changed last.
        expires_at: when it may be deleted; None if it is kept.
        keep_seconds: how long it is kept after its end; None for ever.
        error: its error, as the journal has written it; None if it has not failed.
        result: the number of the entry with the result; None if there is none.
        stored_bytes: how many bytes its entries take.
        last_event: the number of its last event; 0 if there is none.
        questions: its questions, in the order in which they were asked; in a `list`, only the open ones.
        now: the time of the store when this was read.
    """

    run: int
    key: str
    graph: str
    plan: str
    state: State
    thread: str | None
    turn: int
    epoch: int
    owner: str | None
    lease_until: float | None
    wakes_at: float | None
    cancel: bool
    lost: int
    created_at: float
    changed_at: float
    expires_at: float | None
    keep_seconds: float | None
    error: bytes | None
    result: int | None
    stored_bytes: int
    last_event: int
    questions: tuple[Question, ...]
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run that begins.

    Attributes:
        key: its key.
        graph: the name of the graph.
        plan: the digest of the graph's plan.
        entries: the entry 0 with the arguments, and what a fork keeps.
        thread: the conversation that it belongs to.
        busy: if a run before it in the thread has not ended: it waits ("queue"), is not begun ("refuse"), or the others
            are cancelled ("cancel").
        owner: the worker that runs it at once; None if it is queued.
        lease_seconds: how long the worker has it.
        wakes_at: when it begins; with a time, it is sleeping until then.
        keep_seconds: how long it is kept after its end; None for ever.
    """

    key: str
    graph: str
    plan: str
    entries: Sequence[Entry]
    thread: str | None = None
    busy: Busy = "queue"
    owner: str | None = None
    lease_seconds: float = 30.0
    wakes_at: float | None = None
    keep_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What an owner writes of one run. A write has at most one batch of a run.

    Attributes:
        run: the number of the run.
        epoch: the epoch of the owner's claim.
        lease_seconds: how long the owner has the run from now on.
        entries: new entries. One that is there already is not written again.
        questions: new questions. One that is there already is not written again.
        events: new events. Those that are there already are not written again.
        drops: the numbers of entries that nothing needs any more.
        state: the state in which the owner leaves the run; None while it goes on.
        answers: how many answered questions the owner has seen. If there are more, the run does not become "asking" or
            "sleeping" but "queued".
        wakes_at: when it is due, for "asking" and "sleeping".
        error: the error of a run that has failed.
        result: the number of the entry with the result.
    """

    run: int
    epoch: int
    lease_seconds: float = 30.0
    entries: Sequence[Entry] = ()
    questions: Sequence[Question] = ()
    events: Sequence[Event] = ()
    drops: Sequence[int] = ()
    state: State | None = None
    answers: int = 0
    wakes_at: float | None = None
    error: bytes | None = None
    result: int | None = None


class Written(NamedTuple):
    """What became of a batch.

    Attributes:
        state: the state after it; None if the epoch was another one: then nothing was written, and the lease is lost.
        cancel: whether the run was cancelled meanwhile. A run that its owner leaves as "queued", "asking" or "sleeping"
            is "cancelled" then.
        lease_until: when the lease ends.
    """

    state: State | None
    cancel: bool = False
    lease_until: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A change: the answer to an open question. A run that is "asking" is "queued" then."""

    token: str
    answer: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """A change: the run is "cancelled"; while a worker has it, `Run.cancel` is set."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A change: a run that has failed or was cancelled is "queued"; the entries with these numbers are forgotten."""

    forget: Sequence[int] = ()


Change: TypeAlias = Answer | Cancel | Resume


class Owner:
    """A worker as stores name it: this process, and a text of its own.

    Attributes:
        name: the name. While the object lives, other processes of this machine see that the worker lives.
    """

    def __init__(self) -> None:
        self.name = f"{_machine()} {os.getpid()} {_started_at(os.getpid())} {uuid.uuid4().hex}"
        _living[self.name] = self


_living: "weakref.WeakValueDictionary[str, Owner]" = weakref.WeakValueDictionary()


def is_gone(name: str) -> bool:
    """Whether the worker of this name has certainly ended. False if it is of another machine, or no `Owner`."""
    machine, pid, started, *_ = [*name.split(" "), "", "", ""]
    if machine != _machine() or name in _living:
        return False
    if (int(pid), started) == (os.getpid(), _started_at(os.getpid())):
        return True
    if sys.platform == "win32":  # on Windows `os.kill` ends the process, whatever the signal
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started_at(int(pid)) != started


@functools.cache
def _machine() -> str:
    """Return a text for this machine since its start, and for the namespace of process numbers."""
    try:
        found = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # the system is not Linux
        found = f"{platform.node()} {uuid.getnode():x}"
    return hashlib.blake2b(found.encode(), digest_size=8).hexdigest()


def _started_at(pid: int) -> str:
    """Return when a process was started; empty if the process has ended, or if the system does not tell."""
    try:
        # The name of the program comes before the fields, in parentheses, and may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a dead process stays until its parent has asked for its status


class Store(ABC):
    """Where durable runs are kept.

    Each method is one transaction. What a method has written outlasts a crash of the machine once it has returned.
    `begin`, `write` and `change` may be repeated with the same arguments after a lost connection: the second call
    changes nothing, and returns what the first would have returned.

    A method raises `CheckpointError` if the database cannot be reached or refuses, after it has tried for a while.
    """

    @abstractmethod
    async def begin(self, new: NewRun, /) -> Run:
        """Keep a new run, or return the run that is there under its key.

        It is "sleeping" if it has a time; "queued" if it has no owner, or waits for a run before it in its thread;
        otherwise "running", with epoch 1 and a lease of its owner.

        Returns:
            The run under the key. With `busy="refuse"`, the run of the thread that has not ended.
        """

    @abstractmethod
    async def claim(
        self,
        graphs: Collection[str],
        owner: str,
        lease_seconds: float,
        limit: int,
        *,
        key: str | None = None,
        without: Collection[int] = (),
    ) -> Sequence[Run]:
        """Give runs to a worker: queued ones, ones that are due, and ones whose owner's lease is over.

        A run is taken only if no earlier one of its thread is queued, running, asking or sleeping. If the owner is a
        process of this machine that has died, its lease is over. Runs that an owner has lost come first, then those
        that are due, then those that are queued. Each has a new epoch. Its `lost` counts one more if another owner had
        it; a run with `cancel` has to be ended.

        Runs that have expired are deleted on the way.

        Args:
            graphs: only runs of the graphs of these names.
            owner: the worker; the name of an `Owner`.
            lease_seconds: how long the worker has them.
            limit: the most runs.
            key: only the run under this key.
            without: the numbers of runs that the worker does not take.
        """

    @abstractmethod
    async def write(self, batches: Sequence[Batch], /) -> Sequence[Written]:
        """Keep what owners have to write of several runs, in one transaction; for each, what became of it.

        Each write sets `lost` to 0 if it has entries.
        """

    @abstractmethod
    async def load(self, run: int, /, seqs: Collection[int] | None = None) -> Sequence[Entry]:
        """Return the entries of a run by their numbers; or only those with these numbers, as far as there are."""

    @abstractmethod
    async def read(self, key: str, /) -> Run | None:
        """Return the run under a key; None if there is none."""

    @abstractmethod
    async def change(self, key: str, change: Change, /) -> Run | None:
        """Answer, cancel or resume a run. What its state does not allow changes nothing.

        Returns:
            The run as it is now; None if there is none. An answer was taken if the question has the same bytes.
        """

    @abstractmethod
    async def events(self, run: int, /, after: int, limit: int) -> Sequence[Event]:
        """Return events behind a number, in order.

        Args:
            run: the number of the run.
            after: the number of the last event that is known; 0 for none. The first row may begin before it.
            limit: the most rows.
        """

    @abstractmethod
    async def list(
        self,
        *,
        state: State | None = None,
        graph: str | None = None,
        prefix: str = "",
        thread: str | None = None,
        before: tuple[float, str] | None = None,
        limit: int = 50,
    ) -> Sequence[Run]:
        """Return runs, the last changed first.

        Args:
            state: only runs in this state.
            graph: only runs of the graph of this name.
            prefix: only keys that begin with it.
            thread: only runs of this thread.
            before: only runs whose pair of `changed_at` and key is below this one.
            limit: the most runs.
        """

    @abstractmethod
    async def delete(self, keys: Collection[str], /, *, states: Collection[State] = (*WAITING, *ENDED)) -> int:
        """Delete the runs under these keys with everything that is kept of them; a thread is deleted as a whole.

        Args:
            keys: the keys.
            states: only runs in these states; of a thread, only if all its runs are in them.

        Returns:
            How many runs were deleted.
        """

    @abstractmethod
    def changes(self) -> AsyncGenerator[frozenset[int] | None, None]:
        """Yield after changes by this process or another one that somebody may wait for.

        That is a new state, question, answer or event, or a mark to cancel. All changes since the last one are joined.
        It first yields once it listens, and may also yield when nothing of this kind has changed.

        Yields:
            The numbers of the runs that were changed; None if the store cannot tell, so that any may have changed.
        """
