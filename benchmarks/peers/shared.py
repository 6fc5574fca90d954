"""The four workloads: their sizes, their hand-written side, and the rows that compare a peer with it."""

from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, nullcontext

from ..baselines import calls, pools
from ..baselines.chain import Stage, pass_on, queue_chain
from ..harness import Contenders, Measured, Row, Sample, Workload, measure

STAGES = 10
BRANCHES = 32
IO_ITEMS = 2_000
IO_IN_FLIGHT = 64
THREAD_ITEMS = 200
THREADS = 2

BY_HAND = "by hand"
LIMIT = "bare threads"
ROUNDS = (7, 3)

Open = Callable[[bool], AbstractAsyncContextManager[Contenders]]


def per_item(items: int, seconds: Callable[[int], Awaitable[float]]) -> Sample:
    """Return a sample in seconds per item, from a function that takes `items` and returns seconds for all items."""

    async def sample() -> float:
        return await seconds(items) / items

    return sample


def in_turn(call: Stage, expected: Callable[[int], int]) -> Callable[[int], Awaitable[float]]:
    """Return a function that awaits items one after the other, checks each answer, and returns seconds."""
    return lambda items: calls.call_in_turn(call, items, expected)


def same(value: int) -> int:
    """Return the expected result of ten stages that do nothing."""
    return value


def joined(value: int) -> int:
    """Return the expected result of the fan-out."""
    return BRANCHES * value


async def measure_beside_hand_written(name: str, peer: Contenders, loop: str, *, quick: bool) -> list[Measured]:
    """Measure the peer's contenders and the hand-written contender in turns."""
    contenders = dict(_by_hand(name)) | dict(peer)
    if name == "io":
        contenders = {contender: _share_of_ideal(sample) for contender, sample in contenders.items()}
    workload = Workload(
        name=name,
        contenders=lambda _: nullcontext(contenders),
        rows=tuple(_row(name, contender) for contender in _shown(name, peer)),
        control=BY_HAND,
        rounds=ROUNDS,
    )
    return await measure(workload, loop, quick=quick)


def _by_hand(name: str) -> Contenders:
    if name == "chain":
        return {BY_HAND: per_item(10_000, lambda items: queue_chain(items, STAGES))}
    if name == "call":
        by_hand = calls.gather_and_join(pass_on, BRANCHES)
        return {BY_HAND: per_item(500, lambda items: calls.call_in_turn(by_hand, items, joined))}
    if name == "io":
        return {BY_HAND: lambda: pools.io_pool(IO_ITEMS, IO_IN_FLIGHT)}
    return {BY_HAND: lambda: pools.to_thread_pool(pools.release_by_sleeping, THREAD_ITEMS, THREADS), LIMIT: _limit}


async def _limit() -> float:
    return pools.bare_threads(pools.release_by_sleeping, THREAD_ITEMS, THREADS)


def _share_of_ideal(seconds: Sample) -> Sample:
    async def sample() -> float:
        return pools.ideal_io_seconds(IO_ITEMS, IO_IN_FLIGHT) / await seconds()

    return sample


def _shown(name: str, peer: Collection[str]) -> list[str]:
    """Return the rows; the contender by hand has its own number, since a ratio to itself would tell nothing."""
    return [*peer, BY_HAND] if name in {"io", "threads"} else [*peer]


def _row(name: str, contender: str) -> Row:
    if name == "io":
        return Row(title=contender, subject=contender, unit="of ideal")
    if name == "threads":
        return Row(title=contender, subject=LIMIT, reference=contender, unit="of limit")
    return Row(title=contender, subject=contender, reference=BY_HAND)
