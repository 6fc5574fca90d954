"""Threads that run blocking handlers for one event loop, and the mailbox that brings their results back."""

import asyncio
import contextvars
import os
import sys
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

from .._errors import EngineClosedError, travelling
from .tasks import when_main_thread_ends


class Pool(Protocol):
    """A part of an Engine that is closed with the Engine, such as connections to workers."""

    async def aclose(self) -> None:
        """End the pool, and wait until its threads and tasks have ended."""


PoolT = TypeVar("PoolT", bound=Pool)


class LoopMailbox:
    """Calls functions on an event loop, for threads.

    `call_soon_threadsafe` wakes the loop once per call, which costs 6 us on asyncio. Here calls gather in a deque, and
    each wake-up of the loop makes all gathered calls, in the order in which they were posted.

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
        """Call `callback(*args)` on the loop; from any thread. Returns False if the loop is closed."""
        self._calls.append((callback, args))
        if self._armed:
            return True
        self._armed = True
        return self._wake()

    def empty(self) -> None:
        """Make all calls that wait now; only called on the loop's thread."""
        # Disarmed before the calls are made: a call that is posted meanwhile is made here, or arms the next wake-up.
        self._armed = False
        calls = self._calls
        try:
            # Only as many calls as wait at the beginning. Each call may give a thread new work, whose result may be
            # posted before this loop ends: the event loop would do nothing else until the threads have no work left.
            for _ in range(len(calls)):
                if not calls:  # a callback has emptied the deque
                    break
                callback, args = calls.popleft()
                callback(*args)
                del callback, args  # the result in them must not live until the next call
        finally:
            if calls and not self._armed:  # a callback raised: the other callbacks must still be called
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


# Owners of threads that are not daemons. A daemon thread inside native code (JAX) aborts the process if the interpreter
# ends meanwhile. Other threads keep the interpreter waiting, so they are ended first. A forked process has no threads
# of its parent.


class ThreadOwner(ABC):
    """Owns threads, which end with their owner, at the latest before the interpreter ends."""

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
        """Forget all threads and all work: in a forked process, the threads of its parent do not run."""


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


when_main_thread_ends(_end_all)
os.register_at_fork(after_in_child=_forget_threads_of_parent)


# Threads that run blocking handlers for one event loop.
#
# `asyncio.to_thread` wakes the loop once per result, and waits for the loop before a thread gets its next job:
# 0.1 ms and more. Here jobs queue ahead of the threads. Results come back through a mailbox that wakes the loop once
# per burst.

P = ParamSpec("P")
R = TypeVar("R")


