"""The devices of this process, and what to call them."""

from typing import Final

from ..._errors import DeviceError
from ..jax_import import start_backends
from ..jax_types import Device, local_devices, platforms

AUTO: Final = "auto"


def devices_of(platform: str) -> list[Device]:
    """Return the devices of a platform that belong to this process.

    Args:
        platform: its name, or "auto" for that of the accelerators, or of the CPU where there are none.

    Raises:
        DeviceError: there is no such platform; the message lists those that there are.
    """
    start_backends()
    if platform == AUTO:
        return local_devices()
    try:
        # JAX takes an empty name for none.
        found = local_devices(platform.lower()) if platform else []
    except RuntimeError:  # what JAX says of a platform that it does not know is less than what follows
        found = []
    if not found:
        raise DeviceError(f"there is no platform {platform!r}; {available()}")
    return found


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
