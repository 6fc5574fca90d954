"""Compiled programs: made, explained, kept in a cache, and called on the thread of their device; and resharding."""

import asyncio
import inspect
import itertools
import re
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from operator import is_
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from opentelemetry.context import Context

from .._errors import DeviceError, EngineClosedError, OptionsError, add_note, copy_of
from ..actors.accepted import check, whole
from ..actors.tasks import until
from ..actors.threads import ThreadOwner
from ..telemetry import logs, metrics, names, spans
from ..telemetry.counters import ProgramMemory
from ..telemetry.metrics import Reading, series
from ..telemetry.profiling import collectors
from ..telemetry.profiling.records import DeviceWork
from .arguments import (
    Configuration,
    Leaf,
    Signature,
    checks,
    current,
    is_device_array,
    signature_of,
    types_of,
)
from .jax_import import Device
from .shardings import REPLICATED, Placement, mesh_name, spec_text
from .statistics import CompileStatistics, Recompilation, Transfer
from .untyped_jax import jax
from .wrong_fusions import compiler_options

# Enqueue order: a program that spans several devices is enqueued on all of them before any other program.
#
# A program with collectives waits on each of its devices for the others. If two of them were enqueued in different
# orders on two devices, they would wait for each other for ever. A program on one device waits for no other device, and
# may overtake.
#
# The devices of a CPU are threads of one pool, with a thread for each core of the machine. A program with collectives
# holds a thread for each of its devices until all of them have arrived, so two such programs could hold some threads
# each and wait for ever: after 40 seconds XLA aborts the process. So on a CPU one of them is in flight at a time,
# whichever devices it uses.

Locks: TypeAlias = tuple[threading.Lock, ...]


class EnqueueOrder:
    """The locks of the devices of this process. Meshes may overlap in any way, and threads may serve any event loop."""

    def __init__(self) -> None:
        # Results of the last program that had to run alone: one of its arrays, and weak references to all of them.
        self._alone: Any = None
        self._given: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, int], threading.Lock] = {}

    def locks(self, devices: "Iterable[Device]") -> Locks:
        """Return the locks to hold while a program is enqueued on these devices; none for a single one."""
        # All threads take them in one order: otherwise two threads could each hold a lock that the other one needs.
        keys = sorted({(device.platform, device.id) for device in devices})
        if len(keys) < 2:
            return ()
        if keys[0][0] == "cpu":
            keys = [("cpu", 0)]
        with self._lock:
            return tuple([self._locks.setdefault(key, threading.Lock()) for key in keys])

    def wait_for_last(self, read: Any = None) -> None:
        """Block until the last program that had to run alone has ended; called while the locks are held.

        Args:
            read: an array that the next program reads. If that is a result of the last program, the device runs the two
                in order, and there is no need to wait here.
        """
        if self._alone is None or (read is not None and any(one() is read for one in self._given)):
            return
        try:
            self._alone.block_until_ready()
        except Exception:  # noqa: BLE001 - it was donated since, or has failed, and its own callers get the error
            pass

    def begun_alone(self, given: Any) -> None:
        """Note the result of a program that has to run alone; called while the locks are held."""
        arrays: list[Any] = jax.tree.leaves(given)
        self._alone = min(arrays, key=_size_bytes, default=None)  # the smallest, as it stays in memory
        self._given = [*map(weakref.ref, arrays)]


def _size_bytes(array: Any) -> int:
    return int(array.nbytes)


@contextmanager
def holding(locks: Locks) -> Generator[None]:
    """Hold locks of `EnqueueOrder.locks`; the thread must not hold others."""
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


# One for the process, as the devices are.
ENQUEUE_ORDER: Final = EnqueueOrder()


_COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|send|recv)(-start)?\(")


def has_collectives(compiled: Any) -> bool:
    """Return whether the devices of a program wait for each other."""
    return _COLLECTIVE.search(compiled.as_text()) is not None


# Resharding: moves an array from one device or mesh to another, without waiting until it is computed.
#
# `jax.device_put` between meshes gives the right values, but the calling thread waits for the array unless its parts
# happen to be the same (measured with JAX 0.10.1 on CPU; a compiled program does not wait). So a compiled identity
# first gives the array the wanted layout on the devices where it is, and then each part is copied to the device that
# takes it.


def reshard(array: Any, target: Sharding) -> Any:
    """Return an array moved to another device or sharding, without waiting until it is computed.

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
    """Return an array of a mesh laid out so that each part of `target` is one of its parts, or whole on one device."""
    there = _devices(target)
    if isinstance(target, NamedSharding) and len(there) == len(_devices(source)):
        mesh, wanted = cast("Mesh", source.mesh), cast("Mesh", target.mesh)
        devices, shape = cast("Any", mesh.devices), cast("Any", wanted.devices).shape
        same_parts = Mesh(devices.reshape(shape), wanted.axis_names, wanted.axis_types)
        return _lay_out(array, NamedSharding(same_parts, target.spec))
    whole: Any = _lay_out(array, NamedSharding(source.mesh, REPLICATED))
    copies: list[Any] = whole.addressable_shards
    return next((copy for copy in copies if copy.device in there), copies[0]).data


def _lay_out(array: Any, sharding: NamedSharding) -> Any:
    if next(iter(_devices(sharding))).platform != "cpu":
        return _laid_out(sharding)(array)
    ENQUEUE_ORDER.wait_for_last(array)
    given = _laid_out(sharding)(array)
    ENQUEUE_ORDER.begun_alone(given)
    return given


# One program per layout and shape. Sixty-four layouts are more than a process has, and each is small.
@lru_cache(maxsize=64)
def _laid_out(sharding: NamedSharding) -> Any:
    device = next(iter(_devices(sharding)))
    return jax.jit(_identity, out_shardings=sharding, compiler_options=compiler_options(device.platform))


def _identity(array: Any) -> Any:
    return array


def describe(sharding: Sharding) -> str:
    """Return the place of an array as text: "cpu:0", or "mesh(data=4) P('data', None)"."""
    if isinstance(sharding, NamedSharding) and len(_devices(sharding)) > 1:
        return f"{mesh_name(cast('Mesh', sharding.mesh))} {spec_text(sharding.spec)}"
    devices = sorted(_devices(sharding), key=lambda device: (device.platform, device.id))
    return ", ".join([f"{device.platform}:{device.id}" for device in devices])


def _devices(sharding: Sharding) -> set[Device]:
    return cast("set[Device]", cast("Any", sharding).device_set)


class UnlikeBeforeError(Exception):
    """The arguments of a call are unlike those of all calls that were looked at; nothing has run."""


class _Gate:
    """Stands before a program where JAX's C++ code calls Python: for arguments that are unlike all that it has seen.

    That code keeps structure, shapes, dtypes and shardings of the arguments of each call, and the configuration that it
    was made under, and compares them in a microsecond. So a call that does not come here is like one that was looked at
    (`CompileCache.find`, `Executable.enqueue`), which takes ten times as long, and needs not be looked at again.

    Attributes:
        is_open: whether this call was looked at.
        was_passed: whether a call has come here since it was set to False.
    """

    __slots__ = ("_program", "is_open", "was_passed")

    def __init__(self, program: Any) -> None:
        self._program = program
        self.is_open = False
        self.was_passed = False

    def call(self, *args: Any) -> Any:
        """Run the program; JAX calls this."""
        if not self.is_open:
            raise UnlikeBeforeError
        self.was_passed = True
        return self._program.call(*args)


def _in_python(compiled: Any, params: Any) -> Callable[..., Any]:
    """Return what calls a program without JAX's C++ code."""

    def call(*args: Any) -> Any:
        result, *_ = compiled.call(params, *args)
        return result

    return call


def _gated(compiled: Any) -> tuple[Any, _Gate | None]:
    """Return what calls a program by way of a gate, and the gate; None for the gate where JAX cannot do that."""
    try:
        params = compiled._params
        if jax.config.jax_debug_nans or jax.config.jax_debug_infs:  # C++ would look at the first result only
            return _in_python(compiled, params), None
        gate = _Gate(params.executable)
        call = compiled._executable.create_cpp_call(params._replace(executable=gate))
    except (AttributeError, TypeError, ValueError):  # these names of JAX are private
        call = gate = None
    return (compiled, None) if call is None else (call, gate)


# Calls in a row that go to one program before the next one is tried without a look; and the most, after calls that had
# to be looked at after all, which takes half as long again.
_FIRST_PATIENCE: Final = 2
_LAST_PATIENCE: Final = 1024


class Executable:
    """A compiled program for one signature; made by `CompileCache`, called on one device's thread.

    Attributes:
        is_usual: whether the next call is likely to be like those that were looked at.
        hits: how often it was found in the cache.
        is_held: whether the cache holds it.
        transfers: how often an argument was moved for a call, by its name and its shardings before and after.
        used: when it was found last, as a number that grows with each use of the cache.
    """

    __slots__ = (
        "__weakref__", "_alike", "_call", "_compiled", "_gate", "_is_alone", "_is_flat", "_locks", "_names",
        "_patience", "_shardings", "_static_argnums", "_usual", "hits", "is_held", "is_usual", "transfers", "used",
    )  # fmt: skip

    def __init__(
        self,
        compiled: Any,
        names: tuple[str, ...],
        shardings: tuple[Any, ...],
        static_argnums: tuple[int, ...],
        is_flat: bool,
        locks: Locks,
        *,
        is_alone: bool,
    ) -> None:
        """Wrap a program that XLA has compiled.

        Args:
            compiled: JAX's compiled object; its configuration is entered.
            names: the name of each leaf of the arguments.
            shardings: the sharding that each of them needs.
            static_argnums: positions of the arguments whose values are compiled in.
            is_flat: whether each of the others is an array, and none a pytree.
            locks: the locks to hold while it is enqueued.
            is_alone: whether it has to run alone: it begins when no other such program is in flight.
        """
        self._compiled = compiled
        self._call, self._gate = _gated(compiled)
        self._alike = -1  # calls in a row that JAX's C++ code knew already; -1 before the first call
        self._patience = _FIRST_PATIENCE
        self.is_usual = False
        self._is_flat = is_flat
        self._is_alone = is_alone
        self._locks = locks
        self._names = names
        self._shardings = shardings
        self._static_argnums = static_argnums
        self._usual: list[Any] = list(shardings)  # as the arrays of the last call spelled them; None for one of NumPy
        self.is_held = False
        self.hits = 0
        self.transfers: Counter[tuple[str, Any, Any]] = Counter()
        self.used = 0

    def __call__(self, *args: Any) -> Any:
        """Enqueue a call with these arguments; see `enqueue`."""
        return self.enqueue(args)

    def enqueue(self, args: tuple[Any, ...], leaves: Sequence[Any] | None = None) -> Any:
        """Enqueue a call, and return before it is computed.

        Arguments of NumPy and Python go to the device with the call. A `jax.Array` on another device is moved.

        Args:
            args: all arguments, static ones included, with the signature that this was found for.
            leaves: the leaves of these arguments, if the caller knows them.

        Returns:
            The function's result, of arrays that may not be ready yet.
        """
        if self._static_argnums:
            args = tuple([arg for position, arg in enumerate(args) if position not in self._static_argnums])
            leaves = None
        known: Sequence[Any] = args if self._is_flat else jax.tree.leaves(args) if leaves is None else leaves
        where = [getattr(leaf, "sharding", None) for leaf in known]
        if not all(map(is_, where, self._usual)):  # comparing takes microseconds, and they are nearly always the same
            moved = self._moved(args)
            if moved is args:
                self._usual = where
            args = moved
        gate = self._gate
        if gate is None:
            return self.call(args)
        gate.is_open, gate.was_passed = True, False
        try:
            given = self.call(args)
        finally:
            gate.is_open = False
        if not gate.was_passed:
            if self._alike < 0:  # a first call is new to JAX: the gate is not where it should be
                self._call, self._gate = self._compiled, None
                return given
            self._alike += 1
            self.is_usual = self._alike >= self._patience
        elif self._alike < 0:
            self._alike = 0
        return given

    def enqueue_usual(self, args: tuple[Any, ...]) -> Any:
        """Enqueue a call whose arguments nothing has looked at, if it is like one that was.

        Raises:
            UnlikeBeforeError: it is not; `enqueue` it, or call another program.
        """
        try:
            return self.call(args)
        except (UnlikeBeforeError, TypeError) as error:  # of another structure, which JAX refuses before
            self._patience = min(2 * self._patience, _LAST_PATIENCE)
            self.not_usual()
            raise UnlikeBeforeError from error

    def not_usual(self) -> None:
        """Note that a call has gone to another program."""
        self._alike, self.is_usual = min(self._alike, 0), False

    def call(self, args: tuple[Any, ...]) -> Any:
        """Enqueue a call whose arguments are where they belong."""
        if not self._locks:
            return self._call(*args)
        with holding(self._locks):
            if not self._is_alone:
                return self._call(*args)
            ENQUEUE_ORDER.wait_for_last()
            given = self._call(*args)
            ENQUEUE_ORDER.begun_alone(given)
            return given

    def transferred(
        self, args: tuple[Any, ...], around: Callable[[int], AbstractContextManager[None]]
    ) -> tuple[Any, ...]:
        """Transfer the arrays that a call would have to transfer, and return the arguments of the call.

        Args:
            args: the arguments of a call.
            around: makes the context of the transfer from the number of bytes; not called if there is nothing to
                transfer.
        """
        dynamic = [position for position in range(len(args)) if position not in self._static_argnums]
        leaves, tree = jax.tree.flatten([args[position] for position in dynamic])
        away = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, np.ndarray) or (is_device_array(leaf) and not self._lies(index, leaf))
        ]
        if not away:
            return args
        with around(sum(leaves[index].nbytes for index in away)):
            for index in away:
                leaves[index] = self._transferred(index, leaves[index])
        placed = dict(zip(dynamic, jax.tree.unflatten(tree, leaves), strict=True))
        return tuple([placed.get(position, arg) for position, arg in enumerate(args)])

    def _transferred(self, index: int, leaf: Any) -> Any:
        sharding = self._shardings[index]
        if isinstance(leaf, np.ndarray):
            # On a CPU it may be used in place: a caller that does not wait for the result has given a copy (`owned`).
            return jax.device_put(leaf, sharding)
        self.transfers[self._names[index], leaf.sharding, sharding] += 1
        return reshard(leaf, sharding)

    def _moved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Move the arrays that are elsewhere to where they belong, and return the arguments."""
        leaves, tree = jax.tree.flatten(args)
        away = [index for index, leaf in enumerate(leaves) if is_device_array(leaf) and not self._lies(index, leaf)]
        if not away:
            return args
        for index in away:
            leaves[index] = self._transferred(index, leaves[index])
        moved: tuple[Any, ...] = jax.tree.unflatten(tree, leaves)
        return moved

    def _lies(self, index: int, leaf: Any) -> bool:
        """Return whether an array has the sharding that the program needs; it may be spelled differently."""
        where, sharding = leaf.sharding, self._shardings[index]
        return where is self._usual[index] or where == sharding or where.is_equivalent_to(sharding, leaf.ndim)

    @property
    def memory(self) -> Any:
        """The memory that a call takes on each device, in `argument_size_in_bytes` and so on; None if not known."""
        return self._compiled.memory_analysis()

    @property
    def cost(self) -> dict[str, float]:
        """The cost of a call: "flops", "bytes accessed"; empty if XLA does not say it for the backend."""
        analysis: dict[str, float] | None = self._compiled.cost_analysis()
        return analysis or {}


# Powers of two from 1 to 128 are eight sizes: more than that is no longer a handful of sizes, and each has cost a
# compilation (300 random sizes: 183 programs and 12 s without buckets, 9 and 0.6 s with them).
MANY_SHAPES: Final = 8

_SAME_SHAPE: Final = "pass arrays of the same shape"
_REMEDIES: Final = {
    "shape": f"{_SAME_SHAPE}, or of a few; a device node with batch=devices.DeviceBatch(buckets=...), and pad_axes= "
    "for ragged axes, bounds their number; for whole arrays, node.vmap(batch_size=...) does",
    "dtype": "convert the argument to one dtype before the node",
    "weak type": "pass an array with a dtype instead of a Python number, or always the number",
    "structure": "pass the same structure each time; None in the place of an array is another structure",
    "static value": "take the argument out of static=(...) if the function can compute with it as an array",
    "resource": "a batch has a row for each item of what callers pass, and of what a resource gives there is one for "
    "all, which are two programs: let the argument come from a @resource wherever the node is called, or nowhere",
    "constant": "a batch has a row for each item of what callers pass, and an array that is written in the graph is "
    "passed once for all, which are two programs: name the parameter in shared=(...), which passes it once wherever "
    "the node is called; warmup(..., constants={...}) and deploy(warmup=True) compile for an array in the graph",
    "configuration": "set JAX's configuration once, before the first call",
    "function": "define the function once, outside of the loop or method that passes it: each object is compiled",
    "eviction": "the process needs more programs than the cache keeps: bound the shapes of the nodes that have most, "
    "or keep more with devices.set_program_cache(max_programs=...)",
}


_PASSED_ONCE: Final = {
    "resource": "from a resource",
    "constant": "passed once for the whole batch: a constant of the graph",
}


class Compiled:
    """The facts about a program that explanations need; it holds no arrays, and not the function."""

    def __init__(self, jitted: "JittedFunction", configuration: "Configuration", signature: "Signature") -> None:
        # A node has several programs on purpose, one for each placement, or batched and not: those are not compared.
        self.family = (
            jitted.placement,
            jitted.donate_argnums,
            jitted.static_argnums,
            getattr(jitted.fn, "__code__", type(jitted.fn)),
            getattr(inspect.unwrap(jitted.fn), "__code__", None),
        )
        self.serial = jitted.serial
        self.origin = origin_of(jitted.fn)
        self.parameter = jitted.parameter
        self.static_argnums = jitted.static_argnums
        self.configuration = configuration
        self.signature = signature
        self.bucketed = jitted.bucketed
        self.from_resources = jitted.from_resources


def explain(this: Compiled, earlier: list[Compiled], number: int) -> list[Recompilation]:
    """Return the differences between a program and the most similar earlier one; an empty list if it is the first.

    Args:
        this: the program that was compiled.
        earlier: the programs of the node before it, the last one at the end.
        number: number of the program; the first one of the node has 1.
    """
    differences = [_differences(before, this) for before in reversed(earlier) if before.family == this.family]
    if not differences:
        return []
    nearest = min(differences, key=len) or [
        _difference("", "eviction", "compiled before", "dropped, and compiled again")
    ]
    return [Recompilation(number, *one) for one in nearest]


def report(node: str, reason: Recompilation, shapes: int, is_first: Callable[[Hashable], bool]) -> None:
    """Log a recompilation: each cause once, and once more if the number of an argument's shapes seems to have no bound.

    Args:
        node: name of the node.
        reason: the reason; one without a remedy was intended, and is not logged.
        shapes: how many programs the argument's shapes have cost so far.
        is_first: returns whether a cause has not been logged before.
    """
    if not reason.remedy:
        return
    if reason.cause == "shape" and shapes >= MANY_SHAPES and is_first(("many shapes", reason.argument)):
        logs.warning("program.many_shapes", node=node, argument=reason.argument, programs=shapes, remedy=reason.remedy)
    elif is_first((reason.cause, reason.argument)):
        logs.warning(
            "program.recompiled",
            node=node,
            argument=reason.argument,
            cause=reason.cause,
            before=reason.before,
            after=reason.after,
            remedy=reason.remedy,
        )


def described(part: tuple[Any, ...]) -> str:
    """Return one argument's part of a signature as text: `float32[3, 4]`, a tree of those, a static value."""
    if len(part) == 3:
        return _leaf_text(part)
    if isinstance(part[0], type):
        return repr(part[1])
    return str(jax.tree.unflatten(part[0], [_Text(_leaf_text(leaf)) for leaf in part[1]]))


