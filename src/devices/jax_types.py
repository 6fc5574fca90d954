"""Types of JAX that its own annotations leave unknown: jaxlib carries none, and `jax.Device` comes from there."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import jax


class Device(Protocol):
    """What Penstock uses of a `jax.Device`, which is one of these."""

    @property
    def id(self) -> int:
        """Number of the device, unique in its platform over all processes."""
        ...

    @property
    def platform(self) -> str:
        """Name of its platform: "cpu", "gpu", "tpu"."""
        ...

    @property
    def device_kind(self) -> str:
        """Name of its hardware."""
        ...

    @property
    def process_index(self) -> int:
        """Number of the process that it belongs to; 0 unless `jax.distributed` is in use."""
        ...

    def memory_stats(self) -> dict[str, int] | None:
        """Return what its allocator counts, in bytes; None where it does not."""
        ...


def all_devices(platform: str | None = None) -> list[Device]:
    """Return the devices of a platform, those of other processes included; of the default one without a name.

    Raises:
        RuntimeError: there is no such platform.
    """
    import jax

    return cast("list[Device]", jax.devices(platform))  # pyright: ignore[reportUnknownMemberType]


def put(value: Any, device: Device) -> "jax.Array":
    """Return a value as an array on a device; the transfer may still be under way."""
    import jax

    return cast("jax.Array", jax.device_put(value, device))  # pyright: ignore[reportUnknownMemberType]


def jit(function: "Callable[..., jax.Array]") -> "Callable[..., jax.Array]":
    """Return a function that compiles at its first call."""
    import jax

    return cast("Callable[..., jax.Array]", jax.jit(function))  # pyright: ignore[reportUnknownMemberType]
