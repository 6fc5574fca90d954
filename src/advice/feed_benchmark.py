"""How fast a feed gives examples and batches: measured over several runs, told as medians and quartiles, compared."""

import asyncio
import json
import os
import platform
import sys
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from time import perf_counter
from typing import Any, Final, Self

from .. import Call, engine
from .._errors import OptionsError
from ..actors.accepted import check, whole
from ..actors.tasks import close_stream, until
from ..telemetry.tables import Column, Rendered, Table, count, milliseconds, quartiles, rate, significant

_END: Final = object()
_COLUMNS: Final = tuple(map(Column, ("examples", "from", "to", "batches", "from", "to", "first item")))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median and the quartiles of one number over several runs.

    Attributes:
        median: half of the runs had at most this number.
        low: a quarter of the runs had at most this number.
        high: three quarters of the runs had at most this number.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the median and the quartiles of some numbers; for a single number, that number three times."""
        low, middle, high = quartiles(values)
        return cls(median=middle, low=low, high=high)

    def _shown(self) -> tuple[str, str, str]:
        return rate(self.median), rate(self.low), rate(self.high)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment of a measurement. Ratios can be compared between machines, times cannot.

    Attributes:
        python: version of Python.
        implementation: which Python, such as "CPython".
        system: operating system and architecture.
        cores: how many cores this process may use; None if the system does not tell.
        jax: version of JAX; None if the program has not loaded it.
        devices: kinds of the devices on which arrays arrived; empty if none did.
    """

    python: str
    implementation: str
    system: str
    cores: int | None
    jax: str | None
    devices: tuple[str, ...]

    @classmethod
    def present(cls, devices: Iterable[str] = ()) -> Self:
        """Return the environment of this process."""
        jax = sys.modules.get("jax")
        return cls(
            python=platform.python_version(),
            implementation=platform.python_implementation(),
            system=f"{platform.system()} {platform.machine()}",
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            jax=getattr(jax, "__version__", None),
            devices=tuple(sorted(devices)),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run over a feed.

    Attributes:
        items: how many items were counted; an item is what the feed gives, such as a batch.
        examples: how many examples were in them.
        seconds: the time from the arrival of the last uncounted item to the arrival of the last counted one.
        first_item_seconds: the time from the beginning of the run to the arrival of its first item.
        uncounted: how many items were read before, for warm-up, or because they had been prefetched.
    """

    items: int
    examples: int
    seconds: float
    first_item_seconds: float
    uncounted: int


@dataclass(frozen=True, kw_only=True)
class Comparison(Rendered):
    """Two benchmarks side by side. `str()` shows it as a table.

    Attributes:
        first: the benchmark whose `compared_with` was called.
        second: the benchmark that it is compared with.
        examples_ratio: examples a second of the first over those of the second; the range is the widest that the
            quartiles of both allow.
        is_clear: whether the quartiles do not overlap, so that the ratio is not chance.
        differences: the differences of their environments, "cores: 2, 64"; if there are any, the ratio says little.
    """

    first: "Benchmark"
    second: "Benchmark"
    examples_ratio: Spread
    is_clear: bool
    differences: tuple[str, ...]

    def _table(self) -> Table:
        ratio = self.examples_ratio
        told = f"{significant(ratio.median)} ({significant(ratio.low)} to {significant(ratio.high)})"
        doubt = "" if self.is_clear else "; the quartiles overlap: more repeats or items would tell"
        return Table(
            facts=(("ratio", told + doubt), ("environments", "; ".join(self.differences) or "the same")),
            columns=(Column("feed", is_number=False), *_COLUMNS),
            rows=tuple((one.name, *one._cells()) for one in (self.first, self.second)),
            remark="The ratio is that of examples a second; from and to are the quartiles",
        )


@dataclass(frozen=True, kw_only=True)
class Benchmark(Rendered):
    """How fast a feed is. `str()` shows it as a table.

    Attributes:
        name: what was measured.
        runs: the runs, in their order.
        environment: what it was measured on.
        batches_per_second: items a second.
        examples_per_second: examples a second.
    """

    name: str
    runs: tuple[Run, ...]
    environment: Environment

    @property
    def batches_per_second(self) -> Spread:
        """Items a second."""
        return Spread.of([run.items / run.seconds for run in self.runs])

    @property
    def examples_per_second(self) -> Spread:
        """Examples a second."""
        return Spread.of([run.examples / run.seconds for run in self.runs])

    def to_json(self) -> str:
        """Return the benchmark as JSON, which `from_json` reads."""
        rates = {name: asdict(getattr(self, name)) for name in ("batches_per_second", "examples_per_second")}
        return json.dumps({**asdict(self), **rates}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the benchmark that `to_json` has written.

        Raises:
            ValueError: the text is not of `to_json`.
        """
        try:
            read: Any = json.loads(text)
            runs = tuple(Run(**{one.name: run[one.name] for one in fields(Run)}) for run in read["runs"])
            about: dict[str, Any] = {one.name: read["environment"][one.name] for one in fields(Environment)}
            about["devices"] = tuple(about["devices"])
            environment = Environment(**about)
            return cls(name=read["name"], runs=runs, environment=environment)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no benchmark that to_json() has written: {error!r}") from error

    def compared_with(self, other: "Benchmark") -> Comparison:
        """Return how many times as fast as another feed this one gives examples."""
        mine, others = self.examples_per_second, other.examples_per_second
        about, around = asdict(self.environment), asdict(other.environment)
        return Comparison(
            first=self,
            second=other,
            examples_ratio=Spread(
                median=mine.median / others.median, low=mine.low / others.high, high=mine.high / others.low
            ),
            is_clear=mine.low > others.high or others.low > mine.high,
            differences=tuple(f"{key}: {about[key]}, {around[key]}" for key in about if about[key] != around[key]),
        )

    def _cells(self) -> tuple[str, ...]:
        first = Spread.of([run.first_item_seconds for run in self.runs])
        return *self.examples_per_second._shown(), *self.batches_per_second._shown(), milliseconds(first.median)

    def _table(self) -> Table:
        about = self.environment
        system = f"{about.implementation} {about.python}, {about.system}, {count(about.cores)} cores"
        arrived = "".join(f", {kind}" for kind in about.devices)
        runs = self.runs
        return Table(
            facts=(
                ("feed", self.name),
                ("runs", f"{len(runs):,}, of {min(run.items for run in runs):,} items or more"),
                ("on", f"{system}{'' if about.jax is None else f', JAX {about.jax}'}{arrived}"),
            ),
            columns=_COLUMNS,
            rows=(self._cells(),),
            remark="From and to are the quartiles",
        )


async def benchmark(
    feed: "Call[AsyncIterator[Any]] | AsyncIterable[Any] | Iterable[Any]",
    /,
    *,
    warmup_items: int = 10,
    items: int = 100,
    repeats: int = 5,
    examples: Callable[[Any], int] | None = None,
    name: str | None = None,
) -> Benchmark:
    """Measure how many examples and batches a feed gives in a second to a reader that does nothing with them.

    An item has arrived when its arrays are computed; a thread waits for arrays of JAX. After the warm-up, the reader
    reads on without counting until it has to wait for an item, so prefetched items do not count. A plain iterable, such
    as a loader with its own processes, is read in a thread, where the reader cannot tell whether it waits. For such a
    feed, `warmup_items` has to be more than the iterable prefetches.

    Args:
        feed: a call of a graph that returns a stream, which is started anew for each run; or an iterable, plain or
            async. If the iterable can be iterated only once, as a generator, each run begins where the last one ended.
        warmup_items: the first items of each run, which are not counted.
        items: how many items of each run are counted; fewer if the feed ends before.
        repeats: how many runs there are.
        examples: returns how many examples an item has. By default, the length of the first axis of its first array;
            for a list, its length.
        name: the name of the feed; by default, the name of the graph or type.

    Raises:
        OptionsError: a number is not at least 1 (0 for `warmup_items`), or the feed ended before an item was counted.
        TypeError: the feed is neither such a call nor an iterable.
        Exception: the error that the feed raised.
    """
    check("warmup_items", warmup_items, whole(0), "benchmark(")
    check("items", items, whole(1), "benchmark(")
    check("repeats", repeats, whole(1), "benchmark(")
    given: Any = feed
    call: Call[AsyncIterator[Any]] | None = given if isinstance(feed, Call) else None
    if call is None and not hasattr(given, "__aiter__") and not hasattr(given, "__iter__"):
        raise TypeError(f"data.benchmark takes a call that gives a stream, or something to iterate over, got {given!r}")
    name = name or (type(given).__name__ if call is None else call.graph.name)
    measure = _Measure(warmup_items, items, examples or examples_of)
    runs: list[Run] = []
    for _ in range(repeats):
        if call is not None:
            async with engine.stream(call) as stream:
                run = await measure.of_stream(stream)
        elif hasattr(given, "__aiter__"):
            run = await _of_async_iterable(measure, given)
        else:
            run = await _of_iterable(measure, given)
        if run is None:
            break
        runs.append(run)
    if not runs:
        raise OptionsError(
            f"benchmark(warmup_items={warmup_items}, items={items}): feed {name!r} ended before an item counted: all "
            "items were for warm-up, or had been prefetched; read fewer of them, or take a longer feed"
        )
    return Benchmark(name=name, runs=tuple(runs), environment=Environment.present(measure.devices))


async def _of_async_iterable(measure: "_Measure", feed: Any) -> Run | None:
    iterator = aiter(feed)
    try:
        return await measure.of_stream(iterator)
    finally:
        if iterator is not feed:
            await close_stream(iterator)


async def _of_iterable(measure: "_Measure", feed: Any) -> Run | None:
    stopped = threading.Event()

    async def read() -> AsyncIterator[Any]:
        for item in feed:
            if stopped.is_set():
                return
            yield item

    # In an event loop of its own: what blocks for an item, blocks nothing else.
    reading = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(measure.of_stream(read(), tells_waits=False))))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        stopped.set()  # a thread cannot be cancelled: it ends after the item that it reads
        await until(reading.done, lambda: asyncio.wait([reading]))
        reading.exception()  # retrieved, so that asyncio does not log it
        raise


