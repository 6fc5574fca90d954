"""Messages between the engine's process and its worker processes: pickle protocol 5 over a socket.

Buffers travel out of band (PEP 574): an array is written from its own memory and read into the memory that the new
array keeps. A message is a prefix (number of buffers, length of the body), the lengths of the buffers, the pickled
body, then the buffers.
"""

import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = "list[bytes | memoryview]"

_PREFIX = struct.Struct("!IQ")
# One system call per message up to this size; above it a copy costs more than a call.
_JOIN_MAX_BYTES = 64 * 1024


def encode(value: object) -> Message:
    """Pickle `value` into a message; raises whatever its reducers raise."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    head = _PREFIX.pack(len(views), len(body)) + struct.pack(f"!{len(views)}Q", *[view.nbytes for view in views])
    if len(body) + sum(view.nbytes for view in views) <= _JOIN_MAX_BYTES:
        return [b"".join([head, body, *views])]
    return [head, body, *views]


def decode(body: bytearray, buffers: Sequence[bytearray]) -> Any:
    """Rebuild the value of a message; raises whatever its constructors raise."""
    return pickle.loads(body, buffers=buffers)


def send(connection: socket.socket, message: Message) -> None:
    """Write a message, blocking; raises OSError when the other side is gone."""
    for segment in message:
        connection.sendall(segment)


def receive(connection: socket.socket) -> tuple[bytearray, list[bytearray]]:
    """Read the body and the buffers of a message, blocking; raises EOFError or OSError when the other side is gone."""
    number, body_bytes = _PREFIX.unpack(_receive_exactly(connection, _PREFIX.size))
    rest = _receive_exactly(connection, 8 * number + body_bytes)
    lengths = struct.unpack_from(f"!{number}Q", rest)
    del rest[: 8 * number]
    return rest, [_receive_exactly(connection, length) for length in lengths]


def _receive_exactly(connection: socket.socket, length: int) -> bytearray:
    # A plain bytearray: freshly mapped memory (mmap, memfd, shared memory) was two to four times slower at 1 and
    # 16 MB, because every page of it faults once. See docs/decisions/0002-process-workers.md.
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            raise EOFError("the other side of the connection is gone")
        rest = rest[received:]
    return data


def encode_request(
    target: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    headers: Mapping[str, str],
    item: Mapping[str, object],
) -> Message:
    """Pickle a call of `target`, with the headers of its trace and what its logs say of the item.

    Raises:
        TypeError: an argument does not pickle; the message names its position or keyword, and its type.
    """
    try:
        return encode((target, args, kwargs, headers, item))
    except Exception as error:  # reducers are the arguments' own code and may raise anything
        places = [(f"argument {position}", value) for position, value in enumerate(args, start=1)]
        places += [(f"argument {name!r}", value) for name, value in kwargs.items()]
        culprits = [f"{place} ({type_name(value)})" for place, value in places if not _pickles(value)]
        raise TypeError(
            f"{' and '.join(culprits) or 'an argument'} of {target!r} cannot be sent to a worker process: {error}; "
            "pass plain data instead (a path rather than an open file, a list rather than a generator)"
        ) from error


def _pickles(value: object) -> bool:
    try:
        encode(value)
    except Exception:  # noqa: BLE001 - as above: any error means that it does not pickle
        return False
    return True


def type_name(value: object) -> str:
    """Return the qualified name of the type of `value`, as a user would write it."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class RemoteTraceback(Exception):
    """The traceback of an exception in its worker process, as text; the `__cause__` of the exception that came back."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'
