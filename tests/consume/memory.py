"""Sources in memory: a log that the members of a group share, and a queue that delivers unsettled messages again."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from penstock import consume


@dataclass
class Log:
    """A log, and the commits of its group.

    Attributes:
        partitions: the messages of each partition.
        committed: for each partition, how many messages are settled.
        owners: the member that holds each partition now.
        ended: the identities of the messages that have ended; only these may be settled.
        faults: the share of requests that fail.
    """

    rng: Random
    partitions: list[list[consume.Message]]
    faults: float = 0.0
    committed: list[int] = field(default_factory=list)
    owners: dict[int, "Member"] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.committed = [0] * len(self.partitions)

    def may_fail(self) -> None:
        if self.rng.random() < self.faults:
            raise ConnectionError("the broker is away")

    @property
    def is_settled(self) -> bool:
        return self.committed == [len(messages) for messages in self.partitions]


def log_of(rng: Random, partitions: int, messages: int, *, keys: int = 5, faults: float = 0.0) -> Log:
    """Return a log with messages of some keys. A key has one partition, and numbers its messages."""
    made: list[list[consume.Message]] = [[] for _ in range(partitions)]
    counts = [0] * keys
    for _ in range(messages):
        key = rng.randrange(keys)
        found = made[key % partitions]
        found.append(
            consume.Message(f"log/{key % partitions}/{len(found)}", (key, counts[key]), key or None, (), len(found))
        )
        counts[key] += 1
    return Log(rng, made, faults)


def in_order(done: Iterable[tuple[str, tuple[Any, int]]]) -> bool:
    """Whether the first handling of each message is in the order of its key; messages of key 0 have no order.

    Args:
        done: identity, key and number within the key of each message, as they were handled.
    """
    last: dict[Any, int] = {}
    seen: set[str] = set()
    for identity, (key, number) in done:
        if key and identity not in seen and number < last.get(key, -1):
            return False
        seen.add(identity)
        last[key] = max(number, last.get(key, -1))
    return True


class Member(consume.Source):
    """A member of the group of a log."""

    keep_seconds = 0.5

    def __init__(self, log: Log) -> None:
        self.log = log
        self.positions: dict[int, int] = {}
        self.kept: list[tuple[int, int]] = []

    @asynccontextmanager
    async def partitions(self, held: consume.Partitions, /) -> AsyncGenerator[None]:
        self.held = held
        yield
        for partition, owner in list(self.log.owners.items()):
            if owner is self:
                del self.log.owners[partition]

    async def give(self, partitions: Sequence[int]) -> None:
        for partition in partitions:
            self.log.owners[partition] = self
            self.positions[partition] = self.log.committed[partition]
        await self.held.given(partitions)

    async def take(self, partition: int, n: int, /) -> Sequence[consume.Message]:
        await asyncio.sleep(self.log.rng.choice((0, 0, 0.01)))
        self.log.may_fail()
        at = self.positions[partition]
        found = self.log.partitions[partition][at : at + self.log.rng.randint(1, n)]
        if not found:
            await asyncio.sleep(0.2)
        self.positions[partition] = at + len(found)
        return found

    async def settle(self, partition: int, messages: Sequence[consume.Message], /) -> bool:
        (last,) = messages
        await asyncio.sleep(self.log.rng.choice((0, 0.01)))
        self.log.may_fail()
        if self.log.owners.get(partition) is not self:
            return False
        before = self.log.partitions[partition][: last.position + 1]
        assert {message.identity for message in before} <= self.log.ended, "only a prefix that has ended may be settled"
        self.log.committed[partition] = max(self.log.committed[partition], last.position + 1)
        await asyncio.sleep(self.log.rng.choice((0, 0.01)))
        self.log.may_fail()  # the commit was made, and its answer is lost
        return True

    async def keep(self, partition: int, unsettled: Sequence[consume.Message], /) -> None:
        self.log.may_fail()
        self.kept.append((partition, len(unsettled)))

    def lag(self, partition: int, /) -> int:
        return len(self.log.partitions[partition]) - self.log.committed[partition]


class Queue(consume.Source):
    """A queue: a message comes again if it is not settled within 5 seconds after it was taken or kept."""

    is_log = False
    keep_seconds = 0.5

    def __init__(self, rng: Random, values: Sequence[object], faults: float = 0.0) -> None:
        self.rng, self.faults = rng, faults
        self.ready = deque(consume.Message(f"queue/{n}", value, value) for n, value in enumerate(values))
        self.leased: dict[str, tuple[float, consume.Message]] = {}
        self.settled: list[str] = []
        self.times_taken = 0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _may_fail(self) -> None:
        if self.rng.random() < self.faults:
            raise ConnectionError("the server is away")

    @asynccontextmanager
    async def partitions(self, held: consume.Partitions, /) -> AsyncGenerator[None]:
        await held.given(["queue"])
        yield

    async def take(self, partition: str, n: int, /) -> Sequence[consume.Message]:
        self._may_fail()
        for identity, (until, message) in list(self.leased.items()):
            if until < self._now():
                del self.leased[identity]
                self.ready.append(message)
        found = [self.ready.popleft() for _ in range(min(n, len(self.ready)))]
        self.times_taken += len(found)
        self.leased |= {message.identity: (self._now() + 5, message) for message in found}
        await asyncio.sleep(0 if found else 0.2)  # a cancel at this point loses the messages that were taken
        return found

    async def settle(self, partition: str, messages: Sequence[consume.Message], /) -> bool:
        await asyncio.sleep(self.rng.choice((0, 0.01)))
        self._may_fail()
        for message in messages:
            del self.leased[message.identity]
            self.settled.append(message.identity)
        return True

    async def keep(self, partition: str, unsettled: Sequence[consume.Message], /) -> None:
        for message in unsettled:
            if message.identity in self.leased:
                self.leased[message.identity] = (self._now() + 5, message)
