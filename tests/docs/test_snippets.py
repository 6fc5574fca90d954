"""Every Python snippet of the README and the documentation runs, and prints what the page says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, blocks_of, check_page, has_snippets, is_timed, run_page
from tests.forked import Forks, forking

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with forking("jax", "tests.docs.snippets") as found:  # the import of JAX takes longer than most pages
        yield found


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.timed] * is_timed(page), id=page.name)
        for page in PAGES
        if has_snippets(page)
    ],
)
def test_snippets_of_a_page_run_and_print_what_it_says(page: Path, forks: Forks) -> None:
    check_page(page, forks)


def test_no_python_hides_from_this_test_under_another_name() -> None:
    names = {"py", "py3", "python3", "pycon", "ipython"}
    assert [page for page in PAGES for block in blocks_of(page.read_text()) if block.language in names] == []


def test_a_page_that_is_wrong_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.snippets.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:6 says\n2\n\nbut the snippet before it printed\n1"):
        run_page(page)
    page.write_text("A list:\n\n- ```python\n  print(0)\n  ```\n\n    ```python\n    await nothing()\n    ```\n")
    with pytest.raises(NameError) as caught:
        run_page(page)
    assert caught.value.__notes__ == ["in the snippet at page.md:8"]


def test_a_page_that_shows_times_runs_in_virtual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks
) -> None:
    monkeypatch.setattr("tests.docs.snippets.ROOT", tmp_path)
    page = tmp_path / "page.md"
    snippet = "import asyncio\nawait asyncio.sleep(3600)\nprint(asyncio.get_running_loop().time())\n"
    page.write_text(f"<!-- snippets: virtual time -->\n\n```python\n{snippet}```\n\n```text\n3600.0\n```\n")
    check_page(page, forks)
