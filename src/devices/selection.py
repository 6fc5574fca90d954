"""The devices of this process, and how to select a device: by name, by number, as a mesh, or as an object of JAX."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, overload

from .._errors import DeviceError
from .._public import LateModule
from ..actors.accepted import is_whole
from .jax_import import Device, all_devices, is_device, local_devices, platforms, require_jax, start_backends

if TYPE_CHECKING:
    import jax.sharding
else:
    jax = LateModule("jax")


AUTO: Final = "auto"


def devices_of(platform: str) -> list[Device]:
    """Return the devices of a platform that belong to this process.

    Args:
        platform: the name of the platform; "auto" for the accelerators, or for the CPU if there are none.

    Raises:
        DeviceError: there is no such platform; the message lists the devices.
    """
    start_backends()
    if platform == AUTO:
        return local_devices()
    try:
        # JAX would take an empty name as the default platform.
        found = local_devices(platform.lower()) if platform else []
    except RuntimeError:  # JAX does not know the platform; the error below says more
        found = []
    if not found:
        raise DeviceError(f"there is no platform {platform!r}; {available()}")
    return found


def by_platform() -> dict[str, list[Device]]:
    """Start JAX, and return the devices of each platform, of all processes. The default platform is first.

    Raises:
        MissingExtraError: JAX is not installed.
        DeviceError: JAX cannot start.
    """
    start_backends()
    found = map(all_devices, platforms())
    return {devices[0].platform: devices for devices in found}


def available() -> str:
    """Return a sentence that lists the devices of this process and how to name them."""
    names: list[str] = []
    for platform in platforms():
        names += [
            f'"{device.platform}:{index}" ({device.device_kind})'
            if device.device_kind != device.platform
            else f'"{device.platform}:{index}"'
            for index, device in enumerate(local_devices(platform))
        ]
    return f'this process has {", ".join(names)}; "auto" takes the best one'


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """A mesh of the devices of this process. A module can define a mesh: its devices are looked up at the first use.

    The axes are of type Auto. A node is plain JAX code for one item, which does not refer to the mesh. So the compiler
    chooses the shardings inside of the node from the `in_specs` and `out_specs` at its border. With Explicit axes, each
    product in the node would have to name the sharding of its result; for such axes, pass a mesh of `jax.make_mesh`.

    Args:
        shape: how many devices there are along each axis.
        axis_names: a name for each axis, for `jax.sharding.PartitionSpec`.
        device: the name of a platform; "auto" for the accelerators, or for the CPU if there are none.

    Raises:
        ValueError: the shape and the names do not fit together.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    device: str = AUTO
    _whole: "DeviceMesh | None" = None
    _positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Lists are accepted, too: a configuration file has no tuples.
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

    def __repr__(self) -> str:
        mesh = f"DeviceMesh(shape={self.shape!r}, axis_names={self.axis_names!r}, device={self.device!r})"
        if self._whole is None:
            return mesh
        return f"{mesh} at {', '.join(map(str, self._positions))} of {self._whole.shape!r}"

    @property
    def size(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.shape)

    def split(self, axis_name: str) -> "tuple[DeviceMesh, ...]":
        """Cut the mesh into one mesh for each position along an axis: the stages of a pipeline.

        The axis stays, with length 1, so that the same specs fit the whole mesh and its parts.

        Args:
            axis_name: the name of the axis.

        Raises:
            ValueError: the mesh has no such axis.
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
        """Return a mesh of JAX over the first devices of the platform. Equal calls return equal meshes.

        Raises:
            DeviceError: there are too few devices; the message lists them, and says how to simulate more.
            MissingExtraError: JAX is not installed.
        """
        if self._whole is not None:
            return self._part_of(self._whole.resolve())
        devices = devices_of(self.device)
        if len(devices) < self.size:
            raise DeviceError(self._too_large(len(devices), devices[0].platform))
        types = (jax.sharding.AxisType.Auto,) * len(self.shape)
        return jax.make_mesh(  # pyright: ignore[reportUnknownMemberType]
            self.shape, self.axis_names, axis_types=types, devices=devices[: self.size]
        )

    def _part_of(self, mesh: "jax.sharding.Mesh") -> "jax.sharding.Mesh":
        devices: Any = mesh.devices
        part = devices.flatten()[list(self._positions)].reshape(self.shape)
        return jax.sharding.Mesh(part, mesh.axis_names, mesh.axis_types)

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


@overload
def select(device: str | Device = AUTO) -> Device: ...


@overload
def select(device: "DeviceMesh | jax.sharding.Mesh") -> "jax.sharding.Mesh": ...


def select(device: "str | Device | DeviceMesh | jax.sharding.Mesh" = AUTO) -> "Device | jax.sharding.Mesh":
    """Return a device or a mesh.

    The first use of JAX in a process imports JAX and starts its backends. That takes about a second: do not do it on
    the event loop.

    Args:
        device: "auto" for the first accelerator, or for the CPU if there is none; the name of a platform ("cpu", "gpu",
            "cuda", "rocm", "tpu") for its first device; a name with a number ("gpu:1") for one of the devices of this
            process on that platform, counted from 0; a `jax.Device` or a `jax.sharding.Mesh`, which is returned as it
            is; or a `DeviceMesh`, whose mesh is returned.

    Returns:
        A `jax.Device`, or a `jax.sharding.Mesh`.

    Raises:
        DeviceError: this process has no such device; the message lists the devices that it has.
        TypeError: `device` is of another type.
        MissingExtraError: JAX is not installed.
    """
    if isinstance(device, DeviceMesh):
        return device.resolve()
    if isinstance(device, str):
        return _named(device)
    if is_selectable(device):
        return device
    raise TypeError(f"select({device!r}): the name of a device, a jax.Device, a jax.sharding.Mesh or a DeviceMesh")


def is_selectable(device: object) -> bool:
    """Whether a value is of a type that `select` accepts; the device itself may not exist."""
    if isinstance(device, str | DeviceMesh):
        return True
    require_jax()
    return is_device(device) or isinstance(device, jax.sharding.Mesh)


def following(device: Device, count: int) -> list[Device]:
    """Return `count` devices of a platform, beginning with `device`.

    Raises:
        DeviceError: there are too few devices; the message lists them.
    """
    if count == 1:
        return [device]
    devices = devices_of(device.platform)
    start = devices.index(device) if device in devices else len(devices)
    if start + count > len(devices):
        raise DeviceError(
            f"replicas={count} needs {count} devices from {device.platform}:{device.id} on, and there "
            f"{'is 1' if len(devices) - start == 1 else f'are {len(devices) - start}'}: {available()}"
        )
    return devices[start : start + count]


def _named(name: str) -> Device:
    start_backends()
    platform, colon, number = name.partition(":")
    try:
        found = devices_of(platform)
    except DeviceError:
        found = []
    if not colon and found:
        return found[0]
    if number.isdecimal() and int(number) < len(found):
        return found[int(number)]
    raise DeviceError(f"there is no device {name!r}; {available()}")
