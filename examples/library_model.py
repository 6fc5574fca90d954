"""The standard library as a chat model: it finds functions for a question, and quotes them. It needs no weights.

make serve                                        or: penstock serve examples.library_model:library
curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d '{"model": "library", "stream": true,
    "messages": [{"role": "user", "content": "Which function finds the most common elements?"}]}'
"""

import inspect
import pydoc
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import penstock as ps

MODULES = (
    "asyncio", "base64", "bisect", "calendar", "collections", "contextlib", "copy", "csv", "datetime", "difflib",
    "fnmatch", "functools", "glob", "gzip", "hashlib", "heapq", "html", "io", "itertools", "json", "math", "operator",
    "os", "os.path", "pathlib", "pickle", "random", "re", "shlex", "shutil", "socket", "sqlite3", "statistics",
    "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time", "timeit", "traceback",
    "typing", "urllib.parse", "uuid", "weakref", "zipfile", "zlib",
)  # fmt: skip
SHOWN = 3  # functions in an answer


class Function(NamedTuple):
    """A function of the standard library, or a method of a class in it."""

    name: str
    signature: str
    text: str
    words: Counter[str]


def words_of(text: str) -> list[str]:
    """Return the words of a text, without endings such as "ing" and "s"."""
    return [re.sub(r"(ing|ed|es|s)$", "", word) for word in re.findall(r"[a-z]{3,}", text.lower().replace("_", " "))]


@cache
def functions() -> list[Function]:
    """Return all functions; the first call takes a second."""
    return [one for name in MODULES for one in functions_of(name, import_module(name))]


def functions_of(path: str, owner: Any) -> Iterator[Function]:
    """Yield the documented functions of a module or a class."""
    members: dict[str, Any] = {**owner.__dict__}  # a copy: another module may be imported meanwhile
    for name, value in members.items():
        inside, text = f"{path}.{name}", inspect.getdoc(value) or ""
        if name.startswith("_") or not text:
            continue
        if isinstance(value, type):
            if inspect.ismodule(owner) and value.__module__.lstrip("_") == path:
                yield from functions_of(inside, value)
        elif callable(value):
            try:
                signature = str(inspect.signature(value))
            except (ValueError, TypeError):
                signature = "(...)"
            said = text.partition("\n\n")[0]
            yield Function(inside, signature, said, Counter(words_of(f"{name} {name} {said}")))


@ps.node(runs_on="thread")
def find(messages: list[dict[str, Any]]) -> list[Function]:
    """Return the functions with most words of the last question; rarer words count more."""
    question = str(messages[-1].get("content") or "")
    asked, known = set(words_of(question)), functions()
    rarity = {word: 1 / (1 + sum(word in one.words for one in known)) ** 0.5 for word in asked}
    scores = [(sum(rarity[word] for word in asked & one.words.keys()), -len(one.text), one) for one in known]
    return [one for score, _, one in sorted(scores, reverse=True, key=lambda one: one[:2])[:SHOWN] if score > 0]


@ps.node
async def quote(found: list[Function]) -> AsyncIterator[str]:
    """Give the text of the found functions, word by word."""
    if not found:
        yield "I know only the standard library, and nothing in it is about that."
    for one in found:
        for word in re.findall(r"\S+\s*", f"{one.name}{one.signature}\n    {pydoc.plain(one.text)}\n\n"):
            yield word


@ps.graph
async def library(messages: list[dict[str, Any]]) -> AsyncIterator[str]:
    """Answer a question with functions of the standard library."""
    return quote(find(messages))
