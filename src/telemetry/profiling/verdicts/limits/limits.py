"""All that can limit."""

from collections.abc import Iterator

from ..evidence import Evidence
from .devices import devices
from .inboxes import inboxes
from .limit import Limit
from .loop import loop
from .places import places
from .streams import streams


def limits(evidence: Evidence) -> Iterator[Limit]:
    """Yield everything of which there is only so much: none can be used for more than all of the time."""
    yield from places(evidence)
    yield from loop(evidence)
    yield from devices(evidence)
    yield from streams(evidence)


def obstacles(evidence: Evidence) -> Iterator[Limit]:
    """Yield what keeps nodes from work although nothing is used up."""
    yield from inboxes(evidence)
