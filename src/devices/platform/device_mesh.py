"""The short spelling of a mesh: so many devices, in this shape, with these names."""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..._errors import DeviceError
from ...actors.accepted import is_whole
from .inventory import AUTO, available, devices_of

if TYPE_CHECKING:
    import jax.sharding


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """A mesh of this process's devices, looked for when it is first used, so that a module can name one.

    Its axes are of type Auto: a node is plain JAX for one item and knows of no mesh, so the compiler spreads what is
    inside, from what `in_specs` and `out_specs` say about its border. With Explicit axes each product in the node would
    have to say how its result lies. Whoever wants that passes a mesh of `jax.make_mesh` instead.

    Args:
        shape: how many devices along each axis.
        axis_names: a name for each axis, as `jax.sharding.PartitionSpec` uses them.
        device: "auto" for the accelerators, or the CPU where there are none, or the name of a platform.

    Raises:
        ValueError: the shape and the names do not fit together.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    device: str = AUTO
    _whole: "DeviceMesh | None" = field(default=None, repr=False)
    _positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Lists are taken, too: what is written in a configuration file.
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "axis_names", tuple(self.axis_names))
        if not self.shape or not all(is_whole(length, 1) for length in self.shape):
            raise ValueError(f"DeviceMesh(shape={self.shape!r}): a whole number of at least 1 for each axis")
        if len(self.axis_names) != len(self.shape) or len(set(self.axis_names)) < len(self.axis_names):
            raise ValueError(
                f"DeviceMesh(shape={self.shape!r}, axis_names={self.axis_names!r}): "
                "one name for each axis, and all different"
            )
        if ":" in self.device:
            platform = self.device.partition(":")[0]
            raise ValueError(
                f"DeviceMesh(device={self.device!r}) names one device; a mesh takes a platform: {platform!r}"
            )

    @property
    def size(self) -> int:
        """How many devices it has."""
        return math.prod(self.shape)

    def split(self, axis_name: str) -> "tuple[DeviceMesh, ...]":
        """Cut the mesh into one mesh for each position along an axis: the stages of a pipeline.

        The axis stays, with length 1, so that the same specs fit the whole mesh and its parts.

        Args:
            axis_name: which axis.

        Raises:
            ValueError: there is no such axis.
        """
        if axis_name not in self.axis_names:
            raise ValueError(f"the mesh has no axis {axis_name!r}; it has {', '.join(self.axis_names)}")
        axis = self.axis_names.index(axis_name)
        inner = math.prod(self.shape[axis + 1 :])
        positions = self._positions or tuple(range(self.size))
        return tuple([
            replace(
                self,
                shape=(*self.shape[:axis], 1, *self.shape[axis + 1 :]),
                _whole=self._whole or self,
                _positions=tuple([one for i, one in enumerate(positions) if i // inner % self.shape[axis] == index]),
            )
            for index in range(self.shape[axis])
        ])  # fmt: skip

    def resolve(self) -> "jax.sharding.Mesh":
        """Return the mesh as JAX has it, of the first devices; equal ones for equal calls.

        Raises:
            DeviceError: there are fewer devices; the message lists them, and says how to simulate some.
            MissingExtraError: JAX is not installed.
        """
        if self._whole is not None:
            return self._part_of(self._whole.resolve())
        devices = devices_of(self.device)
        if len(devices) < self.size:
            raise DeviceError(self._too_large(len(devices), devices[0].platform))
        import jax
        from jax.sharding import AxisType

        types = (AxisType.Auto,) * len(self.shape)
        return jax.make_mesh(  # pyright: ignore[reportUnknownMemberType]
            self.shape, self.axis_names, axis_types=types, devices=devices[: self.size]
        )

    def _part_of(self, mesh: "jax.sharding.Mesh") -> "jax.sharding.Mesh":
        from jax.sharding import Mesh

        devices: Any = mesh.devices
        part = devices.flatten()[list(self._positions)].reshape(self.shape)
        return Mesh(part, mesh.axis_names, mesh.axis_types)

    def _too_large(self, found: int, platform: str) -> str:
        there_are = "there is 1" if found == 1 else f"there are {found}"
        text = (
            f"a mesh of shape {self.shape} needs {self.size} devices, and {there_are} of platform {platform!r}: "
            f"{available()}. Choose a smaller shape"
        )
        if platform == "cpu":
            text += (
                f', or simulate devices: jax.config.update("jax_num_cpu_devices", {self.size}) before JAX is first used'
            )
        return f"{text}."
