"""Buckets: the few sizes and lengths that arrays are padded to, so that few programs are compiled."""

from bisect import bisect_left

from ...actors.batch import Batch, Buckets

# Below it, a program and a batch of its own for each of 1, 2 and 4 costs more than at most 7 elements of padding.
SHORTEST_LENGTH = 8


def batch_sizes(batch: Batch, multiple: int = 1) -> tuple[int, ...]:
    """Return the sizes that batches are padded to, in ascending order; the last one holds `max_size` items.

    Args:
        batch: which sizes.
        multiple: what each has to be a multiple of: the devices that share the rows of a batch.
    """
    if isinstance(batch.buckets, tuple):
        sizes = [*batch.buckets, batch.max_size]
    else:
        sizes = [*(1 << exponent for exponent in range((batch.max_size - 1).bit_length())), batch.max_size]
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))


def batch_size(count: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of the sizes that holds `count` items; there are no more than the last one holds."""
    return sizes[bisect_left(sizes, count)]


def padded_length(length: int, buckets: Buckets) -> int | None:
    """Return the length that an axis is padded to; None if it is longer than the last bucket."""
    if isinstance(buckets, tuple):
        index = bisect_left(buckets, length)
        return buckets[index] if index < len(buckets) else None
    return 1 << (length - 1).bit_length() if length > SHORTEST_LENGTH else SHORTEST_LENGTH