def origin_of(fn: Any) -> str:
    """Return name, file and line of a function."""
    inner = inspect.unwrap(fn)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    code = getattr(inner, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


class _Text(str):
    """Text that shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Difference(NamedTuple):
    argument: str
    cause: str
    before: str
    after: str
    remedy: str


def _difference(argument: str, cause: str, before: str, after: str) -> _Difference:
    return _Difference(argument, cause, before, after, _REMEDIES[cause])


def _differences(before: Compiled, after: Compiled) -> list[_Difference]:
    found: list[_Difference] = []
    shared = [
        position
        for position, (was, is_now) in enumerate(zip(before.bucketed, after.bucketed, strict=False))
        if bool(was) != bool(is_now)
    ]
    for position in shared:
        once = after if before.bucketed[position] else before
        cause = "resource" if position in once.from_resources else "constant"
        texts = ["passed by callers" if one is not once else _PASSED_ONCE[cause] for one in (before, after)]
        found.append(_difference(after.parameter(position), cause, *texts))
    if before.serial != after.serial and not shared:
        found.append(_difference("", "function", before.origin, f"another object with the same code, {after.origin}"))
    if before.configuration is not after.configuration:
        found.extend(
            _difference(name, "configuration", repr(was), repr(is_now))
            for name, (was, is_now) in after.configuration.changes_since(before.configuration).items()
        )
    for position, (old, new) in enumerate(zip_longest(before.signature, after.signature)):
        if old != new and position not in shared:
            found.extend(_argument_differences(after, position, old, new))
    return found


def _argument_differences(after: Compiled, position: int, old: Any, new: Any) -> list[_Difference]:
    name = after.parameter(position)
    if old is None or new is None:
        texts = ["absent" if part is None else described(part) for part in (old, new)]
        return [_difference(name, "structure", texts[0], texts[1])]
    if position in after.static_argnums:
        return [_difference(name, "static value", repr(old[1]), repr(new[1]))]
    if len(old) == len(new) == 3:
        return [_leaf_difference(after, position, "", old, new)]
    if len(old) != len(new) or old[0] != new[0]:
        return [_difference(name, "structure", described(old), described(new))]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(_numbered(new))[0]]
    return [
        _leaf_difference(after, position, path, was, is_now)
        for path, was, is_now in zip(paths, old[1], new[1], strict=True)
        if was != is_now
    ]


def _numbered(part: tuple[Any, ...]) -> Any:
    return jax.tree.unflatten(part[0], list(range(len(part[1]))))


def _leaf_difference(after: Compiled, position: int, path: str, old: "Leaf", new: "Leaf") -> _Difference:
    name = after.parameter(position)
    texts = _leaf_text(old), _leaf_text(new)
    if old[0] != new[0]:
        return _Difference(name + path, "shape", *texts, _remedy_of_shape(after, position, old[0], new[0]))
    return _difference(name + path, "dtype" if old[1] != new[1] else "weak type", *texts)


def _remedy_of_shape(after: Compiled, position: int, old: tuple[int, ...], new: tuple[int, ...]) -> str:
    """Return how to bound the shapes of an argument; an empty text if its buckets do already."""
    if not after.bucketed:
        return _REMEDIES["shape"]
    padded = after.bucketed[position]
    changed = {axis for axis, (was, is_now) in enumerate(zip_longest(old, new)) if was != is_now}
    if len(old) == len(new) and changed <= padded:
        return ""
    if len(old) != len(new) or not padded:  # padding adds no axes, and only arguments with rows are padded
        return _SAME_SHAPE
    axes = sorted(axis - 1 for axis in changed | padded if axis)  # of one item
    wanted = axes[0] if len(axes) == 1 else tuple(axes)
    return f"{_SAME_SHAPE}, or have its Batch pad them to a few: pad_axes={{{after.parameter(position)!r}: {wanted}}}"


def _leaf_text(leaf: Any) -> str:
    shape, dtype, weak_type = leaf
    return f"{'weakly typed ' if weak_type else ''}{dtype}[{', '.join(map(str, shape))}]"


# More reasons than a reader of the table looks at; the bound counts where every item has a shape of its own.
_MAX_REASONS: Final = 100
_MAX_REMEMBERED: Final = 64


class CompileLog:
    """Counts what `compile_statistics()` of a node returns. Its programs share it; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executables: dict[Executable, str] = {}  # each with its arguments, as text
        self._programs = 0
        self._hits_of_dropped = 0
        self._transfers_of_dropped: Counter[tuple[str, Any, Any]] = Counter()
        self._misses = 0
        self._seconds = 0.0
        self._evictions = 0
        self._evicted: deque[str] = deque(maxlen=_MAX_REASONS)
        self._remembered: deque[Compiled] = deque(maxlen=_MAX_REMEMBERED)
        self._reasons: deque[Recompilation] = deque(maxlen=_MAX_REASONS)
        self._told: set[Hashable] = set()
        self._shapes: dict[str, int] = {}

    def statistics(self) -> CompileStatistics:
        """Return a snapshot."""
        with self._lock:
            transfers = Counter(self._transfers_of_dropped)
            for executable in self._executables:
                transfers.update(dict(executable.transfers))  # a copy, because the devices' threads go on counting
            return CompileStatistics(
                programs=len(self._executables),
                hits=self._hits_of_dropped + sum(executable.hits for executable in self._executables),
                misses=self._misses,
                seconds=self._seconds,
                evictions=self._evictions,
                transfers=transfers.total(),
                directions=tuple(
                    [
                        Transfer(argument, describe(source), describe(destination), count)
                        for (argument, source, destination), count in transfers.most_common()
                    ]
                ),
                recompilations=tuple(self._reasons),
                evicted=tuple(self._evicted),
            )

    def programs(self) -> list[ProgramMemory]:
        """Return the memory of the programs that are held; a program of which XLA does not say it is left out."""
        with self._lock:
            held = list(self._executables.items())
        found: list[ProgramMemory] = []
        for executable, arguments in held:
            memory = executable.memory
            if memory is not None:
                found.append(
                    ProgramMemory(
                        arguments,
                        memory.argument_size_in_bytes,
                        memory.output_size_in_bytes,
                        memory.temp_size_in_bytes,
                        memory.alias_size_in_bytes,
                        memory.generated_code_size_in_bytes,
                        executable.hits,
                        id(executable),
                    )
                )
        return found

    def is_first(self, cause: Hashable) -> bool:
        """Return True the first time that it is called with a cause, so that each cause is logged once."""
        with self._lock:
            if cause in self._told:
                return False
            self._told.add(cause)
            return True

    def missed(self) -> None:
        """Count a call whose program was not in the cache."""
        with self._lock:
            self._misses += 1

    def spent(self, seconds: float) -> None:
        """Add time spent compiling, also if the compilation has failed."""
        with self._lock:
            self._seconds += seconds

    def compiled(
        self, jitted: "JittedFunction", configuration: "Configuration", signature: "Signature", executable: "Executable"
    ) -> None:
        """Count a program, find out why the node needed another one, and log each cause once."""
        this = Compiled(jitted, configuration, signature)
        with self._lock:
            self._programs += 1
            self._executables[executable] = arguments_of(jitted, signature)
            reasons = explain(this, list(self._remembered), self._programs)
            self._remembered.append(this)
            self._reasons.extend(reasons)
            counts: list[int] = []
            for reason in reasons:
                if reason.cause == "shape" and reason.remedy:
                    self._shapes[reason.argument] = self._shapes.get(reason.argument, 1) + 1
                counts.append(self._shapes.get(reason.argument, 0))
        for reason, count in zip(reasons, counts, strict=True):
            report(jitted.name, reason, count, self.is_first)

    def dropped(self, executable: "Executable") -> None:
        """Count a program that was evicted, and forget it."""
        with self._lock:
            if executable in self._executables:
                self._evicted.append(self._executables.pop(executable))
                self._evictions += 1
                self._hits_of_dropped += executable.hits
                self._transfers_of_dropped.update(executable.transfers)


# A captured array becomes a part of the program: a matrix of 64 MB made 134 MB of HLO, once per program. Tables and
# masks take less than a megabyte, and the parameters of a model take more.
LARGE_BYTES: Final = 1 << 20
_MAX_NAMED: Final = 3


def warn_of_constants(name: str, traced: Any, log: CompileLog) -> None:
    """Log a warning, once per node, if a traced function has captured more than `LARGE_BYTES` of arrays."""
    constants = captured_constants(traced)
    total = sum(_bytes(constant) for constant in constants)
    if total <= LARGE_BYTES or not log.is_first(("constants",)):
        return
    largest = sorted(constants, key=_bytes, reverse=True)[:_MAX_NAMED]
    logs.warning(
        "program.captured_constants",
        node=name,
        bytes=total,
        largest=[f"{constant.dtype}{list(constant.shape)}" for constant in largest],
        remedy="pass them as an argument that comes from a @resource: constants are copied into every program, and "
        "make it slow to compile",
    )


def captured_constants(traced: Any) -> list[Any]:
    """Return the distinct arrays that a traced function has captured, those of functions inside of it included."""
    found: dict[int, Any] = {id(constant): constant for constant in getattr(traced, "_consts", ())}
    seen: set[int] = set()
    _collect(traced.jaxpr, found, seen)
    # Literals without axes are numbers in the code, which are free.
    return [constant for constant in found.values() if getattr(constant, "shape", ()) != ()]


def _collect(jaxpr: Any, found: dict[int, Any], seen: set[int]) -> None:
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    # A closed jaxpr has constants. Where JAX hoists them out, they are literals among the operands instead.
    found.update((id(constant), constant) for constant in getattr(jaxpr, "consts", ()))
    for equation in jaxpr.eqns:
        found.update((id(operand.val), operand.val) for operand in equation.invars if hasattr(operand, "val"))
        for parameter in equation.params.values():
            for inner in _jaxprs(parameter):
                _collect(inner, found, seen)


def _jaxprs(parameter: Any) -> Iterator[Any]:
    if hasattr(parameter, "eqns"):
        yield parameter
    elif isinstance(parameter, list | tuple):
        for part in parameter:  # pyright: ignore[reportUnknownVariableType]
            yield from _jaxprs(part)


def _bytes(constant: Any) -> int:
    return int(constant.size) * int(constant.dtype.itemsize)


# The errors that JAX raises if a function needs a value while there are only shapes; JAXTypeError is a TypeError.
_NOT_TRACEABLE: Final[tuple[type[Exception], ...]] = (TypeError, IndexError, jax.errors.JAXTypeError)
_HOW_TO_TRACE: Final = (
    "While JAX traces a function, arrays have a shape and a dtype, and no values: replace `if` and `while` over them "
    "by jnp.where, jax.lax.cond or jax.lax.while_loop, take sizes from shapes, and name arguments that the function "
    "must know the value of in static=(...)."
)


@dataclass(frozen=True, eq=False)
class JittedFunction:
    """A JAX function for one placement. Its identity is its key: there is one object for each function and its options.

    Attributes:
        fn: plain JAX; already vmapped if it is for a batch.
        name: name of the node, for errors, statistics and logs.
        parameters: names of the arguments.
        placement: where it runs.
        donate_argnums: positions of the arguments whose memory the result may take.
        static_argnums: positions of the hashable arguments that it is compiled for.
        in_specs: a PartitionSpec or a prefix of them per argument, also for static ones; None copies to every device.
        out_specs: a prefix of the result's structure; None lets XLA choose.
        pure: whether a function with effects that JAX knows of is refused.
        bucketed: for a function of a batch, the padded axes of each argument, that of the items too; an argument that
            all items share has none. Empty for any other function.
        from_resources: positions of the arguments that came from resources at its first call.
        log: counts the programs of the node; all programs of a node share it.
        serial: number of the object.
    """

    fn: Callable[..., Any]
    name: str
    parameters: tuple[str, ...]
    placement: Placement
    donate_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    in_specs: tuple[Any, ...] | None = None
    out_specs: Any = None
    pure: bool = True
    bucketed: tuple[frozenset[int], ...] = ()
    from_resources: frozenset[int] = frozenset()
    log: CompileLog = field(default_factory=CompileLog)
    serial: int = field(default_factory=itertools.count().__next__, init=False)

    def parameter(self, position: int) -> str:
        """Return the name of an argument."""
        return self.parameters[position] if position < len(self.parameters) else f"argument {position}"

    def shardings(self, position: int, value: Any) -> Any:
        """Return the sharding that each leaf of an argument needs.

        Raises:
            ValueError: the specs do not fit its structure or its shapes; the message names node, parameter and remedy.
        """
        specs = None if self.in_specs is None else self.in_specs[position]
        return self.placement.shardings(specs, value, f"node {self.name!r}, argument {self.parameter(position)!r}")


def build(jitted: JittedFunction, configuration: Configuration, signature: Signature) -> Executable:
    """Trace, lower and compile a function; this takes milliseconds to minutes.

    Raises:
        OptionsError: a pure program has effects.
        BaseException: the error of the function while it is traced, or of XLA; a note names the node.
    """
    try:
        _refuse_coroutines(jitted)
        with configuration.entered():
            return _build(jitted, configuration, signature)
    except _NOT_TRACEABLE as error:
        add_note(error, f"{_place(jitted, signature)}\n{_HOW_TO_TRACE}")
        raise
    except BaseException as error:
        add_note(error, _place(jitted, signature))
        raise


def _build(jitted: JittedFunction, configuration: Configuration, signature: Signature) -> Executable:
    placement, fn = jitted.placement, jitted.fn

    # JAX's caches hold the function weakly: when this one, which is our own, is freed, all their entries go with it.
    def call(*args: Any) -> Any:
        result = fn(*args)
        placement.shardings(jitted.out_specs, result, f"the result of node {jitted.name!r}")  # before JAX refuses it
        return result

    call.__name__ = call.__qualname__ = jitted.name
    arguments = _abstract_arguments(jitted, signature)
    names_of_arguments = jitted.parameters[: len(arguments)]
    if len(set(names_of_arguments)) == len(arguments):
        kind = inspect.Parameter.POSITIONAL_ONLY  # JAX's errors take the names of arguments from it
        call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names_of_arguments])  # type: ignore[attr-defined]
    dynamic = [arg for position, arg in enumerate(arguments) if position not in jitted.static_argnums]
    options: dict[str, Any] = {}
    if placement.mesh is None or jitted.out_specs is not None or not jax.tree.leaves(dynamic):
        specs = jitted.out_specs
        options["out_shardings"] = jax.tree.map(placement.sharding, specs, is_leaf=_is_none)
    wrapped: Any = jax.jit(call, donate_argnums=jitted.donate_argnums, static_argnums=jitted.static_argnums, **options)
    if placement.mesh is None:
        traced = wrapped.trace(*arguments)
    else:
        with jax.set_mesh(placement.mesh):  # so that the function may name its axes by PartitionSpec alone
            traced = wrapped.trace(*arguments)
    _refuse_effects(jitted, traced.jaxpr)
    warn_of_constants(jitted.name, traced, jitted.log)
    compiled = traced.lower().compile(compiler_options(placement.devices[0].platform))
    names: list[str] = []
    shardings: list[Any] = []
    for position, argument in enumerate(arguments):
        if position not in jitted.static_argnums:
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
                names.append(jitted.parameter(position) + jax.tree_util.keystr(path))
                shardings.append(leaf.sharding)
    is_flat = all(len(part) == 3 for position, part in enumerate(signature) if position not in jitted.static_argnums)
    locks = ENQUEUE_ORDER.locks(placement.devices)
    return Executable(
        compiled, tuple(names), tuple(shardings), jitted.static_argnums, is_flat, locks,
        is_alone=bool(locks) and placement.devices[0].platform == "cpu" and has_collectives(compiled),
    )  # fmt: skip