class _Measure:
    """How runs are measured.

    Attributes:
        devices: kinds of the devices on which arrays have arrived.
    """

    def __init__(self, warmup_items: int, items: int, examples_of: Callable[[Any], int]) -> None:
        self._warmup_items = warmup_items
        self._items = items
        self._examples_of = examples_of
        self.devices: set[str] = set()

    async def of_stream(self, stream: AsyncIterator[Any], *, tells_waits: bool = True) -> Run | None:
        """Return what a run over a stream has measured; None if it ended before anything counted.

        Args:
            stream: the stream.
            tells_waits: whether the event loop has a turn while an item is waited for.
        """
        loop = asyncio.get_running_loop()
        began = at = perf_counter()
        first_seconds: float | None = None
        uncounted = examples = number = 0
        has_waited = not tells_waits
        # Prefetched items come without a turn of the loop; if so many in a row need none, no other task makes them.
        while uncounted < self._warmup_items or not has_waited:
            if uncounted >= self._warmup_items + self._items:
                break
            turned = asyncio.Event()
            loop.call_soon(turned.set)
            if (item := await anext(stream, _END)) is _END:
                return None
            has_waited = turned.is_set() or not tells_waits
            await self._arrived(item)
            at = perf_counter()
            first_seconds = at - began if first_seconds is None else first_seconds
            uncounted += 1
        for _ in range(self._items):
            if (item := await anext(stream, _END)) is _END:
                break
            await self._arrived(item)
            first_seconds = perf_counter() - began if first_seconds is None else first_seconds
            number += 1
            examples += self._examples_of(item)
        if first_seconds is None or not number:
            return None
        seconds = max(perf_counter() - at, 1e-9)
        return Run(
            items=number, examples=examples, seconds=seconds, first_item_seconds=first_seconds, uncounted=uncounted
        )

    async def _arrived(self, item: Any) -> None:
        """Wait for the arrays of JAX in an item, off the loop."""
        jax: Any = sys.modules.get("jax")  # without JAX there is no such array
        if jax is None:
            return
        arrays = [leaf for leaf in jax.tree.leaves(item) if isinstance(leaf, jax.Array)]
        self.devices.update(device.device_kind for array in arrays for device in array.devices())
        if not all(array.is_ready() for array in arrays):
            await asyncio.to_thread(jax.block_until_ready, arrays)


def examples_of(item: Any) -> int:
    """Return how many examples an item has: along the first axis of its first array; of a list, its length."""
    while not isinstance(shape := getattr(item, "shape", None), tuple):
        if isinstance(item, list):
            return len(item)  # pyright: ignore[reportUnknownArgumentType] - of whatever
        inside: Any = item
        if isinstance(item, Mapping):
            inside = inside.values()
        elif not isinstance(item, tuple):
            inside = [item.value] if hasattr(item, "value") else ()  # a record of a feed
        item = next(iter(inside), None)
        if item is None:
            return 1
    return shape[0] if shape else 1  # pyright: ignore[reportUnknownVariableType]
