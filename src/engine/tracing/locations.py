"""Where in the user's code the tracer was called: what every error of a trace names."""

import os
import sys
import types
from functools import cache, lru_cache
from typing import Literal

_PACKAGE = os.path.realpath(__file__).rsplit(os.sep, 3)[0] + os.sep


def call_location() -> str:
    """Return "file:line" of the line of a graph that led here, e.g. through functions of installed libraries."""
    found: types.FrameType | None = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "user" and not is_generated(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if owner == "installed":
            found = frame  # perhaps the graph itself: then it is the outermost of the frames inside the tracer's
        elif owner == "penstock" and found is not None:
            break
        frame = frame.f_back
    return "<unknown>:0" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def definition_location(fn: object) -> str:
    """Return "file:line" of a function's definition; its name where it has none, e.g. a builtin."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(fn)


def is_users(filename: str) -> bool:
    """Whether a file is neither of this package nor of the standard library; what has no file may be a notebook."""
    return _owner(filename) in ("user", "installed")


def is_generated(frame: types.FrameType) -> bool:
    """Whether nobody wrote the code of a frame, such as the `__init__` of a dataclass: its line means nothing."""
    return frame.f_code.co_filename.startswith(("<string>", "<attrs")) and "__file__" in frame.f_globals


@cache
def _paths(*names: str) -> tuple[str, ...]:
    import sysconfig  # which takes a while to load

    return tuple([os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names])


@lru_cache(maxsize=1024)
def _owner(filename: str) -> Literal["user", "installed", "library", "penstock"]:
    if filename.startswith("<"):
        return "library" if filename.startswith("<frozen ") else "user"
    path = os.path.realpath(filename)
    if path.startswith(_PACKAGE):
        return "penstock"
    if path.startswith(_paths("purelib", "platlib")):
        return "installed"
    return "library" if path.startswith(_paths("stdlib", "platstdlib")) else "user"
