"""Says why a node was compiled again: what differs from the most similar program that it had before."""

import inspect
from collections.abc import Callable, Hashable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...telemetry import logs
from ..untyped_jax import jax
from .compile_statistics import Recompilation

if TYPE_CHECKING:
    from .compiling import Program
    from .configuration import Configuration
    from .signature import Leaf, Signature

# Powers of two from 1 to 128 are eight sizes: more than that is not a handful of sizes any more, and each has cost a
# compilation (300 random sizes: 183 programs and 12 s without buckets, 9 and 0.6 s with them).
MANY_SHAPES: Final = 8

_SAME_SHAPE: Final = "pass arrays of the same shape"
_REMEDIES: Final = {
    "shape": f"{_SAME_SHAPE}, or of a few; a device node with batch=ps.Batch(buckets=...), and pad_axes= for ragged "
    "axes, bounds their number",
    "dtype": "convert the argument to one dtype before the node",
    "weak type": "pass an array with a dtype instead of a Python number, or always the number",
    "structure": "pass the same structure each time; None in the place of an array is another structure",
    "static value": "take the argument out of static=(...) if the function can compute with it as an array",
    "resource": "a batch has a row for each item of what callers pass, and of what a resource gives there is one for "
    "all, which are two programs: let the argument come from a @resource wherever the node is called, or nowhere",
    "configuration": "set JAX's configuration once, before the first call",
    "function": "define the function once, outside of the loop or method that passes it: each object is compiled",
    "eviction": "the process needs more programs than the cache keeps: bound the shapes of the nodes that have most",
}


class Compiled:
    """What is remembered of a program for explanations: no arrays, and not the function."""

    def __init__(self, program: "Program", configuration: "Configuration", signature: "Signature") -> None:
        # Programs of one node that are meant to be several, one per placement or batched and not, are not compared.
        self.family = (
            program.placement,
            program.donate_argnums,
            program.static_argnums,
            getattr(program.fn, "__code__", type(program.fn)),
            getattr(inspect.unwrap(program.fn), "__code__", None),
        )
        self.serial = program.serial
        self.origin = origin_of(program.fn)
        self.parameter = program.parameter
        self.static_argnums = program.static_argnums
        self.configuration = configuration
        self.signature = signature
        self.bucketed = program.bucketed


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
        texts = ["passed by callers" if one.bucketed[position] else "from a resource" for one in (before, after)]
        found.append(_difference(after.parameter(position), "resource", *texts))
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
    """Return what bounds the shapes of an argument; nothing if its buckets do already."""
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
