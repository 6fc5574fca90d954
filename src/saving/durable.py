"""Durable loops: `while_loop` keeps its state after each iteration, and goes on from there in another process."""

import asyncio
import dataclasses
import functools
import hashlib
import os
import platform
import sys
import time
import typing
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, ContextVar, Token
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar, cast, get_args, get_origin

from .._errors import CheckpointError, DeadlineExceeded, Interrupted, KeyInUse, NotStorable, OptionsError
from ..actors.accepted import NAME, POSITIVE, Accepted, check, whole
from ..actors.frame import Frame, Interruption
from ..actors.tasks import postpone, start_task, uninterrupted
from ..actors.threads import ThreadPool
from ..telemetry import logs
from .encoding import Encoded, _class_of, decode, encode, json_text
from .store import LoopRecord, LoopStore, SQLiteStore

T = TypeVar("T")

Status = Literal["running", "interrupted", "done"]


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
    """An answer to one question and no other: `engine.run(call, key=..., answer=Answer("yes", interrupted.token))`.

    It is refused where the key waits with another question, as after it was sent twice.

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
        lease_seconds: how long a key stays taken after its process has stopped to renew it, in seconds. A process of
            the same machine that has died gives it up at once.

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

    async def fork(self, key: str, step: int, new_key: str, /) -> None:
        """Have another key go on from a state in the history of a key; `run` it with the same arguments.

        Args:
            key: the key.
            step: the number of the state.
            new_key: the other key, which nothing is kept under yet.

        Raises:
            OptionsError: there is no such state, or something is kept under `new_key`.
        """
        check("key", key, NAME, "fork(")
        check("step", step, whole(0), "fork(")
        check("new_key", new_key, NAME, "fork(")
        loops = [_Loop.read(record) for record in await self._store.history(key)]
        found = next((loop for loop in loops if loop.step == step and loop.state is not None), None)
        if found is None:
            steps = ", ".join(str(loop.step) for loop in loops if loop.state is not None) or "none"
            raise OptionsError(f"fork({key!r}, {step}): there is no such state; the history has {steps}")
        forked = replace(found, status="running", owner=None, question=None, answers=())
        if not await self._store.store(new_key, forked.record(1), expected_version=0):
            raise OptionsError(f"fork(new_key={new_key!r}): something is kept under that key; choose another one")


_STORE: Final = Accepted(
    "a LoopStore, or the path of a file for SQLite", lambda value: isinstance(value, LoopStore | str | os.PathLike)
)

# How long a caller, which may be cancelled, waits for a store that does not answer; a lease ends by itself.
_RECORDING_SECONDS: Final = 30.0
# That long after its deadline as well: a store that answers needs a few milliseconds.
_GRACE_SECONDS: Final = 0.1

# The call with a durable loop that the running handler belongs to.
present: ContextVar["DurableCall | None"] = ContextVar("penstock_durable_call", default=None)


class DurableCall:
    """One call with a key: an async context manager that takes the key, and records how the call has ended.

    Args:
        durable: where the loop is kept.
        graph: the name of the graph.
        arguments: the arguments of the call, by the names of the parameters.
        key: the key.
        answer: the answer to the question that the key waits with, or an `Answer`; Ellipsis for none.
        threads: returns the threads in which values are encoded.
        timeout_seconds: how long taking the key may take; None without a limit.

    Attributes:
        frame: the frame with the step of the loop, once that has begun.
        timeout_seconds: once the key is taken, how much of that time is left.
    """

    def __init__(
        self,
        durable: Durable,
        graph: str,
        arguments: Mapping[str, object],
        key: str,
        answer: object,
        threads: Callable[[], ThreadPool],
        timeout_seconds: float | None,
    ) -> None:
        self.frame: Frame | None = None
        self._store = durable._store
        self._lease_seconds = durable._lease_seconds
        self._graph = graph
        self._arguments = arguments
        self._key = key
        self._answer = answer
        self._threads = threads
        self.timeout_seconds = timeout_seconds
        self._owner = Owner(_machine(), os.getpid(), _started(os.getpid()), uuid.uuid4().hex)
        self._loop: _Loop | None = None  # as it was last written
        self._version = 0
        self._may_be_taken = False
        self._is_recorded = False  # whether its outcome is
        self._writing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        self._deadline: float | None = None
        self._unused: list[tuple[bytes, bytes]] | None = None  # the answers of the present iteration; None between two
        self._question: tuple[bytes, object] | None = None
        self._token: Token[DurableCall | None] | None = None

    # The call, from outside.

    async def __aenter__(self) -> Self:
        """Take the key, and have handlers find this call.

        Raises:
            KeyInUse: it is under way elsewhere.
            OptionsError: it is unfinished with other arguments, or waits for no answer.
            NotStorable: an argument or the answer cannot be stored.
            DeadlineExceeded: the store did not answer in time.
        """
        await self.begin()
        self._token = present.set(self)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._token is not None
        present.reset(self._token)
        await self.end(error)

    def belong(self, context: Context) -> None:
        """Have handlers that run in a context find this call."""
        context.run(present.set, self)

    async def begin(self) -> None:
        """Take the key; see `__aenter__`."""
        _active[self._owner.token] = self
        loop = asyncio.get_running_loop()
        if self.timeout_seconds is not None:
            self._deadline = loop.time() + self.timeout_seconds
        timer = asyncio.timeout_at(self._deadline)
        try:
            async with timer:
                await self._take()
        except BaseException as error:
            await self.end(error)
            if isinstance(error, TimeoutError) and timer.expired():
                raise DeadlineExceeded(
                    f"the key {self._key!r} was not taken within {self.timeout_seconds:g} s: the store did not answer"
                ) from error
            raise
        if self.timeout_seconds is not None and self._deadline is not None:
            self.timeout_seconds = TimeLeft(self.timeout_seconds, max(0.0, self._deadline - loop.time()))
        self._renewing = start_task(loop, self._renew(), name="penstock-lease", context=Context())

    async def end(self, error: BaseException | None) -> None:
        """Record the outcome of the call, and give the key back.

        Args:
            error: the error of the call; None if it has a result.

        Raises:
            KeyInUse: the key was taken over meanwhile.
            DeadlineExceeded: the store did not answer before the deadline of the call.
            Exception: the error of the store; but if the call has failed anyway, that is only logged.
        """
        task = asyncio.current_task()
        assert task is not None
        undisturbed = task.cancelling()
        is_interrupted = isinstance(error, Interrupted) and self._question is not None and error.key == self._key
        status: Status = "done" if error is None else "interrupted" if is_interrupted else "running"
        try:
            await uninterrupted(self._release(status))
        except asyncio.CancelledError as cancelled:
            if status != "done" or not self._is_recorded:
                raise
            postpone(cancelled.args, undisturbed)  # the outcome is recorded, so the caller has to get it
        except Exception as failure:
            if status != "running":
                raise
            # The call has failed with an error of its own. The lease ends by itself.
            logs.warning("durable.not_released", key=self._key, graph=self._graph, error=repr(failure))
        finally:
            _active.pop(self._owner.token, None)
            self.frame = None  # its context refers to this call

    async def _take(self) -> None:
        """Write a record that says who has the key, in the place of one that has no holder."""
        given = await self._in_thread(_digests, self._arguments)
        answer: bytes | None = None
        if self._answer is not ...:
            value = self._answer.value if isinstance(self._answer, Answer) else self._answer
            answer = await self._in_thread(_encoded, value, "answer")
        while True:
            found = await self._store.load(self._key)
            loop = self._next(None if found is None else _Loop.read(found), given, answer)
            version = 0 if found is None else found.version
            loop = replace(loop, owner=self._owner, lease_until=time.time() + self._lease_seconds)
            self._may_be_taken = True
            if await self._store.store(self._key, loop.record(version + 1), expected_version=version):
                break
        self._loop, self._version = loop, version + 1

    def _next(self, found: "_Loop | None", given: dict[str, str], answer: bytes | None) -> "_Loop":
        """Return the loop that this call goes on with, or a new one."""
        if found is not None and not found.is_free():
            raise self._in_use(found, "is under way")
        if answer is not None and (found is None or found.question is None):
            why = "nothing is kept under it" if found is None else _WHY_NO_ANSWER[found.status]
            raise OptionsError(
                f"answer= was given, but the key {self._key!r} waits for none: {why}; run it without answer="
            )
        if found is None or found.status == "done":
            return _Loop(0, None, 0.0, self._graph, given)
        if found.graph != self._graph:
            raise OptionsError(
                f"the key {self._key!r} is that of an unfinished call of graph {found.graph!r}, not of "
                f"{self._graph!r}; choose another key"
            )
        other = sorted(name for name in found.arguments | given if found.arguments.get(name) != given.get(name))
        if other:
            raise OptionsError(
                f"the key {self._key!r} is that of an unfinished call with other arguments: {', '.join(other)} "
                "differs; give the same, or choose another key"
            )
        if answer is not None and found.question is not None:
            if isinstance(self._answer, Answer) and self._answer.token != found.token(self._key, found.question):
                raise OptionsError(
                    f"the key {self._key!r} waits for the answer to {_decoded(found.question)!r:.200}, and this answer "
                    "is to another question, which may have its answer by now"
                )
            answers = (*found.answers, (found.question, answer))
            return replace(found, status="running", question=None, answers=answers)
        return replace(found, status="running")

    def _in_use(self, found: "_Loop | None", what: str) -> KeyInUse:
        where = "elsewhere"
        if found is not None and found.owner is not None:
            here = found.owner.machine == self._owner.machine
            where = f"in process {found.owner.pid}{'' if here else ' of another machine'}"
            seconds = max(0.0, found.lease_until - time.time())
            where += f", whose lease lasts {seconds:.0f} s if it is not renewed"
        return KeyInUse(f"the key {self._key!r} {what} {where}; a key is run by one call at a time")

    async def _release(self, status: Status) -> None:
        now = asyncio.get_running_loop().time()
        seconds = _RECORDING_SECONDS
        if self._deadline is not None:
            seconds = min(seconds, max(_GRACE_SECONDS, self._deadline - now))
        timer = asyncio.timeout_at(now + seconds)
        try:
            async with timer:
                if self._renewing is not None:  # it may wait for the store, with the lock
                    self._renewing.cancel()
                    await asyncio.wait([self._renewing])
                async with self._writing:
                    if self._may_be_taken:
                        await self._write_outcome(status)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise DeadlineExceeded(
                f"the outcome of key {self._key!r} was not recorded within {seconds:.3g} s: the store did not answer; "
                "the key goes on from the last state that was kept"
            ) from error

    async def _write_outcome(self, status: Status) -> None:
        while True:
            # A write that was cancelled may have been made, so the store is asked.
            found = await self._store.load(self._key)
            loop = None if found is None else _Loop.read(found)
            if found is None or loop is None or loop.owner != self._owner:
                if status == "running":
                    return  # it was not taken, or was taken over
                raise self._in_use(loop, "was taken over")
            question = loop.question if status == "running" else None
            if status == "interrupted" and self._question is not None:
                question = self._question[0]
            loop = replace(loop, owner=None, status=status, question=question)
            if await self._store.store(self._key, loop.record(found.version + 1), expected_version=found.version):
                self._is_recorded = True
                return

    # Its loop.

    async def begin_loop(self, initial: T, frame: Frame) -> tuple[int, T]:
        """Return the step and the state that the loop goes on from; those of a new loop are kept first."""
        assert self._loop is not None
        self.frame = frame
        if self._loop.state is None:
            await self._keep(0, initial)
            return 0, initial
        return self._loop.step, await self._in_thread(_decoded, self._loop.state, initial)

    async def iteration(self, step: int, running: Awaitable[T]) -> T:
        """Await an iteration, and keep its state.

        Args:
            step: the number of the state after it.
            running: the iteration.

        Raises:
            Interrupted: a handler in it has asked a question that has no answer yet.
            NotStorable: the state cannot be stored.
            KeyInUse: the key was taken over.
        """
        assert self._loop is not None
        self._unused, self._question = list(self._loop.answers), None
        try:
            state = await running
        except BaseException as error:
            if not _is_interruption(error):
                raise
            raise self._interrupted() from None
        finally:
            unused, self._unused = self._unused, None
        if self._question is not None:  # the handler has gone on nevertheless
            raise self._interrupted()
        if unused:
            logs.warning("durable.answer_not_asked_for", key=self._key, questions=[_decoded(one) for one, _ in unused])
        await self._keep(step, state)
        return state

    def ask(self, question: object) -> Any:
        """Return the answer to a question of a handler; if there is none yet, end the iteration.

        Raises:
            NotStorable: the question cannot be stored.
            LookupError: no iteration runs.
        """
        if self._unused is None:
            raise LookupError
        asked = _comparable(question, "question")
        for index, (other, answer) in enumerate(self._unused):
            if other == asked:
                del self._unused[index]
                return _decoded(answer)
        if self._question is None:  # of two questions that are asked at once, the first ends the call
            self._question = asked, question
        raise Interruption(f"the handler waits for the answer to {question!r}")

    def _interrupted(self) -> Interrupted:
        assert self._question is not None
        asked, question = self._question
        assert self._loop is not None
        return Interrupted(self._key, question, self._loop.token(self._key, asked))

    async def _keep(self, step: int, state: object) -> None:
        assert self._loop is not None
        encoded = await self._in_thread(_encoded, state, "state")
        async with self._writing:
            await self._write(
                replace(self._loop, step=step, state=encoded, kept_at=time.time(), question=None, answers=())
            )

    async def _write(self, loop: "_Loop") -> None:
        """Write the loop, which renews the lease."""
        loop = replace(loop, lease_until=time.time() + self._lease_seconds)
        version = self._version
        if not await self._store.store(self._key, loop.record(version + 1), expected_version=version):
            found = await self._store.load(self._key)
            raise self._in_use(None if found is None else _Loop.read(found), "was taken over")
        self._loop, self._version = loop, version + 1

    async def _renew(self) -> None:
        """Renew the lease when no state was kept for a third of it."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            try:
                async with self._writing:
                    assert self._loop is not None
                    # More than the whole lease is left if the clock was put back, and the others' may not have been.
                    if not self._lease_seconds * 0.7 <= self._loop.lease_until - time.time() <= self._lease_seconds:
                        await self._write(self._loop)
            except KeyInUse as error:
                if self.frame is not None:
                    self.frame.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - of the store; the next attempt, or the next state, may succeed
                logs.warning("durable.lease_not_renewed", key=self._key, graph=self._graph, error=repr(error))

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Encode or decode in a thread, because large values take long, and those of devices have to be fetched."""
        return await self._threads().submit(Context(), None, work, *args)


_WHY_NO_ANSWER: Final[dict[Status, str]] = {
    "done": "its last call has given its result, and the next one begins a new loop",
    "running": "its last call was stopped, or has failed, without a question",
    "interrupted": "its question was answered",
}


class TimeLeft(float):
    """What is left of a timeout, in seconds; messages show it as the user gave it."""

    _given: float

    def __new__(cls, given: float, left: float) -> Self:
        """Return the seconds that are left of those that were given."""
        self = super().__new__(cls, left)
        self._given = given
        return self

    def __format__(self, spec: str, /) -> str:
        return format(self._given, spec)


def _is_interruption(error: BaseException) -> bool:
    """Whether it is one, or a group of a `TaskGroup` with one."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).subgroup(Interruption) is not None
    return isinstance(error, Interruption)


