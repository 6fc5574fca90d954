"""Faults for tests: raise, delay, cancel or kill at a named point of the engine.

    with faults.inject("node.call", faults.Raise(OSError("down")), node=fetch, at=3) as injected:
        ...
    assert injected[0].node == "fetch"

While no fault is injected, faults cost items and calls nothing: injecting changes how graphs are wired.

The points:

- `"actor.start"`: a stateful node is entered, before its `__aenter__`.
- `"node.call"`: a node is about to handle an item; each attempt and each item is a call.
- `"worker.process"`: a call of a node is about to be sent to a worker process.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, overload

from .._errors import copy_of
from .._public import public
from ..actors.accepted import SHARE, check, whole
from ..extension import Interception, as_node, intercept

Point: TypeAlias = Literal["actor.start", "node.call", "worker.process"]


@dataclass(frozen=True)
class Raise:
    """Raise an exception at the point, as if the node, or the code at that point, had raised it.

    Args:
        error: the exception, or its class; each injection raises a copy, or a new instance.
    """

    error: BaseException | type[BaseException]

    def _wait_seconds(self) -> float:
        raise self.error() if isinstance(self.error, type) else copy_of(self.error)


@dataclass(frozen=True)
class Delay:
    """Wait at the point. For a plain `def`, which cannot await, the wait blocks its thread or the loop.

    Args:
        seconds: how long to wait, in seconds.
    """

    seconds: float

    def _wait_seconds(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class Cancel:
    """Raise CancelledError at the point, although the item was not cancelled."""

    def _wait_seconds(self) -> float:
        raise asyncio.CancelledError("penstock.testing.faults: cancelled here")


@dataclass(frozen=True)
class Kill:
    """Kill the worker process that runs the call, by SIGKILL; only at `"worker.process"`."""

    def _wait_seconds(self) -> float:
        return 0


Fault: TypeAlias = Raise | Delay | Cancel | Kill


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault that was injected.

    Attributes:
        point: the point.
        node: the name of the node in the plan: "fetch", "fetch#2".
        number: the number of this pass of the point, from 1; if `inject` names a node, passes of other nodes do not
            count.
    """

    point: Point
    node: str
    number: int


class Injections(Sequence[Injection]):
    """The injections so far, in order; the sequence grows inside the `with`.

    Attributes:
        passes: how often the point was passed, with or without a fault.
    """

    def __init__(self, point: Point, fault: Fault, node: str | None, chosen: Callable[[int], bool]) -> None:
        self.passes = 0
        self._point: Point = point
        self._fault = fault
        self._node = node
        self._chosen = chosen
        self._injections: list[Injection] = []
        self._lock = threading.Lock()  # nodes run in threads, too

    @overload
    def __getitem__(self, index: int, /) -> Injection: ...
    @overload
    def __getitem__(self, index: slice, /) -> Sequence[Injection]: ...
    def __getitem__(self, index: int | slice, /) -> Injection | Sequence[Injection]:
        return self._injections[index]

    def __len__(self) -> int:
        return len(self._injections)

    def __repr__(self) -> str:
        return f"<{len(self)} of {self.passes} passes of {self._place()}: {self._fault}>"

    def _take(self, name: str) -> Fault | None:
        """Count a pass of the point by a node; return the fault if it has to happen now, None otherwise."""
        if self._node is not None and self._node not in (name, name.partition("#")[0]):
            return None
        with self._lock:
            self.passes += 1
            if not self._chosen(self.passes):
                return None
            self._injections.append(Injection(self._point, name, self.passes))
            return self._fault

    def _place(self) -> str:
        return repr(self._point) + ("" if self._node is None else f" of node {self._node!r}")


