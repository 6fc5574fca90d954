"""A fake of aiokafka and of its broker, in memory: topics, a group that is rebalanced eagerly, commits that may fail.

`Broker.install()` puts it in the place of the module `aiokafka`. It acts like aiokafka 0.14, as far as consumers see. A
rebalance awaits `on_partitions_revoked` with all partitions, and continues without a member that does not return
within its rebalance timeout. Requests wait while the broker is away. A member that does not poll within
`max_poll_interval_ms` leaves.
"""

import asyncio
import sys
from abc import ABC
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import pytest


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]


class ConsumerRebalanceListener(ABC):  # noqa: B024 - as in aiokafka
    pass


class KafkaError(RuntimeError):
    retriable = False


class IllegalStateError(KafkaError):
    pass


class IllegalGenerationError(KafkaError):
    pass


class MessageSizeTooLargeError(KafkaError):
    pass


class RequestTimedOutError(KafkaError):
    retriable = True


class OffsetAndMetadata(NamedTuple):
    offset: int
    metadata: str


class Broker:
    """Topics, and one group.

    Args:
        rng: chooses how long a request takes.
        partitions: the number of partitions of each topic; other topics have one.

    Attributes:
        is_away: whether requests wait; see `away`.
        refused: how many commits came from a consumer that was no longer a member.
    """

    def __init__(self, rng: Random, partitions: dict[str, int]) -> None:
        self.rng = rng
        self.partitions = partitions
        self.logs: dict[TopicPartition, list[Record]] = {}
        self.committed: dict[TopicPartition, int] = {}
        self.members: list[Consumer] = []
        self.generation = self.refused = 0
        self.is_away = False
        self.missing: set[str] = set()  # names of topics
        self._changed = asyncio.Event()
        self._rebalancing: asyncio.Task[None] | None = None
        self._again = False

    def topic(self, name: str) -> list[TopicPartition]:
        return [TopicPartition(name, number) for number in range(self.partitions.get(name, 1))]

    def append(
        self, topic: str, value: bytes | None, key: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Record:
        tp = self.topic(topic)[crc32(key or b"") % self.partitions.get(topic, 1)]
        log = self.logs.setdefault(tp, [])
        log.append(Record(tp.topic, tp.partition, len(log), key, value, headers))
        self.notify()
        return log[-1]

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        await self._changed.wait()

    async def request(self) -> None:
        """Take as long as a request takes; while the broker is away, wait until it is back."""
        await asyncio.sleep(self.rng.choice((0, 0, 0.005)))
        while self.is_away:
            await self.change()

    async def away(self, seconds: float) -> None:
        self.is_away = True
        await asyncio.sleep(seconds)
        self.is_away = False
        self.notify()

    def rebalance(self) -> None:
        self._again = True
        if self._rebalancing is None or self._rebalancing.done():
            self._rebalancing = asyncio.create_task(self._rebalance())

    async def _rebalance(self) -> None:
        while self._again:
            self._again = False
            await asyncio.sleep(self.rng.uniform(0, 0.3))  # until the members hear of the rebalance
            while self.is_away:
                await self.change()
            members = list(self.members)
            joining = {one: asyncio.create_task(one.rejoin()) for one in members}
            for one, task in joining.items():
                await asyncio.wait([task], timeout=one.rebalance_seconds)
                if not task.done():  # the rebalance continues without this member, and its commits are refused
                    self.members.remove(one)
                    task.add_done_callback(partial(Consumer.returns, one))
            self.generation += 1
            self._assign()
            self.notify()

    def _assign(self) -> None:
        members = [one for one in self.members if not one.is_closed]
        shares: dict[Consumer, set[TopicPartition]] = {one: set() for one in members}
        topics = sorted({topic for one in members for topic in one.topics})
        for number, tp in enumerate(tp for topic in topics for tp in self.topic(topic)):
            shares[members[number % len(members)]].add(tp)
        for one, share in shares.items():
            one.assign(share, self.generation)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this broker's fake of aiokafka imported."""
        admin = SimpleNamespace(AIOKafkaAdminClient=partial(Admin, self))
        for name, module in (("aiokafka", self._module()), ("aiokafka.admin", admin)):
            monkeypatch.setitem(sys.modules, name, module)

    def _module(self) -> ModuleType:
        module = ModuleType("aiokafka")
        module.__dict__.update(
            TopicPartition=TopicPartition,
            ConsumerRebalanceListener=ConsumerRebalanceListener,
            AIOKafkaConsumer=partial(Consumer, self),
            AIOKafkaProducer=partial(Producer, self),
            structs=SimpleNamespace(OffsetAndMetadata=OffsetAndMetadata),
            errors=SimpleNamespace(
                KafkaError=KafkaError, IllegalGenerationError=IllegalGenerationError,
                UnknownMemberIdError=IllegalGenerationError, RebalanceInProgressError=IllegalGenerationError,
                IllegalStateError=IllegalStateError, RequestTimedOutError=RequestTimedOutError,
                KafkaTimeoutError=RequestTimedOutError, MessageSizeTooLargeError=MessageSizeTooLargeError,
            ),
        )  # fmt: skip
        return module


class Consumer:
    """A member of the group."""

    def __init__(
        self,
        broker: Broker,
        *,
        group_id: str,
        auto_offset_reset: str,
        enable_auto_commit: bool,
        bootstrap_servers: str = "",
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int | None = None,
        heartbeat_interval_ms: int = 3_000,
        max_poll_interval_ms: int = 300_000,
    ) -> None:
        assert not enable_auto_commit
        self.begins_at_end = auto_offset_reset == "latest"
        self.broker = broker
        self.rebalance_seconds = (rebalance_timeout_ms or session_timeout_ms) / 1000
        self.max_poll_seconds = max_poll_interval_ms / 1000
        self.topics: Sequence[str] = ()
        self.listener: Any = None
        self.is_closed = False
        self._assigned: set[TopicPartition] = set()
        self._coordinator, self._client = Coordinator(self), Network()
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._is_reassigning = True
        self._polling, self._polled_at = 0, asyncio.get_running_loop().time()
        self._tasks: set[asyncio.Task[Any]] = set()

    def subscribe(self, topics: Sequence[str], listener: object) -> None:
        assert isinstance(listener, ConsumerRebalanceListener)
        self.topics, self.listener = topics, listener

    async def start(self) -> None:
        await self.broker.request()
        self._start(self._watch())
        self.comes_back()
        while self._is_reassigning:
            await self.broker.change()

    async def stop(self) -> None:
        self.is_closed = True
        if self in self.broker.members:
            self.broker.members.remove(self)
            self.broker.rebalance()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def is_evicted(self) -> None:
        """The session has ended, and a heartbeat has told this member so."""
        self.broker.members.remove(self)
        self.broker.generation += 1
        self._coordinator.generation = -1

    def returns(self, task: "asyncio.Task[None]") -> None:
        self.comes_back()

    def comes_back(self) -> None:
        if not self.is_closed and self not in self.broker.members:
            self.broker.members.append(self)
            self.broker.rebalance()

    async def _watch(self) -> None:
        """Leave the group if nobody polls."""
        while True:
            await asyncio.sleep(0.1)
            idle = 0.0 if self._polling else asyncio.get_running_loop().time() - self._polled_at
            if idle > self.max_poll_seconds and self in self.broker.members:
                self.broker.members.remove(self)
                self.broker.rebalance()

    async def rejoin(self) -> None:
        self._is_reassigning = True
        revoked, self._assigned = self._assigned, set(self._assigned)
        with suppress(Exception):  # aiokafka logs these errors
            await self.listener.on_partitions_revoked(revoked)

    def assign(self, share: set[TopicPartition], generation: int) -> None:
        self._assigned, self._coordinator.generation = share, generation
        logs, committed = self.broker.logs, self.broker.committed
        self._positions = {tp: committed.get(tp, len(logs.get(tp, ())) if self.begins_at_end else 0) for tp in share}
        self._paused.clear()
        self._is_reassigning = False
        self._start(self.listener.on_partitions_assigned(share))

    def assignment(self) -> set[TopicPartition]:
        return set(self._assigned)

    def highwater(self, tp: TopicPartition) -> int | None:
        assert tp in self._assigned
        return len(self.broker.logs.get(tp, ()))

    def pause(self, tp: TopicPartition) -> None:
        self._check(tp)
        self._paused.add(tp)

    def resume(self, tp: TopicPartition) -> None:
        self._check(tp)
        self._paused.discard(tp)

    def _check(self, tp: TopicPartition) -> None:
        if tp not in self._assigned:
            raise IllegalStateError(f"Partition {tp} is not assigned")

    async def getmany(
        self, tp: TopicPartition, *, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        self._polling += 1
        try:
            ends_at = asyncio.get_running_loop().time() + timeout_ms / 1000
            while True:
                while self._is_reassigning:
                    await self.broker.change()
                await asyncio.sleep(0)
                log = self.broker.logs.get(tp, [])
                at = self._positions.get(tp, len(log))
                may_take = not (self.broker.is_away or tp in self._paused or self._is_reassigning)
                if may_take and (found := log[at : at + (max_records or len(log))]):
                    self._positions[tp] = at + len(found)
                    return {tp: found}
                left = ends_at - asyncio.get_running_loop().time()
                if left <= 0:
                    return {}
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self.broker.change()
        finally:
            self._polling -= 1
            self._polled_at = asyncio.get_running_loop().time()

    async def position(self, tp: TopicPartition) -> int:
        while tp not in self._positions:
            await self.broker.change()
        return self._positions[tp]

    async def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        await self.broker.request()
        return {tp: len(self.broker.logs.get(tp, ())) for tp in partitions}


class Coordinator:
    """What a member knows of its group."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer, self.broker = consumer, consumer.broker
        self.generation = -1

    async def ensure_coordinator_known(self) -> None:
        await self.broker.request()

    async def fetch_committed_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        await self.broker.request()
        committed = self.broker.committed
        return {tp: OffsetAndMetadata(committed[tp], "") for tp in partitions if tp in committed}

    async def _do_commit_offsets(self, assignment: None, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        generation = self.generation
        await self.broker.request()
        # A group without members accepts a commit of nobody.
        is_of_nobody = generation == -1 and not self.broker.members
        if not is_of_nobody and (self.consumer not in self.broker.members or generation != self.broker.generation):
            self.broker.refused += 1
            self.generation = -1
            raise IllegalGenerationError("the group has rebalanced")
        for tp, (offset, _) in offsets.items():
            if offset < self.broker.committed.get(tp, 0):
                raise ValueError("a commit goes back")
            self.broker.committed[tp] = offset
        await asyncio.sleep(0)


class Producer:
    def __init__(
        self, broker: Broker, *, acks: str, bootstrap_servers: str = "", max_request_size: int = 1_048_576
    ) -> None:
        assert acks == "all"
        self.broker, self.max_request_size = broker, max_request_size
        self.client = Network()

    async def start(self) -> None:
        await self.broker.request()

    async def stop(self) -> None: ...

    async def send_and_wait(
        self, topic: str, value: bytes | None, key: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Record:
        assert not (value is None and key is None), "Need at least one: key or value"
        if len(value or b"") + len(key or b"") + sum(len(text) for _, text in headers) > self.max_request_size:
            raise MessageSizeTooLargeError
        await self.broker.request()
        if self.broker.rng.random() < 0.2:
            raise RequestTimedOutError
        return self.broker.append(topic, value, key, headers)


class Network:
    async def close(self) -> None: ...


class Admin:
    def __init__(self, broker: Broker, *, bootstrap_servers: str = "") -> None:
        self.broker = broker

    async def start(self) -> None:
        await self.broker.request()

    async def close(self) -> None: ...

    async def describe_topics(self, topics: Sequence[str]) -> list[dict[str, Any]]:
        await self.broker.request()
        return [{"topic": name, "error_code": 3 if name in self.broker.missing else 0} for name in topics]
