"""Checkpoint, the options of a call that is saved as it goes; and Saving, which makes cuts of such a call."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from .._errors import CheckpointError, EngineClosedError, OptionsError, PlanError, add_note
from ..actors.accepted import Accepted, check_fields, one_of, optional, whole
from ..actors.stream_buffer import Mark, MarkedBuffer, Reader, StreamBuffer, close_stream
from ..actors.tasks import start_task, uninterrupted
from ..actors.threads import ThreadPool
from ..telemetry import logs
from ..telemetry.counters import SavedCuts
from ..telemetry.profiling import collectors
from .graph import Call
from .marks import Stop, has_state, way_of
from .program import Plan

if TYPE_CHECKING:
    from ..saving.cuts import Cut, CutFolder, SavedCut
    from .instances import InstanceRegistry

# What `saving` needs (files, checksums, NumPy where there are arrays) is imported when a call is saved.

OnMismatch = Literal["raise", "continue"]
OnSaveError = Literal["log", "raise"]

# The names of states that belong to no step of the graph. A label has no parentheses.
_READER: Final = "(reader)"
_STREAM: Final = "(stream)"


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a call is saved, so that the next one goes on from there.

    Args:
        folder: where the cuts are. If there is one that is whole, the call goes on from the newest; else it begins
            anew. One run at a time may use it.
        every: how many records of the source there are between two cuts. One that comes while another is on its way,
            or being written, is left out.
        keep: how many cuts are kept.
        reader: an object with `state()` and `restore(state)` that the reader of the stream changes, such as a model
            that is trained in the `async for`. It is asked when the reader asks for the value behind a cut.
        on_mismatch: "raise" refuses cuts of another graph, source or settings, and says what differs. "continue"
            goes on with the states that have the same names.
        on_save_error: "log" goes on where a cut cannot be written, because the disk is full for instance; "raise" ends
            the call.

    Raises:
        OptionsError: an argument does not accept its value.
    """

    folder: str | os.PathLike[str]
    every: int = 100
    keep: int = 3
    reader: Any = None
    on_mismatch: OnMismatch = "raise"
    on_save_error: OnSaveError = "log"

    def __post_init__(self) -> None:
        check_fields(self, _CHECKPOINT, "Checkpoint(")


_CHECKPOINT: Final = {
    "folder": Accepted("a path", lambda value: isinstance(value, str | os.PathLike) and value != ""),
    "every": whole(1),
    "keep": whole(1),
    "reader": optional(Accepted("an object with state() and restore(state), each a plain `def`", has_state)),
    "on_mismatch": one_of(OnMismatch),
    "on_save_error": one_of(OnSaveError),
}


