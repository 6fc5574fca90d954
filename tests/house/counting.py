"""Counts the size of the source by folder, for the ratchets. `python -m tests.house.counting` prints the figures.

A line of code holds something that is neither a comment nor a docstring. A branch is an if, elif, conditional
expression, loop, except, case, and each further operand of `and` and `or`.
"""

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


@dataclass(frozen=True)
class Figures:
    """The size of a folder.

    Attributes:
        lines: lines of code.
        largest_file: lines of code of its largest file.
        slots: the most slots of one class, without the slots of its bases.
        branches: the most branches of one function.
        broad_excepts: how many handlers catch `Exception` or `BaseException`.
    """

    lines: int
    largest_file: int
    slots: int
    branches: int
    broad_excepts: int


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path.name)


@cache
def code_lines(path: Path) -> int:
    """Returns how many lines of a file hold code."""
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in _NO_CODE:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                match node.body[:1]:
                    case [ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last))]:
                        used.difference_update(range(first, last + 1))
                    case _:
                        pass
            case _:
                pass
    return len(used)


def branches_by_function(path: Path) -> dict[str, int]:
    """Returns how many branches each function of a file has, with the branches of its inner functions."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, name: str) -> int:
        count = isinstance(node, _BRANCHES) + (len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0)
        for child in ast.iter_child_nodes(node):
            inside = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = f"{name}.{child.name}".lstrip(".")
            more = visit(child, inside)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[inside] = max(more, found.get(inside, 0))
            count += more
        return count

    visit(tree_of(path), "")
    return found


def slots_of(path: Path) -> dict[str, int]:
    """Returns how many slots each class of a file declares."""
    found: dict[str, int] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                match statement:
                    case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                        found[node.name] = len(getattr(value, "elts", [value]))
                    case _:
                        pass
    return found


def broad_excepts_of(path: Path) -> int:
    return sum(_is_broad(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler))


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


@cache
def figures_by_folder(source: Path = SOURCE) -> dict[str, Figures]:
    """Returns the figures of each folder of the source; "." stands for the files beside the folders."""
    folders: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        folder, *rest = path.relative_to(source).parts
        folders.setdefault(folder if rest else ".", []).append(path)
    return {
        folder: Figures(
            lines=sum(map(code_lines, paths)),
            largest_file=max(map(code_lines, paths)),
            slots=max((count for path in paths for count in slots_of(path).values()), default=0),
            branches=max((count for path in paths for count in branches_by_function(path).values()), default=0),
            broad_excepts=sum(map(broad_excepts_of, paths)),
        )
        for folder, paths in sorted(folders.items())
    }


@cache
def internals_by_folder(tests: Path = TESTS) -> dict[str, int]:
    """Returns, for each folder of tests, how many files import from inside a package, or a private name."""
    found: dict[str, int] = {}
    for path in sorted(tests.rglob("*.py")):
        folder = path.relative_to(tests).parts[0]
        is_one = "from penstock." in path.read_text() and any(map(_is_of_internals, ast.walk(tree_of(path))))
        found[folder] = found.get(folder, 0) + is_one
    return {folder: count for folder, count in found.items() if count}


def _is_of_internals(node: ast.AST) -> bool:
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("penstock."):
        return False
    return (node.module or "").count(".") > 1 or any(alias.name.startswith("_") for alias in node.names)


if __name__ == "__main__":
    for each, found in figures_by_folder().items():
        print(f'    "{each}": {found},')
    for each, number in internals_by_folder().items():
        print(f'    "{each}": {number},')
