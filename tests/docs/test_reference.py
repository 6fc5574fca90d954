"""Pictures, links and indices lead to existing files; tests/house compares the reference with the public names."""

import asyncio
import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import picture, tables
from tests.docs.snippets import ROOT, blocks_of, run_block

PICTURE = ROOT / "docs/assets/report.svg"
LINK = re.compile(r"\]\((?!https?://)([^)#]+)[^)]*\)|src=\"([^\"]+)\"")


def drawn() -> str:
    """Returns the picture of the graph in the README, as a notebook would show it."""
    module = types.ModuleType("readme")
    program = next(block for block in blocks_of((ROOT / "README.md").read_text()) if block.language == "python")
    with asyncio.Runner() as runner:
        run_block(program, module, ROOT / "README.md", runner)
    return f"{module.report._repr_svg_()}\n"


def test_the_picture_of_the_readme_is_that_of_its_program() -> None:
    assert PICTURE.read_text() == drawn(), "draw it anew: python -m tests.docs.test_reference"


@pytest.mark.parametrize(
    ("made", "command"), [(tables.pages, "benchmarks.tables"), (picture.pictures, "benchmarks.picture")]
)
def test_tables_and_pictures_of_measurements_are_those_of_the_committed_results(
    made: Callable[[], dict[Path, str]], command: str
) -> None:
    for path, text in made().items():
        assert path.read_text() == text, f"make {path.name} anew: python -m {command}"


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_of_the_documentation_lead_somewhere(page: str) -> None:
    # `mkdocs build --strict` checks the links of pages in docs/.
    targets = [Path(first or second) for first, second in LINK.findall((ROOT / page).read_text())]
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_each_task_is_in_the_index_and_in_the_navigation() -> None:
    pages = [page.name for page in (ROOT / "docs/how-to").glob("*.md") if page.name != "index.md"]
    index = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/how-to/index.md").read_text())
    navigation = re.findall(r": how-to/([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(index) == sorted(pages), "add it to the groups of docs/how-to/index.md"
    assert navigation == index, "the navigation has the order of the index"


if __name__ == "__main__":
    PICTURE.write_text(drawn())
