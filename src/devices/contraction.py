"""Contraction: one einsum, or several einsums that read each other, computed in an order that costs little."""

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, TypeAlias

import opt_einsum  # pyright: ignore[reportMissingTypeStubs]
from opt_einsum.parser import get_symbol  # pyright: ignore[reportMissingTypeStubs]

from .untyped_jax import jax

_ELLIPSIS = "..."


@dataclass(frozen=True)
class Subscripts:
    """The subscripts of an einsum, as NumPy writes them.

    Attributes:
        inputs: the indices of each operand, with "..." for axes without an index.
        output: the indices of the result, in their order.
    """

    inputs: tuple[str, ...]
    output: str

    @classmethod
    def parse(cls, text: str, operands: int) -> "Subscripts":
        """Read subscripts. Without "->", the result has the indices that occur once, in alphabetical order.

        Args:
            text: the subscripts.
            operands: the number of operands.

        Raises:
            ValueError: the subscripts are malformed, or are for another number of operands.
        """
        given, arrow, output = text.replace(" ", "").partition("->")
        inputs = tuple(given.split(","))
        for term in (*inputs, output):
            _check_term(term, text)
        if len(inputs) != operands:
            raise ValueError(
                f"einsum({text!r}): the subscripts are for {_counted(len(inputs))}, and {_counted(operands)} given"
            )  # fmt: skip
        if not arrow:
            occurrences = Counter("".join(inputs).replace(_ELLIPSIS, ""))
            once = "".join(sorted(index for index, times in occurrences.items() if times == 1))
            output = _ELLIPSIS * (_ELLIPSIS in given) + once
        _check_output(inputs, output, text)
        return cls(inputs, output)

    def __str__(self) -> str:
        return f"{','.join(self.inputs)}->{self.output}"


def _check_term(term: str, text: str) -> None:
    indices = term.replace(_ELLIPSIS, "", 1)
    if indices and not (indices.isalpha() and indices.isascii()):
        wrong = next(one for one in indices if not (one.isalpha() and one.isascii()))
        raise ValueError(
            f"einsum({text!r}): {wrong!r} in {term!r} is no index: write a letter for each axis, a comma between "
            'operands, "..." at most once in each for further axes, and "->" before the indices of the result'
        )


def _check_output(inputs: tuple[str, ...], output: str, text: str) -> None:
    for index, times in Counter(output.replace(_ELLIPSIS, "")).items():
        if times > 1:
            raise ValueError(f"einsum({text!r}): the result has the index {index!r} twice")
        if not any(index in term for term in inputs):
            raise ValueError(f"einsum({text!r}): the result has the index {index!r}, and no operand has it")
    if _ELLIPSIS in output and not any(_ELLIPSIS in term for term in inputs):
        raise ValueError(f'einsum({text!r}): the result has "...", and no operand has it')


def _counted(count: int) -> str:
    return f"{count} operand{'s' * (count != 1)}"


_Shape: TypeAlias = tuple[int, ...]
_Labels: TypeAlias = tuple[int, ...]
_Path: TypeAlias = list[tuple[int, ...]]


