"""Placing: batches go to a device or a mesh in a thread, while others are computed with."""

import functools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .._public import LateModule
from ..actors.accepted import check, whole
from ..actors.policy import Policy
from ..devices.jax_import import Device, require_jax
from ..devices.selection import DeviceMesh
from ..engine.control import mapped_ahead
from ..engine.node import Node
from .records import Record, Records
from .stages import Stage

if TYPE_CHECKING:
    import jax.sharding
else:
    jax = LateModule("jax")


def to_device(
    device: "str | Device | DeviceMesh | jax.sharding.Mesh", specs: Any = None, /, *, ahead: int = 2
) -> Stage[AsyncIterator[Any], AsyncIterator[Any]]:
    """Put batches on a device, or split them over a mesh, in advance, so that transfers overlap with computing.

    Functions that `devices.actor` runs on the same mesh take these arrays without another transfer. Under
    `jax.distributed`, each process gives the rows that it has read, and the arrays have the rows of all processes.

    Args:
        device: the device or mesh, as `devices.select` takes it.
        specs: for a mesh, how the arrays are split: a `PartitionSpec` for all of them, or a prefix of the batch's
            structure with one for each; None is a copy on every device.
        ahead: how many batches are on the device, or on their way there, before the reader asks for them.

    Returns:
        A stage. Arrays and numbers of a batch, or of the value of a record, become arrays of JAX; strings stay.

    Raises:
        OptionsError: `ahead` is not a whole number of at least 1.
        MissingExtraError: JAX is not installed.
    """
    check("ahead", ahead, whole(1), "data.to_device(")
    require_jax()
    policy = Policy(runs_on="thread", concurrency=1)
    place = Node(functools.partial(_placed, device, specs), policy, name="to_device")
    return Stage(lambda batches: mapped_ahead(place, batches, "to_device", max(1, ahead - 1)))


def _placed(device: Any, specs: Any, batch: Any) -> Any:
    """Return a batch on a device, when it is there; in a thread."""
    from ..devices.device_pool import placements_of
    from ..devices.untyped_jax import jax

    if isinstance(batch, Record | Records):
        record = cast("Record[Any] | Records[Any]", batch)  # type: ignore[redundant-cast]
        return record.with_value(_placed(device, specs, record.value))
    [placement] = placements_of(device, 1)
    leaves, tree = jax.tree.flatten(batch)
    several = jax.process_count() > 1
    whole = jax.tree.unflatten(tree, [_Global(leaf, jax.process_count()) for leaf in leaves]) if several else batch
    shardings = jax.tree.leaves(placement.shardings(specs, whole, "the batch"))
    for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf, str | bytes):
            continue
        if several:
            leaves[index] = jax.make_array_from_process_local_data(sharding, leaf)
        else:
            leaves[index] = jax.device_put(leaf, sharding)
    jax.block_until_ready(leaves)
    return jax.tree.unflatten(tree, leaves)


class _Global:
    """The shape of an array of which each process has as many rows."""

    def __init__(self, leaf: Any, processes: int) -> None:
        local = np.shape(leaf)
        self.shape = (local[0] * processes, *local[1:]) if local else local
