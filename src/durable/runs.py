"""Runs under a key: how they begin, run in this process, go on after a crash, and end."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

from .. import Call
from .._errors import (
    CheckpointError,
    LeaseLost,
    NotStorable,
    OtherArguments,
    OtherCall,
    OtherGraph,
    RunCancelled,
    RunFailed,
    StaleAnswer,
)
from ..actors.accepted import POSITIVE, check
from ..actors.tasks import start_task, uninterrupted
from ..engine import Plan
from ..extension import encode, kept_plan, run_kept, wirings
from .journal import Journal, digest_of
from .parts import Codec, Values
from .sqlite import SQLiteStore
from .store import ENDED, KEY, Answer, Cancel, Entry, NewRun, Owner, Resume, Run, Store
from .writer import Leaving, Writer

R = TypeVar("R")

# A run with which so many workers have died in a row, with no new entry between, is failed.
_MOST_LOST = 5
# How long a process waits before it looks again for a run that another process has, if nothing tells of a change.
_LOOK_SECONDS = 1.0


class Durable:
    """Runs graphs so that what was kept never runs again, also after the death of the process.

    Args:
        store: where runs are kept; a path is that of a file of SQLite.
        lease_seconds: for how long a run is this process's after each write.
        codec: encrypts or compresses what the store keeps.
        max_value_bytes: the most bytes of a value.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        lease_seconds: float = 30.0,
        codec: Codec | None = None,
        max_value_bytes: int = 64 << 20,
    ) -> None:
        check("lease_seconds", lease_seconds, POSITIVE, "Durable(")
        self._store = store if isinstance(store, Store) else SQLiteStore(store)
        self._lease_seconds = lease_seconds
        self._codec = codec
        self._max_value_bytes = max_value_bytes
        self._owner = Owner()
        self._here: dict[str, _Here] = {}
        self._known: set[int] = set()  # the numbers of runs that this process has had
        self._writer: Writer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, call: Call[R], /, *, key: str) -> R:
        """Run a call under a key, or go on with the run of the key, and return its result.

        A run that has its result gives that result. A run that this or another process has is joined. Otherwise the
        run begins, or goes on, here. If all callers leave before its end, the run can go on anywhere.

        Args:
            call: the call.
            key: the key: 1 to 512 characters.

        Returns:
            The result of the graph.

        Raises:
            Exception: the error of the run.
            OtherArguments: the key belongs to a call of another graph, or with other arguments.
            OtherGraph: the graph has other steps than those that are kept.
            OtherCall: a handler makes other calls than those that are kept.
            LeaseLost: another process has taken the run over.
            RunCancelled: the run was cancelled.
            NotStorable: an argument or a result cannot be stored.
        """
        check("key", key, KEY, "run(")
        values, digest = self._values(), digest_of((call.arguments, {}))
        while (here := self._here.get(key)) is not None and here.is_leaving:
            await asyncio.wait([here.task])
        if here is None:
            arguments = Entry(0, digest, "arguments", 0, 0.0, *values.encode([*call.arguments], "the arguments", 0))
            loop = asyncio.get_running_loop()
            work = self._live(call, key, arguments, values)
            here = self._here[key] = _Here(call.graph.name, digest, start_task(loop, work, name="penstock-durable"))
        _refuse_others(key, here.graph, here.digest, call, digest)
        try:
            here.callers += 1
            await asyncio.wait([here.task])
        finally:
            here.callers -= 1
            if not here.callers and self._here.get(key) is here:
                here.is_leaving = True
                here.task.cancel()
                try:
                    await uninterrupted(asyncio.wait([here.task]))
                finally:
                    del self._here[key]
            if not here.callers and not here.task.cancelled():
                here.task.exception()  # marks it as retrieved, since a caller who leaves is not told
        result: R = here.task.result()
        return result

    async def questions(self, key: str) -> dict[str, Any]:
        """Return the open questions of a run, by their tokens."""
        run, values = await self._read(key), self._values()
        return {one.token: values.whole(one.question) for one in run.questions if one.answer is None}

    async def answer(self, key: str, value: object, *, token: str) -> None:
        """Answer a question of a run, also while the run goes on in any process.

        Args:
            key: the key of the run.
            value: the answer.
            token: the token of the question.

        Raises:
            StaleAnswer: the question has another answer, or the run does not ask it.
            NotStorable: the answer cannot be stored.
        """
        data = encode(value, "the answer").to_bytes()
        values = self._values()
        run = await self._store.change(key, Answer(token, values.coded(data)))
        taken = [one.answer for one in (() if run is None else run.questions) if one.token == token]
        if not taken or taken[0] is None or values.plain(taken[0]) != data:
            raise StaleAnswer(f"run {key!r} does not ask this question, or has another answer to it")

    async def cancel(self, key: str) -> None:
        """Cancel a run, wherever it is; a run that has ended stays as it is."""
        await self._store.change(key, Cancel())

    async def resume(self, key: str, *, forget: str | None = None) -> None:
        """Let a run that has failed or was cancelled go on with the next `run`; what was kept stays.

        Args:
            key: the key of the run.
            forget: the path of a call of a handler, as an `OtherCall` names it: this entry and all later ones of the
                handler are forgotten.
        """
        run, forgotten = await self._read(key), set[int]()
        if forget is not None:
            handler = forget.rpartition("/")[0]
            entries = await self._store.load(run.run)
            first = min((one.seq for one in entries if one.path == forget), default=None)
            forgotten = {
                one.seq for one in entries
                if first is not None and one.seq >= first and (one.path + "/").startswith(handler + "/")
            }  # fmt: skip
        await self._store.change(key, Resume(tuple(forgotten)))

    async def _live(self, call: Call[Any], key: str, arguments: Entry, values: Values) -> Any:
        """Have the run of a key end, here or elsewhere; return its result."""
        plan = kept_plan(call.graph)
        run = await self._store.begin(NewRun(
            key=key, graph=call.graph.name, plan=_digest(plan), entries=[arguments], owner=self._owner.name,
            lease_seconds=self._lease_seconds,
        ))  # fmt: skip
        entries: Sequence[Entry] | None = [arguments]
        if run.owner != self._owner.name or run.epoch != 1 or run.run in self._known:
            [first] = await self._store.load(run.run, [0])
            _refuse_others(key, run.graph, first.path, call, arguments.path)
            entries = None
        changes = _Changes(self._store)
        try:
            while run.state not in ENDED:
                mine = await self._claimed(run)
                if mine is not None:
                    self._known.add(mine.run)
                    if entries is None:
                        entries, values = await self._store.load(mine.run), self._values()
                        values.add(entries)
                    writer = self._present_writer()
                    return await _Life(Journal(mine, entries, values, writer), writer).run(call, plan, entries)
                await changes.wait()
                run = await self._read(key)
            return await self._outcome(run)
        finally:
            await changes.close()

    async def _claimed(self, run: Run) -> Run | None:
        """Return a run if this process has it, or can take it now."""
        if run.state == "running" and run.owner == self._owner.name:
            return run
        found = await self._store.claim([run.graph], self._owner.name, self._lease_seconds, 1, key=run.key)
        return found[0] if found else None

    async def _read(self, key: str) -> Run:
        run = await self._store.read(key)
        if run is None:
            raise RunCancelled(f"run {key!r} was deleted")
        return run

    async def _outcome(self, run: Run) -> Any:
        """Return the result of a run that has ended, or raise its error."""
        values = self._values()
        if run.state == "finished":
            assert run.result is not None
            return await values.read(self._store, run.run, run.result)
        if run.state == "cancelled" or run.error is None:
            raise RunCancelled(f"run {run.key!r} was cancelled; resume(key) lets it go on")
        raise values.whole(run.error)

    def _values(self) -> Values:
        return Values(self._codec, self._max_value_bytes)

    def _present_writer(self) -> Writer:
        loop = asyncio.get_running_loop()
        if self._writer is None or self._loop is not loop:
            self._loop, self._writer = loop, Writer(self._store, self._lease_seconds)
        return self._writer


