"""JAX's own profile: what the threads of devices do is named in it after nodes and items, while one is taken."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from .untyped_jax import jax

if TYPE_CHECKING:
    from .dispatch.device_queue import DeviceCall

_ANNOTATION: Final[Any] = jax.profiler.TraceAnnotation
# Items of a batch that are named: more of them nobody reads.
_NAMED: Final = 64


def is_taken() -> bool:
    """Whether JAX takes a profile; takes less than a tenth of a microsecond."""
    taken: bool = _ANNOTATION.is_enabled()
    return taken


def dispatching(node: str, calls: "Sequence[DeviceCall]") -> AbstractContextManager[None]:
    """Name what a thread does after a node; items are told by index, and by their numbers in Penstock's timeline."""
    frames = [call.frame for call in calls[:_NAMED] if call.frame is not None]
    items = " ".join([str(frame.item) for frame in frames])
    annotation: AbstractContextManager[None] = _ANNOTATION(
        node, count=len(calls), items=items, frames=" ".join([str(frame.identity) for frame in frames])
    )
    return annotation
