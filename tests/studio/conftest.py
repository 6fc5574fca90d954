"""A client without Penstock of this process, for tests of looks."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import telemetry

ASK = b'{"version": 1, "request": "look"}\n'


class Raw:
    """A client that sends any bytes."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lines.close()
        self._socket.close()

    def send(self, content: bytes) -> None:
        self._socket.sendall(content)

    def answer(self) -> Any:
        return json.loads(self._lines.readline())

    def ask(self, request: str, **more: object) -> Any:
        self.send(json.dumps({"version": 1, "request": request, **more}).encode() + b"\n")
        return self.answer()[request]

    def look(self, **more: object) -> Any:
        return self.ask("look", **more)

    def has_ended(self) -> bool:
        return self._lines.read() == b""

    def flood(self, content: bytes) -> None:
        """Send until there is no room for more."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.send(content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def raw(path: Path) -> Iterator[Raw]:
    """A client of this process."""
    with telemetry.expose(path), Raw(path) as found:
        yield found
