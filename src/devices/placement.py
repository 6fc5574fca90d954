"""Where a program runs: one device, or a mesh of them."""

from dataclasses import dataclass
from typing import Any, Final, cast

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .jax_types import Device
from .untyped_jax import jax


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
        shape = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        return cls(tuple(cast("Any", mesh.devices).flat), f"mesh({shape})", mesh)

    def sharding(self, spec: PartitionSpec | None = None) -> Sharding:
        """Return how an array lies here: whole on the device, or split over the mesh as `spec` says.

        Args:
            spec: axes of the mesh per axis of the array; None is a copy on every device.

        Raises:
            ValueError: `spec` splits an array, and this is a single device.
        """
        if self.mesh is not None:
            return NamedSharding(self.mesh, _REPLICATED if spec is None else spec)
        if spec is not None and any(part is not None for part in cast("Any", spec)):
            raise ValueError(f"{spec} splits an array over a mesh, and {self.name} is one device: give device= a mesh")
        return SingleDeviceSharding(cast("Any", self.devices[0]))

    def shardings(self, specs: Any, value: Any) -> Any:
        """Return `value` with the sharding of each leaf in its place; `specs` is a prefix of its structure.

        Raises:
            ValueError: `specs` is no prefix of the structure.
        """

        def shardings_of(spec: PartitionSpec | None, part: Any) -> Any:
            leaves, tree = jax.tree.flatten(part)
            return jax.tree.unflatten(tree, [self.sharding(spec)] * len(leaves))

        return jax.tree.map(shardings_of, specs, value, is_leaf=_is_spec)

    def __str__(self) -> str:
        return self.name


_REPLICATED: Final[PartitionSpec] = cast("Any", PartitionSpec)()


def _is_spec(node: object) -> bool:
    return node is None or isinstance(node, PartitionSpec)
