"""A compiled program for one signature, ready to be called on the thread of its device."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..untyped_jax import jax
from .enqueue_order import Locks, holding
from .resharding import reshard
from .signature import is_device_array


class Executable:
    """A compiled program for one signature; made by `CompileCache`, called on one device's thread.

    Attributes:
        hits: how often it was found in the cache.
        transfers: how often an argument lay elsewhere and was moved for a call, by its name and the shardings that it
            had and got.
        used: when it was found last, as a number that grows.
    """

    __slots__ = (
        "__weakref__", "_compiled", "_is_flat", "_locks", "_names", "_shardings", "_static_argnums", "_usual", "hits",
        "transfers", "used",
    )  # fmt: skip

    def __init__(
        self,
        compiled: Any,
        names: tuple[str, ...],
        shardings: tuple[Any, ...],
        static_argnums: tuple[int, ...],
        is_flat: bool,
        locks: Locks,
    ) -> None:
        """Wrap what XLA has made.

        Args:
            compiled: JAX's compiled object.
            names: of each leaf of the arguments.
            shardings: where each of them belongs.
            static_argnums: positions of the arguments that are compiled in.
            is_flat: each of the others is an array, none a pytree.
            locks: to hold while it is enqueued.
        """
        self._compiled = compiled
        self._is_flat = is_flat
        self._locks = locks
        self._names = names
        self._shardings = shardings
        self._static_argnums = static_argnums
        self._usual: list[Any] = list(shardings)  # as the arrays of the last call spelled them
        self.hits = 0
        self.transfers: Counter[tuple[str, Any, Any]] = Counter()
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
        for index, leaf in enumerate(leaves):
            if is_device_array(leaf) and not self._lies(index, leaf):
                args = self._moved(args)
                break
        if not self._locks:
            return self._compiled(*args)
        with holding(self._locks):
            return self._compiled(*args)

    def transferred(
        self, args: tuple[Any, ...], around: Callable[[int], AbstractContextManager[None]]
    ) -> tuple[Any, ...]:
        """Return all arguments of a call with their arrays on the device, where the call would transfer them itself.

        Args:
            args: as of a call.
            around: opened around the transfer, with the number of bytes; not opened if there is nothing to transfer.
        """
        dynamic = [position for position in range(len(args)) if position not in self._static_argnums]
        leaves, tree = jax.tree.flatten([args[position] for position in dynamic])
        away = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, np.ndarray) or (is_device_array(leaf) and not self._lies(index, leaf))
        ]
        if not away:
            return args
        with around(sum(leaves[index].nbytes for index in away)):
            for index in away:
                leaves[index] = self._transferred(index, leaves[index])
        placed = dict(zip(dynamic, jax.tree.unflatten(tree, leaves), strict=True))
        return tuple([placed.get(position, arg) for position, arg in enumerate(args)])

    def _transferred(self, index: int, leaf: Any) -> Any:
        sharding = self._shardings[index]
        if isinstance(leaf, np.ndarray):
            # On a CPU it may be used in place: a caller that does not wait for the result has given a copy (`owned`).
            return jax.device_put(leaf, sharding)
        self.transfers[self._names[index], leaf.sharding, sharding] += 1
        return reshard(leaf, sharding)

    def _moved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with every array where it belongs."""
        leaves, tree = jax.tree.flatten(args)
        for index, leaf in enumerate(leaves):
            if is_device_array(leaf) and not self._lies(index, leaf):
                leaves[index] = self._transferred(index, leaf)
        moved: tuple[Any, ...] = jax.tree.unflatten(tree, leaves)
        return moved

    def _lies(self, index: int, leaf: Any) -> bool:
        """Tell whether an array lies as the program expects it; equal shardings may be spelled differently."""
        where, sharding = leaf.sharding, self._shardings[index]
        if where is self._usual[index]:  # comparing two takes microseconds
            return True
        if where == sharding or where.is_equivalent_to(sharding, leaf.ndim):
            self._usual[index] = where
            return True
        return False

    @property
    def cost(self) -> dict[str, float]:
        """What XLA says that a call costs: "flops", "bytes accessed"; empty where its backend does not tell."""
        analysis: dict[str, float] | None = self._compiled.cost_analysis()
        return analysis or {}
