"""Parameters: arguments that come from resources. They are placed on a device once, instead of with each call."""

import sys
from collections.abc import Container, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .._errors import DeviceError
from .._machine import aligned_copy
from ..telemetry.profiling import collectors
from ..telemetry.profiling.collectors import Collector
from ..telemetry.profiling.records import DeviceSlice
from .enqueue_order import reshard
from .programs import is_device_array, not_on_device
from .untyped_jax import jax

if TYPE_CHECKING:
    from jax.sharding import Sharding

    from ..telemetry.spans import JobSpan
    from .compiling import JittedFunction
    from .shardings import Placement


class _Placed(NamedTuple):
    value: Any
    specs: Any
    placed: Any


class PlacedParameters:
    """The parameters that programs use on one device or mesh.

    The present value of each parameter stays on the device. After a reload, the old value is released with the last
    call that uses it. Parameters of several nodes that are the same object share one copy on the device.
    """

    def __init__(self) -> None:
        self._present: dict[tuple[JittedFunction, int], _Placed] = {}

    def place(self, user: "tuple[JittedFunction, int]", value: Any, span: "JobSpan | None" = None) -> Any:
        """Return the array of a parameter on the device; its transfer may still be under way. On the dispatch thread.

        Args:
            user: the program and the position of the argument. A value stays on the device while a user has it.
            value: the parameter. Parameters are compared by identity.
            span: the span of the job that needs the parameter.
        """
        present = self._present.get(user)
        if present is None or present.value is not value:
            jitted, position = user
            specs = None if jitted.in_specs is None else jitted.in_specs[position]
            same = (one for one in self._present.values() if one.value is value and one.specs == specs)
            present = next(same, None)
            if present is None:
                with nullcontext() if span is None else span.transfer(_size_bytes(value)):
                    shardings = jitted.shardings(position, value)
                    present = _Placed(value, specs, put_there(value, shardings, jitted.placement, jitted.name))
            self._present[user] = present
        return present.placed


def owned(value: Any) -> Any:
    """Return a pytree with copies of its NumPy arrays: on a CPU, JAX would use the arrays of the user in place."""
    if isinstance(value, np.ndarray):
        return aligned_copy(value)
    leaves, structure = jax.tree.flatten(value)
    if not not_on_device(leaves):
        return value
    return structure.unflatten([aligned_copy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])


EVERYTHING: Final = range(sys.maxsize)  # contains the id of every object


class LoopState(NamedTuple):
    """The state of a loop, in the place of the argument that is donated.

    Attributes:
        value: the state.
        kept: the ids of arrays that another reader may still need.
    """

    value: Any
    kept: Container[int]


def overwritable(args: tuple[Any, ...], donated: tuple[int, ...]) -> tuple[Any, ...]:
    """Return arguments with a `LoopState` replaced by the state. Arrays of the state with other readers are copied.

    XLA refuses a donated array that stands twice in the arguments.
    """
    for at in donated:
        if type(args[at]) is LoopState:
            value, kept = args[at]
            before, behind = args[:at], args[at + 1 :]
            met = set(map(id, jax.tree.leaves((before, behind))))
            leaves, structure = jax.tree.flatten(value)
            for index, leaf in enumerate(leaves):
                if is_device_array(leaf) and (id(leaf) in kept or id(leaf) in met):
                    leaves[index] = jax.device_put(leaf, leaf.sharding, may_alias=False)
                met.add(id(leaf))
            return (*before, structure.unflatten(leaves), *behind)
    return args


def check_same_shapes(old: Any, new: Any) -> None:
    """Check that new parameters have the shapes of the old ones, so that no program has to be compiled anew.

    Raises:
        DeviceError: the structure, a shape or a dtype differs.
    """
    before, structure = jax.tree_util.tree_flatten_with_path(old)
    after, other = jax.tree_util.tree_flatten_with_path(new)
    remedy = "parameters with other shapes belong to another model: deploy that model beside this one"
    if structure != other:
        raise DeviceError(f"the new parameters have the structure {other}, the present ones {structure}; {remedy}")
    for (path, left), (_, right) in zip(before, after, strict=True):
        if _kind(left) != _kind(right):
            place = jax.tree_util.keystr(path) or "the top"
            raise DeviceError(
                f"the new parameters have {_kind(right)} at {place}, the present ones {_kind(left)}; {remedy}"
            )


def _kind(leaf: Any) -> str:
    if isinstance(leaf, str | bytes):
        return f"a {type(leaf).__name__}"  # a static argument
    shaped = jax.eval_shape(lambda: leaf) if not hasattr(leaf, "dtype") else leaf
    return f"{shaped.dtype}{list(shaped.shape)}"


def _size_bytes(value: Any) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(value))


def put_there(value: Any, shardings: "list[Sharding]", placement: "Placement", name: str) -> Any:
    """Return a pytree of arrays on a device or mesh, without waiting until the arrays are there.

    Args:
        value: the pytree; arrays of NumPy in it may be changed afterwards.
        shardings: the sharding of each leaf.
        placement: the device or mesh.
        name: the name of the node or function that needs the arrays, for a profile.
    """
    began = perf_counter()
    leaves, structure = jax.tree.flatten(owned(value))
    placed = structure.unflatten(
        [
            reshard(leaf, sharding) if is_device_array(leaf) else jax.device_put(leaf, sharding)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
    )
    collectors.report(Collector.device_worked, DeviceSlice("to device", placement.name, name, began, perf_counter()))
    return placed


class SameParameters:
    """Maps equal parameters of one argument to the same object, because parameters are compared by identity.

    `f([weights["a"], weights["b"]], x)` makes a new list for each call, and `f(weights[0], x)` a new view of an array.

    Attributes:
        last: the object that stands for the parameters that came last.
    """

    def __init__(self) -> None:
        self.last: Any = None
        self._leaves: list[Any] = []
        self._structure: Any = None

    def of(self, value: Any) -> Any:
        """Return the last object if it holds the same arrays in the same structure as `value`; otherwise `value`."""
        leaves, structure = jax.tree.flatten(value)
        if self._structure is not None and structure == self._structure and all(map(_is_same, leaves, self._leaves)):
            return self.last
        self.last, self._leaves, self._structure = value, leaves, structure
        return value


def with_same(parameters: Sequence[tuple[int, SameParameters]], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments in which parameters equal to the last ones are replaced by the last ones."""
    for position, same in parameters:
        value = values[position]
        if value is not same.last and (known := same.of(value)) is not value:
            values = (*values[:position], known, *values[position + 1 :])
    return values


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not np.ndarray or type(other) is not np.ndarray:
        return False
    if one.base is None or one.base is not other.base or one.dtype != other.dtype:
        return False
    return (one.ctypes.data, one.shape, one.strides) == (other.ctypes.data, other.shape, other.strides)
