"""Backends from PyPI, each in its own environment, which `make test-backends` makes."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PATIENCE_SECONDS = 180  # on a busy machine, importing takes half a minute


def program(name: str, of_it: str | None = None) -> Path:
    """Returns the path of a backend's program, by default named like the backend; skips the test without backends."""
    folder = os.environ.get("PENSTOCK_TEST_BACKENDS")
    if not folder:
        pytest.skip(f"needs {name} in an environment of its own: `make test-backends` makes it")
    found = Path(folder).absolute() / name / "bin" / (of_it or name)
    if name == "jaeger" and not found.exists():
        pytest.skip("needs Go: `make test-backends` builds Jaeger with it")
    assert found.exists(), f"{found} is missing: `make test-backends` installs it"
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def serving(command: list[str | Path], folder: Path, variables: Mapping[str, str], ready: str) -> Iterator[None]:
    """Runs a backend in `folder` for the length of a `with` block; the block begins when the URL `ready` answers."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(variables)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not answers(ready):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # also kills its helper processes
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False
