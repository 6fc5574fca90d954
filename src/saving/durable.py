"""Durable loops: `while_loop` keeps its state after each iteration, and continues from there in another process."""

import asyncio
import math
import os
import uuid
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import Context, ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self, TypeVar, get_args

from .._errors import (
    DeadlineExceeded,
    EngineClosedError,
    Interrupted,
    KeyFinished,
    KeyInUse,
    KeyStopped,
    NodeCancelledError,
    NotStorable,
    OptionsError,
    OtherArguments,
    StaleAnswer,
    UnknownKey,
    UnknownStep,
)
from ..actors.accepted import NAME, NOT_NEGATIVE, POSITIVE, OptionRule, check, one_of, optional, whole
from ..actors.current import durable_id, enclosing_frame
from ..actors.frame import Frame, Interruption
from ..actors.tasks import postpone, start_task, uninterrupted
from ..actors.threads import ThreadPool
from ..telemetry import logs
from .loops import (
    Loop,
    LoopRecord,
    Owner,
    Run,
    RunState,
    Status,
    active_calls,
    comparable,
    decoded,
    digests,
    encoded,
    machine,
    started_at,
)
from .store import LoopStore, SQLiteStore

T = TypeVar("T")


@dataclass(frozen=True)
class LoopState:
    """The state of a durable loop after one of its iterations; see `Durable.history`.

    Attributes:
        step: how many iterations were made; 0 for the initial value.
        value: the state.
        kept_at: when it was kept, in seconds since 1970 (`time.time()`).
    """

    step: int
    value: Any
    kept_at: float


@dataclass(frozen=True)
class Answer:
    """An answer to one question and no other: `engine.run(call, durable_key=..., answer=Answer("yes", token))`.

    The answer is refused if the key waits with another question, for example if the answer was sent twice.

    Attributes:
        value: the answer.
        token: the `token` of the `Interrupted` with the question.
    """

    value: Any
    token: str


