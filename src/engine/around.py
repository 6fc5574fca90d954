"""Around: what the Engine owns that runs the calling code, for code that is no step of a graph."""

from contextvars import ContextVar
from typing import cast

from ..actors import current
from .pools import Pools

# For the task of an instance or a loop, which is no handler: what its Engine owns, and the handler around its scope.
_host: ContextVar[tuple[Pools, object] | None] = ContextVar("penstock_host_pools", default=None)


def host(pools: Pools) -> None:
    """Note in the running task, which keeps an instance or runs a loop, what its Engine owns."""
    _host.set((pools, current.source.get()))


def pools_around() -> Pools | None:
    """Return what the Engine owns whose node, instance or loop is calling; None outside of one.

    A task or thread that outlives the handler that has started it may get None, too.
    """
    handling, hosted = current.source.get(), _host.get()
    if hosted is not None and hosted[1] is handling:
        return hosted[0]
    actor = None if handling is None else handling.actor
    return None if actor is None else cast("Pools | None", actor.owner)