def inject(
    point: Point,
    fault: Fault,
    /,
    *,
    node: Callable[..., Any] | str | None = None,
    at: int | Container[int] | None = None,
    every: int | None = None,
    probability: float | None = None,
    seed: int = 0,
    optional: bool = False,
) -> AbstractContextManager[Injections]:
    """Inject a fault at a point of the engine, inside the `with`; by default each time that a node passes the point.

    Graphs are traced again, as with `replace`. Streams and deployments that run already are not affected, except at
    `"worker.process"`. Nodes that are called without an engine pass no points.

    Args:
        point: the point: `"actor.start"`, `"node.call"` or `"worker.process"`.
        fault: the fault: `Raise`, `Delay`, `Cancel` or `Kill`.
        node: inject only for this node, or for nodes of this name; "fetch#2" is the second call site of a graph.
        at: inject only at the pass with this number, counted from 1, or at several passes: `at=3`, `at=range(1, 3)`.
        every: inject only at each `every`-th pass.
        probability: inject at each pass with this probability, from 0 to 1, drawn from `seed`.
        seed: the seed of the random numbers.
        optional: whether the `with` may end without any injection.

    Returns:
        A context manager, whose value is the `Injections`.

    Raises:
        ValueError: there is no such point, or the arguments contradict each other.
        AssertionError: at the end of the `with`, if the fault never happened and is not `optional`.
    """
    if point not in get_args(Point):
        raise ValueError(f"{point!r} is no point; there are {', '.join(map(repr, get_args(Point)))}")
    if isinstance(fault, Kill) and point != "worker.process":
        raise ValueError(f'faults.Kill() ends a worker process, so its point is "worker.process", not {point!r}')
    name = None if node is None else _name_of(node)
    injections = Injections(point, fault, name, _choice(at, every, probability, seed))
    return _injected(injections, point, optional=optional)


@contextmanager
def _injected(injections: Injections, point: Point, *, optional: bool) -> Generator[Injections]:
    _active[point].append(injections)
    _intercept()
    try:
        yield injections
    finally:
        _active[point].remove(injections)
        _intercept()
    if not injections and not optional:
        raise AssertionError(
            f"no fault was injected: {injections._place()} was passed {injections.passes} times. Inject before the "
            "stream or deployment begins; optional=True if it need not happen"
        )


def _choice(
    at: int | Container[int] | None, every: int | None, probability: float | None, seed: int
) -> Callable[[int], bool]:
    if sum(given is not None for given in (at, every, probability)) > 1:
        raise ValueError("at=, every= and probability= say when a fault happens; give one of them, or none for always")
    if every is not None:
        check("every", every, whole(1))
        return lambda number: number % every == 0
    if probability is not None:
        check("probability", probability, SHARE)
        draw = random.Random(seed)
        return lambda number: draw.random() < probability
    if at is None:
        return lambda number: True
    numbers = (at,) if isinstance(at, int) else at
    return lambda number: number in numbers


def _name_of(node: Callable[..., Any] | str) -> str:
    if isinstance(node, str):
        return node
    found = as_node(node)
    if found is None:
        raise TypeError(f"node= takes a node, an instance of a stateful one, or a name, got {node!r}")
    return found.name


# The faults at each point; the engine is intercepted only at points with faults.
_active: dict[Point, list[Injections]] = {point: [] for point in get_args(Point)}


def _intercept() -> None:
    is_called = bool(_active["node.call"])
    intercept(
        Interception(
            entering=partial(_pass, "actor.start") if _active["actor.start"] else None,
            calling=partial(_pass, "node.call") if is_called else None,
            calling_plain=_pass_blocking if is_called else None,
            giving=_kills_process if _active["worker.process"] else None,
        )
    )


def _due(point: Point, node: str) -> Iterator[Fault]:
    """Yield the faults that have to happen as a node passes a point."""
    for injections in tuple(_active[point]):
        if (fault := injections._take(node)) is not None:
            yield fault


async def _pass(point: Point, node: str) -> None:
    for fault in _due(point, node):
        await asyncio.sleep(fault._wait_seconds())


def _pass_blocking(node: str) -> None:
    for fault in _due("node.call", node):
        time.sleep(fault._wait_seconds())


async def _kills_process(node: str) -> bool:
    """Pass the point with a call; return whether the worker process of the call has to be killed."""
    kills = False
    for fault in _due("worker.process", node):
        kills |= isinstance(fault, Kill)
        await asyncio.sleep(fault._wait_seconds())
    return kills


__all__ = ["Cancel", "Delay", "Fault", "Injection", "Injections", "Kill", "Point", "Raise", "inject"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public(__name__)