class Saving:
    """The cuts of one call: the newest one that it goes on from, and those that it makes.

    Args:
        checkpoint: the options.
        call: the call.
        plan: the plan of its graph.

    Attributes:
        record: how many records the source has given, those before the restart included.
        saved: how many cuts were written.
        skipped: how many were left out, because the one before was still on its way.
        failed: how many could not be written.
        bytes: the size of those that were written.
        write_seconds: how long that took, beside the pipeline.
        copy_seconds: how long states were copied, while their steps waited.
        is_done: whether the call has come to its end, which `close` then saves.
        on_failure: ends the call with an error.

    Raises:
        OptionsError: `checkpoint` is not a `Checkpoint`.
        PlanError: what comes after a restart would not be what comes without one.
    """

    def __init__(self, checkpoint: Checkpoint, call: Call[Any], plan: Plan) -> None:
        if not isinstance(checkpoint, Checkpoint):  # pyright: ignore[reportUnnecessaryIsInstance] - users without a checker
            raise OptionsError(f"checkpoint={checkpoint!r}: a penstock.Checkpoint(folder)")
        self._checkpoint = checkpoint
        self._way = way_of(plan, has_state_behind=checkpoint.reader is not None)
        self._check_argument(call, plan)
        self._plan = plan
        self._folder: CutFolder | None = None
        self._encode: Callable[..., Any] = _ignored  # that of `saving`, once the call is opened
        self._threads = ThreadPool(1, name="penstock-saving")
        self._restored: dict[str, Any] = {}
        same = {**self._way.fingerprint(), "reader": checkpoint.reader is not None}
        self._same = tuple(same)
        self._fingerprint: dict[str, Any] = {**same, "sources": {}}
        self._cut: Cut | None = None
        self._ends_at_once = False
        self._in_flight: Mark | None = None
        self._writing: asyncio.Task[None] | None = None
        self._asked: list[asyncio.Future[None]] = []  # by `checkpoint()`, for the next mark
        self._answers: list[asyncio.Future[None]] = []  # those for the mark that is on its way
        self._held: dict[str, Any] = {}  # what has state, by name
        self._result: MarkedBuffer[Any] | None = None
        self.record = 0
        self.due = checkpoint.every
        self.saved = self.skipped = self.failed = self.bytes = 0
        self.write_seconds = self.copy_seconds = 0.0
        self._reported = SavedCuts()
        self.is_done = False
        self.on_failure: Callable[[BaseException], object] = _ignored

    def _check_argument(self, call: Call[Any], plan: Plan) -> None:
        for name in self._way.parameters:
            given = call.arguments[plan.parameters.index(name)]
            if not has_state(given) or getattr(given, "reads_another", False):
                raise PlanError(
                    f"argument {name!r} of graph {plan.name!r} is the source of a call with checkpoint=, and this "
                    f"{type(given).__name__} would begin at its first record again: pass data.order(source), or an "
                    "object with state() and restore(state), and put stages into the graph"
                )
            given.state()  # it may say that it has none

    # The beginning.

    async def open(self, plan: Plan, instances: "InstanceRegistry") -> None:
        """Open the folder, and give the instances of classes the states that they had at the newest cut.

        Raises:
            CheckpointError: the folder is not writable, another run has it, all cuts in it are damaged, or they are of
                another graph.
        """
        from ..saving.encoding import encode

        self._plan = plan
        self._encode = encode
        for stop in self._way.stops.values():
            for name, node in stop.nodes.items():
                self._held[name] = instances.instance_of(node).value
        if self._checkpoint.reader is not None:
            self._held[_READER] = self._checkpoint.reader
        template = {name: one.state() for name, one in self._held.items()}
        # Of the others, whose template is not known yet: arrays of JAX, without a sharding.
        template = {_STREAM: 0, **{stop.name: 0 for stop in self._way.stops.values()}, **template}
        await uninterrupted(self._open_folder())  # a cancel in the midst of it would leave the folder locked
        assert self._folder is not None
        cut = self._cut = await self._in_thread(partial(self._folder.newest, template))
        if cut is None:
            return
        self._compare(*({name: one[name] for name in self._same} for one in (cut.fingerprint, self._fingerprint)))
        self._restored = dict(cut.states)
        self.record = cut.record
        self.due = cut.record + self._checkpoint.every
        self._ends_at_once = cut.ended
        for name, one in self._held.items():
            self.restore(name, one)

    async def _open_folder(self) -> None:
        from ..saving.cuts import CutFolder

        make = partial(CutFolder, self._checkpoint.folder, keep=self._checkpoint.keep)
        self._folder = await self._in_thread(make)

    def restore(self, name: str, holder: Any) -> None:
        """Give what holds a state the one that it had at the newest cut, if there is one."""
        if name in self._restored:
            try:
                holder.restore(self._restored[name])
            except Exception as error:
                add_note(error, f"while the state of {name!r} was restored from {self._checkpoint.folder}")
                raise

    def _compare(self, stored: Mapping[str, Any], present: Mapping[str, Any]) -> None:
        """Compare fingerprints, and refuse those that differ."""
        found = _differences(*(json.loads(json.dumps(one)) for one in (stored, present)))
        if not found:
            return
        told = "; ".join(found)
        if self._checkpoint.on_mismatch == "continue":
            logs.warning("checkpoint.mismatch", path=str(self._checkpoint.folder), differs=told)
            return
        raise CheckpointError(
            f"the cuts in {self._checkpoint.folder} are those of another run: {told}. Take another folder to begin "
            'anew, or say on_mismatch="continue" to go on all the same'
        )

    def place(self, plan: Plan, number: int) -> "Place | None":
        """Return what a step does when a mark comes; None for a step that no mark passes.

        Args:
            plan: the plan that the step is in, or that of a body.
            number: the number of its value.
        """
        stop = self._way.stops.get(number) if plan is self._plan else None
        return None if stop is None else Place(self, stop)

    # The source.

    def begin(self, stop: Stop, iterator: Any) -> None:
        """Restore what a step has made, if it has state, and ask it for that at each mark."""
        try:
            self._begin(stop, iterator)
        except Exception as error:
            # Now, and not behind what steps hold of the run before, or when a mix first takes from this source.
            if stop.is_source or stop.mixed is not None:
                self.on_failure(error)
            raise

    def _begin(self, stop: Stop, iterator: Any) -> None:
        if stop.is_source or stop.mixed is not None:
            self._check_source(stop.name, iterator)
        if stop.is_source:
            self.record = 0 if self._cut is None else self._cut.record
            self._end_at_once()
        if stop.mixed is not None:
            mix, number = stop.mixed
            if self._cut is not None and mix in self._restored:
                before = self._cut.fingerprint["sources"].get(stop.name, {}).get("epochs")
                iterator.restore(iterator.after(self._restored[mix]["taken"][number], before))
        elif stop.keeps_iterator:
            if stop.is_source:
                iterator.state()  # it may say that it has none
            self._held[stop.name] = iterator
            self.restore(stop.name, iterator)

    def _check_source(self, name: str, source: Any) -> None:
        """Compare what a source knows of itself, such as its length and its seed, with that of the newest cut."""
        tell: Callable[[], dict[str, Any]] | None = getattr(source, "fingerprint", None)
        present: dict[str, Any] = {} if tell is None else tell()
        try:
            is_json = type(present) is dict and json.loads(json.dumps(present)) == present
        except (TypeError, ValueError):
            is_json = False
        if not is_json:
            raise PlanError(
                f"fingerprint() of source {name!r} returned {present!r:.200}, which JSON does not give back as it was: "
                "return a dict with texts as keys, of texts, numbers, True, False, None, lists and dicts"
            )
        self._fingerprint["sources"][name] = present
        known: dict[str, Any] = {} if self._cut is None else self._cut.fingerprint.get("sources", {})
        if name not in known:
            return
        stored: dict[str, Any] = dict(known[name])
        before, now = stored.get("epochs"), present.get("epochs")
        if before != now and (now is None or (before is not None and now > before)):
            self._ends_at_once = False
            stored["epochs"] = now
        self._compare({name: stored}, {name: present})

    def _end_at_once(self) -> None:
        """End the stream if the newest cut is that of its end: steps might give what comes behind their loop again."""
        if self._ends_at_once and self._result is not None:
            self._result.end()

    async def due_mark(self, stop: Stop, outputs: Sequence[MarkedBuffer[Any]]) -> None:
        """Put a mark into the stream of the source, if none is on its way."""
        is_asked = bool(self._asked)
        if self._in_flight is not None:
            if not is_asked:
                self.skipped += 1
            self.due = self.record + (1 if is_asked else self._checkpoint.every)
            return
        mark = self._in_flight = Mark(self.record)
        self._answers, self._asked = self._asked, []
        self.due = self.record + self._checkpoint.every
        await self.take(mark.states, stop)
        for one in outputs:
            one.put_mark(mark)

    # States.

    async def take(self, states: dict[str, Any], stop: Stop) -> None:
        """Add the states of a step; they are copied before this returns."""
        for name in stop.nodes:
            await self._take(states, name, self._held[name].state())
        if stop.keeps_iterator and stop.mixed is None:
            await self._take(states, stop.name, self._held[stop.name].state())

    async def _take(self, states: dict[str, Any], name: str, state: Any) -> None:
        if _is_small(state):
            states[name] = self._encode(state, name, copy=True)
            return
        began = perf_counter()
        states[name] = await self._in_thread(partial(self._encode, state, name, copy=True))
        self.copy_seconds += perf_counter() - began

    async def _take_reader(self, states: dict[str, Any], unread: list[Any]) -> None:
        assert self._result is not None
        if self._checkpoint.reader is not None:
            await self._take(states, _READER, self._checkpoint.reader.state())
        await self._take(states, _STREAM, {"position": self._result.position, "unread": unread})

    # The end of a mark.

    def opened(self, buffer: StreamBuffer[Any]) -> None:
        """Note the stream that the reader reads: it goes on from the position of the newest cut."""
        told = self._restored.get(_STREAM, {"position": 0, "unread": []})
        assert isinstance(buffer, MarkedBuffer)
        self._result = buffer
        buffer.position = told["position"]
        buffer.held.extendleft(reversed(told["unread"]))
        buffer.on_mark = self._reader_asks

    async def _reader_asks(self) -> None:
        """Complete the cut: the reader asks for the value behind the mark, or saves those before it as unread."""
        buffer = self._result
        assert buffer is not None
        mark = buffer.mark
        assert mark is not None
        try:
            await self._take_reader(mark.states, list(buffer.held))
        except Exception as error:  # noqa: BLE001 - of user code, or not storable: it is the error of the call
            buffer.release()
            self.on_failure(error)
            return
        self.complete(mark)
        buffer.release()

    def complete(self, mark: Mark) -> None:
        """Write the cut of a mark that has come to its end, beside the pipeline."""
        self._writing = start_task(asyncio.get_running_loop(), self._write(mark), name="penstock-saving")

    async def _write(self, mark: Mark, *, ended: bool = False) -> None:
        from ..saving.cuts import Cut

        assert self._folder is not None
        answers, self._answers = self._answers, []
        cut = Cut(mark.record, mark.states, self._fingerprint, ended)
        try:
            written: SavedCut = await self._in_thread(partial(self._folder.save, cut))
        except CheckpointError as error:
            self.failed += 1
            logs.warning("checkpoint.not_saved", record=mark.record, error=str(error))
            _settle(answers, error)
            if self._checkpoint.on_save_error == "raise":
                self.on_failure(error)
                if ended:
                    raise
        except Exception as error:  # such as NotStorable: it is the error of the call
            _settle(answers, error)
            self.on_failure(error)
            if ended:
                raise
        else:
            self.saved += 1
            self.bytes += written.bytes
            self.write_seconds += written.seconds
            _settle(answers, None)
        finally:
            self._in_flight = self._writing = None
            self._report()

    def _report(self) -> None:
        """Tell profiles what cuts have cost since the last time."""
        costs = SavedCuts(self.saved, self.skipped, self.failed, self.bytes, self.write_seconds, self.copy_seconds)
        collectors.cuts_saved(self._way.graph, costs.less(self._reported))
        self._reported = costs

    # Cuts that the reader asks for, and the last one.

    def put_back(self, value: Any) -> None:
        """Note that the reader has not got the value that it took last."""
        assert self._result is not None
        if not self._result.abandoned:
            self._result.held.appendleft(value)
            self._result.position -= 1

    async def checkpoint(self, *, is_reader: bool) -> None:
        """Make a cut now, and wait until it is written.

        Args:
            is_reader: whether the reader waits for this. Then the values that it has not taken are stored as well, and
                come first after a restart.

        Raises:
            CheckpointError: it could not be written.
        """
        buffer = self._result
        assert buffer is not None
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self.due = self.record
        try:
            while is_reader and not asked.done():
                if buffer.mark is not None:
                    await buffer.pass_mark()
                elif self._writing is not None:
                    await asyncio.wait([self._writing])
                elif buffer.error is not None:
                    # Those for a mark on its way, too: it will not arrive.
                    _settle([*self._asked, *self._answers], _over(buffer.error))
                elif buffer.ended or buffer.abandoned:
                    await self._save_end(list(buffer.held))
                else:
                    buffer.drain()
                    await StreamBuffer[Any].wait(buffer)
            await asked
        finally:
            if not asked.cancel() and not asked.cancelled():
                asked.exception()  # marks it as retrieved: what has failed here may have settled it with the same error

    async def _save_end(self, unread: list[Any]) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self._answers, self._asked = [*self._answers, *self._asked], []
        end = Mark(self.record)
        for name, one in self._held.items():
            if name != _READER:
                await self._take(end.states, name, one.state())
        if self._result is not None:
            await self._take_reader(end.states, unread)
        await self._write(end, ended=True)

    async def close(self) -> None:
        """Save the end, if the call has come there; wait for what is being written, and give the folder back.

        Raises:
            Exception: the end could not be saved.
        """
        try:
            has_unread = bool(self._restored.get(_STREAM, {}).get("unread"))
            if self.is_done and (has_unread or not self._ends_at_once):
                await self._save_end([])
            elif self._writing is not None:
                await asyncio.wait([self._writing])
        finally:
            _settle([*self._asked, *self._answers], _over())
            await self._threads.aclose()
            if self._folder is not None:
                self._folder.close()
            self._held.clear()

    def state_of(self, name: str, template: Any) -> Any:
        """Return a state of the newest cut, its arrays placed as those of the template; None if there is none."""
        if name not in self._restored:
            return None
        from ..saving.encoding import decode

        return decode(self._encode(self._restored[name], name), template)

    async def _in_thread(self, fn: Callable[[], Any]) -> Any:
        return await self._threads.submit(copy_context(), None, fn)


