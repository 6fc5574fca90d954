"""Kafka as the source of a consumer, through aiokafka."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, cast

from opentelemetry import propagate, trace

from .. import DeadLetterError, MissingExtraError, OptionsError
from ..actors.accepted import NAME, check, refuse_unknown
from ..telemetry import logs, names
from .partitions import CLOSING_SECONDS, Partitions
from .source import DeadLetter, Message, Source, label

# Aiokafka's defaults of the timeouts that matter here, in milliseconds.
_SESSION_MS: Final = 10_000
_HEARTBEAT_MS: Final = 3_000
_MAX_POLL_INTERVAL_MS: Final = 300_000
_TAKE_MS: Final = 5_000
# How often the ends of the partitions are asked for, and positions are committed that no message has.
_LOOK_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.1
# A topic that was made a moment ago may not be known yet.
_NEW_TOPIC_SECONDS: Final = 2.0
_NO_TOPIC: Final = 3  # the code of the error in Kafka's protocol
_REFUSED: Final = {
    "enable_auto_commit": "offsets are committed when their messages have ended",
    "key_deserializer": "a message that the deserializer refuses would stop its partition: decode the key in order_by=",
    "value_deserializer": "a message that the deserializer refuses would stop its partition: parse the value in a node",
}


@dataclass(slots=True)
class _Offsets:
    """Offsets of a partition of this member; None while unknown.

    Attributes:
        taken: behind the last record that was taken.
        ended: behind the last record that has ended, with all records before it.
        committed: what the group has; -1 for nothing.
        end: behind the last record of the partition.
    """

    taken: int | None = None
    ended: int | None = None
    committed: int | None = None
    end: int = 0


class Kafka(Source):
    """Topics of Kafka, read by the members of a consumer group. It needs aiokafka, the extra `kafka`.

    The value and the key of a message are bytes, and its identity is "topic/partition/offset". Partitions that a
    rebalance takes away are drained within the time that the broker allows, committed, and given up. While there is no
    room for messages of a partition, the partition is paused, and polling continues.

    Args:
        *topics: the names of the topics.
        group_id: the consumer group.
        **settings: settings of `aiokafka.AIOKafkaConsumer`, such as `bootstrap_servers`, `session_timeout_ms` and
            `ssl_context`. Settings that `AIOKafkaProducer` has as well are used for dead letters, too. A group without
            an offset begins with the oldest message, unless `auto_offset_reset` says otherwise.

    Raises:
        MissingExtraError: aiokafka is not installed.
        OptionsError: a setting would lose messages.
    """

    system = "kafka"

    def __init__(self, *topics: str, group_id: str, **settings: Any) -> None:
        for name in (*topics, group_id):
            check("group_id" if name is group_id else "topics", name, NAME, "Kafka(")
        for option in settings.keys() & _REFUSED.keys():
            raise OptionsError(f"Kafka({option}=...): {_REFUSED[option]}")
        if not topics:
            raise OptionsError('Kafka() has no topic: name one, as in Kafka("orders", group_id="billing")')
        try:
            self._aiokafka: Any = import_module("aiokafka")
        except ImportError as error:
            raise MissingExtraError(
                'consume.Kafka needs aiokafka: pip install "penstock[kafka]"', name="aiokafka"
            ) from error
        refuse_unknown(settings, _settings_of(self._aiokafka.AIOKafkaConsumer), "Kafka")
        errors = cast("dict[str, Any]", vars(self._aiokafka.errors))
        # Errors that pass by themselves, and errors that a request raises in the midst of a rebalance.
        passing = (error for error in errors.values() if getattr(error, "retriable", False))
        self.outages = (OSError, errors["IllegalStateError"], errors["KafkaTimeoutError"], *passing)
        self._topics = topics
        self._settings = {"auto_offset_reset": "earliest", **settings, "group_id": group_id}
        session = settings.get("session_timeout_ms", _SESSION_MS)
        rebalance = settings.get("rebalance_timeout_ms") or session
        # The broker's time begins when it tells the first member; this member hears of it with its next heartbeat.
        self._drain_seconds = max(rebalance - settings.get("heartbeat_interval_ms", _HEARTBEAT_MS) - 1000, 0) / 1000
        self.keep_seconds = settings.get("max_poll_interval_ms", _MAX_POLL_INTERVAL_MS) / 4000
        self._consumer: Any = None
        self._producers: dict[str, Any] = {}
        self._letters: dict[str, dict[str, Any]] = {}  # the settings of the producer for each topic of dead letters
        self._taking: set[Any] = set()
        self._offsets: dict[Any, _Offsets] = {}
        self._generation = -1  # of the group, when it gave the partitions
        self._given_at = 0.0
        self._is_given = asyncio.Event()
        self._due: dict[Any, int] = {}  # offsets to commit with the next request
        self._next_commit: asyncio.Task[bool] | None = None
        self._commits: set[asyncio.Task[bool]] = set()
        self._committing = asyncio.Lock()

    def letters_to(self, topic: str, /, **producer: Any) -> Callable[[DeadLetter], Awaitable[None]]:
        """Return a function that writes dead letters to a topic, for `dead_letters=` of `Consumer`.

        A letter has the key, the value and the headers of its message, and the headers `source` (its identity),
        `error` and `attempts`. It continues the trace of its call. If Kafka refuses a letter for good, such as a letter
        that is too large, the letter is written without its value, and the header `reason` says why. If that is
        refused, too, the consumer ends with a `DeadLetterError`.

        Args:
            topic: the name of the topic, which exists when the consumer starts.
            **producer: settings of `aiokafka.AIOKafkaProducer`, such as `max_request_size` and `compression_type`.

        Raises:
            OptionsError: the producer has no such setting.
        """
        check("topic", topic, NAME, "letters_to(")
        known = _settings_of(self._aiokafka.AIOKafkaProducer)
        refuse_unknown(producer, known, "letters_to")
        shared = {name: value for name, value in self._settings.items() if name in known}
        self._letters[topic] = {**shared, "acks": "all", **producer}

        async def write(letter: DeadLetter) -> None:
            message = letter.message
            own = {"source": message.identity, "error": f"{letter.error!r:.500}", "attempts": str(letter.attempts)}
            logs.guarded("spans", propagate.inject, own)
            headers = [pair for pair in message.headers if pair[0] not in own]
            headers += ((name, text.encode(errors="replace")) for name, text in own.items())
            send = self._producers[topic].send_and_wait
            # What aiokafka refuses by itself: a message that has neither key nor value, or headers of another type.
            refused = (self._aiokafka.errors.KafkaError, AssertionError, TypeError, ValueError)
            try:
                sent = await send(topic, message.value, message.key, headers=headers)
            except self.outages:
                raise
            except refused as error:
                headers.append(("reason", f"{error!r:.500}".encode(errors="replace")))
                try:
                    sent = await send(topic, b"", message.key, headers=headers)
                except self.outages:
                    raise
                except refused as second:
                    raise DeadLetterError(
                        f"the dead letter of {message.identity} cannot be written to {topic}: {error!r:.200}, "
                        f"and without its value: {second!r:.200}. Allow it, with settings of the topic and of "
                        "letters_to(), or put such messages aside with a function of your own"
                    ) from second
            where = {names.DESTINATION: topic, names.PARTITION: str(sent.partition), names.MESSAGE_OFFSET: sent.offset}
            logs.guarded("spans", trace.get_current_span().set_attributes, where)
            logs.warning("consume.dead_letter", message=message.identity, topic=topic, error=letter.error)

        return write

    @asynccontextmanager
    async def partitions(self, held: Partitions, /) -> AsyncGenerator[None]:
        """Join the group; the end leaves it."""
        kafka, name = self._aiokafka, self._settings.get("group_instance_id")
        session_seconds = cast("int", self._settings.get("session_timeout_ms", _SESSION_MS)) / 1000

        async def assigned(_: object, partitions: Iterable[Any]) -> None:
            self._generation = self._consumer._coordinator.generation
            self._offsets = {partition: _Offsets() for partition in partitions}
            self._given_at = asyncio.get_running_loop().time()
            self._is_given.set()
            logs.info("consume.given", group=self._settings["group_id"], partitions=sorted(map(label, self._offsets)))
            await held.given(self._offsets)

        async def revoked(_: object, partitions: Iterable[Any]) -> None:
            # Too early for the end of its session, so another member has taken its place.
            held_seconds = asyncio.get_running_loop().time() - self._given_at
            is_replaced = self._consumer._coordinator.generation < 0 and held_seconds < session_seconds
            await held.taken_away(partitions, self._drain_seconds)
            if self._offsets:
                logs.info(
                    "consume.taken_away", group=self._settings["group_id"], partitions=sorted(map(label, self._offsets))
                )
            if self._offsets and is_replaced and name is not None:
                held._on_error(
                    OptionsError(f"another member of the group has group_instance_id={name!r}: each needs its own")
                )
            self._offsets, self._due = {}, {}

        told = {"on_partitions_assigned": assigned, "on_partitions_revoked": revoked}
        async with AsyncExitStack() as stack:
            await self._find_topics()
            for topic, settings in self._letters.items():
                self._producers[topic] = producer = kafka.AIOKafkaProducer(**settings)
                stack.push_async_callback(_close, producer, producer.client, held)
                await producer.start()
            self._consumer = kafka.AIOKafkaConsumer(**self._settings, enable_auto_commit=False)
            stack.push_async_callback(_close, self._consumer, self._consumer._client, held)
            self._consumer.subscribe(self._topics, listener=type("_Told", (kafka.ConsumerRebalanceListener,), told)())
            looking = asyncio.create_task(self._look_often())
            looking.add_done_callback(held._task_ended)
            stack.push_async_callback(self._stop_tasks, looking)
            await self._consumer.start()
            yield

    async def _find_topics(self) -> None:
        """Raise an error if a topic does not exist. The clients would wait for it, and then not name it."""
        admin = import_module("aiokafka.admin").AIOKafkaAdminClient
        known = _settings_of(admin)
        client = admin(**{name: value for name, value in self._settings.items() if name in known})
        ends_at = asyncio.get_running_loop().time() + _NEW_TOPIC_SECONDS
        try:
            await client.start()
            while True:
                found = await client.describe_topics(sorted({*self._topics, *self._letters}))
                missing = [topic["topic"] for topic in found if topic["error_code"] == _NO_TOPIC]
                if not missing:
                    return
                if asyncio.get_running_loop().time() > ends_at:
                    raise OptionsError(f"the broker has no topic {' and no topic '.join(missing)}: create it")
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await client.close()

    async def take(self, partition: Any, n: int, /) -> Sequence[Message]:
        """Return the next records."""
        self._taking.add(partition)
        try:
            self._consumer.resume(partition)
            found = await self._consumer.getmany(partition, timeout_ms=_TAKE_MS, max_records=n)
        finally:
            self._taking.discard(partition)
        records = found.get(partition, ())
        if records and partition in self._offsets:
            self._offsets[partition].taken = records[-1].offset + 1
        where = f"{partition.topic}/{partition.partition}/"
        return [Message(f"{where}{one.offset}", one.value, one.key, one.headers, one.offset) for one in records]

    async def settle(self, partition: Any, messages: Sequence[Message], /) -> bool:
        """Commit the offset behind the last message."""
        if partition not in self._offsets:
            return False
        offset = self._offsets[partition].ended = messages[-1].position + 1
        return await self._commit({partition: offset})

    async def _commit(self, offsets: Mapping[Any, int]) -> bool:
        """Commit offsets, in one request with the offsets of other callers; return False if it comes too late."""
        self._due |= offsets
        if self._next_commit is None:
            self._next_commit = task = asyncio.create_task(self._commit_due())
            self._commits.add(task)
            task.add_done_callback(self._commits.discard)
        return await asyncio.shield(self._next_commit)

    async def _commit_due(self) -> bool:
        async with self._committing:
            self._next_commit = None
            due, self._due, offsets = self._due, {}, self._offsets
            generation, coordinator, errors = self._generation, self._consumer._coordinator, self._aiokafka.errors
            request = {tp: self._aiokafka.structs.OffsetAndMetadata(offset, "") for tp, offset in due.items()}
            # While the metadata lists no broker, aiokafka asserts that it has one.
            passing: tuple[type[Exception], ...] = (*self.outages, AssertionError)
            while True:
                try:
                    await coordinator.ensure_coordinator_known()
                    # A member that has lost its generation has -1, which an empty group accepts from anybody.
                    if coordinator.generation != generation or self._offsets is not offsets:
                        return False
                    await coordinator._do_commit_offsets(None, request)
                except (errors.UnknownMemberIdError, errors.IllegalGenerationError, errors.RebalanceInProgressError):
                    return False
                except passing:
                    await asyncio.sleep(_RETRY_SECONDS)
                else:
                    break
            for partition, offset in due.items():
                offsets[partition].committed = offset
            return True

    async def _look_often(self) -> None:
        while True:
            self._is_given.clear()
            with suppress(*self.outages, AssertionError):
                await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._is_given.wait()

    async def _look(self) -> None:
        """Ask for committed offsets and ends, and commit positions that no message has.

        Such a position is that of a partition without a message, which `auto_offset_reset` may have chosen, or behind
        the control records of a transaction.
        """
        offsets, consumer = self._offsets, self._consumer
        if unknown := [partition for partition, one in offsets.items() if one.committed is None]:
            committed = await consumer._coordinator.fetch_committed_offsets(unknown)
            for partition in unknown:
                if offsets[partition].committed is None:
                    offsets[partition].committed = committed[partition].offset if partition in committed else -1
        asked = {partition: asyncio.create_task(consumer.position(partition)) for partition in offsets}
        if asked:
            await asyncio.wait(asked.values(), timeout=_LOOK_SECONDS)
        due: dict[Any, int] = {}
        for partition, position in asked.items():
            one = offsets[partition]
            is_found = not position.cancel() and position.exception() is None
            if is_found and one.taken == one.ended and position.result() > cast("int", one.committed):
                due[partition] = position.result()
        if due and self._offsets is offsets:
            await self._commit(due)
        if offsets:
            for partition, end in (await consumer.end_offsets(list(offsets))).items():
                offsets[partition].end = end

    async def _stop_tasks(self, *tasks: "asyncio.Task[Any]") -> None:
        for task in (*tasks, *self._commits):
            task.cancel()
        await asyncio.gather(*tasks, *self._commits, return_exceptions=True)

    async def keep(self, partition: Any, unsettled: Sequence[Message], /) -> None:
        """Poll, with the partition paused: a member that polls too seldom loses all partitions."""
        if partition not in self._taking:
            self._consumer.pause(partition)
            await self._consumer.getmany(partition, timeout_ms=0)

    def lag(self, partition: Any, /) -> int | None:
        """Return how many messages are behind the committed offset."""
        one = self._offsets.get(partition)
        if one is None or one.committed is None or one.committed < 0:
            return None
        # The newest fetch is often younger than the newest look, but there is none while nothing is fetched.
        is_assigned = partition in self._consumer.assignment()
        return max(one.end, self._consumer.highwater(partition) or 0 if is_assigned else 0) - one.committed

    def attributes(self, partition: Any, /) -> Mapping[str, str]:
        """Return the group, the topic and the number of a partition."""
        group, number = self._settings["group_id"], str(partition.partition)
        return {names.CONSUMER_GROUP: group, names.DESTINATION: partition.topic, names.PARTITION: number}


async def _close(client: Any, network: Any, held: Partitions) -> None:
    """Stop a client, or cut it off: it would wait for the answer of a broker that hangs for 40 seconds."""
    stopping: asyncio.Task[None] = asyncio.create_task(client.stop())
    try:
        await asyncio.wait([stopping], timeout=held.closing_seconds)
    finally:
        # It may also have ended with an error, such as a CancelledError that nobody has sent, before it closed all.
        if not stopping.done() or stopping.cancelled() or stopping.exception() is not None:
            error = None if not stopping.done() or stopping.cancelled() else stopping.exception()
            logs.warning("consume.not_closed", client=type(client).__name__, error=error)
            closing = asyncio.create_task(network.close())
            parts = cast("dict[str, object]", vars(client)).values()
            tasks = {stopping, *(task for part in parts for task in _tasks_of(part))}
            for task in tasks:
                task.cancel()
            await asyncio.wait({closing, *tasks}, timeout=CLOSING_SECONDS / 4)
            closing.cancel()


def _tasks_of(part: object) -> "Iterable[asyncio.Task[Any]]":
    """Yield the tasks of a part of a client of aiokafka."""
    for value in vars(part).values() if type(part).__module__.startswith("aiokafka.") else ():
        for one in cast("Iterable[object]", value) if isinstance(value, set | list) else (value,):
            if isinstance(one, asyncio.Task):
                yield one


def _settings_of(client: Any) -> set[str]:
    return set(inspect.signature(client).parameters)
