"""A consumer: it takes messages of a source through a deployment, and settles the messages that have ended."""

import asyncio
import inspect
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Final, Self
from weakref import WeakSet

from .. import Call, OptionsError, engine
from ..actors.accepted import KEY, NOT_NEGATIVE, POSITIVE, OptionRule, check, optional, whole
from ..extension import tell_in_top
from ..telemetry import logs, names
from ..telemetry.tables import Column, Rendered, Table, count
from .partitions import CLOSING_SECONDS, PAUSE_SECONDS, Partition, Partitions, uncancelled
from .source import DeadLetter, Message, Source

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_ASYNC: Final = OptionRule(
    "an `async def`",
    lambda value: inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__),
)
_SOURCE: Final = OptionRule("a Source, such as consume.Kafka(...)", lambda value: isinstance(value, Source))
_CALL_OF: Final = OptionRule("a function that is not async, such as lambda message: handle(message.value)", KEY.fits)


def by_key(message: Message) -> Hashable:
    """Return the key of a message."""
    return message.key


@dataclass(frozen=True)
class PartitionStatistics:
    """The counters of one partition of a consumer.

    Attributes:
        partition: the name of the partition.
        open: how many messages were taken and have not ended, or wait for an earlier message.
        lag: how many messages are not settled, in all; None if the source does not know.
    """

    partition: str
    open: int
    lag: int | None


@dataclass(frozen=True)
class ConsumerStatistics(Rendered):
    """A snapshot of a consumer. It shows itself as a table.

    Attributes:
        partitions: the partitions that it holds; after its end, what it has left of them.
        ended: how many messages have ended, dead letters included.
        dead_letters: how many messages were written as dead letters.
        late_commits: how many commits came too late, because the partition belonged to another consumer by then.
        open: how many messages are open, over all partitions.
        lag: how many messages are not settled, over all partitions; None if the source does not know.
    """

    partitions: tuple[PartitionStatistics, ...]
    ended: int
    dead_letters: int
    late_commits: int

    @property
    def open(self) -> int:
        """How many messages are open, over all partitions."""
        return sum(partition.open for partition in self.partitions)

    @property
    def lag(self) -> int | None:
        """How many messages are not settled, over all partitions; None if the source does not know."""
        known = [partition.lag for partition in self.partitions if partition.lag is not None]
        return sum(known) if known else None

    def _line(self) -> str:
        return f"{count(self.ended)} ended, {count(self.open)} open, lag {count(self.lag)}"

    def _table(self) -> Table:
        facts = (
            ("messages", self._line()),
            ("dead letters", count(self.dead_letters)),
            ("late commits", count(self.late_commits)),
        )
        rows = tuple((one.partition, count(one.open), count(one.lag)) for one in self.partitions)
        return Table(facts, (Column("partition", is_number=False), Column("open"), Column("lag")), rows)