def _states(records: Sequence[LoopRecord]) -> list[LoopState]:
    loops = map(_Loop.read, records)
    return [LoopState(loop.step, _decoded(loop.state), loop.kept_at) for loop in loops if loop.state is not None]


# Who has a key.

# The calls of this process that have a key, by their tokens. Those of a loop that was closed early are just dropped.
_active: "weakref.WeakValueDictionary[str, DurableCall]" = weakref.WeakValueDictionary()


class Owner(NamedTuple):
    """The call that has a key.

    Attributes:
        machine: the machine since its start, and the namespace in which the number of the process counts.
        pid: the number of its process.
        started: when the process was started, as Linux tells; empty if unknown.
        token: a text that is unique to the call.
    """

    machine: str
    pid: int
    started: str
    token: str

    def is_gone(self) -> bool:
        """Whether the call has certainly ended. False if it runs, or is of another machine."""
        if self.machine != _machine():
            return False
        if self.pid == os.getpid() and self.started == _started(self.pid):
            return not self.is_here()
        if sys.platform == "win32":  # where `os.kill` ends the process, whatever the signal
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return _started(self.pid) != self.started

    def is_here(self) -> bool:
        """Whether the call certainly runs: in this process."""
        return self.token in _active


@functools.cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return f"{platform.node()} {uuid.getnode():x}"


