"""Threads that run blocking handlers for one event loop, and the mailbox that brings their results back."""

import asyncio
import contextvars
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeAlias, TypeVar

from .._errors import EngineClosedError


class LoopMailbox:
    """Calls functions on an event loop, for threads.

    `call_soon_threadsafe` wakes the loop once per call, which costs 6 us on asyncio. Here calls gather in a deque, and
    each wake-up of the loop makes all of them, in the order in which they were posted.

    Args:
        loop: the event loop on which the functions are called.
    """

    __slots__ = ("_armed", "_calls", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._armed = False

    def __len__(self) -> int:
        return len(self._calls)

    def post(self, callback: Callable[..., None], *args: Any) -> bool:
        """Have `callback(*args)` called on the loop; from any thread. Returns False if the loop is closed."""
        self._calls.append((callback, args))
        if self._armed:
            return True
        self._armed = True
        return self._wake()

    def empty(self) -> None:
        """Make the calls that wait here now; only called on the loop's thread."""
        # Disarmed before the calls are made: a call that is posted meanwhile is made here, or arms the next wake-up.
        self._armed = False
        calls = self._calls
        try:
            # Only as many calls as wait at the beginning. Each call may give a thread new work, whose result may be
            # posted before this loop ends: the event loop would do nothing else until the threads have no work left.
            for _ in range(len(calls)):
                if not calls:  # a callback has emptied it
                    break
                callback, args = calls.popleft()
                callback(*args)
                del callback, args  # the result that they hold must not live until the next call
        finally:
            if calls and not self._armed:  # a callback raised: the others must still be called
                self._armed = True
                self._wake()

    def _wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self.empty)
        except RuntimeError:  # the loop is closed, so no coroutine can receive these results
            self._armed = False
            self._calls.clear()
            return False
        return True


# What owns threads that are no daemons: a daemon thread inside native code (JAX) while the interpreter ends aborts the
# process. Others keep the interpreter waiting, so they are ended before. A process that was forked has none of them.


class ThreadOwner(ABC):
    """Owns threads, which end with it, at the latest before the interpreter does."""

    def __init__(self) -> None:
        _owners.add(self)

    @abstractmethod
    def abandon(self) -> None:
        """Let the threads end without touching futures or loops; callable from any thread.

        For the end of the interpreter, when a loop may be closed, or may run in another thread.
        """

    @abstractmethod
    def join(self) -> None:
        """Block until every thread has ended; after `abandon`."""

    @abstractmethod
    def begin_without_threads(self) -> None:
        """Set this object to have no threads and no work: in a forked process, the threads of its parent do not run."""


_owners: "weakref.WeakSet[ThreadOwner]" = weakref.WeakSet()


def _end_all() -> None:
    owners = list(_owners)
    for owner in owners:
        owner.abandon()
    for owner in owners:
        owner.join()


def _forget_threads_of_parent() -> None:
    for owner in list(_owners):
        owner.begin_without_threads()


# Called when the main thread has ended, before the interpreter waits for the others: `atexit` comes after that wait, so
# threads that were not closed would hold the interpreter for ever. `concurrent.futures` uses this hook for the same
# reason; there is no public one.
threading._register_atexit(_end_all)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
os.register_at_fork(after_in_child=_forget_threads_of_parent)


# Threads that run blocking handlers for one event loop.
#
# `asyncio.to_thread` wakes the loop once per result and waits for the loop before a thread gets its next job. Here jobs
# queue ahead of the threads, and results come back through a mailbox that wakes the loop once per burst, so a thread
# never waits for the loop and the loop is not woken per result.

P = ParamSpec("P")
R = TypeVar("R")

OnReturned: TypeAlias = Callable[[], None]
_Job: TypeAlias = tuple[
    "asyncio.Future[Any]",
    contextvars.Context,
    Callable[..., Any],
    tuple[Any, ...],
    dict[str, Any],
    OnReturned | None,
]


