"""A node for worker processes, which can import it: the attempt that begins first waits, and the other does not."""

import os
import time
from pathlib import Path

import penstock as ps


@ps.node(runs_on="process", hedge=ps.Hedge(after_seconds=0.05, max_share=1))
def slow_at_first(folder: str) -> int:
    """Return the number of the process; the first to begin waits for the file "go-on"."""
    path, pid = Path(folder), os.getpid()
    (path / f"begun-{pid}").touch()
    try:
        (path / "first").touch(exist_ok=False)
        is_first = True
    except FileExistsError:
        is_first = False
    while is_first and not (path / "go-on").exists():
        time.sleep(0.01)
    (path / f"ended-{pid}").touch()
    return pid
