"""How statistics are shown: one model of a table, and what it looks like as text, with rich, and in a notebook."""

from .bottleneck import Bottleneck as Bottleneck
from .rendered import Rendered as Rendered
