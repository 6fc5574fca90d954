"""Whole arrays: `node.vmap(...)` maps a device node over the rows of arrays, at once or in chunks of one program."""

import functools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jax.sharding import PartitionSpec

from .._machine import aligned
from ..actors.accepted import check, optional, whole
from ..engine.tracing.annotations import signature_of
from ..engine.tracing.template import SCALARS, Constant, Read, Template, reads
from .arguments import Arguments
from .device_batch import PackedBatch
from .dispatch import Job, SingleJob
from .executor import DeviceExecutor, Samples
from .parameter_checks import DeviceOptions
from .programs import is_random_key
from .shardings import mesh_axes
from .untyped_jax import jax

if TYPE_CHECKING:
    from ..engine.node import CallSite
    from ..engine.pools import Pools
    from ..engine.program import Pass
    from .programs import Executable

# How many chunks are enqueued before the rows of the first one are copied: one computes, one is copied, one is ready.
_AHEAD: Final = 3


def vmapped(name: str, executor: DeviceExecutor, in_axes: Any, out_axes: Any, batch_size: int | None) -> DeviceExecutor:
    """Return the executor that maps the function of a node over the rows of whole arrays; see `DeviceNode.vmap`."""
    where = f"{name}.vmap("
    check("batch_size", batch_size, optional(whole(1)), where)
    if isinstance(executor.options.batch, PackedBatch):
        raise TypeError(f"{where}...): node {name!r} is written for rows of several items, not for one item")
    arguments = executor.arguments(frozenset())
    rows = RowAxes(executor.fn, arguments, in_axes, out_axes, where)
    name, options = f"{name}.vmap", executor.options
    axis_names = mesh_axes(options.device) or {}
    plain = replace(
        options, batch=None, shared=(), sample_input=(), in_specs=None, out_specs=None, donate=False
    )  # fmt: skip
    if batch_size is None and not axis_names:
        return DeviceExecutor(name, rows.mapped, replace(plain, donate=options.donate), executor._passes)
    specs = rows.specs(tuple(axis_names), executor) if axis_names else None
    plain = replace(plain, in_specs=specs, sample_input=options.sample_input if batch_size else ())
    return ChunkedExecutor(name, rows, plain, executor._passes, batch_size, math.prod(axis_names.values()))