def _abstract_arguments(jitted: JittedFunction, signature: Signature) -> list[Any]:
    """Return the abstract arguments of a signature, for tracing."""
    arguments: list[Any] = []
    for position, part in enumerate(signature):
        if position in jitted.static_argnums:
            arguments.append(part[1])
            continue
        is_leaf = len(part) == 3
        tree: Any = part if is_leaf else jax.tree.unflatten(part[0], [_Described(leaf) for leaf in part[1]])
        shaped = _Described(part) if is_leaf else tree
        shardings = jitted.shardings(position, shaped)
        arguments.append(jax.tree.map(_Described.shaped, shaped, shardings))
    return arguments


def _is_none(value: object) -> bool:
    return value is None


class _Described:
    """Wraps a leaf of a signature, because JAX takes a tuple for a pytree and not for a leaf."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.shape = leaf[0]

    def shaped(self, sharding: Any) -> Any:
        shape, dtype, weak_type = self.leaf
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak_type)


def _refuse_coroutines(jitted: JittedFunction) -> None:
    if inspect.iscoroutinefunction(inspect.unwrap(jitted.fn)):
        raise TypeError(
            f"node {jitted.name!r} is an `async def`, and runs on a device: make it a plain function of arrays, and "
            "await in a @node before or after it"
        )


def _refuse_effects(jitted: JittedFunction, jaxpr: Any) -> None:
    if jitted.pure and jaxpr.effects:
        effects = ", ".join(sorted({str(effect) for effect in jaxpr.effects}))
        raise OptionsError(
            f"node {jitted.name!r} is pure, but has the effect {effects}: a pure program may run twice, or in a "
            "batch, or as a part of another. Write @device_node(pure=False), or take the effect out."
        )


def arguments_of(jitted: JittedFunction, signature: Signature) -> str:
    """Return the arguments that a signature is for, as text: "x: float32[4]"."""
    return ", ".join(f"{jitted.parameter(i)}: {described(part)}" for i, part in enumerate(signature))


def _place(jitted: JittedFunction, signature: Signature) -> str:
    return f"while compiling node {jitted.name!r} for {jitted.placement} with ({arguments_of(jitted, signature)})"


# The compile thread calls it with None to compile, or with the error that prevents that. It must not raise.
Compilation: TypeAlias = Callable[[BaseException | None], None]


class CompileThread(ThreadOwner):
    """Runs compilations one after the other. It starts with the first of them, and ends with the last lease."""

    def __init__(self) -> None:
        self._ended: threading.Thread | None = None
        self.begin_without_threads()
        super().__init__()

    def begin_without_threads(self) -> None:
        """Begin without a thread and leases: at first, and in a process that was forked."""
        self._lock = threading.Lock()
        self._leases = 0
        self._run: _Run | None = None

    def acquire(self) -> None:
        """Take a lease: until `release`, compilations may be submitted. Any thread may call this."""
        with self._lock:
            self._leases += 1

    def submit(self, job: Compilation) -> None:
        """Run a compilation on the thread.

        Raises:
            EngineClosedError: there is no lease.
        """
        with self._lock:
            if self._leases == 0:
                raise EngineClosedError("nothing can be compiled: the last Engine that uses devices was closed")
            if self._run is None:
                self._run = _Run()
            self._run.compilations.put(job)

    def release(self) -> None:
        """Give a lease back. The last one fails the compilations that wait, and blocks until the running one has ended.

        An event loop calls `arelease` instead.
        """
        thread = self._give_back(on_ended=None)
        if thread is not None:
            thread.join()

    async def arelease(self) -> None:
        """Do what `release` does, without blocking the loop; a cancellation is raised once the thread has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        thread = self._give_back(on_ended=lambda: loop.call_soon_threadsafe(ended.set))
        if thread is None:
            return
        try:
            await until(ended.is_set, ended.wait)
        finally:
            thread.join()  # it has nothing left to do but return

    def abandon(self) -> None:
        """End all leases: the thread ends after the running compilation."""
        with self._lock:
            self._leases = 1
        self._ended = self._give_back(on_ended=None)

    def join(self) -> None:
        """Block until the running compilation has ended; after `abandon`."""
        if self._ended is not None:
            self._ended.join()

    def _give_back(self, on_ended: Callable[[], object] | None) -> threading.Thread | None:
        with self._lock:
            self._leases -= 1
            if self._leases > 0 or self._run is None:
                return None
            run, self._run = self._run, None
        run.end(on_ended)
        return run.thread