class Durable:
    """Where a `while_loop` keeps its state after each iteration: `while_loop(..., durable=Durable("agents.db"))`.

    Args:
        store: a `LoopStore`; or the path of a file, for a `SQLiteStore`.
        lease_seconds: how long a key stays taken after its process has stopped renewing the lease, in seconds. If a
            process of the same machine has died, its keys are free at once.

    Raises:
        OptionsError: `store` is not a store, the file cannot be an SQLite database, or `lease_seconds` is not above 0.
    """

    def __init__(self, store: LoopStore | str | os.PathLike[str], *, lease_seconds: float = 30.0) -> None:
        check("store", store, _STORE, "Durable(")
        check("lease_seconds", lease_seconds, POSITIVE, "Durable(")
        self._store = store if isinstance(store, LoopStore) else SQLiteStore(store)
        self._lease_seconds = float(lease_seconds)

    async def history(self, key: str, /) -> list[LoopState]:
        """Return the states of the present loop of a key, or of its last one, by their steps.

        Args:
            key: the key.

        Raises:
            CheckpointError: what is stored cannot be read.
        """
        check("key", key, NAME, "history(")
        return await asyncio.to_thread(_states, await self._store.history(key))

    async def fork(self, key: str, step: int, new_key: str, /, *, state: object = ...) -> None:
        """Have another key continue from a state in the history of a key. `run` the new key with the same arguments.

        Args:
            key: the key.
            step: the number of the state.
            new_key: the other key, under which no loop is kept yet.
            state: a state to continue from instead, such as the kept state with another message; by default the kept
                state.

        Raises:
            OptionsError: there is no such state, or a loop is kept under `new_key`.
            NotStorable: `state` cannot be stored.
        """
        check("key", key, NAME, "fork(")
        check("step", step, whole(0), "fork(")
        check("new_key", new_key, NAME, "fork(")
        loops = [Loop.read(record) for record in await self._store.history(key)]
        found = next((loop for loop in loops if loop.step == step and loop.state is not None), None)
        if found is None:
            steps = ", ".join(str(loop.step) for loop in loops if loop.state is not None) or "none"
            raise UnknownStep(f"fork({key!r}, {step}): there is no such state; the history has {steps}")
        if state is not ...:
            found = replace(found, state=await asyncio.to_thread(encoded, state, "state"))
        now = await self._store.now()
        forked = replace(
            found, status="running", owner=None, question=None, answers=(), began_at=now, changed_at=now, error="",
            given=loops[0].given, result=None,
        )  # fmt: skip
        if not await self._store.store(new_key, forked.record(1), expected_version=0):
            raise OptionsError(f"fork(new_key={new_key!r}): a loop is kept under that key; choose another key")

    async def runs(
        self, *, state: RunState | None = None, graph: str | None = None, before: Run | None = None, limit: int = 50
    ) -> list[Run]:
        """List the keys, the last changed key first.

        Args:
            state: only keys in this state: "running", "asking", "finished", "failed" or "stopped".
            graph: only keys of the graph of this name.
            before: the last entry of the previous list; this list begins behind that entry.
            limit: the most keys.

        Raises:
            OptionsError: an argument does not accept its value, or the store cannot be listed.
            CheckpointError: a stored loop cannot be read.
        """
        check("state", state, optional(one_of(RunState)), "runs(")
        check("limit", limit, whole(1), "runs(")
        found: list[Run] = []
        # The index of graphs is sorted by state before time, so each state is asked for separately.
        for stored in _STORED_AS[state] if graph is None or state is not None else _STATES:
            last: tuple[float, str] | None = _FIRST if before is None else (before.changed_at, before.key)
            of_state: list[Run] = []
            while last is not None and len(of_state) < limit:
                page, last = await self._page(stored, state, graph, last, limit)
                of_state += [run for run, _ in page]
            found += of_state
        return sorted(found, key=lambda run: (run.changed_at, run.key), reverse=True)[:limit]

    async def _page(
        self, stored: RunState | None, state: RunState | None, graph: str | None, last: tuple[float, str], limit: int
    ) -> tuple[list[tuple[Run, int]], tuple[float, str] | None]:
        """Return the next keys of a list with their versions, and where the list continues; None at its end."""
        rows = await self._store.runs(state=stored, graph=graph, before=last, limit=limit)
        now = await self._store.now()
        listed = [(Loop.read(record).run(key, size, now), record.version) for key, record, size in rows]
        goes_on = (rows[-1][1].changed_at, rows[-1][0]) if len(rows) == limit else None
        return [one for one in listed if state in (None, one[0].state)], goes_on

    async def delete(self, key: str, /) -> bool:
        """Delete everything that is kept under a key: states, arguments and result.

        Args:
            key: the key.

        Returns:
            False if nothing was kept under the key.

        Raises:
            KeyInUse: a call has the key.
            OptionsError: the store cannot delete.
        """
        check("key", key, NAME, "delete(")
        while True:
            loop, version, now = await self._found(key)
            if loop is None:
                return False
            if not loop.is_free(now):
                raise _in_use(key, loop, "is under way", now)
            if await self._store.delete({key: version}):
                return True

    async def expire(
        self, older_than_seconds: float, /, *, state: RunState = "finished", graph: str | None = None
    ) -> int:
        """Delete the keys that were not changed for some time. A key that a call has is never deleted.

        Args:
            older_than_seconds: how long ago a key was changed last, at least, in seconds.
            state: only keys in this state: "finished", "failed", "stopped" or "asking".
            graph: only keys of the graph of this name.

        Returns:
            The number of deleted keys.

        Raises:
            OptionsError: an argument does not accept its value, or the store cannot be listed.
        """
        check("older_than_seconds", older_than_seconds, NOT_NEGATIVE, "expire(")
        check("state", state, one_of(Literal["finished", "failed", "stopped", "asking"]), "expire(")
        deleted, oldest = 0, await self._store.now() - older_than_seconds
        for stored in _STORED_AS[state]:
            last: tuple[float, str] | None = oldest, ""
            while last is not None:
                page, last = await self._page(stored, state, graph, last, _DELETED_AT_ONCE)
                deleted += await self._store.delete({run.key: version for run, version in page})
        return deleted

    async def _found(self, key: str) -> tuple[Loop | None, int, float]:
        """Return the present content of a key, the version of its record, and the time by the clock of the store."""
        record, now = await self._store.load(key), await self._store.now()
        return (None, 0, now) if record is None else (Loop.read(record), record.version, now)

    async def _stored_call(self, key: str) -> tuple[str, dict[str, Any]] | None:
        """Return the name of the graph of a key and the arguments of its call; None if nothing is kept.

        Raises:
            OptionsError: the arguments are not kept.
            CheckpointError: the arguments cannot be read.
        """
        first = await self._store.first(key)
        if first is None:
            return None
        loop = Loop.read(first)
        if loop.given is None:
            raise OptionsError(
                f"the key {key!r} was kept by an earlier version, without the arguments of its call: give the call, "
                f"service.run({loop.graph}(...), durable_key={key!r})"
            )
        return loop.graph, await asyncio.to_thread(decoded, loop.given)

    async def _result(self, key: str, graphs: Container[str], *, needs_one: bool) -> Any:
        """Return the result of a key of one of these graphs.

        Raises:
            UnknownKey: no loop of these graphs is kept under the key.
            KeyInUse: a call has the key.
            Interrupted: the key waits for an answer.
            KeyStopped: no call has the key, and there is no result.
            KeyFinished: the result was not kept, and `needs_one` is true.
        """
        loop, _, now = await self._found(key)
        if loop is None or loop.graph not in graphs:
            raise UnknownKey(f"nothing is kept under the key {key!r}")
        if not loop.is_free(now):
            raise _in_use(key, loop, "is under way", now)
        if loop.question is not None:
            raise Interrupted(key, decoded(loop.question), loop.token(key, loop.question))
        if loop.status != "done":
            why = f"has failed, {loop.error}" if loop.status == "failed" else "was stopped, or its process has died"
            raise KeyStopped(f"no call has the key {key!r}: the last call {why}; service.resume({key!r}) continues it")
        if loop.result is None and needs_one:
            raise _not_kept(key, loop)
        return None if loop.result is None else await asyncio.to_thread(decoded, loop.result)


