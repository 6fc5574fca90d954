"""The public classes show what the reference documents, and nothing of their inside."""

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock as ps
from penstock import devices, engine

REFERENCE = Path(__file__).parents[2] / "docs/reference"
DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n?)*)", re.MULTILINE)


@ps.graph
async def nothing() -> None:
    """Return nothing."""


def instances() -> dict[str, Any]:
    """Returns one object of each public class that has more inside than it shows, by the name of its class."""
    an_engine = engine.Engine()
    return {
        "penstock.engine.Engine": an_engine,
        "penstock.engine.Stream": an_engine.stream([]),
        "penstock.engine.Service": an_engine.deploy(nothing),
        "penstock.engine.Plan": engine.plan(nothing),
        "penstock.Graph": nothing,
        "penstock.Call": nothing(),
    }


def members_in_the_reference(name: str) -> set[str]:
    """Returns the members that the reference lists."""
    options = {found[1]: found[2] for page in REFERENCE.glob("*.md") for found in DIRECTIVE.finditer(page.read_text())}
    return set(re.findall(r"^ +- (\w+)$", options[name], re.MULTILINE))


def attributes_in_the_docstring(kind: type) -> set[str]:
    """Returns the names under "Attributes:"."""
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    return set(re.findall(r"^    (\w+): ", section, re.MULTILINE))


@pytest.mark.parametrize("name", instances())
def test_a_public_class_shows_what_is_documented_and_no_more(name: str) -> None:
    value = instances()[name]
    documented = members_in_the_reference(name) | attributes_in_the_docstring(type(value))
    assert {member for member in dir(value) if not member.startswith("_")} == documented


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (ps.Inbox, {"get", "take_nowait"}),
        (ps.Work, {"cancelled", "on_cancelled", "finish", "fail"}),
        (ps.StreamWork, {"cancelled", "on_cancelled", "put_nowait", "finish", "fail"}),
    ],
)
def test_authors_of_loops_see_their_side_and_not_that_of_the_engine(kind: type, members: set[str]) -> None:
    assert {member for member in dir(kind) if not member.startswith("_")} == members
    assert members == members_in_the_reference(f"penstock.{kind.__name__}")
    assert inspect.isabstract(kind)  # the engine makes them
    assert [member for member in members if not inspect.getdoc(inspect.getattr_static(kind, member))] == []


@pytest.mark.parametrize("name", instances())
def test_what_a_public_class_shows_has_a_docstring(name: str) -> None:
    kind = type(instances()[name])
    assert kind.__doc__
    without = [
        member for member in members_in_the_reference(name) if not inspect.getdoc(inspect.getattr_static(kind, member))
    ]
    assert without == []


@pytest.mark.parametrize(
    ("module", "verb"),
    [
        *((engine, verb) for verb in ("run", "stream", "deploy", "plan")),
        *((devices, verb) for verb in ("select", "status", "benchmark")),
    ],
)
def test_no_module_has_the_name_of_a_verb(module: ModuleType, verb: str) -> None:
    assert importlib.util.find_spec(f"{module.__name__}.{verb}") is None
    assert inspect.isfunction(getattr(module, verb))
