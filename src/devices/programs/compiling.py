"""A program: a JAX function for one placement; and the ahead-of-time compilation of it for one signature."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ..._errors import OptionsError, add_note
from ..platform.placement import Placement
from ..untyped_jax import jax
from ..wrong_fusions import compiler_options
from .captured_constants import warn_of_constants
from .compile_log import CompileLog
from .configuration import Configuration
from .enqueue_order import ENQUEUE_ORDER
from .executable import Executable
from .explanations import described
from .signature import Leaf, Signature, signature_of

# What JAX raises where a value is needed while there are only shapes; JAXTypeError is a TypeError.
_NOT_TRACEABLE: Final[tuple[type[Exception], ...]] = (TypeError, IndexError, jax.errors.JAXTypeError)
_HOW_TO_TRACE: Final = (
    "While JAX traces a function, arrays have a shape and a dtype, and no values: replace `if` and `while` over them "
    "by jnp.where, jax.lax.cond or jax.lax.while_loop, take sizes from shapes, and name arguments that the function "
    "must know the value of in static=(...)."
)


@dataclass(frozen=True, eq=False)
class Program:
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
    log: CompileLog = field(default_factory=CompileLog)
    serial: int = field(default_factory=itertools.count().__next__, init=False)

    def signature(self, args: tuple[Any, ...], configuration: Configuration) -> Signature:
        """Return what it has to be compiled for.

        Raises:
            TypeError: an argument is neither an array nor static; the message names node, parameter and remedy.
        """
        return signature_of(args, self.static_argnums, configuration, self)

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


def build(program: Program, configuration: Configuration, signature: Signature) -> Executable:
    """Trace, lower and compile: takes milliseconds to minutes.

    Raises:
        OptionsError: a pure program has effects.
        BaseException: whatever the function raises while it is traced, or XLA; a note says at which node.
    """
    try:
        _refuse_coroutines(program)
        with configuration.entered():
            return _build(program, configuration, signature)
    except _NOT_TRACEABLE as error:
        add_note(error, f"{_place(program, signature)}\n{_HOW_TO_TRACE}")
        raise
    except BaseException as error:
        add_note(error, _place(program, signature))
        raise


def _build(program: Program, configuration: Configuration, signature: Signature) -> Executable:
    placement, fn = program.placement, program.fn

    # JAX's caches are keyed on the function, weakly: one of our own takes all of them along when it goes.
    def call(*args: Any) -> Any:
        result = fn(*args)
        placement.shardings(program.out_specs, result, f"the result of node {program.name!r}")  # before JAX refuses it
        return result

    call.__name__ = call.__qualname__ = program.name
    arguments = _abstract_arguments(program, signature)
    names_of_arguments = program.parameters[: len(arguments)]
    if len(set(names_of_arguments)) == len(arguments):
        kind = inspect.Parameter.POSITIONAL_ONLY  # JAX's errors name arguments by it
        call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names_of_arguments])  # type: ignore[attr-defined]
    dynamic = [arg for position, arg in enumerate(arguments) if position not in program.static_argnums]
    options: dict[str, Any] = {}
    if placement.mesh is None or program.out_specs is not None or not jax.tree.leaves(dynamic):
        specs = program.out_specs
        options["out_shardings"] = jax.tree.map(placement.sharding, specs, is_leaf=_is_none)
    jitted: Any = jax.jit(call, donate_argnums=program.donate_argnums, static_argnums=program.static_argnums, **options)
    if placement.mesh is None:
        traced = jitted.trace(*arguments)
    else:
        with jax.set_mesh(placement.mesh):  # so that the function may speak of its axes by PartitionSpec alone
            traced = jitted.trace(*arguments)
    _refuse_effects(program, traced.jaxpr)
    warn_of_constants(program.name, traced, program.log)
    compiled = traced.lower().compile(compiler_options(placement.devices[0].platform))
    names: list[str] = []
    shardings: list[Any] = []
    for position, argument in enumerate(arguments):
        if position not in program.static_argnums:
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
                names.append(program.parameter(position) + jax.tree_util.keystr(path))
                shardings.append(leaf.sharding)
    is_flat = all(len(part) == 3 for position, part in enumerate(signature) if position not in program.static_argnums)
    return Executable(
        compiled, tuple(names), tuple(shardings), program.static_argnums, is_flat,
        ENQUEUE_ORDER.locks(placement.devices),
    )  # fmt: skip


def _abstract_arguments(program: Program, signature: Signature) -> list[Any]:
    """Return what stands for the arguments of a signature while it is traced."""
    arguments: list[Any] = []
    for position, part in enumerate(signature):
        if position in program.static_argnums:
            arguments.append(part[1])
            continue
        is_leaf = len(part) == 3
        tree: Any = part if is_leaf else jax.tree.unflatten(part[0], [_Described(leaf) for leaf in part[1]])
        shaped = _Described(part) if is_leaf else tree
        shardings = program.shardings(position, shaped)
        arguments.append(jax.tree.map(_Described.shaped, shaped, shardings))
    return arguments


def _is_none(value: object) -> bool:
    return value is None


class _Described:
    """A leaf of a signature as a leaf of a pytree, which a tuple is not."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.shape = leaf[0]

    def shaped(self, sharding: Any) -> Any:
        shape, dtype, weak_type = self.leaf
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak_type)


def _refuse_coroutines(program: Program) -> None:
    if inspect.iscoroutinefunction(inspect.unwrap(program.fn)):
        raise TypeError(
            f"node {program.name!r} is an `async def`, and runs on a device: make it a plain function of arrays, and "
            "do what awaits in a @node before or after it"
        )


def _refuse_effects(program: Program, jaxpr: Any) -> None:
    if program.pure and jaxpr.effects:
        effects = ", ".join(sorted({str(effect) for effect in jaxpr.effects}))
        raise OptionsError(
            f"node {program.name!r} is pure, and has the effect {effects}: a pure program may run twice, or in a "
            "batch, or as a part of another. Say @device_node(pure=False), or take the effect out."
        )


def arguments_of(program: Program, signature: Signature) -> str:
    """Return the arguments that a signature is for, as text: "x: float32[4]"."""
    return ", ".join(f"{program.parameter(i)}: {described(part)}" for i, part in enumerate(signature))


def _place(program: Program, signature: Signature) -> str:
    return f"while compiling node {program.name!r} for {program.placement} with ({arguments_of(program, signature)})"
