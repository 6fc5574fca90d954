"""A server in a process of its own: started and stopped from here, and put under load.

`python -m benchmarks.servers.process by_hand|with_penstock ROW FD tuned|untuned` serves on a socket that it inherits.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONNECTIONS = 64
PATIENCE_SECONDS = 60
PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one round of load gave.

    Attributes:
        cpu_seconds: Processor time of the server for each request, in all of its threads.
    """

    requests_per_second: float
    p99_seconds: float
    cpu_seconds: float


@contextmanager
def server(side: str, row: str, *, tuned: bool) -> Iterator[tuple[str, int]]:
    """Serve a row by one side; gives the address and the process id once it answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/predict"
        command = [sys.executable, "-m", "benchmarks.servers.process", side, row, str(listener.fileno())]
        process = subprocess.Popen(
            [*command, "tuned" if tuned else "untuned"], cwd=ROOT, pass_fds=[listener.fileno()]
        )  # fmt: skip
    with running(process, " ".join(command)):
        yield url, process.pid


@contextmanager
def running(process: "subprocess.Popen[bytes]", name: str) -> Iterator[None]:
    """End a server as an orchestrator does, and see that it ends well."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    if status not in {0, -signal.SIGTERM}:
        raise RuntimeError(f"{name} ended with {status}")


def ask(url: str) -> str:
    """Return what a server answers to the request that wrk sends; the first one waits until it accepts."""
    request = urllib.request.Request(url, b'{"input": 4.0}', {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        text: bytes = response.read()
    return text.decode()


def load(url: str, pid: int, seconds: float) -> Load:
    """Put a server under load, and say what that cost.

    Raises:
        RuntimeError: A request failed.
    """
    # wrk counts in whole seconds.
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s", str(HERE / "load.lua"), url]
    before = cpu_seconds(pid)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = cpu_seconds(pid) - before
    found = json.loads(done.stdout.splitlines()[-1])
    if found["errors"] or not found["requests"]:
        raise RuntimeError(f"requests failed:\n{done.stdout}")
    return Load(
        requests_per_second=found["requests"] / found["seconds"],
        p99_seconds=found["p99_seconds"],
        cpu_seconds=used / found["requests"],
    )


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of those of its children that have ended."""
    # The second field is the name of the program in parentheses, in which there may be blanks.
    fields = (PROC / str(pid) / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_SECOND


@contextmanager
def tuned_by_hand() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    sys.setswitchinterval(0.0005)
    yield


def tuning(side: str) -> Callable[[], AbstractContextManager[None]]:
    if side == "by_hand":
        return tuned_by_hand
    from penstock import engine

    return engine.tuned_for_serving


def main() -> None:
    import uvicorn

    side, row, descriptor, tuned = sys.argv[1:]
    applications = importlib.import_module(f".{side}", __package__).APPLICATIONS
    app = applications[row](tuning(side) if tuned == "tuned" else nullcontext)
    config = uvicorn.Config(app, loop="auto", http="auto", access_log=False, log_level="warning")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(descriptor))])


if __name__ == "__main__":
    main()
