"""A stream of Redis as the source of a consumer: its entries are acknowledged one by one."""

import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock import consume


class RedisStream(consume.Source):
    """A stream, read by the members of a consumer group. It needs Redis 7.

    The value of a message is the dict of the entry's fields, the key is the field "key", and the identity is
    "stream/id".

    Args:
        url: the server, such as "redis://localhost:6379".
        stream: the name of the stream.
        group: the name of the group; a new group begins with the oldest entry.
        name: the name of this consumer in the group; several processes may have the same one.
        lease_seconds: an entry that nobody has acknowledged or renewed for so long goes to the next who asks.
    """

    is_log = False
    system = "redis"
    outages = (OSError, exceptions.ConnectionError, exceptions.TimeoutError)

    def __init__(
        self, url: str, stream: str, *, group: str, name: str = socket.gethostname(), lease_seconds: float = 30.0
    ) -> None:
        self._url, self._stream, self._group, self._name = url, stream, group, name
        self._lease_ms = int(lease_seconds * 1000)
        self.keep_seconds = lease_seconds / 4
        self._taken: set[bytes] = set()  # and not acknowledged
        self._cursor, self._look_at = b"0-0", 0.0
        self._lag: int | None = None

    @asynccontextmanager
    async def partitions(self, held: consume.Partitions, /) -> AsyncGenerator[None]:
        """Join the group; at the end, give back what was taken and not acknowledged."""
        # The client need not retry: the consumer asks again.
        client = Redis.from_url(self._url, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0))
        async with client as self._redis:
            try:
                await client.xgroup_create(self._stream, self._group, id="0", mkstream=True)
            except exceptions.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):  # there is such a group
                    raise
            await held.given([self._stream])
            yield
            with suppress(*self.outages):
                await self._claim(self._taken, self._lease_ms)

    async def take(self, partition: str, n: int, /) -> Sequence[consume.Message]:
        """Return entries whose lease has ended, or new ones."""
        entries = await self._left(n)
        if not entries:
            streams: dict[Any, Any] = {self._stream: ">"}
            found: Any = await self._redis.xreadgroup(self._group, self._name, streams, count=n, block=500)
            entries = [entry for _, some in found for entry in some]
        # The lease of an entry may have ended while it is open here: then it is claimed again, and is no other message.
        messages = [self._message(entry, fields) for entry, fields in entries if entry not in self._taken]
        self._taken.update(message.position for message in messages)
        return messages

    async def _left(self, n: int) -> Any:
        """Claim entries whose consumer has died, or was cancelled before it had the answer."""
        if time.monotonic() < self._look_at:
            return []
        self._cursor, entries, _ = await self._redis.xautoclaim(
            self._stream, self._group, self._name, self._lease_ms, self._cursor, count=n
        )
        if self._cursor == b"0-0":  # all that is pending was looked at
            self._look_at = time.monotonic() + self._lease_ms / 4000
        return entries

    def _message(self, entry: bytes, fields: dict[bytes, bytes]) -> consume.Message:
        headers = [(name.decode(errors="replace"), value) for name, value in fields.items()]  # a trace among them
        return consume.Message(f"{self._stream}/{entry.decode()}", fields, fields.get(b"key"), headers, entry)

    async def settle(self, partition: str, messages: Sequence[consume.Message], /) -> bool:
        """Acknowledge entries. This is never too late: whoever has them by now need not handle them."""
        entries = [message.position for message in messages]
        await self._redis.xack(self._stream, self._group, *entries)
        self._taken.difference_update(entries)
        return True

    async def keep(self, partition: str, unsettled: Sequence[consume.Message], /) -> None:
        """Renew the leases of what is open."""
        await self._claim([message.position for message in unsettled], 0)
        for group in await self._redis.xinfo_groups(self._stream):
            if group["name"] == self._group.encode():
                self._lag = None if group["lag"] is None else group["lag"] + group["pending"]

    async def _claim(self, entries: Sequence[bytes] | set[bytes], idle_ms: int) -> None:
        if entries:
            await self._redis.xclaim(self._stream, self._group, self._name, 0, list(entries), idle=idle_ms, justid=True)

    def lag(self, partition: str, /) -> int | None:
        """Return how many entries nobody in the group has acknowledged, as of the last renewal."""
        return self._lag

    def letters_to(self, stream: str, /) -> Callable[[consume.DeadLetter], Awaitable[None]]:
        """Return a function that adds dead letters to a stream: the fields, and `source`, `error` and `attempts`."""

        async def add(letter: consume.DeadLetter) -> None:
            own = {"source": letter.message.identity, "error": repr(letter.error), "attempts": letter.attempts}
            await self._redis.xadd(stream, letter.message.value | {name.encode(): own[name] for name in own})

        return add
