"""Records that show themselves as tables: printed, with rich, and in a notebook. The code for that is loaded late."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .tables import Table


class Rendered(ABC):
    """Base class of records that `str()`, rich and notebooks show as a table; the `repr` is that of a dataclass.

    A record that is shown as a sentence overrides `__str__`.
    """

    @abstractmethod
    def _table(self) -> "Table":
        """Return the table to show."""

    def __str__(self) -> str:
        from .tables import to_text

        return to_text(self._table())

    def __rich__(self) -> "RenderableType":
        from .tables import to_rich

        return to_rich(self._table())

    def _repr_html_(self) -> str:
        from .tables import to_html

        return to_html(self._table())
