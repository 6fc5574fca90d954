"""Graphs that type checkers accept can be planned and run; `make check` checks `correct.py` and `wrong.py`."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import penstock as ps
from penstock import engine
from tests.docs.snippets import blocks_of
from tests.kit import values_of
from tests.typing import correct, resources, streams

ROOT = Path(__file__).parents[2]


# The page passes NumPy arrays to JAX functions, which `devices.Array` allows.
@pytest.mark.long  # `correct.py` does the same once
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_the_page_on_device_nodes_type_checks(checker: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/device-nodes.md").read_text()
    program = tmp_path / "page.py"
    program.write_text("".join(block.text for block in blocks_of(page) if block.language == "python"))
    # Each snippet defines a `main`. JAX's annotations leave some types unknown, which only strict checks refuse.
    settings = {"extraPaths": [str(ROOT / "typings")], "reportRedeclaration": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = {
        "mypy": ["mypy", "--disable-error-code=no-redef", "--disable-error-code=no-any-return", str(program)],
        "pyright": ["pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)],
    }[checker]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "graph",
    [correct.search, correct.first, correct.warm_up, correct.control, correct.own_loops, correct.judge],
    ids=lambda graph: graph.name,
)
def test_what_type_checks_can_be_planned(graph: ps.Graph[..., object]) -> None:
    assert engine.plan(graph).name == graph.name


async def test_settings_are_deployed() -> None:
    await correct.states()


async def test_resources_are_opened_and_reloaded() -> None:
    await resources.serve()
    assert await engine.run(resources.build("a")("x")) == b"x"


async def test_stages_with_functions_and_actors_run() -> None:
    async def blobs() -> AsyncIterator[bytes]:
        for blob in (b"a", b"bc", b"def", b"ghij"):
            yield blob

    assert await values_of(engine.stream(streams.sizes(blobs()))) == [[2, 3], [4]]
    assert await values_of(engine.stream(streams.chained(blobs()))) == [1, 2, 3, 4]
