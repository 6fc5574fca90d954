"""A device behind a thread, as one writes it by hand: no limits, no cancellation, no errors, one function."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import jax
import numpy as np

DEPTH = 16  # computations in flight, as many as Penstock has of short ones

Job: TypeAlias = tuple[Any, asyncio.Future[Any]]


class Mailbox:
    """Settles futures on the loop, which one wake-up per burst tells."""

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
    """Runs jobs on a thread, which `work` is the body of."""

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
    """A hop to the thread and back: it does nothing."""

    def work(jobs: "SimpleQueue[Job | None]", mailbox: Mailbox) -> None:
        while (job := jobs.get()) is not None:
            mailbox.post([(job[1], None)])

    return _running(work)


def one_by_one(call: Callable[[Any], jax.Array]) -> AbstractContextManager[DeviceThread]:
    """Calls in the order in which they come, several in flight."""

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
    """What waits goes together, padded to a power of two."""

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


@contextmanager
def _running(work: "Callable[[SimpleQueue[Job | None], Mailbox], None]") -> Generator[DeviceThread]:
    thread = DeviceThread(work)
    try:
        yield thread
    finally:
        thread.end()
