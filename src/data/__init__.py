"""Feeds: records in a known order, stages that make batches, a `for` loop that reads values, a benchmark.

Importing this package needs NumPy, and loads no JAX.
"""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

from .._errors import MissingExtraError
from .._public import public as _public

if _find_spec("numpy") is None:
    raise MissingExtraError("penstock.data needs NumPy: pip install 'penstock[data]'")

from .batches import Ragged, collate
from .for_loop import Iterate, iterate
from .placing import to_device
from .records import Record, Records, Source, order
from .stages import (
    BatchingStage,
    FilteringStage,
    MergedStage,
    Packed,
    PassThroughStage,
    ReadStage,
    SplitStage,
    Stage,
    batched,
    filtered,
    merged,
    mix,
    packed,
    prefetched,
    read,
    rebatched,
    shuffled,
    split,
    unbatched,
)

if TYPE_CHECKING:
    from ..advice.feed_benchmark import Benchmark, Comparison, Environment, Run, Spread, benchmark

__all__ = [
    "BatchingStage", "Benchmark", "Comparison", "Environment", "FilteringStage", "Iterate", "MergedStage", "Packed",
    "PassThroughStage", "Ragged", "ReadStage", "Record", "Records", "Run", "Source", "SplitStage", "Spread", "Stage",
    "batched", "benchmark", "collate", "filtered", "iterate", "merged", "mix", "order", "packed", "prefetched", "read",
    "rebatched", "shuffled", "split", "to_device", "unbatched",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = _public(
        __name__,
        {
            "..advice.feed_benchmark": "Benchmark Comparison Environment Run Spread benchmark",
        },
    )
