"""Promise 3: FIFO per channel and priority; outputs in input order unless asked otherwise."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import penstock as ps
from penstock import engine
from tests.kit import Gate, begun, values_of, virtual
from tests.promises.exploring import Explorer, random_of_loop
from tests.promises.scenario import Boom, World
from tests.promises.ways import as_stream


def test_promise_3_outputs_come_in_input_order(explore: Explorer) -> None:
    async def main() -> World:
        world = World.of_running_loop()
        with world.faults():
            await as_stream(world, world.items(10), ordered=True)
        assert world.yielded == list(range(10))
        return world

    failed, faulty = (lambda world: world.count("failed") > 0), (lambda world: world.injected > 0)
    explore(main, reaches={"a failed item": failed, "a fault": faulty})


def test_promise_3_every_inbox_is_first_in_first_out(explore: Explorer) -> None:
    """Items that pass a node with one place stay in order."""

    async def main() -> None:
        rng, begun = random_of_loop(), list[list[int]]()

        def noting(**limits: int) -> Any:
            begun.append(came := [])

            @ps.node(**limits)
            async def note(item: int) -> int:
                came.append(item)
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
                return item

            return note

        line = noting(concurrency=1, capacity=2) >> noting(concurrency=1, capacity=1) >> noting(concurrency=3)
        out = await values_of(engine.stream(map(line, range(20)), max_in_flight=8, ordered=False))
        assert begun == 3 * [list(range(20))]
        assert sorted(out) == list(range(20))

    explore(main, count=125)


@virtual
async def test_promise_3_an_inbox_gives_higher_priorities_first_and_is_fair_within_one() -> None:
    gate = Gate()
    call = gate.graph(concurrency=1)
    async with engine.deploy(call) as service:
        calls = await begun(service((0, 0)))  # takes the only place
        items = [(priority, number) for number, priority in enumerate([1, 0, 2, 1, -1, 2], 1)]
        calls += await begun(*(service.run(call(item), priority=item[0]) for item in items))
        gate.open()
        await asyncio.gather(*calls)
    assert gate.came == [(0, 0), (2, 3), (2, 6), (1, 1), (1, 4), (0, 2), (-1, 5)]


@virtual
async def test_promise_3_completion_order_on_request() -> None:
    @ps.graph
    @ps.node
    async def wait(seconds: int) -> int:
        await asyncio.sleep(seconds)
        return seconds

    assert await values_of(engine.stream(map(wait, (5, 3, 4, 1, 2)), ordered=False)) == [1, 2, 3, 4, 5]


@virtual
async def test_promise_3_a_slow_first_item_with_a_full_window_does_not_stall() -> None:
    """The window is enforced at admission, so no node waits for it: other items finish, and item 0 is yielded first."""
    finished: list[int] = []

    @ps.graph
    @ps.node(concurrency=2, capacity=1)
    async def work(item: int) -> int:
        await asyncio.sleep(60 if item == 0 else 1)
        finished.append(item)
        return item

    assert await values_of(engine.stream(map(work, range(20)), max_in_flight=8)) == list(range(20))
    assert finished[:8] == [1, 2, 3, 4, 5, 6, 7, 0]


class Books:
    """Notes the running handlers, by key: a handler may begin while no other call of its key has a running handler."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.running: dict[int, list[int]] = {}  # by key, the calls whose handlers run
        self.last: dict[int, int] = {}  # by key, the last call that has begun
        self.keys: list[int] = []
        self.ended: dict[int, list[int]] = {}
        self.wrong: list[str] = []
        self.waited = self.hedged = self.late = False

        async def handle(key: int, number: int) -> int:
            running = self.running.setdefault(key, [])
            # No assert here: it would become the outcome of the call.
            if set(running) - {number} or self.last.get(key, 0) > number:
                self.wrong.append(f"{number} of key {key} has begun beside {running}, behind {self.last[key]}")
            self.last[key] = number
            self.hedged |= bool(running)
            running.append(number)
            try:
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(rng.choice([0, 0.3, 1.5]))
                if rng.random() < 0.3:
                    raise Boom(number)
                return number
            except asyncio.CancelledError:
                for _ in range(rng.randrange(3)):  # unwinding takes a while
                    await asyncio.sleep(0.7)
                    self.late = True
                raise
            finally:
                running.remove(number)

        @ps.node
        async def other(key: int, number: int) -> int:
            return await handle(key, number)

        @ps.node(
            timeout_seconds=1, retry=ps.Retry(2, backoff_seconds=0.1), hedge=ps.Hedge(after_seconds=0.2, max_share=1),
            failover=other,
        )  # fmt: skip
        async def first(key: int, number: int) -> int:
            return await handle(key, number)

        @ps.node(concurrency=2)
        async def second(key: int, number: int) -> int:
            return await handle(key, number)

        @ps.graph
        async def both(key: int, number: int) -> tuple[int, int]:
            return await first(key, number), await second(key, number)

        @ps.graph
        async def after(key: int, number: int) -> int:
            return await second(key, await first(key, number))

        self.graphs = both, after

    def calls(self) -> Iterator[ps.Call[Any]]:
        """Yield 20 calls of three keys; some calls have no key."""
        for number in range(20):
            self.keys.append(self.rng.choice([0, 1, 2, -number]))
            yield self.rng.choice(self.graphs)(self.keys[number], number)

    async def read(self, stream: engine.Stream[Any]) -> None:
        """Read the stream, or leave it early."""
        outcomes: dict[int, list[int]] = {}
        leaves_after = self.rng.choice([99, 99, self.rng.randrange(20)])
        async with stream:
            async for outcome in stream.outcomes():
                outcomes.setdefault(outcome.index, []).append(outcome.index)
                of_key = self.ended.setdefault(self.keys[outcome.index], [-1])
                assert of_key[-1] < outcome.index, "outcomes of one key come in order"
                of_key.append(outcome.index)
                self.waited |= stream.statistics().waiting_for_keys > 0
                leaves_after -= 1
                if leaves_after < 0:
                    return
                if self.rng.random() < 0.2:
                    await asyncio.sleep(1)
        assert outcomes == {number: [number] for number in range(20)}


