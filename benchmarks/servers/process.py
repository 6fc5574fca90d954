"""A server in a process of its own: this module starts it, stops it, and puts it under load.

`python -m benchmarks.servers.process SIDE ROW FD tuned|untuned` serves on a socket that it inherits; a side is a module
of this package, such as `by_hand`.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
    """The numbers of one round of load.

    Attributes:
        cpu_seconds: Processor time of the server for each request, in all its threads.
    """

    requests_per_second: float
    p99_seconds: float
    cpu_seconds: float


@contextmanager
def server(side: str, row: str, *, tuned: bool) -> Iterator[tuple[str, int]]:
    """Serve a row by one side; give the address and the process id, which is also the id of its session."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/predict"
        command = [sys.executable, "-m", "benchmarks.servers.process", side, row, str(listener.fileno())]
        process = subprocess.Popen(
            [*command, "tuned" if tuned else "untuned"],
            cwd=ROOT, pass_fds=[listener.fileno()], start_new_session=True,
        )  # fmt: skip
    with running(process, " ".join(command)):
        yield url, process.pid


@contextmanager
def peer(name: str, python: Path) -> Iterator[tuple[str, int]]:
    """Serve by another framework, in an environment of its own; the framework binds its port itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(python), str(HERE / f"{name}_server.py"), "--port", str(port)]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/predict"
    try:
        until_it_answers(url, process, name)
        yield url, process.pid
    finally:
        # End the whole session: some frameworks leave their workers behind.
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)


def until_it_answers(url: str, process: "subprocess.Popen[bytes]", name: str) -> None:
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_SECONDS and process.poll() is None:
        try:
            ask(url)
        except OSError:  # refused, or not ready
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"{name} does not answer")


@contextmanager
def running(process: "subprocess.Popen[bytes]", name: str) -> Iterator[None]:
    """End a server as an orchestrator does, and check its exit status."""
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
    """Return the answer of a server to a request like wrk's; the first request waits until the server accepts it."""
    request = urllib.request.Request(url, b'{"input": 4.0}', {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        text: bytes = response.read()
    return text.decode()


def load(url: str, pid: int, seconds: float) -> Load:
    """Put a server under load, and return the numbers of the load.

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


def cpu_seconds(session: int) -> float:
    """Return the processor time of all processes of a session, and of their children that have ended."""
    ticks = 0
    for found in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            # The second field is the name of the program in parentheses, which may contain blanks.
            fields = found.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS_PER_SECOND


@contextmanager
def tuned_by_hand() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    sys.setswitchinterval(0.0005)
    yield


def tuning(side: str) -> Callable[[], AbstractContextManager[None]]:
    if side != "with_penstock":
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
