"""Floors, which are the outer parts of the package, use only public names and a few listed helpers."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.house.counting import tree_of
from tests.house.test_import_directions import SOURCE, imports_of, part_of

# The parts of the package that could also be separate packages.
FLOORS = ("_cli", "advice", "asgi", "cluster", "consume", "data", "durable", "serving", "studio", "testing")

# Imports of floors in the core, which is every other part: inside public methods, and for public names of a package. At
# most ten imports, each with its file and the module of the floor.
SHOWN = [
    ("devices/__init__.py", "advice.device_benchmark"),
    ("devices/__init__.py", "advice.fitting"),
    ("devices/__init__.py", "advice.platform_status"),
    ("engine/call_stream.py", "studio.progress"),  # twice: to check for rich, and to show a bar
    ("engine/call_stream.py", "studio.progress"),
    ("engine/picture.py", "studio.drawing"),
    ("insight/recording.py", "studio.page.page"),
    ("insight/recording.py", "studio.perfetto"),
    ("telemetry/__init__.py", "studio.live.server"),
    ("telemetry/live/protocol.py", "studio.live.protocol"),  # a documented path; no file imports it
]

# The modules whose names are public, and whose `__all__` lists them; `extension` will be the contract for floors.
PUBLIC = {
    "", "asgi", "cluster", "consume", "data", "devices", "engine", "extension", "serving", "studio.drawing",
    "telemetry", "telemetry.names", "testing", "testing.faults",
}  # fmt: skip

# Common helpers, at most eight. They know nothing of graphs, so a separate package could copy them.
HELPERS = {
    "_errors", "_machine", "_public", "actors.accepted", "actors.tasks", "telemetry.logs", "telemetry.tables",
    "telemetry.text",
}  # fmt: skip

# Private names of aiokafka: it has no public name for the generation of a member, for a commit that keeps to it, or for
# the connections of a consumer whose broker hangs.
OF_AIOKAFKA = {"consume/kafka.py": {"._client", "._coordinator", "._do_commit_offsets"}}

# Attributes that are public although they begin with an underscore.
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def is_public(module: str, name: str) -> bool:
    if module not in PUBLIC:
        return False
    found = import_module(f"penstock.{module}" if module else "penstock")
    return not name or name in found.__all__ or name == "__version__"


def own_names(floor: str, source: Path) -> set[str]:
    """Returns the private names that the files of a floor define: functions, classes, fields, assigned attributes."""
    found: set[str] = set()
    for path in files_of(floor, source):
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                    found.add(name)
                case _:
                    pass
    return found


def files_of(floor: str, source: Path) -> list[Path]:
    return [
        path
        for path in sorted(source.rglob("*.py"))
        if part_of(path.relative_to(source).with_suffix("").parts) == floor
    ]


def lacking(floor: str, source: Path = SOURCE) -> dict[str, set[str]]:
    """Returns, for each file of a floor, the private names of other parts that it uses."""
    own = own_names(floor, source)
    found: dict[str, set[str]] = {}
    for path in files_of(floor, source):
        names = {
            f"{module}.{name}".strip(".")
            for one in imports_of(path, source)
            for module, name in one
            if module.partition(".")[0] != floor and module not in HELPERS and not is_public(module, name)
            if path.name != "__init__.py" or not is_public(floor, name)  # which re-exports its own public names
        }
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not is_own and node.attr not in own | NAMED_TUPLES:
                    names.add(f".{node.attr}")
        if names:
            found[str(path.relative_to(source))] = names
    return found


def imported_by_name(path: Path) -> Iterator[str]:
    """Yields the modules of the package that a file imports with `import_module` and a literal name."""
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield name.removeprefix("penstock").lstrip(".")
            case _:
                pass


def lines_of_core(source: Path = SOURCE) -> list[tuple[str, str]]:
    """Returns each import of a floor in the core; `penstock` itself, which names all public packages, is left out."""
    found: list[tuple[str, str]] = []
    for path in sorted(source.rglob("*.py")):
        part = part_of(path.relative_to(source).with_suffix("").parts)
        if part not in (*FLOORS, "__init__", "__main__"):
            modules = [{module for module, _ in names} for names in imports_of(path, source)]
            lines = [module for line in (*modules, *({name} for name in imported_by_name(path))) for module in line]
            found += sorted((str(path.relative_to(source)), one) for one in lines if one.partition(".")[0] in FLOORS)
    return found


def test_the_core_shows_what_a_floor_has_by_few_lines() -> None:
    assert lines_of_core() == SHOWN
    assert len(SHOWN) <= 10


@pytest.mark.parametrize(("file", "module"), [line for line in SHOWN if line[0] != "telemetry/live/protocol.py"])
def test_what_the_core_shows_is_imported_late(file: str, module: str) -> None:
    body = ast.parse((SOURCE / file).read_text()).body
    at_once = [one for one in body if isinstance(one, ast.ImportFrom) and module.startswith(one.module or "-")]
    assert at_once == []


def test_helpers_are_few() -> None:
    assert len(HELPERS) <= 8


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_stands_on_public_names(floor: str) -> None:
    known = {file: names for file, names in OF_AIOKAFKA.items() if file.startswith(f"{floor}/")}
    assert lacking(floor) == known, "either the contract lacks a name, or the floor does too much"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from .. import Node, engine\nfrom ..engine import Engine\nfrom ..telemetry import names", set()),
        ("import penstock\nimport penstock.devices as devices\nfrom penstock import Node", set()),
        ("from .._errors import a\nfrom ..actors.accepted import check\nfrom ..telemetry import logs", set()),
        ("import asyncio\nfrom . import other\nfrom .other import thing\nfrom .. import asgi", set()),
        ("from ..engine.node import Node", {"engine.node.Node"}),
        ("from ..engine import graph", {"engine.graph"}),
        ("from ..engine import Hidden", {"engine.Hidden"}),
        ("def late():\n    import penstock.engine.graph", {"engine.graph"}),
        ("if TYPE_CHECKING:\n    from penstock.actors.frame import Frame", {"actors.frame.Frame"}),
        ("x._wiring = engine._runtime.pools", {"._wiring", "._runtime"}),
        ("class A:\n    _mine: int\n    def f(self, x):\n        return self._a + x._mine + x._replace()", set()),
    ],
)  # fmt: skip
def test_a_private_name_is_seen(tmp_path: Path, text: str, expected: set[str]) -> None:
    for file in (
        "engine/graph.py", "engine/node.py", "actors/frame.py", "actors/accepted.py", "data/other.py", "_errors.py",
        "asgi.py", "telemetry/logs.py", "telemetry/names.py", "devices/__init__.py",
    ):  # fmt: skip
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / "data/one.py").write_text(text)
    assert lacking("data", tmp_path) == ({"data/one.py": expected} if expected else {})
