"""Chains of plain functions as one function.

A loop over ten functions calls each through one call site, which the interpreter cannot specialise. One line of code
for each function can be, and makes the chain two to three times faster; the line number tells which function runs.
"""

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any


def compose(functions: Sequence[Callable[..., Any]], *, single_argument: bool) -> Callable[..., Any]:
    """Return a function that passes its arguments to the first function, and each result to the next.

    Args:
        functions: the functions, at least one.
        single_argument: whether the first takes exactly one positional argument, which is cheaper to pass on.
    """
    parameter, argument = ("value", "value") if single_argument else ("*args, **kwargs", "*args, **kwargs")
    names = [f"f{index}" for index in range(len(functions))]
    lines = [f" def chain({parameter}):", f"  value = f0({argument})"]
    lines += [f"  value = {name}(value)" for name in names[1:]]
    # The functions are closure variables of the chain: an enclosing function is the way to make those.
    source = "\n".join([f"def enclose({', '.join(names)}):", *lines, "  return value", " return chain"])
    namespace: dict[str, Any] = {}
    exec(compile(source, "<penstock chain>", "exec"), namespace)
    chain: Callable[..., Any] = namespace["enclose"](*functions)
    return chain


def running_link(code: CodeType) -> int | None:
    """Return the number of the function of a chain that is running in this thread; None if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return _number(frame.f_lineno)
        frame = frame.f_back
    return None


def failed_link(code: CodeType, traceback: TracebackType | None) -> int | None:
    """Return the number of the function of a chain in which an exception was raised; None if it was not there."""
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return _number(traceback.tb_lineno)
        traceback = traceback.tb_next
    return None


def _number(line: int) -> int:
    return line - 3  # "def enclose" and "def chain" come first, and lines count from 1
