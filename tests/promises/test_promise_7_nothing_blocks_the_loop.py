"""Promise 7: nothing in the engine blocks the event loop."""

import asyncio
import threading
from typing import Any, ClassVar

import penstock as ps
from penstock import engine, testing


class Witness:
    """Tells in which thread it is pickled."""

    pickled_in: ClassVar[list[int]] = []

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        Witness.pickled_in.append(threading.get_ident())
        return int, (7,)


async def test_promise_7_arguments_are_pickled_and_processes_started_beside_the_loop() -> None:
    from tests.bad_days.process_nodes import square

    Witness.pickled_in.clear()

    @ps.graph
    async def squared(x: Any) -> int:
        return square(x)

    async with engine.Engine() as own:
        run = asyncio.create_task(own.run(squared(Witness())))
        turns = 0
        while not run.done():  # the loop turns while the process starts
            turns += 1
            await asyncio.sleep(0)
    assert run.result() == 49
    assert Witness.pickled_in
    assert threading.get_ident() not in Witness.pickled_in
    assert turns > 100


async def test_promise_7_the_end_of_an_engine_waits_for_a_thread_without_holding_the_loop() -> None:
    go_on = threading.Event()

    @ps.node(runs_on="thread")
    def block(x: int) -> int:
        assert go_on.wait(30)
        return x

    @ps.graph
    async def blocking(x: int) -> int:
        return block(x)

    async def use() -> None:
        async with engine.Engine() as own:
            await own.run(blocking(1), timeout_seconds=0.01)

    using = asyncio.create_task(use())
    await asyncio.wait([using], timeout=0.05)
    await testing.wait_quiescent()
    assert not using.done()  # the caller has its TimeoutError, and the Engine waits for its thread
    go_on.set()  # this line is reached: the loop is free
    try:
        await using
    except TimeoutError:
        pass


async def test_promise_7_a_pipeline_that_never_waits_gives_the_loop_its_turn() -> None:
    """Neither a long chain nor an endless source of items that never suspend keeps a timer from its turn."""

    @ps.node
    async def step(x: int) -> int:
        return x

    @ps.graph
    async def line(x: int) -> int:
        return await step(await step(await step(x)))

    def endless():
        x = 0
        while True:
            yield line(x)
            x += 1

    async def read() -> None:
        async with engine.stream(endless()) as results:
            async for _ in results:
                pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)  # a timer of somebody else
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
