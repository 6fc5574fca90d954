"""Where in the user's code the tracer was called: what every error of a trace names."""

import os
import sys
import sysconfig
import types
from functools import lru_cache
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARY = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib"))


def call_location() -> str:
    """Return "file:line" of the innermost caller outside this package and the standard library."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "<unknown>:0" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def definition_location(fn: object) -> str:
    """Return "file:line" of a function's definition; its name where it has none, e.g. a builtin."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(fn)


@lru_cache(maxsize=1024)
def is_users(filename: str) -> bool:
    """Whether a file is neither of this package nor of the standard library; what has no file may be a notebook."""
    if filename.startswith("<"):
        return not filename.startswith(("<frozen ", "<penstock "))
    path = os.path.realpath(filename)
    return not path.startswith(_PACKAGE) and (not path.startswith(_LIBRARY) or path.startswith(_INSTALLED))
