"""Messages between the engine's process and its worker processes: pickles over a socket, and the names of functions."""

import importlib
import io
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeAlias, cast

from .._errors import with_cause
from ..extension import pack_error, unpack_error
from ..telemetry.logs import shown
from ..telemetry.text import type_name

# Messages are in pickle protocol 5. Buffers travel out of band (PEP 574): an array is written from its own memory, and
# read into the memory that the new array keeps. A message is a prefix (number of buffers, length of the body), the
# lengths of the buffers, the pickled body, then the buffers.
#
# `bytes` and `bytearray` are not buffers for pickle: pickle copies them into the body, and out of it, under the GIL. At
# 400 MB, that holds the event loop for a second. So large `bytes` and `bytearray` are kept out of the body, too: they
# follow the buffers, the last value first. The two highest bits of a length tell `bytes` from `bytearray`.

Message: TypeAlias = "list[bytes | memoryview]"
Memory: TypeAlias = "bytes | bytearray | memoryview"
Received: TypeAlias = "tuple[memoryview, list[Memory]]"

_PREFIX = struct.Struct("!IQ")
# Messages up to this size are joined and sent with one system call; for larger ones, the copy costs more than a call.
JOIN_MAX_BYTES = 64 * 1024

# Before each message, in both directions, is a head: a byte of these flags, and the number of the call. An answer with
# another number than the call's would be the result of another item.
#
# Each call comes to a worker through its queue, a socket of whole packets. The engine's process takes back calls that
# the worker has not begun from the same socket. While it does, the worker may take a packet in between.
HEAD = struct.Struct("!BQ")
IN_CONNECTION = 1  # the message is too large for a packet, and comes through the connection
TELLS_BEGIN = 2
KILLS_WORKER = 4  # an injected fault
SPANS = 16  # the message has spans that have ended during the call; its answer follows
BEGUN = 8  # no message follows: the worker has begun a call, and its caller wants to know when a call begins
# How many elements of a list are examined. Examining all elements would take as long as pickling the list.
_LOOKS = 100
_LENGTH_BITS = 62
_LENGTH = (1 << _LENGTH_BITS) - 1
_KEPT: list[type[object]] = [object, bytes, bytearray]  # index: the two highest bits of a length
_BYTES = frozenset(_KEPT[1:])
_HOLDERS = frozenset((list, tuple, dict))


def _is_large(value: Any) -> bool:
    return type(value) in _BYTES and len(value) > JOIN_MAX_BYTES


def _has_large(parts: Iterable[object]) -> bool:
    """Whether a part is a large `bytes` or `bytearray`, or a list, tuple or dict that begins with such values."""
    for part in parts:
        if type(part) in _HOLDERS:
            holder = cast("Any", part)
            inside: Iterable[object] = holder.values() if type(part) is dict else holder
            first: list[object] = [*islice(inside, _LOOKS)]
            if not _BYTES.isdisjoint(map(type, first)) and any(map(_is_large, first)):
                return True
        elif _is_large(part):
            return True
    return False


class _Pickler(pickle.Pickler):
    """A pickler that notes whether it met an instance of a class, whose constructor may fail to rebuild it."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.buffers: list[pickle.PickleBuffer] = []
        self.kept: list[bytes | bytearray] = []
        self.has_instances = False
        super().__init__(self.file, 5, buffer_callback=self.buffers.append)

    def reducer_override(self, value: Any) -> Any:
        kind = cast("type[object]", type(value))
        if kind.__module__.partition(".")[0] != "numpy" and not issubclass(kind, _NAMES):
            self.has_instances = True
        return NotImplemented


class _Keeper(_Pickler):
    """Keeps large `bytes` and `bytearray` out of the body. A separate class, as `persistent_id` slows each object."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, int] = {}

    def persistent_id(self, value: object) -> int | None:
        if not _is_large(value):
            return None
        place = self._places.setdefault(id(value), len(self.kept))
        if place == len(self.kept):
            self.kept.append(cast("bytes | bytearray", value))
        return -1 - place


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: "bytes | memoryview", buffers: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(body), buffers=buffers)
        self._buffers = buffers

    def persistent_load(self, place: int) -> Any:
        return self._buffers[place]


