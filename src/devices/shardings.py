"""Placements (one device or a mesh), and how arrays are split over a mesh."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .jax_import import Device
from .selection import DeviceMesh
from .untyped_jax import jax


@dataclass(frozen=True, slots=True)
class Placement:
    """One device, or a mesh. Two placements are equal if the same programs can run there.

    Attributes:
        devices: the devices, in the order of the mesh.
        name: "cpu:0", or "mesh(data=4, model=2)".
        mesh: the mesh; None for a single device.
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
        """Return the sharding of an array here: whole on the device, or split over the mesh by `spec`.

        Args:
            spec: for each axis of the array, the axes of the mesh; None is a copy on every device.

        Raises:
            ValueError: `spec` splits an array, and the placement is a single device.
        """
        if self.mesh is not None:
            return NamedSharding(self.mesh, REPLICATED if spec is None else spec)
        if spec is not None and any(part is not None for part in cast("Any", spec)):
            raise ValueError(f"{spec} splits an array over a mesh, and {self.name} is one device: give device= a mesh")
        return SingleDeviceSharding(cast("Any", self.devices[0]))

    def shardings(
        self, specs: Any, value: Any, name: str = "the array", shape_of: Callable[[Any], tuple[int, ...]] = np.shape
    ) -> list[Sharding]:
        """Return the sharding of each leaf of `value`. A class of the user might refuse to hold shardings.

        Args:
            specs: a prefix of the structure of `value`, or `LeafSpecs`.
            value: a pytree of arrays, or of objects with a shape.
            name: the name of `value` in an error.
            shape_of: returns the shape that is split, given a leaf.

        Raises:
            ValueError: `specs` is not a prefix of the structure, or splits an axis into parts of different sizes.
        """
        if isinstance(specs, LeafSpecs):
            return [self.sharding(spec) for spec in specs]
        shardings: list[Sharding] = []
        prefixes, tree = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)
        for (path, spec), part in zip(prefixes, tree.flatten_up_to(value), strict=True):
            leaves, _ = jax.tree_util.tree_flatten_with_path(part)
            if self.mesh is not None and spec is not None:
                for inner, leaf in leaves:
                    place = name + jax.tree_util.keystr((*path, *inner))
                    _check_parts(shape_of(leaf), spec, dict(self.mesh.shape), place)
            shardings += [self.sharding(spec)] * len(leaves)
        return shardings

    def __str__(self) -> str:
        return self.name


class LeafSpecs(tuple[PartitionSpec | None, ...]):
    """One spec for each leaf of a value whose arrays are split already."""

    __slots__ = ()


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
    """Return a spec as it is written in code."""
    return f"P({', '.join(map(repr, cast('Any', spec)))})"


def sharding_text(sharding: Sharding) -> str:
    """Return the place of an array as text: "cpu:0", or "mesh(data=4) P('data', None)"."""
    if isinstance(sharding, NamedSharding) and len(devices_of(sharding)) > 1:
        return f"{mesh_name(cast('Mesh', sharding.mesh))} {spec_text(sharding.spec)}"
    devices = sorted(devices_of(sharding), key=lambda device: (device.platform, device.id))
    return ", ".join([f"{device.platform}:{device.id}" for device in devices])


def devices_of(sharding: Sharding) -> set[Device]:
    """Return the devices that hold a part of an array with this sharding."""
    return cast("set[Device]", cast("Any", sharding).device_set)


def parts_of(entry: Any, axes: Mapping[str, int]) -> int:
    """Return into how many parts an entry of a spec splits an axis: 1 for None, else the devices along its axes."""
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
                f"them over {parts} devices, {entry!r} of the mesh: {size} is no multiple of {parts}. Pad the axis to "
                f"{padded} if the function can tell padding from elements, or put None in the place of {entry!r}"
            )


def _is_spec(node: object) -> bool:
    return node is None or isinstance(node, PartitionSpec)