class _Life:
    """A run from its claim by this process to its end, or until this process leaves it."""

    def __init__(self, journal: Journal, writer: Writer) -> None:
        self._journal = journal
        self._writer = writer
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._cancelled = RunCancelled(f"run {journal.run.key!r} was cancelled; resume(key) lets it go on")
        self._stopped: Exception | None = None
        self._is_leaving = False

    def _stop(self, reason: Exception) -> None:
        if self._stopped is None and not self._is_leaving:
            self._stopped = reason
            self._task.cancel()

    async def run(self, call: Call[Any], plan: Plan, entries: Sequence[Entry]) -> Any:
        """Run the call, and leave the run with its outcome."""
        self._writer.open(self._journal.run, self._stop, lambda: self._stop(self._cancelled))
        try:
            try:
                value = await self._value(call, plan, entries)
                leaving = Leaving("finished", result=self._journal.append("", "result", value, "the result"))
            except BaseException as error:
                await self._leave_after(error)
                raise
            await self._leave(leaving)
            return value
        except BaseException as error:
            if self._stopped is None:
                raise
            if isinstance(error, asyncio.CancelledError):
                self._task.uncancel()
            raise self._stopped from error
        finally:
            self._writer.close(self._journal.run)

    async def _value(self, call: Call[Any], plan: Plan, entries: Sequence[Entry]) -> Any:
        run = self._journal.run
        check_steps(plan, entries, run.key)
        if run.cancel:
            raise self._cancelled
        if run.lost >= _MOST_LOST:
            raise RunFailed(f"run {run.key!r}: {run.lost} workers in a row have died with it")
        return await run_kept(call, self._journal)

    async def _leave(self, leaving: Leaving) -> None:
        self._is_leaving = True
        await uninterrupted(self._writer.barrier(self._journal.run, leaving))

    async def _leave_after(self, error: BaseException) -> None:
        """Leave the run after an error; if the lease is lost or the store has failed, do nothing."""
        if self._stopped is self._cancelled or isinstance(error, RunCancelled):
            await self._leave(Leaving("cancelled"))
        elif self._stopped is None and isinstance(error, asyncio.CancelledError | OtherGraph | OtherCall):
            with suppress(LeaseLost, CheckpointError):  # the run goes on somewhere when the lease is over
                await self._leave(Leaving("queued"))
        elif self._stopped is None and isinstance(error, Exception) and not isinstance(error, LeaseLost):
            await self._leave(Leaving("failed", error=_packed(error, self._journal.values)))


