"""Masks: how a function learns which elements of a padded argument are real."""

import inspect
from collections.abc import Iterable

_PASSED_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TAKEN_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def mask_parameters(signature: inspect.Signature, padded: Iterable[str], node: str) -> dict[str, str]:
    """Find the parameters that take the masks.

    The mask of `tokens` is `tokens_mask`, or `mask` if no other parameter is padded.

    Args:
        signature: of the function.
        padded: names of the padded parameters, the keys of `Batch(pad_axes=...)`.
        node: its name, for errors.

    Returns:
        For each padded parameter the name of the one that takes its mask, in the order of the padded ones.

    Raises:
        TypeError: a name is not that of a parameter, or the function has none for the mask.
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
                f"node {node!r} pads {name!r}, so it has to tell padding from elements: add the parameter "
                f"{' or '.join(f'{one}=None' for one in wanted)}, an array of bool, True where an element is real"
            )
        found[name] = mask
    for mask in found.values():
        _check_mask(parameters[mask], node)
    _check_order(signature, set(found.values()), node)
    return found


def _check_mask(mask: inspect.Parameter, node: str) -> None:
    if mask.default is not None or mask.kind not in _TAKEN_BY_KEYWORD:
        raise TypeError(
            f"node {node!r}: the parameter {mask.name!r} is passed by keyword in a batch and left out otherwise: make "
            f"it {mask.name}=None"
        )


def _check_order(signature: inspect.Signature, masks: set[str], node: str) -> None:
    first: str | None = None
    for name, parameter in signature.parameters.items():
        if name in masks:
            first = first or name
        elif first is not None and parameter.kind in (*_PASSED_BY_POSITION, inspect.Parameter.VAR_POSITIONAL):
            raise TypeError(f"node {node!r}: move the parameter {first!r} behind {name!r}, which callers pass")
