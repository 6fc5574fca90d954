"""What worker processes and the workers of a cluster promise alike: scenarios, and the functions that run there."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import cluster, engine
from tests.workers import jobs

WORKERS = cluster.ray(workers=2, placement_timeout_seconds=60, name="two workers")
ONE = cluster.ray(workers=1, name="one worker")
# By the kind of workers: the value of `runs_on=` for one worker, and for two.
RUNS_ON: dict[str, tuple[Any, Any]] = {"process": ("process", "process"), "cluster": (ONE, WORKERS)}
BOTH: list[Callable[[str, Path], Awaitable[None]]] = []


def both(fn: Callable[[str, Path], Awaitable[None]]) -> Callable[[str, Path], Awaitable[None]]:
    BOTH.append(fn)
    return fn


def fall_at_two(number: int) -> int:
    time.sleep(0.1)  # no other call is sent ahead
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@both
async def a_killed_worker_fails_the_call_that_it_runs_and_no_other(kind: str, folder: Path) -> None:
    falling = ps.graph(ps.node(runs_on=RUNS_ON[kind][0])(fall_at_two))
    async with engine.Engine(max_processes=1) as e, e.deploy(falling) as service:
        found = await asyncio.gather(*map(service, range(6)), return_exceptions=True)
        assert isinstance(found[2], ps.WorkerDied), found
        assert found[2].__notes__ == ["in node 'fall_at_two' of graph 'fall_at_two', item 2, attempt 1"]
        assert found[:2] + found[3:] == [0, 1, 3, 4, 5], found


def act(what: str) -> Any:
    """Return this process, or fail as `what` says."""
    if what == "memory":
        return bytearray(1 << 60)
    if what == "lock":
        return (number for number in range(3))
    if what == "error":
        raise TwoArguments("one", "two")
    return os.getpid()


class TwoArguments(Exception):
    """An error that pickles, but cannot be rebuilt from its `args`."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@both
async def a_call_without_memory_or_with_a_result_that_does_not_pickle_fails_alone(kind: str, folder: Path) -> None:
    acting = ps.graph(ps.node(runs_on=RUNS_ON[kind][0])(act))
    async with engine.Engine(max_processes=1) as e, e.deploy(acting) as service:
        worker = await service("")
        with pytest.raises(MemoryError):
            await service("memory")
        with pytest.raises(TypeError, match=r"result of .*act'.* \(generator\) .*return plain data instead"):
            await service("lock")
        with pytest.raises(TypeError, match=r"raised .*TwoArguments, which does not survive pickling") as raised:
            await service("error")
        assert 'raise TwoArguments("one", "two")' in str(raised.value.__cause__)
        assert await service("") == worker


class Total:
    def __init__(self, folder: str) -> None:
        self.folder, self.count = folder, 0

    def __enter__(self) -> None:
        Path(self.folder, f"entered-{os.getpid()}").touch(exist_ok=False)

    def __exit__(self, *error: object) -> None:
        Path(self.folder, f"left-{os.getpid()}").touch(exist_ok=False)

    def __call__(self, number: int) -> tuple[int, int]:
        self.count += 1
        return self.count, os.getpid()


@ps.node(runs_on="process")
class InProcesses(Total):
    pass


@ps.node(runs_on=WORKERS)
class InCluster(Total):
    pass


@both
async def a_class_has_one_instance_in_each_worker_which_is_left_with_its_scope(kind: str, folder: Path) -> None:
    total: Any = InProcesses if kind == "process" else InCluster
    async with engine.Engine(max_processes=2) as e:
        async with e.deploy(ps.graph(total(str(folder)))) as service:
            found = await asyncio.gather(*map(service, range(40)))
        workers = {worker for _, worker in found}
        for worker in workers:
            counts = [count for count, at in found if at == worker]
            assert sorted(counts) == [*range(1, len(counts) + 1)]
        expected = {f"{word}-{worker}" for word in ("entered", "left") for worker in workers}
        while names_in(folder) != expected:  # a cluster does not wait for the exits
            await asyncio.sleep(0.05)


def note(folder: str, number: int, until: str = "") -> int:
    """Note that the call runs, and wait until the file `until` is there; return this process."""
    path = Path(folder)
    (path / f"{number}").write_text(str(os.getpid()))
    while until and not (path / until).exists():
        time.sleep(0.01)
    return os.getpid()


def names_in(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}


def noted(folder: Path) -> set[int]:
    return {int(name) for name in names_in(folder) if name.isdigit()}


@both
async def calls_behind_a_long_call_are_taken_back_for_another_worker(kind: str, folder: Path) -> None:
    at, noting = str(folder), ps.graph(ps.node(runs_on=RUNS_ON[kind][1])(note))
    async with engine.Engine(max_processes=2) as e, e.deploy(noting) as service:
        while len(set(await asyncio.gather(*[service(at, 0) for _ in range(40)]))) < 2:  # until both have started
            pass
        long = asyncio.create_task(service(at, 1, "go on"))
        await asyncio.gather(*[service(at, number) for number in range(2, 14)])
        assert not long.done()
        (folder / "go on").touch()
        await long
        assert noted(folder) == {*range(14)}


@both
async def a_cancelled_call_does_not_begin_or_ends_with_its_worker(kind: str, folder: Path) -> None:
    at, noting = str(folder), ps.graph(ps.node(runs_on=RUNS_ON[kind][0])(note))
    async with engine.Engine(max_processes=1) as e, e.deploy(noting) as service:
        [worker] = set(await asyncio.gather(*[service(at, 0) for _ in range(40)]))
        long = asyncio.create_task(service(at, 1, "go on"))
        while 1 not in noted(folder):
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(service(at, number)) for number in range(2, 12)]
        await asyncio.sleep(0)
        for cancelled in (others[3], others[9]):
            cancelled.cancel()
        await asyncio.wait([others[3], others[9]])
        (folder / "go on").touch()
        found = await asyncio.gather(long, *others, return_exceptions=True)
        assert {one for one in found if not isinstance(one, asyncio.CancelledError)} == {worker}  # nobody was killed
        assert noted(folder) == {*range(12)} - {5, 11}
        endless = asyncio.create_task(service(at, 12, "never"))
        while 12 not in noted(folder):
            await asyncio.sleep(0.01)
        endless.cancel()
        assert await service(at, 13) != worker
        assert endless.cancelled()


@both
async def a_timeout_ends_a_call_with_its_worker(kind: str, folder: Path) -> None:
    # A new worker imports the module of the function inside of its first call.
    sleeping = ps.graph(ps.node(runs_on=RUNS_ON[kind][0], timeout_seconds=2)(jobs.sleep))
    async with engine.Engine(max_processes=1) as e:
        with pytest.raises(ps.NodeTimeoutError, match="sleep"):
            await e.run(sleeping(60.0))
        assert await e.run(sleeping(0.0)) == 0


def fork(number: int) -> int:
    return os.fork()


@both
async def a_child_that_comes_back_from_its_node_ends_and_answers_nothing(kind: str, folder: Path) -> None:
    async with engine.Engine(max_processes=1) as e:
        await children_end(e, ps.graph(ps.node(runs_on=RUNS_ON[kind][0])(fork)))


async def children_end(e: engine.Engine, forking: ps.Graph[[int], int]) -> None:
    async with e.deploy(forking) as service:
        for number in range(3):
            child = await service(number)
            assert child, "the child has answered"
            while is_running(child):
                await asyncio.sleep(0.05)


def is_running(pid: int) -> bool:
    """Returns whether a process runs; a zombie has ended."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
