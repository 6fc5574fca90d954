r"""The protocol of the socket: lines of JSON, one answer for each request, in order. This is version 1.

A client sends ``{"version": 1, "request": "look"}`` and gets one line:

    {"version": 1, "look": {"process": 4711, "seconds": 1.0, "nodes": [...], "verdict": {...}}}

whose fields are those of `Look`, `NodeLook` and `Verdict`. Each connection has its own "look before", so clients do not
disturb each other; the first look of a connection has ``"seconds": null``. What the server cannot answer, it answers
with an error and goes on, except for a line that does not end, after which it hangs up:

    {"version": 1, "error": "a sentence"}

The version changes when a client of the one before would read wrong numbers. Fields may be added without that, so a
client leaves alone what it does not know. By hand: ``echo '{"version": 1, "request": "look"}' | nc -U PATH``.
"""

import json
from dataclasses import asdict, fields
from typing import Any, Final

from ..profiling.limits import Verdict
from .watch import Look, NodeLook

VERSION: Final = 1
# A request is a few dozen bytes; who sends more without an end is no client.
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


def answer(look: Look) -> bytes:
    """Return the line that tells of a look."""
    return _line({"version": VERSION, "look": asdict(look)})


def refusal(message: str) -> bytes:
    """Return the line that tells of an error."""
    return _line({"version": VERSION, "error": message})


def read_answer(line: bytes) -> Look:
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
        return Look(int(look["process"]), look["seconds"], nodes, verdict)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("it does not answer as penstock does") from error


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
