"""Errors of devices: the computation that an error comes from, and explanations of JAX's errors."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._errors import DeviceError, copy_of, with_cause
from ..actors.frame import blame
from ..telemetry.logs import shown
from .programs import Names, is_device_array, is_ready
from .untyped_jax import jax

# Origins: which computation an asynchronous error comes from.
#
# A result that is handed on before it is ready may turn out to be an error later. Then each computation that reads the
# result fails with that error, too: on any device, and perhaps before the first computation is known to have failed.
# The error belongs to the first computation.


class Origin:
    """A computation whose result is handed on before it is ready.

    Args:
        label: label of the node in its graph; None if the computation does not come from a node.
        inputs: the arrays that the computation reads.
    """

    __slots__ = ("_error", "_inputs", "_label")

    def __init__(self, label: str | None, inputs: Iterable[Any]) -> None:
        self._label = label
        self._inputs = tuple(inputs)
        self._error: BaseException | None = None

    def over(self, error: BaseException | None) -> None:
        """Note that the computation has ended, with an error or without one, and forget its inputs."""
        if error is not None:
            self._error = self._blamed(copy_of(error).with_traceback(None))  # a traceback would hold the arrays
        self._inputs = ()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error of the computation that failed first, if this computation has failed with `error`."""
        inputs = self._inputs  # read before the error, because `over` sets the error first
        if self._error is not None:
            return copy_of(self._error)
        return self._blamed(ORIGINS.cause_of(error, inputs))

    def taken_over(self, error: BaseException) -> None:
        """Add a note to an error: the result was donated, so JAX cannot tell whether that result is the cause."""
        error.add_note(
            f"this computation took over the memory of the result of node {self._label!r}: that node may have failed"
        )

    def _blamed(self, error: BaseException) -> BaseException:
        if self._label is not None:
            blame(error, self._label)
        return error


class Origins:
    """Maps arrays that were handed on before they were ready to their computations, until these have succeeded."""

    # Ownership: only the threads of a computation's device write its entry, and the computation ends on one of these.
    # The last reference to an array may go on any thread, which removes the entry. All threads read all entries, from
    # copies; the interpreter makes each single write of the dictionary atomic.

    def __init__(self) -> None:
        # For a computation that has not ended, the arrays of its result; after its end, weak references to the arrays.
        self._results: dict[Origin, list[Any]] = {}  # arrays are not hashable

    def add(self, arrays: list[Any], origin: Origin) -> None:
        """Note that arrays are the results of a computation."""
        self._results[origin] = arrays

    def over(self, origin: Origin, error: BaseException | None) -> None:
        """Note that a computation has ended, with an error or without one."""
        origin.over(error)
        # One write: the thread of another device, whose computation fails meanwhile, looks for the entry.
        arrays = self._results.get(origin, ())
        if error is None:
            # If all arrays were donated, none can tell how the computation ended, and one array stands for all. The
            # check begins with the last array: in a training step that is often the loss, which is not donated.
            arrays = arrays[:1] if all(array.is_deleted() for array in reversed(arrays)) else ()
        if arrays:
            self._results[origin] = [weakref.ref(array, self._forget(origin)) for array in arrays]
        else:
            self._results.pop(origin, None)

    def cause_of(self, error: BaseException, inputs: Iterable[Any], *, has_ended: bool = True) -> BaseException:
        """Return the error of the computation that failed first; `error` itself if no input has failed.

        Args:
            error: the error of a computation.
            inputs: the arrays that the computation read.
            has_ended: whether the computation had begun, and so ended with the error.
        """
        pending = list[tuple[Any, Origin]]()
        for array in inputs if self._results else ():
            origin = self._origin_of(array)
            if origin is None:
                continue
            if array.is_deleted():
                origin.taken_over(error)
            elif not is_ready(array):
                pending.append((array, origin))
            elif (failure := _failure_of(array)) is not None:
                return origin.cause_of(failure)
        # A computation on another device may end with the error of its input a moment before that input is ready.
        for array, origin in pending if has_ended else ():
            if (failure := _failure_of(array)) is not None:
                return origin.cause_of(failure)
        return error

    def _origin_of(self, array: Any) -> Origin | None:
        found = (
            origin
            for origin, results in list(self._results.items())
            if any((one() if type(one) is weakref.ref else one) is array for one in results)
        )  # fmt: skip
        return next(found, None)

    def _forget(self, origin: Origin) -> "Callable[[weakref.ref[Any]], None]":
        def forget(gone: "weakref.ref[Any]") -> None:
            results = [one for one in self._results.get(origin, ()) if one is not gone]
            if results:
                self._results[origin] = results
            else:
                self._results.pop(origin, None)

        return forget


def _failure_of(array: Any) -> BaseException | None:
    try:
        array.block_until_ready()
    except (RuntimeError, ValueError) as error:
        return error.with_traceback(None)
    return None


# One object for the process: results go from device to device.
ORIGINS = Origins()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device had too little memory. JAX has no error type for that."""
    return shown(error, str).startswith("RESOURCE_EXHAUSTED")


def explained(error: BaseException, jitted: Names, args: Sequence[Any]) -> BaseException:
    """Return an error that says more than JAX's, for NaNs and for donated arguments; other errors unchanged.

    Args:
        error: the error of the call of the program.
        jitted: the function that was called.
        args: the arguments of the call.
    """
    # JAX's own `jit` turns this private type into the public one.
    if type(error).__name__ == "InternalFloatingPointError":
        what = "infinity" if "inf" in error.args[1:] else "NaN"
        found = f"{jitted.name!r} gave a {what}, which jax_debug_nans or jax_debug_infs refuses"
        return with_cause(FloatingPointError(found), error)
    # A call that fails after it has begun has lost its donated arguments, too.
    if "has been deleted" in shown(error, str):
        for place, arg in enumerate(args):
            if any(is_device_array(leaf) and leaf.is_deleted() for leaf in jax.tree.leaves(arg)):
                found = (
                    f"{jitted.name!r}: the memory of argument {jitted.parameter(place)!r} was donated to an earlier "
                    "call, so the argument cannot be read again: pass the result of that call, or do not donate the "
                    "argument"
                )
                return with_cause(DeviceError(found), error)
    return error