class RowAxes:
    """The axes along which arguments and result have rows.

    Args:
        fn: the function for one row.
        arguments: the parameters of the function.
        in_axes: the axes of the arguments, as `jax.vmap` takes them.
        out_axes: the axes of the result, as `jax.vmap` takes them.
        where: the beginning of an error message.

    Attributes:
        fn: the function for one row.
        mapped: the function for whole arrays.
        in_axes: the axes of each argument, in the order of the parameters.

    Raises:
        TypeError: there are more axes than parameters, or no argument has an axis.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, in_axes: Any, out_axes: Any, where: str) -> None:
        self.fn = fn
        names = arguments.names
        given: list[Any]
        self._is_one = not isinstance(in_axes, tuple | list)
        if isinstance(in_axes, tuple | list):
            given = [*in_axes]
            if len(given) > len(names):
                raise TypeError(
                    f"{where}in_axes={in_axes!r}): the node has {len(names)} parameters: {', '.join(names)}"
                )
            given += [None] * (len(names) - len(given))
        else:
            given = [None if position in arguments.static else in_axes for position in range(len(names))]
        self.in_axes = given
        self._out_axes = out_axes
        self._arguments = arguments
        self._where = where
        found = signature_of(fn).parameters
        self._has_default = [found[name].default is not Parameter.empty for name in names]

        @functools.wraps(fn, updated=())
        def mapped(*args: Any, **kwargs: Any) -> Any:
            values = arguments.bind(args, kwargs)
            axes = self._axes_of(values)
            static = dict.fromkeys(arguments.static)
            others = [position for position in range(len(values)) if position not in static]

            def one(*row: Any) -> Any:
                merged = list(values)
                for position, value in zip(others, row, strict=True):
                    merged[position] = value
                return arguments.call(fn, tuple(merged))

            self._rows_of(values)
            in_axes = tuple(axes[position] for position in others)
            return jax.vmap(one, in_axes, out_axes)(*[values[position] for position in others])

        self.mapped = mapped

    def joins(self, position: int, template: Template, before: "RowAxes | None") -> bool:
        """Whether one program can take the chunks of an argument together with those of other nodes.

        Args:
            position: the position of the argument's parameter.
            template: the template of the argument.
            before: the axes of the member that gives the argument chunk by chunk; None if it comes from outside.
        """
        axes, is_number = self.in_axes[position], isinstance(template, Constant) and type(template.value) in SCALARS
        if before is not None:
            return type(axes) is int and axes == before._out_axes and template == Read(next(reads(template)).source)
        # One axis for all arguments does not count for a default that is a number, which only its call site shows.
        return axes is None or is_number is (self._is_one and self._has_default[position])

    def joined(self, fn: Callable[..., Any], arguments: Arguments, in_axes: Sequence[Any], where: str) -> "RowAxes":
        """Return the axes of a function that ends with this one."""
        return RowAxes(fn, arguments, tuple(in_axes), self._out_axes, where)

    def _axes_of(self, values: tuple[Any, ...]) -> list[Any]:
        """Return the axes of each argument. One axis for all arguments does not apply to a default that is a number."""
        if not self._is_one:
            return self.in_axes
        return [
            None if has_default and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(value)) else axes
            for value, axes, has_default in zip(values, self.in_axes, self._has_default, strict=True)
        ]  # fmt: skip

    def specs(self, names: tuple[str, ...], executor: DeviceExecutor) -> tuple[Any, ...]:
        """Return the specs of the arguments on a mesh: rows over all devices, other arguments as the node says."""

        def spec(axis: Any) -> Any:
            if axis is None or axis < 0:
                return None
            parts: Any = PartitionSpec
            return parts(*[None] * axis, names)

        return tuple(
            executor.specs.of(self._arguments.names[position])
            if axes is None or (self._is_one and self._has_default[position])
            else _map_axes(spec, axes)
            for position, axes in enumerate(self.in_axes)
        )

    def split(self, values: tuple[Any, ...], size: Callable[[int], int]) -> "_Chunks":
        """Return the chunks of arguments.

        Args:
            values: one argument for each parameter.
            size: returns the number of rows of a chunk, given the number of rows of the arguments.

        Raises:
            ValueError: the arguments have different numbers of rows.
        """
        columns: list[Any] = [None] * len(values)
        count = 0
        for position, (tree, found) in self._rows_of(values).items():
            arrays = [leaf if is_random_key(leaf) else np.asarray(leaf) for leaf, _ in found]
            axes = [None if axis is None else axis % array.ndim for array, (_, axis) in zip(arrays, found, strict=True)]
            count = next((array.shape[at] for array, at in zip(arrays, axes, strict=True) if at is not None), count)
            columns[position] = tree, list(zip(arrays, axes, strict=True))
        return _Chunks(values, columns, count, size(count))

    def _rows_of(self, values: tuple[Any, ...]) -> dict[int, tuple[Any, list[tuple[Any, Any]]]]:
        """Return, by position, the structure of each argument that has rows, and its arrays with their axes.

        Raises:
            ValueError: the arguments have different numbers of rows, or lack an axis of `in_axes`.
        """
        found: dict[int, tuple[Any, list[tuple[Any, Any]]]] = {}
        lengths: dict[str, int] = {}
        for position, axes in enumerate(self._axes_of(values)):
            if axes is None or position in self._arguments.static:
                continue
            name = self._arguments.names[position]
            leaves, tree = jax.tree.flatten(values[position])
            found[position] = tree, list(zip(leaves, _broadcast(axes, values[position]), strict=True))
            for leaf, axis in found[position][1]:
                shape = np.shape(leaf)
                if axis is None:
                    continue
                if not -len(shape) <= axis < len(shape):
                    raise ValueError(
                        f"{self._where}in_axes=...): {name!r} has no axis {axis}: its shape is {shape}; "
                        f"to give all of it to each row, write None for {name!r} in in_axes="
                    )
                lengths[f"{name} {shape} along axis {axis}"] = shape[axis]
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"{self._where}...): the arguments have different numbers of rows: {', '.join(lengths) or 'none'}; "
                "give all arguments the same number of rows, or write None in in_axes= for an argument that each row "
                "takes whole"
            )
        return found

    def of_item(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of one row, given those of an item."""

        def row(axis: Any, leaf: Any) -> Any:
            return leaf if axis is None else np.expand_dims(leaf, axis)

        found: list[Any] = []
        for value, axes in zip(values, self._axes_of(values), strict=True):
            leaves, tree = jax.tree.flatten(value)
            found.append(value if axes is None else tree.unflatten(map(row, _broadcast(axes, value), leaves)))
        return tuple(found)

    def out_axes(self, result: Any) -> list[Any]:
        """Return the axis of the rows for each array of a result."""
        return _broadcast(self._out_axes, result)


