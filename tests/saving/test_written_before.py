"""Snapshots and durable loops that earlier versions wrote can be resumed; see tests/saving/written.py."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, engine
from tests.saving import written
from tests.saving.agents import State
from tests.saving.exact import exact, exactly
from tests.saving.written import PIPELINES, agent_of, arrays_of, of_fold, ordered, read_batches, value_of_each_kind

FOLDERS = sorted(Path(__file__).parent.glob("written_by_*"))
WORDS = "word0 word1 word2 word3 word4"


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns a copy of the folder, which a test may change."""
    return Path(shutil.copytree(request.param, tmp_path / "copy"))


async def goes_on(make: Callable[[], Any], folder: Path) -> None:
    whole, rest = await exactly(make()), await exactly(make(), ps.Checkpoint(folder))
    assert 0 < len(rest) < len(whole)
    assert rest == whole[-len(rest) :]


@pytest.mark.parametrize("name", PIPELINES)
async def test_a_stream_goes_on_from_a_snapshot_of_an_earlier_version(folder: Path, name: str) -> None:
    await goes_on(PIPELINES[name], folder / name)


async def test_what_is_on_a_mesh_goes_on_from_a_snapshot_of_an_earlier_version(folder: Path) -> None:
    pytest.importorskip("jax")
    await goes_on(written.on_mesh, folder / "mesh")


async def test_an_end_of_an_earlier_version_stays_the_end(folder: Path) -> None:
    async with engine.stream(PIPELINES["stages"](), checkpoint=ps.Checkpoint(folder / "ended")) as values:
        assert [value async for value in values] == []
        assert values.position > 100


def test_the_state_of_a_reader_goes_on_from_a_snapshot_of_an_earlier_version(folder: Path) -> None:
    def learned(**options: Any) -> list[str]:
        reader = written.Reader()
        options = {"checkpoint": ps.Checkpoint(folder / "reader", reader=reader)} if options else {}
        with data.iterate(read_batches(ordered()), **options) as batches:
            return [reader.learn(batch) for batch in batches]

    whole, rest = learned(), learned(goes_on=True)
    assert 0 < len(rest) < len(whole)
    assert rest == whole[-len(rest) :]


async def test_a_fold_goes_on_from_a_snapshot_of_an_earlier_version(folder: Path) -> None:
    seen: list[int] = []
    got = await engine.run(of_fold(None, seen), checkpoint=ps.Checkpoint(folder / "fold"))
    assert exact(got) == exact(await engine.run(of_fold(None, [])))
    assert 0 < len(seen) < got["count"]


async def test_durable_loops_of_an_earlier_version_go_on(folder: Path) -> None:
    file, run, durable = folder / "loops.db", engine.run, ps.Durable(folder / "loops.db")
    asking = agent_of(file, ask_in=(2, 4))
    finished = await durable.history("finished")
    assert [(state.step, state.value.turn) for state in finished] == [(step, step) for step in range(6)]
    assert finished[2].value == State(2, ("word0", "word1"), {0: "word0", 1: "word1"})

    assert len(await durable.history("in the midst")) == 4
    assert await run(agent_of(file)("q"), durable_key="in the midst") == WORDS
    assert await run(agent_of(file)("q"), durable_key="forked") == WORDS
    with pytest.raises(ps.OptionsError):  # the call had other arguments
        await run(asking("another"), durable_key="asks")
    with pytest.raises(ps.Interrupted) as asked:
        await run(asking("q"), durable_key="asks")
    token = asked.value.token
    assert (asked.value.question, len(await durable.history("asks"))) == ("what comes in turn 2?", 3)
    with pytest.raises(ps.Interrupted, match="what comes in turn 4"):
        await run(asking("q"), durable_key="asks", answer=ps.Answer("first", token))
    assert await run(asking("q"), durable_key="asks", answer="second") == "word0 word1 first word3 second"
    result = await run(asking("q"), durable_key="asks again", answer="second")
    assert result == "word0 word1 {'an': 'answer'} word3 second"

    found = await run(arrays_of(file)(np.arange(3)), durable_key="arrays")
    assert exact(found["seen"]) == exact([value_of_each_kind(count) for count in range(6)])
    weights = np.ones(9)
    for count in range(6):
        weights = weights * 0.5 + count
    assert exact(found["weights"]) == exact(weights)
