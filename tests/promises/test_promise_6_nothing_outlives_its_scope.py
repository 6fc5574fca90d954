"""Promise 6: no task, thread, process, file descriptor or span outlives its scope.

The fixtures of conftest look after threads, descriptors and processes for every test of this suite, and after tasks
at its end; here it is the end of the scope at which nothing may be left.
"""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock as ps
from penstock import engine, testing


@ps.node
async def wait(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@ps.node
async def fail(x: float) -> float:
    raise LookupError(x)


@ps.node
class Stateful:
    async def __aenter__(self) -> "Stateful":
        self.beat = asyncio.create_task(asyncio.sleep(1000))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.beat.cancel()

    async def __call__(self, x: float) -> float:
        return x


stateful = Stateful()


@ps.graph
async def busy(seconds: float) -> list[float]:
    a = await wait(seconds)
    b = await ps.map_each(wait, [seconds, seconds])
    return [a, b, await stateful(a)]


@ps.graph
async def failing(seconds: float) -> float:
    return await fail(await stateful(seconds))


def others() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize("scheduler", ["auto", "actors", "parallel", "wave", "sequential"])
async def test_promise_6_no_task_outlives_a_run(scheduler) -> None:
    await engine.run(busy(0), scheduler=scheduler)
    assert not others()
    with pytest.raises(LookupError):
        await engine.run(failing(0), scheduler=scheduler)
    assert not others()
    with pytest.raises(TimeoutError):
        await engine.run(busy(60), scheduler=scheduler, timeout_seconds=0.01)
    assert not others()
    cancelled = asyncio.create_task(engine.run(busy(60), scheduler=scheduler))
    await testing.wait_quiescent()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not others()


async def test_promise_6_no_task_outlives_a_stream() -> None:
    async with engine.stream(busy(0) for _ in range(20)) as results:
        async for _ in results:
            break
    assert not others()
    async with engine.stream(busy(60) for _ in range(20)) as results:
        await testing.wait_quiescent()
    assert not others()
    results = engine.stream(busy(0) for _ in range(3))
    assert len([r async for r in results]) == 3  # read to its end, it needs no closing
    assert not others()
    with pytest.raises(LookupError):
        async for _ in engine.stream(failing(0) for _ in range(3)):
            pass
    assert not others()


async def test_promise_6_no_task_outlives_a_deployment() -> None:
    async with engine.deploy(busy, failing) as service:
        await service(0)
        calls = [asyncio.create_task(service(60)) for _ in range(3)]
        await testing.wait_quiescent()
        await service.abort()
        assert not others() - set(calls)
        for call in calls:
            with pytest.raises(ps.EngineClosedError):
                await call
    assert not others()


async def test_promise_6_no_thread_outlives_its_engine() -> None:
    before = set(threading.enumerate())

    @ps.node(runs_on="thread")
    def name(x: int) -> str:
        return threading.current_thread().name

    @ps.graph
    async def naming(x: int) -> str:
        return name(x)

    async with engine.Engine(max_workers=3) as own:
        async with own.stream(naming(x) for x in range(50)) as results:
            assert len({n async for n in results}) <= 3
        assert len(set(threading.enumerate()) - before) <= 3
    assert set(threading.enumerate()) == before


def test_promise_6_the_threads_of_the_default_engine_end_with_the_loop(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import asyncio, threading
import penstock as ps
from penstock import engine

@ps.node(runs_on="thread")
def double(x: int) -> int:
    return 2 * x

@ps.graph
async def doubled(x: int) -> int:
    return double(x)

async def main():
    print(await engine.run(doubled(4)), threading.active_count())

asyncio.run(main())
print(threading.active_count())
""")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["8", "2", "1"]
    assert done.stderr == ""
