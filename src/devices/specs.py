"""Specs: how the arguments and the result of a device node are split over its mesh, checked when it is decorated."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .platform.placement import Placement, axes_of, parts_of
from .platform.selection import DeviceMesh
from .untyped_jax import jax


class Specs:
    """The specs of one node; each is a `PartitionSpec` or a prefix of a pytree of them, and None is a copy everywhere.

    Args:
        node: its name, for errors.
        device: where it runs.
        names: its parameters.
        in_specs: one spec for each parameter, in a tuple or by name; or one for all.
        out_specs: of the result.

    Raises:
        TypeError: they do not fit the parameters or the mesh.
    """

    def __init__(self, node: str, device: Any, names: tuple[str, ...], in_specs: Any, out_specs: Any) -> None:
        self._node = node
        self._axes = _axes(device)
        self._meshes: list[Mesh] = []
        if self._axes is None and (in_specs is not None or out_specs is not None):
            raise TypeError(
                f"device node {node!r} has in_specs= or out_specs=, which split arrays over a mesh, and "
                f"device={device!r} is one device: make it a DeviceMesh, or leave the specs out"
            )
        self._by_name = {name: self._specs(spec, name) for name, spec in self._named(names, in_specs).items()}
        self.result = self._specs(out_specs, "the result")

    def of(self, name: str) -> Any:
        """Return the specs of a parameter."""
        return self._by_name.get(name)

    def of_mask(self, name: str) -> PartitionSpec | None:
        """Return the spec of the mask of a parameter: its rows lie with those of the parameter."""
        leaves: list[Any] = jax.tree.leaves(self.of(name), is_leaf=_is_spec)
        first = next((entry for spec in leaves for entry in _entries(spec)[:1]), None)
        return None if first is None else cast("Any", PartitionSpec)(first)

    def row_multiple(self, stacked: Iterable[str]) -> int:
        """Return what the rows of a batch have to be a multiple of, so that they can be split.

        Args:
            stacked: the parameters that have a row for each item.
        """
        trees = [*(self.of(name) for name in stacked), self.result]
        leaves: list[Any] = jax.tree.leaves(trees, is_leaf=_is_spec)
        return math.lcm(*(parts_of(entry, self._axes or {}) for spec in leaves for entry in _entries(spec)[:1]))

    def check(self, placement: Placement) -> None:
        """Refuse shardings over other devices than those of the node.

        Raises:
            TypeError: there is one.
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
                    "one for each, None for a copy on every device; or name those that are split: {'"
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
                raise TypeError(f"{place} asks for memory of the kind {spec.memory_kind!r}: take the default one")
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


def _axes(device: Any) -> dict[str, int] | None:
    """Return the axes of a mesh with their sizes; None for a single device."""
    if isinstance(device, DeviceMesh):
        return dict(zip(device.axis_names, device.shape, strict=True))
    return dict(device.shape) if isinstance(device, Mesh) else None


def _entries(spec: PartitionSpec | None) -> list[Any]:
    return [] if spec is None else list(cast("Any", spec))


def _is_spec(node: object) -> bool:
    return node is None or isinstance(node, PartitionSpec | NamedSharding)
