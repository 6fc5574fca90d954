"""Enqueue order: what spans several devices is enqueued on all of them before anything else is.

A program with collectives waits on each of its devices for the others. Were two of them enqueued in different orders on
two devices, they would wait for each other for ever. What runs on one device only waits for nothing, and may overtake.
"""

import threading
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from ..jax_types import Device

Locks: TypeAlias = tuple[threading.Lock, ...]


class EnqueueOrder:
    """Locks of the process's devices; meshes may overlap in any way, and threads may be of any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, int], threading.Lock] = {}

    def locks(self, devices: "Iterable[Device]") -> Locks:
        """Return what to hold while something is enqueued on these devices: nothing for a single one."""
        # All take them in one order, or two threads would each have what the other one needs.
        keys = sorted({(device.platform, device.id) for device in devices})
        if len(keys) < 2:
            return ()
        with self._lock:
            return tuple([self._locks.setdefault(key, threading.Lock()) for key in keys])


@contextmanager
def holding(locks: Locks) -> Generator[None]:
    """Hold locks of `EnqueueOrder.locks`; never while others are held."""
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


# One for the process, as the devices are.
ENQUEUE_ORDER: Final = EnqueueOrder()
