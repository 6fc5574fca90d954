"""Order by key: in a stream of a deployment, a call whose key has no place lets other calls pass."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from penstock.testing import run_virtual, wait_quiescent
from tests.kit import begun, cancelled_at_every_step, outcomes, values_of, virtual


class Seen:
    """The calls of one test: the order in which they began, and how many of them ran at a time."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.running: Counter[str] = Counter()
        self.asked = 0

        @ps.node
        async def work(name: str, seconds: float) -> str:
            key = name[0]
            self.began.append(name)
            self.running[key] += 1
            assert self.running[key] <= self.per_key
            assert self.running.total() <= self.places
            try:
                await asyncio.sleep(seconds)
            finally:
                self.running[key] -= 1
            return name

        self.graph = ps.graph(work)

    @asynccontextmanager
    async def deployed(self, places: int, per_key: int = 1, **options: Any) -> AsyncIterator[engine.Service]:
        """Deploy the graph; the key of a call is the first letter of its name."""
        self.places, self.per_key = places, per_key
        options |= {"key": lambda name, seconds: name[0], "max_in_flight_per_key": per_key}
        async with engine.deploy(self.graph, max_in_flight=places, **options) as service:
            yield service

    def calls(self, *names: str, seconds: float = 1) -> Iterator[ps.Call[str]]:
        """Yield calls of one second; a call whose name ends in "!" takes ten seconds."""
        for name in names:
            self.asked += 1
            yield self.graph(name, 10 * seconds if name.endswith("!") else seconds)


def idle(service: engine.Service) -> bool:
    admission = service.statistics().admission
    return not admission.in_flight and not admission.queued and not any(one.queued for one in admission.keys)


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_a_busy_key_does_not_stop_its_stream(ordered: bool) -> None:
    seen = Seen()
    async with seen.deployed(places=3) as service:
        names = "a0!", "a1", "a2", "b0", "b1", "c0"
        found = await values_of(service.stream(seen.calls(*names), max_in_flight=10, ordered=ordered))
    assert seen.began == ["a0!", "b0", "c0", "b1", "a1", "a2"]
    assert found == (list(names) if ordered else ["b0", "c0", "b1", "a0!", "a1", "a2"])
    assert idle(service)


@pytest.mark.parametrize("per_key", [1, 2])
def test_random_streams_and_callers_keep_the_order_of_each_key_and_all_bounds(per_key: int, effort: int) -> None:
    async def main(seed: int) -> None:
        rng, seen = random.Random(seed), Seen()
        keys = "abcdefgh"[: rng.randint(1, 8)]

        def calls(stream: int) -> Iterator[ps.Call[str]]:
            for number in range(30):
                yield seen.graph(f"{rng.choice(keys)}{stream}.{number:02}", rng.choice([0, 0.5, 1, 7]))

        async def read(stream: int) -> list[str]:
            window = rng.choice([1, 3, 100])
            return await values_of(service.stream(calls(stream), max_in_flight=window, ordered=stream > 0))

        async with seen.deployed(rng.randint(1, 6), per_key) as service:
            streams = [asyncio.create_task(read(number)) for number in range(3)]
            alone = [asyncio.create_task(service(f"{rng.choice(keys)}x", 1)) for _ in range(5)]
            results = await asyncio.gather(*streams)
            await asyncio.gather(*alone)
        assert idle(service)
        for stream, names in enumerate(results):
            assert len(names) == 30
            assert names == sorted(names, key=lambda name: name[1:]) or stream == 0
            for key in keys if per_key == 1 else "":
                mine = [name for name in seen.began if name.startswith(f"{key}{stream}.")]
                assert mine == sorted(mine)

    for seed in range(10 * effort):
        run_virtual(lambda seed=seed: main(seed), timeout_seconds=10_000)


@virtual
async def test_two_places_of_a_key_that_are_free_at_once_are_taken_at_once() -> None:
    seen, loop = Seen(), asyncio.get_running_loop()
    async with seen.deployed(places=4, per_key=2) as service:
        began = loop.time()
        calls = seen.calls(*[f"a{number}" for number in range(6)])
        assert await values_of(service.stream(calls, max_in_flight=10)) == [f"a{number}" for number in range(6)]
        assert loop.time() - began == 3  # in virtual seconds: two at a time


@virtual
async def test_a_caller_of_the_same_key_waits_for_one_item_and_not_for_a_window() -> None:
    seen = Seen()
    async with (
        seen.deployed(places=4) as service,
        service.stream(seen.calls(*[f"a{number}" for number in range(100)]), max_in_flight=50) as results,
    ):
        await anext(results)
        await service("a caller", 1)
        assert seen.began.index("a caller") <= 4
        assert [name async for name in results] == [f"a{number}" for number in range(1, 100)]


async def test_a_stream_stands_in_line_once_for_each_key_which_does_not_count_in_max_queue() -> None:
    seen = Seen()
    async with seen.deployed(places=2, max_queue=1) as service:
        async with service.stream(seen.calls(*"aaabbdddeee", seconds=60), max_in_flight=10):
            await wait_quiescent()
            assert (seen.began, seen.asked, service.statistics().admission.queued) == (["a", "b"], 10, 4)
            [one] = await begun(service("c", 0))
            with pytest.raises(ps.Overloaded):
                await service("f", 0)
        assert await one == "c"
        assert idle(service)


def test_a_drain_finishes_what_has_stepped_aside_and_an_abort_ends_it() -> None:
    async def main(end: str) -> None:
        seen = Seen()
        async with seen.deployed(places=3) as service:
            calls = seen.calls("a0!", "a1", "a2", "b0")
            [reading] = await begun(values_of(service.stream(calls, max_in_flight=10)))
            if end == "drain":
                await service.drain()
                assert await reading == ["a0!", "a1", "a2", "b0"]
            else:
                await service.abort()
                assert await outcomes(reading) == [ps.EngineClosedError]
                assert seen.began == ["a0!", "b0"]
        assert idle(service)

    for end in ("drain", "abort"):
        run_virtual(lambda end=end: main(end))


def test_a_stream_that_is_cancelled_at_any_step_leaves_nothing_in_line() -> None:
    async def main() -> None:
        seen = Seen()
        async with seen.deployed(places=2) as service:
            calls = seen.calls("a0", "a1", "b0", "a2", "b1", "c0")
            try:
                await values_of(service.stream(calls, max_in_flight=5))
            finally:
                assert idle(service)
                assert await service("a caller", 0) == "a caller"

    for _ in cancelled_at_every_step(main):
        pass
