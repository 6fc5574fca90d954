"""How much of what a device computes is padding."""

from dataclasses import dataclass

from .stacking import Stacked


@dataclass
class PaddingStatistics:
    """Counts what batches hold.

    Attributes:
        items: rows that were items.
        rows: rows, with those of padding.
        real_elements: elements of the items' arrays.
        elements: elements of the batches' arrays, with those of padding.
    """

    items: int = 0
    rows: int = 0
    real_elements: int = 0
    elements: int = 0

    def add(self, stacked: Stacked) -> None:
        """Count a batch."""
        self.items += stacked.count
        self.rows += stacked.size
        self.real_elements += stacked.real_elements
        self.elements += stacked.elements

    @property
    def padding_share(self) -> float:
        """Share of the elements that were padding, of rows or of lengths: 0 to 1."""
        return 1 - self.real_elements / self.elements if self.elements else 0.0
