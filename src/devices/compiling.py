"""Ahead-of-time compilation of a function for one device or mesh and one signature, counted and explained."""

import inspect
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from .._errors import OptionsError, add_note
from ..telemetry import logs
from ..telemetry.counters import ProgramMemory
from .executable import ENQUEUE_ORDER, Configuration, Executable, Leaf, Signature, describe, has_collectives
from .shardings import Placement
from .statistics import CompileStatistics, Recompilation, Transfer
from .untyped_jax import jax
from .wrong_fusions import compiler_options

# Powers of two from 1 to 128 are eight sizes: more than that is no longer a handful of sizes, and each has cost a
# compilation (300 random sizes: 183 programs and 12 s without buckets, 9 and 0.6 s with them).
MANY_SHAPES: Final = 8

_SAME_SHAPE: Final = "pass arrays of the same shape"
_REMEDIES: Final = {
    "shape": f"{_SAME_SHAPE}, or of a few; a device node with batch=devices.DeviceBatch(buckets=...), and pad_axes= "
    "for ragged axes, bounds their number",
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
    """What is remembered of a program for explanations: no arrays, and not the function."""

    def __init__(self, jitted: "JittedFunction", configuration: "Configuration", signature: "Signature") -> None:
        # Programs of one node that are meant to be several, one per placement or batched and not, are not compared.
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
    """Return what differs between a program and the most similar earlier one; nothing if it is the first.

    Args:
        this: the program that was compiled.
        earlier: the programs of the node before it, the last one at the end.
        number: of the program, the node's first being 1.
    """
    differences = [_differences(before, this) for before in reversed(earlier) if before.family == this.family]
    if not differences:
        return []
    nearest = min(differences, key=len) or [
        _difference("", "eviction", "compiled before", "dropped, and compiled again")
    ]
    return [Recompilation(number, *one) for one in nearest]


def report(node: str, reason: Recompilation, shapes: int, is_first: Callable[[Hashable], bool]) -> None:
    """Log a recompilation, each cause once, and once more where an argument's shapes seem to have no end.

    Args:
        node: name of the node.
        reason: what to tell; one without a remedy is meant, and not told.
        shapes: how many programs the argument's shapes have cost so far.
        is_first: tells whether a cause has not been told of before.
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
    if len(old) != len(new) or not padded:  # padding gives no axes, and only to what has a row for each item
        return _SAME_SHAPE
    axes = sorted(axis - 1 for axis in changed | padded if axis)  # of one item
    wanted = axes[0] if len(axes) == 1 else tuple(axes)
    return f"{_SAME_SHAPE}, or have its Batch pad them to a few: pad_axes={{{after.parameter(position)!r}: {wanted}}}"


def _leaf_text(leaf: Any) -> str:
    shape, dtype, weak_type = leaf
    return f"{'weakly typed ' if weak_type else ''}{dtype}[{', '.join(map(str, shape))}]"


# More than a reader of the table looks at, and bounded where every item has a shape of its own.
_MAX_REASONS: Final = 100
_MAX_REMEMBERED: Final = 64


class CompileLog:
    """What `compile_statistics()` of a node shows. Its programs share it; callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executables: dict[Executable, str] = {}  # with the arguments that each is for
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
                transfers.update(dict(executable.transfers))  # a copy: devices' threads count on
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
        """Return what the programs that are held take of memory; those of which XLA does not say it are left out."""
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
        """Return True the first time a cause is asked about, so that each is logged once."""
        with self._lock:
            if cause in self._told:
                return False
            self._told.add(cause)
            return True

    def missed(self) -> None:
        """Count a call whose program was not there."""
        with self._lock:
            self._misses += 1

    def spent(self, seconds: float) -> None:
        """Count time spent compiling, also in vain."""
        with self._lock:
            self._seconds += seconds

    def compiled(
        self, jitted: "JittedFunction", configuration: "Configuration", signature: "Signature", executable: "Executable"
    ) -> None:
        """Count a program, find out why the node needed another one, and log that once per cause."""
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


# A captured array becomes a part of the program: a matrix of 64 MB made 134 MB of HLO, once per program. A megabyte is
# more than what tables and masks take, and less than what parameters do.
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


# What JAX raises where a value is needed while there are only shapes; JAXTypeError is a TypeError.
_NOT_TRACEABLE: Final[tuple[type[Exception], ...]] = (TypeError, IndexError, jax.errors.JAXTypeError)
_HOW_TO_TRACE: Final = (
    "While JAX traces a function, arrays have a shape and a dtype, and no values: replace `if` and `while` over them "
    "by jnp.where, jax.lax.cond or jax.lax.while_loop, take sizes from shapes, and name arguments that the function "
    "must know the value of in static=(...)."
)


@dataclass(frozen=True, eq=False)
class JittedFunction:
    """A JAX function for one placement. Its identity is its key: one object per node or function, and options.

    Attributes:
        fn: plain JAX; already vmapped if it is for a batch.
        name: of the node, for errors, statistics and logs.
        parameters: names of the arguments.
        placement: where it runs.
        donate_argnums: positions of the arguments whose memory the result may take.
        static_argnums: positions of the hashable arguments that it is compiled for.
        in_specs: a PartitionSpec or a prefix of them per argument, also for static ones; None copies to every device.
        out_specs: a prefix of the result's structure; None lets XLA choose.
        pure: refuses a function with effects that JAX knows of.
        bucketed: of a batch, for each argument the axes that are padded to buckets, that of the items too; none for
            what all items share. Empty for what is no batch.
        from_resources: positions of the arguments that came from resources where it was first needed.
        log: gathers what happens to the programs of one node; several programs of a node share it.
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
        """Return where each leaf of an argument belongs.

        Raises:
            ValueError: the specs do not fit its structure or its shapes; the message names node, parameter and remedy.
        """
        specs = None if self.in_specs is None else self.in_specs[position]
        return self.placement.shardings(specs, value, f"node {self.name!r}, argument {self.parameter(position)!r}")


def build(jitted: JittedFunction, configuration: Configuration, signature: Signature) -> Executable:
    """Trace, lower and compile: takes milliseconds to minutes.

    Raises:
        OptionsError: a pure program has effects.
        BaseException: whatever the function raises while it is traced, or XLA; a note says at which node.
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

    # JAX's caches are keyed on the function, weakly: one of our own takes all of them along when it goes.
    def call(*args: Any) -> Any:
        result = fn(*args)
        placement.shardings(jitted.out_specs, result, f"the result of node {jitted.name!r}")  # before JAX refuses it
        return result

    call.__name__ = call.__qualname__ = jitted.name
    arguments = _abstract_arguments(jitted, signature)
    names_of_arguments = jitted.parameters[: len(arguments)]
    if len(set(names_of_arguments)) == len(arguments):
        kind = inspect.Parameter.POSITIONAL_ONLY  # JAX's errors name arguments by it
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
        with jax.set_mesh(placement.mesh):  # so that the function may speak of its axes by PartitionSpec alone
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
    """Wraps a leaf of a signature, as a tuple is no leaf of a pytree."""

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
            "do what awaits in a @node before or after it"
        )


def _refuse_effects(jitted: JittedFunction, jaxpr: Any) -> None:
    if jitted.pure and jaxpr.effects:
        effects = ", ".join(sorted({str(effect) for effect in jaxpr.effects}))
        raise OptionsError(
            f"node {jitted.name!r} is pure, and has the effect {effects}: a pure program may run twice, or in a "
            "batch, or as a part of another. Say @device_node(pure=False), or take the effect out."
        )


def arguments_of(jitted: JittedFunction, signature: Signature) -> str:
    """Return the arguments that a signature is for, as text: "x: float32[4]"."""
    return ", ".join(f"{jitted.parameter(i)}: {described(part)}" for i, part in enumerate(signature))


def _place(jitted: JittedFunction, signature: Signature) -> str:
    return f"while compiling node {jitted.name!r} for {jitted.placement} with ({arguments_of(jitted, signature)})"
