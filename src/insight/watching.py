"""The looks of a profile at open scopes, in whichever threads they open, and at event loops and threads."""

import asyncio
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from time import clock_gettime, monotonic, perf_counter, thread_time
from traceback import walk_stack
from types import FrameType
from typing import Final, NamedTuple, TypeVar
from weakref import ReferenceType, WeakSet, ref

from ..telemetry import observation
from ..telemetry.observation import (
    Collector,
    DeviceSlice,
    Host,
    ProfiledScope,
    ProfiledStream,
    SavedSnapshots,
    ScopeSnapshot,
    StepSnapshot,
)
from .sums import Evidence, ReaderSum, Sums, WindowSum, explained

T = TypeVar("T")

# The loop that runs in this thread, or None. It is in `asyncio.__all__`.
_running_loop = asyncio._get_running_loop

# A collection may change while it is copied, which raises an error. So many changes in a row do not happen.
_ATTEMPTS = 100


# At first a look every millisecond, so that a short profile has enough looks. Then looks become rarer: each time that
# the time of the profile doubles, there are some 180 more looks.
_LEAST_PAUSE_SECONDS: Final = 0.001
# Each look at an event loop takes up to 0.2 ms of it, so a client has it looked at ten times a second.
_LEAST_LIVE_PAUSE_SECONDS: Final = 0.1


# The longest time for which a look may keep the GIL from event loops, and for how long a loop has it then.
_SLICE_SECONDS: Final = 0.002
_PAUSE_SECONDS: Final = 0.001
# The longest time for which a loop waits until the thread has the GIL, and the thread waits for a loop.
_LONGEST_HANDOVER_SECONDS: Final = 0.002
_LONGEST_PAUSE_SECONDS: Final = 0.2


