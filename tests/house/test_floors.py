"""Floors, which are the outer parts of the package, use only public names and a few listed helpers."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from penstock import extension
from tests.house.counting import tree_of
from tests.house.test_import_directions import SOURCE, imports_of, part_of

# The parts of the package that could also be separate packages.
FLOORS = (
    "_cli", "advice", "asgi", "cluster", "consume", "data", "durable", "insight", "serving", "studio", "testing",
    "workers",
)  # fmt: skip

# Imports of floors in the core, which is every other part, beside faces (see `is_face`): inside public methods, and for
# public names of a floor. The list may only shrink.
SHOWN = [
    ("engine/call_stream.py", "studio.progress"),  # twice: to check for rich, and to show a bar
    ("engine/call_stream.py", "studio.progress"),
    ("engine/picture.py", "studio.drawing"),
    ("telemetry/live/protocol.py", "studio.live.protocol"),  # a documented path; no file imports it
]

# The observation contract: the module of the names that `insight` may know of the parts below it, and how many there
# are, at most 30. It is not public: no other part imports it. The number may only shrink.
OBSERVATION, OBSERVED = "telemetry.observation", 28

# The modules whose names are public, and whose `__all__` lists them; `extension` will be the contract for floors.
PUBLIC = {
    "", "asgi", "cluster", "consume", "data", "devices", "engine", "extension", "serving", "studio.drawing",
    "telemetry", "telemetry.names", "testing", "testing.faults",
}  # fmt: skip

# The most names of `extension`, the contract. A new name is a decision; an attribute of an object of the contract is
# better. The number may only shrink.
CONTRACT = 44

# Common helpers, at most eight. They know nothing of graphs, so a separate package could copy them.
HELPERS = {
    "_errors", "_machine", "_public", "actors.accepted", "actors.tasks", "telemetry.logs", "telemetry.tables",
    "telemetry.text",
}  # fmt: skip

# Private names of aiokafka: it has no public name for the generation of a member, for a commit that keeps to it, or for
# the connections of a consumer whose broker hangs.
OF_AIOKAFKA = {"consume/kafka.py": {"._client", "._coordinator", "._do_commit_offsets"}}

# What `Profile.to_html` and `Profile.to_perfetto` write. These imports are late, and the list may only shrink.
OF_STUDIO = {"insight/recording.py": {"studio.page.page.page_of", "studio.perfetto.trace"}}

# Attributes that are public although they begin with an underscore: of named tuples, `sys`, `os` and `asyncio`.
UNDERSCORED = {"_asdict", "_current_frames", "_exit", "_fields", "_get_running_loop", "_make", "_replace"}


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
            if (floor, module) != ("insight", OBSERVATION)
            if path.name != "__init__.py" or not is_public(floor, name)  # which re-exports its own public names
        }
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not is_own and node.attr not in own | UNDERSCORED:
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


def is_face(path: Path) -> bool:
    """Whether a file is an `__init__` that may name floors, as it names them late, for their public names alone.

    It has nothing but a docstring, imports, `__all__`, and the table of late names for `_public`; imports that run at
    once name no floor.
    """
    if path.name != "__init__.py":
        return False
    _, *body = tree_of(path).body
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names)):
                if not all(isinstance(one, ast.Constant) for one in names):
                    return False
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] not in FLOORS:
                pass
            case ast.ImportFrom(module=None, names=names) if not {one.name for one in names} & {*FLOORS}:
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=seen, orelse=[ast.Assign(value=late)]):
                match late:
                    case ast.Call(func=ast.Name(id="_public"), args=[ast.Name(id="__name__"), ast.Dict() as table]):
                        constants = all(isinstance(one, ast.Constant) for one in (*table.keys, *table.values))
                        if not constants or not all(isinstance(one, ast.ImportFrom) for one in seen):
                            return False
                    case _:
                        return False
            case _:
                return False
    return True


def lines_of_core(source: Path = SOURCE) -> list[tuple[str, str]]:
    """Returns each import of a floor in the core beside faces; `penstock` itself, which names all, is left out."""
    found: list[tuple[str, str]] = []
    for path in sorted(source.rglob("*.py")):
        part = part_of(path.relative_to(source).with_suffix("").parts)
        if part not in (*FLOORS, "__init__", "__main__") and not is_face(path):
            modules = [{module for module, _ in names} for names in imports_of(path, source)]
            lines = [module for line in (*modules, *({name} for name in imported_by_name(path))) for module in line]
            found += sorted((str(path.relative_to(source)), one) for one in lines if one.partition(".")[0] in FLOORS)
    return found


def test_the_core_shows_what_a_floor_has_by_few_lines() -> None:
    assert lines_of_core() == SHOWN
    assert len(SHOWN) <= 4


@pytest.mark.parametrize(("file", "module"), [line for line in SHOWN if line[0] != "telemetry/live/protocol.py"])
def test_what_the_core_shows_is_imported_late(file: str, module: str) -> None:
    body = ast.parse((SOURCE / file).read_text()).body
    at_once = [one for one in body if isinstance(one, ast.ImportFrom) and module.startswith(one.module or "-")]
    assert at_once == []


def test_the_contract_gets_no_new_names() -> None:
    assert len(extension.__all__) <= CONTRACT


def test_helpers_are_few() -> None:
    assert len(HELPERS) <= 8


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_stands_on_public_names(floor: str) -> None:
    known = {file: names for file, names in (OF_AIOKAFKA | OF_STUDIO).items() if file.startswith(f"{floor}/")}
    assert lacking(floor) == known, "either the contract lacks a name, or the floor does too much"


def test_insight_alone_knows_the_observation_contract_and_uses_all_of_it() -> None:
    used: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        names = {name for one in imports_of(path) for module, name in one if module == OBSERVATION}
        if names:
            names |= {
                node.attr
                for node in ast.walk(tree_of(path))
                if isinstance(node, ast.Attribute)
                if isinstance(node.value, ast.Name) and node.value.id == "observation"
            }
            used.setdefault(part_of(path.relative_to(SOURCE).parts), set()).update(names - {""})
    assert used == {"insight": set(import_module(f"penstock.{OBSERVATION}").__all__)}
    assert len(used["insight"]) == OBSERVED <= 30, "write the smaller number here"


FACE = """'Public names.'
from .._public import public as _public
__all__ = ["Verdict"]
if TYPE_CHECKING:
    from ..insight.limits import Verdict
else:
    __getattr__, __dir__ = _public(__name__, {"..insight.limits": "Verdict"})
"""


@pytest.mark.parametrize(
    ("text", "instead", "expected"),
    [
        ("Verdict", "Verdict", True),
        ("from .._public", "from ..insight.limits import Verdict\nfrom .._public", False),  # not late
        ("from .._public", "from .. import insight\nfrom .._public", False),
        ("from .._public", "def f():\n    from ..insight import limits\nfrom .._public", False),
        ('["Verdict"]', '["Verdict", limits.NAME]', False),
        ('"Verdict"}', "limits.NAMES}", False),
        ("    from ..insight.limits import Verdict\nelse", "    Verdict = limits.Verdict\nelse", False),
        ("_public(__name__, {", "limits.public(__name__, {", False),
    ],
)
def test_a_face_names_floors_late_and_does_nothing_else(
    tmp_path: Path, text: str, instead: str, *, expected: bool
) -> None:
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry/__init__.py").write_text(FACE.replace(text, instead, 1))
    (tmp_path / "telemetry/other.py").write_text(FACE)
    assert is_face(tmp_path / "telemetry/__init__.py") == expected
    assert not is_face(tmp_path / "telemetry/other.py")


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