class _Run:
    """A thread and its queue. The next thread may start before this one has ended."""

    def __init__(self) -> None:
        self.compilations: SimpleQueue[Compilation | _LastWord] = SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self.compilations,), name="penstock-compile", daemon=False)
        self.thread.start()

    def end(self, on_ended: Callable[[], object] | None) -> None:
        """Fail the compilations that wait; the running one still ends, and no other begins."""
        waiting: list[Compilation] = []
        try:
            while not isinstance(job := self.compilations.get_nowait(), _LastWord):
                waiting.append(job)
        except Empty:
            pass
        self.compilations.put(_LastWord(on_ended))
        for job in waiting:
            job(EngineClosedError("closed before this was compiled"))


class _LastWord:
    """The last entry of the queue, which ends the thread."""

    def __init__(self, on_ended: Callable[[], object] | None) -> None:
        self.on_ended = on_ended


def _work(compilations: "SimpleQueue[Compilation | _LastWord]") -> None:
    while not isinstance(job := compilations.get(), _LastWord):
        job(None)
        del job  # so that an idle thread holds no program
    if job.on_ended is not None:
        try:
            job.on_ended()
        except RuntimeError:  # the loop is closed, so no task waits
            pass


# A node with buckets has ten programs (300 random lengths made 9). Two hundred and fifty-six are 25 such nodes. A
# small program takes 0.4 MB of memory on a CPU, four layers of a network 0.6: a full cache holds 100 to 160 MB.
DEFAULT_CAPACITY: Final = 256

