"""How long another thread has run."""

import sys
from time import clock_gettime


def thread_seconds(thread: int) -> float | None:
    """Return the processor time of a thread of this process, in seconds; None if it has ended, or nobody tells.

    Args:
        thread: its number, as `threading.get_native_id` gives it.
    """
    if sys.platform != "linux":
        return None
    try:
        # The number of a thread's clock, as the kernel makes it of that of the thread, and pthread_getcpuclockid(3)
        # returns it: that function must not be asked for a thread that may have ended, the kernel may.
        return clock_gettime(~thread << 3 | 6)
    except OSError:
        return None
