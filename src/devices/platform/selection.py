"""Which device: by name, or as the object that JAX has for it."""

from typing import TYPE_CHECKING, overload

from ..._errors import DeviceError
from ..jax_import import require_jax, start_backends
from ..jax_types import Device, is_device
from .device_mesh import DeviceMesh
from .inventory import AUTO, available, devices_of

if TYPE_CHECKING:
    import jax.sharding


@overload
def select(device: str | Device = AUTO) -> Device: ...


@overload
def select(device: "DeviceMesh | jax.sharding.Mesh") -> "jax.sharding.Mesh": ...


def select(device: "str | Device | DeviceMesh | jax.sharding.Mesh" = AUTO) -> "Device | jax.sharding.Mesh":
    """Return the device, or the mesh, that is meant.

    The first use of JAX in a process loads it and starts its backends, which takes a second or so: not for the event
    loop.

    Args:
        device: "auto" for the first accelerator, or the CPU where there is none; the name of a platform ("cpu", "gpu",
            "cuda", "rocm", "tpu") for its first device; with a number ("gpu:1") for one of this process's devices of
            that platform, counted from 0; a `jax.Device` or a `jax.sharding.Mesh`, which are returned as they are; or a
            `DeviceMesh`, which is resolved.

    Raises:
        DeviceError: this process has no such device; the message lists those that it has.
        TypeError: it is something else.
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
    """Return whether something is of a kind that `select` takes; the device may be missing all the same."""
    if isinstance(device, str | DeviceMesh):
        return True
    require_jax()
    import jax.sharding

    return is_device(device) or isinstance(device, jax.sharding.Mesh)


def following(device: Device, count: int) -> list[Device]:
    """Return so many devices of a platform, beginning with this one.

    Raises:
        DeviceError: there are fewer; the message lists them.
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
