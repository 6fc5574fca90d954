"""The thread that compiles: one for all devices, there while somebody holds a lease on it."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

from ..._errors import EngineClosedError
from ...actors.threads import before_interpreter_exit
from ...actors.uninterrupted import until

# Called with None to work, or with the error that keeps it from working. Raises nothing.
Job: TypeAlias = Callable[[BaseException | None], None]


class CompileThread:
    """Runs compilations one after the other. It starts with the first job, and ends with the last lease."""

    def __init__(self) -> None:
        self.begin_without_thread()
        _compile_threads.add(self)

    def begin_without_thread(self) -> None:
        """Have no thread and no leases; also in a process that was forked, where the thread of its parent is not."""
        self._lock = threading.Lock()
        self._leases = 0
        self._run: _Run | None = None

    def acquire(self) -> None:
        """Keep the thread: until `release`, jobs may be submitted. Callable from any thread."""
        with self._lock:
            self._leases += 1

    def submit(self, job: Job) -> None:
        """Run a job on the thread.

        Raises:
            EngineClosedError: nobody holds a lease.
        """
        with self._lock:
            if self._leases == 0:
                raise EngineClosedError("nothing is compiled any more: the last one who needed it was closed")
            if self._run is None:
                self._run = _Run()
            self._run.jobs.put(job)

    def release(self) -> None:
        """Give a lease back. The last one blocks until the running job has ended; those that wait fail.

        It is not for an event loop: that has `arelease`.
        """
        thread = self._give_back(on_ended=None)
        if thread is not None:
            thread.join()

    async def arelease(self) -> None:
        """Do what `release` does without blocking the loop; a cancellation is raised once the thread has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        thread = self._give_back(on_ended=lambda: loop.call_soon_threadsafe(ended.set))
        if thread is None:
            return
        try:
            await until(ended.is_set, ended.wait)
        finally:
            thread.join()  # it has nothing left to do but return

    def end_with_interpreter(self) -> None:
        """Take all leases back and wait for the running job."""
        with self._lock:
            self._leases = 1
        self.release()

    def _give_back(self, on_ended: Callable[[], object] | None) -> threading.Thread | None:
        with self._lock:
            self._leases -= 1
            if self._leases > 0 or self._run is None:
                return None
            run, self._run = self._run, None
        run.end(on_ended)
        return run.thread


class _Run:
    """One life of the thread, with its own queue: the next one may start before it has ended."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job | _LastWord] = SimpleQueue()
        # Not a daemon: a daemon thread inside JAX while the interpreter ends aborts the process.
        self.thread = threading.Thread(target=_work, args=(self.jobs,), name="penstock-compile", daemon=False)
        self.thread.start()

    def end(self, on_ended: Callable[[], object] | None) -> None:
        """Fail the jobs that wait; the one that runs is the last."""
        waiting: list[Job] = []
        try:
            while not isinstance(job := self.jobs.get_nowait(), _LastWord):
                waiting.append(job)
        except Empty:
            pass
        self.jobs.put(_LastWord(on_ended))
        for job in waiting:
            job(EngineClosedError("closed before this was compiled"))


class _LastWord:
    """Ends the thread."""

    def __init__(self, on_ended: Callable[[], object] | None) -> None:
        self.on_ended = on_ended


def _work(jobs: "SimpleQueue[Job | _LastWord]") -> None:
    while not isinstance(job := jobs.get(), _LastWord):
        job(None)
        del job  # an idle thread holds no program
    if job.on_ended is not None:
        try:
            job.on_ended()
        except RuntimeError:  # the loop is closed: nobody waits
            pass


_compile_threads: "weakref.WeakSet[CompileThread]" = weakref.WeakSet()


def _end_all() -> None:
    for compile_thread in list(_compile_threads):
        compile_thread.end_with_interpreter()


def _forget_thread_of_parent() -> None:
    for compile_thread in list(_compile_threads):
        compile_thread.begin_without_thread()


before_interpreter_exit(_end_all)
os.register_at_fork(after_in_child=_forget_thread_of_parent)