@dataclass(frozen=True, slots=True)
class ThreadPoolStatistics:
    """A snapshot of a `ThreadPool`: how many threads and jobs it has now, and how many jobs it has run.

    Attributes:
        threads: threads started and not yet ended.
        idle: threads that wait for a job.
        busy: threads that run a job.
        queued: jobs that no thread has taken yet, cancelled ones included.
        completed: jobs whose result or error reached its future.
        discarded: jobs that ran, but whose result was dropped, because the future was cancelled or the loop closed.
    """

    threads: int
    idle: int
    busy: int
    queued: int
    completed: int
    discarded: int


@dataclass(frozen=True, slots=True)
class ProcessPoolStatistics:
    """A snapshot of the pool of worker processes: how many processes and calls it has now, and what it has run.

    Attributes:
        workers: processes started and not yet found dead.
        idle: processes that wait for a call.
        busy: processes that start, or run a call.
        queued: calls that no process has begun: that wait for one, or that one has ahead.
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


class ThreadPool(ThreadOwner):
    """Runs blocking functions in at most `max_threads` threads, for the event loop of the first `submit`.

    Threads start on demand, when a job comes in and none is idle. Except for `statistics`, methods are called on the
    loop's thread.
    """

    def __init__(self, max_threads: int, *, name: str = "penstock") -> None:
        """Start nothing yet.

        Args:
            max_threads: the most threads that run at a time, at least 1.
            name: prefix of the threads' names.

        Raises:
            ValueError: `max_threads` is below 1.
        """
        if max_threads < 1:
            raise ValueError(f"max_threads must be at least 1, got {max_threads}")
        self._max_threads = max_threads
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads_started = 0
        self._closed = False
        self._all_ended = asyncio.Event()
        self._completed = 0
        self._discarded = 0
        self.begin_without_threads()
        super().__init__()

    def begin_without_threads(self) -> None:
        """Have no thread and no job, from the beginning, or in a process that was forked."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._unsettled = 0  # submitted, and not yet drained on the loop
        self._mailbox = None if self._loop is None else LoopMailbox(self._loop)

    def submit(
        self,
        context: contextvars.Context,
        on_returned: OnReturned | None,
        fn: Callable[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> "asyncio.Future[R]":
        """Run `fn(*args, **kwargs)` in a thread of the pool.

        Cancelling the future skips a job that has not started; a job that runs goes on, and its late result is
        discarded.

        Args:
            context: the context that the job runs in; a fresh copy, since a context cannot be entered twice at a time.
            on_returned: called on the loop once the job has returned or was skipped, also when the future was
                cancelled before: only then is its thread free again.
            fn: the blocking function.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Returns:
            A future of the result. Every exception of the job reaches it, KeyboardInterrupt and SystemExit included;
            StopIteration, which a future refuses, as the cause of a RuntimeError.

        Raises:
            EngineClosedError: the pool was closed.
        """
        if self._closed:
            raise EngineClosedError("this thread pool was closed; it belongs to an Engine that has ended")
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._mailbox = LoopMailbox(loop)
        # A thread whose result waits in the mailbox is done with its job, so it counts as idle.
        if self._unsettled - self._come_back() >= len(self._threads) < self._max_threads:
            self._start_thread()
        future: asyncio.Future[R] = loop.create_future()
        self._unsettled += 1
        self._jobs.put((future, context, fn, args, kwargs, on_returned))
        return future

    @property
    def has_free_thread(self) -> bool:
        """Whether a job that is submitted now begins at once."""
        return self._unsettled - self._come_back() < self._max_threads

    def statistics(self) -> ThreadPoolStatistics:
        """Return a snapshot; taken from another thread it may be torn by one job."""
        threads, queued = len(self._threads), self._jobs.qsize() if not self._closed else 0
        busy = min(max(self._unsettled - self._come_back() - queued, 0), threads)
        return ThreadPoolStatistics(threads, threads - busy, busy, queued, self._completed, self._discarded)

    def close_nowait(self) -> None:
        """Refuse new jobs, cancel those that have not started, and let each thread end after its running job.

        For an event loop that is about to be closed. `aclose` does the same and waits for the threads.
        """
        if self._closed:
            return
        self._closed = True
        skipped = self._take_queued()
        self._release_threads()
        if self._mailbox is not None:
            self._mailbox.empty()
        for future, _, _, _, _, on_returned in skipped:
            future.cancel()
            self._settle(None, None, None, on_returned)

    async def aclose(self) -> None:
        """Do what `close_nowait` does, then wait until every running job has returned and its thread has ended."""
        self.close_nowait()
        if self._threads:
            await self._all_ended.wait()

    def abandon(self) -> None:
        """Let each thread end after its running job, without touching futures or the loop; see `ThreadOwner`."""
        self._closed = True
        self._take_queued()
        self._release_threads()

    def join(self) -> None:
        """Block until every thread has ended; after `abandon`."""
        for thread in list(self._threads):
            thread.join()

    def _start_thread(self) -> None:
        self._threads_started += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{self._threads_started}", daemon=False)
        thread.start()
        self._threads.add(thread)

    def _take_queued(self) -> list[_Job]:
        taken: list[_Job] = []
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return taken
            if job is not None:
                taken.append(job)

    def _release_threads(self) -> None:
        for _ in range(len(self._threads)):
            self._jobs.put(None)

    def _work(self) -> None:
        """Run jobs until told to end; the body of every thread."""
        assert self._mailbox is not None  # a thread only exists after the first submit
        get, post, settle = self._jobs.get, self._mailbox.post, self._settle
        while (job := get()) is not None:
            future, context, fn, args, kwargs, on_returned = job
            if future.cancelled():
                post(settle, None, None, None, on_returned)
            else:
                try:
                    is_received = post(settle, future, context.run(fn, *args, **kwargs), None, on_returned)
                except BaseException as error:  # noqa: BLE001 - every error of a job is its caller's, not this thread's
                    is_received = post(settle, future, None, travelling(error), on_returned)
                self._discarded += not is_received
            # An idle thread holds no item: drop everything of the job before waiting for the next.
            del job, future, context, fn, args, kwargs, on_returned
        post(self._thread_ended, threading.current_thread())

    def _settle(
        self,
        future: "asyncio.Future[Any] | None",
        value: Any,
        error: BaseException | None,
        on_returned: OnReturned | None,
    ) -> None:
        """Settle the future of a job with its result or error; on the loop. For a skipped job, `future` is None."""
        self._unsettled -= 1
        if future is None:
            pass
        elif future.cancelled():
            self._discarded += 1
        else:
            self._completed += 1
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        if on_returned is not None:
            on_returned()

    def _come_back(self) -> int:
        """Return how many results have come back and wait for the loop."""
        return 0 if self._mailbox is None else len(self._mailbox)

    def _thread_ended(self, thread: threading.Thread) -> None:
        thread.join()  # it has nothing left to do but return
        self._threads.discard(thread)
        if not self._threads:
            self._all_ended.set()


def end_with_loop(close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None, None]:
    """Have `close()` awaited when the running loop is shut down; return what the owner keeps until then."""
    guard = _closing(close)
    # The first step of an async generator registers it with the loop, and the loop closes it at its shutdown. That is
    # the only documented hook for the end of a loop that all loops and runners have.
    try:
        guard.__anext__().send(None)
    except StopIteration:
        pass
    return guard


async def _closing(close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await close()


class ThreadShare:
    """The threads of an Engine that one run, stream or deployment may have busy at a time, over all of its call sites.

    Args:
        limit: how many, at least 1.

    Attributes:
        limit: the same.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = asyncio.Semaphore(limit)

    async def take(self) -> None:
        """Wait for one of these threads; the caller calls `give_back` once the thread has returned."""
        await self._free.acquire()

    def give_back(self) -> None:
        """Free the place of a thread that has returned, or was not needed."""
        self._free.release()


def travelling(error: BaseException) -> BaseException:
    """Return the form of `error` that a future accepts, its traceback beginning in the job and not in the pool."""
    if error.__traceback__ is not None:
        # Not by `error.with_traceback`, which the class of an exception may override with a method that raises: the
        # future would never be settled, and its caller would wait for ever.
        BaseException.with_traceback(error, error.__traceback__.tb_next)
    if isinstance(error, StopIteration):
        substitute = RuntimeError("a job raised StopIteration, which cannot travel through a future")
        substitute.__cause__ = error
        return substitute
    return error
