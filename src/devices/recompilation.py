"""Recompilations: the programs that a node had compiled, and why the node needed another one."""

import inspect
import threading
from collections import Counter, deque
from collections.abc import Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, TypeAlias

from ..telemetry import logs
from ..telemetry.counters import ProgramMemory
from .programs import Configuration, Executable, Leaf, Signature
from .shardings import sharding_text
from .statistics import CompileStatistics, Recompilation, Transfer
from .untyped_jax import jax

# Powers of two from 1 to 128 are eight sizes. More sizes than that look unbounded, and each has cost a compilation
# (300 random sizes: 183 programs and 12 s without buckets, 9 programs and 0.6 s with buckets).
MANY_SHAPES: Final = 8

_REMEDIES: Final = {
    "shape": "pass arrays of the same shape, or of a few; a device node with batch=devices.DeviceBatch(buckets=...), "
    "and pad_axes= for ragged axes, bounds their number; for whole arrays, node.vmap(batch_size=...) does",
    "dtype": "convert the argument to one dtype before the node",
    "weak type": "pass an array with a dtype instead of a Python number, or always the number",
    "structure": "pass the same structure each time; None in the place of an array is another structure",
    "static value": "take the argument out of static=(...) if the function can compute with it as an array",
    "resource": "in a batch, an argument that callers pass has a row for each item, and one from a @resource is passed "
    "once, which are two programs: let the argument come from a @resource wherever the node is called, or nowhere",
    "constant": "in a batch, an argument that callers pass has a row for each item, and an array that is written in "
    "the graph is passed once, which are two programs: name the parameter in shared=(...), which passes it once at all "
    "call sites; warmup(..., constants={...}) and deploy(warmup=True) compile for an array in the graph",
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
    """The facts about a program that explanations need. This object holds no arrays, and does not hold the function.

    Attributes:
        family: a key; only programs of one family are compared. A node has several families on purpose, such as one for
            each placement.
        serial: number of the `JittedFunction`.
        origin: name, file and line of the function.
        parameters: names of the arguments.
        static_argnums: positions of the static arguments.
        configuration: the configuration that the program was compiled under.
        signature: the signature that the program was compiled for.
        bucketed: the padded axes of each argument, as in the `JittedFunction`.
        from_resources: positions of the arguments that came from resources at the first call.
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


def parameter_name(parameters: tuple[str, ...], position: int) -> str:
    """Return the name of an argument."""
    return parameters[position] if position < len(parameters) else f"argument {position}"


def arguments_text(parameters: tuple[str, ...], signature: Signature) -> str:
    """Return the arguments of a signature as text: "x: float32[4]"."""
    return ", ".join(f"{parameter_name(parameters, i)}: {described(part)}" for i, part in enumerate(signature))


def described(part: tuple[Any, ...]) -> str:
    """Return one argument's part of a signature as text: `float32[3, 4]`, a tree of those, a static value."""
    if len(part) == 3:
        return _leaf_text(part)
    if isinstance(part[0], type):
        return logs.shown(part[1])
    return _tree_text(part[0], iter(part[1]))


def _tree_text(tree: Any, leaves: Iterator[Leaf]) -> str:
    """Return a structure as text. No object of the structure is made: a class of the user might refuse texts."""
    if (node := tree.node_data()) is None:
        return _leaf_text(next(leaves))
    kind: Any
    kind, data = node
    parts = [_tree_text(child, leaves) for child in tree.children()]
    if kind is dict:
        return "{" + ", ".join([f"{logs.shown(key)}: {part}" for key, part in zip(data, parts, strict=True)]) + "}"
    names: Any = getattr(kind, "_fields", ())  # of a named tuple
    if len(names) == len(parts):
        parts = [f"{name}={part}" for name, part in zip(names, parts, strict=True)]
    text = ", ".join(parts)
    if kind is list:
        return f"[{text}]"
    if kind is tuple:
        return f"({text},)" if len(parts) == 1 else f"({text})"
    if kind is type(None):
        return "None"
    return f"{kind.__name__}{logs.shown(data) if data else ''}({text})"


def abstract(part: tuple[Any, ...]) -> Any:
    """Return an argument without values, given its part of a signature: each leaf has a shape and a dtype."""
    leaves = [
        jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
        for shape, dtype, weak_type in ([part] if len(part) == 3 else part[1])
    ]
    return leaves[0] if len(part) == 3 else jax.tree.unflatten(part[0], leaves)


def origin_of(fn: Any) -> str:
    """Return name, file and line of a function."""
    inner = inspect.unwrap(fn)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    code = getattr(inner, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


# Argument, cause, the text before and after, and the remedy.
_Difference: TypeAlias = tuple[str, str, str, str, str]


def _difference(argument: str, cause: str, before: str, after: str) -> _Difference:
    return argument, cause, before, after, _REMEDIES[cause]


_EVICTED: Final = [_difference("", "eviction", "compiled before", "dropped, and compiled again")]


def _differences(before: Compiled, after: Compiled) -> Iterator[_Difference]:
    """Yield the differences between a program and an earlier one of its family."""
    shared: list[int] = []
    for position, (was, is_now) in enumerate(zip(before.bucketed, after.bucketed, strict=False)):
        if bool(was) != bool(is_now):
            shared.append(position)
            cause = "resource" if position in (before if is_now else after).from_resources else "constant"
            texts = [_PASSED_ONCE[cause] if not one else "passed by callers" for one in (was, is_now)]
            yield _difference(parameter_name(after.parameters, position), cause, *texts)
    if before.serial != after.serial and not shared:
        yield _difference("", "function", before.origin, f"another object with the same code, {after.origin}")
    if before.configuration is not after.configuration:
        for name, (old, new) in after.configuration.changes_since(before.configuration).items():
            yield _difference(name, "configuration", repr(old), repr(new))
    for position, (old, new) in enumerate(zip_longest(before.signature, after.signature)):
        if old != new and position not in shared:
            yield from _argument_differences(after, position, old, new)


def _argument_differences(after: Compiled, position: int, old: Any, new: Any) -> Iterator[_Difference]:
    name = parameter_name(after.parameters, position)
    if position in after.static_argnums and None not in (old, new):
        yield _difference(name, "static value", logs.shown(old[1]), logs.shown(new[1]))
        return
    if old is None or new is None or len(old) != len(new) or (len(old) < 3 and old[0] != new[0]):
        yield _difference(name, "structure", *["absent" if part is None else described(part) for part in (old, new)])
        return
    leaves = [("", old, new)]
    if len(old) < 3:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(abstract(new))[0]]
        leaves = list(zip(paths, old[1], new[1], strict=True))
    for path, was, is_now in leaves:
        texts = _leaf_text(was), _leaf_text(is_now)
        if was[0] != is_now[0]:
            yield name + path, "shape", *texts, _remedy_of_shape(after, position, was[0], is_now[0])
        elif was != is_now:
            yield _difference(name + path, "dtype" if was[1] != is_now[1] else "weak type", *texts)


def _remedy_of_shape(after: Compiled, position: int, old: tuple[int, ...], new: tuple[int, ...]) -> str:
    """Return the remedy for a shape of an argument; an empty text if the buckets of a batch bound its shapes."""
    changed = {axis for axis, (was, is_now) in enumerate(zip_longest(old, new)) if was != is_now}
    is_bounded = len(old) == len(new) and after.bucketed and changed <= after.bucketed[position]
    return "" if is_bounded else _REMEDIES["shape"]


def _leaf_text(leaf: Any) -> str:
    shape, dtype, weak_type = leaf
    return f"{'weakly typed ' if weak_type else ''}{dtype}[{', '.join(map(str, shape))}]"


# More reasons than anyone reads in the table. The bound matters where every item has another shape.
_MAX_REASONS: Final = 100
_MAX_REMEMBERED: Final = 64


class CompileLog:
    """Counts the `CompileStatistics` of a node. All programs of the node share the log; any thread may call it."""

    # Ownership: `_lock` guards all fields. The threads of devices count `hits` and `transfers` of a held program
    # without the lock, so a reader gets the numbers of that moment.

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
        self._shapes: dict[tuple[str, str], int] = {}  # by node and argument: functions of one actor share this log
        self._announced: set[Hashable] = set()  # pairs of a function's serial number and a signature

    @contextmanager
    def announced(self, programs: Iterable[tuple[int, Signature]]) -> Generator[None, None, None]:
        """Count none of these programs, which are compiled inside of the block, as a recompilation."""
        programs = set(programs)
        with self._lock:
            self._announced |= programs
        try:
            yield
        finally:
            with self._lock:
                self._announced -= programs

    def statistics(self) -> CompileStatistics:
        """Return a snapshot."""
        with self._lock:
            transfers = Counter(self._transfers_of_dropped)
            for executable in self._executables:
                transfers.update(dict(executable.transfers))  # a copy, because the devices' threads count on
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
        """Return the memory of the held programs, without programs whose memory XLA does not tell."""
        with self._lock:
            held = list(self._executables.items())
        return [
            ProgramMemory(
                arguments, memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes,
                memory.alias_size_in_bytes, memory.generated_code_size_in_bytes, executable.hits, id(executable),
            )
            for executable, arguments in held
            if (memory := executable.memory) is not None
        ]  # fmt: skip

    def _is_first(self, cause: Hashable) -> bool:
        """Return True at the first call with a cause, so that each cause is logged once."""
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
        """Add time spent compiling; failed compilations count, too."""
        with self._lock:
            self._seconds += seconds

    def compiled(self, node: str, this: Compiled, executable: Executable) -> list[Recompilation]:
        """Count a program, and return the causes why the node needed it.

        The causes are the differences from the most similar earlier program. Each cause that was not intended is logged
        once, and once more if the number of an argument's shapes seems to have no bound.
        """
        with self._lock:
            self._programs += 1
            self._executables[executable] = arguments_text(this.parameters, this.signature)
            family = [before for before in reversed(self._remembered) if before.family == this.family]
            if (this.serial, this.signature) in self._announced:
                family = []
            nearest = (
                min([list(_differences(before, this)) for before in family], key=len) or _EVICTED if family else []
            )
            reasons = [Recompilation(self._programs, *one) for one in nearest]
            self._remembered.append(this)
            self._reasons.extend(reasons)
            for reason in reasons:
                if reason.cause == "shape" and reason.remedy:
                    self._shapes[node, reason.argument] = self._shapes.get((node, reason.argument), 1) + 1
        for reason in reasons:
            shapes, told = self._shapes.get((node, reason.argument), 0), {"node": node, "argument": reason.argument}
            is_shape = reason.cause == "shape" and shapes >= MANY_SHAPES
            if reason.remedy and is_shape and self._is_first(("many shapes", *told.values())):
                logs.warning("program.many_shapes", **told, programs=shapes, remedy=reason.remedy)
            elif reason.remedy and self._is_first((reason.cause, *told.values())):
                logs.warning(
                    "program.recompiled", **told, cause=reason.cause, before=reason.before, after=reason.after,
                    remedy=reason.remedy,
                )  # fmt: skip
        return reasons

    def dropped(self, executable: Executable) -> None:
        """Count a program that was evicted, and forget it."""
        with self._lock:
            if executable in self._executables:
                self._evicted.append(self._executables.pop(executable))
                self._evictions += 1
                self._hits_of_dropped += executable.hits
                self._transfers_of_dropped.update(executable.transfers)
