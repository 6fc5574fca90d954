"""The command line: `python -m penstock devices` shows what there is to compute on."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from . import devices
from ._errors import PenstockError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what stands behind the name of the program; None for those of this process.

    Returns:
        The exit status: 0 if it went well, 1 if not. Wrong arguments exit with 2.
    """
    parser = argparse.ArgumentParser(prog="python -m penstock", description="Graphs of async actors.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_devices(commands.add_parser("devices", help="show the devices of this machine, and what could be better"))
    options = parser.parse_args(arguments)
    try:
        _show_devices(options)
    except PenstockError as error:
        print(f"python -m penstock: {error}", file=sys.stderr)
        return 1
    return 0


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show platforms, devices and memory, cores and limits, whether JAX computes right values, and what could be "
        "better. It starts JAX, which on a GPU reserves memory for a moment."
    )
    parser.add_argument("--benchmark", action="store_true", help="also measure a device, for a few seconds")
    parser.add_argument(
        "--device", metavar="NAME", help='which device to measure: "auto" (if not given), "cpu", "gpu:1"'
    )
    parser.add_argument("--seconds", type=_seconds, metavar="S", help="about how long to measure (5, if not given)")
    parser.add_argument("--json", action="store_true", help="print JSON: an object with `status` and `benchmark`")
    parser.set_defaults(parser=parser)


def _show_devices(options: argparse.Namespace) -> None:
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


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
