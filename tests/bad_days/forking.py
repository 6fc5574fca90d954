"""Programs that fork at bad moments: `python -m tests.bad_days.forking PROGRAM ARGUMENTS...`.

A process of pytest has too many threads and resources to be forked.
"""

import asyncio
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import penstock as ps
from penstock import engine
from tests.bad_days import process_nodes


@ps.node(runs_on="thread")
def in_thread(x: int) -> int:
    return x + 1


@ps.graph
async def waiting(begun: str, go_on: str) -> str:
    return process_nodes.wait_at(begun, go_on)


@ps.graph
async def work(x: int) -> int:
    return process_nodes.square(in_thread(x))


def fork(way: str, target: Callable[[], None]) -> Callable[[], None]:
    """Run `target` in a forked process that exits like any process; return a function that waits for its success."""
    if way == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=target)
        child.start()

        def wait() -> None:
            # `exitcode` is None for a moment if a thread that starts a worker reaps the child.
            while child.exitcode is None:
                child.join()
            assert child.exitcode == 0

        return wait
    process = os.fork()
    if not process:
        target()
        sys.exit()

    def wait_for_exit() -> None:
        assert os.waitpid(process, 0)[1] == 0

    return wait_for_exit


def open_sockets() -> set[str]:
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115 - as above
                found.add(name)
        except FileNotFoundError:  # the descriptor of the folder itself, which is closed by now
            pass
    return found


def in_flight(way: str, begun: str, go_on: str) -> None:
    """Fork a child, which exits, while an item is in a worker process."""
    loop = asyncio.new_event_loop()
    sockets_of_loop = open_sockets()
    own = engine.Engine()

    async def begin() -> "asyncio.Task[str]":
        await own.__aenter__()
        item = asyncio.create_task(own.run(waiting(begun, go_on)))
        await asyncio.to_thread(process_nodes.read, begun)
        return item

    async def end(item: "asyncio.Task[str]") -> None:
        await asyncio.to_thread(process_nodes.write, go_on, "")
        print(await item)
        found = own.statistics().processes
        assert found is not None
        print(found.workers, found.completed, found.died, found.killed)
        await own.__aexit__()

    def child() -> None:
        assert not open_sockets() & sockets_of_workers

    item = loop.run_until_complete(begin())
    sockets_of_workers = open_sockets() - sockets_of_loop
    assert sockets_of_workers
    fork(way, child)()
    loop.run_until_complete(end(item))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def work_in_child(way: str) -> None:
    """Fork a child that uses an Engine of its own, and the Engine of its parent, which has threads and workers."""
    loop = asyncio.new_event_loop()
    own = engine.Engine()
    loop.run_until_complete(own.__aenter__())
    assert loop.run_until_complete(own.run(work(1))) == 4

    def child() -> None:
        assert asyncio.run(engine.run(work(2))) == 9
        assert loop.run_until_complete(own.run(work(4))) == 25  # the parent waits, and does not use the loop
        loop.run_until_complete(own.__aexit__())

    fork(way, child)()
    assert loop.run_until_complete(own.run(work(3))) == 16
    loop.run_until_complete(own.__aexit__())
    loop.close()
    print("worked")


@ps.node(runs_on="thread")
def forks(x: int, log: str) -> int:
    """Note the item in a file; the first item forks, and its child raises."""
    with open(log, "a") as file:  # noqa: PTH123
        file.write(str(x))
    if x:
        return 0
    child = os.fork()
    if not child:
        raise LookupError("in the child")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@ps.graph
async def forked(x: int, log: str) -> int:
    return forks(x, log)


def in_thread_handler(log: str) -> None:
    """Fork in a thread that has further items in its queue."""

    async def main() -> None:
        async with engine.Engine(max_workers=1) as own:
            print(*await asyncio.gather(*(own.run(forked(x, log)) for x in range(4))))

    asyncio.run(main())


def while_a_worker_starts() -> None:
    """Fork while a thread is about to start a worker, inside of multiprocessing."""
    starts, forks = threading.Event(), threading.Event()
    start = multiprocessing.util.spawnv_passfds

    def begin(*args: Any) -> int:
        starts.set()
        forks.wait()
        return start(*args)

    multiprocessing.util.spawnv_passfds = begin

    def child() -> None:
        multiprocessing.util.spawnv_passfds = start
        assert asyncio.run(engine.run(work(2))) == 9

    item = threading.Thread(target=lambda: print(asyncio.run(engine.run(work(1)))))
    item.start()
    starts.wait()
    os.register_at_fork(before=forks.set)  # the handler that is registered last is called first
    fork("os.fork", child)()
    item.join()


def living_child(begun: str, go_on: str) -> None:
    """Print the process ids of the worker and of a forked child; neither ends by itself."""

    def child() -> None:
        print(os.getpid(), flush=True)
        threading.Event().wait()

    async def main() -> None:
        async with engine.Engine() as own:
            item = asyncio.create_task(own.run(waiting(begun, go_on)))
            print(await asyncio.to_thread(process_nodes.read, begun), flush=True)
            fork("multiprocessing", child)
            await item

    asyncio.run(main())


def device(started: str) -> None:
    """Fork a child that calls a device node; JAX was imported before the fork, and started or not."""
    import jax.numpy as jnp  # the workers of other programs import this module, and need no JAX

    from penstock import devices

    @ps.device_node(device="cpu")
    def twice(x: Any) -> Any:
        return x * 2

    doubled = ps.graph(twice)

    def child() -> None:
        try:
            print(asyncio.run(engine.run(doubled(1.5))))
        except ps.DeviceError as error:
            print(error)
            print(str(error) == devices.status().backend_error)

    if started == "by an array":
        jnp.ones(3)
    elif started == "by a node":
        child()
    fork("multiprocessing", child)()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # forks with threads: JAX warns, and so does Python from 3.12 on
    _, program, *arguments = sys.argv
    globals()[program](*arguments)
