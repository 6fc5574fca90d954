"""The commands of the command line.

A command is a module with `SUMMARY`, a line for `--help`; `add_arguments(parser)`, which declares the arguments and
describes the command; and `run(options)`, which returns the exit status. The module belongs to the floor that it shows.
To add a command, write the module and add its name to `MODULES`.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from .. import __version__
from .._errors import PenstockError
from .arguments import program

MODULES: Final = ("_cli.profile", "studio.top", "studio.items", "studio.studio", "_cli.devices", "_cli.checkpoints",
                 "_cli.runs", "_cli.serve")  # fmt: skip
COMMANDS: Final = {name.rpartition(".")[2]: import_module(f"penstock.{name}") for name in MODULES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the arguments after the name of the program; None for those of this process.

    Returns:
        The exit status: 0 for success, 1 for an error. Wrong arguments exit with 2.
    """
    parser = argparse.ArgumentParser(prog=program(), description="Graphs of async actors.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.SUMMARY)
        command.add_arguments(subparser)
        subparser.set_defaults(parser=subparser, run=command.run)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except PenstockError as error:
        print(f"{program()}: {error}", file=sys.stderr)
        return 1
    return status
