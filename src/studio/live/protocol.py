"""The protocol of the socket, and the client that speaks it."""

import json
import os
import select
import socket
import stat
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from time import monotonic
from typing import Any, Final

from ...telemetry import Verdict
from .watch import LiveSnapshot, NodeLook

# The protocol of the socket: lines of JSON, one answer for each request, in order. This is version 1.
#
# A client sends ``{"version": 1, "request": "look"}`` and gets one line:
#
#     {"version": 1, "look": {"process": 4711, "seconds": 1.0, "nodes": [...], "verdict": {...}}}
#
# whose fields are those of `LiveSnapshot`, `NodeLook` and `Verdict`. Each connection has its own "look before", so
# clients do not disturb each other; the first look of a connection has ``"seconds": null``. What the server cannot
# answer, it answers with an error and goes on, except for a line that does not end, after which it hangs up:
#
#     {"version": 1, "error": "a sentence"}
#
# The version changes when a client of the one before would read wrong numbers. Fields may be added without that, so a
# client leaves alone what it does not know. By hand: ``echo '{"version": 1, "request": "look"}' | nc -U PATH``.

VERSION: Final = 1
# A request is a few dozen bytes; a peer that sends more without a newline is not a client.
MAX_REQUEST_BYTES: Final = 4096

REQUEST: Final = json.dumps({"version": VERSION, "request": "look"}).encode() + b"\n"


class ProtocolError(Exception):
    """What the other side sent is not what this version of the protocol says."""


def check_request(line: bytes) -> None:
    """Check that a line asks for a look; there is nothing else to ask for.

    Raises:
        ProtocolError: it does not; with a sentence for the client.
    """
    request = _object(line)
    if request.get("version") != VERSION:
        raise ProtocolError(
            f"this process speaks version {VERSION} of the protocol, not {request.get('version')!r}: use the same "
            "version of penstock on both sides"
        )
    if request.get("request") != "look":
        raise ProtocolError(f'there is no request {request.get("request")!r}; there is "look"')


def answer(look: LiveSnapshot) -> bytes:
    """Return the line that tells of a look."""
    return _line({"version": VERSION, "look": asdict(look)})


def refusal(message: str) -> bytes:
    """Return the line that tells of an error."""
    return _line({"version": VERSION, "error": message})


def read_answer(line: bytes) -> LiveSnapshot:
    """Return what an answer tells.

    Raises:
        ProtocolError: it is an error, of another version, or nothing of the kind.
    """
    answered = _object(line)
    if answered.get("version") != VERSION:
        raise ProtocolError(
            f"it speaks version {answered.get('version')!r} of the protocol, and this is version {VERSION}: use the "
            "same version of penstock on both sides"
        )
    if "error" in answered:
        raise ProtocolError(str(answered["error"]))
    try:
        look: dict[str, Any] = answered["look"]
        nodes = tuple(NodeLook(**_known(NodeLook, node)) for node in look["nodes"])
        verdict = None if look["verdict"] is None else Verdict(**_known(Verdict, look["verdict"]))
        lines = tuple((str(label), str(text)) for label, text in look.get("lines", ()))
        return LiveSnapshot(int(look["process"]), look["seconds"], nodes, verdict, lines)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("its answer is not one of penstock") from error


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("this is no line of JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError("this is no JSON object")
    return value  # pyright: ignore[reportUnknownVariableType] - of JSON, keys are strings


def _known(record: type[Any], found: dict[str, Any]) -> dict[str, Any]:
    return {field.name: found[field.name] for field in fields(record)}


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"


# How long a client waits for an answer. A look takes milliseconds; a process in a debugger never answers.
_ANSWER_SECONDS: Final = 10.0


class Client:
    """A connection to a process. The texts of all errors say what to do.

    Args:
        path: the path of the socket.

    Raises:
        OSError: no process listens at the socket.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_ANSWER_SECONDS)
        self._received = bytearray()
        self._process: int | None = None
        with ExitStack() as undo, self._explained():
            undo.callback(self._socket.close)
            self._socket.connect(os.fspath(path))
            undo.pop_all()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def look(self) -> LiveSnapshot:
        """Look at the process.

        Raises:
            ConnectionError: the process has closed the connection.
            TimeoutError: the process does not answer.
            OSError: the answer is not in this protocol, or in another version of it.
        """
        with self._explained():
            with suppress(BrokenPipeError):  # the server has hung up; its last answer, which says why, can be read
                self._socket.sendall(REQUEST)
            give_up = monotonic() + _ANSWER_SECONDS
            while b"\n" not in self._received:
                self._socket.settimeout(max(give_up - monotonic(), 0.001))
                received = self._socket.recv(65536)
                if not received:
                    raise ConnectionResetError
                self._received += received
            line, _, self._received = self._received.partition(b"\n")
            look = read_answer(bytes(line))
        self._process = look.process
        return look

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the process closes the connection.

        Raises:
            ConnectionError: the process has closed the connection.
        """
        # The server sends nothing unasked, so a readable socket means that the connection was closed.
        if select.select([self._socket], [], [], seconds)[0]:
            raise self._gone()

    @contextmanager
    def _explained(self) -> Generator[None, None, None]:
        """Turn errors of the socket into errors that say what has happened, and what to do."""
        path = self._path
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(
                f'there is no socket {path}: the application opens it, `with telemetry.expose("{path}"):`'
            ) from None
        except PermissionError:
            raise PermissionError(f"{path} belongs to another user ({_owner(path)}): look as that user") from None
        except (ConnectionResetError, BrokenPipeError):
            raise self._gone() from None
        except ConnectionRefusedError:
            if not _is_socket(path):
                raise OSError(f"{path} is no socket: give the path that the application passes to expose()") from None
            raise ConnectionRefusedError(
                f"no process listens at {path}: the process that opened it has ended; start it again"
            ) from None
        except TimeoutError:
            raise TimeoutError(
                f"{self._who()} does not answer: it is stopped, or its code does not release the interpreter's lock"
            ) from None
        except ProtocolError as error:
            raise OSError(f"{path}: {error}") from error
        except OSError as error:
            raise OSError(
                f"{path} cannot be connected to: {error}; give the path that was passed to expose()"
            ) from None

    def _gone(self) -> ConnectionError:
        return ConnectionError(f"{self._who()} has gone away: it has ended, or has left its `with telemetry.expose()`")

    def _who(self) -> str:
        return f"the process at {self._path}" if self._process is None else f"process {self._process}"


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (OSError, KeyError):  # the folder may not be read, or the user has no name
        return "unknown"
