"""Recompilations: which programs a node has had compiled, and what made it need another one."""

import inspect
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from ..telemetry import logs
from ..telemetry.counters import ProgramMemory
from .programs import Configuration, Executable, Leaf, Signature
from .shardings import sharding_text
from .statistics import CompileStatistics, Recompilation, Transfer
from .untyped_jax import jax

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


@dataclass(frozen=True)
class Compiled:
    """The facts about a program that explanations need; it holds no arrays, and not the function.

    Attributes:
        family: programs of one family are compared; a node has others on purpose, such as one for each placement.
        serial: number of the `JittedFunction`.
        origin: name, file and line of its function.
        parameters: names of its arguments.
        static_argnums: positions of those that it is compiled for.
        configuration: the one that it was compiled under.
        signature: the one that it was compiled for.
        bucketed: the padded axes of each argument, as the `JittedFunction` has them.
        from_resources: positions of the arguments that came from resources at its first call.
    """

    family: tuple[Any, ...]
    serial: int
    origin: str
    parameters: tuple[str, ...]
    static_argnums: tuple[int, ...]
    configuration: Configuration
    signature: Signature
    bucketed: tuple[frozenset[int], ...]
    from_resources: frozenset[int]

    def parameter(self, position: int) -> str:
        """Return the name of an argument."""
        return parameter_name(self.parameters, position)

    @property
    def arguments(self) -> str:
        """The arguments that it is for, as text: "x: float32[4]"."""
        return arguments_text(self.parameters, self.signature)


def parameter_name(parameters: tuple[str, ...], position: int) -> str:
    """Return the name of an argument."""
    return parameters[position] if position < len(parameters) else f"argument {position}"


def arguments_text(parameters: tuple[str, ...], signature: Signature) -> str:
    """Return the arguments that a signature is for, as text: "x: float32[4]"."""
    return ", ".join(f"{parameter_name(parameters, i)}: {described(part)}" for i, part in enumerate(signature))


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


def _leaf_difference(after: Compiled, position: int, path: str, old: Leaf, new: Leaf) -> _Difference:
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

    # Ownership: `_lock` guards all fields. The threads of devices count `hits` and `transfers` of a program that is
    # held without it, so the numbers are read as they are at that moment.

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
                        Transfer(argument, sharding_text(source), sharding_text(destination), count)
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

    def compiled(self, node: str, this: Compiled, executable: Executable) -> list[Recompilation]:
        """Count a program, find out why the node needed another one, and log each cause once; return the causes."""
        with self._lock:
            self._programs += 1
            self._executables[executable] = this.arguments
            reasons = explain(this, list(self._remembered), self._programs)
            self._remembered.append(this)
            self._reasons.extend(reasons)
            counts: list[int] = []
            for reason in reasons:
                if reason.cause == "shape" and reason.remedy:
                    self._shapes[reason.argument] = self._shapes.get(reason.argument, 1) + 1
                counts.append(self._shapes.get(reason.argument, 0))
        for reason, count in zip(reasons, counts, strict=True):
            report(node, reason, count, self.is_first)
        return reasons

    def dropped(self, executable: Executable) -> None:
        """Count a program that was evicted, and forget it."""
        with self._lock:
            if executable in self._executables:
                self._evicted.append(self._executables.pop(executable))
                self._evictions += 1
                self._hits_of_dropped += executable.hits
                self._transfers_of_dropped.update(executable.transfers)
