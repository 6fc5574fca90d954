"""What happened between two looks at the same counters."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import Field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from ...actors.node_actor import ActorStatistics


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Record = TypeVar("Record", bound=_Dataclass)


def less(later: Record, earlier: Record, *counters: str) -> Record:
    """Return a record with those of its fields that count reduced by what they were; one that is None stays None.

    Raises:
        ValueError: a counter has become smaller, so the records are not two of the same.
    """
    changes: dict[str, Any] = {}
    for name in counters:
        now, before = getattr(later, name), getattr(earlier, name)
        if now is None:
            continue
        changes[name] = now - (before or 0)
        if changes[name] < 0:
            raise ValueError(
                f"since() takes an earlier look at the same counters, but {name} was {before}, and is {now}"
            )
    return replace(later, **changes)


def actors_less(later: Iterable[ActorStatistics], earlier: Iterable[ActorStatistics]) -> tuple[ActorStatistics, ...]:
    """Return what each node did between two looks; one that is new did all of it."""
    before = dict(_numbered(earlier))
    return tuple(_actor_less(now, before[key]) if key in before else now for key, now in _numbered(later))


def _actor_less(now: ActorStatistics, before: ActorStatistics) -> ActorStatistics:
    inbox = less(now.inbox, before.inbox, "puts", "put_wait_seconds", "get_wait_seconds")
    return replace(less(now, before, "completed", "failed", "retried", "restarts", "busy_seconds"), inbox=inbox)


def _numbered(actors: Iterable[ActorStatistics]) -> Iterable[tuple[tuple[str, str, int], ActorStatistics]]:
    """Yield actors with what tells each from the others, also from one of the same name."""
    seen: Counter[tuple[str, str]] = Counter()
    for actor in actors:
        seen[actor.graph, actor.node] += 1
        yield (actor.graph, actor.node, seen[actor.graph, actor.node]), actor