class Place:
    """A step that marks pass, of a call that is saved.

    Attributes:
        saving: the cuts of the call.
        stop: the step.
    """

    def __init__(self, saving: Saving, stop: Stop) -> None:
        self.saving = saving
        self.stop = stop

    def begin(self, start: Callable[[], Any], outputs: Sequence[MarkedBuffer[Any]]) -> Callable[[], Any]:
        """Return what makes the iterator of the step: with its state, and with marks if it is the source."""

        def begin() -> Any:
            iterator = start()
            self.saving.begin(self.stop, iterator)
            return _Marking(iterator, self, outputs) if self.stop.is_source else iterator

        return begin

    def pass_marks(self, readers: Iterable[Reader[Any]], outputs: Sequence[MarkedBuffer[Any]]) -> None:
        """Have marks in the streams that the step reads go on to those that it gives."""
        inputs = [reader.buffer for reader in readers if isinstance(reader.buffer, MarkedBuffer)]

        async def on_mark() -> None:
            if not all([await one.until_mark() for one in inputs]):
                for one in inputs:  # one of them has failed, which ends all
                    if one.mark is not None:
                        one.release()
                return
            mark = inputs[0].mark
            assert mark is not None
            await self.saving.take(mark.states, self.stop)
            for output in outputs:
                output.put_mark(mark)
            if not outputs:
                self.saving.complete(mark)
            for one in inputs:
                one.release()

        for one in inputs:
            one.on_mark = on_mark