# The stored status for each state in a list. A key whose process has died is stored as running.
_STORED_AS: Final[dict[RunState | None, tuple[RunState | None, ...]]] = {
    None: (None,), "running": ("running",), "asking": ("asking", "running"), "finished": ("finished",),
    "failed": ("failed",), "stopped": ("stopped", "running"),
}  # fmt: skip
_STATES: Final[tuple[RunState, ...]] = get_args(RunState)
_FIRST: Final = (math.inf, "")  # the start of a list: keys that were changed last come first
_DELETED_AT_ONCE: Final = 100  # in one transaction, so that other writers wait for a few milliseconds at most

# The errors of a call that was ended from outside, or that asks a question. Such a call has not failed.
_STOPPED: Final = (EngineClosedError, Interrupted, NodeCancelledError)

_STORE: Final = OptionRule(
    "a LoopStore, or the path of a file for SQLite", lambda value: isinstance(value, LoopStore | str | os.PathLike)
)

# How long a caller, which may be cancelled, waits for a store that does not answer. The lease ends by itself.
_RECORDING_SECONDS: Final = 30.0
# How long a caller waits for the store after its deadline. A store that answers needs a few milliseconds.
_GRACE_SECONDS: Final = 0.1

# The call with a durable loop that the running handler belongs to.
present: ContextVar["DurableCall | None"] = ContextVar("penstock_durable_call", default=None)


