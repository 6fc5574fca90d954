"""Resharding: moves an array from one device or mesh to another, without waiting until it is computed.

`jax.device_put` between meshes is right, and waits for the array on the calling thread where the parts do not happen to
be the same (measured with JAX 0.10.1 on CPU; a compiled program does not wait). So the array is first laid out as it
has to be on the devices where it is, by a compiled identity, and then each part is copied to the device that takes it.
"""

from functools import lru_cache
from typing import Any, cast

from jax.sharding import Mesh, NamedSharding, Sharding

from ..jax_types import Device
from ..platform.placement import REPLICATED, mesh_name, spec_text
from ..untyped_jax import jax
from ..wrong_fusions import compiler_options
from .enqueue_order import ENQUEUE_ORDER, holding


def reshard(array: Any, target: Sharding) -> Any:
    """Return an array as it lies in another place; it may be that neither of them is ready.

    Args:
        array: a `jax.Array`.
        target: the sharding to give it.
    """
    devices = _devices(array.sharding), _devices(target)
    with holding(ENQUEUE_ORDER.locks(devices[0] | devices[1])):
        if isinstance(array.sharding, NamedSharding) and len(devices[0]) > 1:
            array = _ready_to_copy(array, array.sharding, target)
        return jax.device_put(array, target)


def _ready_to_copy(array: Any, source: NamedSharding, target: Sharding) -> Any:
    """Return an array of a mesh so that each part of what `target` says is a part of it, or it is on one device."""
    there = _devices(target)
    if isinstance(target, NamedSharding) and len(there) == len(_devices(source)):
        mesh, wanted = cast("Mesh", source.mesh), cast("Mesh", target.mesh)
        devices, shape = cast("Any", mesh.devices), cast("Any", wanted.devices).shape
        same_parts = Mesh(devices.reshape(shape), wanted.axis_names, wanted.axis_types)
        return _laid_out(NamedSharding(same_parts, target.spec))(array)
    whole: Any = _laid_out(NamedSharding(source.mesh, REPLICATED))(array)
    copies: list[Any] = whole.addressable_shards
    return next((copy for copy in copies if copy.device in there), copies[0]).data


# One program per layout and shape. Sixty-four layouts are more than a process has, and each is small.
@lru_cache(maxsize=64)
def _laid_out(sharding: NamedSharding) -> Any:
    device = next(iter(_devices(sharding)))
    return jax.jit(_identity, out_shardings=sharding, compiler_options=compiler_options(device.platform))


def _identity(array: Any) -> Any:
    return array


def describe(sharding: Sharding) -> str:
    """Return where an array lies: "cpu:0", or "mesh(data=4) P('data', None)"."""
    if isinstance(sharding, NamedSharding) and len(_devices(sharding)) > 1:
        return f"{mesh_name(cast('Mesh', sharding.mesh))} {spec_text(sharding.spec)}"
    devices = sorted(_devices(sharding), key=lambda device: (device.platform, device.id))
    return ", ".join([f"{device.platform}:{device.id}" for device in devices])


def _devices(sharding: Sharding) -> set[Device]:
    return cast("set[Device]", cast("Any", sharding).device_set)