_NAMES = (type, FunctionType, BuiltinFunctionType)  # the types that are pickled as a name


def encode(value: object, parts: Iterable[object] = (), *, is_rebuilt: bool = False) -> Message:
    """Pickle `value` into a message; errors of its reducers are raised.

    Args:
        value: the value.
        parts: the parts of the value that may be, or directly contain, large `bytes`.
        is_rebuilt: whether a value with instances of classes is rebuilt as well, which raises errors of constructors.
    """
    buffers: list[pickle.PickleBuffer] = []
    kept: list[bytes | bytearray] = []
    has_large = _has_large(parts)
    if has_large or is_rebuilt:
        pickler = _Keeper() if has_large else _Pickler()
        pickler.dump(value)
        body, buffers, kept = pickler.file.getvalue(), pickler.buffers, pickler.kept
        if is_rebuilt and pickler.has_instances:
            decode(body, [*buffers, *reversed(kept)])
    else:
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    if not buffers and not kept:
        head = _PREFIX.pack(0, len(body))
        return [head + body] if len(body) <= JOIN_MAX_BYTES else [head, body]
    views = [buffer.raw() for buffer in buffers]
    lengths = [view.nbytes for view in views]
    views += map(memoryview, reversed(kept))
    lengths += [len(one) | _KEPT.index(type(one)) << _LENGTH_BITS for one in reversed(kept)]
    head = _PREFIX.pack(len(views), len(body)) + struct.pack(f"!{len(views)}Q", *lengths)
    if len(body) + sum(view.nbytes for view in views) <= JOIN_MAX_BYTES:
        return [b"".join([head, body, *views])]
    return [head, body, *views]


def decode(body: "bytes | memoryview", buffers: Sequence[Any]) -> Any:
    """Rebuild the value of a message; errors of its constructors are raised."""
    return _Unpickler(body, buffers).load() if buffers else pickle.loads(body)


def send(connection: socket.socket, number: int, message: Message, flags: int = 0) -> None:
    """Write the head and the message of a call, blocking. Raises OSError if the other process is gone."""
    first, *others = message or [b""]
    connection.sendall(b"".join([HEAD.pack(flags, number), first]))
    for segment in others:
        connection.sendall(segment)


class MessageReader:
    """Reads messages from a connection; all small messages that have come are read at once.

    Args:
        connection: a socket. From a stream, nothing else may read; from a queue of packets, other processes may.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = memoryview(bytearray(HEAD.size + JOIN_MAX_BYTES))
        # The range in `_memory` that was read from the connection and not yet taken.
        self._begin: int = 0
        self._end: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything that was read is taken."""
        return self._begin == self._end

    def receive_head(self) -> tuple[int, int]:
        """Return the flags and the number of the next call; `receive` then returns its message, if it has a message.

        Raises:
            EOFError, OSError: the other process is gone, or the queue was closed.
        """
        if self._begin == self._end:
            self._begin, self._end = 0, self._receive_into(self._memory)
        if self._end - self._begin < HEAD.size:
            return HEAD.unpack(self._take(HEAD.size))
        self._begin += HEAD.size
        return HEAD.unpack_from(self._memory, self._begin - HEAD.size)

    def receive(self) -> Received:
        """Return the body and the buffers of a message. Block until the message is there.

        The body is valid until the next call of this method.

        Raises:
            EOFError, OSError: the other process is gone.
            MemoryError: there is no memory for the message, and no further message can be received.
        """
        if self._begin == self._end:
            self._begin, self._end = 0, self._receive_into(self._memory)
        begin = self._begin + _PREFIX.size
        if begin <= self._end:
            number, body_bytes = _PREFIX.unpack_from(self._memory, self._begin)
            if not number and begin + body_bytes <= self._end:  # like most messages: small, and here already
                self._begin = begin + body_bytes
                return self._memory[begin : self._begin], []
        number, body_bytes = _PREFIX.unpack(self._take(_PREFIX.size))
        lengths = struct.unpack(f"!{number}Q", self._take(8 * number))
        body = memoryview(self._take(body_bytes))
        return body, [self._take(length & _LENGTH, _KEPT[int(length >> _LENGTH_BITS)]) for length in lengths]

    def _take(self, length: int, kind: type[object] = object) -> Memory:
        """Return the next bytes in new memory: a `bytes` or `bytearray` if `kind` says so."""
        data, rest = _unfilled(length, kind)
        while rest:
            if self._begin < self._end:
                taken = self._memory[self._begin : min(self._end, self._begin + len(rest))]
                rest[: len(taken)] = taken
                self._begin += len(taken)
                rest = rest[len(taken) :]
            elif len(rest) >= len(self._memory):
                rest = rest[self._receive_into(rest) :]
            else:
                self._begin, self._end = 0, self._receive_into(self._memory)
        return data

    def _receive_into(self, memory: memoryview) -> int:
        received = self._connection.recv_into(memory)
        if not received:
            raise EOFError("the process at the other end of the connection is gone")
        return received


