"""Checks that the parameters of a device node fit its options."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.tracing.annotations import signature_of
from .device_batch import DeviceBatch, PackedBatch

_PASSED_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TAKEN_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_UNSUPPORTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class DeviceOptions:
    """The options of a device node; see `device_node`."""

    device: Any = "auto"
    batch: DeviceBatch | PackedBatch | None = None
    static: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    donate: bool = False
    pure: bool = True
    fuse: bool = True
    in_specs: Any = None
    out_specs: Any = None
    replicas: int = 1
    prefetch: int = 2
    sample_input: tuple[tuple[Any, ...], ...] = ()


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a function; an empty tuple if they are not known."""
    try:
        return tuple(signature_of(fn).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return ()


def check_names(name: str, found: Mapping[str, inspect.Parameter], **options: Iterable[str]) -> None:
    """Check that a program can have all of the parameters, and that options name existing parameters.

    Args:
        name: name of the node, for errors.
        found: the parameters of the node's function.
        options: by option, the names of parameters that were passed.

    Raises:
        TypeError: there is `*args` or `**kwargs`, or an option names no parameter.
    """
    for parameter in found.values():
        if parameter.kind in _UNSUPPORTED:
            raise TypeError(
                f"device node {name!r}: the parameter {parameter} has no place in a program; give each argument a name"
            )
    for option, names in options.items():
        for one in names:
            if one not in found:
                raise TypeError(
                    f"device node {name!r}: {option}={one!r} is no parameter of it; it has {', '.join(found)}"
                )


def check_shared(
    name: str, shared: frozenset[str], static: tuple[str, ...], batch: DeviceBatch | PackedBatch | None
) -> None:
    """Check that no parameter is named both in `shared=` and in an option that excludes `shared=`.

    Raises:
        TypeError: a parameter is named in both.
    """
    padded = batch.pad_axes if isinstance(batch, DeviceBatch) else ()
    for option, others in (("static", static), ("batch=DeviceBatch(pad_axes=...)", padded)):
        for one in shared & {*others}:
            raise TypeError(
                f"device node {name!r}: {one!r} is in shared= and in {option}: an argument that all calls of a batch "
                "share is neither compiled in nor padded, so name the parameter in one of the two options"
            )


def made_by_batches(
    signature: inspect.Signature, batch: DeviceBatch | PackedBatch | None, node: str
) -> tuple[str, ...]:
    """Return the parameters whose arguments batches make, so that no call passes them.

    Raises:
        TypeError: the function does not take the arguments, or takes them in another way.
    """
    if isinstance(batch, PackedBatch):
        return row_parameters(signature, node)
    return () if batch is None else tuple(mask_parameters(signature, batch.pad_axes, node).values())


def mask_parameters(signature: inspect.Signature, padded: Iterable[str], node: str) -> dict[str, str]:
    """Find the parameters that take the masks.

    The mask of `tokens` is `tokens_mask`, or `mask` if no other parameter is padded.

    Args:
        signature: the signature of the function.
        padded: names of the padded parameters, the keys of `DeviceBatch(pad_axes=...)`.
        node: name of the node, for errors.

    Returns:
        For each padded parameter, in order, the name of the parameter that takes its mask.

    Raises:
        TypeError: a padded name is not a parameter, or the function has no parameter for its mask.
    """
    names = list(padded)
    parameters = signature.parameters
    found: dict[str, str] = {}
    for name in names:
        if name not in parameters or parameters[name].kind not in _PASSED_BY_POSITION:
            raise TypeError(
                f"node {node!r} has pad_axes={{{name!r}: ...}}, but no such parameter; it has {', '.join(parameters)}"
            )
        wanted = [f"{name}_mask", *(["mask"] if len(names) == 1 else [])]
        mask = next((one for one in wanted if one in parameters and one not in names), None)
        if mask is None:
            raise TypeError(
                f"node {node!r} pads {name!r}, so the function has to tell padding from elements: add the parameter "
                f"{' or '.join(f'{one}=None' for one in wanted)}, an array of bool, True where an element is real"
            )
        found[name] = mask
    _check_masks(parameters, {*found.values()}, node)
    return found


def row_parameters(signature: inspect.Signature, node: str) -> tuple[str, ...]:
    """Return the parameters that tell the items of a row apart: `segments`, and `positions` if the function has it.

    Raises:
        TypeError: the function does not take `segments`, or takes one of the two in another way.
    """
    parameters = signature.parameters
    found = tuple(name for name in ("segments", "positions") if name in parameters)
    if "segments" not in found:
        raise TypeError(
            f"node {node!r} has batch=PackedBatch(...), so its function has to tell the items of a row apart: add the "
            "parameter segments=None, an array of int32 [rows, length], 0 where a row is padding"
        )
    _check_masks(parameters, {*found}, node)
    return found


def _check_masks(parameters: Mapping[str, inspect.Parameter], masks: set[str], node: str) -> None:
    """Refuse mask parameters that a caller could pass by position, or has to pass.

    Raises:
        TypeError: a mask parameter can be passed by position or has no default, or stands before a caller's parameter.
    """
    first: str | None = None
    for name, parameter in parameters.items():
        if name in masks:
            first = first or name
            if parameter.default is not None or parameter.kind not in _TAKEN_BY_KEYWORD:
                raise TypeError(
                    f"node {node!r}: the parameter {name!r} is passed by keyword in a batch and left out otherwise: "
                    f"make it {name}=None"
                )
        elif first is not None and parameter.kind in (*_PASSED_BY_POSITION, inspect.Parameter.VAR_POSITIONAL):
            raise TypeError(f"node {node!r}: move the parameter {first!r} behind {name!r}, which callers pass")