OnCompiled: TypeAlias = Callable[[Executable | BaseException], object]
_Key: TypeAlias = tuple[Any, ...]
# Leaves and structure of arguments.
_Flat: TypeAlias = tuple[list[Any], Any]
# Configuration, structure and types of the leaves of the last call of a function, and its program.
_Usual: TypeAlias = tuple[Configuration, Any, list[Any], Executable]
_IsWanted: TypeAlias = Callable[[], bool]
_Waiter: TypeAlias = tuple[OnCompiled, Context | None, _IsWanted]


class CompileCache:
    """Holds at most `capacity` compiled programs, and drops those that were not used for the longest time.

    The threads of devices call `find` and `usual`; any thread may call the other methods. Compiling needs a lease.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        """Begin empty, and without a thread.

        Args:
            capacity: the most programs to keep.

        Raises:
            ValueError: `capacity` is below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._lock = threading.Lock()
        self._held: dict[_Key, Executable] = {}
        self._usual: dict[JittedFunction, _Usual] = {}  # a program that is held, for each function
        self._waiting: dict[_Key, list[_Waiter]] = {}
        self._uses = itertools.count(1)
        self._thread = CompileThread()
        metrics.opened(self)

    def counters(self) -> Iterator[Reading]:
        """Yield how often each program in the cache was found, for metrics; the rest is counted where it happens."""
        for (jitted, *_), executable in list(self._held.items()):
            yield _reading(names.METRIC_COMPILE_CACHE_HITS, jitted, executable.hits)

    def levels(self) -> Iterable[Reading]:
        """Return nothing: how many programs are held belongs to no node."""
        return ()

    def acquire(self) -> None:
        """Take a lease: until it is given back, programs can be compiled."""
        self._thread.acquire()

    def release(self) -> None:
        """Give a lease back. The last one fails compilations that wait, and blocks until the running one has ended."""
        self._thread.release()

    async def arelease(self) -> None:
        """Give a lease back as `release` does, without blocking the event loop."""
        await self._thread.arelease()

    def find(self, jitted: JittedFunction, args: tuple[Any, ...], flat: _Flat | None = None) -> Executable | None:
        """Return the program for a call; None if it was not compiled, or was evicted.

        Args:
            jitted: the function to call.
            args: all of its arguments, static ones included.
            flat: leaves and structure of `args`, if the caller knows them.

        Raises:
            TypeError: an argument is neither an array nor static; the message names node, parameter and remedy.
        """
        configuration = current()
        # A call is nearly always like the last one, and comparing the two is faster than making a signature.
        leaves, structure = flat or jax.tree.flatten(args)
        types = None if jitted.static_argnums else types_of(leaves)
        executable: Executable | None
        usual = self._usual.get(jitted)
        if usual is not None and usual[0] is configuration and usual[1] == structure and usual[2] == types:
            executable = usual[-1]
        else:
            signature = signature_of(args, jitted.static_argnums, configuration, jitted)
            executable = self._held.get((jitted, configuration, signature))
            if executable is None:
                return None
            if usual is not None and usual[-1] is not executable:
                usual[-1].not_usual()
        if types is not None:
            with self._lock:
                if executable.is_held:  # the last call's, as a program's results have the same type objects again
                    self._usual[jitted] = configuration, structure, types, executable
        executable.hits += 1
        executable.used = next(self._uses)
        return executable

    def usual(self, jitted: JittedFunction) -> Executable | None:
        """Return the program of the last calls of a function, if the next one may begin by `enqueue_usual`."""
        usual = self._usual.get(jitted)
        if usual is None or not usual[-1].is_usual or checks is None or checks() != usual[0].checks:
            return None
        executable = usual[-1]
        executable.hits += 1
        executable.used = next(self._uses)
        return executable

    def compile(
        self,
        jitted: JittedFunction,
        args: tuple[Any, ...],
        on_done: OnCompiled,
        trace: Context | None = None,
        is_wanted: _IsWanted = lambda: True,
    ) -> None:
        """Compile a program on the compile thread, under the configuration of the calling thread.

        Callers of one program and signature share one compilation. A failure is not kept: the next call tries again.

        Args:
            jitted: the function to compile.
            args: as in a call; the arrays are not kept. `jax.ShapeDtypeStruct`s may stand for them.
            on_done: called with the executable, or with an error that no other caller gets, on the compile thread; or
                at once, if the program was compiled meanwhile. It must not raise.
            trace: the context with the sampled span that waits for it; None without one.
            is_wanted: called on the compile thread when the turn of the program has come. If no caller wants the
                program, it is not compiled, and `on_done` is called with a `DeviceError`.

        Raises:
            TypeError: an argument is neither an array nor static.
            EngineClosedError: there is no lease.
        """
        configuration = current()
        signature = signature_of(args, jitted.static_argnums, configuration, jitted)
        key = jitted, configuration, signature
        jitted.log.missed()
        metrics.add([_reading(names.METRIC_COMPILE_CACHE_MISSES, jitted, 1)])
        with self._lock:
            executable = self._held.get(key)
            if executable is None:
                waiting = self._waiting.get(key)
                if waiting is not None:
                    waiting.append((on_done, trace, is_wanted))
                    return
                self._thread.submit(lambda refusal: self._compile(jitted, configuration, signature, refusal))
                self._waiting[key] = [(on_done, trace, is_wanted)]
                return
        on_done(executable)

    def resize(self, capacity: int) -> None:
        """Hold at most this many programs from now on; those beyond that go at once. Callable from any thread."""
        with self._lock:
            self._capacity = capacity
            evicted = self._evict()
        _let_go(evicted)

    def __len__(self) -> int:
        return len(self._held)

    def _compile(
        self, jitted: JittedFunction, configuration: Configuration, signature: Signature, refusal: BaseException | None
    ) -> None:
        outcome: Executable | BaseException
        key = jitted, configuration, signature
        if refusal is None and (left := self._left(key)):
            for on_done, *_ in left:
                _tell(on_done, DeviceError(f"{jitted.name!r} was not compiled: its callers had left"))
            return
        if refusal is not None:
            outcome = refusal
        else:
            started = time.perf_counter()
            with self._lock:
                traces = [trace for _, trace, _ in self._waiting[key] if trace is not None]
            try:
                with (
                    jax.profiler.TraceAnnotation(f"compile {jitted.name}"),  # its name in a profile that JAX takes
                    spans.compiling(
                        jitted.name, jitted.placement.name, lambda: arguments_of(jitted, signature), traces
                    ),
                ):
                    outcome = build(jitted, configuration, signature)
            except BaseException as error:  # noqa: BLE001 - the callers get every error, and this thread goes on
                outcome = error
            ended = time.perf_counter()
            jitted.log.spent(ended - started)
            metrics.add([_reading(names.METRIC_COMPILE_TIME, jitted, ended - started)])
            collectors.device_worked(DeviceWork("compile", jitted.placement.name, jitted.name, started, ended))
        evicted: list[tuple[JittedFunction, Executable]] = []
        with self._lock:
            waiting = self._waiting.pop(key)
            if isinstance(outcome, Executable):
                outcome.used = next(self._uses)
                self._held[key] = outcome
                outcome.is_held = True
                evicted = self._evict()
        if isinstance(outcome, Executable):
            jitted.log.compiled(jitted, configuration, signature, outcome)
            metrics.add([_reading(names.METRIC_COMPILE_PROGRAMS, jitted, 1)])
            _let_go(evicted)
        for number, (on_done, *_) in enumerate(waiting):
            _tell(on_done, copy_of(outcome) if number and isinstance(outcome, BaseException) else outcome)
        del outcome  # an error refers to this frame

    def _left(self, key: _Key) -> list[_Waiter]:
        """Take out and return the waiters of a program if all of them have left; else return an empty list."""
        with self._lock:
            if any(is_wanted() for *_, is_wanted in self._waiting[key]):
                return []
            return self._waiting.pop(key)

    def _evict(self) -> list[tuple[JittedFunction, Executable]]:
        evicted: list[tuple[JittedFunction, Executable]] = []
        while len(self._held) > self._capacity:
            # One scan for each compilation, so that `find` has only a number to write.
            key = min(self._held, key=lambda key: self._held[key].used)
            executable = self._held.pop(key)
            executable.is_held = False
            if self._usual.get(key[0], (None,))[-1] is executable:
                del self._usual[key[0]]
            evicted.append((key[0], executable))
        return evicted


