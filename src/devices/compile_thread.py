"""The thread that compiles programs."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

from .._errors import EngineClosedError
from ..actors.tasks import until
from ..actors.threads import ThreadOwner

# The compile thread calls a compilation with None to compile, or with the error that prevents it. Must not raise.
Compilation: TypeAlias = Callable[[BaseException | None], None]


class CompileThread(ThreadOwner):
    """Runs compilations one after the other. The thread starts with the first one, and ends with the last lease."""

    # Ownership: `_lock` guards `_leases` and `_run`, which any thread may change. A run that was taken out of `_run`
    # belongs to the thread that took it out, which ends the run and waits for it. `_ended` belongs to the thread that
    # exits.

    def __init__(self) -> None:
        self._ended: threading.Thread | None = None
        self.begin_without_threads()
        super().__init__()

    def begin_without_threads(self) -> None:
        """Begin without a thread and leases: at first, and in a forked process."""
        self._lock = threading.Lock()
        self._leases = 0
        self._run: _Run | None = None

    def acquire(self) -> None:
        """Take a lease: until `release`, compilations may be submitted. Any thread may call this."""
        with self._lock:
            self._leases += 1

    def submit(self, job: Compilation) -> None:
        """Run a compilation on the thread.

        Raises:
            EngineClosedError: there is no lease.
        """
        with self._lock:
            if self._leases == 0:
                raise EngineClosedError("no program can be compiled: the last Engine that uses devices was closed")
            if self._run is None:
                self._run = _Run()
            self._run.compilations.put(job)

    async def release(self) -> None:
        """Give a lease back. The last lease fails the waiting compilations, and waits until the running one has ended.

        A cancellation is raised once the thread has ended.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        thread = self._give_back(on_ended=lambda: loop.call_soon_threadsafe(ended.set))
        if thread is None:
            return
        try:
            await until(ended.is_set, ended.wait)
        finally:
            thread.join()  # the thread is about to return

    def abandon(self) -> None:
        """End all leases: the thread ends after the running compilation."""
        with self._lock:
            self._leases = 1
        self._ended = self._give_back(on_ended=None)

    def join(self) -> None:
        """Block until the running compilation has ended. Called after `abandon`."""
        if self._ended is not None:
            self._ended.join()

    def _give_back(self, on_ended: Callable[[], object] | None) -> threading.Thread | None:
        with self._lock:
            self._leases -= 1
            if self._leases > 0 or self._run is None:
                return None
            run, self._run = self._run, None
        run.end(on_ended)
        return run.thread


class _Run:
    """A thread and its queue. None in the queue ends the thread. The next thread may start before this one ends."""

    def __init__(self) -> None:
        self.compilations: SimpleQueue[Compilation | None] = SimpleQueue()
        self._on_ended: Callable[[], object] | None = None
        self.thread = threading.Thread(target=self._work, name="penstock-compile", daemon=False)
        self.thread.start()

    def end(self, on_ended: Callable[[], object] | None) -> None:
        """Fail the waiting compilations. The running one goes on to its end, and no other begins."""
        waiting: list[Compilation | None] = []
        with suppress(Empty):
            while True:
                waiting.append(self.compilations.get_nowait())
        self._on_ended = on_ended
        self.compilations.put(None)
        for job in filter(None, waiting):
            job(EngineClosedError("closed before this was compiled"))

    def _work(self) -> None:
        while (job := self.compilations.get()) is not None:
            job(None)
            del job  # so that an idle thread holds no program
        if self._on_ended is not None:
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                self._on_ended()
