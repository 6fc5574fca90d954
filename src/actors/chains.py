"""Compiled functions for chains of plain functions, and for lines of async nodes."""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from types import CodeType, CoroutineType, FrameType, coroutine
from typing import TYPE_CHECKING, Any, Final

from ..telemetry.spans import FrameSpan, NodeSpan, of_every_execution
from .current import source
from .frame import LEFT_OUT, LINE_FILE, Frame

if TYPE_CHECKING:
    from .node_actor import NodeActor
    from .sampler import ExecutionSampler
    from .worker import Worker


# Chains of plain functions that share an actor; a single function is a chain too.
#
# A loop over ten functions calls all of them through one call site, which the interpreter cannot specialise. The
# interpreter can specialise a line of code for each function, which makes the chain two to three times faster. The
# line number tells which function runs.

# After a chain that took longer than this, the worker yields to the loop, so that timers are late by 1 ms at most.
SLOW_SECONDS: Final = 0.001


@dataclass(frozen=True)
class Link:
    """One node of a chain."""

    name: str
    fn: Callable[..., Any]
    model: str | None = None


def compose(
    links: Sequence[Link], actor: "NodeActor", sampler: "ExecutionSampler | None" = None
) -> "Callable[[list[Any], Worker], Any]":
    """Return a function that takes the values of a frame and the worker, runs the chain, and measures the time.

    The function adds the time to the `busy_seconds` of the actor. It tells the actor of a run that was slow or returned
    a coroutine. It reports all runs to the sampler, if there is a sampler.
    """
    if actor.slot >= 0:
        arguments = "values[slot]"
    else:
        arguments = "*args_of(values)" if actor.kwargs_of is None else "*args_of(values), **kwargs_of(values)"
    enclose = _compiled(len(links), arguments, is_sampled=sampler is not None)
    record, mark = (None, None) if sampler is None else (_recording(sampler), sampler.between.append)
    run: Callable[[list[Any], Worker], Any] = enclose(
        actor, record, mark, actor.slot, actor.args_of, actor.kwargs_of, *(link.fn for link in links)
    )
    return run


def _recording(sampler: "ExecutionSampler") -> Callable[[float, float], None]:
    def record(began: float, seconds: float) -> None:
        where = source.get()
        sampler.add(began, began + seconds, None if where is None else where.frame, asyncio.get_running_loop())

    return record


@cache
def _compiled(length: int, arguments: str, *, is_sampled: bool) -> Callable[..., Any]:
    names = [f"f{index}" for index in range(length)]
    marked = "; mark(perf_counter())" if is_sampled else ""  # on the same line, whose number tells which function runs
    source = "\n".join(
        [
            # The enclosing function makes the functions and the actor closure variables, which are fast to read.
            f"def enclose(actor, record, mark, slot, args_of, kwargs_of, {', '.join(names)}):",
            " def chain(values, worker):",
            "  began = perf_counter()",
            f"  value = f0({arguments}){marked if length > 1 else ''}",
            *(f"  value = {name}(value){marked if name != names[-1] else ''}" for name in names[1:]),
            "  seconds = perf_counter() - began",
            "  actor.busy_seconds += seconds",
            *(["  record(began, seconds)"] if is_sampled else []),
            "  if seconds > SLOW_SECONDS or value.__class__ is CoroutineType:",
            "   actor.noticed(worker, seconds, value)",
            "  return value",
            " return chain",
        ]
    )
    namespace: dict[str, Any] = {"perf_counter": perf_counter, "CoroutineType": CoroutineType}
    namespace["SLOW_SECONDS"] = SLOW_SECONDS
    exec(compile(source, "<penstock chain>", "exec"), namespace)
    enclose: Callable[..., Any] = namespace["enclose"]
    return enclose


# Lines of async nodes and plain functions, in which each node reads only the value of the node before.
#
# `Worker.run` carries an item through any graph, and tests the kind of each step on the way. In a line the kinds are
# known beforehand, so the code between two nodes is compiled. Without lines, ten nodes take 1.36 times as long.

# Each sequence of async and plain nodes is compiled once, in about a millisecond for the longest line.
LONGEST_LINE: Final = 16
# To enter a line costs as much as three nodes in it save. A line that is a whole graph is entered once for many items.
SHORTEST_PART: Final = 4

# Takes the worker, the frame and its values. Returns the value of `worker.actor`, the last actor that ran; if
# `worker.frame` is None, the frame has ended.
AsyncLine = Callable[["Worker", Frame, list[Any]], Coroutine[Any, Any, Any]]


def compose_line(actors: "Sequence[NodeActor]", *, is_whole: bool) -> AsyncLine:
    """Return a function that carries a frame from the first of these actors to the last, if all have free places.

    The function does the work of `Worker.run` between two nodes, and leaves rarer cases to `Worker.run`: it returns
    early if the next node has no free place, or the frame has ended. An error belongs to `worker.actor`.

    Args:
        actors: the actors.
        is_whole: whether these are all actors of the graph; then the line ends the frame, and takes the next item of
            the stream.
    """
    compiled = _compiled_line(tuple([bool(actor.bound._links) for actor in actors]), is_whole)
    line: AsyncLine = compiled(*actors, *[a.limiter for a in actors], *[a.fn for a in actors])
    return line