def _unfilled(length: int, kind: type[object]) -> "tuple[Memory, memoryview]":
    """Return new memory without contents, and a view to fill it before anything else reads it.

    A `bytearray(length)` is filled with zeros, and no other thread can run meanwhile, not even the event loop: for 50
    to 90 ms at 64 MB, 0.8 s at 500 MB. `recv` could make a `bytes`, but not append to bytes that were read before.

    Args:
        length: how many bytes.
        kind: `bytes` or `bytearray`; `object` for memory of an array. Large memory of an array is aligned, so that XLA
            on CPU takes it without a copy.
    """
    if kind is object and length <= JOIN_MAX_BYTES:
        small = bytearray(length)
        return small, memoryview(small)
    import ctypes  # few programs need it

    name = "Bytes" if kind is bytes else "ByteArray"
    size = length + 64 if kind is object else length
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    value = prototype((f"Py{name}_FromStringAndSize", ctypes.pythonapi))(None, size)
    address: int = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)((f"Py{name}_AsString", ctypes.pythonapi))(value)
    if kind is object:
        first = -address % 64
        aligned = memoryview(value)[first : first + length]
        return aligned, aligned
    view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    return value, view(("PyMemoryView_FromMemory", ctypes.pythonapi))(address, length, 0x200)  # PyBUF_WRITE


