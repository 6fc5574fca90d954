"""A device behind a thread, written by hand: no limits, no cancellation, no errors, one function.

`PromisingThread` adds the promises of a call through Penstock, to show their cost.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import jax
import numpy as np

DEPTH = 16  # computations in flight, as many as Penstock has of short computations

Job: TypeAlias = tuple[Any, asyncio.Future[Any]]


class Mailbox:
    """Settles futures on the loop, with one wake-up of the loop for each burst."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._settled: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._armed = False

    def post(self, settled: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
        self._settled.extend(settled)
        if not self._armed:
            self._armed = True
            self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._armed = False
        while self._settled:
            future, value = self._settled.popleft()
            future.set_result(value)


class DeviceThread:
    """Runs jobs on a thread, whose body is `work`."""

    def __init__(self, work: "Callable[[SimpleQueue[Job | None], Mailbox], None]") -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=work, args=(self._jobs, Mailbox()))
        self._thread.start()

    def submit(self, argument: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((argument, future))
        return future

    def end(self) -> None:
        self._jobs.put(None)
        self._thread.join()


def bare() -> AbstractContextManager[DeviceThread]:
    """Open a thread that does nothing: only the hop to the thread and back is measured."""

    def work(jobs: "SimpleQueue[Job | None]", mailbox: Mailbox) -> None:
        while (job := jobs.get()) is not None:
            mailbox.post([(job[1], None)])

    return _running(work)


def one_by_one(call: Callable[[Any], jax.Array]) -> AbstractContextManager[DeviceThread]:
    """Open a thread that makes calls in the order in which they come, with several in flight."""

    def work(jobs: "SimpleQueue[Job | None]", mailbox: Mailbox) -> None:
        in_flight: deque[tuple[asyncio.Future[Any], jax.Array]] = deque()

        def wait_for_oldest() -> None:
            future, array = in_flight.popleft()
            mailbox.post([(future, array.block_until_ready())])

        while True:
            try:
                job = jobs.get(block=not in_flight)
            except Empty:
                wait_for_oldest()
                continue
            if job is None:
                break
            argument, future = job
            in_flight.append((future, call(argument)))
            if len(in_flight) == DEPTH:
                wait_for_oldest()
        while in_flight:
            wait_for_oldest()

    return _running(work)


def batched(call: Callable[[Any], jax.Array], max_size: int) -> AbstractContextManager[DeviceThread]:
    """Open a thread that runs all waiting calls together, padded to a power of two."""

    def work(jobs: "SimpleQueue[Job | None]", mailbox: Mailbox) -> None:
        is_over = False
        while not is_over and (first := jobs.get()) is not None:
            batch = [first]
            while len(batch) < max_size and not jobs.empty():
                job = jobs.get()
                if job is None:
                    is_over = True
                    break
                batch.append(job)
            size = 1 << (len(batch) - 1).bit_length()
            stacked = np.stack([argument for argument, _ in batch] + [batch[0][0]] * (size - len(batch)))
            results = np.asarray(call(stacked))
            mailbox.post([(future, result) for (_, future), result in zip(batch, results, strict=False)])

    return _running(work)


PLACES = 128


class PromisingThread:
    """A thread whose calls are bounded, fail alone, and can be left at once; results of donated arguments are kept.

    A caller that leaves is released. Its call is skipped if it has not begun, and its place is free when the device is
    done with the call. Calls run together if their arrays have equal shapes and dtypes.
    """

    def __init__(self, call: Callable[[Any], Any], max_size: int = 1, *, ready: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._settled: deque[tuple[list[Job], list[Any], Exception | None]] = deque()
        self._armed = False
        self._free = PLACES
        self._call = call
        self._max_size = max_size
        self._ready = ready
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    async def run(self, argument: Any) -> Any:
        return await self._submitted(argument)

    async def run_to_end(self, argument: Any) -> Any:
        """Make a call that destroys its argument; a caller that is cancelled meanwhile still gets the result."""
        future = self._submitted(argument)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError as error:
            result = await future
            task = asyncio.current_task()
            assert task is not None
            self._loop.call_soon(task.cancel, *error.args)  # arrives at the next await
            return result

    def end(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _submitted(self, argument: Any) -> asyncio.Future[Any]:
        if not self._free:
            raise RuntimeError("too many calls")
        self._free -= 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((argument, future))
        return future

    def _work(self) -> None:
        put_back: deque[Job | None] = deque()
        while (first := put_back.popleft() if put_back else self._jobs.get()) is not None:
            batch, alike = [first], _kind(first[0]) if self._max_size > 1 else None
            while len(batch) < self._max_size and not self._jobs.empty():
                following = self._jobs.get()
                if following is None or _kind(following[0]) != alike:
                    put_back.append(following)
                    break
                batch.append(following)
            left: list[Job] = []
            wanted: list[Job] = []
            for job in batch:
                (left if job[1].cancelled() else wanted).append(job)
            results, error = list[Any](), None
            try:
                if wanted:
                    results = self._computed([argument for argument, _ in wanted])
            except Exception as failure:  # noqa: BLE001 - the callers get it
                error = failure
            self._settled += [(wanted, results, error), (left, [], None)]
            if not self._armed:
                self._armed = True
                self._loop.call_soon_threadsafe(self._settle)
            del first, batch, left, wanted, results, error  # an idle thread holds no more than the last call

    def _computed(self, arguments: list[Any]) -> list[Any]:
        if self._max_size == 1:
            result = self._call(arguments[0])
            return [jax.block_until_ready(result) if self._ready else result]
        size = 1 << (len(arguments) - 1).bit_length()
        results = np.asarray(self._call(np.stack(arguments + [arguments[-1]] * (size - len(arguments)))))
        return list(results[: len(arguments)])

    def _settle(self) -> None:
        self._armed = False
        while self._settled:
            jobs, results, error = self._settled.popleft()
            self._free += len(jobs)
            for number, (_, future) in enumerate(jobs):
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(results[number])


def _kind(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype


@contextmanager
def promising(call: Callable[[Any], Any], max_size: int = 1, *, ready: bool = True) -> Generator[PromisingThread]:
    """Run the thread; with `ready=False`, callers get results before they are ready, and have to bound their number."""
    thread = PromisingThread(call, max_size, ready=ready)
    try:
        yield thread
    finally:
        thread.end()


@contextmanager
def _running(work: "Callable[[SimpleQueue[Job | None], Mailbox], None]") -> Generator[DeviceThread]:
    thread = DeviceThread(work)
    try:
        yield thread
    finally:
        thread.end()
