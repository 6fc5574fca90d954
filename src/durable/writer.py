"""The writer: what all runs of a process have to keep goes into the next commit together."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, NamedTuple

from .._errors import CheckpointError, LeaseLost
from ..actors.tasks import start_task
from ..telemetry import logs
from .store import Batch, Entry, Question, Run, State, Store, Written

# What may wait to be written before steps wait: some seconds of commits, or memory that a process can spare.
_MOST_ENTRIES: Final = 1000
_MOST_BYTES: Final = 16 << 20
_LISTEN_AGAIN_SECONDS: Final = 1.0  # after the store could not tell its changes


class Leaving(NamedTuple):
    """How an owner leaves a run; the fields are those of `Batch`."""

    state: State | None = None
    result: int | None = None
    error: bytes | None = None
    wakes_at: float | None = None


_STAYING: Final = Leaving()


class _Writing:
    """What is to be written of one run, and who waits for that."""

    def __init__(self, run: Run, on_lost: Callable[[Exception], None], on_cancel: Callable[[], None]) -> None:
        self.run = run
        self.on_lost = on_lost
        self.on_cancel = on_cancel
        self.entries: list[Entry] = []
        self.questions: list[Question] = []
        self.asked: dict[str, asyncio.Future[Question]] = {}
        self.leaving = _STAYING
        self.waiters: list[asyncio.Future[None]] = []
        self.lease_ends = 0.0
        self.lost: Exception | None = None


class Writer:
    """Writes entries of all runs of this process, one commit after the other, for one store and one event loop.

    Args:
        store: the store.
        lease_seconds: how long a run is this process's after each write.
    """

    def __init__(self, store: Store, lease_seconds: float) -> None:
        self._store = store
        self._lease_seconds = lease_seconds
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, _Writing] = {}
        self._dirty: dict[int, _Writing] = {}
        self._entries = self._bytes = 0  # how much waits
        self._room: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._renewal: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._offset = 0.0  # of the store's clock to that of the loop

    @property
    def is_idle(self) -> bool:
        """Whether no run is open and nothing is being written."""
        return not self._runs and self._task is None

    def now(self) -> float:
        """Return the time of the store, as far as it is known here, in seconds since 1970."""
        return self._loop.time() + self._offset

    def open(self, run: Run, on_lost: Callable[[Exception], None], on_cancel: Callable[[], None]) -> None:
        """Write for a run from now on.

        Args:
            run: the run, as this process has claimed it.
            on_lost: called with the reason if nothing more can be written.
            on_cancel: called if somebody has cancelled the run.
        """
        self._offset = run.now - self._loop.time()
        self._runs[run.run] = writing = _Writing(run, on_lost, on_cancel)
        writing.lease_ends = self._loop.time() + self._lease_seconds
        if self._renewal is None:
            self._renewal = self._loop.call_later(self._lease_seconds / 3, self._renew)
            self._watching = start_task(self._loop, self._watch(), name="penstock-durable-watch")

    def close(self, run: Run) -> None:
        """Write no more for a run."""
        writing = self._runs.pop(run.run, None)
        if writing is not None:
            self._forget(writing)
            self._release(writing, LeaseLost(f"run {run.key!r} has ended here"))
        self._dirty.pop(run.run, None)
        if not self._runs and self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
            if self._watching is not None:
                self._watching.cancel()
                self._watching = None

    def add(self, run: Run, entry: Entry) -> None:
        """Have an entry written with the next commit."""
        writing = self._of(run)
        writing.entries.append(entry)
        self._entries += 1
        self._bytes += _size(entry)
        self._wake(writing)

    def ask(self, run: Run, question: Question) -> None:
        """Have a question written with the next commit."""
        writing = self._of(run)
        writing.questions.append(question)
        self._wake(writing)

    async def answered(self, run: Run, token: str) -> Question:
        """Wait for the answer to a question that is kept; return the question with the answer."""
        writing = self._of(run)
        future: asyncio.Future[Question] = self._loop.create_future()
        writing.asked[token] = future
        try:
            self._see(writing, await self._store.read(run.key))  # it may have come before
            return await future
        finally:
            del writing.asked[token]

    async def _watch(self) -> None:
        """Look for cancels and answers after each change of the store."""
        while True:
            try:
                async with aclosing(self._store.changes()) as changes:
                    async for changed in changes:  # the first is None, so what has come meanwhile is seen
                        for number, writing in list(self._runs.items()):
                            if changed is None or number in changed:
                                self._see(writing, await self._store.read(writing.run.key))
            except Exception as error:  # noqa: BLE001 - whatever a store raises: answers must not wait for ever
                logs.warning("durable.store_not_heard", error=repr(error), again_in_seconds=_LISTEN_AGAIN_SECONDS)
            await asyncio.sleep(_LISTEN_AGAIN_SECONDS)

    def _see(self, writing: _Writing, run: Run | None) -> None:
        if run is None or run.cancel:
            writing.on_cancel()
            return
        for question in run.questions:
            future = writing.asked.get(question.token)
            if future is not None and question.answer is not None and not future.done():
                future.set_result(question)

    async def room(self) -> None:
        """Wait while too much waits to be written."""
        while self._entries > _MOST_ENTRIES or self._bytes > _MOST_BYTES:
            future = self._loop.create_future()
            self._room.append(future)
            await future

    async def barrier(self, run: Run, leaving: Leaving = _STAYING) -> None:
        """Wait until everything that a run has to keep is kept, and the run is known to be this process's.

        Args:
            run: the run, as this process has claimed it.
            leaving: how this process leaves the run with that commit.

        Raises:
            LeaseLost: another process has the run, or may have it.
            CheckpointError: the store has failed.
        """
        writing = self._of(run)
        writing.leaving = leaving
        future = self._loop.create_future()
        writing.waiters.append(future)
        self._wake(writing)
        await future
        if leaving is _STAYING and self._loop.time() >= writing.lease_ends:
            raise LeaseLost(f"run {run.key!r}: the lease is over, so another process may have the run")

    def _of(self, run: Run) -> _Writing:
        writing = self._runs.get(run.run)
        if writing is None or writing.run is not run or writing.lost is not None:
            raise (writing and writing.lost) or LeaseLost(f"run {run.key!r} has ended here")
        return writing

    def _wake(self, writing: _Writing) -> None:
        self._dirty[writing.run.run] = writing
        if self._task is None:
            self._task = start_task(self._loop, self._write_all(), name="penstock-durable-writer")

    def _renew(self) -> None:
        self._renewal = self._loop.call_later(self._lease_seconds / 3, self._renew)
        for writing in self._runs.values():
            self._wake(writing)

    async def _write_all(self) -> None:
        try:
            while self._dirty:
                await self._write(list(self._dirty.values()))
        finally:
            self._task = None

    async def _write(self, writings: list[_Writing]) -> None:
        self._dirty.clear()
        began = self._loop.time()
        batches: list[Batch] = []
        waiters: list[list[asyncio.Future[None]]] = []
        for one in writings:
            run, leaving = one.run, one.leaving
            batches.append(Batch(
                run=run.run, epoch=run.epoch, lease_seconds=self._lease_seconds, entries=tuple(one.entries),
                questions=tuple(one.questions), state=leaving.state, result=leaving.result, error=leaving.error,
                wakes_at=leaving.wakes_at,
            ))  # fmt: skip
            self._forget(one)
            waiters.append(one.waiters)
            one.waiters = []
        try:
            written = await self._store.write(batches)
        except asyncio.CancelledError:
            for one, waiting in zip(writings, waiters, strict=True):
                self._lose(one, waiting, CheckpointError("the writer of durable runs was cancelled"))
            raise
        except Exception as raised:  # noqa: BLE001 - whatever a store raises: the runs must not wait for ever
            error = (
                raised if isinstance(raised, CheckpointError) else CheckpointError(f"the store has failed: {raised!r}")
            )
            for one, waiting in zip(writings, waiters, strict=True):
                self._lose(one, waiting, error)
            return
        for one, waiting, outcome in zip(writings, waiters, written, strict=True):
            self._was_written(one, waiting, outcome, began)

    def _was_written(
        self, writing: _Writing, waiters: "list[asyncio.Future[None]]", outcome: Written, began: float
    ) -> None:
        if outcome.state is None:
            key = writing.run.key
            self._lose(writing, waiters, LeaseLost(f"run {key!r}: another process has taken it over, and goes on"))
            return
        writing.lease_ends = began + self._lease_seconds
        for future in waiters:
            if not future.done():
                future.set_result(None)
        if outcome.cancel:
            writing.on_cancel()

    def _lose(self, writing: _Writing, waiters: "list[asyncio.Future[None]]", error: Exception) -> None:
        writing.waiters += waiters
        writing.lost = error
        self._release(writing, error)
        writing.on_lost(error)

    def _release(self, writing: _Writing, error: Exception) -> None:
        waiters, writing.waiters = writing.waiters, []
        for future in waiters:
            if not future.done():
                future.set_exception(error)

    def _forget(self, writing: _Writing) -> None:
        """Take the entries of a run out of what waits."""
        self._entries -= len(writing.entries)
        self._bytes -= sum(map(_size, writing.entries))
        writing.entries, writing.questions = [], []
        room, self._room = self._room, []
        for future in room:
            if not future.done():
                future.set_result(None)


def _size(entry: Entry) -> int:
    return len(entry.value or b"") + len(entry.parts or b"")
