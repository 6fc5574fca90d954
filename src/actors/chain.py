"""Chains of plain functions that share an actor; a single one is a chain too.

A loop over ten functions calls each through one call site, which the interpreter cannot specialise. One line of code
for each function can be, and makes the chain two to three times faster; the line number tells which function runs.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from types import CodeType, CoroutineType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from ..telemetry.spans import FrameSpan, NodeSpan
from .current import source

if TYPE_CHECKING:
    from .frame import Frame
    from .node_actor import NodeActor
    from .recorder import Recorder

# After a body this long, others get their turn: a timer is late by 1 ms at most.
SLOW_SECONDS: Final = 0.001


@dataclass(frozen=True)
class Link:
    """One node of a chain."""

    name: str
    fn: Callable[..., Any]
    model: str | None = None


def compose(
    links: Sequence[Link], actor: "NodeActor", recorder: "Recorder | None" = None
) -> Callable[[list[Any]], Any]:
    """Return a function that takes the values of a frame, runs the chain and watches the clock: it holds the loop.

    It adds to the `busy_seconds` of the actor, and tells it of a run that was long or gave a coroutine; and it tells a
    recorder, if there is one, of every run.
    """
    if actor.slot >= 0:
        arguments = "values[slot]"
    else:
        arguments = "*args_of(values)" if actor.kwargs_of is None else "*args_of(values), **kwargs_of(values)"
    enclose = _compiled(len(links), arguments, is_recorded=recorder is not None)
    record = None if recorder is None else _recording(recorder)
    run: Callable[[list[Any]], Any] = enclose(
        actor, record, actor.slot, actor.args_of, actor.kwargs_of, *(link.fn for link in links)
    )
    return run


def _recording(recorder: "Recorder") -> Callable[[float, float], None]:
    def record(began: float, seconds: float) -> None:
        where = source.get()
        recorder.add(began, began + seconds, None if where is None else where.frame, asyncio.get_running_loop())

    return record


@cache
def _compiled(length: int, arguments: str, *, is_recorded: bool) -> Callable[..., Any]:
    names = [f"f{index}" for index in range(length)]
    source = "\n".join(
        [
            # What the chain uses are closure variables of it: an enclosing function is the way to make those.
            f"def enclose(actor, record, slot, args_of, kwargs_of, {', '.join(names)}):",
            " def chain(values):",
            "  began = perf_counter()",
            f"  value = f0({arguments})",
            *(f"  value = {name}(value)" for name in names[1:]),
            "  seconds = perf_counter() - began",
            "  actor.busy_seconds += seconds",
            *(["  record(began, seconds)"] if is_recorded else []),
            "  if seconds > SLOW_SECONDS or value.__class__ is CoroutineType:",
            "   actor.noticed(seconds, value)",
            "  return value",
            " return chain",
        ]
    )
    namespace: dict[str, Any] = {"perf_counter": perf_counter, "CoroutineType": CoroutineType}
    namespace["SLOW_SECONDS"] = SLOW_SECONDS
    exec(compile(source, "<penstock chain>", "exec"), namespace)
    enclose: Callable[..., Any] = namespace["enclose"]
    return enclose


_LINES_BEFORE = 4  # up to the call of the first function, counted from 1


def run_linkwise(links: Sequence[Link], actor: "NodeActor", frame: "Frame", args: Any, kwargs: Any) -> Any:
    """Run a chain link by link: each result is checked, and each link but the first opens a span if there are any."""
    number = 0  # read by `_number`
    value = links[0].fn(*args, **kwargs)
    actor.refuse_coroutine(value, links[0].name)
    for number in range(1, len(links)):
        link = links[number]
        value = link.fn(value) if frame.span is None else _traced(frame.span, link, frame.item, value)
        actor.refuse_coroutine(value, link.name)
    return value


def _traced(parent: FrameSpan, link: Link, item: int, value: Any) -> Any:
    span = NodeSpan(parent, link.name, link.fn, item=item, model=link.model)
    try:
        value = link.fn(value)
        span.returned(value)
    except BaseException as error:
        span.end("failed", error)
        raise
    span.end("done")
    return value


def running_link(code: CodeType) -> int | None:
    """Return the number of the function of a chain that is running in this thread; None if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        number = _number(frame, frame.f_lineno, code)
        if number is not None:
            return number
        frame = frame.f_back
    return None


def failed_link(code: CodeType, traceback: TracebackType | None) -> int | None:
    """Return the number of the function of a chain in which an exception was raised; None if it was not there."""
    while traceback is not None:
        number = _number(traceback.tb_frame, traceback.tb_lineno, code)
        if number is not None:
            return number
        traceback = traceback.tb_next
    return None


def _number(frame: FrameType, line: int, code: CodeType) -> int | None:
    if frame.f_code is code:
        return line - _LINES_BEFORE
    if frame.f_code is run_linkwise.__code__:
        number: int = frame.f_locals["number"]
        return number
    return None
