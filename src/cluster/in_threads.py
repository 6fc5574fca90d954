"""A stand-in for workers of a cluster, for tests: threads of this process, to which values travel as to workers."""

import pickle
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from .dispatch import MOST_COROUTINES, Worker
from .messages import Packed
from .ray_transport import METHODS, RayTransport
from .remote import Remote
from .workers import Workers


@contextmanager
def workers_in_threads(workers: Workers, /) -> Generator[None]:
    """Have workers of a cluster be threads of this process, for the Engines that are opened inside of the `with`.

    Values travel as they do to real workers. So arrays that come by reference are read-only, a value that cannot be
    pickled is refused, and a class has an instance in each worker. Ray is not started. A cancelled function runs on in
    its thread until it returns, and the Engine waits for that.

    Args:
        workers: the workers, as passed to `runs_on=` of the nodes.

    Returns:
        A context manager.
    """
    connect, workers._connect = workers._connect, _InThreads
    try:
        yield
    finally:
        workers._connect = connect


class _InThreads(RayTransport):
    """Calls the methods of the actor in threads, in place of Ray."""

    def __init__(self) -> None:
        super().__init__({}, None, 60.0)

    async def put(self, packed: Packed) -> Any:
        """Return a copy, as the store of Ray would keep it."""
        stored = Future[Any]()
        stored.set_result(_travelled(packed))
        return stored

    async def _begin_ray(self) -> None:
        pass

    async def _make(self, worker: Worker) -> None:
        worker.handle = {}
        remote, pools = Remote(), (ThreadPoolExecutor(1), ThreadPoolExecutor(MOST_COROUTINES + 4))
        for name, group in METHODS.items():
            for keeps_result in (False, True):
                method = partial(_called, pools[bool(group)], getattr(remote, name), keeps_result)
                worker.handle[name, keeps_result] = _Method(method)
        ended = Future[Any]()
        worker.handle["end"] = partial(_end, remote, pools, ended)
        worker.handle["watch", False] = _Method(lambda: ended)

    def _end_actor(self, worker: Worker) -> bool:
        threading.Thread(target=worker.handle["end"], name="penstock-ends").start()
        return True

    def _is_death(self, error: BaseException) -> bool:
        return False

    def _when(self, reference: Any, then: Callable[[Any], None]) -> None:
        def arrived(found: "Future[Any]") -> None:
            self._mailbox.post(then, found.exception() or found.result())

        reference.add_done_callback(arrived)


class _Method:
    """A method of an actor, with the interface of Ray's handles."""

    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


def _called(pool: ThreadPoolExecutor, fn: Callable[..., Any], keeps_result: bool, *args: Any) -> Any:
    """Have a thread call a method; return the future of its result, or the futures of the two parts of the result."""

    def call() -> Any:
        result = fn(*[one.result() if isinstance(one, Future) else one for one in args])
        return [*map(_travelled, result)] if keeps_result else _travelled(result)

    found = pool.submit(call)
    return (_part(found, 0), _part(found, 1)) if keeps_result else found


def _part(found: "Future[Any]", number: int) -> "Future[Any]":
    part = Future[Any]()

    def came(found: "Future[Any]") -> None:
        error = found.exception()
        part.set_exception(error) if error else part.set_result(found.result()[number])

    found.add_done_callback(came)
    return part


def _travelled(packed: Any) -> Any:
    """Return a read-only copy of a value that the store of Ray would keep."""
    if not isinstance(packed, list):
        return packed
    parts: list[Any] = packed  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of Any
    return [bytes(one.raw()) if isinstance(one, pickle.PickleBuffer) else one for one in parts]


def _end(remote: Remote, pools: tuple[ThreadPoolExecutor, ...], ended: "Future[Any]") -> None:
    remote.close()
    remote.end()
    for pool in pools:
        pool.shutdown()
    ended.set_result("its threads have ended")
