"""Exceptions as bytes, for another process: any exception can be packed, and keeps its traceback as text."""

import pickle
import traceback
from collections.abc import Callable
from typing import Any

from .._errors import with_cause
from ..telemetry.logs import shown
from ..telemetry.text import type_name


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text: the `__cause__` of the exception that came back."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def pack_error(
    error: BaseException, dumps: Callable[[BaseException], bytes] = pickle.dumps, text: str | None = None
) -> bytes:
    """Return an exception and its traceback as bytes, for another process. Every exception is accepted.

    Args:
        error: the exception, which was raised here.
        dumps: pickles the exception; if it fails, only the name of the class and the traceback travel.
        text: the traceback, as text; None for the traceback of the exception.
    """
    packed, reason = None, ""
    try:
        packed = dumps(error)
    except Exception as refusal:  # noqa: BLE001 - reducers are the exception's own code and may raise anything
        reason = f"{type(refusal).__name__}: {shown(refusal, str)}"
    text = "".join(traceback.format_exception(error)) if text is None else text
    return pickle.dumps((type_name(error), packed, reason, text, isinstance(error, Exception)))


def unpack_error(packed: bytes, name: str, how: str = "raised") -> BaseException:
    """Return the exception that `pack_error` has packed, to be raised here. Its cause shows the original traceback.

    An exception that cannot be rebuilt as one of its kind becomes a TypeError that names its type.

    Args:
        packed: the bytes that `pack_error` has returned.
        name: the function that raised the exception. The `TypeError` in place of an exception that does not pickle
            names this function.
        how: what the function did with the exception: "raised", or "returned" as a result.
    """
    kind, pickled, reason, text, is_error = pickle.loads(packed)
    cause = RemoteTraceback(text)
    if pickled is not None:
        try:
            # Many exceptions pickle but cannot be rebuilt: their constructors have other parameters than `args`, their
            # attributes cannot be set, or their reducers build another object.
            error: Any = pickle.loads(pickled)
            if isinstance(error, Exception if is_error else BaseException):
                # An exception that was returned, and never raised, has no traceback.
                return with_cause(error, cause) if how == "raised" or "Traceback (" in text else error
            reason = f"it is rebuilt as an object of type {type_name(error)}"
        except (Exception, SystemExit, KeyboardInterrupt) as failure:  # noqa: BLE001 - constructors may raise anything
            reason = f"{type(failure).__name__}: {shown(failure, str)}"
    what = f"{name!r} {how} {kind}, which does not survive pickling ({reason})"
    return with_cause(TypeError(f"{what}; its traceback is shown as the cause"), cause)
