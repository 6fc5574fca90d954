"""`devices.einsum`: sums of products of arrays as nodes, in a good order."""

from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from .._errors import GraphTraceError
from .._public import LateModule
from ..engine.tracing.ref import PendingRef, Ref, call_location, refuse_leak
from ..engine.tracing.tracer import active
from .device_node import DeviceNode, device_node
from .jax_import import require_jax

if TYPE_CHECKING:
    import jax

    from .contraction import Subscripts
else:
    jax = LateModule("jax")


def einsum(subscripts: str, *operands: Any, device: Hashable = "auto") -> "jax.Array":
    """Sum products of arrays over indices, as `jax.numpy.einsum` does.

    In a graph, a call is a device node. If only another einsum reads the result of an einsum, the two become one sum
    over all of their operands, which is computed in the order that costs least.

    Args:
        subscripts: the indices of each operand and of the result: `"ij,jk->ik"`. They must be known while the graph is
            traced. An einsum with `"..."`, for axes without indices, is not merged with others.
        *operands: arrays of JAX or NumPy; in a graph, also results of nodes.
        device: in a graph: the device, as `penstock.devices.select` takes it.

    Returns:
        An array; its axes are the indices after `->`, or the indices that occur once, in alphabetical order.

    Raises:
        GraphTraceError: in a graph: the subscripts are malformed, or are for another number of operands.
        ValueError: the same outside of a graph; or, when the einsum is compiled: the shapes do not fit the subscripts.
        MissingExtraError: JAX is not installed.
    """
    require_jax()
    if active() is not None:
        from .contraction import Subscripts

        try:
            # In a graph, the subscripts could be a symbolic value, which the annotation cannot exclude.
            parsed = Subscripts.parse(_checked_text(subscripts), len(operands))
        except (TypeError, ValueError) as error:
            raise GraphTraceError(f"{call_location()}: {error}") from None
        return cast("jax.Array", _node(parsed, device)(*operands))
    for operand in operands:
        if isinstance(operand, Ref | PendingRef):
            refuse_leak("node", f"einsum {subscripts}", operand)
    return jax.numpy.einsum(subscripts, *operands)  # pyright: ignore[reportUnknownMemberType]


# More nodes than a large program has. A node that was evicted is made again, but its calls are not merged with equal
# calls of the old node.
@lru_cache(maxsize=1024)
def _node(subscripts: "Subscripts", device: Hashable) -> DeviceNode[..., Any]:
    from .contraction import Contraction

    return device_node(device=device)(Contraction(subscripts, (None,) * len(subscripts.inputs)))


def _checked_text(subscripts: object) -> str:
    if isinstance(subscripts, Ref | PendingRef) or not isinstance(subscripts, str):
        raise TypeError(f"einsum: the subscripts are {subscripts!r}; write them as text, before the operands")
    return subscripts
