"""Circles of imports: the circles and clusters listed here may only become fewer and smaller."""

from pathlib import Path

import pytest

from tests.house.test_import_directions import SOURCE, modules_of

# The sizes of the clusters of each floor: files that import each other, if imports for type checkers count as well. A
# reader of one file has to know its whole cluster, so no cluster shall have more than 12 files.
FOR_TYPES = {"actors": [7], "devices": [2, 2], "engine": [5, 4]}


def modules(source: Path) -> dict[str, Path]:
    """Return the path of every module; an `__init__` only gathers names, and is part of no circle."""
    files = [path for path in sorted(source.rglob("*.py")) if path.name != "__init__.py"]
    return {".".join(path.relative_to(source).with_suffix("").parts): path for path in files}


def circles(source: Path, *, types: bool) -> list[set[str]]:
    """Return the strongly connected components of the imports (Tarjan 1972) that have more than one file."""
    known = modules(source)
    edges = {name: modules_of(path, source, for_checkers=types) & known.keys() - {name} for name, path in known.items()}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in edges[name]:
            if other not in order:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(set(members))

    for name in edges:
        if name not in order:
            visit(name)
    return found


def test_no_files_import_each_other_at_run_time() -> None:
    assert circles(SOURCE, types=False) == []


def test_how_many_files_know_each_other() -> None:
    sizes: dict[str, list[int]] = {}
    for group in circles(SOURCE, types=True):
        sizes.setdefault(min(group).partition(".")[0], []).append(len(group))
    assert {floor: sorted(found, reverse=True) for floor, found in sizes.items()} == FOR_TYPES


CIRCLE = [{"f.a", "f.b"}]


@pytest.mark.parametrize(
    ("imported", "at_run_time", "for_types"),
    [
        ("from .b import x", CIRCLE, CIRCLE),
        ("def late():\n    import penstock.f.b", CIRCLE, CIRCLE),
        ("if TYPE_CHECKING:\n    from .b import x", [], CIRCLE),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from .b import x", CIRCLE, CIRCLE),
        ("from .c import x", [], []),
    ],
)
def test_a_circle_is_seen(
    tmp_path: Path, imported: str, at_run_time: list[set[str]], for_types: list[set[str]]
) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.py").write_text(imported)
    (folder / "b.py").write_text("from .c import x\nfrom .a import y")
    (folder / "c.py").write_text("")
    assert circles(tmp_path, types=False) == at_run_time
    assert circles(tmp_path, types=True) == for_types
