"""Subscripts of an einsum: "ij,jk->ik"."""

from collections import Counter
from dataclasses import dataclass

_ELLIPSIS = "..."


@dataclass(frozen=True)
class Subscripts:
    """What an einsum sums over, as NumPy writes it.

    Attributes:
        inputs: for each operand its indices, with "..." for axes that have none.
        output: the indices of the result, in their order.
    """

    inputs: tuple[str, ...]
    output: str

    @classmethod
    def parse(cls, text: str, operands: int) -> "Subscripts":
        """Read subscripts; without "->", the result has the indices that occur once, in alphabetical order.

        Args:
            text: the subscripts.
            operands: how many there are.

        Raises:
            ValueError: they are malformed, or are for another number of operands.
        """
        given, arrow, output = text.replace(" ", "").partition("->")
        inputs = tuple(given.split(","))
        for term in (*inputs, output):
            _check_term(term, text)
        if len(inputs) != operands:
            raise ValueError(
                f"einsum({text!r}): it is for {_counted(len(inputs))}, and {_counted(operands)} given"
            )  # fmt: skip
        if not arrow:
            occurrences = Counter("".join(inputs).replace(_ELLIPSIS, ""))
            once = "".join(sorted(index for index, times in occurrences.items() if times == 1))
            output = _ELLIPSIS * (_ELLIPSIS in given) + once
        _check_output(inputs, output, text)
        return cls(inputs, output)

    @property
    def has_ellipsis(self) -> bool:
        """Whether some axes have no index."""
        return any(_ELLIPSIS in term for term in self.inputs)

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
