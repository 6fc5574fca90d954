"""The source that a consumer reads from, with four functions; its messages; and dead letters for failed messages."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .._public import LateModule
from ..telemetry import names

if TYPE_CHECKING:
    from .. import consume
else:
    consume = LateModule(__package__)


_MOST_OF_KEY = 200  # characters of a key in a span


@dataclass(slots=True, eq=False)
class Message:
    """A message of a source.

    Attributes:
        identity: a name that no other message has, such as "topic/partition/offset". It is the same each time that the
            message comes, so that an insert with the identity as its key writes the message once.
        value: the content of the message.
        key: messages of one key are handled in order; None for a message without an order.
        headers: pairs of name and value. A trace in the headers is continued.
        position: the value by which the source settles the message, such as an offset. Only the source reads it.
    """

    identity: str
    value: Any
    key: Hashable = None
    headers: Sequence[tuple[str, bytes]] = ()
    position: Any = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that failed, to be put aside.

    Attributes:
        message: the message.
        error: the error of its call.
        attempts: the attempts of the node that failed; 0 if no call was made of the message.
    """

    message: Message
    error: Exception
    attempts: int


class Source(ABC):
    """Where messages come from, a log or a queue: a class derived from this one has these four functions.

    A source may be asked for several partitions at a time, but not twice at a time for the same partition. `take` may
    be cancelled at each of its awaits. Messages that it has taken and not returned then must come again, to this
    consumer or another.

    Attributes:
        is_log: whether messages are settled in order, by the last one of a prefix, as an offset is committed; False for
            a queue, whose messages are settled one by one. Set it in the class.
        system: the name of the system in spans of messages, their `messaging.system`. Set it in the class.
        keep_seconds: how often `keep` is called, in seconds; None for never.
        outages: the errors that pass: a method that raises such an error is called again after a second. Any other
            error ends the consumer.
    """

    is_log: bool = True
    system: str = "unknown"
    keep_seconds: float | None = None
    outages: tuple[type[Exception], ...] = (OSError,)

    @abstractmethod
    def partitions(self, held: "consume.Partitions", /) -> AbstractAsyncContextManager[object]:
        """Open the source, and tell from then on which partitions this consumer holds. Leaving the context closes it.

        Closing may take `held.closing_seconds`, and is cancelled then.

        Args:
            held: the object to tell, from a callback or a task of the source, or once before the `yield`: `await
                held.given([...])`, `await held.taken_away([...], within_seconds)`, `await held.lost([...])`. A queue
                has one partition, which is given once and never changes.
        """

    @abstractmethod
    async def take(self, partition: Any, n: int, /) -> Sequence[Message]:
        """Wait for the next messages of a partition.

        Args:
            partition: the partition, which is held.
            n: the most messages to return.

        Returns:
            The messages, in their order. If none came for a while, return an empty sequence: `take` is called again.
        """

    @abstractmethod
    async def settle(self, partition: Any, messages: Sequence[Message], /) -> bool:
        """Note that messages have ended, and need not come again.

        Args:
            partition: the partition, which is held.
            messages: for a log, one message: this message and all before it have ended. For a queue, all messages that
                have ended since the last call.

        Returns:
            False if the call came too late, because the partition belongs to another consumer by now.
        """

    async def keep(self, partition: Any, unsettled: Sequence[Message], /) -> None:  # noqa: B027 - for some is nothing to do
        """Tell the broker that this consumer is alive, and renew its claim on a partition.

        Args:
            partition: the partition, which is held.
            unsettled: the messages that were taken and are not settled, in their order.
        """

    def lag(self, partition: Any, /) -> int | None:
        """Return how many messages of a partition were not settled yet, by any consumer; None if that is unknown."""
        return None

    def attributes(self, partition: Any, /) -> Mapping[str, str]:
        """Return the attributes of a partition in metrics and spans, such as its topic; by default only its name.

        Args:
            partition: the partition, which is held.
        """
        return {names.PARTITION: label(partition)}


def attributes_of(message: Message) -> dict[str, str | int]:
    """Return the attributes of a message in its span."""
    found: dict[str, str | int] = {names.MESSAGE_ID: message.identity}
    if message.key is not None:
        key = message.key.decode(errors="replace") if isinstance(message.key, bytes) else str(message.key)
        found[names.MESSAGE_KEY] = key[:_MOST_OF_KEY]
    if isinstance(message.position, int):
        found[names.MESSAGE_OFFSET] = message.position
    return found


def label(partition: object) -> str:
    """Return the name of a partition as a text; the text of a tuple such as `TopicPartition` is "topic/0"."""
    return "/".join(map(str, cast("tuple[object, ...]", partition))) if isinstance(partition, tuple) else str(partition)
