"""Each part of the package imports only the parts listed here: errors import none, and only testing imports all."""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.house.counting import tree_of

SOURCE = Path(__file__).parents[2] / "src"

# Each part of the package, and the parts that it may import. A new folder needs a line here: a decision, not a habit.
# The imports of advice and studio in the core are listed in test_floors.py.
MAY_IMPORT: dict[str, set[str]] = {
    "_errors": set(),
    "_machine": set(),
    "_public": set(),
    "telemetry": {"_public", "insight", "studio"},
    "actors": {"_errors", "telemetry"},
    "saving": {"_errors", "_machine", "telemetry", "actors"},
    "engine": {"_errors", "_public", "telemetry", "actors", "saving", "studio"},
    "devices": {"_errors", "_machine", "_public", "telemetry", "actors", "engine", "advice"},
    "advice": {"__init__", "studio", "_errors", "_machine", "_public", "telemetry", "actors", "engine", "devices"},
    "insight": {"telemetry", "studio"},
    "studio": {"__init__", "extension", "_errors", "_public", "telemetry", "actors", "engine"},
    "data": {
        "__init__", "_errors", "_machine", "_public", "telemetry", "actors", "engine", "devices", "extension", "advice",
    },
    "testing": {
        "__init__", "extension", "_errors", "_public", "telemetry", "actors", "engine", "devices", "cluster",
    },
    "extension": {"_public", "telemetry", "actors", "saving", "engine"},
    "asgi": {"__init__", "_errors", "_public", "telemetry", "actors", "engine"},
    "cluster": {"__init__", "extension", "_errors", "_public", "telemetry"},
    "consume": {"__init__", "extension", "_errors", "_public", "telemetry", "actors", "engine"},
    "durable": {"__init__", "extension", "_errors", "_machine", "_public", "telemetry", "actors", "engine"},
    "workers": {"__init__", "_errors", "telemetry", "actors", "engine", "extension"},
    "serving": {"__init__", "_errors", "_public", "telemetry", "actors", "engine", "asgi"},
    "__init__": {
        "_errors", "_public", "telemetry", "actors", "saving", "engine", "devices", "data", "testing", "asgi",
        "cluster", "consume", "durable", "extension", "serving",
    },
    "_cli": {"__init__", "_errors", "telemetry", "engine", "devices", "serving"},
    "__main__": {"_cli"},
}  # fmt: skip
# Packages that the package may import: its four dependencies. JAX is an extra, for devices alone. Only modules of
# telemetry that draw with rich import it, and they are loaded only on request.
DEPENDENCIES = {"anyio", "structlog", "opentelemetry", "typing_extensions"}
EXTRAS: dict[str, set[str]] = {
    "advice": {"jax", "numpy"},
    "asgi": {"starlette"},
    "cluster": {"ray"},
    "data": {"jax", "numpy"},
    "devices": {"jax", "jaxlib", "numpy"},
    "serving": {"httpx", "prometheus_client", "pydantic", "starlette", "typing_extensions", "uvicorn"},
    "studio": {"rich"},
    "telemetry": {"rich"},
    "_cli": {"rich", "uvicorn"},
    "_machine": {"numpy"},
}

# The standard library of the newest Python: older versions do not list all of its modules.
STANDARD = sys.stdlib_module_names | {"annotationlib"}

FILES = sorted(SOURCE.rglob("*.py"))


def part_of(module: tuple[str, ...]) -> str:
    """Returns the part of the package that a module, as a path from its root, belongs to."""
    return module[0] if module else "__init__"


def imports_of(path: Path, source: Path = SOURCE, *, for_checkers: bool = True) -> Iterator[list[tuple[str, str]]]:
    """Yields, for each import statement of a file, the modules of the package that it imports.

    Each module comes with the name that is imported from it, "" for the whole module.

    Args:
        path: the file.
        source: the root of the package.
        for_checkers: whether imports count that only type checkers see.
    """
    package = path.relative_to(source).parts[:-1]
    for statement in import_statements(tree_of(path), for_checkers=for_checkers):
        if isinstance(statement, ast.Import):
            names = [alias.name.split(".") for alias in statement.names]
            yield [(".".join(inside), "") for first, *inside in names if first == "penstock"]
            continue
        first, *rest = (statement.module or "").split(".")
        if statement.level:
            base = ".".join(filter(None, [*package[: len(package) - statement.level + 1], first, *rest]))
        elif first == "penstock":
            base = ".".join(rest)
        else:
            continue
        modules = {alias.name: f"{base}.{alias.name}" if base else alias.name for alias in statement.names}
        yield [(inside, "") if is_module(source, inside) else (base, name) for name, inside in modules.items()]


