"""The way through a graph and its bodies that languages with nested blocks share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .layout import topological
from .model import Drawing, DrawnNode


@dataclass(frozen=True, slots=True)
class Block:
    """A graph or a body, with names (`n0`, `n1`, ...) for its nodes that are unique in the whole outline.

    `number` and `depth` are 0 for the graph itself; `driver` is the name of the node that drives a body.
    """

    number: int
    depth: int
    drawing: Drawing
    nodes: list[DrawnNode]
    names: dict[str, str]
    driver: str

    @property
    def indent(self) -> str:
        """Blanks before its lines; no more for bodies nested deeper than anyone reads."""
        return "    " * min(self.depth + 1, 8)


def outline(drawing: Drawing) -> Iterator[tuple[Literal["open", "close"], Block]]:
    """Yield where each block opens and, after all of its bodies, closes.

    Raises:
        ValueError: As `topological` says.
    """
    blocks = named = 0
    stack: list[tuple[Drawing, str, int] | Block] = [(drawing, "", 0)]
    while stack:
        top = stack.pop()
        if isinstance(top, Block):
            yield "close", top
            continue
        current, driver, depth = top
        order = topological(current)
        names = {node.id: f"n{named + at}" for at, node in enumerate(order)}
        named += len(order)
        block = Block(blocks, depth, current, order, names, driver)
        blocks += 1
        yield "open", block
        stack.append(block)
        stack.extend((body, names[owner_id], depth + 1) for owner_id, body in reversed(current.bodies))
