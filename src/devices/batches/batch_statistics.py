"""What the batches of a node held, and how much of it was padding."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...telemetry import metrics, names
from ...telemetry.metrics import series

if TYPE_CHECKING:
    from .stacking import Stacked


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What the batches of a node held.

    Attributes:
        batches: batches that ran, those too that were tried again in parts.
        calls: rows that were calls.
        rows: rows, with those of padding.
        real_elements: elements of the arrays of the calls.
        elements: elements of the arrays of the batches, with those of padding.
    """

    batches: int
    calls: int
    rows: int
    real_elements: int
    elements: int

    @property
    def mean_size(self) -> float:
        """Calls in a batch, on average; 0 without a batch."""
        return self.calls / self.batches if self.batches else 0.0

    @property
    def padding_share(self) -> float:
        """Share of the elements that were padding, of rows or of lengths: 0 to 1."""
        return 1 - self.real_elements / self.elements if self.elements else 0.0


class BatchLog:
    """Counts the batches of a node, on all of its devices; the counters are those of `BatchStatistics`.

    Args:
        name: of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._batches = 0
        self._calls = 0
        self._rows = 0
        self._real_elements = 0
        self._elements = 0

    def add(self, stacked: "Stacked") -> None:
        """Count a batch."""
        self._batches += 1
        self._calls += stacked.count
        self._rows += stacked.size
        self._real_elements += stacked.real_elements
        self._elements += stacked.elements
        of = names.NODE, self._name
        padding = stacked.elements - stacked.real_elements
        metrics.add(
            [
                (series(names.METRIC_BATCH_RUNS, of), 1, None),
                (series(names.METRIC_BATCH_ITEMS, of), stacked.count, None),
                (series(names.METRIC_BATCH_ELEMENTS, of, (names.PADDING, False)), stacked.real_elements, None),
                (series(names.METRIC_BATCH_ELEMENTS, of, (names.PADDING, True)), padding, None),
            ]
        )

    def statistics(self) -> BatchStatistics:
        """Return a snapshot."""
        return BatchStatistics(self._batches, self._calls, self._rows, self._real_elements, self._elements)
