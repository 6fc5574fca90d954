"""Job times: what the time of one job went into, while a profile is taken."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ...telemetry.profiling import registry
from ...telemetry.profiling.device_seconds import DeviceSeconds
from ...telemetry.profiling.timelines.device_work import DeviceWork, DeviceWorkKind
from ..jax_types import are_ready, wait_until_ready
from ..programs.signature import is_device_array, is_random_key
from ..untyped_jax import jax

if TYPE_CHECKING:
    from ..programs.executable import Executable
    from .device_call import DeviceCall

# Items of a batch that a timeline follows: more lines than these nobody can tell apart.
_FOLLOWED: Final = 64


class _Part(NamedTuple):
    kind: DeviceWorkKind
    began: float
    ended: float


class JobTimes:
    """What the time of one job went into.

    Its methods are called on the threads of the device and of the compiler, one after the other.
    """

    __slots__ = ("_compile_began", "_compile_seconds", "_parts", "_placed_at", "_placing_began", "_put")

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._compile_began: float | None = None
        self._compile_seconds = 0.0
        self._placing_began = self._placed_at = 0.0
        self._put: list[Any] = []

    def compile_begins(self) -> None:
        """It waits for its program."""
        self._compile_began = perf_counter()

    def compile_ended(self) -> None:
        """It has its program, or will never have one."""
        if self._compile_began is not None:
            self._compile_seconds += perf_counter() - self._compile_began
            self._compile_began = None

    def place(
        self, executable: "Executable", args: tuple[Any, ...], around: Callable[[int], AbstractContextManager[None]]
    ) -> tuple[Any, ...]:
        """Return what `executable.transferred` does, and note what is on its way from now on."""
        self._placing_began = perf_counter()
        placed = executable.transferred(args, around)
        self._placed_at = perf_counter()
        if placed is not args:
            before: list[Any] = jax.tree.leaves(args)
            self._put = [
                leaf for leaf, old in zip(jax.tree.leaves(placed), before, strict=True) if leaf is not old
            ]  # fmt: skip
        return placed

    def wait(self, inputs: Iterable[Any], given: Sequence[Any], busy_until: float) -> None:
        """Block until what the job gives is ready.

        Args:
            inputs: what it reads.
            given: what it gives.
            busy_until: when what was enqueued before it was ready, in seconds.

        Raises:
            JaxRuntimeError: it failed.
        """
        arrived = self._placed_at
        put = [array for array in self._put if not array.is_deleted()]
        self._put = []
        if put:
            began = self._placing_began
            # What is there by now has come while the device was busy with something else, nobody knows when.
            if not are_ready(put):
                with suppress(Exception):  # whoever reads it fails with that, too, if anybody does
                    wait_until_ready(filter(is_device_array, inputs))
                    began = max(began, perf_counter() if not are_ready(put) else began)
                    wait_until_ready(put)
                arrived = perf_counter()
            self._parts.append(_Part("to device", began, arrived))
        try:
            wait_until_ready(given)
        finally:
            ended = perf_counter()
            # A device computes one thing at a time, in the order in which they were enqueued.
            self._parts.append(_Part("compute", min(max(arrived, busy_until), ended), ended))

    def fetch(self, given: Any) -> Any:
        """Return a pytree of arrays as one of NumPy's."""
        began = perf_counter()
        fetched = jax.tree.map(_on_host, given)
        self.fetched(began)
        return fetched

    def fetched(self, began: float) -> None:
        """Arrays have come from a device, since this moment."""
        self._parts.append(_Part("from device", began, perf_counter()))

    def tell(self, node: str, device: str, calls: "Sequence[DeviceCall]", rows: int, padding_share: float) -> None:
        """Tell the profiles, once the job is over; on the loop.

        Args:
            node: whose program it was.
            device: where it ran.
            calls: whom it was for.
            rows: of the batch, with those of padding; 0 for no batch.
            padding_share: how much of the elements was padding.
        """
        self.compile_ended()
        frames = tuple([call.frame.identity for call in calls[:_FOLLOWED] if call.frame is not None])
        for kind, began, ended in self._parts:
            registry.device_worked(
                DeviceWork(kind, device, node, began, ended, len(calls), rows, padding_share, frames)
            )  # fmt: skip
        compute = sum([part.ended - part.began for part in self._parts if part.kind == "compute"])
        transfer = sum([part.ended - part.began for part in self._parts if part.kind != "compute"])
        seconds = DeviceSeconds(self._compile_seconds, transfer, compute)
        for recorder, count in Counter([call.recorder for call in calls]).items():
            if recorder is not None:
                recorder.device = recorder.device.plus(seconds.for_items(count))


def _on_host(leaf: Any) -> Any:
    """Return an array as one of NumPy; typed random keys have no such, and are fetched where they are taken apart."""
    return leaf if is_random_key(leaf) else np.asarray(leaf)
