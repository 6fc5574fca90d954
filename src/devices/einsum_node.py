"""`devices.einsum`: sums of products of arrays as nodes."""

import inspect
import re
from collections.abc import Hashable, Sequence
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
else:
    jax = LateModule("jax")


def einsum(subscripts: str, *operands: Any, device: Hashable = "auto") -> "jax.Array":
    """Sum products of arrays over indices, as `jax.numpy.einsum` does.

    In a graph, a call is a device node. The order of the products that costs least is found for the operands of one
    call, so pass all operands of a sum together: `einsum("ij,jk,k->i", a, b, v)`.

    Args:
        subscripts: the indices of each operand and of the result: `"ij,jk->ik"`. They must be known while the graph is
            traced.
        *operands: arrays of JAX or NumPy; in a graph, also results of nodes.
        device: in a graph: the device, as `penstock.devices.select` takes it.

    Returns:
        An array; its axes are the indices after `->`, or the indices that occur once, in alphabetical order.

    Raises:
        GraphTraceError: in a graph: the subscripts are no text.
        ValueError: the subscripts are malformed, or do not fit the operands; in a graph, when the einsum is compiled.
        MissingExtraError: JAX is not installed.
    """
    require_jax()
    if active() is not None:
        # In a graph, the subscripts could be a symbolic value, which the annotation cannot exclude.
        if not isinstance(cast("object", subscripts), str):
            raise GraphTraceError(
                f"{call_location()}: einsum: the subscripts are {subscripts!r}; write them as text, before the operands"
            )
        return cast("jax.Array", _node(subscripts, len(operands), device)(*operands))
    for operand in operands:
        if isinstance(operand, Ref | PendingRef):
            refuse_leak("node", f"einsum {subscripts}", operand)
    return jax.numpy.einsum(subscripts, *operands)  # pyright: ignore[reportUnknownMemberType]


# More nodes than a large program has. A node that was evicted is made again, but its calls are not merged with equal
# calls of the old node.
@lru_cache(maxsize=1024)
def _node(subscripts: str, operands: int, device: Hashable) -> DeviceNode[..., Any]:
    def sum_of_products(*arrays: Any) -> Any:
        _check(subscripts, arrays)
        return jax.numpy.einsum(subscripts, *arrays)  # pyright: ignore[reportUnknownMemberType]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(f"operand_{number + 1}", kind) for number in range(operands)]
    sum_of_products.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return device_node(name=f"einsum {_written_out(subscripts)}", device=device)(sum_of_products)


def _written_out(subscripts: str) -> str:
    """Return subscripts with their result, and without spaces. Snapshots know the node by this name."""
    text = subscripts.replace(" ", "")
    if "->" in text:
        return text
    indices = text.replace(",", "").replace("...", "")
    once = sorted(index for index in indices if indices.count(index) == 1)
    return f"{text}->{'...' if '...' in text else ''}{''.join(once)}"


def _check(subscripts: str, arrays: Sequence[Any]) -> None:
    """Refuse subscripts that JAX would read in another way."""
    if wrong := re.search(r"[^A-Za-z,.>\s-]", subscripts):
        raise ValueError(f"einsum {subscripts!r}: {wrong[0]!r} is no index: use letters")
    for number, (term, array) in enumerate(
        zip(_written_out(subscripts).partition("->")[0].split(","), arrays, strict=False)
    ):
        lengths: dict[str, int] = {}
        for index, length in zip(term, array.shape, strict=False) if "." not in term else ():
            if lengths.setdefault(index, length) != length:
                raise ValueError(
                    f"einsum {subscripts!r}: index {index!r} has the lengths {lengths[index]} and {length} in operand "
                    f"{number + 1}"
                )
