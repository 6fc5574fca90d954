"""The partitions that a consumer holds, each with a stream of its own, and the room that the partitions share."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

from .. import (
    Call,
    DeadLetterError,
    DeploymentFailed,
    EngineClosedError,
    NodeCancelledError,
    NotFinished,
    engine,
    tagged,
    telemetry,
)
from ..actors.tasks import Condition
from ..extension import MessageTrace, attempts_of
from ..telemetry import logs, names
from .source import DeadLetter, Message, Source, attributes_of, label

# How long the last commit of a partition may take.
_LAST_COMMIT_SECONDS: Final = 1.0
# How much longer than `drain_seconds` the end may take, last commits and closing the source included; a source that has
# no time left has a quarter of it.
CLOSING_SECONDS: Final = 1.5
# The pauses before a request that failed in an outage is made again.
PAUSE_SECONDS: Final = 1.0
_FIRST_PAUSE_SECONDS: Final = 0.1

T = TypeVar("T")
_Tag: TypeAlias = tuple[int, MessageTrace]  # the number of a message, and its trace


async def uncancelled(ask: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Return the result of a function. A cancellation that comes from inside of the function is an error.

    A cancellation of the caller is raised as such, even if a client has made another error of it, such as an outage.
    """
    task = asyncio.current_task()
    assert task is not None
    undisturbed = task.cancelling()
    try:
        return await ask(*args)
    except asyncio.CancelledError as error:
        if task.cancelling() > undisturbed:
            raise
        name = getattr(ask, "__qualname__", repr(ask))
        raise NodeCancelledError(f"a task that {name} awaited was cancelled, but not {name} itself") from error
    finally:
        if task.cancelling() > undisturbed:
            raise asyncio.CancelledError