@dataclass(frozen=True)
class Contraction:
    """An einsum as a function of its operands, some of which may be einsums themselves.

    Nested einsums are one sum over many operands, computed in the order that opt_einsum finds. XLA would compute
    products in the order in which they are written: `(A @ A) @ v` costs 250 times as much as `A @ (A @ v)` at a size of
    500. The written order is kept if the found order costs more operations or larger intermediate values. It is also
    kept if one sum would give another result: dtypes that differ are converted at each step, and an axis of length 1
    that is broadcast has another length in the next step.

    Attributes:
        subscripts: the subscripts of the outermost einsum.
        inner: for each operand the einsum that computes it; None for an operand that is passed.
    """

    subscripts: Subscripts
    inner: "tuple[Contraction | None, ...]"

    @property
    def __name__(self) -> str:
        return f"einsum {self.subscripts}"

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [f"operand_{number + 1}" for number in range(len(self.inner))]
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, *arrays: Any) -> Any:
        """Compute the einsum from the operands of the innermost einsums, in the order from left to right.

        Raises:
            ValueError: shapes do not fit the subscripts.
        """
        operands = [jax.numpy.asarray(array) for array in arrays]
        shapes: list[_Shape] = [operand.shape for operand in operands]
        written = self._written(iter(shapes))
        dtypes = {operand.dtype for operand in operands}
        if any(self.inner) and written.cost is not None and len(dtypes) == 1 and jax.numpy.bool_ not in dtypes:
            path = _path(self._merged, shapes, written.cost, written.largest)
            if path is not None:
                return jax.numpy.einsum(self._merged, *operands, optimize=path)
        return self._as_written(iter(operands))

    @cached_property
    def _merged(self) -> str:
        """The subscripts of all einsums as one sum."""
        fresh = count()
        output = tuple([next(fresh) for _ in self.subscripts.output])
        terms = ["".join(map(get_symbol, term)) for term in self._terms(output, fresh)]
        return f"{','.join(terms)}->{''.join(map(get_symbol, output))}"

    def _terms(self, output: _Labels, fresh: Iterator[int]) -> Iterator[_Labels]:
        """Yield the indices of each operand that is passed, for a result with the indices `output`."""
        labels = dict(zip(self.subscripts.output, output, strict=True))
        for term, inner in zip(self.subscripts.inputs, self.inner, strict=True):
            for index in term:
                if index not in labels:
                    labels[index] = next(fresh)
            outside = tuple([labels[index] for index in term])
            if inner is None:
                yield outside
            else:
                yield from inner._terms(outside, fresh)

    def _as_written(self, operands: Iterator[Any]) -> Any:
        own = [next(operands) if inner is None else inner._as_written(operands) for inner in self.inner]
        return jax.numpy.einsum(str(self.subscripts), *own)

    def _written(self, shapes: Iterator[_Shape]) -> "_Written":
        """Return the shape of the result, and the cost of computing the einsums one after the other."""
        own = [_Written(next(shapes)) if inner is None else inner._written(shapes) for inner in self.inner]
        own_shapes = [one.shape for one in own]
        has_ellipsis = any(_ELLIPSIS in term for term in self.subscripts.inputs)
        if has_ellipsis or any(shape is None for shape in own_shapes):
            return _Written(None, None)
        sizes = self._sizes([shape for shape in own_shapes if shape is not None])
        shape = tuple([max(sizes[index]) for index in self.subscripts.output])
        if any(one.cost is None for one in own) or any(len(found) > 1 for found in sizes.values()):
            return _Written(shape, None)
        _, found = _search(str(self.subscripts), own_shapes)
        cost = sum([one.cost or 0 for one in own], float(found.opt_cost))
        largest = max([int(found.largest_intermediate), math.prod(shape), *[one.largest for one in own]])
        return _Written(shape, cost, largest)

    def _sizes(self, shapes: Sequence[_Shape]) -> dict[str, set[int]]:
        """Return the lengths of the axes that have each index: one length, and also 1 if an axis is broadcast."""
        sizes: dict[str, set[int]] = {}
        problem = ""
        for number, (term, shape) in enumerate(zip(self.subscripts.inputs, shapes, strict=True), 1):
            if len(term) != len(shape):
                problem = f"operand {number} has {len(shape)} axes, and {term!r} names {len(term)}"
                break
            own: dict[str, int] = {}
            for index, size in zip(term, shape, strict=True):
                sizes.setdefault(index, set()).add(size)
                if own.setdefault(index, size) != size:  # an index twice is a diagonal; JAX would broadcast length 1
                    problem = f"index {index!r} has the lengths {own[index]} and {size} in operand {number}"
        for index, found in sizes.items():
            if len(found - {1}) > 1:
                problem = problem or f"index {index!r} has the lengths {' and '.join(map(str, sorted(found)))}"
        if problem:
            shown = ", ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"einsum {self.subscripts}: {problem}; the operands have the shapes {shown}")
        return sizes


@dataclass(frozen=True)
class _Written:
    """The result of an einsum in the written order.

    Attributes:
        shape: the shape of the result; None if it is not known, because axes have no index.
        cost: number of operations, by opt_einsum's count; None if the einsum is not a plain sum of products.
        largest: number of elements of the largest array that is needed.
    """

    shape: _Shape | None
    cost: float | None = 0
    largest: int = 0


def _search(subscripts: str, shapes: Sequence[Any], largest: int | None = None) -> tuple[_Path, Any]:
    found: Any = opt_einsum.contract_path(subscripts, *shapes, shapes=True, memory_limit=largest)
    path, about = found
    return path, about


def _path(subscripts: str, shapes: Sequence[_Shape], cost: float, largest: int) -> _Path | None:
    """Return an order that needs no more operations and no larger intermediate values; None if none was found."""
    path, found = _search(subscripts, shapes, largest)
    # If no order stays below the limit, opt_einsum joins all remaining operands in one step, which JAX cannot compute.
    is_binary = all(len(step) <= 2 for step in path)
    return path if is_binary and found.opt_cost <= cost else None
