"""Finds the constants that a program has captured from a closure, where they should have been arguments."""

from collections.abc import Iterator
from typing import Any, Final

from ...telemetry import logs
from .compile_log import CompileLog

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
