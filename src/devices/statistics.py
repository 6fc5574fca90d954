"""Statistics of a node's programs and batches: what `compile_statistics()` and `batch_statistics()` return."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..telemetry.text import printable


@dataclass(frozen=True, slots=True)
class Recompilation:
    """One reason why a node was compiled again, compared with the most similar earlier program.

    Attributes:
        program: number of the program that this explains; the first one of the node has 1. One program may have several
            reasons.
        argument: name of the argument, with the path inside it: `batch['tokens']`; empty if it is not the cause.
        cause: "shape", "dtype", "weak type", "structure", "static value", "resource", "constant", "configuration",
            "function", "eviction".
        before: what the earlier program was compiled for.
        after: what this one was compiled for.
        remedy: what to change if this was not intended; empty for sizes that the buckets of a `DeviceBatch` ask for.
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
    """How often an argument was moved for a call, because it was elsewhere: the cost of a mismatch between two nodes.

    Attributes:
        argument: name of the argument, with the path inside it.
        source: where it was: "cpu:0", or "mesh(data=4) P('data')".
        destination: where the node takes it.
        count: how often it was moved.
    """

    argument: str
    source: str
    destination: str
    count: int

    def __str__(self) -> str:
        return printable(f"{self.argument}: {self.source} -> {self.destination}, {self.count} times")


@dataclass(frozen=True, slots=True)
class CompileStatistics:
    """How many programs a node has, and what they have cost.

    A program that a node shares with others, because the planner made one region of them, counts for each of them.

    Attributes:
        programs: compiled programs held now.
        hits: calls that found their program compiled.
        misses: calls that waited for a compilation, also one that another call had begun.
        seconds: time spent tracing, lowering and compiling.
        evictions: programs dropped because the process held too many; `set_program_cache` says how many are too many.
        transfers: arguments that were on another device or had another sharding, and were moved for a call.
        directions: those transfers by argument, source and destination; the most frequent first.
        recompilations: why there is more than one program, the last hundred or so reasons.
        evicted: the arguments that the programs were for that were dropped, the last hundred, the newest last.
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
        batches: batches that ran; those that failed and the parts in which they ran again count, too.
        calls: rows that stood for calls.
        rows: all rows, with those of padding.
        real_elements: elements of the arrays of the calls.
        elements: elements of the arrays of the batches, with those of padding.
        item_tokens: of a `PackedBatch`: elements along the packed axis that belong to calls.
        tokens: of a `PackedBatch`: elements along the packed axis that were computed, with those of padding.
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
        """Calls in a batch, on average; 0 without a batch."""
        return self.calls / self.batches if self.batches else 0.0

    @property
    def padding_share(self) -> float:
        """Share of the elements that were padding, of rows or of lengths: 0 to 1."""
        return 1 - self.real_elements / self.elements if self.elements else 0.0