def test_promise_3_the_calls_of_a_key_come_one_after_the_other(explore: Explorer) -> None:
    async def main() -> Books:
        books = Books(rng := random_of_loop())
        options: Any = {
            "order_by": lambda call: None if call.arguments[0] < 0 else call.arguments[0],
            "ordered": rng.random() < 0.5, "max_in_flight": rng.choice([2, 6, 30]),
        }  # fmt: skip
        if rng.random() < 0.4:
            await books.read(engine.stream(books.calls(), **options))
        else:
            shares: Any = {"key": lambda call: call.arguments[1] % 2} if rng.random() < 0.5 else {}
            async with engine.deploy(*books.graphs, max_in_flight=rng.choice([1, 3]), **shares) as service:
                if rng.random() < 0.3:
                    asyncio.get_running_loop().call_later(rng.random() * 5, asyncio.current_task().cancel)  # type: ignore[union-attr]
                await books.read(service.stream(books.calls(), **options))
            admission = service.statistics().admission
            assert not admission.in_flight
            assert not admission.queued
        assert not books.wrong
        assert not any(books.running.values())
        return books

    async def perhaps_cancelled() -> Books | None:
        try:
            return await main()
        except asyncio.CancelledError:
            return None

    explore(perhaps_cancelled, reaches={
        "a call that waits for its key": lambda books: books is not None and books.waited,
        "two attempts at a time": lambda books: books is not None and books.hedged,
        "a handler that unwinds": lambda books: books is not None and books.late,
        "a cancel": lambda books: books is None,
    }, count=125)  # fmt: skip