@cache
def _compiled_line(are_plain: tuple[bool, ...], is_whole: bool) -> Callable[..., Any]:
    length = len(are_plain)
    names = [f"{kind}{index}" for kind in ("actor", "limiter", "fn") for index in range(length)]
    last = length - 1
    lines = [f"worker.budget -= {last}", "value = await fn0(values[actor0.slot])"]
    for index in range(1, length):
        lines += [
            f"free = limiter{index}.free",
            # A frame that has ended without a result has no values. First runs of plain functions take another way.
            f"if free <= 0 or not values{f' or not actor{index}.completed' * are_plain[index]}:",
            " return value",
            f"actor{index - 1}.completed += 1",
            f"limiter{index}.free = free - 1",
            *_release(index - 1),
            f"worker.actor = actor{index}",
        ]
        if are_plain[index]:
            lines += [
                "values[actor0.out] = value",
                f"value = actor{index}.run(values, worker)",
                "if worker.budget <= 0:",  # it was slow
                " return value",
            ]
            continue
        if index == 1 or are_plain[index - 1]:  # empty the slot, so that the line keeps no value but the last alive
            lines.append("values[actor0.out] = None")
        lines.append(f"value = await fn{index}(value)")
    if is_whole:
        lines += [
            "if not values:",
            " return value",
            f"actor{last}.completed += 1",
            "worker.frame = None",
            "frame.end_with(value)",
            *_release(last),
            "frame = values = value = None",
            "frame = worker.next_item(actor0) if worker.group.feed is not None else None",
            "if frame is None:",
            " return None",
            "worker.budget -= 1",
            "values = frame.values",
        ]
        lines = ["while True:", *[f" {line}" for line in lines]]
    else:
        lines.append("return value")
    source = [f"def enclose({', '.join(names)}):", " async def line(worker, frame, values):"]
    source += [*[f"  {line}" for line in lines], " return line"]
    namespace: dict[str, Any] = {}
    exec(compile("\n".join(source), LINE_FILE, "exec"), namespace)
    enclose: Callable[..., Any] = namespace["enclose"]
    return enclose


def _release(index: int) -> list[str]:
    """Return the lines that give back the place in an actor."""
    limiter = f"limiter{index}"
    return [f"if {limiter}.waiting:", f" {limiter}.release()", "else:", f" {limiter}.free += 1"]


# How many executions of an `async def` are timed to find out whether they block the loop; for each scope, or for all
# runs of a graph. More would cost too much: two readings of the clock take as long as awaiting a function that does
# nothing. A handler that blocks does so in most calls.
WATCHED: Final = 8


@coroutine
def watched(tell: Callable[[float], object], work: "CoroutineType[Any, Any, Any]") -> Generator[Any, Any, Any]:
    """Await a coroutine, and tell for how many seconds each of its steps has held the event loop."""
    sent: Any = None
    error: BaseException | None = None
    while True:
        began = perf_counter()
        try:
            waits_for = work.send(sent) if error is None else work.throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            error = None  # breaks a cycle: its traceback refers to this frame
            tell(perf_counter() - began)
        try:
            sent = yield waits_for
        except GeneratorExit:
            work.close()
            raise
        except BaseException as thrown:  # noqa: BLE001 - handed on
            error = thrown
        finally:
            waits_for = None  # breaks a cycle: an error in it refers to this stack frame


LEFT_OUT.add(watched.__code__)


_LINES_BEFORE = 4  # the line number at which the source in `_compiled` calls the first function


def run_linkwise(links: Sequence[Link], actor: "NodeActor", frame: Frame, args: Any, kwargs: Any) -> Any:
    """Run a chain link by link: check each result, and open a span for each link after the first in a sampled frame."""
    number = 0  # `link_in` reads it from the stack frame
    value = links[0].fn(*args, **kwargs)
    actor.refuse_coroutine(value, links[0].name)
    for number in range(1, len(links)):
        link = links[number]
        if actor.sampler is not None:
            actor.sampler.between.append(perf_counter())
        value = link.fn(value) if frame.span is None else _traced(frame.span, link, frame.item, value)
        actor.refuse_coroutine(value, link.name)
    return value


def _traced(parent: FrameSpan, link: Link, item: int, value: Any) -> Any:
    span = NodeSpan(parent, link.name, of_every_execution(link.name, link.fn, link.model), item)
    try:
        value = link.fn(value)
        span.returned(value)
    except BaseException as error:
        span.end("failed", error)
        raise
    span.end("done")
    return value


def link_in(code: CodeType, frames: Iterable[tuple[FrameType, int]]) -> int | None:
    """Return the number of the link that runs, or has failed, in stack frames; None if no link is there.

    Args:
        code: the code object of the compiled chain.
        frames: the stack frames, each with its line number, as `traceback.walk_stack` and `walk_tb` yield them.
    """
    for frame, line in frames:
        if frame.f_code is code:
            return line - _LINES_BEFORE
        if frame.f_code is run_linkwise.__code__:
            number: int = frame.f_locals["number"]
            return number
    return None