class WorkerInstance(NamedTuple):
    """An instance of a class that each worker process makes for itself, at the first call in the process.

    Attributes:
        key: the number of the instance, a different number in each scope.
        args: the arguments of the class.
        kwargs: the keyword arguments of the class.
    """

    key: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class CallRequest(NamedTuple):
    """A call, as it travels to a worker process.

    Attributes:
        target: the name of the function; see `process_target`.
        args: the positional arguments.
        kwargs: the keyword arguments.
        headers: the headers of the trace that the call belongs to.
        item: the fields for log records: graph, node, item and attempt; for a batch, the node and `batch_size`.
        instance: for a class, the instance in the worker that is called.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    headers: Mapping[str, str] = {}
    item: Mapping[str, object] = {}
    instance: WorkerInstance | None = None


class NotSentError(TypeError):
    """An argument cannot be sent to a worker process, so nothing has run."""


def encode_request(request: CallRequest) -> Message:
    """Pickle a call.

    Raises:
        NotSentError: an argument does not pickle; the message names its position or keyword, and its type.
    """
    try:
        return encode(tuple(request), (*request.args, *request.kwargs.values()))
    except MemoryError:
        raise
    except Exception as error:  # reducers are the arguments' own code and may raise anything
        places = [(f"argument {position}", value) for position, value in enumerate(request.args, start=1)]
        places += [(f"argument {name!r}", value) for name, value in request.kwargs.items()]
        if "batch_size" in request.item:
            places = places[:-1] + [("an item", value) for value in request.args[-1]]
        places += [("an argument of the instance", request.instance)] if request.instance is not None else []
        culprits = [f"{place} ({type_name(value)})" for place, value in places if not _pickles(value)]
        raise NotSentError(
            f"{' and '.join(culprits) or 'an argument'} of {request.target!r} cannot be sent to a worker process: "
            f"{shown(error, str)}; pass plain data instead (a path rather than an open file, a list rather than a "
            "generator)"
        ) from error


def _pickles(value: object) -> bool:
    with suppress(Exception):  # reducers may raise anything; any error means that the value does not pickle
        encode(value)
        return True
    return False


class PackedError(NamedTuple):
    """Stands for a result of a batch that is an error."""

    packed: bytes


def encode_results(results: Iterable[object], target: str, seconds: float) -> Message:
    """Pickle the answer to a batch. A `PackedError` stands for a result that is an error, or cannot be sent or rebuilt.

    The results are pickled together, so that objects that they share are sent once.
    """
    given = [_returned(result) if isinstance(result, BaseException) else result for result in results]
    with suppress(Exception):  # the failing result is found below
        return encode((True, given, seconds), given, is_rebuilt=True)
    given = [_checked(result, target) for result in given]
    return encode((True, given, seconds), given)


def _returned(error: BaseException) -> PackedError:
    return PackedError(pack_error(error))


def _checked(result: object, target: str) -> object:
    try:
        encode(result, (result,), is_rebuilt=True)
    except Exception as error:  # noqa: BLE001 - reducers are the result's own code and may raise anything
        return _returned(unsendable(target, result, error))
    return result


def decode_results(sent: Iterable[object], target: str) -> list[object]:
    """Return the results of a batch, with errors in the places of their `PackedError`s."""
    return [unpack_error(one.packed, target, "returned") if isinstance(one, PackedError) else one for one in sent]


def unsendable(target: str, result: object, error: Exception) -> TypeError:
    """Return the error for a result that does not pickle."""
    return TypeError(
        f"the result of {target!r} ({type_name(result)}) cannot be sent back from a worker process: "
        f"{shown(error, str)}; return plain data instead"
    )


def unbuilt(target: str, error: BaseException) -> TypeError:
    """Return the error for a result that pickles but cannot be rebuilt."""
    told = f"the result of {target!r} cannot be rebuilt in this process: {shown(error, str)}"
    return with_cause(TypeError(told), error)


# Names of functions. A decorated function does not pickle, because the decorator has replaced it in its module ("not
# the same object"). So a call names its function as "module:qualname", and the worker imports the module.


def process_target(fn: Callable[..., Any]) -> str:
    """Return the name, "module:qualname", under which a worker process finds `fn`.

    Args:
        fn: a function of a module, decorated or not. A function of the main script works, too: each worker imports the
            script, so code that starts the program must be under `if __name__ == "__main__":`.

    Raises:
        TypeError: a worker cannot find the function by name; the message says why, and what to do.
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
            "of its module, and pass the values that it needs as arguments"
        )
    if module_name == "__main__":
        _check_main(target)
    try:
        found = _find(sys.modules[module_name], qualname)
    except (KeyError, AttributeError):
        raise TypeError(f"{target} is not found under that name, so a worker process would not find it") from None
    if unwrap(found) is not fn:
        raise TypeError(
            f"{target} names another object ({found!r}), and a worker process would run that object; "
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
    """Return the function of a node; of a node with `batch=`, the function of a list. Other objects are returned."""
    # Not `inspect.isroutine`, which is true for any object with `__get__`, and so for a node.
    function = found if isinstance(found, FunctionType | type) else getattr(found, "fn", found)
    return getattr(function, "_penstock_of_list", function)
