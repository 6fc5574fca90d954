"""The reference has every public name, and pictures and links lead to what is there."""

import ast
import asyncio
import re
import types
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, blocks_of, run_block

SOURCE = ROOT / "src"
MODULES = {
    "penstock": SOURCE,
    "penstock.devices": SOURCE / "devices",
    "penstock.engine": SOURCE / "engine",
    "penstock.telemetry": SOURCE / "telemetry",
    "penstock.testing": SOURCE / "testing",
}
PICTURE = ROOT / "docs/assets/report.svg"
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)[^)]*\)|src=\"([^\"]+)\"")


def public_names() -> list[str]:
    """Returns what the public modules export with `X as X`, and what they define themselves."""
    names: list[str] = []
    for module, folder in MODULES.items():
        body = ast.parse((folder / "__init__.py").read_text()).body
        late = [statement for block in body if isinstance(block, ast.If) for statement in block.body]
        for statement in (*body, *late):
            if isinstance(statement, ast.ImportFrom):
                found = [alias.name for alias in statement.names if alias.asname == alias.name]
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found = [statement.name]
            else:
                continue
            names += [f"{module}.{name}" for name in found if not name.startswith("_")]
    return names


def documented() -> set[str]:
    pages = [page.read_text() for page in (ROOT / "docs/reference").glob("*.md")]
    return {name for page in pages for name in DIRECTIVE.findall(page)}


def drawn() -> str:
    """Returns the picture of the graph in the README, as a notebook would show it."""
    module = types.ModuleType("readme")
    program = next(block for block in blocks_of((ROOT / "README.md").read_text()) if block.language == "python")
    with asyncio.Runner() as runner:
        run_block(program, module, ROOT / "README.md", runner)
    return f"{module.report._repr_svg_()}\n"


def test_the_public_names_are_found() -> None:
    assert {"penstock.node", "penstock.engine", "penstock.engine.run", "penstock.testing.replace"} <= set(
        public_names()
    )


@pytest.mark.parametrize("name", public_names())
def test_public_name_is_in_the_reference(name: str) -> None:
    # Of a module, what is in it.
    assert name in documented() or any(entry.startswith(f"{name}.") for entry in documented())


def test_the_picture_of_the_readme_is_that_of_its_program() -> None:
    assert PICTURE.read_text() == drawn(), "draw it anew: python -m tests.docs.test_reference"


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_of_the_documentation_lead_somewhere(page: str) -> None:
    # Of those in docs/, `mkdocs build --strict` checks the links.
    targets = [Path(first or second) for first, second in LINK.findall((ROOT / page).read_text())]
    assert [target for target in targets if not (ROOT / target).exists()] == []


if __name__ == "__main__":
    PICTURE.write_text(drawn())
