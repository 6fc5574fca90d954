"""The device that is measured: what `select("auto")` gives, or what PENSTOCK_BENCH_DEVICE names."""

import os

DEVICE = os.environ.get("PENSTOCK_BENCH_DEVICE", "auto")
