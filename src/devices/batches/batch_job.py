"""Batch job: several calls of one node as one run of a vectorised program, and what batches held."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from ..dispatch.device_queue import DeviceCall
from ..dispatch.jobs import ORIGINS, Job, Route
from ..programs.compiling import Program
from .device_batch import batch_size
from .stacking import Item, Stacked, Stacker, on_host, split


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
