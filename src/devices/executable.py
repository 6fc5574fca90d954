"""A compiled program for one signature, ready to be called on the thread of its device."""

from typing import Any

from .signature import is_device_array
from .untyped_jax import jax


class Executable:
    """A compiled program for one signature; made by `CompileCache`, called on one device's thread.

    Attributes:
        hits: how often it was found in the cache.
        transfers: how many arguments lay elsewhere and were moved for a call.
        used: when it was found last, as a number that grows.
    """

    __slots__ = ("__weakref__", "_compiled", "_is_flat", "_shardings", "_static_argnums", "hits", "transfers", "used")

    def __init__(
        self, compiled: Any, shardings: tuple[Any, ...], static_argnums: tuple[int, ...], is_flat: bool
    ) -> None:
        """Wrap what XLA has made.

        Args:
            compiled: JAX's compiled object.
            shardings: where each leaf of the arguments belongs.
            static_argnums: positions of the arguments that are compiled in.
            is_flat: each of the others is an array, none a pytree.
        """
        self._compiled = compiled
        self._is_flat = is_flat
        self._shardings = shardings
        self._static_argnums = static_argnums
        self.hits = 0
        self.transfers = 0
        self.used = 0

    def __call__(self, *args: Any) -> Any:
        """Dispatch a call, and return before it has been computed.

        Arguments of NumPy and Python go to the device with the call. A `jax.Array` that lies elsewhere is moved.

        Args:
            *args: all arguments, static ones included, with the signature that this was found for.

        Returns:
            The function's result, of arrays that may not be ready yet.
        """
        if self._static_argnums:
            args = tuple([arg for position, arg in enumerate(args) if position not in self._static_argnums])
        leaves = args if self._is_flat else jax.tree.leaves(args)
        for leaf, sharding in zip(leaves, self._shardings, strict=True):
            if is_device_array(leaf) and not _lies(leaf, sharding):
                args = self._moved(args)
                break
        return self._compiled(*args)

    def _moved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with every array where it belongs."""
        leaves, tree = jax.tree.flatten(args)
        for index, sharding in enumerate(self._shardings):
            if is_device_array(leaves[index]) and not _lies(leaves[index], sharding):
                leaves[index] = jax.device_put(leaves[index], sharding)
                self.transfers += 1
        moved: tuple[Any, ...] = jax.tree.unflatten(tree, leaves)
        return moved

    @property
    def cost(self) -> dict[str, float]:
        """What XLA says that a call costs: "flops", "bytes accessed"; empty where its backend does not tell."""
        analysis: dict[str, float] | None = self._compiled.cost_analysis()
        return analysis or {}


def _lies(leaf: Any, sharding: Any) -> bool:
    """Tell whether an array lies as a program expects it; equal shardings may be spelled differently."""
    where = leaf.sharding
    return bool(where == sharding or where.is_equivalent_to(sharding, leaf.ndim))
