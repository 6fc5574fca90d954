"""Drawings of a graph: text for terminals, Mermaid for Markdown, Graphviz, and SVG for notebooks.

All four take a `Drawing` and are pure, deterministic and free of recursion. Text and SVG also show what the nodes of a
running graph are doing.
"""

from .languages import to_dot as to_dot
from .languages import to_mermaid as to_mermaid
from .model import Drawing as Drawing
from .model import DrawnNode as DrawnNode
from .model import Edge as Edge
from .model import Kind as Kind
from .svg import to_svg as to_svg
from .text import to_text as to_text
