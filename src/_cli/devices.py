"""`python -m penstock devices`: show the devices of this machine, and what JAX needs to use them well."""

import argparse
import dataclasses
import json
from typing import Final

from .. import devices
from .arguments import seconds

SUMMARY: Final = "show the devices of this machine, and what could be better"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "Show platforms, devices and memory, cores and limits, whether JAX computes right values, and what could be "
        "better. The command starts JAX, which on a GPU reserves memory for a moment."
    )
    parser.add_argument("--benchmark", action="store_true", help="also measure a device, for a few seconds")
    parser.add_argument(
        "--device", metavar="NAME", help='which device to measure: "auto" (if not given), "cpu", "gpu:1"'
    )
    parser.add_argument("--seconds", type=seconds, metavar="S", help="about how long to measure (5, if not given)")
    parser.add_argument("--json", action="store_true", help="print a JSON object with `status` and `benchmark`")


def run(options: argparse.Namespace) -> int:
    """Show the devices; return the exit status."""
    if not options.benchmark and (options.device or options.seconds):
        options.parser.error("--device and --seconds say what to measure, and need --benchmark")
    status = devices.status()
    measured = None
    if options.benchmark:
        measured = devices.benchmark(options.device or "auto", seconds=options.seconds or 5.0)
    if options.json:
        shown = {
            "status": dataclasses.asdict(status),
            "benchmark": None if measured is None else dataclasses.asdict(measured),
        }
        print(json.dumps(shown, indent=2, allow_nan=False))
    else:
        print(status)
        if measured is not None:
            print(f"\n{measured}")
    return 0
