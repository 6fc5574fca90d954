"""Checkpoint, the options of a call that is saved while it runs; and Checkpointer, which makes its snapshots."""

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from .._errors import CheckpointError, EngineClosedError, Noted, OptionsError, PlanError, with_cause
from .._public import LateModule
from ..actors.accepted import POSITIVE, OptionRule, check_fields, one_of, optional, whole
from ..actors.stream_buffer import Barrier, BarrierBuffer, Reader, StreamBuffer
from ..actors.tasks import close_stream, start_task, uninterrupted
from ..actors.threads import ThreadPool
from ..telemetry import logs
from ..telemetry.counters import Cuts, SavedSnapshots
from ..telemetry.profiling import collectors
from ..telemetry.profiling.collectors import Collector
from .checkpoint_path import CheckpointStep, checkpoint_path, nodes_of
from .checkpoint_schedule import CheckpointSchedule
from .graph import Call
from .node import is_node
from .program import Plan
from .stages import StageIterator, has_state, role_of

if TYPE_CHECKING:
    from ..saving import snapshots
    from ..saving.snapshots import Snapshot, SnapshotFolder, StoredSnapshot
    from .events import EventBuffer
    from .instances import InstanceRegistry
else:
    snapshots = LateModule("penstock.saving.snapshots")

# `saving` and its imports (files, checksums, NumPy where there are arrays) are imported when a call is saved.

OnMismatch = Literal["raise", "resize", "continue"]
OnSaveError = Literal["log", "raise"]

# The names of states that belong to no step of the graph. A label has no parentheses.
_READER: Final = "(reader)"
_STREAM: Final = "(stream)"

_MINUTE: Final = 60.0
_MAX_BYTES: Final = 256 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a call is saved, so that the next call goes on from the newest snapshot.

    Give at most one of the three intervals. Without an interval, a snapshot is made every 60 seconds. With
    `every_seconds=None`, snapshots are made only when `checkpoint()` is called.

    Args:
        folder: where the snapshots are. If the folder has a complete snapshot, the call goes on from the newest one;
            else the call begins anew. One run at a time may use the folder.
        every_values: how many values the reader takes between two snapshots, such as the steps of a training; of a
            `ps.fold`, how many values it folds.
        every_seconds: the time between two snapshots, in seconds.
        every_records: how many records of the source there are between two snapshots.
        keep: how many snapshots are kept.
        reader: an object with `state()` and `restore(state)` that the reader of the stream changes, such as a model
            that is trained in the `async for`. `state()` is called when the reader asks for the value behind a
            snapshot.
        max_bytes: the most bytes of arrays in the states of barriers on their way to the reader. Beyond this limit,
            snapshots are further apart than the interval says, and a warning is logged.
        on_mismatch: "raise" refuses snapshots of another graph, source or settings, and says what differs. "resize"
            accepts other sizes of batches, and other stages that only read ahead; no record is lost or comes twice.
            "continue" goes on with the states that have the same names.
        on_save_error: "log" logs a snapshot that cannot be written, because the disk is full for instance, and goes
            on; "raise" ends the call.

    Raises:
        OptionsError: an argument does not accept its value, or two intervals are given.
    """

    folder: str | os.PathLike[str]
    every_values: int | None = None
    every_seconds: float | None = _MINUTE
    every_records: int | None = None
    keep: int = 3
    reader: Any = None
    max_bytes: int = _MAX_BYTES
    on_mismatch: OnMismatch = "raise"
    on_save_error: OnSaveError = "log"

    def __post_init__(self) -> None:
        check_fields(self, _CHECKPOINT, "Checkpoint(")
        # Compare by identity: `every_seconds=60` from the user counts as a given interval, the default does not.
        given = [name for name in _INTERVALS if not any(getattr(self, name) is one for one in (None, _MINUTE))]
        if len(given) > 1:
            raise OptionsError(
                f"Checkpoint({given[0]}=, {given[1]}=): snapshots have one interval; give one of the two"
            )

    def stored(self, *, verify: bool = False) -> "list[snapshots.StoredSnapshot]":
        """Return the snapshots in the folder, oldest first. Reads files, so it blocks; a run may write there meanwhile.

        Args:
            verify: whether to compare checksums, which reads every file; else only the sizes of files are compared.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return snapshots.stored_snapshots(Path(self.folder).expanduser(), verify=verify)


