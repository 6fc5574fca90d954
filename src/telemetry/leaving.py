"""Closes what sends telemetry when the interpreter exits, without keeping it from exiting.

The SDK's own handlers wait for an endpoint that is down: for all retries of each batch, up to half a minute for each
signal. Python starts no thread at exit, so each of these waits for that moment from the beginning.
"""

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize, register_after_fork
from time import monotonic

from .logs import warning

# A full queue of the SDK, 2,048 spans, goes to a receiver on the same machine in 0.2 s by HTTP and in 0.4 s by gRPC.
# There is time for one retry, which comes after a second.
EXIT_SECONDS = 3.0


class _Closer:
    """Calls a function in a thread of its own when told to."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self.start()

    def start(self) -> None:
        """Begin to wait; once more in a process that was forked, which has no such thread."""
        self.told = threading.Event()
        self.done = threading.Event()
        threading.Thread(target=self._run, name="penstock-telemetry-exit", daemon=True).start()

    def _run(self) -> None:
        self.told.wait()
        self._close()
        self.done.set()


def close_at_exit(closes: Sequence[Callable[[], None]]) -> None:
    """Call functions side by side at exit, and wait for them, `EXIT_SECONDS` at most."""
    closers = [_Closer(close) for close in closes]
    if not closers:
        return

    def go_on_in_child() -> None:
        for closer in closers:
            closer.start()

    atexit.register(_close, closers)
    os.register_at_fork(after_in_child=go_on_in_child)
    # The children that `multiprocessing` forks end without `atexit`, and begin without the finalizers of their parent.
    register_after_fork(go_on_in_child, lambda _: Finalize(None, _close, [closers], exitpriority=-1))


def _close(closers: Sequence[_Closer]) -> None:
    for closer in closers:
        closer.told.set()
    give_up = monotonic() + EXIT_SECONDS
    if not all(closer.done.wait(max(0.0, give_up - monotonic())) for closer in closers):
        warning("telemetry.not_sent", waited_seconds=EXIT_SECONDS, remedy="is the receiver of OTLP running?")
