"""The data for measuring feeds: 2,000 different files of Python, and 100,000 records in memory.

This module imports nothing heavy, because the worker processes of every loader import it.
"""

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FILES, FILES_BATCH = 2_000, 40  # so that an epoch is a whole number of batches
RECORDS, RECORDS_BATCH, RECORD_BYTES = 100_000, 256, 1_000
PIECE, LARGEST = (
    32 * 1024,
    128 * 1024,
)  # larger files are cut into pieces; larger pieces, of one statement, are left out
LENGTH = 1024  # tokens of a file that go into a batch
WORDS = re.compile(r"\w+|[^\w\s]")
VOCABULARY = 32_768


def write_files(folder: Path) -> list[str]:
    """Write the standard library into a folder, in pieces that Python can parse; return the paths."""
    pieces = {piece for piece in _pieces(Path(sysconfig.get_path("stdlib"))) if len(piece) <= LARGEST}
    texts = sorted(pieces, key=lambda text: zlib.crc32(text.encode()))[:FILES]
    paths = [folder / f"{number:04}.py" for number in range(FILES)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return [str(path) for path in paths]


def _pieces(library: Path) -> Iterator[str]:
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            statements = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue  # tests of Python's own parser
        lines = text.splitlines(keepends=True)
        yield from _cut(lines, [statement.end_lineno or 0 for statement in statements])


def _cut(lines: list[str], ends: list[int]) -> Iterator[str]:
    """Yield the text in pieces that end at the end of a statement."""
    begin = 0
    for end in ends:
        piece = "".join(lines[begin:end])
        if len(piece) >= PIECE:
            yield piece
            begin = end
    if rest := "".join(lines[begin:]):
        yield rest


def load(path: str) -> tuple[np.ndarray, int]:
    """Read, parse and tokenise a file; return the ids of its first tokens, and its number of definitions."""
    text = Path(path).read_text(encoding="utf-8")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    definitions = sum(isinstance(node, kinds) for node in ast.walk(ast.parse(text)))
    ids = [zlib.crc32(word.encode()) % VOCABULARY for word in WORDS.findall(text)]
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(ids)] = ids[:LENGTH]
    return tokens, definitions


def records() -> np.ndarray:
    """Return records of random bytes."""
    return np.random.default_rng(0).integers(256, size=(RECORDS, RECORD_BYTES), dtype=np.uint8)