class _Marking(AsyncIterator[Any]):
    """The records of the source, with marks between them."""

    def __init__(self, records: Any, place: Place, outputs: Sequence[MarkedBuffer[Any]]) -> None:
        self._records = aiter(records)
        self._place = place
        self._outputs = outputs

    async def __anext__(self) -> Any:
        saving = self._place.saving
        if saving.record >= saving.due:
            await saving.due_mark(self._place.stop, self._outputs)
        record = await anext(self._records)
        saving.record += 1
        return record

    async def aclose(self) -> None:
        await close_stream(self._records)


# Copying fewer values than this takes less than a hop to a thread and back, which is about 50 µs.
_FEW: Final = 64
_FEW_BYTES: Final = 16_384


def _is_small(state: Any) -> bool:
    """Whether a state is made of a few numbers, texts and small arrays."""
    waiting: list[Any] = [state]
    for value in waiting:  # it grows meanwhile
        kind: type[Any] = type(cast("object", value))
        if kind in _ATOMS:
            continue
        if kind is dict or kind is list or kind is tuple:
            if len(value) + len(waiting) > _FEW:
                return False
            waiting += value.values() if kind is dict else value
        elif kind.__module__ != "numpy" or getattr(value, "nbytes", 0) > _FEW_BYTES:  # a function of NumPy has none
            return False
    return True


_ATOMS: Final = frozenset({type(None), bool, int, float, str})


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    if {type(before), type(now)} != {dict}:
        return [] if before == now else [f"{path} was {_shown(before)}, and is {_shown(now)}"]
    old: dict[str, Any] = before
    new: dict[str, Any] = now
    found: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        found += _differences(old.get(name, _MISSING), new.get(name, _MISSING), f"{path}.{name}" if path else name)
    return found


_MISSING: Final = object()


def _shown(value: object) -> str:
    return "not there" if value is _MISSING else repr(value)


def _settle(futures: Iterable["asyncio.Future[None]"], error: BaseException | None) -> None:
    for one in futures:
        if not one.done():
            if error is None:
                one.set_result(None)
            else:
                one.set_exception(error)


def _over(cause: BaseException | None = None) -> EngineClosedError:
    error = EngineClosedError("the stream has ended before this cut was made")
    error.__cause__ = cause
    return error


def _ignored(error: BaseException) -> None:
    return None
