"""Statistics of a node's programs and batches: what `compile_statistics()` and `batch_statistics()` return."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..telemetry.text import printable


@dataclass(frozen=True, slots=True)
class Recompilation:
    """One reason why a node was compiled again, compared with the most similar earlier program.

    Attributes:
        program: number of the program that was compiled again; the first program of the node has 1. One program may
            have several reasons.
        argument: name of the argument, with the path inside it: `batch['tokens']`; empty if no argument is the cause.
        cause: "shape", "dtype", "weak type", "structure", "static value", "resource", "constant", "configuration",
            "function", "eviction".
        before: the text of the cause for the earlier program, such as its shape.
        after: the same for this program.
        remedy: what to change if the compilation was not intended; empty for sizes that the buckets of a `DeviceBatch`
            ask for.
    """

    program: int
    argument: str
    cause: str
    before: str
    after: str
    remedy: str

    def __str__(self) -> str:
        return printable(f"program {self.program}: {self._what}: {self.before} -> {self.after}")

    @property
    def _what(self) -> str:
        return f"{self.cause} of {self.argument}" if self.argument else self.cause


@dataclass(frozen=True, slots=True)
class Transfer:
    """How often an argument was moved for a call, because it was on another device: the cost of a mismatch of nodes.

    Attributes:
        argument: name of the argument, with the path inside it.
        source: the place of the argument before: "cpu:0", or "mesh(data=4) P('data')".
        destination: the place in which the node takes the argument.
        count: how often the argument was moved.
    """

    argument: str
    source: str
    destination: str
    count: int

    def __str__(self) -> str:
        return printable(f"{self.argument}: {self.source} -> {self.destination}, {self.count} times")


@dataclass(frozen=True, slots=True)
class CompileStatistics:
    """How many programs a node has, and the cost of compiling them.

    A program of a region, which the planner made of several nodes, counts for each of these nodes.

    Attributes:
        programs: compiled programs held now.
        hits: calls that found their program compiled.
        misses: calls that waited for a compilation, including a compilation that another call had begun.
        seconds: time spent tracing, lowering and compiling.
        evictions: programs that were dropped because the process held more than `set_program_cache` allows.
        transfers: arguments that were on another device or had another sharding, and were moved for a call.
        directions: the transfers by argument, source and destination; the most frequent first.
        recompilations: why there is more than one program: the last hundred or so reasons.
        evicted: the arguments of the last hundred programs that were dropped, the newest last.
    """

    programs: int
    hits: int
    misses: int
    seconds: float
    evictions: int
    transfers: int
    directions: tuple[Transfer, ...]
    recompilations: tuple[Recompilation, ...]
    evicted: tuple[str, ...] = ()

    @classmethod
    def _total(cls, parts: "Sequence[CompileStatistics]") -> "CompileStatistics":
        """Return the sum of several statistics."""
        columns: list[list[Any]] = [[getattr(part, field.name) for part in parts] for field in fields(cls)]
        totals: list[Any] = [sum(column[1:], start=column[0]) for column in columns]
        return cls(*totals)


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """How large the batches of a node were, and how much of them was padding.

    Attributes:
        batches: batches that ran; failed batches, and the parts in which they ran again, count, too.
        calls: number of calls in the batches.
        rows: all rows, padding included.
        real_elements: elements of the arrays of the calls.
        elements: elements of the arrays of the batches, padding included.
        item_tokens: with a `PackedBatch`, elements along the packed axis that belong to calls.
        tokens: with a `PackedBatch`, elements along the packed axis that were computed, padding included.
    """

    batches: int
    calls: int
    rows: int
    real_elements: int
    elements: int
    item_tokens: int = 0
    tokens: int = 0

    @property
    def fill(self) -> float:
        """Share of the tokens that belong to calls: 0 to 1; 0 without a `PackedBatch`."""
        return self.item_tokens / self.tokens if self.tokens else 0.0

    @property
    def mean_size(self) -> float:
        """Number of calls in a batch, on average; 0 without a batch."""
        return self.calls / self.batches if self.batches else 0.0

    @property
    def padding_share(self) -> float:
        """Share of the elements that were padding, whether rows or lengths were padded: 0 to 1."""
        return 1 - self.real_elements / self.elements if self.elements else 0.0