class Turns:
    """Lets a thread look at the process in turns with an event loop; one thread at a time.

    A thread that waits for the GIL wakes up whenever a loop selects. A `select` that finds work is over before the
    thread has woken up, so beside a busy loop the thread would try in vain for up to seconds, and each attempt would
    cost the loop a system call. So the loop hands the GIL over: it waits until the thread has woken up.

    Attributes:
        asked: whether the thread has something to do; None while the thread does not wait for requests.
        is_looking: whether the thread is in a look, so that loops offer turns.
    """

    _handed_over = 0.0  # when a loop has handed the GIL over to any thread

    def __init__(self) -> None:
        self.asked: Callable[[], object] | None = None
        self.is_looking = self._is_offering = False
        self._began = self._offered = 0.0
        self._given, self._taken = threading.Event(), threading.Event()

    def begin(self) -> None:
        """Begin with a look, in the thread."""
        self.is_looking, self._began = True, perf_counter()
        self._taken.set()

    def end(self) -> None:
        """End a look."""
        self.is_looking = False
        self._taken.set()

    def stop(self) -> None:
        """End all turns. This takes no lock, which a thread may have held when this process was forked."""
        self.asked, self.is_looking = None, False

    def pause(self) -> None:
        """Let event loops run at the end of a slice; the caller must not hold the lock of `OpenScopes`."""
        if _running_loop() is None and perf_counter() - self._began > _SLICE_SECONDS:
            self._given.clear()
            self._taken.set()
            is_offered = perf_counter() - self._offered < _LONGEST_PAUSE_SECONDS
            self._given.wait(_LONGEST_PAUSE_SECONDS if is_offered else _PAUSE_SECONDS)
            self._taken.set()
            self._began = perf_counter()

    def of(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, with a pause after each slice."""
        for item in items:
            yield item
            self.pause()

    def offer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand the GIL over if the thread has something to do, and do so again soon; called on a loop."""
        if not self._is_offering or perf_counter() - self._offered > _LONGEST_PAUSE_SECONDS:  # by a loop that has ended
            self._offer(loop)

    def _offer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._offered = perf_counter()
        self._is_offering = self.is_looking or (self.asked is not None and bool(self.asked()))
        if not self._is_offering:
            return
        if self._offered - Turns._handed_over >= _PAUSE_SECONDS:  # otherwise it is the turn of the loop
            self._taken.clear()
            self._given.set()
            self._taken.wait(_LONGEST_HANDOVER_SECONDS)
            Turns._handed_over = perf_counter()
        loop.call_later(_PAUSE_SECONDS, self._offer, loop)


@dataclass(frozen=True, slots=True)
class StuckLoop:
    """An event loop that has not answered for a second.

    Attributes:
        thread: the name of its thread.
        seconds: for how long it has not answered.
        stack: the calls of its thread, each as "file:line function", the outermost function first.
    """

    thread: str
    seconds: float
    stack: tuple[str, ...] = ()


class _Since(NamedTuple):
    """The readings of a scope at the last look, or at its opening."""

    scope: ReferenceType[ProfiledScope]
    loop: asyncio.AbstractEventLoop | None
    snapshot: ScopeSnapshot
    activity: int | None = None


class OpenScopes(Collector):
    """Turns the measuring of open scopes on, and adds up the work of these scopes and of the readers of open streams.

    Scopes are held weakly: the scope that the runs of a graph share is collected with the graph.

    Args:
        is_live: whether the looks go on for hours, so that they must be rare, and read how full inboxes are; otherwise
            inboxes report each change of their depth.

    Attributes:
        lock: held for a moment only: event loops wait for it when they open and close scopes. Reentrant, because a
            signal handler may look while it is held.
        has_ended: whether measuring has ended.
        loop_threads: the native ids of the threads that run event loops.
        turns: the turns of the thread that looks, and of the event loops.
    """

    def __init__(self, *, is_live: bool = False) -> None:
        self._counts_depths = not is_live
        self.turns = Turns()
        self.lock = threading.RLock()
        self.has_ended = False
        self.loop_threads: set[int] = set()
        # The processor time of threads that run event loops, when their loops were first seen, or at the last reset.
        self._ran: dict[int, float] = {(here := threading.get_native_id()): thread_seconds(here) or 0.0}
        self._core_waits = _core_waits()  # when the measuring began, or at the last reset
        self._least_pause_seconds = _LEAST_LIVE_PAUSE_SECONDS if is_live else _LEAST_PAUSE_SECONDS
        self._watches: dict[asyncio.AbstractEventLoop, LoopWatch] = {}
        self._looks_at_closed: list[LoopLooks] = []
        self._sums = Sums()  # of scopes that have closed
        self._since: dict[int, _Since] = {}
        # Collected as garbage, and not in the sums yet: garbage collection runs in any thread and must not wait for it.
        self._vanished: deque[ScopeSnapshot] = deque()
        # For each open stream, the time of the last look and how long its reader had waited.
        self._readers: dict[ProfiledStream, tuple[float, float]] = {}

    def scope_opened(self, scope: ProfiledScope) -> None:
        """Count the work of a new scope of the running loop, from zero."""
        with self.lock:
            if self.has_ended:  # ended by another thread meanwhile
                return
            self._add_vanished()
            opened, loop = ScopeSnapshot(id(scope), perf_counter()), asyncio.get_running_loop()
            self._since[id(scope)] = _Since(ref(scope), loop, opened)
            self._loop_seen(threading.get_native_id())
            self._watch(loop).scopes.add(scope)
        scope.measure(on=True, depths=self._counts_depths)

    def scope_closed(self, scope: ProfiledScope) -> None:
        """Take the last numbers of a scope."""
        with self.lock:
            self._add_vanished()
            for watch in self._watches.values():
                watch.scopes.discard(scope)
            if (since := self._since.pop(id(scope), None)) is None:
                return
            self._sums.add(since.snapshot, snapshot_of(scope))
        scope.measure(on=False, depths=self._counts_depths)

    def scope_vanished(self, scope: ProfiledScope) -> None:
        """Take the last numbers of a scope that is being collected as garbage; in any thread, at any moment."""
        self._vanished.append(snapshot_of(scope))

    def reader_opened(self, reader: ProfiledStream) -> None:
        """Count how long the reader of a new stream waits, from zero."""
        with self.lock:
            self._readers[reader] = perf_counter(), reader.reader_wait_seconds
            self._watch(reader.loop).readers.add(reader)

    def reader_closed(self, reader: ProfiledStream) -> None:
        """Take the last number of a stream."""
        with self.lock:
            if (since := self._readers.pop(reader, None)) is not None:
                _add_reader(self._sums, reader, since)
            for watch in self._watches.values():
                watch.readers.discard(reader)

    def device_worked(self, work: DeviceSlice) -> None:
        """Keep why a program was compiled again; in any thread."""
        if work.again:
            with self.lock:
                self._sums.compiled_again.append((work.node, work.again))

    def snapshots_saved(self, graph: str, snapshots: SavedSnapshots) -> None:
        """Add the costs of snapshots."""
        with self.lock:
            self._sums.snapshots[graph] = self._sums.snapshots.get(graph, SavedSnapshots()).plus(snapshots)

    def look(self, host: Host) -> list[tuple[ProfiledScope, ScopeSnapshot]]:
        """Add the work of a host's scopes and readers since the last look; return each scope with its snapshot.

        Scopes that were not measured yet are measured from now on.
        """
        found: list[tuple[ProfiledScope, ScopeSnapshot]] = []
        if host.loop_thread is not None:
            self._loop_seen(host.loop_thread)
        for scope in settled(host.open_scopes):
            found.append((scope, self._look_at(scope, host)))
            self.turns.pause()
        with self.lock:  # the closing of a stream waits for this
            for reader in settled(host.open_readers):
                if (read := self._readers.get(reader)) is not None:
                    _add_reader(self._sums, reader, read)
                self._readers[reader] = perf_counter(), reader.reader_wait_seconds
                self._watch(reader.loop).readers.add(reader)
        return found

    def _look_at(self, scope: ProfiledScope, host: Host) -> ScopeSnapshot:
        with self.lock:
            self._add_vanished()
            if host.loop is not None:
                watch = self._watch(host.loop)
                watch.thread = watch.thread or host.loop_thread
                watch.scopes.add(scope)
            since = self._since.get(id(scope))
            if since is None:
                _in_thread_of(host.loop, partial(scope.measure, on=True, depths=self._counts_depths))
        [activity] = settled(lambda: [scope.activity()])
        if since is not None and activity is not None and activity == since.activity:
            snapshot = scope.snapshot(perf_counter(), since.snapshot.steps)  # no step has moved
        else:
            snapshot = snapshot_of(scope, self.turns.of)
        with self.lock:
            if self._since.get(id(scope)) is since:  # otherwise another thread has closed or read the scope meanwhile
                if since is not None and snapshot.steps is not since.snapshot.steps:
                    self._sums.add(since.snapshot, snapshot)
                self._since[id(scope)] = _Since(ref(scope), host.loop, snapshot, activity)
        return snapshot

    def _loop_seen(self, thread: int) -> None:
        self.loop_threads.add(thread)
        if thread not in self._ran and (seconds := thread_seconds(thread)) is not None:
            self._ran[thread] = seconds

    def loop_seconds(self, *, resets: bool = False) -> float | None:
        """Return the processor time of the busiest event loop's thread since the last reset; None if unknown."""
        with self.lock:
            ran = _clocks(self.loop_threads)
            times = [now - self._ran[thread] for thread, now in ran.items() if thread in self._ran]
            if resets:
                self._ran = ran
                self.loop_threads &= {one.loop_thread for one in settled(lambda: observation.hosts)}
        return max(times, default=None)

    def core_wait_seconds(self, *, resets: bool = False) -> float | None:
        """Return for how long threads could run, but had no core, summed over threads; None if unknown."""
        before, now = self._core_waits, _core_waits()
        if resets:
            self._core_waits = now
        return sum(seconds - before.get(thread, 0.0) for thread, seconds in now.items()) if now else None

    def taken(self) -> Sums:
        """Return the sums of nodes and readers, and begin new sums."""
        with self.lock:
            self._add_vanished()
            sums, self._sums = self._sums, Sums()
        return sums

    def sums(self) -> Sums:
        """Return a copy of the sums of nodes and readers, with the work since the last look."""
        with self.lock:
            self._add_vanished()
            sums = self._sums.copy()
            for since in list(self._since.values()):
                if (scope := since.scope()) is not None:
                    sums.add(since.snapshot, snapshot_of(scope))
            for reader, seconds in self._readers.items():
                _add_reader(sums, reader, seconds)
        return sums

    def evidence_of(
        self, sums: Sums, elapsed_seconds: float, loop_cpu_seconds: float | None, core_wait_seconds: float | None
    ) -> Evidence:
        """Return evidence from sums of nodes and readers, from clocks of threads, and from the looks at event loops."""
        with self.lock:
            looks = [*self._looks_at_closed, *[watch.so_far() for watch in self._watches.values()]]
        windows = {name: window for seen in looks for name, window in settled(seen.windows.items)}
        sums.readers = {name: replace(reader, window=windows.get(name)) for name, reader in sums.readers.items()}
        admitted = [held for seen in looks for held in settled(seen.admitted.items)]
        taken = [(used / time, places) for (_, places), (time, used) in admitted if time]
        longest = max(looks, key=lambda seen: seen.seconds, default=LoopLooks())
        late, delay = longest.late_share, longest.delay_seconds
        found = Evidence(sums, elapsed_seconds, loop_cpu_seconds, late, delay, admitted=max(taken, default=(0.0, 0)))
        return explained(found, core_wait_seconds)

    def stuck(self) -> tuple[StuckLoop, ...]:
        """Return the event loops that have not answered for a second, with the stacks of their threads."""
        with self.lock:
            silent = {watch.thread: watch.silent_seconds for watch in self._watches.values()}
        found = {thread: seconds for thread, seconds in silent.items() if seconds >= _STUCK_SECONDS}
        if not found:
            return ()
        stacks = sys._current_frames()
        threads = {one.native_id: one for one in threading.enumerate()}
        return tuple([
            StuckLoop(one.name, found[native], _stack_of(stacks.get(one.ident or 0)))
            for native, one in threads.items() if native in found
        ])  # fmt: skip

    def look_anew(self) -> None:
        """Discard the measurements of the looks at event loops."""
        with self.lock:
            self._looks_at_closed.clear()
            for watch in self._watches.values():
                watch.look_anew()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> "LoopWatch":
        """Return the watch of an event loop, and start the watch."""
        watch = self._watches.get(loop)
        if watch is None:
            for closed in [one for one in self._watches if one.is_closed()]:  # a watch keeps its loop
                self._looks_at_closed.append(self._watches.pop(closed).seen)
            watch = self._watches[loop] = LoopWatch(loop, self._least_pause_seconds, self.turns.offer)
        if not watch.is_looking:
            watch.asked = watch.asked or monotonic()
            _in_thread_of(loop, watch.start)
        return watch

    def end(self) -> None:
        """End all measuring."""
        with self.lock:
            self.has_ended = True
            for watch in self._watches.values():
                watch.stop()
            self._watches.clear()
            left, self._since = self._since, {}
            self._vanished.clear()
            self._readers.clear()
        loops = defaultdict[asyncio.AbstractEventLoop | None, list[ReferenceType[ProfiledScope]]](list)
        for since in left.values():
            loops[since.loop].append(since.scope)
        for loop, scopes in loops.items():
            _in_thread_of(loop, partial(self._measure_no_more, scopes, loop))

    def _measure_no_more(
        self, scopes: list[ReferenceType[ProfiledScope]], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        """End the measuring of scopes, on their loop; a running loop does other work after each scope."""
        while scopes:
            if (scope := scopes.pop()()) is not None:
                scope.measure(on=False, depths=self._counts_depths)
            if loop is not None and loop.is_running():
                loop.call_soon(self._measure_no_more, scopes, loop)
                break

    def _add_vanished(self) -> None:
        while self._vanished:
            last = self._vanished.popleft()
            if (since := self._since.pop(last.key, None)) is not None:
                self._sums.add(since.snapshot, last)


def snapshot_of(
    scope: ProfiledScope, in_turns: Callable[[Iterable[StepSnapshot]], Iterable[StepSnapshot]] = iter
) -> ScopeSnapshot:
    """Return a snapshot of the nodes of a scope; callable from any thread."""
    steps = tuple(settled(lambda: in_turns(scope.step_snapshots())))
    return scope.snapshot(perf_counter(), steps)


def _add_reader(sums: Sums, reader: ProfiledStream, since: tuple[float, float]) -> None:
    [name] = settled(lambda: [reader.name])
    before = sums.readers.get(name, ReaderSum(name))
    opened, waited = before.open_seconds + perf_counter() - since[0], before.waited_seconds - since[1]
    sums.readers[name] = ReaderSum(name, opened, waited + reader.reader_wait_seconds, at=reader.at)


def settled(read: Callable[[], Iterable[T]]) -> list[T]:
    """Return the items of a collection that other threads may change; read again until no change has disturbed it.

    Other threads change the collection without a lock, so that items do not pay for profiles.

    Args:
        read: returns the collection.
    """
    for _ in range(_ATTEMPTS):
        with suppress(RuntimeError):  # "changed size during iteration"
            return list(read())
    return list(read())


def _in_thread_of(loop: asyncio.AbstractEventLoop | None, call: Callable[[], None]) -> None:
    """Make a call on an event loop, between two of its steps; at once if the loop runs in this thread, or is closed."""
    if loop is None or loop.is_closed() or loop is _running_loop():
        call()
    else:
        with suppress(RuntimeError):  # the loop was closed just now
            loop.call_soon_threadsafe(call)


# Loop watch: looks now and then at the streams of an event loop, and at whether a handler blocks the loop.
#
# A count at each item would slow down items, so the watch looks now and then instead.


_STUCK_SECONDS: Final = 1.0


def _stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return the calls of a thread, each as "file:line function", the outermost function first."""
    calls = [] if frame is None else [(one.f_code, line) for one, line in walk_stack(frame)]
    return tuple([f"{code.co_filename}:{line} {code.co_qualname}" for code, line in reversed(calls)])


def thread_seconds(thread: int) -> float | None:
    """Return the processor time of a thread of this process, in seconds; None if it has ended or is unknown.

    Args:
        thread: the number of the thread, as `threading.get_native_id` gives it.
    """
    if sys.platform != "linux":
        return thread_time() if thread == threading.get_native_id() else None
    try:
        # The kernel's number for the clock of a thread, computed from the thread's number. pthread_getcpuclockid(3)
        # returns the same number, but must not be called for a thread that may have ended; the kernel then fails.
        return clock_gettime(~thread << 3 | 6)
    except OSError:
        return None


_PAUSE_SHARE: Final = 1 / 256
# Multiples of the golden ratio, modulo 1, are spread evenly. Looks at equal distances would fall in step with handlers
# that run at a regular pace, and would always see them in the same state.
_GOLDEN: Final = (sqrt(5) - 1) / 2
# Even on an idle loop, a timer is late by about a millisecond.
_LATE_SECONDS: Final = 0.003
# Now and then a timer is late by more than this, even on an idle loop. So a few late looks do not count, unless the
# loop was held for most of the time.
_LEAST_LATE: Final = 3
_MOST: Final = 0.5
# After a late look, the next look comes sooner, so that there are enough looks at a loop that is often late.
_LATE_SHARE: Final = 0.25


# The longest time that one look spends on nodes; and after it, how many times as long looks leave nodes alone.
_SCOPES_SECONDS: Final = 0.001
_REST: Final = 199


class LoopLooks:
    """The measurements of the looks at one event loop.

    Attributes:
        windows: how full the windows of streams were, by the names of the streams.
        admitted: for each deployment, by its id and its number of places: for how long it was looked at, and for how
            long its places were taken, averaged over the places.
        seconds: the time that the looks stand for: each look stands for the time since the look before.
        late_seconds: the part of `seconds` in which the loop was blocked, so that the timer of the look was late.
    """

    def __init__(self) -> None:
        self.windows: dict[str, WindowSum] = {}
        self.admitted: dict[tuple[int, int], tuple[float, float]] = {}
        self.seconds = 0.0
        self.late_seconds = 0.0
        self._delays = 0.0
        self._late = 0
        self._held_seconds = 0.0

    def passed(self, seconds: float, late_seconds: float) -> None:
        """Add the time since the look before, and by how much the timer of this look was late."""
        self.seconds += seconds
        if late_seconds > _LATE_SECONDS:
            self.late_seconds += seconds
            self._late += 1
            self._held_seconds += late_seconds
            self._delays += late_seconds * seconds

    @property
    def late_share(self) -> float:
        """Share of the time for which something held the loop."""
        return self.late_seconds / self.seconds if self._is_habit else 0.0

    @property
    def delay_seconds(self) -> float:
        """Mean delay of timers, in seconds; a handler waits as long for its turn. 0 if timers were seldom late."""
        return self._delays / self.seconds if self._is_habit else 0.0

    @property
    def _is_habit(self) -> bool:
        return self._late >= _LEAST_LATE or self._held_seconds > _MOST * self.seconds


class LoopWatch:
    """Looks at the streams and scopes on one event loop, from the first opened scope until `stop`.

    Attributes:
        scopes: the scopes that are open.
        readers: the streams that are open.
        seen: the measurements of the looks.
        thread: the native id of the thread that runs the loop; None if unknown.
        asked: when the loop was asked to begin with looks, by `monotonic`; 0 once it has begun.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, least_pause_seconds: float,
        looked: Callable[[asyncio.AbstractEventLoop], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._looked = looked
        self._least_pause_seconds = least_pause_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None
        self._waits = 0.0, 0.0  # the begin and the end of the wait for the next look
        self._due = 0.0  # the end of this wait; unlike in `_waits`, `look_anew` does not move it
        self._looks = 0
        self._is_late = False
        self.thread: int | None = None
        self.asked = 0.0
        self._has_usual_clock = abs(loop.time() - monotonic()) < 1  # false for the virtual clock of a test
        self._is_on = True
        self._turns: list[ReferenceType[ProfiledScope]] = []
        self._rest_until = 0.0
        self.scopes: WeakSet[ProfiledScope] = WeakSet()
        self.readers: set[ProfiledStream] = set()
        self.seen = LoopLooks()

    @property
    def is_looking(self) -> bool:
        """Whether the watch has a timer for its next look; without open scopes and streams it has no timer."""
        return self._timer is not None

    @property
    def silent_seconds(self) -> float:
        """For how long the loop has not answered, in seconds; readable from any thread."""
        if self._loop.is_closed():
            return 0.0
        if self.asked:
            return monotonic() - self.asked
        return 0.0 if self._timer is None else max(0.0, self._now() - self._due)

    def so_far(self) -> LoopLooks:
        """Return the measurements so far; callable from any thread.

        If a look is late now, because something holds the loop, its delay up to now is included.
        """
        seen, (since, due) = self.seen, self._waits
        if self._timer is None or self._loop.is_closed() or (now := self._now()) - due <= _LATE_SECONDS:
            return seen
        seen = copy(seen)
        seen.passed(now - since, now - due)
        return seen

    def look_anew(self) -> None:
        """Discard the measurements, and look as often as at first; callable from any thread."""
        now = self._now()
        self._began, self.seen = now, LoopLooks()
        self._waits = now, max(self._waits[1], now)  # a delay before this moment does not count

    def _now(self) -> float:
        """Return the time of the loop, also while something holds the loop, when the clock of uvloop stands still."""
        return max(self._loop.time(), monotonic()) if self._has_usual_clock else self._loop.time()

    def start(self) -> None:
        """Look from now on, as long as something is open; called in the thread of the loop."""
        self.thread, self.asked = threading.get_native_id(), 0.0
        if self._is_on and self._timer is None:
            if self._began is None:
                self._began = self._loop.time()
            self._wait()

    def stop(self) -> None:
        """End the looks; callable from any thread."""
        self._is_on = False
        self.scopes, self.readers = WeakSet(), set()
        if self._timer is not None and not self._loop.is_closed():
            self._timer.cancel()

    def _wait(self) -> None:
        assert self._began is not None
        now = self._loop.time()
        self._looks += 1
        pause = max(self._least_pause_seconds, (now - self._began) * _PAUSE_SHARE)
        pause *= _LATE_SHARE if self._is_late else 1
        pause *= 0.5 + self._looks * _GOLDEN % 1
        self._waits, self._due = (now, now + pause), now + pause
        self._timer = self._loop.call_later(pause, self._look)

    def _look(self) -> None:
        self._timer, (began, due) = None, self._waits
        if not self._is_on or not (self.scopes or self.readers):
            return
        now, seen = self._loop.time(), self.seen
        self._is_late = now - due > _LATE_SECONDS
        seen.passed(now - began, now - due)
        for reader in tuple(self.readers):
            look = reader.look()
            if look is not None:
                found = seen.windows.setdefault(reader.name, WindowSum(look.size, look.ordered))
                found.add(look, now - began)
        self._look_at_scopes()
        for scope in tuple(self.scopes):
            if scope.admitted is not None:
                taken, places = scope.admitted()
                looked, used = seen.admitted.get((id(scope), places), (0.0, 0.0))
                used += taken / places * (now - began)
                seen.admitted[id(scope), places] = looked + now - began, used  # at once: other threads read both
        self._looked(self._loop)
        self._wait()

    def _look_at_scopes(self) -> None:
        """Look at the nodes of some scopes, in turns, so that all looks take a small share of the time."""
        began = now = perf_counter()
        if now < self._rest_until:
            return
        self._turns = self._turns or [ref(scope) for scope in tuple(self.scopes)]
        while self._turns and now - began < _SCOPES_SECONDS:
            if (scope := self._turns.pop()()) is not None:
                scope.look(now)
            now = perf_counter()
        self._rest_until = now + _REST * (now - began)


def _clocks(threads: Iterable[int]) -> dict[int, float]:
    """Return the processor time of each of the threads that have not ended."""
    found = {thread: thread_seconds(thread) for thread in threads}
    return {thread: seconds for thread, seconds in found.items() if seconds is not None}


def _core_waits() -> dict[int, float]:
    """Return for how long each thread could run, but had no core, in seconds; nothing if the system does not tell."""
    found: dict[int, float] = {}
    for thread in threading.enumerate():
        with suppress(OSError):  # the thread has ended just now, or the kernel does not tell
            file = os.open(f"/proc/self/task/{thread.native_id}/schedstat", os.O_RDONLY)
            try:
                _, waited, turns = os.read(file, 100).split()
            finally:
                os.close(file)
            if turns != b"0":  # all three numbers are 0 if the kernel does not count
                found[thread.native_id or 0] = int(waited) * 1e-9
    return found
