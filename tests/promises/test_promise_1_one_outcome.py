"""Promise 1: every submitted item gets exactly one terminal outcome: result, error, cancelled or expired."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate
from tests.promises.scenario import Boom

ROOT = Path(__file__).parents[2]


def test_promise_1_items_have_their_outcomes_though_their_process_is_forked_meanwhile(effort: int) -> None:
    for seed in range(1 + effort // 2):
        command = [sys.executable, "-m", "tests.promises.forks", str(seed)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
        assert (done.returncode, done.stdout) == (0, "played\n"), f"replay: {' '.join(command)}\n{done.stderr}"


async def test_promise_1_the_first_failure_of_an_item_wins_and_a_later_one_is_logged() -> None:
    @ps.node
    async def fails_first(x: int) -> int:
        raise Boom("first")

    @ps.node
    async def fails_while_it_is_cancelled(x: int) -> int:
        try:
            await asyncio.Event().wait()
        finally:
            raise LookupError("second")

    @ps.graph
    async def two_failures(x: int) -> int:
        return await add(await fails_while_it_is_cancelled(x), await fails_first(x))

    with pytest.raises(Boom, match="first"):
        await engine.run(two_failures(1))


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_promise_1_an_item_whose_source_is_cancelled_before_it_has_entered_ends_too(asynchronous: bool) -> None:
    """Some code may cancel every task that it can find."""
    gate = Gate()
    line = gate.graph(concurrency=1, capacity=1)

    async def calls() -> AsyncIterator[ps.Call[int]]:
        for x in range(5):
            yield line(x)

    async with engine.stream(calls() if asynchronous else (line(x) for x in range(5))) as results:
        await testing.wait_quiescent()
        source = next(task for task in asyncio.all_tasks() if task.get_name() == "penstock-source")
        source.cancel()
        await asyncio.wait([source])
        gate.open()
        outcomes = results.outcomes()
        got = [await anext(outcomes) for _ in range(3)]
        assert [outcome.value for outcome in got[:2]] == [0, 1]
        assert isinstance(got[2].error, ps.NodeCancelledError)
        with pytest.raises(ps.NodeCancelledError, match="the source of this stream was cancelled"):
            await anext(outcomes)


@ps.node
async def add(a: int, b: int) -> int:
    return a + b
