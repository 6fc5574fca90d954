"""Batch job: several calls of one node as one run of a vectorised program, and what batches held."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from ...telemetry import metrics, names
from ...telemetry.metrics import series
from ..dispatch.device_queue import DeviceCall
from ..dispatch.jobs import ORIGINS, Job, Route
from ..programs.compiling import Program
from .stacking import Item, Stacked, Stacker, batch_size, on_host, split


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


@dataclass(frozen=True)
class BatchLayout:
    """How the calls of a node become the arguments of its vectorised program.

    Attributes:
        name: of the node, for errors.
        stacker: stacks the arguments that differ from call to call.
        stacked: their positions among the arguments of the program; those of the masks follow them all.
        shared: positions of what is the same for all calls of a batch: parameters and static arguments.
        parameters: which of these are parameters.
        sizes: of batches, in ascending order.
    """

    name: str
    stacker: Stacker
    stacked: tuple[int, ...]
    shared: tuple[int, ...]
    parameters: tuple[int, ...]
    sizes: tuple[int, ...]

    def arguments(self, stacked: Stacked, shared: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the program: stacked ones, those of all calls, and masks."""
        args: list[Any] = [None] * (len(self.stacked) + len(self.shared))
        for position, argument in zip(self.stacked, stacked.arguments, strict=True):
            args[position] = argument
        for position, argument in zip(self.shared, shared, strict=True):
            args[position] = argument
        return (*args, *stacked.masks)


class BatchItem(NamedTuple):
    """The arguments of one call, looked at before they are stacked.

    Attributes:
        item: those that are stacked.
        shared: the others.
    """

    item: Item
    shared: tuple[Any, ...]


class BatchJob(Job):
    """Runs a vectorised program for several calls.

    Args:
        program: it.
        route: its way.
        calls: the calls; the only argument of each is a `BatchItem`, and all are of one group.
        on_over: called on the loop when it is over.
        layout: how they become the arguments of the program.
        size: rows of the batch; by default the smallest size that holds them.

    Attributes:
        stacked: what was stacked, once it was.
    """

    _is_batch = True

    def __init__(
        self,
        program: Program,
        route: Route,
        calls: list[DeviceCall],
        on_over: "Callable[[BatchJob], None]",
        layout: BatchLayout,
        size: int | None = None,
    ) -> None:
        super().__init__(program, route, calls, on_over)
        self._layout = layout
        self._size = size or batch_size(len(calls), layout.sizes)
        self.stacked: Stacked | None = None

    @property
    def rows(self) -> int | None:
        """Rows of the batch, padding included."""
        return self._size

    def arguments(self) -> tuple[Any, ...]:
        """Stack the arguments of the calls."""
        layout = self._layout
        shared = self.calls[0].args[0].shared
        self.stacked = stacked = layout.stacker.stack(self._items(), self._size)
        return self._place(layout.arguments(stacked, shared), layout.parameters)

    def _items(self) -> list[Item]:
        """Return what is to be stacked. Where an array of a call is an error, that call fails alone."""
        calls = self.calls
        given: list[Item] = [call.args[0].item for call in calls]
        if all(item.is_on_host for item in given):  # nearly always
            return given
        items: list[Item] = []
        self.calls = list[DeviceCall]()
        failed: BaseException | None = None
        began = perf_counter()
        for call, item in zip(calls, given, strict=True):
            try:
                items.append(on_host(item))
                self.calls.append(call)
            except Exception as error:  # noqa: BLE001 - whatever the computation of an argument has raised
                failed = ORIGINS.cause_of(error.with_traceback(None), item.arrays)
                self._route.mailbox.post(call.fail, failed)
        if self.times is not None:
            self.times.fetched(began)
        if not items:
            assert failed is not None
            try:
                raise failed
            finally:
                del failed  # it refers to this frame
        return items

    def padding(self) -> tuple[int, float]:
        """Rows of the batch, with those of padding, and how much of its elements was padding."""
        stacked = self.stacked
        return (0, 0.0) if stacked is None else (stacked.size, stacked.padding_share)

    def results_of(self, given: Any) -> list[Any]:
        """Split what the program gave into rows."""
        assert self.stacked is not None
        if self.times is not None:
            given = self.times.fetch(given)
        return split(given, self.stacked, self._layout.name)
