"""Pools: the threads, the processes and the limits of nodes that all scopes of one Engine share."""

import os
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from .._errors import EngineClosedError
from ..actors.node_actor import Limiter
from ..actors.threads import ProcessPoolStatistics, ThreadPool, ThreadPoolStatistics, ThreadShare

if TYPE_CHECKING:
    from ..actors.processes import ProcessPool


class Pool(Protocol):
    """What an Engine owns and closes."""

    async def aclose(self) -> None:
        """End it; waits until nothing of it is left."""
        ...


PoolT = TypeVar("PoolT", bound=Pool)


class Pools:
    """What an Engine owns; each part is started when it is first used.

    Args:
        max_threads: the most threads that run handlers.
        max_processes: the most worker processes; None for as many as there are cores that this process may use.
        ends_with_loop: the threads end when the loop is shut down, because nobody closes this Engine.
    """

    def __init__(self, max_threads: int, max_processes: int | None, *, ends_with_loop: bool) -> None:
        self.max_threads = max_threads
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.max_processes = cores if max_processes is None else max_processes
        self._ends_with_loop = ends_with_loop
        self._closed = False
        self._threads: ThreadPool | None = None
        self._processes: ProcessPool | None = None
        self._others: dict[type[Pool], Pool] = {}
        self._guards: list[AsyncGenerator[None, None]] = []
        # By the origins of nodes, weakly: those made by a factory for one request leave nothing behind.
        self._limiters: WeakKeyDictionary[object, Limiter] = WeakKeyDictionary()

    def threads(self) -> ThreadPool:
        """Return the thread pool."""
        if self._threads is None:
            self._threads = ThreadPool(self.max_threads)
            self._guard(self._threads)
        return self._threads

    def share_of_threads(self, limit: int | None) -> ThreadShare | None:
        """Return what bounds the threads that a run, stream or deployment has busy; None if it may have all of them."""
        return None if limit is None or limit >= self.max_threads else ThreadShare(limit)

    def processes(self) -> "ProcessPool":
        """Return the pool of worker processes."""
        if self._processes is None:
            from ..actors.processes import ProcessPool  # which few need

            self._processes = ProcessPool(self.max_processes)
        return self._processes

    def other(self, kind: type[PoolT], make: Callable[[], PoolT]) -> PoolT:
        """Return the Engine's pool of a kind that a floor above brings; the first time, make it.

        Raises:
            EngineClosedError: the Engine was closed.
        """
        if self._closed:  # a task that a handler has started may outlive it
            raise EngineClosedError("this Engine was closed, and what it owned is gone")
        if kind not in self._others:
            self._others[kind] = make()
            self._guard(self._others[kind])
        return cast(PoolT, self._others[kind])

    def limiter(self, origin: object, places: int) -> Limiter:
        """Return the places of a node with `concurrency=`: the same for all of its call sites in the Engine.

        Args:
            origin: the node that it is a copy of, or itself; a method is one node, whatever instance it is called on.
            places: how many there are.
        """
        return self._limiters.setdefault(origin, Limiter(places, shared=True))

    @property
    def has_processes(self) -> bool:
        """Whether worker processes were started and not ended."""
        return self._processes is not None

    def statistics(self) -> "tuple[ThreadPoolStatistics | None, ProcessPoolStatistics | None]":
        """Return snapshots of the pools; None for one that was not used yet."""
        return (
            None if self._threads is None else self._threads.statistics(),
            None if self._processes is None else self._processes.statistics(),
        )

    async def close_processes(self) -> None:
        """End the worker processes; they start again on demand."""
        processes, self._processes = self._processes, None
        if processes is not None:
            await processes.aclose()

    async def close(self) -> None:
        """End the worker processes and the threads; waits for what runs in them."""
        self._closed = True
        others, self._others = self._others, {}
        for other in others.values():
            await other.aclose()
        await self.close_processes()
        threads, self._threads = self._threads, None
        if threads is not None:
            await threads.aclose()

    def _guard(self, pool: Pool) -> None:
        """Have a pool end with the loop, if nobody closes this Engine."""
        if not self._ends_with_loop:
            return
        guard = _end_with_loop(pool)
        self._guards.append(guard)
        # Its first step registers the generator with the loop, which closes it when it is shut down. It is the one
        # documented hook that every loop and runner has.
        try:
            guard.__anext__().send(None)
        except StopIteration:
            pass


async def _end_with_loop(pool: Pool) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await pool.aclose()
