"""Each copy of a function that is marked "written out" has a line in the decision that says what it is worth."""

import re
from pathlib import Path

from penstock import engine

SOURCE = Path(engine.__file__).parents[1]
PAGE = Path(__file__).parents[2] / "docs/decisions/0032-what-a-fast-path-is-worth.md"


def marks() -> list[tuple[str, frozenset[str]]]:
    """Return the file of each comment that says "written out", and the names of functions in the comment before that.

    A comment goes over several lines, whose names count up to these words.
    """
    found: list[tuple[str, frozenset[str]]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = re.sub(r"\n *# ", " ", path.read_text())  # one line for each comment, joined to the line before
        for comment in re.findall(r"[^\n]*\bwritten out\b", text):
            if "`" in comment:
                names = re.findall(r"`([\w.]+)`", comment.rpartition("  ")[2])
                found.append((path.relative_to(SOURCE).as_posix(), frozenset(names)))
    return found


def test_each_copy_that_is_written_out_has_a_line_in_the_decision() -> None:
    table = PAGE.read_text().partition("| file |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    decided = [
        (file.strip("`"), frozenset(re.findall(r"`([\w.]+)`", what.partition(":")[0]))) for file, what, *_ in rows
    ]
    assert sorted(marks(), key=repr) == sorted(decided, key=repr)