def _map_axes(fn: Callable[..., Any], axes: Any, *rest: Any) -> Any:
    """Map a function over a pytree of axes, in which None counts as an axis. JAX would take None for an empty tree."""
    return jax.tree.map(fn, axes, *rest, is_leaf=_is_none)


def _is_none(value: object) -> bool:
    return value is None


def _broadcast(axes: Any, value: Any) -> list[Any]:
    """Return the axis of each leaf of a value, from a prefix of its structure."""
    found: list[Any] = []

    def repeat(axis: Any, part: Any) -> None:
        leaves: list[Any] = jax.tree.leaves(part)
        found.extend([axis] * len(leaves))

    _map_axes(repeat, axes, value)
    return found


@dataclass(frozen=True)
class _Chunks:
    """Whole arrays, and how they are cut into chunks.

    Attributes:
        values: one argument for each parameter.
        columns: for each parameter the structure of its argument, and its arrays with the axis of their rows; None for
            an argument that has no rows.
        count: how many rows there are.
        size: how many rows a chunk has; the last chunk is padded to this size.
    """

    values: tuple[Any, ...]
    columns: list[Any]
    count: int
    size: int

    def __iter__(self) -> Generator[tuple[int, tuple[Any, ...]]]:
        """Yield the number of real rows and the arguments of each chunk; there is at least one chunk."""
        for start in range(0, max(1, self.count), self.size):
            real = min(self.size, self.count - start)
            yield real, self._chunk(start, real)

    def _chunk(self, start: int, real: int) -> tuple[Any, ...]:
        args = list(self.values)
        for position, column in enumerate(self.columns):
            if column is not None:
                tree, leaves = column
                args[position] = tree.unflatten([self._rows(leaf, axis, start, real) for leaf, axis in leaves])
        return tuple(args)

    def _rows(self, array: Any, axis: int | None, start: int, real: int) -> Any:
        if axis is None:
            return array
        before = (slice(None),) * axis
        if real == self.size:
            return array[(*before, slice(start, start + real))]
        shape = (*array.shape[:axis], self.size, *array.shape[axis + 1 :])
        if not real:
            return np.zeros(shape, array.dtype)
        # Pad with copies of the last row: rows of zeros could give NaNs, which `jax_debug_nans` would report.
        rows = np.minimum(np.arange(start, start + self.size), self.count - 1)
        if is_random_key(array):
            return array[(*before, rows)]
        return np.take(array, rows, axis, aligned(shape, array.dtype), "clip")


class _Whole:
    """Gathers the results of chunks into whole arrays."""

    def __init__(self, rows: RowAxes, count: int) -> None:
        self._rows = rows
        self._count = count
        self._filled = 0
        self._tree: Any = None
        self._axes: list[Any] = []
        self._arrays: list[Any] = []

    def add(self, given: Any, real: int) -> None:
        """Add the rows of a chunk. Blocks until the rows are computed."""
        leaves, self._tree = jax.tree.flatten(given)
        if not self._arrays:
            self._axes = self._rows.out_axes(given)
        for index, (leaf, axis) in enumerate(zip(leaves, self._axes, strict=True)):
            is_first, is_key = index == len(self._arrays), is_random_key(leaf)
            array: Any = leaf if is_key else np.asarray(leaf)
            if axis is not None:
                axis %= array.ndim
                before = (slice(None),) * axis
                array = array if real == array.shape[axis] else array[(*before, slice(real))]
                if not is_key:
                    if is_first:
                        shape = (*array.shape[:axis], self._count, *array.shape[axis + 1 :])
                        self._arrays.append(np.empty(shape, array.dtype))
                    self._arrays[index][(*before, slice(self._filled, self._filled + real))] = array
                    continue
                if not is_first:
                    self._arrays[index] = jax.numpy.concatenate([self._arrays[index], array], axis=axis)
            if is_first:
                self._arrays.append(array)
        self._filled += real

    def result(self) -> Any:
        """Return the whole arrays, in the structure of the result."""
        return self._tree.unflatten(self._arrays)


