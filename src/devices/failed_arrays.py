"""Failed arrays: which computation an asynchronous error comes from.

A result that is handed on before it is ready may turn out to be an error later, and then each computation that reads
it fails with that error, too. The error belongs to the first.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any


class FailedArrays:
    """The results of computations that failed, with their errors, for as long as anybody holds the results."""

    def __init__(self) -> None:
        self._errors: dict[int, tuple[weakref.ref[Any], BaseException]] = {}  # arrays are not hashable

    def add(self, arrays: Iterable[Any], error: BaseException) -> None:
        """Note that these are results of a computation that failed."""
        for array in arrays:
            self._errors[id(array)] = (weakref.ref(array, self._forget(id(array))), error)

    def cause_of(self, error: BaseException, inputs: Iterable[Any]) -> BaseException:
        """Return the error of the input that failed; `error` itself if none did."""
        for array in inputs if self._errors else ():
            found = self._errors.get(id(array))
            if found is not None and found[0]() is array:
                return found[1]
        return error

    def _forget(self, key: int) -> "Callable[[weakref.ref[Any]], None]":
        def forget(_: "weakref.ref[Any]") -> None:
            self._errors.pop(key, None)

        return forget
