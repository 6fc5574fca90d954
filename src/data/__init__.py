"""Feeds: how fast one gives examples and batches, measured.

Importing this loads no JAX.
"""

from typing import TYPE_CHECKING

from .._public import public as _public

__all__ = ["Benchmark", "Comparison", "Environment", "Run", "Spread", "benchmark"]

if TYPE_CHECKING:
    from .benchmarking import Benchmark, Comparison, Environment, Run, Spread, benchmark
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            "Benchmark": ".benchmarking",
            "Comparison": ".benchmarking",
            "Environment": ".benchmarking",
            "Run": ".benchmarking",
            "Spread": ".benchmarking",
            "benchmark": ".benchmarking",
        },
    )