class Specs:
    """The specs of one node. Each is a `PartitionSpec` or a prefix pytree of these; None is a copy on every device.

    Args:
        node: name of the node, for errors.
        device: the device or mesh that runs the node.
        names: the parameters of the node.
        in_specs: one spec for each parameter, in a tuple or by name; or one spec for all parameters.
        out_specs: the specs of the result.

    Raises:
        TypeError: the specs do not fit the parameters or the mesh.
    """

    def __init__(self, node: str, device: Any, names: tuple[str, ...], in_specs: Any, out_specs: Any) -> None:
        self._node = node
        self._axes = mesh_axes(device)
        self._meshes: list[Mesh] = []
        if self._axes is None and (in_specs is not None or out_specs is not None):
            raise TypeError(
                f"device node {node!r} has in_specs= or out_specs=, which split arrays over a mesh, and "
                f"device={device!r} is one device: pass a DeviceMesh as device=, or leave the specs out"
            )
        self._by_name = {name: self._specs(spec, name) for name, spec in self._named(names, in_specs).items()}
        self.result = self._specs(out_specs, "the result")

    def of(self, name: str) -> Any:
        """Return the specs of a parameter."""
        return self._by_name.get(name)

    def of_mask(self, name: str) -> PartitionSpec | None:
        """Return the spec of a parameter's mask: its rows are split as the rows of the parameter."""
        leaves: list[Any] = jax.tree.leaves(self.of(name), is_leaf=_is_spec)
        first = next((entry for spec in leaves for entry in _entries(spec)[:1]), None)
        return None if first is None else cast("Any", PartitionSpec)(first)

    def row_multiple(self, stacked: Iterable[str]) -> int:
        """Return the number that must divide the rows of a batch, so that the rows can be split over the mesh.

        Args:
            stacked: the parameters that have a row for each item.
        """
        trees = [*(self.of(name) for name in stacked), self.result]
        leaves: list[Any] = jax.tree.leaves(trees, is_leaf=_is_spec)
        return math.lcm(*(parts_of(entry, self._axes or {}) for spec in leaves for entry in _entries(spec)[:1]))

    def check(self, placement: Placement) -> None:
        """Refuse shardings over other devices than those of the node.

        Raises:
            TypeError: a spec is a `NamedSharding` over another mesh.
        """
        for mesh in self._meshes:
            if mesh != placement.mesh:
                raise TypeError(
                    f"device node {self._node!r} runs on {placement}, and its specs have a NamedSharding over "
                    f"{Placement.of_mesh(mesh)}: give device= that mesh, or a PartitionSpec"
                )

    def _named(self, names: tuple[str, ...], in_specs: Any) -> dict[str, Any]:
        what = f"device node {self._node!r}: in_specs="
        if in_specs is None:
            return {}
        if isinstance(in_specs, Mapping):
            by_name = dict(cast("Mapping[str, Any]", in_specs))
            for name in by_name:
                if name not in names:
                    raise TypeError(f"{what} has {name!r}, which is no parameter of it; it has {', '.join(names)}")
            return by_name
        if isinstance(in_specs, tuple | list):
            specs = list(cast("Iterable[Any]", in_specs))
            if len(specs) != len(names):
                raise TypeError(
                    f"{what} has {len(specs)} specs, and there are {len(names)} parameters: {', '.join(names)}. Give "
                    "a spec for each, None for a copy on every device; or name the parameters that are split: {'"
                    f"{names[0] if names else 'x'}': P(...)}}"
                )
            return dict(zip(names, specs, strict=True))
        return dict.fromkeys(names, in_specs)

    def _specs(self, specs: Any, what: str) -> Any:
        def checked(spec: Any) -> PartitionSpec | None:
            return self._spec(spec, what)

        return jax.tree.map(checked, specs, is_leaf=_is_spec)

    def _spec(self, spec: Any, what: str) -> PartitionSpec | None:
        place = f"device node {self._node!r}, the spec of {what}"
        if spec is None:
            return None
        if isinstance(spec, NamedSharding):
            if spec.memory_kind != NamedSharding(spec.mesh, spec.spec).memory_kind:
                raise TypeError(f"{place} asks for memory of the kind {spec.memory_kind!r}: use the default kind")
            self._meshes.append(cast("Mesh", spec.mesh))
            spec = spec.spec
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"{place} is {spec!r}: write jax.P(...) with names of axes of the mesh, or None for a copy")
        used: set[str] = set()
        there = self._axes or {}
        for axis in (axis for entry in _entries(spec) for axis in axes_of(entry)):
            if axis not in there:
                raise TypeError(f"{place} is {spec}, and the mesh has no axis {axis!r}; it has {', '.join(there)}")
            if axis in used:
                raise TypeError(f"{place} is {spec}, which splits two axes over {axis!r}: a mesh axis splits one")
            used.add(axis)
        return spec


def mesh_axes(device: Any) -> dict[str, int] | None:
    """Return the axes of a mesh with their sizes; None for a single device."""
    if isinstance(device, DeviceMesh):
        return dict(zip(device.axis_names, device.shape, strict=True))
    return dict(device.shape) if isinstance(device, Mesh) else None


def _entries(spec: PartitionSpec | None) -> list[Any]:
    return [] if spec is None else list(cast("Any", spec))
