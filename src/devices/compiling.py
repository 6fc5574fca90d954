"""Compiling: the functions that programs are made from, how a program is made, and the cache of programs."""

import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from jax.sharding import Sharding
from opentelemetry.context import Context

from .._errors import DeviceError, Noted, OptionsError, copy_of
from ..actors.accepted import check, whole
from ..telemetry import metrics, names, spans
from ..telemetry.metrics import CounterSource, Reading, series
from ..telemetry.profiling import collectors
from ..telemetry.profiling.collectors import Collector
from ..telemetry.profiling.records import DeviceSlice
from .compile_thread import CompileThread
from .enqueue_order import ENQUEUE_ORDER, has_collectives
from .programs import (
    Configuration,
    Executable,
    Signature,
    current,
    signature_of,
    types_of,
)
from .recompilation import Compiled, CompileLog, abstract, arguments_text, origin_of, parameter_name
from .shardings import Placement
from .untyped_jax import jax
from .wrong_fusions import compiler_options

# The errors that JAX raises if a function needs a value while there are only shapes; JAXTypeError is a TypeError.
_NOT_TRACEABLE: Final[tuple[type[Exception], ...]] = (TypeError, IndexError, jax.errors.JAXTypeError)
_HOW_TO_TRACE: Final = (
    "While JAX traces a function, arrays have a shape and a dtype, and no values: replace `if` and `while` over arrays "
    "by jnp.where, jax.lax.cond or jax.lax.while_loop, take sizes from shapes, and name the arguments whose values the "
    "function must know in static=(...)."
)


