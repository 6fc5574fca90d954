"""`python -m penstock items`: the oldest items that a running process has in flight, or its newest failures."""

import argparse
import json
import sys
from contextlib import closing
from dataclasses import asdict
from math import inf
from typing import Final

from ..telemetry.tables import to_text
from .live.protocol import Client
from .live.watch import failures_table, items_table

SUMMARY: Final = "print what a running process has in flight, the oldest items first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "Print the oldest 50 items that a running process has in flight: where each is, whether a node works on it, "
        "for how long it has been seen, its attempt, and the time until its deadline. The process has to open a socket "
        'for that: `with telemetry.expose("PATH"):`.'
    )
    parser.add_argument("path", metavar="PATH", help="the socket that the process has opened")
    parser.add_argument(
        "matching", nargs="?", default="", metavar="TEXT", help="only items whose graph, node, state or key contains it"
    )
    parser.add_argument(
        "--interval-seconds", type=float, default=1.0, metavar="S", help="how long to look, for ages (1, if not given)"
    )
    parser.add_argument("--failures", action="store_true", help="print the newest failures instead")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each item or failure")
    parser.add_argument("--show-keys", action="store_true", help="print keys, and not eight digits for each")
    parser.add_argument("--show-messages", action="store_true", help="print the messages of errors, which hold values")


def run(options: argparse.Namespace) -> int:
    """Look twice, and print what the second look tells; return the exit status."""
    if not 0 <= options.interval_seconds < inf:
        options.parser.error(f"--interval-seconds: '{options.interval_seconds:g}' is no number of seconds")
    told = {name: getattr(options, name) for name in ("show_keys", "show_messages", "matching")}
    try:
        with closing(Client(options.path)) as client:
            client.look()  # ages count from the first look that has seen an item
            client.wait(options.interval_seconds)
            look = client.look(**told)
    except OSError as error:
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return 1
    if options.json:
        for one in look.failures if options.failures else look.items:
            print(json.dumps(asdict(one)))
    else:
        print(to_text(failures_table(look) if options.failures else items_table(look)))
    return 0