def _started(pid: int) -> str:
    """Return when a process was started; empty if it has ended, or where that is not known."""
    try:
        # The name of the program comes before, in parentheses, and may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a dead process stays until its parent has asked for its status


# What is stored.


@dataclass(frozen=True)
class _Loop:
    """What is stored of a key at one step.

    Attributes:
        step: how many iterations were made.
        state: the encoded state; None before the loop began.
        kept_at: when it was kept, in seconds since 1970.
        graph: the name of the graph.
        arguments: the digest of each argument, by its parameter.
        status: "done" if the call has given its result; "interrupted" if it waits for an answer; else "running".
        owner: the call that has the key; None if none has.
        lease_until: when the key is free if it is not renewed, in seconds since 1970.
        question: the encoded question that waits for an answer.
        answers: the encoded questions and answers of the iteration after this step, in the order of the answers.
    """

    step: int
    state: bytes | None
    kept_at: float
    graph: str
    arguments: dict[str, str]
    status: Status = "running"
    owner: Owner | None = None
    lease_until: float = 0.0
    question: bytes | None = None
    answers: tuple[tuple[bytes, bytes], ...] = ()

    def is_free(self) -> bool:
        """Whether its owner has ended, or, as far as can be told from here, has not renewed its lease."""
        if self.owner is None or self.owner.is_gone():
            return True
        return self.lease_until < time.time() and not self.owner.is_here()  # the clock may have leapt

    def token(self, key: str, question: bytes) -> str:
        """Return the name of a question that is asked in the iteration after this step."""
        asked = repr((key, self.step, self.kept_at, len(self.answers), question))
        return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()

    def record(self, version: int) -> LoopRecord:
        """Return what a store keeps: the length of a header, the header, and the state."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        state = fields.pop("state")
        owner = None if self.owner is None else tuple(self.owner)
        header = encode({**fields, "owner": owner, "has_state": state is not None}, "loop").to_bytes()
        content = b"".join((len(header).to_bytes(8, "little"), header, state or b""))
        return LoopRecord(version, self.step, content)

    @classmethod
    def read(cls, record: LoopRecord) -> Self:
        """Read what `record` has returned.

        Raises:
            CheckpointError: it is something else, or damaged.
        """
        begin = 8 + int.from_bytes(record.content[:8], "little")
        try:
            fields: dict[str, Any] = decode(Encoded.from_bytes(record.content[8:begin]))
            fields["owner"] = None if fields["owner"] is None else Owner(*fields["owner"])
            fields["state"] = record.content[begin:] if fields.pop("has_state") else None
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the record of version {record.version} is no durable loop: {error!r}") from error


def _encoded(value: object, name: str) -> bytes:
    return encode(value, name).to_bytes()


def _decoded(data: bytes | None, template: object = None) -> Any:
    assert data is not None
    return decode(Encoded.from_bytes(data), template)


def _comparable(value: object, name: str) -> bytes:
    """Return bytes that are equal for equal values: dicts are equal whatever their order."""
    encoded = encode(value, name)
    return Encoded(_in_order(encoded.structure), dict(sorted(encoded.arrays.items()))).to_bytes()


def _in_order(structure: Any) -> Any:
    kind = cast("Any", type(structure))
    if kind is list:
        return [_in_order(one) for one in structure]
    if kind is not dict:
        return structure
    found = {key: _in_order(one) for key, one in sorted(structure.items())}
    if "$dict" in found:
        found["$dict"] = sorted(found["$dict"], key=json_text)
    return found


def _digests(arguments: Mapping[str, object]) -> dict[str, str]:
    return {
        name: hashlib.blake2b(_comparable(value, name), digest_size=16).hexdigest() for name, value in arguments.items()
    }


# What annotations tell.


_STORABLE: Final = frozenset({
    bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset,
})  # fmt: skip
_OF_ARRAYS: Final = frozenset({"numpy", "jax", "jaxlib", "ml_dtypes"})


def refuse_annotation(hint: Any, name: str = "state") -> None:
    """Refuse a type whose values can certainly not be stored; what an annotation does not tell is found at run time.

    Raises:
        NotStorable: there is one; the message names its path.
    """
    _refuse(hint, name, frozenset())


def _may_be_stored(cls: type) -> bool:
    """Whether values with this annotation may be storable: of the class, or of one that derives from it."""
    return (
        cls in _STORABLE
        or cls.__module__.partition(".")[0] in _OF_ARRAYS
        or _class_of(cls) is not None
        or getattr(cls, "_is_protocol", False)
        or hasattr(cls, "__total__")  # a TypedDict
        or any(map(_may_be_stored, type.__subclasses__(cls)))
    )


def _refuse(hint: Any, path: str, around: frozenset[Any]) -> None:
    origin = get_origin(hint)
    if origin is typing.Annotated:
        return _refuse(get_args(hint)[0], path, around)
    if origin in (list, tuple, set, frozenset, dict, typing.Union, UnionType):
        inside = path if origin in (typing.Union, UnionType) else f"{path}[...]"
        for one in get_args(hint):
            _refuse(one, inside, around)
        return None
    if not isinstance(hint, type) or hint in around or hint in (object, Any, NoneType):
        return None
    if not _may_be_stored(hint):
        raise NotStorable(
            f"{path} is annotated as {hint.__module__}.{hint.__qualname__}, which cannot be stored: use JSON values, "
            "bytes, tuples, sets, arrays, or an enum, a named tuple, a dataclass or a model of pydantic"
        )
    if dataclasses.is_dataclass(hint):
        try:
            hints = typing.get_type_hints(hint)
        except Exception:  # noqa: BLE001 - names may not exist at run time (TYPE_CHECKING), or fail in any other way
            return None
        for field in dataclasses.fields(hint):
            _refuse(hints.get(field.name), f"{path}.{field.name}", around | {hint})
    return None