_CHECKPOINT: Final = {
    "folder": OptionRule("a path", lambda value: isinstance(value, str | os.PathLike) and value != ""),
    "every_values": optional(whole(1)),
    "every_seconds": optional(POSITIVE),
    "every_records": optional(whole(1)),
    "keep": whole(1),
    "max_bytes": whole(1),
    "reader": optional(OptionRule("an object with state() and restore(state), each a plain `def`", has_state)),
    "on_mismatch": one_of(OnMismatch),
    "on_save_error": one_of(OnSaveError),
}


_INTERVALS: Final = ("every_values", "every_seconds", "every_records")


class Checkpointer:
    """The snapshots of one call: the newest snapshot, from which the call goes on, and the snapshots that it makes.

    Args:
        checkpoint: the options.
        call: the call.
        plan: the plan of its graph.

    Attributes:
        record: how many records the source has given, with the records before the restart.
        position: returns how many values the reader has taken, or the fold has folded.
        costs: the cost of the snapshots: their number, bytes and times.
        events: the events of the call; None if they are not read.
        counted: the sources before a mix, by name.
        all_begun: set when all sources go on from the newest snapshot, and none was refused; or when the call has
            ended.
        ends_at_once: whether the newest snapshot was made at the end of the stream; known when all sources have begun.
        source, begun: the only source that has state, once it has begun, and how many records it had given before.
        is_done: whether the call has come to its end, so that `close` saves a last snapshot.
        on_failure: ends the call with an error.

    Raises:
        OptionsError: `checkpoint` is not a `Checkpoint`.
        PlanError: the values after a restart would differ from the values without a restart.
    """

    def __init__(self, checkpoint: Checkpoint, call: Call[Any], plan: Plan) -> None:
        if not isinstance(checkpoint, Checkpoint):  # pyright: ignore[reportUnnecessaryIsInstance] - users without a checker
            raise OptionsError(f"checkpoint={checkpoint!r}: a penstock.Checkpoint(folder)")
        self._checkpoint = checkpoint
        self._path = checkpoint_path(plan, has_state_behind=checkpoint.reader is not None)
        self._check_argument(call, plan)
        self._plan: Plan | None = None  # once the call is opened
        self._folder: SnapshotFolder | None = None
        self._encode: Callable[..., Any] = _ignored  # `saving.encoding.encode`, once the call is opened
        self._threads = ThreadPool(2, name="penstock-saving")  # one thread writes, while the other copies
        self._restored: dict[str, Any] = {}
        has_reader = checkpoint.reader is not None
        self._fingerprint: dict[str, Any] = {**self._path.fingerprint(), "reader": has_reader, "sources": {}}
        self._snapshot: Snapshot | None = None
        self.ends_at_once = False
        self._on_way: deque[Barrier] = deque()  # barriers that the reader has not reached
        self._is_full: bool | None = False  # whether `max_bytes` kept a barrier back; None once that was logged
        # copies of the values that a stage holds, by the name of the stage
        self._copies: dict[str, dict[int, tuple[Any, Any]]] = {}
        self._first_states: dict[str, Any] = {}  # the state of the source before its first record
        self._writing: asyncio.Task[None] | None = None
        self._asked: list[asyncio.Future[None]] = []  # callers of `checkpoint()` that wait for the next snapshot
        self._held: dict[str, Any] = {}  # the objects with state, by name
        self.counted: dict[str, _Counted] = {}  # the sources before a mix, by name
        self._to_begin = {stop.name for stop in self._path.stops.values() if stop.gives_records}
        self.all_begun = asyncio.Event()
        self._result: BarrierBuffer[Any] | None = None
        self.events: EventBuffer | None = None
        self.record = 0
        has_other = checkpoint.every_values is not None or checkpoint.every_records is not None
        every_seconds = None if has_other else checkpoint.every_seconds
        self._schedule = CheckpointSchedule(checkpoint.every_values, checkpoint.every_records, every_seconds)
        self.due: float = 0  # the record before which the next barrier is put
        self.due_time: float = 0  # on the clock `monotonic`; a barrier is put when `due` or `due_time` is reached
        self.every_noted = checkpoint.every_records or _EVERY_NOTED
        self.position: Callable[[], int] = self._position
        self._copy_seconds = 0.0  # since the last snapshot
        self.costs = SavedSnapshots()
        self.cuts = Cuts(self._schedule.asked)
        self.source: Any = None
        self.begun = 0
        self.is_done = False
        self.on_failure: Callable[[BaseException], object] = _ignored

    def _check_argument(self, call: Call[Any], plan: Plan) -> None:
        for name in self._path.parameters:
            given = call.arguments[plan.parameters.index(name)]
            kind = type(given).__name__
            if not has_state(given) or (isinstance(given, StageIterator) and not given.role.is_source):
                raise PlanError(
                    f"argument {name!r} of graph {plan.name!r} is the source of a call with checkpoint=, and this "
                    f"{kind} would begin at its first record again after a restart: pass data.order(source), or an "
                    "object with state() and restore(state), and put stages into the graph"
                )

    # The beginning.

    async def open(self, plan: Plan, instances: "InstanceRegistry") -> None:
        """Open the folder, and restore the states of the instances of classes from the newest snapshot.

        Raises:
            CheckpointError: the folder is not writable, another run uses it, all snapshots in the folder are damaged,
                or the snapshots are of another graph.
        """
        from ..saving.encoding import encode

        self._plan = plan
        self._encode = partial(encode, exact=True)
        for stop in self._path.stops.values():
            for name, one in stop.holders.items():
                self._held[name] = cast("Any", instances.child_of(one)).value if is_node(one) else one
        if self._checkpoint.reader is not None:
            self._held[_READER] = self._checkpoint.reader
        template = {name: one.state() for name, one in self._held.items()}
        # refuses states that cannot be stored
        await self._in_thread(lambda: [encode(state, name) for name, state in template.items()])
        # The other templates are not known yet: their arrays become arrays of JAX without a sharding.
        template = {_STREAM: 0, **{stop.name: 0 for stop in self._path.stops.values()}, **template}
        await uninterrupted(self._open_folder())  # a cancel halfway would leave the folder locked
        assert self._folder is not None
        snapshot = self._snapshot = await self._in_thread(partial(self._folder.newest, template))
        if snapshot is None:
            return
        self._compare({**snapshot.fingerprint, "sources": {}}, self._fingerprint, self._path.sizes)
        self._restored = dict(snapshot.states)
        self.record = snapshot.record
        self.ends_at_once = snapshot.ended
        for name, one in self._held.items():
            self.restore(name, one)

    async def _open_folder(self) -> None:
        make = partial(snapshots.SnapshotFolder, self._checkpoint.folder, keep=self._checkpoint.keep)
        self._folder = await self._in_thread(make)

    def restore(self, name: str, holder: Any) -> None:
        """Restore the state of an object from the newest snapshot, if the snapshot has a state of that name."""
        if name in self._restored:
            with Noted(f"while the state of {name!r} was restored from {self._checkpoint.folder}"):
                holder.restore(self._restored[name])

    def _compare(self, stored: Mapping[str, Any], present: Mapping[str, Any], sizes: Collection[str]) -> None:
        """Compare fingerprints, and refuse a snapshot whose fingerprint differs.

        Args:
            stored: the fingerprint of the newest snapshot.
            present: the fingerprint of this call.
            sizes: the paths of the settings that may differ with `on_mismatch="resize"`.
        """
        before, now = (json.loads(json.dumps(one)) for one in (stored, present))
        for settings in (*before.get("nodes", {}).values(), *now.get("nodes", {}).values()):
            settings["bodies"] = nodes_of(settings.get("bodies", ()))
        optional = {*before.pop("optional", ()), *now.pop("optional", ())}
        found = _differences(before, now)
        if not found:
            return
        for one in (before, now) if optional else ():
            one["order"] = [name for name in one["order"] if name not in optional]
            one["nodes"] = {name: settings for name, settings in one["nodes"].items() if name not in optional}
        are_sizes = all(path in sizes for path, _ in _differences(before, now))
        told, on_mismatch = "; ".join(text for _, text in found), self._checkpoint.on_mismatch
        if on_mismatch == "resize" and are_sizes:
            return
        if on_mismatch == "continue":
            logs.warning("checkpoint.mismatch", path=str(self._checkpoint.folder), differs=told)
            return
        remedy = '"resize", which loses no record' if are_sizes else '"continue" to go on all the same'
        raise CheckpointError(
            f"the snapshots in {self._checkpoint.folder} are of another run: {told}. Take another folder to "
            f"begin anew, or say on_mismatch={remedy}"
        )

    def place(self, plan: Plan, number: int) -> "StepCheckpoint | None":
        """Return the object that handles the barriers of a step; None for a step that no barrier passes.

        Args:
            plan: the plan that has the step: the plan of the graph, or of a body.
            number: the number of the value that the step gives.
        """
        stop = self._path.stops.get(number) if plan is self._plan else None
        return None if stop is None else StepCheckpoint(self, stop)

    # The source.

    def begin(self, stop: CheckpointStep, iterator: Any) -> None:
        """Restore the iterator of a step, if it has state, and ask for its state at each barrier from now on."""
        try:
            if stop.gives_records:
                self._check_source(stop.name, iterator, is_mixed=stop.mixed is not None)
            if stop.is_source:
                self.record = 0 if self._snapshot is None else self._snapshot.record
            if stop.mixed is not None:
                self._begin_mixed(stop, iterator, *stop.mixed)
            elif stop.keeps_iterator:
                self._held[stop.name] = iterator
                self.restore(stop.name, iterator)
                if stop.is_source:
                    self.source, self.begun = iterator, self.record
                    # `state()` of the source may raise PlanError. Else this is its state at the first barrier.
                    self._first_states[stop.name] = self._encode(iterator.state(), stop.name, copy=True)
                place = self._place_again(stop.placed)
                if place is not None and isinstance(iterator, StageIterator):
                    iterator.place_again(place)
        except Exception as error:
            # Fail the call now. Otherwise the error would wait behind restored values, or until a mix reads this
            # source.
            if stop.gives_records:
                self.on_failure(error)
            raise
        self._to_begin.discard(stop.name)
        self._sources_begun()

    def _place_again(self, placed: CheckpointStep | None) -> Callable[[Any], Any] | None:
        """Return the function that places values of the snapshot, if `data.to_device` now places values elsewhere."""
        if self._snapshot is None or placed is None or self._restored.get(placed.place_name) == placed.places.state():
            return None
        place: Callable[[Any], Any] = placed.places.again
        return place

    def _begin_mixed(self, stop: CheckpointStep, source: Any, mix: str, number: int) -> None:
        taken = self._restored[mix]["taken"][number] if mix in self._restored else 0
        if stop.is_between:
            source.restore({"count": taken})
            return
        given, is_order = 0, role_of(source).gives == "order"
        if is_order and self._snapshot is not None:
            before = self._snapshot.fingerprint["sources"].get(stop.name, {}).get("epochs")
            source.restore(source.after(taken, before))
            given = taken
        elif stop.name in self._restored:
            given, self._restored[stop.name] = self._restored[stop.name].values()
            self.restore(stop.name, source)
        counted = _Counted(source, stop.name, self, given, lambda: self._held[mix].taken[number])
        self.counted[stop.name] = counted
        if not is_order:
            state = {"given": given, "state": source.state()}  # `state()` may raise PlanError
            counted.states.append((given, self._encode(state, stop.name, copy=True)))

    def _check_source(self, name: str, source: Any, *, is_mixed: bool) -> None:
        """Compare the fingerprint of a source, such as its length and seed, with the one in the newest snapshot."""
        tell: Callable[[], dict[str, Any]] | None = getattr(source, "fingerprint", None)
        present: dict[str, Any] = {} if tell is None else tell()
        try:
            read = json.loads(json.dumps(present))
        except (TypeError, ValueError):
            read = None
        if type(present) is not dict or read != present:
            raise PlanError(
                f"fingerprint() of source {name!r} returned {present!r:.200}, which changes on its way through JSON: "
                "return a dict with texts as keys, of texts, numbers, True, False, None, lists and dicts"
            )
        self._fingerprint["sources"][name] = present
        known: dict[str, Any] = {} if self._snapshot is None else self._snapshot.fingerprint.get("sources", {})
        if name not in known:
            return
        stored: dict[str, Any] = dict(known[name])
        before, now = stored.get("epochs"), present.get("epochs")
        if before != now and (now is None or (before is not None and now > before)):
            self.ends_at_once = False
            stored["epochs"] = now
        sizes = () if is_mixed else role_of(source).may_change  # a mix counts batches
        self._compare({name: stored}, {name: present}, {f"{name}.{one}" for one in sizes})

    def _sources_begun(self) -> None:
        """End the stream if the newest snapshot was made at its end: a step might repeat the code behind its loop."""
        if self._to_begin:
            return
        self.all_begun.set()
        if self.ends_at_once and self._result is not None:
            self._result.end()

    async def put_barrier(self, stop: CheckpointStep, outputs: Sequence[BarrierBuffer[Any]]) -> None:
        """Put a barrier into the stream of the source, unless the states of earlier barriers have too many bytes."""
        is_asked = not all(one.done() for one in self._asked)
        self.due, self.due_time = self._schedule.barrier_put(self.record)
        if not is_asked and self._bytes_on_way() >= self._checkpoint.max_bytes:
            self._is_full = None if self._is_full is None else True
            return
        barrier = Barrier(self.record, is_asked=is_asked)
        self._on_way.append(barrier)
        barrier.copied_bytes += await self.take(barrier.states, stop)
        self.give(barrier, outputs)
        if is_asked and self.events is not None and self._asked:
            # The snapshot also stores the events that the reader has not taken. So no item behind the barrier may emit
            # an event before the snapshot is written.
            await asyncio.wait(self._asked)
        barrier.is_asked = False

    @property
    def is_overdue(self) -> bool:
        """Whether the source should have put a barrier earlier."""
        return self._schedule.is_overdue(self.position() if self._result is None else self._result.given)

    def _bytes_on_way(self) -> int:
        """Return how many bytes the states of barriers on their way have; an array that several share counts once.

        A value can be in the states of several barriers in a row. So each barrier after the first adds only the bytes
        that were copied for it.
        """
        on_way = self._on_way
        return sum(one.copied_bytes for one in on_way) - on_way[0].copied_bytes + on_way[0].array_bytes if on_way else 0

    def give(self, barrier: Barrier, outputs: Iterable[BarrierBuffer[Any]]) -> None:
        """Put a barrier into the streams that a step gives."""
        for output in outputs:
            output.put_barrier(barrier)
            if output is self._result:
                self._arrived(barrier, output.given)

    def _arrived(self, barrier: Barrier, values: int) -> None:
        """Note how many values there are before a barrier; the number decides where the next barriers are put."""
        self._schedule.arrived(barrier.record, values, self.position())
        if not self._asked:
            self.due, self.due_time = self._schedule.next_barrier()

    # States.

    async def take(self, states: dict[str, Any], stop: CheckpointStep) -> int:
        """Add the states of a step, copied, to `states`. Returns how many bytes were copied."""
        copied_bytes = 0
        for name in (*stop.holders, *([stop.name] if stop.keeps_iterator else ())):
            held = self._held.get(name)
            if held is not None or name in self._restored:  # if the call ended before the step began
                role = held.role if isinstance(held, StageIterator) else None
                splits = stop.placed is not None or role is None or role.is_source
                copy = self._first_states.pop(name, None)
                if copy is None:
                    with Noted(f"while the state of {name!r} was asked for"):
                        state = self._restored[name] if held is None else held.state()
                    copy = await self.copied(state, name, splits=splits, holds=role is not None and role.holds_values)
                states[name] = copy
                copied_bytes += copy.copied_bytes
        if stop.is_source:
            states |= {name: one.at_barrier() for name, one in self.counted.items() if one.states}
        return copied_bytes

    async def copied(self, state: Any, name: str, *, splits: bool = True, holds: bool = False) -> Any:
        """Return a copy of a state, encoded.

        Args:
            state: the state.
            name: its name.
            splits: whether its arrays may be split over devices.
            holds: whether the state consists of values that nothing changes; then each value is copied only once.
        """
        copies = self._copies.setdefault(name, {}) if holds else None
        encode = partial(self._encode, state, name, copy=True, splits=splits, copies=copies)
        began = perf_counter()
        copy = encode() if _is_small(state) else await self._in_thread(encode)
        self._copy_seconds += perf_counter() - began
        return copy

    async def _take_reader(self, states: dict[str, Any]) -> None:
        assert self._result is not None
        if self._checkpoint.reader is not None:
            with Noted("while the state of the reader was copied"):
                states[_READER] = await self.copied(self._checkpoint.reader.state(), _READER)
        position = self._result.position
        state = {"position": position, "unread": list(self._result.held)}
        if self.events is not None and self.events.held:
            barrier = self._result.barrier
            is_first = barrier is not None and not barrier.is_asked and self._schedule.is_among_unread(position)
            state["events"] = self.events.stored(only_restored=is_first)
        states[_STREAM] = await self.copied(state, _STREAM, splits=self._path.placed is not None, holds=True)

    # The end of a barrier.

    def opened(self, buffer: StreamBuffer[Any]) -> None:
        """Note the stream of the reader, and set it to the position of the newest snapshot."""
        told = self._restored.get(_STREAM, {"position": 0, "unread": []})
        assert isinstance(buffer, BarrierBuffer)
        self._result = buffer
        buffer.position = told["position"]
        place = self._place_again(self._path.placed)
        buffer.held.extendleft(reversed(told["unread"] if place is None else [*map(place, told["unread"])]))
        buffer.given += buffer.position + len(told["unread"])
        buffer.on_barrier = partial(self._at_end, buffer, self._take_reader)
        self._schedule.begin(self.record, buffer.position, len(told["unread"]))
        if self.events is not None:
            self.events.restore(told.get("events", ()))
        self._sources_begun()

    def is_late(self, position: int) -> bool:
        """Whether a snapshot is due before the reader reaches the next barrier."""
        if self._writing is not None or (self.events is not None and not self._schedule.is_among_unread(position)):
            return False
        return self._schedule.is_late(position)

    def _is_due(self, barrier: Barrier) -> bool:
        """Whether a snapshot is due at a barrier that the reader, or the fold, has reached."""
        if not all(one.done() for one in self._asked):
            return True
        position = self.position()
        return self._writing is None and (self._schedule.is_due(barrier.record, position) or self.is_late(position))

    async def begin_fold(self, stop: CheckpointStep, fold: Any, values: StreamBuffer[Any]) -> None:
        """Have a fold go on from the newest snapshot, once all sources have begun.

        Args:
            stop: the step.
            fold: the fold, with `state` and `restore`; `count` is how many values it has folded.
            values: the stream that it reads; the reader leaves it if the snapshot was made at the end of the stream.
        """
        from ..saving.encoding import decode

        assert isinstance(values, BarrierBuffer)
        if stop.name in self._restored:  # its arrays are placed like the arrays of the initial state
            self._restored[stop.name] = decode(self._encode(self._restored[stop.name]), fold.state())
        self.begin(stop, fold)
        self.position = lambda: fold.count
        self._schedule.begin(self.record, fold.count)
        values.on_barrier = partial(self._at_end, values, partial(self.take, stop=stop))
        await self.all_begun.wait()
        if self.ends_at_once:  # steps might run the code behind their loop again
            values.abandon()

    async def _at_end(self, buffer: BarrierBuffer[Any], take: Callable[[dict[str, Any]], Awaitable[object]]) -> None:
        """Complete the snapshot of the first barrier, if a snapshot is due, and remove the barrier.

        The reader is there: it asks for the value behind the barrier, or stores the values before it as unread.

        Args:
            buffer: the stream that the reader, or the fold, reads.
            take: adds the last states of the snapshot.
        """
        barrier = buffer.barrier
        assert barrier is not None
        if self._result is None:
            self._arrived(barrier, self.position())
        try:
            if self._is_due(barrier):
                began = perf_counter()
                if self._writing is not None:
                    await asyncio.wait([self._writing])
                states = dict(barrier.states)
                await take(states)
                self._add(SavedSnapshots(reader_seconds=perf_counter() - began))
                answers, self._asked = self._asked, []
                writing = self._write(self._snapshot_of(barrier.record, states), answers)  # beside the pipeline
                self._writing = start_task(asyncio.get_running_loop(), writing, name="penstock-saving")
        except Exception as error:  # noqa: BLE001 - user code failed, or a state cannot be stored: the call fails
            buffer.release()
            self.on_failure(error)
            return
        if not buffer.held and buffer.barrier is barrier:
            self._passed(barrier)
            buffer.release()

    def _passed(self, barrier: Barrier) -> None:
        """Forget a barrier that the reader has reached, and all barriers before it."""
        while self._on_way and self._on_way.popleft() is not barrier:
            pass

    def _snapshot_of(self, record: int, states: dict[str, Any], *, ended: bool = False) -> "Snapshot":
        """Return a snapshot. Count the cost of its copies, and the number of values since the last snapshot."""
        copy_seconds, self._copy_seconds = self._copy_seconds, 0.0
        skipped, most = self._schedule.taken(record, self.position()), self._schedule.most_values
        self._add(SavedSnapshots(skipped=skipped, copy_seconds=copy_seconds, most_values=most))
        if self._is_full and self._schedule.is_exceeded:
            self._is_full = None
            logs.warning("checkpoint.max_bytes", max_bytes=self._checkpoint.max_bytes, interval_values=most)
        return snapshots.Snapshot(record, states, self._fingerprint, ended)

    def _position(self) -> int:
        return 0 if self._result is None else self._result.position

    async def _write(self, snapshot: "Snapshot", answers: "list[asyncio.Future[None]]") -> None:
        assert self._folder is not None
        began = perf_counter()
        try:
            written: StoredSnapshot = await self._in_thread(partial(self._folder.save, snapshot))
        except Exception as error:
            is_of_disk = isinstance(error, CheckpointError)
            if is_of_disk:
                self._add(SavedSnapshots(failed=1))
                logs.warning("checkpoint.not_saved", record=snapshot.record, error=str(error))
            _settle(answers, error)
            if not is_of_disk or self._checkpoint.on_save_error == "raise":  # such as NotStorable
                self.on_failure(error)
                if snapshot.ended:
                    raise
        else:
            self._add(SavedSnapshots(1, bytes=written.bytes, write_seconds=perf_counter() - began))
            self.cuts = self.cuts.one_more(written.bytes)
            _settle(answers, None)
        finally:
            self._writing = None

    def _add(self, costs: SavedSnapshots) -> None:
        """Add the cost of a part of a snapshot, here and in profiles."""
        self.costs = self.costs.plus(costs)
        collectors.report(Collector.snapshots_saved, self._path.graph, costs)

    # Snapshots that the reader asks for, and the last one.

    def put_back(self, value: Any) -> None:
        """Put back the last value that the reader took, since the reader never received it."""
        assert self._result is not None
        if not self._result.abandoned:
            self._result.held.appendleft(value)
            self._result.position -= 1

    async def checkpoint(self, *, is_reader: bool) -> None:
        """Make a snapshot now, and wait until it is written.

        Args:
            is_reader: whether the reader itself calls this. Then the values that the reader has not taken are stored as
                well, and come first after a restart.

        Raises:
            CheckpointError: the snapshot could not be written.
        """
        buffer = self._result
        assert buffer is not None
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self.due = self.record
        try:
            while is_reader and not asked.done():
                barrier = buffer.barrier
                if self._writing is not None:
                    await asyncio.wait([self._writing])
                elif barrier is not None and (barrier.is_asked or self.events is None):
                    await buffer.pass_barrier()
                elif barrier is not None:  # items behind it may have emitted events, which would be stored too
                    self._passed(barrier)
                    buffer.release()
                elif buffer.error is not None:
                    _settle(self._asked, _over(buffer.error))  # a barrier on its way will not arrive
                elif buffer.ended or buffer.abandoned:
                    await self._save_end()
                else:
                    buffer.drain()
                    await StreamBuffer[Any].wait(buffer)
            await asked
        finally:
            if not asked.cancel() and not asked.cancelled():
                asked.exception()  # mark the error as retrieved: it may be the error that is raised here

    async def _save_end(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        answers, self._asked = self._asked, []
        states: dict[str, Any] = {}
        for stop in self._path.stops.values():
            await self.take(states, stop)
        if self._result is not None:
            await self._take_reader(states)
        await self._write(self._snapshot_of(self.record, states, ended=True), answers)

    async def close(self) -> None:
        """Save the end, if the call has reached it; wait for the snapshot that is being written; release the folder.

        Raises:
            Exception: the end could not be saved.
        """
        try:
            told = self._restored.get(_STREAM, {})
            has_unread = bool(told.get("unread") or told.get("events"))
            if self.is_done and (has_unread or not self.ends_at_once):
                await self._save_end()
            elif self._writing is not None:
                await asyncio.wait([self._writing])
        finally:
            _settle(self._asked, _over())
            await self._threads.aclose()
            if self._folder is not None:
                self._folder.close()
            self.all_begun.set()
            self.counted.clear()
            self._held.clear()

    async def _in_thread(self, fn: Callable[[], Any]) -> Any:
        return await self._threads.submit(copy_context(), None, fn)


class StepCheckpoint:
    """A step that barriers pass, in a call that is saved.

    Attributes:
        saving: the snapshots of the call.
        stop: the step.
    """

    def __init__(self, saving: Checkpointer, stop: CheckpointStep) -> None:
        self.saving = saving
        self.stop = stop
        self._stops = (*stop.joined, stop)
        self._outputs: Sequence[BarrierBuffer[Any]] = ()

    def begin(
        self, start: Callable[[], Any], outputs: Sequence[BarrierBuffer[Any]], holders: Sequence[Any] = ()
    ) -> Callable[[], Any]:
        """Return a function that makes the iterator of the step, with its state restored.

        The iterator of the source puts barriers between its records.

        Args:
            start: makes the iterator.
            outputs: the streams that the step gives.
            holders: the objects with the states of the steps that run as a part of this step, and of this step itself;
                empty if the iterator has the state.
        """

        def begin() -> Any:
            iterator = start()
            for stop, one in zip(self._stops, holders or [iterator], strict=True):
                self.saving.begin(stop, one)
            if self.stop.is_source:
                return _SourceWithBarriers(iterator, self, outputs)
            return self.saving.counted[self.stop.name] if self.stop.gives_records else iterator

        return begin

    def pass_barriers(self, readers: Iterable[Reader[Any]], outputs: Sequence[BarrierBuffer[Any]]) -> None:
        """Pass barriers on from the streams that the step reads to the streams that it gives."""
        inputs = [reader.buffer for reader in readers if isinstance(reader.buffer, BarrierBuffer)]
        self._outputs = outputs

        async def on_barrier() -> None:
            if all([await one.until_barrier() for one in inputs]):
                self.give(await self.take(inputs))
                return
            for one in inputs:  # a stream has failed, which ends all streams
                one.release()

        for one in inputs:
            one.on_barrier = on_barrier

    async def take(self, inputs: Sequence[BarrierBuffer[Any]]) -> Barrier:
        """Take the first barrier out of the streams that the step reads, and add the states of the step to it."""
        barrier = inputs[0].barrier
        assert barrier is not None
        for stop in self._stops:
            barrier.copied_bytes += await self.saving.take(barrier.states, stop)
        for one in inputs:
            one.release()
        return barrier

    def give(self, barrier: Barrier) -> None:
        """Put a barrier into the streams that the step gives."""
        self.saving.give(barrier, self._outputs)


class _Records(AsyncIterator[Any]):
    """The records of a source, on their way into a stream."""

    def __init__(self, source: Any) -> None:
        self._records = aiter(source)

    async def aclose(self) -> None:
        await close_stream(self._records)


class _SourceWithBarriers(_Records):
    """The records of the source, with barriers between them."""

    def __init__(self, records: Any, place: StepCheckpoint, outputs: Sequence[BarrierBuffer[Any]]) -> None:
        super().__init__(records)
        self._place = place
        self._outputs = outputs

    async def __anext__(self) -> Any:
        saving = self._place.saving
        if not saving.all_begun.is_set():
            await saving.all_begun.wait()
        if saving.record >= saving.due or monotonic() >= saving.due_time or saving.is_overdue:
            await saving.put_barrier(self._place.stop, self._outputs)
        record = await anext(self._records)
        saving.record += 1
        return record


class _Counted(_Records):
    """The records of a source before a mix, counted.

    A barrier is put behind the mix. The source is ahead of the mix then, by the records that the streams between them
    hold. After a restart, an order goes on at the number of records that the mix has taken. Of any other source, a
    state is noted at regular intervals. The source goes on from the last noted state before that number, and the
    records up to the number are skipped.

    Args:
        source: the source, with its state restored.
        name: the name of the source.
        saving: the snapshots of the call.
        given: how many records the source has given.
        taken: returns how many of these records the mix has taken.

    Attributes:
        states: the noted states that a snapshot may still need, each with its number of records; empty for an order.
    """

    def __init__(self, source: Any, name: str, saving: Checkpointer, given: int, taken: Callable[[], int]) -> None:
        super().__init__(source)
        self._source = source
        self._name = name
        self._saving = saving
        self._given = given
        self._taken = taken
        self._due = -1
        self.states: deque[tuple[int, Any]] = deque()

    def at_barrier(self) -> Any:
        """Return the last state at or before the records that the mix has taken, and forget earlier states."""
        while len(self.states) > 1 and self.states[1][0] <= self._taken():
            self.states.popleft()
        return self.states[0][1]

    async def __anext__(self) -> Any:
        if self._given >= self._due:
            await self._look()
        record = await anext(self._records)
        self._given += 1
        return record

    async def _look(self) -> None:
        """At first, skip the records that the mix took before a restart; later, note the state of the source."""
        if self._due < 0:
            await self._saving.all_begun.wait()
            while self._given < self._taken():
                await anext(self._records)
                self._given += 1
        elif self.states:
            self.at_barrier()
            with Noted(f"while the state of {self._name!r} was asked for"):
                state = {"given": self._given, "state": self._source.state()}
            self.states.append((self._given, await self._saving.copied(state, self._name)))
        self._due = self._given + self._saving.every_noted


# The state of a source without an index before a mix is noted after this many records, unless `every_records` is given.
_EVERY_NOTED: Final = 100

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
        # a function of NumPy has no nbytes
        elif kind.__module__ != "numpy" or getattr(value, "nbytes", 0) > _FEW_BYTES:
            return False
    return True


_ATOMS: Final = frozenset({type(None), bool, int, float, str})


def _differences(before: Any, now: Any, path: str = "") -> list[tuple[str, str]]:
    """Return each difference as its path, or "" where a side has no value there, and a text."""
    if {type(before), type(now)} != {dict}:
        told = f"{path} was {_shown(before)}, and is {_shown(now)}"
        return [] if before == now else [("" if _MISSING in (before, now) else path, told)]
    old: dict[str, Any] = before
    new: dict[str, Any] = now
    found: list[tuple[str, str]] = []
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
    return with_cause(EngineClosedError("the stream has ended before this snapshot was made"), cause)


def _ignored(error: BaseException) -> None:
    return None