class ChunkedExecutor(DeviceExecutor):
    """Runs the chunks of whole arrays, all with one program.

    Args:
        name: name of the node.
        rows: the axes of the rows.
        options: the options of the node.
        passes: the planning passes of device nodes.
        batch_size: how many rows a chunk has; None for all rows.
        parts: over how many devices the rows are split.
        samples, members: see `DeviceExecutor`; for a region.

    Attributes:
        rows: the axes of the rows.
        batch_size: how many rows a chunk has; None for all rows.
    """

    runs_many_programs = True

    def __init__(
        self,
        name: str,
        rows: RowAxes,
        options: DeviceOptions,
        passes: "tuple[Pass, ...]",
        batch_size: int | None,
        parts: int = 1,
        samples: Samples | None = None,
        members: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, rows.mapped, options, passes, samples, members)
        self.rows = rows
        self.batch_size = batch_size
        self._parts = parts
        self.job = functools.partial(_ChunkedJob, self)

    @property
    def is_split(self) -> bool:
        """Whether the rows of a chunk are split over several devices."""
        return self._parts > 1 or self.batch_size is None

    def chunk_size(self, count: int) -> int:
        """Return how many rows a chunk has: a multiple of the devices that they are split over."""
        wanted = max(1, count) if self.batch_size is None else self.batch_size
        return -(-wanted // self._parts) * self._parts

    @property
    def _place(self) -> str:
        """The device and the size of a chunk, for drawings."""
        size = "" if self.batch_size is None else f", {self.batch_size} rows at a time"
        return f"{self.options.device}{size}"

    async def _warm_up(
        self, site: "CallSite", pools: "Pools", device_strategy: str, resources: Mapping[str, Any]
    ) -> None:
        """Compile the program of a chunk, if the node has a sample of an item and a size of chunks."""
        if self.samples(resources):
            await super()._warm_up(site, pools, device_strategy, resources)

    def variants(self, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the arguments of the programs that calls need, given the arguments of one item."""
        return [next(iter(self.rows.split(self.rows.of_item(values), self.chunk_size)))[1]]


class _ChunkedJob(SingleJob):
    """Runs the chunks of one call, one after the other."""

    def __init__(self, executor: ChunkedExecutor, *args: Any) -> None:
        super().__init__(*args)
        self._executor = executor
        self._returns_pending = False  # the result is an array of the host, complete when all chunks are computed
        self._rest: Iterator[tuple[int, tuple[Any, ...]]] | None = None
        self._real = 0
        self._ahead: deque[tuple[Any, int]] = deque()
        self._whole: _Whole | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the first chunk."""
        chunks = self._executor.rows.split(super().arguments(), self._executor.chunk_size)
        self._whole = _Whole(self._executor.rows, chunks.count)
        self._rest = rest = iter(chunks)
        first: tuple[Any, ...]
        self._real, first = next(rest)
        return first

    def _enqueue(self, executable: "Executable", args: tuple[Any, ...]) -> Any:
        given, rest, whole = super()._enqueue(executable, args), self._rest, self._whole
        assert rest is not None
        assert whole is not None
        self._ahead.append((given, self._real))
        for real, chunk in rest:
            if not self._is_wanted():  # the caller has left, and no code reads the result
                break
            given = executable(*chunk)
            self._ahead.append((given, real))
            if len(self._ahead) > _AHEAD:
                whole.add(*self._ahead.popleft())
        self._rest = None
        return given

    ready = Job.ready  # the short `ready` of a `SingleJob` gives what the program returned: here, the last chunk

    def results_of(self, given: Any) -> list[Any]:
        """Return the whole arrays."""
        whole, self._whole = self._whole, None
        assert whole is not None
        while self._ahead:
            whole.add(*self._ahead.popleft())
        return [whole.result()]
