"""What a channel holds and has done."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChannelStatistics:
    """A snapshot of a channel.

    A `put_wait_seconds` that grows means that the consumer is the bottleneck; a `get_wait_seconds` that grows
    means that the producer is.

    Attributes:
        depth: items held now.
        capacity: items it may hold; None if unbounded.
        high_water: the most items it ever held.
        bytes_held: bytes held now, where the size of items is known.
        puts: items that entered since the channel was made.
        waiting_putters: tasks that wait for room now.
        waiting_getters: tasks that wait for an item now.
        put_wait_seconds: time that putters spent waiting, in total; of those that wait now, until now.
        get_wait_seconds: time that getters spent waiting, in total; of those that wait now, nothing yet.
    """

    depth: int
    capacity: int | None
    high_water: int
    bytes_held: int
    puts: int
    waiting_putters: int
    waiting_getters: int
    put_wait_seconds: float
    get_wait_seconds: float