class Job:
    """A job for a thread, which goes on if its caller leaves first.

    Args:
        context: the context that the job runs in; a fresh copy, since a context cannot be entered twice at a time.
        fn: the blocking function.
        args: the positional arguments.
        kwargs: the keyword arguments.

    Attributes:
        future: gets the result; made when the job is given to a pool.
        handling: the `Handling` in the context of the job, for a node.
        began: when the job began, by `perf_counter`; 0 before.
    """

    __slots__ = (
        "_then", "abandoned", "args", "began", "context", "fn", "future", "handling", "kwargs", "returned",
    )  # fmt: skip

    future: "asyncio.Future[Any]"

    def __init__(
        self, context: contextvars.Context, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.context = context
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.handling: object = None
        self.abandoned = False
        self.began = 0.0
        self.returned = False
        self._then: tuple[Callable[[], None], ...] = ()

    def abandon(self) -> bool:
        """Note that the caller has left; return whether the job still holds a thread."""
        # This writes `abandoned` and then reads `began`; the thread writes `began` and then reads `abandoned`. So at
        # least one of the two threads sees the write of the other thread.
        self.abandoned = True
        return self.began > 0 and not self.returned

    @property
    def is_ahead(self) -> bool:
        """Whether no thread has begun the job."""
        return not self.began

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop once the job has returned or was skipped: only then is the thread free again."""
        self._then += (callback,)

    def on_returned(self) -> None:
        """Note that the thread is free again, and call the callbacks."""
        self.returned = True
        for callback in self._then:
            callback()


@dataclass(frozen=True, slots=True)
class ThreadPoolStatistics:
    """A snapshot of a `ThreadPool`: how many threads and jobs it has now, and how many jobs it has run.

    Attributes:
        threads: threads started and not yet ended.
        idle: threads that wait for a job.
        busy: threads that run a job.
        queued: jobs that no thread has taken yet, including cancelled jobs.
        completed: jobs whose result or error reached its future.
        discarded: jobs that ran, but whose result was dropped, because the future was cancelled or the loop closed.
    """

    threads: int
    idle: int
    busy: int
    queued: int
    completed: int
    discarded: int


class ThreadPool(ThreadOwner):
    """Runs blocking functions in at most `max_threads` threads, for the event loop of the first `submit`.

    Threads start on demand, when a job comes in and no thread is idle. Except for `statistics`, methods are called on
    the loop's thread.
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
        """Reset to no thread and no job, at the beginning, or in a forked process."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._unsettled = 0  # submitted, and not yet drained on the loop
        self._mailbox = None if self._loop is None else LoopMailbox(self._loop)

    def submit(
        self,
        context: contextvars.Context,
        on_returned: Callable[[], None] | None,
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
                cancelled before: only then is the thread free again.
            fn: the blocking function.
            *args: the positional arguments.
            **kwargs: the keyword arguments.

        Returns:
            A future of the result. Every exception of the job reaches the future, also KeyboardInterrupt and
            SystemExit. A future refuses StopIteration, so this becomes the cause of a RuntimeError.

        Raises:
            EngineClosedError: the pool was closed.
        """
        job = Job(context, fn, args, kwargs)
        if on_returned is not None:
            job.then(on_returned)
        return self.begin(job)

    def begin(self, job: Job) -> "asyncio.Future[Any]":
        """Run a job like `submit`."""
        if self._closed:
            raise EngineClosedError("this thread pool was closed; it belongs to an Engine that has ended")
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._mailbox = LoopMailbox(loop)
        job.future = loop.create_future()
        if self._unsettled - self._arrived() >= len(self._threads) < self._max_threads:
            self._start_thread()
        self._jobs.put(job)
        self._unsettled += 1
        return job.future

    @property
    def has_free_thread(self) -> bool:
        """Whether a job that is submitted now begins at once."""
        return self._unsettled - self._arrived() < self._max_threads

    @property
    def has_queued_jobs(self) -> bool:
        """Whether a job waits for a thread; callable from a job as well."""
        return not self._jobs.empty()

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Call `callback(*args)` on the loop, before the result of the job that calls this arrives there."""
        assert self._mailbox is not None
        self._mailbox.post(callback, *args)

    def statistics(self) -> ThreadPoolStatistics:
        """Return a snapshot. From another thread, its numbers may differ by one job."""
        threads, queued = len(self._threads), self._jobs.qsize() if not self._closed else 0
        busy = min(max(self._unsettled - self._arrived() - queued, 0), threads)
        return ThreadPoolStatistics(threads, threads - busy, busy, queued, self._completed, self._discarded)

    async def aclose(self) -> None:
        """Refuse new jobs, cancel jobs that have not started, and wait until each thread has ended its running job."""
        if not self._closed:
            self._closed = True
            skipped = self._take_queued()
            self._release_threads()
            if self._mailbox is not None:
                self._mailbox.empty()
            for job in skipped:
                job.future.cancel()
                self._settle(job, None, None, has_run=False)
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

    def _take_queued(self) -> list[Job]:
        taken: list[Job] = []
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
        jobs, post, settle = self._jobs, self._mailbox.post, self._settle
        while (job := jobs.get()) is not None:
            value, failure = None, None
            job.began = perf_counter()
            has_run = not (job.abandoned or job.future.cancelled())
            if has_run:
                try:
                    value = job.context.run(job.fn, *job.args, **job.kwargs)
                except BaseException as error:  # noqa: BLE001 - every error of a job goes to its caller, not to this thread
                    failure = travelling(error)
            if jobs is not self._jobs:
                end_forked(failure)
            is_received = post(settle, job, value, failure, has_run)
            self._discarded += has_run and not is_received
            # An idle thread must not hold an item: drop everything of the job before waiting for the next job.
            del job, value, failure
        post(self._thread_ended, threading.current_thread())

    def _settle(self, job: Job, value: Any, error: BaseException | None, has_run: bool) -> None:
        """Settle the future of a job with its result or error, on the loop. Without `has_run`, the job was skipped."""
        self._unsettled -= 1
        future = job.future
        if future.cancelled():
            self._discarded += has_run
        else:
            self._completed += 1
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        job.on_returned()

    def _arrived(self) -> int:
        """Return how many unsettled jobs need no thread any more: their results wait for the loop."""
        return 0 if self._mailbox is None else len(self._mailbox)

    def _thread_ended(self, thread: threading.Thread) -> None:
        thread.join()  # the thread only has to return
        self._threads.discard(thread)
        if not self._threads:
            self._all_ended.set()


def end_forked(error: BaseException | None) -> NoReturn:
    """End this process, which a handler has forked: it would go on as its parent, and run the next items once more.

    Args:
        error: the error that the handler has raised in this process, which is printed; None if it has returned.
    """
    status = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            status = (error.code or 0) & 0xFF
        else:
            told = "" if error is None else "".join(traceback.format_exception(error))
            remedy = "end a forked process with os._exit, or use multiprocessing"
            sys.stderr.write(f"{told}Process {os.getpid()} was forked in a handler, and left it: {remedy}.\n")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def end_with_loop(close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None, None]:
    """Await `close()` when the running loop is shut down. Return an object that the owner keeps until then."""
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
    """The threads of an Engine that one run, stream or deployment may keep busy at a time, over all its call sites.

    Args:
        limit: how many threads, at least 1.

    Attributes:
        limit: how many threads.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = asyncio.Semaphore(limit)
        self._waiting = 0

    @property
    def is_wanted(self) -> bool:
        """Whether a handler waits for one of these threads; callable from any thread."""
        return self._waiting > 0

    async def take(self) -> None:
        """Wait for one of these threads; the caller calls `give_back` once the thread has returned."""
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    def give_back(self) -> None:
        """Free the place of a thread that has returned, or was not needed."""
        self._free.release()
