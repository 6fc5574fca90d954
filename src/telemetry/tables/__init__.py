"""Records shown as tables: one model of a table, and what it looks like as text, with rich, and in a notebook."""

from .rendered import Rendered as Rendered
from .table import Column as Column
from .table import Table as Table
