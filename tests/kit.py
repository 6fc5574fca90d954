"""Parts of many tests: nodes of one line, a node that waits at a gate, and a stateful node."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, Self, TypeVar

import penstock as ps
from penstock import engine, testing

P = ParamSpec("P")
T = TypeVar("T")
Scheduler = Literal["actors", "parallel", "wave", "sequential"]
SCHEDULERS: list[Scheduler] = ["actors", "parallel", "wave", "sequential"]


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an `async def` test once, on a clock that jumps to the next timer."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        testing.run_virtual(partial(test, *args, **kwargs))

    return run


async def begun(*calls: Coroutine[Any, Any, T]) -> list[asyncio.Task[T]]:
    """Starts a task for each call, in this order, and returns when no task can go on."""
    tasks = [asyncio.create_task(call) for call in calls]
    await testing.wait_quiescent()
    return tasks


async def outcomes(*calls: Awaitable[Any]) -> list[Any]:
    """Waits for calls that run at a time; returns the result of each, or the class of its exception."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [type(result) if isinstance(result, BaseException) else result for result in results]


def cancelled_at_every_step(
    main: Callable[[], Coroutine[Any, Any, T]], **options: Any
) -> Iterator[testing.CancelOutcome[T]]:
    """Cancels `main` at every step; sees that nothing is left, and that no other error than the cancel comes out."""
    for outcome in testing.cancel_at_every_step(main, **options):
        assert not outcome.tasks_left, outcome
        assert not outcome.loop_errors, outcome
        assert isinstance(outcome.error, asyncio.CancelledError | None), outcome
        yield outcome


@ps.node
async def same(x: int) -> int:
    return x


@ps.node
def plain(x: int) -> int:
    return x


@ps.node
async def paused(x: int) -> int:
    await asyncio.sleep(0)
    return x


@ps.node
def added(x: int) -> int:
    return x + 1


@ps.node
def negative(x: int) -> int:
    return -x


@ps.node
async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


@ps.node
async def counted(limit: int | None) -> AsyncIterator[int]:
    """Gives numbers, each in a turn of the loop of its own; without a limit, for ever."""
    number = 0
    while number != limit:
        await asyncio.sleep(0)
        yield number
        number += 1


@ps.node
async def listed(values: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in values]


@ps.node
async def summed(values: AsyncIterator[int]) -> int:
    return sum([value async for value in values])


@ps.node
async def slow_to_leave(x: int) -> int:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(1)
    return x


@contextmanager
def without_the_collector() -> Iterator[None]:
    """Frees objects in cycles before, and no such object inside: only references count there."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def values_of(stream: engine.Stream[T]) -> list[T]:
    """Reads a stream to its end."""
    async with stream as values:
        return [value async for value in values]


async def outcomes_of(stream: engine.Stream[T]) -> list[engine.Outcome[T]]:
    """Reads a stream to its end, past the items that fail."""
    async with stream:
        return [outcome async for outcome in stream.outcomes()]


@dataclass
class Renamed:
    """A key whose hash changes with its name."""

    name: str

    def __hash__(self) -> int:
        return hash(self.name)


class Gauge:
    """Counts the handlers inside a `with` block.

    Attributes:
        now: how many handlers are inside.
        peak: the highest value that `now` has had.
        total: how many handlers have entered.
    """

    def __init__(self) -> None:
        self.now = self.peak = self.total = 0

    def __enter__(self) -> None:
        self.now += 1
        self.total += 1
        self.peak = max(self.peak, self.now)

    def __exit__(self, *exc_info: object) -> None:
        self.now -= 1


class Gate:
    """Holds handlers back until a test opens the gate: on the event loop with `wait`, in a thread with `block`.

    Attributes:
        came: the items that have come to the gate, in this order.
        gone: the items that were let through, in this order.
        cancelled: the items that were cancelled at the gate.
        gauge: how many items are at the gate.
    """

    def __init__(self) -> None:
        self.came: list[Any] = []
        self.gone: list[Any] = []
        self.cancelled: list[Any] = []
        self.gauge = Gauge()
        self._lock = threading.Lock()
        self._opened = asyncio.Event()
        self._opened_for_threads = threading.Event()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        self._opened.set()
        self._opened_for_threads.set()

    def close(self) -> None:
        self._opened.clear()
        self._opened_for_threads.clear()

    async def has(self, count: int = 1) -> None:
        """Waits until `count` items have come to the gate."""
        self._loop = asyncio.get_running_loop()
        while len(self.came) < count:
            self._changed.clear()
            await self._changed.wait()

    async def wait(self, x: T) -> T:
        with self._inside(x):
            try:
                await self._opened.wait()
            except asyncio.CancelledError:
                self.cancelled.append(x)
                raise
        return x

    def block(self, x: T) -> T:
        with self._inside(x):
            assert self._opened_for_threads.wait(30)
        return x

    @contextmanager
    def _inside(self, x: object) -> Generator[None]:
        with self._lock:
            self.gauge.__enter__()
            self.came.append(x)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)
        try:
            yield
            self.gone.append(x)
        finally:
            with self._lock:
                self.gauge.__exit__()

    def node(self, **policy: Any) -> Any:
        """Returns a node that waits at the gate, and then returns its argument."""

        async def held(x: Any) -> Any:
            return await self.wait(x)

        make: Any = ps.node(**policy)
        return make(held)

    def graph(self, **policy: Any) -> ps.Graph[[Any], Any]:
        """Returns a graph that calls one node, which waits at the gate."""
        return ps.graph(self.node(**policy))


def model(
    log: list[str] | None = None,
    *,
    enter: Callable[[], Awaitable[object]] | None = None,
    call: Callable[[Any], Awaitable[Any]] | None = None,
    leave: Callable[[], Awaitable[object]] | None = None,
    **policy: Any,
) -> Any:
    """Returns a stateful node that returns its argument, or the result of `call`.

    Args:
        log: gets "entered" when an instance was entered, and "left" when it was left.
        enter: runs while an instance is entered.
        call: runs in place of the handler.
        leave: runs while an instance is left.
        **policy: options of the node.
    """
    journal = [] if log is None else log

    class Model:
        async def __aenter__(self) -> Self:
            if enter is not None:
                await enter()
            journal.append("entered")
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            if leave is not None:
                await leave()
            journal.append("left")

        async def __call__(self, x: Any) -> Any:
            return x if call is None else await call(x)

    make: Any = ps.node(**policy)
    return make(Model)()


def actor(loop: Callable[[Any], Awaitable[None]], base: type[Any] = ps.Actor, **policy: Any) -> Any:
    """Returns an actor whose loop is this function of its inbox; the actor has the name of the function."""

    async def run(self: object, inbox: Any, /) -> None:
        await loop(inbox)

    make: Any = ps.node(**policy)
    return make(type(loop.__name__, (base,), {"loop": run}))()


class Taken:
    """An actor whose loop hands its work to the test, which settles it.

    Attributes:
        works: what the loop has taken, in this order.
    """

    def __init__(self, base: type[Any] = ps.Actor, **policy: Any) -> None:
        self.works: list[Any] = []
        self.graph: ps.Graph[[int], Any] = ps.graph(actor(self.take, base, **policy))

    async def take(self, inbox: Any) -> None:
        while True:
            self.works.append(await inbox.get())

    async def work(self, number: int = 0) -> Any:
        """Returns the work with this number, when no task can go on."""
        await testing.wait_quiescent()
        return self.works[number]
