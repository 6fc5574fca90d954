"""What was kept never runs again: random programs are killed at any write and any step, and go on."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock._errors import LeaseLost
from penstock.durable.runs import Durable
from penstock.durable.sqlite import MemoryStore
from penstock.durable.store import Batch, Written
from penstock.testing import run_virtual
from tests.durable import worlds


def test_what_was_kept_never_runs_again_and_an_effect_has_one_key(effort: int) -> None:
    """Explores 250 seeds; `PENSTOCK_SEED=7` runs one."""
    one = os.environ.get("PENSTOCK_SEED")
    lives: Counter[int] = Counter()
    with structlog.testing.capture_logs():
        for seed in range(250 * effort) if one is None else [int(one)]:
            try:
                world = worlds.live(seed)
            except Exception as error:
                raise AssertionError(f"PENSTOCK_SEED={seed}: {error!r}") from error
            assert not world.wrong, f"PENSTOCK_SEED={seed}: {world.wrong}"
            lives[world.life] += 1
    assert one is not None or min(lives[life] for life in range(3)) > 20 * effort


class StoppingStore(MemoryStore):
    """A store of a process that is stopped for some time before a write, and then goes on."""

    def __init__(self, seconds: dict[int, float]) -> None:
        super().__init__()
        self._seconds = seconds
        self._writes = 0

    async def write(self, batches: Sequence[Batch], /) -> Any:
        self._writes += 1
        await asyncio.sleep(self._seconds.get(self._writes, 0))
        return await super().write(batches)


paid: list[str] = []


@ps.node(effectful=True)
async def pay(amount: int) -> str:
    await asyncio.sleep(1)
    paid.append(ps.current().idempotency_key)
    return f"paid {amount}"


@ps.graph
async def order(amount: int) -> str:
    return await pay(amount)


@pytest.mark.parametrize(("write", "times"), [(1, 1), (2, 2)], ids=["before the effect", "behind it"])
def test_a_process_that_was_stopped_beyond_its_lease_begins_no_effect(write: int, times: int) -> None:
    store = StoppingStore({write: 100.0})
    paid.clear()

    async def main() -> list[Any]:
        first = asyncio.ensure_future(Durable(store).run(order(3), key="order-1"))
        await asyncio.sleep(60)
        second = asyncio.ensure_future(Durable(store).run(order(3), key="order-1"))
        return [*await asyncio.gather(first, second, return_exceptions=True)]

    stopped, result = run_virtual(main, timeout_seconds=1000)
    assert isinstance(stopped, LeaseLost), stopped
    assert result == "paid 3"
    assert len(paid) == times
    assert len(set(paid)) == 1


class UnrenewedStore(worlds.MortalStore):
    """A store whose answers say that the lease was renewed, although it was not."""

    async def write(self, batches: Sequence[Batch], /) -> Any:
        if not any(batch.entries or batch.state for batch in batches):
            return [Written("running") for _ in batches]
        return await super().write(batches)


@ps.node
async def slow(amount: int) -> int:
    await asyncio.sleep(100)
    return amount


@ps.graph
async def slow_order(amount: int) -> str:
    return await pay(await slow(amount))


def test_a_process_that_believes_in_its_lease_writes_nothing_when_it_is_lost() -> None:
    store = MemoryStore()
    paid.clear()

    async def main() -> list[Any]:
        first = asyncio.ensure_future(Durable(UnrenewedStore(store, 0, behind=False)).run(slow_order(3), key="order-1"))
        await asyncio.sleep(60)
        second = asyncio.ensure_future(Durable(store).run(slow_order(3), key="order-1"))
        return [*await asyncio.gather(first, second, return_exceptions=True)]

    unrenewed, result = run_virtual(main, timeout_seconds=1000)
    assert isinstance(unrenewed, LeaseLost), unrenewed
    assert result == "paid 3"
    assert len(paid) == 1
