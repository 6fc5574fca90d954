"""`python -m penstock profile`: run a graph, show what its nodes do, and name the node that limits the graph."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from .. import telemetry
from . import target

SUMMARY: Final = "run a graph, and show what its nodes do and which node limits the graph"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "Run the calls of a graph as a pipeline, or a program. Show what its nodes did, which node limits the graph, "
        "why, and what helps."
    )
    target.add_arguments(parser)
    parser.add_argument("--html", type=Path, metavar="PATH", help="also write a page with the graph and its timeline")
    parser.add_argument("--perfetto", type=Path, metavar="PATH", help="also write a timeline for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print a JSON object with `nodes`, `verdict` and more")


def run(options: argparse.Namespace) -> int:
    """Run the graph and show its profile; return the exit status."""
    profile = target.run_profiled(options)
    # Print before the files are written, so that the profile is not lost if a file cannot be written.
    print(json.dumps(_as_json(profile), indent=2, allow_nan=False) if options.json else profile)
    if options.html is not None:
        profile.to_html(options.html)
    if options.perfetto is not None:
        profile.to_perfetto(options.perfetto)
    return 0


def _as_json(profile: telemetry.Profile) -> dict[str, Any]:
    path = profile.critical_path
    return {
        "elapsed_seconds": profile.elapsed_seconds,
        "nodes": [dataclasses.asdict(node) for node in profile.nodes],
        "verdict": dataclasses.asdict(profile.verdict),
        "critical_path": None if path is None else dataclasses.asdict(path),
    }
