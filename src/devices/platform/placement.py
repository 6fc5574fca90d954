"""Where a program runs: one device, or a mesh of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..jax_types import Device
from ..untyped_jax import jax


@dataclass(frozen=True, slots=True)
class Placement:
    """One device, or a mesh; two of them are equal if the same programs can run there.

    Attributes:
        devices: the devices in the order of the mesh.
        name: "cpu:0", or "mesh(data=4, model=2)".
        mesh: None for a single device.
    """

    devices: tuple[Device, ...]
    name: str
    mesh: Mesh | None = None

    @classmethod
    def of_device(cls, device: Device) -> "Placement":
        """Return the placement on a `jax.Device`."""
        return cls((device,), f"{device.platform}:{device.id}")

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> "Placement":
        """Return the placement on a whole mesh."""
        return cls(tuple(cast("Any", mesh.devices).flat), mesh_name(mesh), mesh)

    def sharding(self, spec: PartitionSpec | None = None) -> Sharding:
        """Return how an array lies here: whole on the device, or split over the mesh as `spec` says.

        Args:
            spec: axes of the mesh per axis of the array; None is a copy on every device.

        Raises:
            ValueError: `spec` splits an array, and this is a single device.
        """
        if self.mesh is not None:
            return NamedSharding(self.mesh, REPLICATED if spec is None else spec)
        if spec is not None and any(part is not None for part in cast("Any", spec)):
            raise ValueError(f"{spec} splits an array over a mesh, and {self.name} is one device: give device= a mesh")
        return SingleDeviceSharding(cast("Any", self.devices[0]))

    def shardings(self, specs: Any, value: Any, name: str = "the array") -> Any:
        """Return `value` with the sharding of each leaf in its place.

        Args:
            specs: a prefix of its structure.
            value: a pytree of arrays, or of what has a shape.
            name: what to call it in an error.

        Raises:
            ValueError: `specs` is no prefix of the structure, or splits an axis into parts of different sizes.
        """

        def shardings_of(path: Any, spec: PartitionSpec | None, part: Any) -> Any:
            leaves, tree = jax.tree_util.tree_flatten_with_path(part)
            sharding = self.sharding(spec)
            if self.mesh is not None and spec is not None:
                for inner, leaf in leaves:
                    place = name + jax.tree_util.keystr((*path, *inner))
                    _check_parts(np.shape(leaf), spec, dict(self.mesh.shape), place)
            return jax.tree.unflatten(tree, [sharding] * len(leaves))

        return jax.tree_util.tree_map_with_path(shardings_of, specs, value, is_leaf=_is_spec)

    def __str__(self) -> str:
        return self.name


REPLICATED: Final[PartitionSpec] = cast("Any", PartitionSpec)()


def mesh_name(mesh: Mesh) -> str:
    """Return "mesh(data=4, model=2)"; with the devices, if they are not the first ones."""
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    devices: list[Device] = list(cast("Any", mesh.devices).flat)
    numbers = [device.id for device in devices]
    if numbers == list(range(len(devices))):
        return f"mesh({shape})"
    return f"mesh({shape}) of {devices[0].platform}:{','.join(map(str, numbers))}"


def spec_text(spec: PartitionSpec) -> str:
    """Return a spec as one writes it."""
    return f"P({', '.join(map(repr, cast('Any', spec)))})"


def parts_of(entry: Any, axes: Mapping[str, int]) -> int:
    """Return into how many parts an entry of a spec splits its axis: 1 for None, else the devices along its axes."""
    return math.prod([axes[axis] for axis in axes_of(entry)])


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return the axes of the mesh that an entry of a spec names."""
    if entry is None:
        return ()
    return cast("tuple[str, ...]", entry) if isinstance(entry, tuple) else (entry,)


def _check_parts(shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int], place: str) -> None:
    entries: list[Any] = list(cast("Any", spec))
    if len(entries) > len(shape):
        raise ValueError(
            f"{place} has {len(shape)} axes, shape {shape}, and its spec {spec_text(spec)} has {len(entries)}: give it "
            "one entry for each axis, or fewer"
        )
    for axis, (size, entry) in enumerate(zip(shape, entries, strict=False)):
        parts = parts_of(entry, axes)
        if size % parts:
            padded = -(-size // parts) * parts
            raise ValueError(
                f"{place} has {size} elements along axis {axis}, shape {shape}, and its spec {spec_text(spec)} splits "
                f"them over {parts} devices, {entry!r} of the mesh: {size} is no multiple of {parts}. Pad them to "
                f"{padded} where the function can tell padding from elements, or put None in the place of {entry!r}"
            )


def _is_spec(node: object) -> bool:
    return node is None or isinstance(node, PartitionSpec)
