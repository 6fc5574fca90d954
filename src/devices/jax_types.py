"""Types of JAX that its own annotations leave unknown: jaxlib carries none, and `jax.Device` comes from there."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

from .wrong_fusions import compiler_options

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


def asked_platforms() -> str | None:
    """Return the platforms that the environment or the configuration asks for; None if it is left to JAX."""
    import jax

    return cast("str | None", getattr(jax.config, "jax_platforms", None)) or None


def put(value: Any, device: Device) -> "jax.Array":
    """Return a value as an array on a device; the transfer may still be under way."""
    import jax

    return cast("jax.Array", jax.device_put(value, device))  # pyright: ignore[reportUnknownMemberType]


def jit(function: "Callable[..., jax.Array]", platform: str) -> "Callable[..., jax.Array]":
    """Return a function that compiles at its first call, as device nodes of that platform do."""
    import jax

    jitted = jax.jit(function, compiler_options=compiler_options(platform))  # pyright: ignore[reportUnknownMemberType]
    return cast("Callable[..., jax.Array]", jitted)


def is_ready(array: Any) -> bool:
    """Return whether a computation has ended, well or not."""
    if not hasattr(array, "is_ready"):  # typed random keys have all methods of an array but this one
        import jax

        array = jax.random.key_data(array)
    return bool(array.is_ready())


def are_ready(arrays: Iterable[Any]) -> bool:
    """Return whether computations have ended, well or not; arrays that were donated meanwhile are somebody else's."""
    for array in arrays:
        try:
            if not is_ready(array):
                return False
        except (RuntimeError, ValueError):
            if not array.is_deleted():
                raise
    return True


def wait_until_ready(arrays: Iterable[Any]) -> None:
    """Block until computations have ended; arrays that were donated meanwhile are somebody else's.

    Raises:
        JaxRuntimeError: one failed.
    """
    for array in arrays:
        try:
            array.block_until_ready()
        except (RuntimeError, ValueError):
            if not array.is_deleted():
                raise


def local_devices(platform: str | None = None) -> list[Device]:
    """Return the devices of a platform that belong to this process; of the default one without a name.

    Raises:
        RuntimeError: there is no such platform.
    """
    import jax

    return cast("list[Device]", jax.local_devices(backend=platform))  # pyright: ignore[reportUnknownMemberType]


def platforms() -> list[str]:
    """Return the names of the platforms that have started, the default one first."""
    import jax.extend.backend

    names = list(jax.extend.backend.backends())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    default: str = local_devices()[0].platform
    return sorted(names, key=lambda name: local_devices(name)[0].platform != default)


def is_device(value: object) -> TypeGuard[Device]:
    """Return whether something is a device of JAX."""
    import jax

    return isinstance(value, jax.Device)  # pyright: ignore[reportUnknownMemberType]
