"""Resharding: moves an array from one device or mesh to another, without waiting until it is computed.

`jax.device_put` between meshes is right, and waits for the array on the calling thread where the parts do not happen to
be the same (measured with JAX 0.10.1 on CPU; a compiled program does not wait). So the array is first laid out as it
has to be on the devices where it is, by a compiled identity, and then each part is copied to the device that takes it.
"""

from functools import lru_cache
from typing import Any, cast

from jax.sharding import Mesh, NamedSharding, Sharding

from .enqueue_order import ENQUEUE_ORDER, holding
from .placement import REPLICATED, mesh_name, spec_text
from .untyped_jax import jax


def reshard(array: Any, target: Sharding) -> Any:
    """Return an array as it lies in another place; it may be that neither of them is ready.

    Args:
        array: a `jax.Array`.
        target: the sharding to give it.
    """
    source: Any = array.sharding
    with holding(ENQUEUE_ORDER.locks(source.device_set | target.device_set)):
        return _reshard(array, source, target)


def _reshard(array: Any, source: Any, target: Any) -> Any:
    if isinstance(source, NamedSharding) and len(source.device_set) > 1:
        if isinstance(target, NamedSharding) and len(target.device_set) == len(source.device_set):
            # The same parts, on the devices where it is.
            devices: Any = source.mesh.devices
            mesh = Mesh(devices.reshape(target.mesh.devices.shape), target.mesh.axis_names, target.mesh.axis_types)
            array = _laid_out(NamedSharding(mesh, target.spec))(array)
        else:
            whole = _laid_out(NamedSharding(source.mesh, REPLICATED))(array)
            parts: list[Any] = whole.addressable_shards
            array = next((part for part in parts if part.device in target.device_set), parts[0]).data
    return jax.device_put(array, target)


# One program per layout and shape. Sixty-four layouts are more than a process has, and each is small.
@lru_cache(maxsize=64)
def _laid_out(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


def describe(sharding: Any) -> str:
    """Return where an array lies: "cpu:0", or "mesh(data=4) P('data', None)"."""
    if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        return f"{mesh_name(cast('Mesh', sharding.mesh))} {spec_text(sharding.spec)}"
    names = sorted([(device.platform, device.id) for device in sharding.device_set])
    return ", ".join([f"{platform}:{number}" for platform, number in names])