def is_module(source: Path, name: str) -> bool:
    path = source.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def modules_of(path: Path, source: Path = SOURCE, *, for_checkers: bool = True) -> set[str]:
    """Returns the modules of the package that a file imports."""
    return {module for names in imports_of(path, source, for_checkers=for_checkers) for module, _ in names}


def packages_of(path: Path) -> set[str]:
    """Returns the other packages that a file imports."""
    names: list[str] = []
    for statement in import_statements(tree_of(path), for_checkers=True):
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif not statement.level:
            names.append(statement.module or "")
    return {name.partition(".")[0] for name in names} - {"penstock"}


def import_statements(tree: ast.AST, *, for_checkers: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields all imports of a file, also imports in functions."""
    if isinstance(tree, ast.Import | ast.ImportFrom):
        yield tree
    inside: Iterable[ast.AST] = ast.iter_child_nodes(tree)
    if isinstance(tree, ast.If) and not for_checkers and "TYPE_CHECKING" in ast.dump(tree.test):
        inside = tree.orelse
    for child in inside:
        yield from import_statements(child, for_checkers=for_checkers)


def violations(path: Path, source: Path = SOURCE) -> list[str]:
    """Names the imports of a file that its part of the package may not have."""
    part = part_of(path.relative_to(source).with_suffix("").parts)
    if part not in MAY_IMPORT:
        return [f"{part} is not in MAY_IMPORT"]
    inside = {module.partition(".")[0] or "__init__" for module in modules_of(path, source)} - MAY_IMPORT[part] - {part}
    outside = packages_of(path) - STANDARD - DEPENDENCIES - EXTRAS.get(part, set())
    return [f"{part} imports {name}" for name in sorted(inside | outside)]


def test_imports_go_one_way() -> None:
    assert {str(path.relative_to(SOURCE)): found for path in FILES if (found := violations(path))} == {}


LATE_IMPORT = "def late():\n    from opentelemetry import trace\n    from ..testing import x"


@pytest.mark.parametrize(
    ("file", "statement", "expected"),
    [
        ("actors/channel.py", "from ..engine import plan", ["actors imports engine"]),
        ("actors/channel.py", "from .. import engine", ["actors imports engine"]),
        ("actors/channel.py", "from .. import node", ["actors imports __init__"]),
        ("actors/channel.py", "from ..engine.planning import Plan", ["actors imports engine"]),
        ("actors/channel.py", "import penstock.engine", ["actors imports engine"]),
        ("actors/channel.py", "import penstock", ["actors imports __init__"]),
        ("actors/channel.py", "import jax", ["actors imports jax"]),
        ("actors/channel.py", LATE_IMPORT, ["actors imports testing"]),
        ("telemetry/spans.py", "from .._errors import PenstockError", ["telemetry imports _errors"]),
        ("engine/deep/plan.py", "from ...actors.x import Y\nfrom ... import devices", ["engine imports devices"]),
        ("engine/planning.py", "from .. import devices", ["engine imports devices"]),
        ("actors/channel.py", "from ..devices.platform.self_check import SelfCheck", ["actors imports devices"]),
        ("devices/dispatch.py", "from ..testing import faults", ["devices imports testing"]),
        ("devices/dispatch.py", "import jax.numpy, numpy\nfrom ..engine import plan\nfrom ..actors import x", []),
        ("engine/planning.py", "from . import frame\nfrom .._errors import PlanError\nimport asyncio, anyio", []),
        ("surprise/thing.py", "", ["surprise is not in MAY_IMPORT"]),
    ],
)
def test_a_wrong_import_is_seen(tmp_path: Path, file: str, statement: str, expected: list[str]) -> None:
    for part in MAY_IMPORT:
        (tmp_path / part).mkdir()
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(statement)
    assert violations(path, tmp_path) == expected
