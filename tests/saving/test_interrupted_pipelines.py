"""Pipelines, interrupted and restarted anywhere, give together the values of one whole run, bit by bit."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from tests.promises.exploring import seed_to_replay
from tests.saving.random_pipelines import SOURCES, SPOTS, STAGES, Interrupted, check_seeds

SEEDS = 6
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("loop", [0, 1], ids=["asyncio", "uvloop"])
def test_results_are_those_of_an_uninterrupted_run(request: pytest.FixtureRequest, effort: int, loop: int) -> None:
    seeds = range(loop, 2 * SEEDS * effort, 2)
    ran = check_seeds(seeds, LOOPS[loop], request.node.nodeid)
    if effort >= 40 and seed_to_replay() is None:
        assert ran == {*SOURCES, *STAGES}


PIPELINES = [
    *((source, "trainer") for source in dict.fromkeys(SOURCES)),
    *(
        ("order", *["batched"] * (takes == "batch"), name, "items")
        for name, (_, takes, _) in STAGES.items()
        if name not in SPOTS
    ),
]


@pytest.mark.parametrize(("seed", "names"), [*enumerate(PIPELINES)], ids=map(" ".join, PIPELINES))
async def test_each_source_and_each_stage_goes_on_and_so_do_the_indices_of_items(
    seed: int, names: tuple[str, ...]
) -> None:
    one = Interrupted(seed, only=names)
    await one.check()
    assert one.whole


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "names",
    ["batched trainer", "batched packed", "nested trainer nested", "split turns trainer", "split turns fn trainer"],
)
async def test_these_have_once_been_wrong(names: str, seed: int) -> None:
    one = Interrupted(seed, only=("shuffled before reading", *names.split()))
    await one.check()
    assert one.whole
