"""Kafka as the source of a consumer, through aiokafka."""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import Any, Final, cast

from .. import MissingExtraError, OptionsError
from ..actors.accepted import NAME, check
from .partitions import Partitions
from .source import DeadLetter, Message, Source

# Aiokafka's defaults of the timeouts that matter here, in milliseconds.
_SESSION_MS: Final = 10_000
_HEARTBEAT_MS: Final = 3_000
_MAX_POLL_INTERVAL_MS: Final = 300_000
_TAKE_MS: Final = 500
_REFUSED: Final = {
    "enable_auto_commit": "offsets are committed when their messages have ended",
    "key_deserializer": "a message that the deserializer refuses would stop its partition: decode the key in order_by=",
    "value_deserializer": "a message that the deserializer refuses would stop its partition: parse the value in a node",
}


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
        errors = cast("dict[str, Any]", vars(self._aiokafka.errors))
        # Errors that pass by themselves, and errors that a request raises in the midst of a rebalance.
        self.outages = (OSError, errors["IllegalStateError"], *filter(_is_passing, errors.values()))
        self._topics = topics
        self._settings = {"auto_offset_reset": "earliest", **settings, "group_id": group_id}
        session = settings.get("session_timeout_ms", _SESSION_MS)
        rebalance = settings.get("rebalance_timeout_ms") or session
        # The broker's time begins when it tells the first member; this member hears of it with its next heartbeat.
        self._drain_seconds = max(rebalance - settings.get("heartbeat_interval_ms", _HEARTBEAT_MS) - 1000, 0) / 1000
        self.keep_seconds = settings.get("max_poll_interval_ms", _MAX_POLL_INTERVAL_MS) / 4000
        self._consumer: Any = None
        self._producer: Any = None
        self._writes_letters = False
        self._taking: set[Any] = set()
        self._settled: dict[Any, int] = {}

    def letters_to(self, topic: str, /) -> Callable[[DeadLetter], Awaitable[None]]:
        """Return a function that writes dead letters to a topic, for `dead_letters=` of `Consumer`.

        A letter has the key, the value and the headers of its message, and the headers `source` (its identity),
        `error` and `attempts`.

        Args:
            topic: the name of the topic.
        """
        check("topic", topic, NAME, "letters_to(")
        self._writes_letters = True

        async def write(letter: DeadLetter) -> None:
            message = letter.message
            own = {"source": message.identity, "error": f"{letter.error!r:.500}", "attempts": str(letter.attempts)}
            headers = [*message.headers, *((name, text.encode(errors="replace")) for name, text in own.items())]
            await self._producer.send_and_wait(topic, message.value, message.key, headers=headers)

        return write

    @asynccontextmanager
    async def partitions(self, held: Partitions, /) -> AsyncGenerator[None]:
        """Join the group; the end leaves it."""
        kafka = self._aiokafka

        async def assigned(_: object, partitions: Iterable[Any]) -> None:
            await held.given(partitions)

        async def revoked(_: object, partitions: Iterable[Any]) -> None:
            await held.taken_away(partitions, self._drain_seconds)

        told = {"on_partitions_assigned": assigned, "on_partitions_revoked": revoked}
        async with AsyncExitStack() as stack:
            if self._writes_letters:
                known = inspect.signature(kafka.AIOKafkaProducer).parameters
                shared = {name: value for name, value in self._settings.items() if name in known}
                self._producer = kafka.AIOKafkaProducer(**shared, acks="all")
                stack.push_async_callback(self._producer.stop)
                await self._producer.start()
            self._consumer = kafka.AIOKafkaConsumer(**self._settings, enable_auto_commit=False)
            stack.push_async_callback(self._consumer.stop)
            self._consumer.subscribe(self._topics, listener=type("_Told", (kafka.ConsumerRebalanceListener,), told)())
            await self._consumer.start()
            yield

    async def take(self, partition: Any, n: int, /) -> Sequence[Message]:
        """Return the next records."""
        self._taking.add(partition)
        try:
            self._consumer.resume(partition)
            found = await self._consumer.getmany(partition, timeout_ms=_TAKE_MS, max_records=n)
        finally:
            self._taking.discard(partition)
        records = found.get(partition, ())
        if records:
            self._settled.setdefault(partition, records[0].offset)
        where = f"{partition.topic}/{partition.partition}/"
        return [Message(f"{where}{one.offset}", one.value, one.key, one.headers, one.offset) for one in records]

    async def settle(self, partition: Any, messages: Sequence[Message], /) -> bool:
        """Commit the offset behind the last message."""
        offset = messages[-1].position + 1
        try:
            await self._consumer.commit({partition: offset})
        except (self._aiokafka.errors.CommitFailedError, self._aiokafka.errors.IllegalStateError):
            self._settled.pop(partition, None)
            return False
        self._settled[partition] = offset
        return True

    async def keep(self, partition: Any, unsettled: Sequence[Message], /) -> None:
        """Poll, with the partition paused: a member that polls too seldom loses all partitions."""
        if partition not in self._taking:
            self._consumer.pause(partition)
            await self._consumer.getmany(partition, timeout_ms=0)

    def lag(self, partition: Any, /) -> int | None:
        """Return how many messages are behind the committed offset."""
        newest = self._consumer.highwater(partition) if partition in self._consumer.assignment() else None
        settled = self._settled.get(partition)
        return None if newest is None or settled is None else max(newest - settled, 0)


def _is_passing(error: object) -> bool:
    return isinstance(error, type) and issubclass(error, Exception) and bool(getattr(error, "retriable", False))