def _let_go(evicted: list[tuple[JittedFunction, Executable]]) -> None:
    """Count the programs that were evicted, and free them before the callers of the new one get it."""
    while evicted:
        jitted, executable = evicted.pop(0)
        jitted.log.dropped(executable)
        metrics.add(
            [
                _reading(names.METRIC_COMPILE_CACHE_HITS, jitted, executable.hits),
                _reading(names.METRIC_COMPILE_CACHE_EVICTIONS, jitted, 1),
            ]
        )


def _reading(metric: str, jitted: JittedFunction, value: float) -> Reading:
    return series(metric, (names.NODE, jitted.name)), value, None


def _tell(on_done: OnCompiled, outcome: Executable | BaseException) -> None:
    try:
        on_done(outcome)
    except Exception as error:  # noqa: BLE001 - the thread goes on for other callers
        logs.warning("program.callback_failed", error=repr(error))


# One for the process: a program never changes and costs seconds, and event loops may come and go.
CACHE: Final = CompileCache()


def set_program_cache(*, max_programs: int = DEFAULT_CAPACITY) -> None:
    """Set how many compiled programs this process keeps, of all device nodes together.

    Beyond that, the least recently used programs are dropped, and compiled again when they are needed again.
    `compile_statistics()` of a node says which ones were. A small program takes about 0.4 MB of memory on a CPU.

    Args:
        max_programs: the most programs; 256 by default. If there are more now, they are dropped at once.

    Raises:
        OptionsError: `max_programs` is not a number above 0.
        MissingExtraError: JAX is not installed.
    """
    check("max_programs", max_programs, whole(1))
    CACHE.resize(max_programs)
