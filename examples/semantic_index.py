"""The graphs of the semantic search: `fill` adds a file to two indexes, `ask` queries both.

Modules that worker processes import do not import this module, since it loads JAX.
"""

from pathlib import Path
from typing import NamedTuple, TypeAlias, overload

import jax
import numpy as np
import numpy.typing as npt

import penstock as ps
from examples.code_search import HITS, Definition, Index, parse, read
from examples.embedding import Vector, embed

# The longest text, in characters. Fewer than one text in a hundred is then longer than 64 tokens, which take twice the
# time.
MAX_CHARACTERS = 200


class Found(NamedTuple):
    """A definition, and how close its meaning is to a query: the cosine, at most 1."""

    definition: Definition
    closeness: float


Answer: TypeAlias = tuple[list[Found], list[Definition]]  # the best definitions by meaning, and by keywords


@ps.node
def choose(found: list[Definition], everything: bool) -> list[Definition]:
    """Return the definitions to search: public functions and classes with a docstring, without methods."""
    return [each for each in found if everything or (each.summary and not is_nested_or_private(each))]


@ps.node
def describe(found: Definition) -> str:
    """Return the text to embed: `tempfile mkdtemp(suffix, prefix, dir): Create and return a directory.`"""
    module = found.path.stem if found.path.stem != "__init__" else found.path.parent.name
    return f"{module} {found.signature}: {found.summary}"[:MAX_CHARACTERS]


@ps.graph
async def represent(found: Definition) -> jax.Array:
    return await embed(describe(found))


@ps.node(runs_on="thread")
class Meanings:
    """The vectors of all definitions so far. A stateful node has one item in it at a time, so it needs no lock."""

    def __init__(self) -> None:
        self._definitions: list[Definition] = []
        self._vectors: list[Vector] = []
        self._matrix: Vector | None = None

    @overload
    def __call__(self, chosen: list[Definition], vectors: list[jax.Array]) -> int: ...
    @overload
    def __call__(self, chosen: None, vectors: jax.Array) -> list[Found]: ...
    def __call__(self, chosen: list[Definition] | None, vectors: list[jax.Array] | jax.Array) -> int | list[Found]:
        return self._find(np.asarray(vectors)) if chosen is None else self._add(chosen, vectors)

    def _add(self, chosen: list[Definition], vectors: list[jax.Array] | jax.Array) -> int:
        self._definitions += chosen
        self._vectors += [np.asarray(vector) for vector in vectors]
        self._matrix = None
        return len(chosen)

    def _find(self, query: Vector) -> list[Found]:
        if not self._vectors:
            return []
        if self._matrix is None:
            self._matrix = np.stack(self._vectors)
        closeness: npt.NDArray[np.float32] = self._matrix @ query
        return [Found(self._definitions[number], float(closeness[number])) for number in (-closeness).argsort()[:HITS]]


@ps.node
def first(added: int, _added_too: int) -> int:
    return added


keywords = Index()
meanings = Meanings()


@ps.graph
async def fill(path: Path, everything: bool) -> int:
    """Add a file to both indexes; return how many of its functions and classes are searched."""
    chosen = choose(parse(path, read(path)), everything)
    vectors = await ps.map_each(represent, chosen)
    return first(keywords(chosen), meanings(chosen, vectors))


@ps.graph
async def ask(query: str) -> Answer:
    """Return the definitions that fit a query best, by its meaning and by its words."""
    return meanings(None, await embed(query)), keywords(query)


def is_nested_or_private(definition: Definition) -> bool:
    name = definition.signature.partition("(")[0]
    return "." in name or name.startswith("_")
