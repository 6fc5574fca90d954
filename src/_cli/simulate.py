"""`python -m penstock simulate`: run a graph, and predict the throughput after a change of one node."""

import argparse
import dataclasses
import json
from typing import Final

from . import target
from .arguments import count, factor, refuse

SUMMARY: Final = "run a graph, and say how much faster it gets if a node changes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "Run the calls of a graph as a pipeline, or a program, and predict how many items a second it would handle if "
        "one of its nodes were faster, or had more places. Nothing is changed, and nothing is run twice."
    )
    target.add_arguments(parser)
    parser.add_argument("--node", required=True, metavar="NAME", help="the node that changes, as drawn")
    parser.add_argument("--graph", metavar="NAME", help="the graph of the node, if several have a node of that name")
    parser.add_argument("--speedup", type=factor, default=1.0, metavar="X", help="the node becomes X times as fast")
    parser.add_argument("--concurrency", type=count, metavar="N", help="the node handles N items at a time")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the graph and show the prediction; return the exit status."""
    if options.speedup == 1 and options.concurrency is None:
        refuse(options, "say what changes: --speedup or --concurrency")
    profile = target.run_profiled(options)
    try:
        prediction = profile.what_if(
            options.node, graph=options.graph, speedup=options.speedup, concurrency=options.concurrency
        )
    except ValueError as error:
        refuse(options, str(error))
    if options.json:
        print(json.dumps(dataclasses.asdict(prediction), indent=2, allow_nan=False))
    else:
        print(prediction)
    return 0
