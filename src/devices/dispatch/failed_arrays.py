"""Failed arrays: which computation an asynchronous error comes from.

A result that is handed on before it is ready may turn out to be an error later, and then each computation that reads
it fails with that error, too: on any device, and perhaps before the first one is known to have failed. The error
belongs to the first.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ...actors.frame import blame
from ..jax_types import is_ready
from ..programs.exception_twins import twin_of


class Origin:
    """A computation whose result is handed on before it is ready.

    Args:
        label: of the node in its graph; None for what is no node.
        inputs: the arrays that it reads.
    """

    __slots__ = ("_error", "_inputs", "_label")

    def __init__(self, label: str | None, inputs: Iterable[Any]) -> None:
        self._label = label
        self._inputs = tuple(inputs)
        self._error: BaseException | None = None

    def over(self, error: BaseException | None) -> None:
        """It has ended, well or with an error; it lets go of what it has read."""
        if error is not None:
            self._error = self._blamed(twin_of(error).with_traceback(None))  # a traceback would hold the arrays
        self._inputs = ()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error of the first computation that failed, where this one has failed with `error`."""
        inputs = self._inputs  # before the error: `over` sets that first
        if self._error is not None:
            return twin_of(self._error)
        return self._blamed(ORIGINS.cause_of(error, inputs))

    def taken_over(self, error: BaseException) -> None:
        """Note with an error that the result of this computation cannot be asked any more whether it is the cause."""
        error.add_note(f"it computed in the memory of the result of node {self._label!r}, which may be what has failed")

    def _blamed(self, error: BaseException) -> BaseException:
        if self._label is not None:
            blame(error, self._label)
        return error


class Origins:
    """Which computation arrays come from that were handed on, for as long as anybody holds them; for all devices."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[weakref.ref[Any], Origin]] = {}  # arrays are not hashable

    def add(self, arrays: Iterable[Any], origin: Origin) -> None:
        """Note that these are results of a computation."""
        for array in arrays:
            self._origins[id(array)] = (weakref.ref(array, self._forget(id(array))), origin)

    def cause_of(self, error: BaseException, inputs: Iterable[Any]) -> BaseException:
        """Return the error of the first computation that failed; `error` itself if none of the inputs did.

        Args:
            error: of a computation.
            inputs: what it read.
        """
        for array in inputs if self._origins else ():
            origin = self._origin_of(array)
            if origin is None:
                continue
            if array.is_deleted():
                origin.taken_over(error)
            elif (failure := _failure_of(array)) is not None:
                return origin.cause_of(failure)
        return error

    def _origin_of(self, array: Any) -> Origin | None:
        found = self._origins.get(id(array))
        return found[1] if found is not None and found[0]() is array else None

    def _forget(self, key: int) -> "Callable[[weakref.ref[Any]], None]":
        def forget(gone: "weakref.ref[Any]") -> None:
            if self._origins.get(key, (None,))[0] is gone:  # another array may have its place in memory by now
                self._origins.pop(key, None)

        return forget


def _failure_of(array: Any) -> BaseException | None:
    if not is_ready(array):
        return None
    try:
        array.block_until_ready()
    except Exception as error:  # noqa: BLE001 - whatever the computation of it has raised
        return error.with_traceback(None)
    return None


# One for the process: results go from device to device.
ORIGINS = Origins()
