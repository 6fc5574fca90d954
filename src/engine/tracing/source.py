"""Find the source of a function: its syntax tree, its file and its line."""

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class SourceLocation(NamedTuple):
    """The syntax tree of a function, and the file or notebook cell with its source.

    Attributes:
        node: the function in the tree of the whole file.
        filename: the name of the file, as in the code object.
        lines: the lines of the whole file; `lines[0]` is line 1.
        names: each name that the body loads, with the attributes behind it.
    """

    node: FunctionNode
    filename: str
    lines: list[str]
    names: tuple[tuple[str, ...], ...]


# A file may be edited after its functions were found.
_LOCATED: Final = WeakKeyDictionary[CodeType, SourceLocation]()


def locate(fn: FunctionType) -> SourceLocation | None:
    """Find the source of a function, once.

    Args:
        fn: a Python function or lambda, from a file or another source that `linecache` knows (a notebook cell, a
            doctest, a zip file).

    Returns:
        The location; None if there is no source, or if the file has changed and has no such function in this place.
    """
    code = fn.__code__
    if code in _LOCATED:
        return _LOCATED[code]
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, fn.__globals__)
    try:
        functions = _functions_by_line("".join(lines))
    except (SyntaxError, ValueError):  # not Python, perhaps since an edit, or with a null byte in it
        return None
    found = [node for node in functions.get(code.co_firstlineno, ()) if _name(node) == code.co_name]
    if len(found) > 1:  # several lambdas on one line: columns tell them apart
        spans = set(code.co_positions())
        found = [node for node in found if isinstance(node, ast.Lambda) and _span(node.body) in spans]
    if len(found) != 1:
        return None
    _LOCATED[code] = SourceLocation(found[0], code.co_filename, lines, tuple(_names_in(found[0].body)))
    return _LOCATED[code]


# Graphs are decorated module by module, so the next graph is usually in the same file as the last.
@lru_cache(maxsize=2)
def _functions_by_line(source: str) -> dict[int, list[FunctionNode]]:
    """Return all functions by the first line of their code objects, which is the line of the first decorator."""
    functions: dict[int, list[FunctionNode]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FunctionNode):
            line = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            functions.setdefault(line, []).append(node)
    return functions


def _names_in(tree: Iterable[ast.AST] | ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield each name that is loaded in a syntax tree, with the attributes behind it."""
    waiting = [tree] if isinstance(tree, ast.AST) else [*tree]
    while waiting:
        node, names = waiting.pop(), list[str]()
        while isinstance(node, ast.Attribute):
            # An assignment reads only the object whose attribute it sets.
            names = [node.attr, *names] if isinstance(node.ctx, ast.Load) else []
            node = node.value
        if isinstance(node, ast.Name):
            yield (node.id, *names)
        waiting.extend(ast.iter_child_nodes(node))


def _name(node: FunctionNode) -> str:
    return "<lambda>" if isinstance(node, ast.Lambda) else node.name


def _span(node: ast.expr) -> tuple[int | None, int | None, int | None, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
