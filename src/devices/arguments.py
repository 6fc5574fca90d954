"""What callers pass to a device node, and how that becomes the arguments of its program."""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast

import numpy as np

from ..engine.tracing.annotations import signature_of
from .compile_key import current, is_device_array, not_on_device, static_part
from .device_batch import DeviceBatch
from .stacking import BatchItem, Stacked, Stacker, mask_parameters
from .untyped_jax import jax


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters; none where they are not known."""
    try:
        return tuple(signature_of(fn).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return ()


_UNSUPPORTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Arguments:
    """Puts the arguments of a call in the order of the parameters, and those of a batched node aside for stacking.

    Args:
        name: of the node, for errors.
        fn: its function.
        static: parameters whose values the program is compiled for.
        resources: parameters whose arguments come from resources.
        shared: other parameters whose arguments are the same for all calls of a batch.
        batch: how calls run together; None for one by one.

    Attributes:
        name: of the node.
        names: the parameters that callers pass.
        masks: the parameters that take the masks of padded ones.
        shared: positions of what is the same for all calls of a batch, parameters and static arguments included.
        stacked: positions of the others.
        parameters: positions of those that come from resources, and are arrays.
        static: positions of those that are static.

    Raises:
        TypeError: the function has parameters of a kind that no program has, or an option names one that it has not.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        static: tuple[str, ...],
        resources: frozenset[str],
        shared: frozenset[str],
        batch: DeviceBatch | None,
    ) -> None:
        self.name = name
        self._signature = signature_of(fn)
        found = self._signature.parameters
        _check_names(name, found, static=static, shared=shared)
        _check_shared(name, shared, static, batch)
        self.masks = () if batch is None else tuple(mask_parameters(self._signature, batch.pad_axes, name).values())
        self.names = tuple(one for one in found if one not in self.masks)
        self.static = tuple(i for i, one in enumerate(self.names) if one in static)
        self.parameters = tuple(i for i, one in enumerate(self.names) if one in resources and one not in static)
        self.shared = tuple(i for i, one in enumerate(self.names) if one in shared or one in resources or one in static)
        self.stacked = tuple(i for i in range(len(self.names)) if i not in self.shared)
        self._shared_of, self._stacked_of = _picker(self.shared), _picker(self.stacked)
        self._by_keyword = tuple(
            i for i, one in enumerate(self.names) if found[one].kind is inspect.Parameter.KEYWORD_ONLY
        )
        self.stacker = None
        if batch is not None:
            if self.names and {*self.names} <= {*static, *shared}:
                raise TypeError(
                    f"device node {name!r} has batch=, and all of its parameters are named in shared= or static=: "
                    "leave out the one that differs from call to call"
                )
            self.stacker = Stacker(name, [self.names[i] for i in self.stacked], batch)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return one argument for each parameter, in their order."""
        if len(args) == len(self.names) and not kwargs:
            return args
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple([bound.arguments[name] for name in self.names])

    def merge(self, sample: tuple[Any, ...], resources: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return one argument for each parameter: those of a sample, and those that come from resources.

        Raises:
            TypeError: the sample has too many arguments, or too few.
        """
        bound = self._signature.bind_partial(**resources)
        rest = [name for name in self.names if name not in bound.arguments]
        bound.arguments.update(zip(rest, sample, strict=False))
        bound.apply_defaults()
        missing = [name for name in self.names if name not in bound.arguments]
        if missing or len(sample) > len(rest):
            raise TypeError(
                f"a sample of device node {self.name!r} has {len(sample)} arguments, and the parameters that do not "
                f"come from resources are {', '.join(rest)}"
            )
        return tuple([bound.arguments[name] for name in self.names])

    def item(self, values: tuple[Any, ...]) -> tuple[BatchItem, Hashable]:
        """Return the arguments of one call of a batched node, and its group: calls of one group may run together.

        Raises:
            TypeError: an argument cannot be stacked.
            ValueError: an argument is too long.
        """
        assert self.stacker is not None
        shared = self._shared_of(values)
        item = self.stacker.item(self._stacked_of(values), current(), shared)
        # No two versions of what is shared are mixed in a batch: they are told apart as objects.
        versions: Iterable[Any] = map(id, shared)
        if len(self.shared) > len(self.parameters):
            versions = [self._version(i, value) for i, value in zip(self.shared, shared, strict=True)]
        return item, (item.signature, *versions)

    def stack(self, items: Sequence[BatchItem], size: int) -> Stacked:
        """Stack items of one group, whose arrays are on the host, to so many rows."""
        assert self.stacker is not None
        return self.stacker.stack(items, size)

    def of_batch(self, stacked: Stacked, shared: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the vectorised program: stacked ones, those of all calls, and masks."""
        args: list[Any] = [None] * len(self.names)
        for position, argument in zip(self.stacked, stacked.arguments, strict=True):
            args[position] = argument
        for position, argument in zip(self.shared, shared, strict=True):
            args[position] = argument
        return (*args, *stacked.masks)

    def _version(self, position: int, value: Any) -> Any:
        """Return the part of a group that is for a shared argument."""
        if position in self.static:
            return static_part(value, self, position)
        if position in self.parameters:
            return id(value)
        # A list or dictionary may be a new one for each call, of the same arrays.
        leaves, structure = jax.tree.flatten(value)
        return (structure, *map(id, leaves))

    def parameter(self, position: int) -> str:
        """Return the name of a parameter."""
        return self.names[position]

    def positions(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the positions of parameters."""
        return tuple(sorted(self.names.index(name) for name in names))

    def size_bytes(self, values: tuple[Any, ...]) -> int:
        """Return the bytes of the arrays among the arguments that lie on no device yet."""
        return size_on_host(self._stacked_of(values))

    def call(self, fn: Callable[..., Any], values: tuple[Any, ...], masks: tuple[Any, ...] = ()) -> Any:
        """Call the function with arguments in the order of the parameters."""
        if not self._by_keyword and not masks:
            return fn(*values)
        by_name = dict(zip(self.masks, masks, strict=False))
        by_name.update({self.names[i]: values[i] for i in self._by_keyword})
        return fn(*[value for i, value in enumerate(values) if i not in self._by_keyword], **by_name)


def _picker(positions: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the values at these positions; it is called for each item of a batch."""
    if not positions:
        return lambda values: ()
    if len(positions) == 1:
        (only,) = positions
        return lambda values: (values[only],)
    return cast("Callable[[tuple[Any, ...]], tuple[Any, ...]]", itemgetter(*positions))


def size_on_host(values: tuple[Any, ...]) -> int:
    """Return the bytes of the arrays in pytrees that lie on no device yet, and have to be transferred."""
    on_host = not_on_device(jax.tree.leaves(values))
    return sum([getattr(leaf, "nbytes", 0) for leaf in on_host]) if on_host else 0


def _check_shared(name: str, shared: frozenset[str], static: tuple[str, ...], batch: DeviceBatch | None) -> None:
    padded = () if batch is None else batch.pad_axes
    for option, others in (("static", static), ("batch=DeviceBatch(pad_axes=...)", padded)):
        for one in shared & {*others}:
            raise TypeError(
                f"device node {name!r}: {one!r} is in shared= and in {option}: what all calls of a batch share is "
                "neither compiled in nor padded, so name it in one of them"
            )


def holds_array(value: object) -> bool:
    """Return whether a pytree holds an array, and not numbers only."""
    return any(isinstance(leaf, np.ndarray) or is_device_array(leaf) for leaf in jax.tree.leaves(value))


def _check_names(name: str, found: "dict[str, inspect.Parameter] | Any", **options: Iterable[str]) -> None:
    for one in found.values():
        if one.kind in _UNSUPPORTED:
            raise TypeError(
                f"device node {name!r}: the parameter {one} has no place in a program; give each one a name"
            )
    for option, names in options.items():
        for one in names:
            if one not in found:
                raise TypeError(
                    f"device node {name!r}: {option}={one!r} is no parameter of it; it has {', '.join(found)}"
                )
