"""What goes to a worker process and back: messages in pickle protocol 5 over a socket, and the names of functions."""

import importlib
import mmap
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

# Messages between the engine's process and its worker processes: pickle protocol 5 over a socket.
#
# Buffers travel out of band (PEP 574): an array is written from its own memory and read into the memory that the new
# array keeps. A message is a prefix (number of buffers, length of the body), the lengths of the buffers, the pickled
# body, then the buffers.

Message: TypeAlias = "list[bytes | memoryview]"
Memory: TypeAlias = "bytearray | mmap.mmap"
Received: TypeAlias = "tuple[memoryview, list[Memory]]"

_PREFIX = struct.Struct("!IQ")
# One system call per message up to this size; above it a copy costs more than a call.
_JOIN_MAX_BYTES = 64 * 1024
# A bytearray is filled with zeros before anything is read into it, while no other thread can run, not even the event
# loop: for 50 to 90 ms with this much, 0.8 s with 500 MB. More is received into memory of the system, which zeroes each
# page when it is first written to: the loop waits 5 to 15 ms, and the whole takes no longer (decision 0002).
_ZEROED_MAX_BYTES = 64 * 1024 * 1024


def encode(value: object) -> Message:
    """Pickle `value` into a message; raises whatever its reducers raise."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    head = _PREFIX.pack(len(views), len(body)) + struct.pack(f"!{len(views)}Q", *[view.nbytes for view in views])
    if len(body) + sum(view.nbytes for view in views) <= _JOIN_MAX_BYTES:
        return [b"".join([head, body, *views])]
    return [head, body, *views]


def decode(body: memoryview, buffers: Sequence[Memory]) -> Any:
    """Rebuild the value of a message; raises whatever its constructors raise."""
    return pickle.loads(body, buffers=buffers)


def send(connection: socket.socket, message: Message) -> None:
    """Write a message, blocking; raises OSError when the other side is gone."""
    for segment in message:
        connection.sendall(segment)


def receive(connection: socket.socket) -> Received:
    """Read the body and the buffers of a message, blocking.

    Raises:
        EOFError, OSError: the other side is gone.
        MemoryError: there is no room for it; what is left of the message stays in the connection.
    """
    number, body_bytes = _PREFIX.unpack(_receive_exactly(connection, _PREFIX.size))
    rest = memoryview(_receive_exactly(connection, 8 * number + body_bytes))
    lengths = struct.unpack_from(f"!{number}Q", rest)
    return rest[8 * number :], [_receive_exactly(connection, length) for length in lengths]


def _receive_exactly(connection: socket.socket, length: int) -> Memory:
    # Freshly mapped memory was two to four times slower at 1 and 16 MB than a bytearray, whose pages the allocator has
    # mostly used before: each new one faults once. See docs/decisions/0002-process-workers.md.
    data = bytearray(length) if length <= _ZEROED_MAX_BYTES else _map(length)
    rest = memoryview(data)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            raise EOFError("the other side of the connection is gone")
        rest = rest[received:]
    return data


def _map(length: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no room for {length} bytes: {error}") from error


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
    except MemoryError:
        raise
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


class SentError(NamedTuple):
    """An exception of a worker process, on its way to the engine's.

    Attributes:
        type_name: its type.
        pickled: the exception; None if it does not pickle.
        reason: why it does not.
        traceback: where it was raised, as text.
    """

    type_name: str
    pickled: bytes | None
    reason: str
    traceback: str


def encode_error(error: BaseException, text: str) -> SentError:
    """Return an exception in a form that can be sent, whatever it is."""
    try:
        return SentError(type_name(error), pickle.dumps(error, protocol=5), "", text)
    except Exception as reason:  # noqa: BLE001 - reducers are the exception's own code and may raise anything
        return SentError(type_name(error), None, f"{type(reason).__name__}: {reason}", text)


def decode_error(sent: SentError, target: str) -> BaseException:
    """Return the exception that `target` has raised; a TypeError that names it, if it cannot be rebuilt."""
    reason = sent.reason
    if sent.pickled is not None:
        try:
            # Many exceptions pickle but cannot be rebuilt: constructors with other parameters than `args`, attributes
            # that cannot be set, reducers that give something else.
            error = pickle.loads(sent.pickled)
            if isinstance(error, BaseException):
                return error
            reason = f"it is rebuilt as an object of type {type_name(error)}"
        except Exception as failure:  # noqa: BLE001 - constructors are the exception's own code and may raise anything
            reason = f"{type(failure).__name__}: {failure}"
    return TypeError(
        f"{target!r} raised {sent.type_name}, which does not survive pickling ({reason}); its traceback is shown as "
        "the cause"
    )


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


# How a function is named for a worker process, and found there.
#
# A decorated function shadows itself and does not pickle ("not the same object"), so a call travels as
# "module:qualname" and the worker imports the module.


def process_target(fn: Callable[..., Any]) -> str:
    """Return the name, "module:qualname", under which a worker process finds `fn`.

    Args:
        fn: a function of a module, decorated or not. One of the main script works too; the script is imported by each
            worker, so what it starts must stand under `if __name__ == "__main__":`.

    Raises:
        TypeError: a worker cannot find it by name; the message says why and what to do.
    """
    module_name, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if module_name is None or qualname is None:
        raise TypeError(f"{fn!r} has no name that a worker process can import; wrap it in a function of a module")
    target = f"{module_name}:{qualname}"
    if "<lambda>" in qualname:
        raise TypeError(
            f"a lambda ({target}) cannot run in a worker process; make it a function of a module with `def`"
        )
    if "<locals>" in qualname:
        raise TypeError(
            f"{target} is defined inside a function, where a worker process cannot find it; move it to the top level "
            "of its module and pass what it needs as arguments"
        )
    if module_name == "__main__":
        _check_main(target)
    try:
        found = _find(sys.modules[module_name], qualname)
    except (KeyError, AttributeError):
        raise TypeError(f"{target} is not found under that name, so a worker process would not find it") from None
    if unwrap(found) is not fn:
        raise TypeError(
            f"{target} names another object ({found!r}), which is what a worker process would run; "
            "give this function a name of its own at the top level of its module"
        )
    return target


def _check_main(target: str) -> None:
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or not Path(file).is_file():
        raise TypeError(
            f"{target} exists only in this interactive session or notebook, which a worker process cannot import; "
            'move it to a .py file and import it, or use runs_on="thread"'
        )
    if spec is not None and spec.name.endswith("__main__"):
        raise TypeError(
            f"{target} is defined in a package's __main__.py, which a worker process does not import; "
            "move it to another module of the package"
        )


@cache
def resolve(target: str) -> Callable[..., Any]:
    """Import the function that `process_target` named."""
    module_name, _, qualname = target.partition(":")
    function: Callable[..., Any] = unwrap(_find(importlib.import_module(module_name), qualname))
    return function


def _find(found: Any, qualname: str) -> Any:
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def unwrap(found: Any) -> Any:
    """Return the function behind a node, which keeps it in `fn`; anything else as it is."""
    # Not `inspect.isroutine`: it is true of whatever has `__get__`, as a node does, which may be a method.
    return found if isinstance(found, FunctionType | type) else getattr(found, "fn", found)
