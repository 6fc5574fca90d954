"""Execution: one run of a node for one item, as a profile takes it."""

from typing import TypeAlias

# When it began and ended, with all its attempts, in seconds of `time.perf_counter`; a number that stands for the item
# on its whole way through a graph, and its index in its stream, deployment or `map_each`, both None if unknown.
# A plain tuple: to make anything else takes longer than all else that is done for an execution.
Execution: TypeAlias = tuple[float, float, int | None, int | None]
