"""Promise 2: a channel holds at most its capacity, or one oversized item; nothing exceeds `max_in_flight`."""

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, same, virtual


@virtual
async def test_promise_2_an_item_counts_until_it_is_yielded() -> None:
    """A slow reader, not only a slow node, keeps the engine from asking the source for more."""
    asked = 0

    def source():
        nonlocal asked
        for index in range(20):
            asked += 1
            yield one(index)

    async with engine.stream(source(), max_in_flight=5) as results:
        await testing.wait_quiescent()
        assert asked == 5
        for index in range(20):
            assert await anext(results) == index
            await testing.wait_quiescent()
            assert asked == min(20, index + 6)


@virtual
async def test_promise_2_an_inbox_holds_its_bytes_and_one_oversized_item() -> None:
    sizes, gate = [60, 30, 30, 500, 20, 20], Gate()

    @ps.node
    async def produce(size: int) -> bytes:
        return bytes(size)

    weigh = produce >> gate.node(name="consume", concurrency=1, capacity=10, max_bytes=100)
    async with engine.stream(weigh(size) for size in sizes) as results:
        await testing.wait_quiescent()
        inbox = next(a for a in results.statistics().actors if a.node == "consume").inbox
        # 60 runs; 30 and 30 wait in the inbox; 500 waits before it
        assert (inbox.depth, inbox.bytes_held) == (2, 60)
        gate.open()
        assert [len(data) async for data in results] == sizes
    assert [len(data) for data in gate.came] == sizes


one = ps.graph(same)