def _packed(error: Exception, values: Values) -> bytes:
    try:
        packed = encode(error, "the error")
    except NotStorable:
        packed = encode(RunFailed(f"{type(error).__qualname__}: {error}"))
    return values.coded(packed.to_bytes())


class _Changes:
    """The changes of a store, for a task that looks at a run after each of them, and now and then."""

    def __init__(self, store: Store) -> None:
        self._stream = store.changes()
        self._next: asyncio.Task[frozenset[int] | None] | None = None

    async def _one(self) -> frozenset[int] | None:
        return await anext(self._stream)

    async def wait(self) -> None:
        """Wait for a change, or for some time."""
        waiting = self._next or start_task(asyncio.get_running_loop(), self._one())
        self._next = waiting
        await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
        if waiting.done():
            waiting.result()
            self._next = None

    async def close(self) -> None:
        """Ask for no more changes."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        await self._stream.aclose()


class _Here:
    """A run that this process has, or waits for.

    Attributes:
        graph: the name of its graph.
        digest: the digest of its arguments.
        task: runs it, or waits for its end elsewhere.
        callers: how many callers wait for its end.
    """

    def __init__(self, graph: str, digest: str, task: "asyncio.Task[Any]") -> None:
        self.graph = graph
        self.digest = digest
        self.task = task
        self.callers = 0
        self.is_leaving = False


def _refuse_others(key: str, graph: str, digest: str, call: Call[Any], own: str) -> None:
    if graph != call.graph.name:
        raise OtherArguments(f"key {key!r} belongs to a call of graph {graph!r}, not of {call.graph.name!r}")
    if digest != own:
        raise OtherArguments(
            f"key {key!r} belongs to a call of {graph!r} with other arguments: a key names one call; use another key"
        )


def _digest(plan: Plan) -> str:
    steps = repr([sorted(wirings(one).items()) for one in _plans(plan)])
    return blake2b(steps.encode(), digest_size=8).hexdigest()


def _plans(plan: Plan) -> Iterable[Plan]:
    yield plan
    for step in plan.steps:
        for body in step.run_bodies:
            yield from _plans(body)


_PART = re.compile(r"(?P<label>.+?)(?P<body>\[\d+\]\??|:\d+|!)?(?:@\d+)?(?:\{(?P<wiring>\w+)\})?")


def check_steps(plan: Plan, entries: Iterable[Entry], key: str) -> None:
    """Check that the graph has each step that is kept.

    Raises:
        OtherGraph: it has not, or the arguments of a step that occurs twice come from elsewhere.
    """
    paths = [entry.path for entry in entries if entry.kind not in ("arguments", "forgotten") and entry.path]
    repeated = {part.partition("#")[0] for path in paths for part in path.split("/") if "#" in part}
    known: dict[str, Plan | None] = {}
    for path in paths:
        inside: Plan | None = plan
        way = ""
        for part in path.split("/"):
            if inside is None or not part or "(" in part or part.startswith("sleep~"):
                break
            way += "/" + re.sub(r"\[\d+\]", "[]", part)
            if way not in known:
                known[way] = _inside(inside, part, path, key, repeated)
            inside = known[way]


def _inside(plan: Plan, part: str, path: str, key: str, repeated: set[str]) -> Plan | None:
    """Return the plan of the body that a part of a path leads to; None if the part is a step."""
    found = _PART.fullmatch(part)
    assert found is not None
    label, wiring = found["label"], found["wiring"]
    step = next((one for one in plan.steps if one.label == label), None)
    told = f"run {key!r} has kept step {path!r}, and graph {plan.name!r} "
    ways_out = "run the code that has begun it, or fork the run before that step"
    if step is None:
        steps = ", ".join(one.label for one in plan.steps)
        raise OtherGraph(f"{told}has no step {label!r} (it has {steps}): {ways_out}")
    name = label.partition("#")[0]
    is_repeated = name in repeated or any(one.label.startswith(f"{name}#") for one in plan.steps)
    if wiring is not None and is_repeated and wirings(plan)[label] != wiring:
        raise OtherGraph(f"{told}has a step {label!r} that takes other arguments, so it may be another one: {ways_out}")
    body, bodies = found["body"], step.run_bodies
    if not body or not bodies:
        return None
    if body.startswith(":"):
        return bodies[int(body[1:])] if int(body[1:]) < len(bodies) else None
    return bodies[0] if body.endswith("?") else bodies[-1]
