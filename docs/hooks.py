"""Lists the decision notes, so that a new one appears by being there."""

from pathlib import Path
from typing import Any


def _notes(docs_dir: str) -> list[Path]:
    return sorted((Path(docs_dir) / "decisions").glob("[0-9]*.md"))


def on_config(config: Any) -> Any:
    """Add the notes to the navigation."""
    for section in config.nav:
        if "Decisions" in section:
            section["Decisions"] += [f"decisions/{note.name}" for note in _notes(config.docs_dir)]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Add the list to the index of the notes."""
    if page.file.src_uri != "decisions/index.md":
        return markdown
    titles = {note.name: note.read_text().partition("\n")[0].removeprefix("# ") for note in _notes(config.docs_dir)}
    # The number in front of a title would begin a list of its own.
    listed = "\n".join(f"- [{title.replace('. ', ' – ', 1)}]({name})" for name, title in titles.items())
    return f"{markdown}\n{listed}\n"
