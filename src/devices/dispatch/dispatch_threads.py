"""The dispatch threads of the process: one for each device or mesh, there while somebody holds a lease on it."""

import threading
from collections.abc import Callable

from ..platform.placement import Placement
from ..platform.self_check import self_check
from .dispatch_thread import DispatchThread


class DispatchThreads:
    """Shares one dispatch thread per device or mesh between all Engines and event loops of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[Placement, tuple[DispatchThread, int]] = {}

    def acquire(self, placement: Placement) -> DispatchThread:
        """Return the thread of a device or mesh; it goes on until `release`."""
        with self._lock:
            thread, leases = self._threads.get(placement) or (self._start(placement), 0)
            self._threads[placement] = thread, leases + 1
            return thread

    def release(self, placement: Placement, on_ended: Callable[[], object]) -> None:
        """Give a lease back; the last one ends the thread, once it has done what was submitted.

        Args:
            placement: the device or mesh.
            on_ended: called on some thread when this lease keeps nothing alive any more.
        """
        with self._lock:
            thread, leases = self._threads.pop(placement)
            if leases > 1:
                self._threads[placement] = thread, leases - 1
        if leases > 1:
            on_ended()
        else:
            thread.end(on_ended)

    def _start(self, placement: Placement) -> DispatchThread:
        return DispatchThread(placement.name, lambda: self_check().verify(placement.devices[0]))


# One for the process, as the devices are.
THREADS = DispatchThreads()
