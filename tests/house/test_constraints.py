"""Constraint files pin exact versions, and do not say from which index the versions came."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.+!]*")


def requirements(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


CONSTRAINTS = [ROOT / "constraints.txt", *sorted(ROOT.glob("tests/backends/constraints*.txt"))]


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_constraints_are_names_and_versions_only(path: Path) -> None:
    assert [line for line in requirements(path) if not PIN.fullmatch(line)] == []
    assert "://" not in path.read_text()


def test_every_tool_of_the_extras_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in ("dev", "demo", "docs", "kafka", "otlp", "postgres", "rich", "serving", "uvloop"):
        wanted += project["optional-dependencies"][extra]
    names = {re.split(r"[\[<>=!;]", line)[0] for line in wanted} - {"penstock"}
    pinned = {line.split("==")[0] for line in requirements(ROOT / "constraints.txt")}
    assert names - pinned == set()
