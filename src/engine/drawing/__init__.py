"""Drawings of a graph: text for terminals, Mermaid for Markdown, Graphviz, and SVG for notebooks.

All four take a `Drawing`, are pure, deterministic and free of recursion.
"""

from .dot import to_dot as to_dot
from .mermaid import to_mermaid as to_mermaid
from .model import Drawing as Drawing, DrawnNode as DrawnNode, Edge as Edge
from .text import to_text as to_text
