"""The device that is measured: what `select("auto")` gives, or what PENSTOCK_BENCH_DEVICE names."""

import os

DEVICE = os.environ.get("PENSTOCK_BENCH_DEVICE", "auto")
# How often arithmetic is repeated that takes milliseconds on two cores: a GPU does it in a fortieth of that time.
REPEATS = 40 if DEVICE.startswith("gpu") else 1
