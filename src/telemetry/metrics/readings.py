"""What metrics read of whatever counts: numbers of series, and the protocol of who gives them.

Telemetry knows no engine. What wants to be counted implements `Source`, and tells `registry` when it opens and closes.
"""

from collections.abc import Iterable
from typing import Protocol, TypeAlias


class Series:
    """A metric with its attributes; made by `series`, one for each.

    Attributes:
        metric: name of the metric, one of `definitions.OBSERVED`.
        attributes: of bounded cardinality: graphs, nodes, outcomes, never an item or a run.
    """

    # It is equal to itself alone: a scope that closes looks up one for each of its numbers, and comparing names takes
    # longer than all else.
    __slots__ = ("attributes", "metric")

    def __init__(self, metric: str, attributes: tuple[tuple[str, str | bool], ...]) -> None:
        self.metric = metric
        self.attributes = attributes


_known: dict[tuple[str, tuple[tuple[str, str | bool], ...]], Series] = {}


def series(metric: str, *attributes: tuple[str, str | bool]) -> Series:
    """Return the series of a metric and its attributes, pairs of name and value in a fixed order."""
    key = metric, attributes
    return _known.get(key) or _known.setdefault(key, Series(metric, attributes))  # one, whichever thread comes first


# A number of a series; those of one series are added up. With it, what it belongs to, if several sources may give the
# same number, which is added once then; or None.
Reading: TypeAlias = tuple[Series, float, object]


class Source(Protocol):
    """Something that counts: the actors of a scope, a stream, a deployment, a device.

    Its methods are called by any thread, while others go on counting.
    """

    def counters(self) -> Iterable[Reading]:
        """Return what only grows."""
        ...

    def levels(self) -> Iterable[Reading]:
        """Return what is so now."""
        ...
