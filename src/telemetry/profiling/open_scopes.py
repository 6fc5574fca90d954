"""Open scopes: adds up what scopes do from one look to the next, whichever threads open, close and look at them."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar
from weakref import ReferenceType, ref

from .readings import Host, NodeReading, Scope
from .sums import Sums

T = TypeVar("T")

# A collection may change while it is copied. That happens now and then, and not so often in a row.
_ATTEMPTS = 100


class _Since(NamedTuple):
    """A scope at the look before, or when it was opened."""

    scope: ReferenceType[Scope]
    loop: asyncio.AbstractEventLoop | None
    seconds: float
    nodes: dict[Hashable, NodeReading]


class OpenScopes:
    """Has scopes measured while they are open, and adds up what they do.

    They are held weakly: those that the runs of a graph share are gone when the graph is.

    Attributes:
        lock: held for a moment only: event loops wait for it when they open and close scopes. Reentrant, because a
            signal handler may look while it is held.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._sums = Sums()  # of what has closed
        self._since: dict[int, _Since] = {}
        # Not added to the sums yet: they are collected as garbage, anywhere, where nothing may be waited for.
        self._vanished: deque[tuple[int, list[NodeReading], float]] = deque()
        self._ended = False

    def opened(self, scope: Scope) -> bool:
        """Count what a new scope of the running loop does, from zero; returns False if nothing counts any more."""
        with self.lock:
            if self._ended:  # meanwhile, in another thread
                return False
            self._add_vanished()
            self._since[id(scope)] = _Since(ref(scope), asyncio.get_running_loop(), perf_counter(), {})
        scope.measure(on=True)
        return True

    def closed(self, scope: Scope) -> bool:
        """Take the last numbers of a scope; returns False if it did not count."""
        with self.lock:
            self._add_vanished()
            since = self._since.pop(id(scope), None)
            if since is None:
                return False
            self._sums.add(since.nodes, scope.node_readings(), since.seconds, perf_counter())
        scope.measure(on=False)
        return True

    def vanished(self, scope: Scope) -> None:
        """Take the last numbers of a scope that is being collected as garbage; in any thread, at any moment."""
        self._vanished.append((id(scope), list(scope.node_readings()), perf_counter()))

    def look(self, host: Host) -> list[tuple[Scope, list[NodeReading]]]:
        """Count from now on what the open scopes of a host do, and add what they did; returns them and their numbers.

        Those that did not count yet are measured from now on.
        """
        found: list[tuple[Scope, list[NodeReading]]] = []
        for scope in settled(host.open_scopes):
            with self.lock:
                self._add_vanished()
                since = self._since.get(id(scope))
                if since is None:
                    _in_thread_of(host.loop, partial(scope.measure, on=True))
                readings, now = settled(scope.node_readings), perf_counter()
                if since is not None:
                    self._sums.add(since.nodes, readings, since.seconds, now)
                looked = {reading.key: reading for reading in readings}
                self._since[id(scope)] = _Since(ref(scope), host.loop, now, looked)
            found.append((scope, readings))
        return found

    def taken(self) -> Sums:
        """Return what was added up, and begin anew."""
        with self.lock:
            self._add_vanished()
            sums, self._sums = self._sums, Sums()
        return sums

    def sums(self) -> Sums:
        """Return what was added up, and what is open has done since."""
        with self.lock:
            self._add_vanished()
            sums, now = self._sums.copy(), perf_counter()
            for since in list(self._since.values()):
                scope = since.scope()
                if scope is not None:
                    sums.add(since.nodes, settled(scope.node_readings), since.seconds, now)
        return sums

    def end(self) -> None:
        """Measure nothing more."""
        with self.lock:
            self._ended = True
            left, self._since = self._since, {}
            self._vanished.clear()
        for since in left.values():
            scope = since.scope()
            if scope is not None:
                _in_thread_of(since.loop, partial(scope.measure, on=False))

    def _add_vanished(self) -> None:
        while self._vanished:
            number, readings, ended = self._vanished.popleft()
            since = self._since.pop(number, None)
            if since is not None:
                self._sums.add(since.nodes, readings, since.seconds, ended)


def settled(read: Callable[[], Iterable[T]]) -> list[T]:
    """Return what `read` gives. The threads whose collections it reads go on meanwhile, and do not lock them for us."""
    for _ in range(_ATTEMPTS):
        try:
            return list(read())
        except RuntimeError:  # "changed size during iteration"
            pass
    return list(read())


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None if none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _in_thread_of(loop: asyncio.AbstractEventLoop | None, call: Callable[[], None]) -> None:
    """Call something between two steps of what runs on a loop: now, if that is here, or nothing runs there any more."""
    if loop is None or loop.is_closed() or loop is running_loop():
        call()
    else:
        with suppress(RuntimeError):  # it was closed just now
            loop.call_soon_threadsafe(call)
