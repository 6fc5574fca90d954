"""The protocol of the socket, and the client that speaks it."""

import json
import os
import select
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

from ...engine import Drawing, DrawnEdge, DrawnNode
from ...telemetry import FailureLook, ItemLook, StuckLoop, Verdict
from .watch import LiveSnapshot, NodeLook, Pauses, Request, ScopeLook

# The protocol of the socket: lines of JSON, one answer for each request, in order. This is version 1.
#
# A client sends ``{"version": 1, "request": "look"}`` and gets one line:
#
#     {"version": 1, "look": {"process": 4711, "seconds": 1.0, "nodes": [...], "verdict": {...}}}
#
# The fields are the fields of `LiveSnapshot`, `NodeLook`, `Verdict` and so on; a missing field has its default. A
# request may have the further fields of `Request`. A client asks for a drawing by its digest, which looks contain:
#
#     {"version": 1, "request": "drawing", "digest": "8e1f"} -> {"version": 1, "drawing": {"title": ..., "nodes": []}}
#
# A profile takes some seconds, at most 60; the answer is the page that `Profile.to_html` writes:
#
#     {"version": 1, "request": "profile", "seconds": 10} -> {"version": 1, "profile": "<!doctype html>..."}
#
# Each connection has its own "look before", so clients do not disturb each other; the first look of a connection has
# ``"seconds": null``. If the server cannot answer a request, it sends an error and goes on. After a line that does not
# end, it sends an error and hangs up:
#
#     {"version": 1, "error": "a sentence"}
#
# The version changes when a client of the version before would read wrong numbers. Fields may be added without a new
# version, so a client ignores fields that it does not know. By hand:
# ``echo '{"version": 1, "request": "look"}' | nc -U PATH``.

VERSION: Final = 1
# A request is a few dozen bytes; a peer that sends more bytes than this without a newline is not a client.
MAX_REQUEST_BYTES: Final = 4096
# A profile is recorded for as long as its client waits, and costs more than looks do.
MAX_SECONDS: Final = 60

T = TypeVar("T")


class ProtocolError(Exception):
    """The other side has sent a line that does not follow this version of the protocol."""


def read_request(line: bytes) -> Request:
    """Return the request in a line.

    Raises:
        ProtocolError: the line is no request of this version; the message is a sentence for the client.
    """
    request = _object(line)
    if request.get("version") != VERSION:
        raise ProtocolError(
            f"this process speaks version {VERSION} of the protocol, not {request.get('version')!r}: use the same "
            "version of penstock on both sides"
        )
    if request.get("request") not in ("look", "drawing", "profile"):
        raise ProtocolError(
            f'there is no request {request.get("request")!r}; there are "look", "drawing" and "profile"'
        )
    asked: Request = _record(Request, request)
    if asked.request == "profile" and not (type(asked.seconds) in (int, float) and 0 < asked.seconds <= MAX_SECONDS):
        raise ProtocolError(f"a profile takes more than 0 and at most {MAX_SECONDS} seconds, not {asked.seconds!r}")
    return asked


_RECORDS: Final[dict[str, type[Any]]] = {
    "nodes": NodeLook, "scopes": ScopeLook, "items": ItemLook, "failures": FailureLook, "stuck": StuckLoop,
}  # fmt: skip


def answer(look: LiveSnapshot, in_turns: Pauses = iter) -> bytes:
    """Return the line with a look, without fields that have their defaults."""
    told = {field.name: getattr(look, field.name) for field in fields(LiveSnapshot) if field.name not in _RECORDS}
    told["verdict"] = None if look.verdict is None else asdict(look.verdict)
    lists = {name: ",".join(_told(kind, getattr(look, name), in_turns)) for name, kind in _RECORDS.items()}
    parts = ",".join([_json(told)[1:-1], *[f'"{name}":[{records}]' for name, records in lists.items()]])
    return f'{{"version":{VERSION},"look":{{{parts}}}}}\n'.encode()


def _told(kind: type[Any], records: Sequence[Any], in_turns: Pauses) -> Iterator[str]:
    names, defaults = zip(*[(field.name, field.default) for field in fields(kind)], strict=True)
    for values in in_turns(map(attrgetter(*names), records)):
        told = zip(names, values, defaults, strict=True)
        yield _json({name: value for name, value, default in told if value != default})


def answer_drawing(drawing: object) -> bytes:
    """Return the line with a drawing; with null if no open scope has the drawing."""
    return _line({"version": VERSION, "drawing": asdict(drawing) if isinstance(drawing, Drawing) else None})


def answer_profile(page: str) -> bytes:
    """Return the line with the page of a profile."""
    return _line({"version": VERSION, "profile": page})


def refusal(message: str) -> bytes:
    """Return the line with an error."""
    return _line({"version": VERSION, "error": message})


