"""Processes that spin beside a measurement, to keep a core busy, or only to keep cores awake."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

_SPIN = "print(flush=True)\nwhile True: pass"
# With SCHED_IDLE, any other process that wants the core gets it at once.
_SPIN_WHEN_IDLE = f"import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n{_SPIN}"


@contextmanager
def busy_core() -> Generator[None]:
    """Keep a core busy with a process of the same priority."""
    with _running(_SPIN):
        yield


@contextmanager
def awake_cores() -> Generator[None]:
    """Keep all cores awake, as under load: to wake a core takes tens of microseconds in a virtual machine."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            stack.enter_context(_running(_SPIN_WHEN_IDLE))
        yield


@contextmanager
def _running(code: str) -> Generator[None]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()