@dataclass(frozen=True, eq=False)
class JittedFunction:
    """A JAX function for one placement. Its identity is its key: there is one object for each function and its options.

    Attributes:
        fn: plain JAX; already vmapped if the function is for a batch.
        name: name of the node, for errors, statistics and logs.
        parameters: names of the arguments.
        placement: the device or mesh that runs the function.
        donate_argnums: positions of the arguments whose memory the result may take.
        static_argnums: positions of the hashable arguments that the function is compiled for.
        in_specs: for each argument, static ones included, a PartitionSpec or a prefix pytree of specs; None is a copy
            on every device.
        out_specs: a prefix of the result's structure; with None, XLA chooses.
        pure: whether a function with effects that JAX knows of is refused.
        bucketed: for a function of a batch, the padded axes of each argument, the axis of the items included. An
            argument that all items share has no such axes. Empty for any other function.
        from_resources: positions of the arguments that came from resources at the first call.
        log: counts the programs of the node. All programs of a node share the log.
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
        return parameter_name(self.parameters, position)

    def shardings(self, position: int, value: Any) -> list[Sharding]:
        """Return the sharding that each leaf of an argument needs.

        Raises:
            ValueError: the specs do not fit the argument's structure or shapes; the message names node, parameter and
                remedy.
        """
        specs = None if self.in_specs is None else self.in_specs[position]
        return self.placement.shardings(specs, value, f"node {self.name!r}, argument {self.parameter(position)!r}")

    def facts(self, configuration: Configuration, signature: Signature) -> Compiled:
        """Return the facts about the program for a signature that explanations of recompilations need."""
        family = (
            self.placement,
            self.donate_argnums,
            self.static_argnums,
            getattr(self.fn, "__code__", type(self.fn)),
            getattr(inspect.unwrap(self.fn), "__code__", None),
        )
        return Compiled(
            family, self.serial, origin_of(self.fn), self.parameters, self.static_argnums,
            configuration, signature, self.bucketed, self.from_resources,
        )  # fmt: skip


def build(jitted: JittedFunction, configuration: Configuration, signature: Signature) -> Executable:
    """Trace, lower and compile a function. This takes milliseconds to minutes.

    Raises:
        OptionsError: a pure program has effects.
        BaseException: the error of the function while it is traced, or of XLA; a note names the node.
    """

    def note(error: BaseException) -> str:
        place = f"while compiling node {jitted.name!r} for {jitted.placement}"
        remedy = f"\n{_HOW_TO_TRACE}" if isinstance(error, _NOT_TRACEABLE) else ""
        return f"{place} with ({arguments_text(jitted.parameters, signature)}){remedy}"

    with Noted(note), configuration.entered():
        return _build(jitted, signature)


def _build(jitted: JittedFunction, signature: Signature) -> Executable:
    placement, fn = jitted.placement, jitted.fn

    # JAX's caches hold the function weakly. `call` is a new function, so when it is freed, all entries for it go, too.
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
        with jax.set_mesh(placement.mesh):  # so that the function may name mesh axes by PartitionSpec alone
            traced = wrapped.trace(*arguments)
    _refuse_effects(jitted, traced.jaxpr)
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
        shaped = abstract(part)
        leaves, tree = jax.tree.flatten(shaped)
        split = zip(leaves, jitted.shardings(position, shaped), strict=True)
        arguments.append(jax.tree.unflatten(tree, [leaf.update(sharding=sharding) for leaf, sharding in split]))
    return arguments


def _is_none(value: object) -> bool:
    return value is None


def _refuse_effects(jitted: JittedFunction, jaxpr: Any) -> None:
    if jitted.pure and jaxpr.effects:
        effects = ", ".join(sorted({str(effect) for effect in jaxpr.effects}))
        raise OptionsError(
            f"node {jitted.name!r} is pure, but has the effect {effects}: a pure program may run twice, or in a "
            "batch, or as a part of another program. Write @device_node(pure=False), or take the effect out."
        )


OnCompiled: TypeAlias = Callable[[Executable | BaseException], object]
_IsWanted: TypeAlias = Callable[[], bool]
_Waiter: TypeAlias = tuple[OnCompiled, Context | None, _IsWanted]

# A node with buckets has ten programs (300 random lengths made 9), so 256 programs serve 25 such nodes. A small program
# takes 0.4 MB of memory on a CPU, four layers of a network 0.6: a full cache holds 100 to 160 MB.
DEFAULT_CAPACITY: Final = 256
_Key: TypeAlias = tuple[JittedFunction, Configuration, Signature]
# Leaves and structure of arguments.
_Flat: TypeAlias = tuple[list[Any], Any]
# Configuration, structure and types of the leaves of the last call of a function, and its program.
_LastProgram: TypeAlias = tuple[Configuration, Any, list[Any], Executable]


class CompileCache(CounterSource):
    """Compiles programs, and keeps those that were used last. To compile, a lease of the thread is needed.

    The threads of devices call `find`; any thread may call the other methods.

    Attributes:
        thread: compiles, from the first lease on.
    """

    # Ownership: `_lock` guards `_waiting` and `_held`, so that a program is either held or waited for, and is compiled
    # once. The compile thread calls the waiters back without the lock. The threads of devices call `find`, each for
    # functions that no other thread runs. They own `hits` and `used` of the programs. `find`
    # writes `_last_programs` under `_lock`, too, so that no dropped program stays there; it reads without the lock.

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        """Make an empty cache, without a thread.

        Args:
            capacity: the most programs to keep.
        """
        self._capacity = capacity
        self._lock = threading.Lock()
        self._held: dict[_Key, Executable] = {}
        self._last_programs: dict[JittedFunction, _LastProgram] = {}  # a program that is held, for each function
        self._uses = itertools.count(1)
        self._waiting: dict[_Key, list[_Waiter]] = {}
        self.thread = CompileThread()
        metrics.opened(self)

    def counters(self) -> Iterator[Reading]:
        """Yield how often each program in the cache was found, for metrics. Other counts are kept by the events."""
        for (jitted, *_), executable in list(self._held.items()):
            yield _reading(names.METRIC_COMPILE_CACHE_HITS, jitted, executable.hits)

    def find(self, jitted: JittedFunction, args: tuple[Any, ...], flat: _Flat | None = None) -> Executable | None:
        """Return the program for a call; None if no program was compiled for the signature, or it was evicted.

        Args:
            jitted: the function to call.
            args: all arguments of the call, static ones included.
            flat: leaves and structure of `args`, if the caller knows them.

        Raises:
            TypeError: an argument is neither an array nor static; the message names node, parameter and remedy.
        """
        configuration = current()
        # A call is nearly always like the last call, and to compare the two is faster than to make a signature.
        leaves, structure = flat or jax.tree.flatten(args)
        types = None if jitted.static_argnums else types_of(leaves)
        executable: Executable | None
        last = self._last_programs.get(jitted)
        if last is not None and last[0] is configuration and last[1] == structure and last[2] == types:
            executable = last[-1]
        else:
            signature = signature_of(args, jitted.static_argnums, configuration, jitted)
            executable = self._held.get((jitted, configuration, signature))
            if executable is None:
                return None
        if types is not None:
            with self._lock:
                if executable.is_held:  # keep the last call's types: results of one program share their type objects
                    self._last_programs[jitted] = configuration, structure, types, executable
        executable.hits += 1
        executable.used = next(self._uses)
        return executable

    def __len__(self) -> int:
        return len(self._held)

    def compile(
        self,
        jitted: JittedFunction,
        args: tuple[Any, ...],
        on_done: OnCompiled,
        trace: Context | None = None,
        is_wanted: _IsWanted = lambda: True,
    ) -> None:
        """Compile a program on the compile thread, under the configuration of the calling thread.

        Callers of one function and signature share one compilation. A failure is not kept: the next call tries again.

        Args:
            jitted: the function to compile.
            args: the arguments of a call; the arrays are not kept. `jax.ShapeDtypeStruct`s may stand for arrays.
            on_done: called with the executable, or with an error object that no other caller gets. The call comes on
                the compile thread, or at once if the program was compiled meanwhile. Must not raise.
            trace: the context with the sampled span that waits for the program; None if there is none.
            is_wanted: called on the compile thread before it compiles the program. If no caller wants the program, it
                is not compiled, and `on_done` is called with a `DeviceError`.

        Raises:
            TypeError: an argument is neither an array nor static.
            EngineClosedError: there is no lease.
        """
        configuration = current()
        signature = signature_of(args, jitted.static_argnums, configuration, jitted)
        key = jitted, configuration, signature
        jitted.log.missed()
        metrics.registry.add([_reading(names.METRIC_COMPILE_CACHE_MISSES, jitted, 1)])
        with self._lock:
            executable = self._held.get(key)
            if executable is None:
                waiting = self._waiting.get(key)
                if waiting is not None:
                    waiting.append((on_done, trace, is_wanted))
                    return
                self.thread.submit(lambda refusal: self._compile(jitted, configuration, signature, refusal))
                self._waiting[key] = [(on_done, trace, is_wanted)]
                return
        on_done(executable)

    def resize(self, capacity: int) -> None:
        """Hold at most this many programs from now on, and drop further ones at once. Callable from any thread."""
        with self._lock:
            self._capacity = capacity
            evicted = self._evict()
        _let_go(evicted)

    def _compile(
        self, jitted: JittedFunction, configuration: Configuration, signature: Signature, refusal: BaseException | None
    ) -> None:
        outcome: Executable | BaseException
        key = jitted, configuration, signature
        with self._lock:
            waiting = self._waiting[key]
            if refusal is None and not any(is_wanted() for *_, is_wanted in waiting):
                refusal = DeviceError(f"{jitted.name!r} was not compiled: its callers had left")
            if refusal is not None:
                del self._waiting[key]
            traces = [trace for _, trace, _ in waiting if trace is not None]
        if refusal is not None:
            _tell(waiting, refusal)
            return
        started = time.perf_counter()
        try:
            with (
                jax.profiler.TraceAnnotation(f"compile {jitted.name}"),  # its name in a profile that JAX takes
                spans.compiling(
                    jitted.name, jitted.placement.name, lambda: arguments_text(jitted.parameters, signature), traces
                ),
            ):
                outcome = build(jitted, configuration, signature)
        except BaseException as error:  # noqa: BLE001 - the callers get every error, and this thread goes on
            outcome = error
        work = DeviceSlice("compile", jitted.placement.name, jitted.name, started, time.perf_counter())
        jitted.log.spent(work.ended_seconds - started)
        metrics.registry.add([_reading(names.METRIC_COMPILE_TIME, jitted, work.ended_seconds - started)])
        if isinstance(outcome, Executable):
            work = replace(work, again=self._keep(key, outcome))
        else:
            with self._lock:
                del self._waiting[key]
        collectors.report(Collector.device_worked, work)
        _tell(waiting, outcome)
        del outcome  # break the cycle of error, traceback and frame

    def _keep(self, key: _Key, executable: Executable) -> tuple[tuple[str, str], ...]:
        """Hold a program, and return why the node needed a further one: the causes that have a remedy, with these."""
        jitted, configuration, signature = key
        with self._lock:
            del self._waiting[key]
            executable.used, executable.is_held = next(self._uses), True
            self._held[key] = executable
            evicted = self._evict()
        reasons = jitted.log.compiled(jitted.name, jitted.facts(configuration, signature), executable)
        metrics.registry.add([_reading(names.METRIC_COMPILE_PROGRAMS, jitted, 1)])
        _let_go(evicted)
        return tuple([(one._what, one.remedy) for one in reasons if one.remedy])

    def _evict(self) -> list[tuple[JittedFunction, Executable]]:
        evicted: list[tuple[JittedFunction, Executable]] = []
        while len(self._held) > self._capacity:
            # One scan for each compilation: so `find` has to write only a number.
            key = min(self._held, key=lambda key: self._held[key].used)
            executable = self._held.pop(key)
            executable.is_held = False
            if self._last_programs.get(key[0], (None,))[-1] is executable:
                del self._last_programs[key[0]]
            evicted.append((key[0], executable))
        return evicted


def _let_go(evicted: list[tuple[JittedFunction, Executable]]) -> None:
    """Count the programs that were evicted, and free them before the callers of the new program get it."""
    while evicted:
        jitted, executable = evicted.pop(0)
        jitted.log.dropped(executable)
        metrics.registry.add(
            [
                _reading(names.METRIC_COMPILE_CACHE_HITS, jitted, executable.hits),
                _reading(names.METRIC_COMPILE_CACHE_EVICTIONS, jitted, 1),
            ]
        )


def _reading(metric: str, jitted: JittedFunction, value: float) -> Reading:
    return series(metric, (names.NODE, jitted.name)), value, None


def _tell(waiting: list[_Waiter], outcome: Executable | BaseException) -> None:
    """Give the outcome of a compilation to its waiters, each with an error object of its own."""
    for number, (on_done, *_) in enumerate(waiting):
        on_done(copy_of(outcome) if number and isinstance(outcome, BaseException) else outcome)


# One cache for the process: a program never changes and costs seconds, while event loops come and go.
CACHE: Final = CompileCache()


def set_program_cache(*, max_programs: int = DEFAULT_CAPACITY) -> None:
    """Set how many compiled programs this process keeps, of all device nodes together.

    If there are more, the least recently used programs are dropped, and compiled again when they are needed again.
    `compile_statistics()` of a node lists its dropped programs. A small program takes about 0.4 MB of memory on a CPU.

    Args:
        max_programs: the most programs; 256 by default. Programs beyond this number are dropped at once.

    Raises:
        OptionsError: `max_programs` is not a number above 0.
        MissingExtraError: JAX is not installed.
    """
    check("max_programs", max_programs, whole(1))
    CACHE.resize(max_programs)
