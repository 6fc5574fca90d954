"""Resident memory of this process, now."""

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_mib() -> float:
    """Pages that the system holds in memory for this process, in MiB.

    Raises:
        OSError: A system without /proc; the peak that `resource` knows cannot show what was given back.
    """
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