def read_look(answered: dict[str, Any]) -> LiveSnapshot:
    """Return the look in an answer."""
    look: dict[str, Any] = answered["look"]
    told = {name: tuple([_record(kind, one) for one in look.get(name, ())]) for name, kind in _RECORDS.items()}
    verdict = None if look["verdict"] is None else _record(Verdict, look["verdict"])
    lines = tuple([(str(label), str(text)) for label, text in look.get("lines", ())])
    found: LiveSnapshot = _record(LiveSnapshot, look | told | {"verdict": verdict, "lines": lines})
    return found


def read_drawing(answered: dict[str, Any]) -> Drawing | None:
    """Return the drawing in an answer; None if no open scope of the process has the drawing."""
    told = answered["drawing"]
    return None if told is None else _drawing(told)


def _drawing(told: dict[str, Any]) -> Drawing:
    nodes: list[DrawnNode] = [
        _record(DrawnNode, node | {"inputs": [_record(DrawnEdge, edge) for edge in node["inputs"]], "actors": ()})
        for node in told["nodes"]
    ]
    return Drawing(told["title"], tuple(nodes), tuple([(owner, _drawing(body)) for owner, body in told["bodies"]]))


def _read(line: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """Return the content of an answer.

    Raises:
        ProtocolError: the line is an error, an answer of another version, or no answer at all.
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
        return read(answered)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError("its answer is not one of penstock") from error


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("this is no line of JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError("this is no JSON object")
    return value  # pyright: ignore[reportUnknownVariableType] - of JSON, keys are strings


def _record(record: type[Any], found: dict[str, Any]) -> Any:
    """Return a record with the known fields that were found; fields that an older process lacks have their defaults."""
    known = {field.name: found[field.name] for field in fields(record) if field.name in found}
    lists = [name for name, value in known.items() if isinstance(value, list)]
    return record(**known | {name: tuple(known[name]) for name in lists})


def _line(content: dict[str, Any]) -> bytes:
    return _json(content).encode() + b"\n"


_json: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


# How long a client waits for an answer. A look takes milliseconds; a process in a debugger never answers.
_ANSWER_SECONDS: Final = 10.0


class Client:
    """A connection to a process. The messages of all errors say what to do.

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

    def look(
        self, *, show_messages: bool = False, show_keys: bool = False, scope: str = "", matching: str = ""
    ) -> LiveSnapshot:
        """Look at the process.

        Args:
            show_messages: whether the look has the messages of errors, which may hold values of items.
            show_keys: whether the look has the keys of items; if not, it has eight digits that stand for each key.
            scope: the id of the scope whose nodes the look has; empty for the nodes of all scopes.
            matching: a text; the look has only items whose graph, node, state or key contains it.

        Raises:
            ConnectionError: the process has closed the connection.
            TimeoutError: the process does not answer.
            OSError: the answer is not in this protocol, or in another version of it.
        """
        look = self._ask(Request("look", "", show_messages, show_keys, scope, matching=matching), read_look)
        self._process = look.process
        return look

    def drawing(self, digest: str) -> Drawing | None:
        """Return the drawing with a digest that a look contains; None if no open scope has the drawing.

        Raises:
            ConnectionError: the process has closed the connection.
            TimeoutError: the process does not answer.
            OSError: the process is older, and knows no drawings.
        """
        return self._ask(Request("drawing", digest), read_drawing)

    def profile(self, seconds: float) -> str:
        """Have a profile recorded for some seconds, at most 60, and return its page.

        Raises:
            ConnectionError: the process has closed the connection.
            TimeoutError: the process does not answer.
            OSError: the process is older, and records no profiles.
        """
        return self._ask(Request("profile", seconds=seconds), lambda answered: str(answered["profile"]))

    def _ask(self, asked: Request, read: Callable[[dict[str, Any]], T]) -> T:
        with self._explained():
            with suppress(BrokenPipeError):  # the server has hung up, but its last answer, which says why, can be read
                self._socket.sendall(_line({"version": VERSION} | asdict(asked)))
            give_up = monotonic() + _ANSWER_SECONDS + asked.seconds
            while b"\n" not in self._received:
                self._socket.settimeout(max(give_up - monotonic(), 0.001))
                received = self._socket.recv(65536)
                if not received:
                    raise ConnectionResetError
                self._received += received
            line, _, self._received = self._received.partition(b"\n")
            return _read(bytes(line), read)

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
            raise PermissionError(f"{path} belongs to another user: look as that user") from None
        except (ConnectionResetError, BrokenPipeError):
            raise self._gone() from None
        except ConnectionRefusedError:
            raise ConnectionRefusedError(
                f"no process listens at {path}: the process that opened it has ended, or the path is not the one that "
                "the application passes to expose()"
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