class Consumer:
    """Takes the messages of a source through a deployment, and settles them when they have ended. A context manager.

    Each partition has a stream of its own. The end of the `async with` takes no more messages, finishes and settles the
    open messages, and closes the source. After an exception it cancels the open messages, and settles those that have
    ended. A consumer is entered once. It handles no signals: `run` does.

    Args:
        service: the deployment whose graphs make the calls. Its `timeout_seconds` is for other callers: messages have
            no deadline, and nodes have their own timeouts.
        source: the source, which no other consumer has at the same time.
        call_of: returns the call for a message. If it raises an error, or returns no call, the message has failed.
        dead_letters: an async function that puts a message aside whose call has failed. It may be called for several
            messages at a time, but for messages of one key in their order. If the function raises, it is called again
            until it succeeds, with pauses of up to 10 seconds. Until then the position stays before the message. A
            `DeadLetterError` ends the consumer.
        order_by: returns the key of a message. Messages of one key are handled one after the other, in each partition.
            None for no order.
        max_open: the most messages that are taken and not ended, over all partitions. Each partition has an equal
            share. Allow at least one message for each partition; otherwise partitions take turns.
        settle_seconds: how often ended messages are settled, in seconds.
        drain_seconds: how long the end may take, in seconds. Messages that are open then are cancelled, and come again.
            The last commit and closing the source may take 1.5 seconds longer.

    Raises:
        OptionsError: an argument does not accept its value.
    """

    def __init__(
        self,
        service: engine.Service[..., Any],
        source: Source,
        call_of: Callable[[Message], Call[Any]],
        *,
        dead_letters: Callable[[DeadLetter], Awaitable[object]],
        order_by: Callable[[Message], Hashable] | None = by_key,
        max_open: int = 256,
        settle_seconds: float = 1.0,
        drain_seconds: float = 20.0,
    ) -> None:
        for option, value, accepted in (
            ("source", source, _SOURCE),
            ("call_of", call_of, _CALL_OF),
            ("dead_letters", dead_letters, _ASYNC),
            ("order_by", order_by, optional(KEY)),
            ("max_open", max_open, whole(1)),
            ("settle_seconds", settle_seconds, POSITIVE),
            ("drain_seconds", drain_seconds, NOT_NEGATIVE),
        ):
            check(option, value, accepted, "Consumer(")
        self._source = source
        self._settle_seconds, self._drain_seconds = settle_seconds, drain_seconds
        self._held = Partitions(service, source, call_of, dead_letters, order_by, max_open, self._fail)
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self._starting: asyncio.Timeout | None = None
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        if self._held._has_ended or any(one._source is self._source for one in _open):
            raise OptionsError(
                "a Consumer is entered once, and a source belongs to one Consumer at a time: make a new Consumer(...), "
                "and for several at a time a source for each, such as consume.Kafka(...)"
            )
        keep_seconds = self._source.keep_seconds
        for each, seconds in ((self._settle, self._settle_seconds), (self._keep, keep_seconds)):
            if seconds is not None:
                task = asyncio.create_task(each(seconds), name="penstock-consumer")
                task.add_done_callback(self._held._task_ended)
                self._tasks.append(task)
        _count(self)
        self._stack.callback(tell_in_top(lambda: [("consumer", self.statistics()._line())]))
        async with AsyncExitStack() as on_error:
            on_error.push_async_exit(self)
            try:
                async with asyncio.timeout(None) as self._starting:
                    await uncancelled(self._stack.enter_async_context, self._source.partitions(self._held))
            except TimeoutError:
                if not self._over.is_set():
                    raise
            finally:
                self._starting = None
            on_error.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        drain_seconds = self._drain_seconds if error is None and self._error is None else 0
        self._held._close_within(drain_seconds)
        try:
            await self._held._end(drain_seconds)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            try:
                async with asyncio.timeout(self._held.closing_seconds + CLOSING_SECONDS):
                    await uncancelled(self._stack.aclose)
            except TimeoutError as timeout:
                logs.warning("consume.not_closed", error=timeout)
            finally:
                _open.discard(self)
                _closed.update(self._held._counts)
        if error is None and self._error is not None:
            raise self._error

    async def wait_failed(self) -> None:
        """Wait until the consumer cannot go on. It returns only if a signal has ended `run`.

        Raises:
            Exception: the error that ended the consumer: an error of the source that is no outage, or
                `EngineClosedError` if the deployment has ended.
        """
        await self._over.wait()
        if self._error is not None:
            raise self._error

    def statistics(self) -> ConsumerStatistics:
        """Return a snapshot of the counters."""
        held = self._held
        now = [(one.label, len(one.open), self._source.lag(one.name)) for one in list(held._held.values())]
        totals = Counter[str]()
        for (field, _), number in held._counts.items():
            totals[field] += number
        partitions = tuple(PartitionStatistics(*one) for one in (*held._left, *now))
        return ConsumerStatistics(partitions, held._ended, totals["dead_letters"], totals["late_commits"])

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stop()

    def _stop(self) -> None:
        """End `wait_failed`, and a start that is under way."""
        self._over.set()
        self._held._close_within(0 if self._error is not None else self._drain_seconds)
        if self._starting is not None:
            self._starting.reschedule(asyncio.get_running_loop().time())

    async def _settle(self, seconds: float) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._held._hurry.wait()
            self._held._hurry.clear()
            await self._for_each(self._held._settle, PAUSE_SECONDS)

    async def _keep(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._for_each(
                lambda one: uncancelled(self._source.keep, one.name, [*one.open.values(), *one.unsettled]), 0
            )

    async def _for_each(self, ask: Callable[[Partition], Awaitable[object]], pause_seconds: float) -> None:
        """Ask the source for all partitions at the same time, so that a source may make one request of them."""

        async def ask_one(partition: Partition) -> None:
            if self._held._held.get(partition.name) is partition:  # it may have gone while its task began
                try:
                    await ask(partition)
                except self._source.outages as error:
                    logs.warning("consume.outage", partition=partition.label, error=error)
                    await asyncio.sleep(pause_seconds)

        asking = map(ask_one, list(self._held._held.values()))
        for error in await asyncio.gather(*asking, return_exceptions=True):
            if error is not None:
                raise error


# The open consumers, and the dead letters and late commits of closed consumers.
_open: WeakSet[Consumer] = WeakSet()
_closed: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
_instruments: list[object] = []


def _count(consumer: Consumer) -> None:
    """Have the metrics of the process show a consumer."""
    _open.add(consumer)
    if _instruments:
        return
    from opentelemetry.metrics import CallbackOptions, Observation, get_meter

    def observed(values: Counter[tuple[tuple[str, str], ...]]) -> Iterable[Observation]:
        return [Observation(value, dict(attributes)) for attributes, value in values.items()]

    def levels(of: Callable[[Source, Partition], int | None], options: CallbackOptions) -> Iterable[Observation]:
        found = Counter[tuple[tuple[str, str], ...]]()
        for one in list(_open):
            for partition in list(one._held._held.values()):
                if (value := of(one._source, partition)) is not None:
                    found[partition.attributes] += value
        return observed(found)

    def total(field: str, options: CallbackOptions) -> Iterable[Observation]:
        found = Counter[tuple[tuple[str, str], ...]]()
        for counts in (_closed, *(one._held._counts for one in list(_open))):
            for (name, attributes), number in counts.items():
                if name == field:
                    found[attributes] += number
        return observed(found)

    meter = get_meter(names.INSTRUMENTATION, names.VERSION)
    level, counter = meter.create_observable_up_down_counter, meter.create_observable_counter
    _instruments.extend([
        level(names.METRIC_CONSUMER_LAG, [partial(levels, lambda source, one: source.lag(one.name))], "{message}"),
        level(names.METRIC_CONSUMER_OPEN, [partial(levels, lambda source, one: len(one.open))], "{message}"),
        counter(names.METRIC_CONSUMER_DEAD_LETTERS, [partial(total, "dead_letters")], "{message}"),
        counter(names.METRIC_CONSUMER_LATE_COMMITS, [partial(total, "late_commits")], "{commit}"),
    ])  # fmt: skip


async def run(consumer: Consumer) -> ConsumerStatistics:
    """Consume until SIGTERM or SIGINT, and then finish the open messages. A signal also ends a start that is under way.

    Further signals change nothing, because a process and its group often get a signal each; `drain_seconds` bounds the
    end. The earlier handlers of both signals are restored when this returns. Outside of the main thread, no signal is
    handled.

    Args:
        consumer: the consumer, which was not entered.

    Returns:
        The last statistics.

    Raises:
        Exception: the error that ended the consumer; see `Consumer.wait_failed`.
    """
    with ExitStack() as handlers:
        handlers.enter_context(_at_a_signal(consumer._stop))
        async with consumer:
            await consumer._over.wait()
    return consumer.statistics()


@contextmanager
def _at_a_signal(stop: Callable[[], None]) -> Generator[None, None, None]:
    """Call a function of the loop at a signal, and restore the earlier handlers at the end."""
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)

    # Not `loop.add_signal_handler`: a loop cannot be asked for the handler that it had before.
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, on_signal) or signal.SIG_DFL for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
