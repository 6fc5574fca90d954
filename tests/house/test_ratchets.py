"""Sizes of folders, which may only shrink: a change that makes a folder smaller writes the smaller number here.

`python -m tests.house.counting` prints the present figures. A change that needs more lines says which folder takes
them; the other figures are not raised. A new folder begins with its own figures.
"""

from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

from tests.house.counting import Figures, figures_by_folder, internals_by_folder

LIMITS = {
    ".": Figures(lines=889, largest_file=424, slots=0, branches=9, broad_excepts=2),
    "_cli": Figures(lines=408, largest_file=137, slots=0, branches=9, broad_excepts=0),
    "actors": Figures(lines=6111, largest_file=488, slots=28, branches=38, broad_excepts=18),
    "advice": Figures(lines=785, largest_file=243, slots=0, branches=12, broad_excepts=0),
    "cluster": Figures(lines=1342, largest_file=318, slots=4, branches=13, broad_excepts=9),
    "consume": Figures(lines=857, largest_file=296, slots=0, branches=14, broad_excepts=2),
    "data": Figures(lines=1265, largest_file=505, slots=0, branches=11, broad_excepts=3),
    "devices": Figures(lines=6054, largest_file=588, slots=14, branches=13, broad_excepts=7),
    "durable": Figures(lines=2129, largest_file=626, slots=0, branches=18, broad_excepts=6),
    "engine": Figures(lines=14137, largest_file=609, slots=20, branches=23, broad_excepts=29),
    "insight": Figures(lines=2086, largest_file=465, slots=0, branches=15, broad_excepts=0),
    "saving": Figures(lines=1852, largest_file=592, slots=0, branches=20, broad_excepts=2),
    "serving": Figures(lines=1661, largest_file=322, slots=2, branches=18, broad_excepts=2),
    "studio": Figures(lines=2964, largest_file=358, slots=0, branches=13, broad_excepts=1),
    "telemetry": Figures(lines=1863, largest_file=402, slots=8, branches=13, broad_excepts=4),
    "testing": Figures(lines=504, largest_file=154, slots=1, branches=5, broad_excepts=1),
    "workers": Figures(lines=1179, largest_file=441, slots=0, branches=16, broad_excepts=9),
}

# Test files of each folder that import a name that is not public.
TESTS_OF_INTERNALS = {
    "actors": 8,
    "advice": 2,
    "devices": 12,
    "durable": 7,
    "engine": 3,
    "house": 1,
    "runtime": 1,
    "saving": 3,
    "serving": 1,
    "studio": 6,
    "telemetry": 4,
    "workers": 1,
}

# How far a figure may be below its limit before the limit must be lowered.
SLACK = {"lines": 50, "largest_file": 20}


def test_each_folder_has_limits_and_is_no_larger_than_it_was() -> None:  # one test, since to count takes seconds
    found = figures_by_folder()
    assert found.keys() == LIMITS.keys()
    for folder, field in product(LIMITS, fields(Figures)):
        figure, limit = getattr(found[folder], field.name), getattr(LIMITS[folder], field.name)
        assert figure <= limit, f"{folder}: {field.name} was raised"
        assert limit - figure <= SLACK.get(field.name, 0), f"{folder}: write the smaller number of {field.name} here"


def test_no_more_tests_than_before_know_the_inside() -> None:
    found = internals_by_folder()
    raised = {folder: count for folder, count in found.items() if count > TESTS_OF_INTERNALS.get(folder, 0)}
    assert raised == {}, "test what is public"
    assert found == TESTS_OF_INTERNALS, "write the smaller number here"


COUNTED = '''"""Three lines
that do not count."""

import os  # one


class Some:
    """Neither does this."""

    __slots__ = ("a", "b", "c")

    def method(self, x):
        text = """a text
        does"""
        for y in x if x and y or x else ():
            try:
                pass
            except (OSError, Exception):
                pass
            except ValueError:
                pass
        def inner():
            return 1 if x else 2
'''


def test_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/one.py").write_text(COUNTED)
    (tmp_path / "folder/two.py").write_text("x = 1\n\n# none\n")
    (tmp_path / "three.py").write_text("try:\n    pass\nexcept:\n    pass\n")
    # Branches: the loop, the conditional expressions, two further operands, the two excepts.
    assert figures_by_folder(tmp_path) == {".": Figures(4, 4, 0, 0, 1), "folder": Figures(16, 15, 3, 7, 1)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from penstock import engine", {}),
        ("from penstock.engine import Engine", {}),
        ("from penstock.engine.graph import Call", {"one": 1}),
        ("from penstock._cli import main", {}),
        ("from penstock.engine import _hidden", {"one": 1}),
    ],
)
def test_a_test_of_the_inside_is_seen(tmp_path: Path, text: str, expected: dict[str, int]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/test_one.py").write_text(text)
    assert internals_by_folder(tmp_path) == expected
