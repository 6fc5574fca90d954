"""A node that worker processes can import: one of its two attempts waits, and the other does not."""

import os
import time
from pathlib import Path

import penstock as ps


@ps.node(runs_on="process", hedge=ps.Hedge(after_seconds=0.05, max_share=1))
def one_is_slow(folder: str, slow: str) -> int:
    """Return the process id; the attempt that `slow` names, "first" or "second", waits for the file "go-on"."""
    path, pid = Path(folder), os.getpid()
    (path / f"begun-{pid}").touch()
    try:
        (path / "first").touch(exist_ok=False)
        is_slow = slow == "first"
        while not is_slow and len([*path.glob("begun-*")]) < 2:  # until the other attempt has begun
            time.sleep(0.01)
    except FileExistsError:
        is_slow = slow == "second"
    while is_slow and not (path / "go-on").exists():
        time.sleep(0.01)
    (path / f"ended-{pid}").touch()
    return pid
