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
    "telemetry": {"_public", "studio"},
    "actors": {"_errors", "telemetry"},
    "saving": {"_errors", "telemetry", "actors"},
    "engine": {"_errors", "_public", "telemetry", "actors", "saving", "studio"},
    "devices": {"_errors", "_machine", "_public", "telemetry", "actors", "engine", "advice"},
    "advice": {"__init__", "studio", "_errors", "_machine", "_public", "telemetry", "actors", "engine", "devices"},
    "studio": {"__init__", "extension", "_errors", "_public", "telemetry", "actors", "engine"},
    "data": {
        "__init__", "_errors", "_machine", "_public", "telemetry", "actors", "engine", "devices", "extension", "advice",
    },
    "testing": {
        "__init__", "extension", "_errors", "_public", "telemetry", "actors", "engine", "devices", "cluster",
    },
    "extension": {"_public", "telemetry", "actors", "engine"},
    "asgi": {"__init__", "_errors", "_public", "telemetry", "actors", "engine"},
    "cluster": {"__init__", "extension", "_errors", "_public", "telemetry"},
    "consume": {"__init__", "extension", "_errors", "_public", "telemetry", "actors", "engine"},
    "serving": {"__init__", "_errors", "_public", "telemetry", "actors", "engine", "asgi"},
    "__init__": {
        "_errors", "_public", "telemetry", "actors", "saving", "engine", "devices", "data", "testing", "asgi",
        "cluster", "consume", "extension", "serving",
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


def imported_modules(
    path: Path, source: Path = SOURCE, *, for_checkers: bool = True
) -> Iterator[tuple[str, ...] | str]:
    """Yields each import of a file: a path from the package's root for our own modules, else the full name.

    Args:
        path: the file.
        source: the root of the package.
        for_checkers: whether imports count that only type checkers see.
    """
    inside = path.relative_to(source).with_suffix("").parts
    package = inside[:-1]
    for statement in import_statements(tree_of(path), for_checkers=for_checkers):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield ours_or_outside(alias.name)
            continue
        if statement.level == 0:
            found = ours_or_outside(statement.module or "")
            if isinstance(found, str):
                yield found
                continue
            base = () if found == ("__init__",) else found
        else:
            base = package[: len(package) - statement.level + 1] + tuple((statement.module or "").split("."))
            base = tuple(name for name in base if name)
        for alias in statement.names:  # a name is a module, or a name in a module
            module = (*base, alias.name)
            is_module = source.joinpath(*module).is_dir() or source.joinpath(*module).with_suffix(".py").exists()
            yield module if is_module else base or ("__init__",)


def import_statements(tree: ast.AST, *, for_checkers: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields all imports of a file, also imports in functions."""
    if isinstance(tree, ast.Import | ast.ImportFrom):
        yield tree
    inside: Iterable[ast.AST] = ast.iter_child_nodes(tree)
    if isinstance(tree, ast.If) and not for_checkers and "TYPE_CHECKING" in ast.dump(tree.test):
        inside = tree.orelse
    for child in inside:
        yield from import_statements(child, for_checkers=for_checkers)


def ours_or_outside(name: str) -> tuple[str, ...] | str:
    first, *rest = name.split(".")
    return (tuple(rest) or ("__init__",)) if first == "penstock" else first


def violations(path: Path, source: Path = SOURCE) -> list[str]:
    """Names the imports of a file that its part of the package may not have."""
    part = part_of(path.relative_to(source).with_suffix("").parts)
    if part not in MAY_IMPORT:
        return [f"{part} is not in MAY_IMPORT"]
    found: list[str] = []
    for module in imported_modules(path, source):
        if isinstance(module, str):
            if module not in STANDARD | DEPENDENCIES | EXTRAS.get(part, set()):
                found.append(f"{part} imports {module}")
        elif part_of(module) not in MAY_IMPORT[part] | {part}:
            found.append(f"{part} imports {part_of(module)}")
    return found


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