class Partitions:
    """The partitions that a consumer holds. A source tells this object which partitions these are."""

    def __init__(
        self,
        service: engine.Service[..., Any],
        source: Source,
        call_of: Callable[[Message], Call[Any]],
        dead_letters: Callable[[DeadLetter], Awaitable[object]],
        order_by: Callable[[Message], Hashable] | None,
        max_open: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._service, self._source, self._call_of, self._bury = service, source, call_of, dead_letters
        self._order_by, self._max_open, self._on_error = order_by, max_open, on_error
        self._held: dict[Any, Partition] = {}  # including partitions that are being drained
        self._unwinding: dict[Any, list[asyncio.Task[None]]] = {}  # tasks of partitions that were given up
        self._has_ended = False
        self._hurry = asyncio.Event()  # messages wait to be settled, and other messages wait for their room
        self._changed = Condition()
        self._waiting = 0
        self._ended = 0
        # Dead letters and late commits, by the attributes of their partition.
        self._counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._left: list[tuple[str, int, int | None]] = []  # what the end has left of each partition: label, open, lag
        self._closes_at: float | None = None

    @property
    def closing_seconds(self) -> float:
        """How long closing the source may take now, in seconds. A source that takes longer is cancelled."""
        left = 0.0 if self._closes_at is None else self._closes_at - asyncio.get_running_loop().time()
        return max(left, CLOSING_SECONDS / 4)

    def _close_within(self, drain_seconds: float) -> None:
        if self._closes_at is None:
            self._closes_at = asyncio.get_running_loop().time() + drain_seconds + CLOSING_SECONDS

    async def given(self, partitions: Iterable[Any], /) -> None:
        """Begin to consume partitions. Partitions that are held already continue.

        Args:
            partitions: the names of the partitions, which may be any objects that can be keys.
        """
        for name in partitions:
            if name not in self._held and not self._has_ended:
                self._held[name] = Partition(self, name, self._unwinding.pop(name, []))
                self._held[name].task.add_done_callback(self._task_ended)

    async def taken_away(self, partitions: Iterable[Any], within_seconds: float, /) -> None:
        """Finish and settle the open messages of partitions, and give the partitions up. Returns when this is done.

        Args:
            partitions: the names of the partitions. Partitions that are not held are left out.
            within_seconds: how long this may take, in seconds. Messages that are not finished then are cancelled and
                not settled. The last commit may take a second longer.
        """
        held = [self._held[name] for name in partitions if name in self._held]
        try:
            for error in await asyncio.gather(*(one.drain(within_seconds) for one in held), return_exceptions=True):
                if isinstance(error, Exception):
                    self._on_error(error)
        finally:
            await self._give_up(held)

    async def lost(self, partitions: Iterable[Any], /) -> None:
        """Cancel the open messages of partitions that another consumer may have by now, and settle no more of them.

        When this returns, the source is not asked for these partitions any more, and may give them anew at once.

        Args:
            partitions: the names of the partitions. Partitions that are not held are left out.
        """
        await self._give_up([self._held[name] for name in partitions if name in self._held])

    async def _give_up(self, partitions: "Iterable[Partition]") -> None:
        """Give partitions up. Returns when the source is asked for them no more: it may give them anew at once."""
        asking: set[asyncio.Task[Any]] = set()
        for one in partitions:
            asking |= one.give_up()
            if self._held.get(one.name) is one:
                if self._has_ended:
                    self._left.append((one.label, len(one.open), self._source.lag(one.name)))
                del self._held[one.name]
                self._unwinding[one.name] = [*(task for task in one.before if not task.done()), one.task]
        self._has_room()
        if asking:
            await asyncio.wait(asking)

    async def _end(self, within_seconds: float) -> None:
        """Give up all partitions, and wait until all handlers have returned."""
        self._has_ended = True
        await self.taken_away(list(self._held), within_seconds)
        while self._unwinding:
            await asyncio.wait(self._unwinding.popitem()[1])

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def _room_for(self, partition: "Partition") -> int:
        """Wait until a partition may take messages; return how many."""
        while True:
            # Each partition keeps some room for itself: otherwise a partition with a slow first message would stop all.
            own = self._max_open // (len(self._held) or 1)
            others = sum(max(one.in_hand, own) for one in self._held.values() if one is not partition)
            room = self._max_open - others - partition.in_hand
            if room >= max(1, own // 4):  # wait for some room, so that messages are not taken one by one
                return min(room, own or 1)
            self._waiting += 1
            self._settle_soon()
            try:
                await self._changed.wait()
            finally:
                self._waiting -= 1

    def _has_room(self) -> None:
        """Wake the partitions that wait for room."""
        self._settle_soon()
        self._changed.notify_all()

    def _settle_soon(self) -> None:
        if self._waiting and not self._source.is_log and any(one.unsettled for one in self._held.values()):
            self._hurry.set()

    async def _settle(self, partition: "Partition") -> None:
        """Settle the ended messages of a partition. If the commit comes too late, the partition is lost."""
        if not await partition.settle():
            self._counts["late_commits", partition.attributes] += 1
            logs.warning("consume.too_late", partition=partition.label)
            await self._give_up([partition])


class Partition:
    """A partition that is held: its stream of calls, and its open messages.

    Attributes:
        name: the name of the partition.
        label: the name as a text; the text of a tuple such as `TopicPartition` is "topic/0".
        open: the messages that were taken and have not ended, by number. For a log, also messages that have ended
            behind a message that has not.
        unsettled: the messages that have ended and are to be settled; for a log, only the last one.
        task: the task that reads the outcomes.
        before: tasks from when this partition was held before; their handlers may still be ending.
    """

    def __init__(self, held: Partitions, name: Any, before: list[asyncio.Task[None]]) -> None:
        self._held, self._source, self.name = held, held._source, name
        self.label, self.attributes = label(name), tuple(self._source.attributes(name).items())
        about = {names.MESSAGING_SYSTEM: self._source.system, names.MESSAGING_OPERATION: "process"}
        self._about: dict[str, str | int] = {**about, **dict(self.attributes)}
        for count in ("dead_letters", "late_commits"):
            held._counts[count, self.attributes] += 0
        self.before = before
        self.open: dict[int, Message] = {}
        self.unsettled: list[Message] = []
        self._ended: set[int] = set()
        self._unsettled = 0  # how many messages have ended, with all before them in a log, and are not settled
        self._last_letters: dict[Hashable, asyncio.Task[None]] = {}  # of each key, while it is being written
        self._number = itertools.count()
        self._taking = 0
        self._stream: engine.Stream[Any, _Tag] | None = None
        self._settling = asyncio.Lock()
        self._take: asyncio.Task[Sequence[Message]] | None = None
        self._commit: asyncio.Task[bool] | None = None
        self.task = asyncio.create_task(self._read(), name=f"penstock-consume-{self.label}")

    @property
    def in_hand(self) -> int:
        """How many messages count in `max_open`, including messages that are being asked for."""
        return len(self.open) + self._taking + (0 if self._source.is_log else len(self.unsettled))

    async def _read(self) -> None:
        """Read the outcomes of the messages, until the partition is given up."""
        if self.before:
            await asyncio.wait(self.before)
        order_by = None if self._held._order_by is None else self._key_of
        try:
            async with asyncio.TaskGroup() as self._letters, self._held._service.stream(
                self._calls(), ordered=False, order_by=order_by, trace_items=True, max_in_flight=self._held._max_open,
                timeout_seconds=None,  # for a stream of many calls, a timeout would count until the end of the stream
            ) as self._stream:  # fmt: skip
                async for outcome in self._stream.outcomes():
                    (number, trace), error = outcome.tag, outcome.error
                    if isinstance(error, NotFinished):
                        continue
                    if isinstance(error, EngineClosedError | DeploymentFailed):
                        raise error
                    if error is not None:
                        self._bury(number, DeadLetter(self.open[number], error, attempts_of(error)), trace)
                    else:
                        self._end(number)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def _calls(self) -> AsyncIterator[Call[Any, _Tag]]:
        """Yield the calls of the messages, as long as there is room."""
        while self._held._held.get(self.name) is self:
            if self._held._waiting:
                await asyncio.sleep(0)  # let partitions that wait for room go first
            self._taking = await self._held._room_for(self)
            messages = {next(self._number): message for message in await self._taken(self._taking)}
            self._taking = 0
            self.open |= messages
            for number, message in messages.items():
                trace = MessageTrace(message.headers, {**self._about, **attributes_of(message)})
                try:
                    call = self._held._call_of(message)
                    if not isinstance(call, Call):  # pyright: ignore[reportUnnecessaryIsInstance] - a user's function
                        raise TypeError(
                            f"call_of= returned {call!r:.100}: return a call, such as handle(message.value)"
                        )
                    call = tagged(telemetry.continued(call, trace), (number, trace))
                except Exception as error:  # noqa: BLE001 - of the user's function: this message has failed, not the consumer
                    self._bury(number, DeadLetter(message, error, 0), trace)
                else:
                    yield call
            self._held._has_room()

    async def _taken(self, n: int) -> list[Message]:
        # A task, which has ended before another one may ask for the same partition.
        take = self._take = asyncio.create_task(uncancelled(self._source.take, self.name, n))
        try:
            await asyncio.wait([take])
            return [] if take.cancelled() else list(take.result())
        except self._source.outages as error:
            logs.warning("consume.outage", partition=self.label, error=error)
            await asyncio.sleep(PAUSE_SECONDS)
            return []
        finally:
            take.cancel()

    def _key_of(self, call: Call[Any, _Tag]) -> Hashable:
        assert self._held._order_by is not None
        return self._held._order_by(self.open[call.tag[0]])

    def _bury(self, number: int, letter: DeadLetter, trace: MessageTrace) -> None:
        """Write a dead letter beside the others: a letter takes a round trip. Letters of a key are in order."""
        key = letter.message.key
        before = self._last_letters.get(key)
        self._last_letters[key] = self._letters.create_task(self._write(number, letter, trace, before))

    async def _write(
        self, number: int, letter: DeadLetter, trace: MessageTrace, before: asyncio.Task[None] | None
    ) -> None:
        """Write a dead letter, in a span below the one of its call. While writing fails, the message stays open."""
        key, identity = letter.message.key, letter.message.identity
        if before is not None and key is not None:
            await asyncio.wait([before])
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                with trace.dead_letter(self.label):
                    await uncancelled(self._held._bury, letter)
            except DeadLetterError:
                raise
            except Exception as refusal:  # noqa: BLE001 - whatever it is, the letter is not written
                logs.warning("consume.letter_not_written", message=identity, error=refusal)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 10 * PAUSE_SECONDS)
            else:
                break
        self._held._counts["dead_letters", self.attributes] += 1
        if self._last_letters.get(key) is asyncio.current_task():
            del self._last_letters[key]
        self._end(number)

    def _end(self, number: int) -> None:
        """Note that a message has ended."""
        self._held._ended += 1
        if not self._source.is_log:
            self.unsettled.append(self.open.pop(number))
            self._unsettled += 1
        else:
            self._ended.add(number)
            while self.open and (first := next(iter(self.open))) in self._ended:
                self._ended.discard(first)
                self.unsettled = [self.open.pop(first)]
                self._unsettled += 1
        self._held._has_room()

    async def settle(self) -> bool:
        """Settle the ended messages; return False if the commit came too late."""
        async with self._settling:
            messages, self.unsettled, count = self.unsettled, [], self._unsettled
            if not messages or self._held._held.get(self.name) is not self:
                return True
            # A task, which can be cancelled: a waiting commit must not reach the broker once the partition is given up.
            self._commit = asyncio.create_task(uncancelled(self._source.settle, self.name, messages))
            is_over = False
            try:
                await asyncio.wait([self._commit])
                is_in_time = self._commit.cancelled() or self._commit.result() is not False
                is_over = True
                self._unsettled -= count
                return is_in_time
            finally:
                if not is_over:
                    self._commit.cancel()
                    # In a log, messages that have ended meanwhile make a longer prefix.
                    self.unsettled = self.unsettled or messages if self._source.is_log else messages + self.unsettled
                self._held._has_room()

    def give_up(self) -> set[asyncio.Task[Any]]:
        """Cancel the open messages, and return the requests to the source that are being cancelled."""
        self.task.cancel()
        asking = {task for task in (self._take, self._commit) if task is not None and not task.done()}
        asking.discard(cast("asyncio.Task[Any]", asyncio.current_task()))  # a source may tell of a loss in a request
        for task in asking:
            task.cancel()
        return asking

    async def drain(self, within_seconds: float) -> None:
        """Take no more messages, and finish and settle the open ones."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + within_seconds
        await self._settle_last(min(within_seconds, _LAST_COMMIT_SECONDS))  # which tells whether the partition is lost
        if self._stream is not None and self._held._held.get(self.name) is self:
            draining = asyncio.create_task(self._stream.drain(max(ends_at - loop.time(), 0)))
            draining.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.wait([draining, self.task], timeout=max(ends_at - loop.time(), 0))
        self.task.cancel()
        await self._settle_last(max(ends_at - loop.time(), 0) + _LAST_COMMIT_SECONDS)
        if self._unsettled:
            logs.warning("consume.not_settled", partition=self.label, messages=self._unsettled)

    async def _settle_last(self, within_seconds: float) -> None:
        try:
            async with asyncio.timeout(within_seconds):
                while True:
                    try:
                        return await self._held._settle(self)
                    except self._source.outages:
                        await asyncio.sleep(_FIRST_PAUSE_SECONDS)
        except TimeoutError:
            pass
