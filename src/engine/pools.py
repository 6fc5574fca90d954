"""Pools: the threads, the pools of executions and the limits of nodes, which all scopes of one Engine share."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from .._errors import EngineClosedError
from ..actors.attempts import HedgeBudget
from ..actors.node_actor import Limiter
from ..actors.policy import Cache
from ..actors.threads import PoolT, ThreadPool, ThreadPoolStatistics, ThreadShare, end_with_loop
from .caching import ResultCache


@dataclass(frozen=True, slots=True)
class ProcessPoolStatistics:
    """A snapshot of the pool of worker processes: its processes and calls now, and the calls that it has run.

    Attributes:
        workers: processes started and not yet found dead.
        idle: processes that wait for a call.
        busy: processes that start, or run a call.
        queued: calls that no process has begun: they wait for a process, or were sent ahead.
        completed: calls that came back, with a result or an error.
        died: processes that ended by themselves, busy or idle.
        killed: processes killed because their call was cancelled, or the pool closed.
    """

    workers: int
    idle: int
    busy: int
    queued: int
    completed: int
    died: int
    killed: int


class Pools:
    """The threads, the pools of executions and the limits of an Engine; each part is started when it is first used.

    Args:
        max_threads: the most threads that run handlers.
        max_processes: the most processes for nodes; None for as many as there are cores that this process may use.
        ends_with_loop: whether the threads end when the loop is shut down; True for a default Engine, which no
            `async with` closes.
    """

    def __init__(self, max_threads: int, max_processes: int | None, *, ends_with_loop: bool) -> None:
        self.max_threads = max_threads
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.max_processes = cores if max_processes is None else max_processes
        self._ends_with_loop = ends_with_loop
        self._closed = False
        self._threads: ThreadPool | None = None
        self._others: dict[str, Any] = {}  # each is a `Pool`
        self._with_scopes: set[str] = set()  # the names of the pools that end with the last scope of a default Engine
        self._guards: list[AsyncGenerator[None, None]] = []
        # By the origin of a node. Weak keys, so that a node that a factory has made for a single request leaves no
        # entry here.
        self._limiters: WeakKeyDictionary[object, Limiter] = WeakKeyDictionary()
        self._hedges: WeakKeyDictionary[object, dict[float, HedgeBudget]] = WeakKeyDictionary()
        self._results: WeakKeyDictionary[object, dict[Cache, ResultCache]] = WeakKeyDictionary()

    def threads(self) -> ThreadPool:
        """Return the thread pool."""
        if self._threads is None:
            self._threads = ThreadPool(self.max_threads)
            self._guard(self._threads.aclose)
        return self._threads

    def share_of_threads(self, limit: int | None) -> ThreadShare | None:
        """Return the bound on the busy threads of a run, stream or deployment; None if it may use all threads."""
        return None if limit is None or limit >= self.max_threads else ThreadShare(limit)

    def pool(
        self,
        key: str,
        open: Callable[[], PoolT],  # noqa: A002 - as `Scope.pool`
        *,
        ends_with_scopes: bool = False,
    ) -> PoolT:
        """Return a pool of the Engine that a floor above defines, by its name; arguments as for `Scope.pool`.

        Raises:
            EngineClosedError: the Engine was closed.
        """
        if self._closed:  # a task that a handler has started may outlive the Engine
            raise EngineClosedError("this Engine was closed, and its threads, processes and devices were released")
        found: PoolT | None = self._others.get(key)
        if found is None:
            found = self._others[key] = open()
            if ends_with_scopes and self._ends_with_loop:
                self._with_scopes.add(key)
            else:
                self._guard(found.aclose)
        return found

    def limiter(self, key: object, places: int, ahead: int = 0) -> Limiter:
        """Return the limiter that all call sites with a key share in the Engine; arguments as for `node.Places`.

        The key of a node with `concurrency=` is the origin of the node. A method is one node for all instances.
        """
        return self._limiters.setdefault(key, Limiter(places, shared=True, ahead=ahead))

    def hedge_budget(self, origin: object, share: float) -> HedgeBudget:
        """Return the budget for second attempts of a node, given its origin and its `max_share`."""
        return self._hedges.setdefault(origin, {}).setdefault(share, HedgeBudget(share))

    def results(self, origin: object, cache: Cache) -> ResultCache:
        """Return the results that a node keeps with these options, given the origin of the node."""
        return self._results.setdefault(origin, {}).setdefault(cache, ResultCache(cache))

    def size_of(self, pool: Literal["threads", "processes"]) -> int:
        """Return the largest number of threads, or of processes."""
        return self.max_threads if pool == "threads" else self.max_processes

    def statistics(self) -> tuple[ThreadPoolStatistics | None, ProcessPoolStatistics | None]:
        """Return snapshots of the thread pool and of the pool "processes"; None for a pool that was not used yet."""
        processes = self._others.get("processes")
        return (
            None if self._threads is None else self._threads.statistics(),
            None if processes is None else processes.statistics(),
        )

    async def close_with_scopes(self) -> None:
        """End the pools that end with the last scope of a default Engine; the next use opens new ones."""
        closing = [self._others.pop(name) for name in self._with_scopes]
        self._with_scopes.clear()  # before the first wait: a scope that begins meanwhile opens pools of its own
        for pool in closing:
            await pool.aclose()

    async def close(self) -> None:
        """End the pools of other floors and the threads; wait until their handlers return."""
        self._closed = True
        for caches in self._results.values():
            for cache in caches.values():
                cache.clear()
        others, self._others = self._others, {}
        for other in others.values():
            await other.aclose()
        threads, self._threads = self._threads, None
        if threads is not None:
            await threads.aclose()

    def _guard(self, aclose: Callable[[], Awaitable[None]]) -> None:
        """Have a pool end with the loop, if this is a default Engine."""
        if self._ends_with_loop:
            self._guards.append(end_with_loop(aclose))
