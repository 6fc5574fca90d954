"""Which commands there are, and how one is run.

A command is a module of this folder with the parts of `Command`; to add one, write it and put it into `COMMANDS`.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from .. import __version__
from .._errors import PenstockError
from . import devices, profile, simulate, top
from .arguments import program


class Command(Protocol):
    """What the module of a command has. Its name is that of the command."""

    @property
    def SUMMARY(self) -> str:  # noqa: N802 - a constant of the module
        """What it does, in a line."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments, and describe it."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Run it; returns the exit status."""
        ...


COMMANDS: Final[Sequence[tuple[str, Command]]] = (
    ("profile", profile),
    ("simulate", simulate),
    ("top", top),
    ("devices", devices),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what stands behind the name of the program; None for those of this process.

    Returns:
        The exit status: 0 if it went well, 1 if not. Wrong arguments exit with 2.
    """
    parser = argparse.ArgumentParser(prog=program(), description="Graphs of async actors.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS:
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
