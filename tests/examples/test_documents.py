"""The job over documents: its verdict names the step that limits, and the remedy brings the predicted speed-up."""

import itertools
import re
from pathlib import Path

import pytest

from examples import documents
from tests.examples import programs
from tests.telemetry.virtual_time import VirtualTime

PROGRAM = Path(documents.__file__)
LINES = PROGRAM.read_text().splitlines()


async def followed(folder: Path, pages: int, rounds: int) -> list[documents.Round]:
    with documents.pages(pages, 1) as paths:
        return [one async for one in documents.follow(paths, folder, rounds)]


def test_the_service_limits_short_pages_and_larger_batches_bring_what_was_predicted(
    virtual: VirtualTime, tmp_path: Path
) -> None:
    rounds = virtual.run(lambda: followed(tmp_path, 640, 3))  # parsing takes no virtual time
    assert [one.verdict.node for one in rounds] == ["embed"] * 3
    first, second, _ = rounds
    assert re.match(r"batch=ps\.Batch\(32\) at embed ", first.verdict.remedy)
    assert re.match(r"max_in_flight=\d+ at \S+ together with batch=ps\.Batch\(\d+\) at embed ", second.verdict.remedy)
    for before, after in itertools.pairwise(rounds):
        assert before.verdict.factor == pytest.approx(before.seconds / after.seconds, rel=0.25)
        assert after.same_as(before)
    vectors = first.target.read_text().splitlines()
    assert len(vectors) == len(set(vectors)) == 640


def test_a_parser_limits_long_pages_and_goes_into_processes() -> None:
    done = programs.run(PROGRAM, "--pages", "60", "--paragraphs", "700", "--rounds", "2")
    assert (done.returncode, done.stderr) == (0, "")
    found = re.search(
        r'"parse" limits the pipeline: .*; runs_on="\w+" at parse \(\S*documents\.py:(\d+)\)', done.stdout
    )
    assert found is not None, done.stdout
    assert LINES[int(found[1]) - 1].startswith("def parse(")
    assert re.search(r"measured: [\d.]+ times as fast, predicted: [\d.]+; the same results", done.stdout)
