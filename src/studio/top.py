"""`python -m penstock top`: a table of the nodes of a running process, which is kept up to date."""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator
from math import inf
from typing import Final

from .._errors import MissingExtraError
from ..telemetry.tables import to_rich, to_text
from .live.protocol import Client
from .live.watch import LiveSnapshot, look_table

SUMMARY: Final = "show what a running process does, and which node limits it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "Show the nodes of a running process, until it ends or Ctrl-C. The process has to open a socket for that: "
        '`with telemetry.expose("PATH"):`. If the output is not a terminal, a table is printed after each interval.'
    )
    parser.add_argument("path", metavar="PATH", help="the socket that the process has opened")
    parser.add_argument("--once", action="store_true", help="look for one interval, print that, and end")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each interval")
    parser.add_argument(
        "--interval-seconds", type=float, default=1.0, metavar="S", help="how long to look (1, if not given)"
    )


def run(options: argparse.Namespace) -> int:
    """Show the table until the process ends; return the exit status."""
    if not 0 < options.interval_seconds < inf:
        options.parser.error(f"--interval-seconds: '{options.interval_seconds:g}' is no number of seconds above 0")
    is_live = sys.stdout.isatty() and not options.once and not options.json
    if is_live:
        _require_rich()
    try:
        _show(options, is_live=is_live)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # The reader of the output has closed the pipe. Output that is left in the buffer would cause an error message
        # at the end of the interpreter, so it goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _show(options: argparse.Namespace, *, is_live: bool) -> None:
    client = Client(options.path)
    try:
        looks = _looks(client, options.interval_seconds)
        if is_live:
            _keep_showing(looks)
        next(looks)  # skipped, because the first look has no rates yet
        for look in looks:
            print(_line_of(look) if options.json else f"{to_text(look_table(look))}\n", flush=True)
            if options.once:
                break
    finally:
        client.close()


def _looks(client: Client, interval_seconds: float) -> Iterator[LiveSnapshot]:
    while True:
        yield client.look()
        client.wait(interval_seconds)


def _keep_showing(looks: Iterator[LiveSnapshot]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for look in looks:
            live.update(to_rich(look_table(look)), refresh=True)


def _line_of(look: LiveSnapshot) -> str:
    return json.dumps(dataclasses.asdict(look), allow_nan=False)


def _require_rich() -> None:
    try:
        importlib.import_module("rich")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'the live table needs rich: pip install "penstock[rich]"; or look once, with --once', name=error.name
        ) from error
