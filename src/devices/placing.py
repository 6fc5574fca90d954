"""Placer: puts values on a device or a mesh in a thread, while the program computes with earlier values."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from .._machine import aligned_copy
from ..actors.policy import Policy
from ..engine.control import mapped_ahead
from ..engine.node import Node
from ..engine.stages import StageRole
from .jax_import import require_jax


@dataclass(frozen=True, eq=False)
class Placer:
    """A function that places values, called in a thread. A snapshot keeps its state, to notice another device later.

    Args:
        device: the device or mesh, as `devices.select` takes it.
        specs: for a mesh, how the arrays are split, as `data.to_device` takes it.

    Attributes:
        role: the effect on the values of a stream; see `StageRole`.

    Raises:
        MissingExtraError: JAX is not installed.
    """

    device: Any
    specs: Any = None
    role: ClassVar[StageRole] = StageRole("placed")

    def __post_init__(self) -> None:
        require_jax()

    @cached_property
    def _node(self) -> Callable[[Any], Any]:  # all streams share this node, which handles one value at a time
        return Node(self, Policy(concurrency=1), name="to_device", runs_on="thread")

    def stream(self, values: AsyncIterator[Any], ahead: int = 2) -> AsyncIterator[Any]:
        """Place the values of a stream in advance.

        Args:
            values: the stream.
            ahead: how many values are on the device, or on their way, before the reader asks for them.
        """
        return mapped_ahead(self._node, values, "to_device", max(1, ahead - 1))

    def __call__(self, value: Any) -> Any:
        """Put a value on the device, and return it when it is there, with arrays of JAX for arrays and numbers."""
        from .device_pool import placements_of
        from .untyped_jax import jax

        [placement] = placements_of(self.device, 1)
        leaves, tree = jax.tree.flatten(value)
        several, is_on_host = jax.process_count() > 1, placement.devices[0].platform == "cpu"

        def shape_of(leaf: Any) -> tuple[int, ...]:  # each process has the same number of rows of the global array
            local = np.shape(leaf)
            return (local[0] * jax.process_count(), *local[1:]) if local else local

        shardings = placement.shardings(self.specs, value, "the batch", shape_of)
        for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
            if isinstance(leaf, str | bytes):
                continue
            # On a CPU, the device would use the user's array itself, to which the user can still write.
            own = aligned_copy(leaf) if is_on_host and isinstance(leaf, np.ndarray) else leaf
            if several:
                leaves[index] = jax.make_array_from_process_local_data(sharding, own)
            else:
                leaves[index] = jax.device_put(own, sharding)
        jax.block_until_ready(leaves)
        return jax.tree.unflatten(tree, leaves)

    def again(self, value: Any) -> Any:
        """Return a value of a snapshot placed anew. Values that were computed from placed values stay as they are."""
        from .untyped_jax import jax

        if not all(isinstance(leaf, jax.Array | str | bytes) for leaf in jax.tree.leaves(value)):
            return value
        try:
            return self(value)
        except ValueError:  # the specs do not fit this value
            return value

    def state(self) -> str:
        """Return a text that names the device or mesh."""
        devices = getattr(self.device, "devices", None)  # a mesh of JAX has these
        numbers = "" if devices is None else f" of {[device.id for device in devices.flat]}"
        return f"{self.device!r}{numbers}, {self.specs!r}"

    def restore(self, state: str) -> None:
        """Do nothing."""
