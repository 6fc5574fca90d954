"""Drawings of a graph: text for terminals, Mermaid for Markdown, Graphviz, and SVG for notebooks.

All four take a `Drawing` and are pure, deterministic and free of recursion. Text and SVG also show what the nodes of a
running graph are doing. `framed` makes a picture of any elements.
"""

from .languages import to_dot as to_dot
from .languages import to_mermaid as to_mermaid
from .parts import in_parts as in_parts
from .svg import BoxMark as BoxMark
from .svg import EdgeMark as EdgeMark
from .svg import Marks as Marks
from .svg import framed as framed
from .svg import to_figure as to_figure
from .svg import to_svg as to_svg
from .text import to_text as to_text

__all__ = ["framed", "to_dot", "to_mermaid", "to_svg", "to_text"]
