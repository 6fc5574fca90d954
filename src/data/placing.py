"""Placing: puts batches on a device or a mesh in a thread, while the program computes with earlier batches."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from .._public import LateModule
from ..actors.accepted import check, whole
from ..devices import Device, DeviceMesh, Placer
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
        specs: for a mesh, how the arrays are split: one `PartitionSpec` for all arrays, or a prefix of the batch's
            structure with a spec for each array. None is a copy on every device.
        ahead: how many batches are on the device, or on their way, before the reader asks for them.

    Returns:
        A stage. Arrays and numbers of a batch, or of the value of a record, become arrays of JAX; strings stay.

    Raises:
        OptionsError: `ahead` is not a whole number of at least 1.
        MissingExtraError: JAX is not installed.
    """
    check("ahead", ahead, whole(1), "data.to_device(")
    placer = _Placer(device, specs)
    return Stage(lambda batches: placer.stream(batches, ahead))


class _Placer(Placer):
    """Places batches, and batches in records."""

    def __call__(self, value: Any) -> Any:
        """Put a batch on the device, and return it when it is there. Runs in a thread."""
        return value.with_value(super().__call__(value.value)) if _has_batch(value) else super().__call__(value)

    def again(self, value: Any) -> Any:
        """Return a batch of a snapshot placed anew. Values that were computed from batches stay as they are."""
        return value.with_value(super().again(value.value)) if _has_batch(value) else super().again(value)


def _has_batch(value: object) -> bool:
    return isinstance(value, Record | Records)
