"""Resident memory of this process, now."""

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_mib() -> float:
    """Return the pages that the system holds in memory for this process, in MiB.

    Raises:
        OSError: The system has no /proc. The peak in `resource` cannot show memory that was given back.
    """
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