@dataclass(eq=False)
class DurableCall:
    """One call with a key: an async context manager that takes the key, and records how the call has ended.

    Args:
        durable: where the loop is kept.
        graph: the name of the graph.
        arguments: the arguments of the call, by the names of the parameters.
        key: the key.
        answer: the answer to the question that the key waits with, or an `Answer`; Ellipsis for no answer.
        threads: returns the threads in which values are encoded.
        timeout_seconds: how long taking the key may take, in seconds; None without a limit.
        on_finished: the action if the key has its result already: "again", "return" or "raise".

    Attributes:
        frame: the frame with the step of the loop, once the step has begun.
        result: the result of the call; Ellipsis before there is a result, and for a call that returns a stream.
        ends_at: the deadline of the call, on the clock of the event loop; None without a deadline.
    """

    durable: Durable
    graph: str
    arguments: Mapping[str, object]
    key: str
    answer: object
    threads: Callable[[], ThreadPool]
    timeout_seconds: float | None
    on_finished: str = "again"

    def __post_init__(self) -> None:
        self.frame: Frame | None = None
        self.result: Any = ...
        self._store, self._lease_seconds = self.durable._store, self.durable._lease_seconds
        self._owner = Owner(machine(), os.getpid(), started_at(os.getpid()), uuid.uuid4().hex)
        self._loop: Loop | None = None  # the record that was written last
        self._version = 0
        self._may_be_taken = False
        self._is_recorded = False  # whether the outcome was recorded
        self._writing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        self.ends_at: float | None = None
        # Unused answers of this iteration; None between iterations.
        self._unused: list[tuple[bytes, bytes]] | None = None
        self._question: tuple[bytes, object] | None = None
        self._tokens: tuple[Token[DurableCall | None], Token[tuple[int | None, str] | None]] | None = None
        around = enclosing_frame()
        self._around = None if around is None else around.identity

    @property
    def stored_bytes(self) -> int:
        """The size of the state that was stored last."""
        return 0 if self._loop is None or self._loop.state is None else len(self._loop.state)

    # The call, from outside.

    async def __aenter__(self) -> Self:
        """Take the key, and have handlers find this call.

        Raises:
            KeyInUse: another call has the key.
            OtherArguments: the key belongs to another graph, or to other arguments.
            StaleAnswer: the key does not wait for this answer.
            KeyFinished: the key has a result, and `on_finished` is "raise" or the result was not kept.
            NotStorable: an argument or the answer cannot be stored.
            DeadlineExceeded: the store did not answer in time.
        """
        await self.begin()
        self._tokens = present.set(self), durable_id.set(self._id)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._tokens is not None:
            present.reset(self._tokens[0])
            durable_id.reset(self._tokens[1])
        await self.end(error)

    def belong(self, context: Context) -> None:
        """Have handlers that run in a context find this call."""
        context.run(present.set, self)
        context.run(durable_id.set, self._id)

    @property
    def _id(self) -> tuple[int | None, str] | None:
        # A later loop of the same key is another loop, so the time of its beginning is part of the identity.
        return None if self._loop is None else (self._around, repr((self.key, self._loop.began_at)))

    @property
    def is_finished(self) -> bool:
        """Whether the key had its result before, so that the call need not run."""
        return self.result is not ... and self._loop is None

    async def begin(self) -> None:
        """Take the key, or find its result; see `__aenter__`."""
        active_calls[self._owner.token] = self
        loop = asyncio.get_running_loop()
        if self.timeout_seconds is not None:
            self.ends_at = loop.time() + self.timeout_seconds
        timer = asyncio.timeout_at(self.ends_at)
        async with AsyncExitStack() as on_error:
            on_error.push_async_exit(self)
            try:
                async with timer:
                    await self._take()
            except TimeoutError as error:
                if not timer.expired():
                    raise
                raise DeadlineExceeded(
                    f"the key {self.key!r} was not taken within {self.timeout_seconds:g} s: the store did not answer"
                ) from error
            on_error.pop_all()
        if not self.is_finished:
            self._renewing = start_task(loop, self._renew(), name="penstock-lease", context=Context())

    async def end(self, error: BaseException | None) -> None:
        """Record the outcome of the call, and give the key back.

        Args:
            error: the error of the call; None if it has a result.

        Raises:
            KeyInUse: the key was taken over meanwhile.
            DeadlineExceeded: the store did not answer before the deadline of the call.
            Exception: the error of the store. If the call itself has failed, the error of the store is only logged.
        """
        task = asyncio.current_task()
        assert task is not None
        undisturbed = task.cancelling()
        is_interrupted = isinstance(error, Interrupted) and self._question is not None and error.key == self.key
        has_failed = isinstance(error, Exception) and not isinstance(error, _STOPPED)
        status: Status = (
            "done" if error is None else "interrupted" if is_interrupted else "failed" if has_failed else "running"
        )
        try:
            why = f"{type(error).__name__}: {logs.shown(error, str)}"[:500] if has_failed else ""
            await uninterrupted(self._release(status, why))
        except asyncio.CancelledError as cancelled:
            if status != "done" or not (self._is_recorded or self.is_finished):
                raise
            postpone(cancelled.args, undisturbed)  # the outcome is recorded, so the caller must get the outcome
        except Exception as failure:
            if status not in ("running", "failed"):
                raise
            # The call has failed with its own error. The lease ends by itself.
            logs.warning("durable.not_released", key=self.key, graph=self.graph, error=failure)
        finally:
            active_calls.pop(self._owner.token, None)
            self.frame = None  # its context refers to this call

    async def _take(self) -> None:
        """Write a record with this call as the owner of the key, if no other call owns it."""
        own = await self._in_thread(digests, self.arguments)
        answer: bytes | None = None
        if self.answer is not ...:
            value = self.answer.value if isinstance(self.answer, Answer) else self.answer
            answer = await self._in_thread(encoded, value, "answer")
        while True:
            found, version, now = await self.durable._found(self.key)
            loop = self._next(found, own, answer, now)
            if loop is found:
                self.result = await self._in_thread(decoded, loop.result)
                return
            if loop.state is None and loop.given is None:
                loop = replace(loop, given=await self._in_thread(encoded, dict(self.arguments), "arguments"))
            loop = replace(loop, owner=self._owner, lease_until=now + self._lease_seconds, changed_at=now, error="")
            self._may_be_taken = True
            if await self._is_written(loop, version):
                return

    def _next(self, found: Loop | None, own: dict[str, str], answer: bytes | None, now: float) -> Loop:
        """Return the loop that this call continues, or a new loop; `found` itself if only its result is wanted."""
        if found is not None and not found.is_free(now):
            raise _in_use(self.key, found, "is under way", now)
        if found is not None and found.status == "done" and self.on_finished != "again":
            self._check_same(found, own)
            if self.on_finished == "raise":
                raise KeyFinished(
                    f"the key {self.key!r} has its result already; on_finished='return' returns that result"
                )
            if found.result is None:
                raise _not_kept(self.key, found)
            return found
        if answer is not None and (found is None or found.question is None):
            raise StaleAnswer(
                f"answer= was given, but the key {self.key!r} waits for no answer; run the key without answer="
            )
        if found is None or found.status == "done":
            return Loop(0, None, 0.0, self.graph, own, began_at=now)
        self._check_same(found, own)
        if answer is not None and found.question is not None:
            if isinstance(self.answer, Answer) and self.answer.token != found.token(self.key, found.question):
                raise StaleAnswer(
                    f"the key {self.key!r} waits for the answer to {decoded(found.question)!r:.200}, and this answer "
                    "is for another question, which may be answered already: read the present question, and answer it"
                )
            answers = (*found.answers, (found.question, answer))
            return replace(found, status="running", question=None, answers=answers)
        return replace(found, status="running")

    def _check_same(self, found: Loop, own: dict[str, str]) -> None:
        ended = "a finished" if found.status == "done" else "an unfinished"
        if found.graph != self.graph:
            raise OtherArguments(
                f"the key {self.key!r} is that of {ended} call of graph {found.graph!r}, not of "
                f"{self.graph!r}; choose another key"
            )
        other = sorted(name for name in found.arguments | own if found.arguments.get(name) != own.get(name))
        if other:
            raise OtherArguments(
                f"the key {self.key!r} is that of {ended} call with other arguments: {', '.join(other)} "
                "differs; pass the same arguments, or choose another key"
            )

    async def _release(self, status: Status, failure: str) -> None:
        result: bytes | None = None
        if status == "done" and not self.is_finished:
            try:
                if self.result is ...:
                    raise NotStorable("its call gives a stream")
                # Outside of the time limit, which is for the store alone.
                result = await self._in_thread(encoded, self.result, "result")
            except (NotStorable, EngineClosedError) as error:
                failure = str(error)
        now = asyncio.get_running_loop().time()
        seconds = _RECORDING_SECONDS
        if self.ends_at is not None:
            seconds = min(seconds, max(_GRACE_SECONDS, self.ends_at - now))
        timer = asyncio.timeout_at(now + seconds)
        try:
            async with timer:
                if self._renewing is not None:  # the renewal may wait for the store, and hold the lock
                    self._renewing.cancel()
                    await asyncio.wait([self._renewing])
                async with self._writing:
                    if self._may_be_taken:
                        await self._write_outcome(status, failure, result)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise DeadlineExceeded(
                f"the outcome of key {self.key!r} was not recorded within {seconds:.3g} s: the store did not answer; "
                "the key goes on from the last state that was kept"
            ) from error

    async def _write_outcome(self, status: Status, failure: str, result: bytes | None) -> None:
        while not self._is_recorded:
            # A cancelled write may have reached the store, so the store is asked.
            loop, version, now = await self.durable._found(self.key)
            if loop is None or loop.owner != self._owner:
                if status in ("running", "failed"):
                    return  # the key was not taken, or was taken over
                raise _in_use(self.key, loop, "was taken over", now)
            question = loop.question if status in ("running", "failed") else None
            if status == "interrupted" and self._question is not None:
                question = self._question[0]
            loop = replace(
                loop, owner=None, status=status, question=question, changed_at=now, error=failure, result=result
            )
            self._is_recorded = await self._is_written(loop, version)

    # Its loop.

    async def begin_loop(self, initial: T, frame: Frame) -> tuple[int, T]:
        """Return the step and the state that the loop continues from. A new loop keeps its first state before."""
        assert self._loop is not None
        self.frame = frame
        if self._loop.state is None:
            await self._keep(0, initial)
            return 0, initial
        return self._loop.step, await self._in_thread(decoded, self._loop.state, initial)

    async def iteration(self, step: int, running: Awaitable[T]) -> T:
        """Await an iteration, and keep its state.

        Args:
            step: the number of the state after the iteration.
            running: the iteration.

        Raises:
            Interrupted: a handler of the iteration has asked a question that has no answer yet.
            NotStorable: the state cannot be stored.
            KeyInUse: the key was taken over.
        """
        assert self._loop is not None
        self._unused, self._question = list(self._loop.answers), None
        try:
            state = await running
        except (Interruption, BaseExceptionGroup) as error:
            if not isinstance(error, Interruption) and error.subgroup(Interruption) is None:  # of a `TaskGroup`
                raise
            raise self._interrupted() from None
        finally:
            unused, self._unused = self._unused, None
        if self._question is not None:  # the handler has caught the interruption and continued
            raise self._interrupted()
        if unused:
            logs.warning("durable.answer_not_asked_for", key=self.key, questions=[decoded(one) for one, _ in unused])
        await self._keep(step, state)
        return state

    def ask(self, question: object) -> Any:
        """Return the answer to a question of a handler; end the iteration if there is no answer yet.

        Raises:
            NotStorable: the question cannot be stored.
            LookupError: no iteration runs.
        """
        if self._unused is None:
            raise LookupError
        asked = comparable(question, "question")
        for index, (other, answer) in enumerate(self._unused):
            if other == asked:
                del self._unused[index]
                return decoded(answer)
        if self._question is None:  # of two questions that are asked at once, the first ends the call
            self._question = asked, question
        raise Interruption(f"the handler waits for the answer to {logs.shown(question)}")

    def _interrupted(self) -> Interrupted:
        assert self._question is not None
        asked, question = self._question
        assert self._loop is not None
        return Interrupted(self.key, question, self._loop.token(self.key, asked))

    async def _keep(self, step: int, state: object) -> None:
        assert self._loop is not None
        state_bytes = await self._in_thread(encoded, state, "state")
        async with self._writing:
            loop, now = self._loop, await self._store.now()
            given = loop.given if step == loop.step else None
            await self._write(
                replace(
                    loop, step=step, state=state_bytes, kept_at=now, changed_at=now, question=None, answers=(),
                    given=given,
                ),
                now,
            )  # fmt: skip

    async def _write(self, loop: Loop, now: float) -> None:
        """Write the loop. This renews the lease."""
        loop = replace(loop, lease_until=now + self._lease_seconds)
        if not await self._is_written(loop, self._version):
            found, _, now = await self.durable._found(self.key)
            raise _in_use(self.key, found, "was taken over", now)

    async def _is_written(self, loop: Loop, version: int) -> bool:
        """Write the loop if the present record has this version; return whether the loop was written."""
        is_written = await self._store.store(self.key, loop.record(version + 1), expected_version=version)
        if is_written:
            self._loop, self._version = loop, version + 1
        return is_written

    async def _renew(self) -> None:
        """Renew the lease when no state was kept for a third of the lease."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            try:
                async with self._writing:
                    assert self._loop is not None
                    # More than the whole lease is left if the clock was put back. Other machines' clocks may not have
                    # been, so the lease is renewed.
                    now = await self._store.now()
                    if not self._lease_seconds * 0.7 <= self._loop.lease_until - now <= self._lease_seconds:
                        await self._write(self._loop, now)
            except KeyInUse as error:
                if self.frame is not None:
                    self.frame.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - of the store; the next attempt, or the next state, may succeed
                logs.warning("durable.lease_not_renewed", key=self.key, graph=self.graph, error=error)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Encode or decode in a thread, because large values take long, and arrays of devices have to be fetched."""
        return await self.threads().submit(Context(), None, work, *args)


def _in_use(key: str, found: Loop | None, what: str, now: float) -> KeyInUse:
    where = "elsewhere"
    if found is not None and found.owner is not None:
        here = found.owner.machine == machine()
        where = f"in process {found.owner.pid}{'' if here else ' of another machine'}"
        where += f", whose lease lasts {max(0.0, found.lease_until - now):.0f} s if it is not renewed"
    return KeyInUse(f"the key {key!r} {what} {where}; one call at a time can run a key")


def _not_kept(key: str, found: Loop) -> KeyFinished:
    why = found.error or "it was kept by an earlier version"
    return KeyFinished(f"the key {key!r} has ended, but its result is not kept: {why}")


def _states(records: Sequence[LoopRecord]) -> list[LoopState]:
    loops = map(Loop.read, records)
    return [LoopState(loop.step, decoded(loop.state), loop.kept_at) for loop in loops if loop.state is not None]
