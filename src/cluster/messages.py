"""Messages between the driver and workers: pickled values, the memory of arrays beside them, and functions."""

import io
import logging
import pickle
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from threading import local
from typing import Any, Final, NamedTuple, TypeAlias, cast

from .. import Node, Resource, node, resource

# A value travels as `bytes`. If its arrays have more than this many bytes, the value travels as a list: the pickled
# rest, and the memory of the arrays, which Ray writes into its store, and reads from there without a copy.
INLINE_MAX_BYTES: Final = 64 * 1024
Packed: TypeAlias = "bytes | list[Any]"

_NO_MODULE: Final = b"__main__"  # workers have another main module

_here = local()


class Reference:
    """Stands for a result that stays on the machine that made it, or that read it last.

    Attributes:
        stored: the transport's own object for the result.
        nbytes: the size of the result, which counts in `max_bytes`.
        place: the machine that made the result.
        pool: the workers that can fetch the result.
    """

    __slots__ = ("nbytes", "place", "pool", "stored")

    def __init__(self, stored: object, nbytes: int, place: str) -> None:
        self.stored = stored
        self.nbytes = nbytes
        self.place = place
        self.pool: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a number: the transport brings the values along."""
        collected: list[Reference] | None = getattr(_here, "collected", None)
        if collected is None:
            raise TypeError("a result that stays on a worker cannot be pickled: pass it to nodes on workers only")
        if self not in collected:
            collected.append(self)
        return _given, (collected.index(self),)

    def __repr__(self) -> str:
        return f"<result of {self.nbytes} bytes on {self.place}>"


def _given(number: int) -> Any:
    return unpack(_here.given[number])


@contextmanager
def references(given: Sequence[Packed] | None = None) -> Generator[list[Reference]]:
    """Collect the references in values that are packed inside of a `with`; or give unpacked references their values."""
    collected: list[Reference] = []
    _here.collected, _here.given = collected, given
    try:
        yield collected
    finally:
        _here.collected = _here.given = None


def pack(value: object) -> Packed:
    """Return a value in the form that travels. Errors of its reducers are raised."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        by_name = _NO_MODULE not in body
    except (AttributeError, pickle.PicklingError):  # the value has a function or class without a name in a module
        body, by_name = b"", False
    if not by_name:
        buffers.clear()
        body = _by_contents(value, buffers.append)
    if not buffers:
        return body
    if sum(buffer.raw().nbytes for buffer in buffers) <= INLINE_MAX_BYTES:
        # As `bytes`, so that small arrays are read-only, as large arrays are.
        return pickle.dumps(_Inline(body, [bytes(buffer.raw()) for buffer in buffers]), protocol=5)
    return [body, *buffers]


class _Inline(NamedTuple):
    body: bytes
    buffers: list[bytes]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_inline, (self.body, self.buffers)


def _unpack_inline(body: bytes, buffers: list[bytes]) -> Any:
    return pickle.loads(body, buffers=buffers)


def unpack(packed: Packed) -> Any:
    """Return the value that was packed. Its arrays are read-only."""
    try:
        if isinstance(packed, list):
            return pickle.loads(packed[0], buffers=packed[1:])
        return pickle.loads(packed)
    except (SystemExit, KeyboardInterrupt) as error:  # of a constructor, which must not end the process that reads
        raise TypeError(f"a value that has travelled cannot be rebuilt here: {error!r}") from error


def size_of(packed: Packed) -> int:
    """Return how many bytes travel."""
    parts: list[Any] = packed if isinstance(packed, list) else [packed]
    return sum(memoryview(part).nbytes for part in parts)


def import_ray() -> Any:
    """Import and return Ray, and remove the exception hook and the log handler that the import sets."""
    hook, handlers = sys.excepthook, [*logging.getLogger("ray").handlers]
    ray: Any = import_module("ray")  # few programs need it
    if hook.__module__ != "ray._private.worker":
        sys.excepthook, logging.getLogger("ray").handlers = hook, handlers
    return ray


def _by_contents(value: object, keep: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickle functions, classes and nodes of the main script by their contents, with the pickler that Ray brings."""
    pickler_of: Any = import_ray().cloudpickle.CloudPickler
    file = io.BytesIO()
    pickler = type("Pickler", (pickler_of,), {"reducer_override": _reduced})(file, protocol=5, buffer_callback=keep)
    pickler.dump(value)
    return file.getvalue()


def _reduced(pickler: Any, one: Any) -> Any:
    if isinstance(one, Node) and getattr(one.fn, "__module__", "") == "__main__":
        return (resource if isinstance(one, Resource) else node), (one.fn,)
    return cast("Any", super(type(pickler), pickler)).reducer_override(one)


def pack_function(fn: object, name: str, most_bytes: int = 1 << 20) -> bytes:
    """Return a function, a class or a node in the form that travels: its name in a module, or its contents.

    Raises:
        TypeError: the object cannot travel, or takes too many values along; the message says what to write instead.
    """
    try:
        packed = pickle.dumps(fn, protocol=5)
        if _NO_MODULE not in packed:
            return packed
    except Exception:  # noqa: BLE001 - reducers may raise anything; then its contents travel
        pass
    bare = getattr(fn, "fn", fn)
    try:
        packed = _by_contents(bare)
    except Exception as error:
        raise TypeError(
            f"node {name!r} cannot travel to a worker: {error}; define it at the top level of a module that workers "
            "import, and pass what it needs as arguments"
        ) from error
    if len(packed) > most_bytes:
        held = [one.cell_contents for one in getattr(bare, "__closure__", None) or ()]
        largest = max(held, key=lambda one: len(_by_contents(one)), default=None)
        what = "" if largest is None else f", of which a {type(largest).__name__} takes most"
        raise TypeError(
            f"node {name!r} takes {len(packed):,} bytes along{what}, and a function may take 1 MB: pass large values "
            "as arguments, or open them as a resource"
        )
    return packed


class Sent(NamedTuple):
    """A message to a worker. It travels as one pickled tuple, because several arguments take Ray longer than one.

    Attributes:
        number: the number of the call.
        key: the number of the function.
        keeps_result: whether the result stays on the worker.
        function: the packed function, if the worker does not know it.
        body: the packed call.
    """

    number: int
    key: int
    keeps_result: bool
    function: bytes
    body: bytes


def dumps_error(error: BaseException) -> bytes:
    """Pickle an exception, with the contents of its class if the class has no module."""
    packed = pack(error)
    return packed if isinstance(packed, bytes) else pickle.dumps(error)
