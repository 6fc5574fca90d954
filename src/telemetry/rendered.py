"""Records that can be looked at: printed, with rich, and in a notebook; what shows them is loaded when it is asked."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .tables import Table


class Rendered(ABC):
    """A record that is shown as a table; its `repr` stays that of a record.

    One that `str()` says in a sentence has a `__str__` of its own.
    """

    @abstractmethod
    def _table(self) -> "Table":
        """Return what is shown."""

    def __str__(self) -> str:
        from .tables import to_text

        return to_text(self._table())

    def __rich__(self) -> "RenderableType":
        from .tables import to_rich

        return to_rich(self._table())

    def _repr_html_(self) -> str:
        from .tables import to_html

        return to_html(self._table())
