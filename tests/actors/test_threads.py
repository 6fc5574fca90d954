"""The thread pool: order, errors, cancellation, clean ends, and the objects that it keeps alive."""

import asyncio
import contextvars
import gc
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from penstock.actors.threads import ThreadPool
from tests.kit import Gate


@pytest.fixture
async def pool() -> AsyncIterator[ThreadPool]:
    async with aclosing(ThreadPool(1)) as pool:
        yield pool


def submit(pool: ThreadPool, fn: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
    return pool.submit(contextvars.copy_context(), None, fn, *args)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt), (SystemExit(), SystemExit),
        (asyncio.CancelledError(), asyncio.CancelledError), (StopAsyncIteration(), StopAsyncIteration),
        (StopIteration(), RuntimeError),
    ],
)  # fmt: skip
async def test_every_exception_reaches_the_future(pool: ThreadPool, error: BaseException, expected: Any) -> None:
    def job() -> None:
        raise error

    future = submit(pool, job)
    await asyncio.wait([future])
    with pytest.raises(expected) as raised:
        future.result()
    assert error in (raised.value, raised.value.__cause__)


class Item:
    """An item that a weak reference can point to."""


async def test_an_idle_thread_holds_no_item(pool: ThreadPool) -> None:
    def fail(item: Item) -> None:
        raise ValueError(item)

    for fn in (lambda item: item, lambda item: None, fail):
        item = Item()
        watch = weakref.ref(item)
        await asyncio.gather(submit(pool, fn, item), return_exceptions=True)
        del item
        # The thread posts the result a moment before it drops its own references.
        async with asyncio.timeout(60):
            while watch() is not None:
                await asyncio.sleep(0)
                gc.collect()  # an exception and its traceback are a cycle
        assert pool.statistics().idle == 1


def test_a_result_that_comes_after_the_loop_closed_is_discarded() -> None:
    gate, pool = Gate(), ThreadPool(1)

    async def main() -> None:
        submit(pool, gate.block, 1)
        while not gate.came:
            await asyncio.sleep(0)

    asyncio.run(main())
    gate.open()
    pool.abandon()
    pool.join()
    assert pool.statistics().discarded == 1


NEVER_CLOSED = """
import asyncio, contextvars, threading, time
from penstock.actors.threads import ThreadPool

pool = ThreadPool(3)
started = threading.Event()

def job():
    started.set()
    time.sleep(0.2)
    print("job returned")

async def main():
    await asyncio.gather(*[pool.submit(contextvars.copy_context(), None, int) for _ in range(3)])
    pool.submit(contextvars.copy_context(), None, job)
    started.wait()

{run}
"""


@pytest.mark.parametrize(
    "run",
    ["asyncio.run(main())", "asyncio.new_event_loop().run_until_complete(main())"],
    ids=["busy", "loop-never-closed"],
)
def test_the_interpreter_exits_though_a_pool_with_a_job_was_never_closed(run: str) -> None:
    script = NEVER_CLOSED.format(run=run)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stdout) == (0, "job returned\n"), result.stderr
