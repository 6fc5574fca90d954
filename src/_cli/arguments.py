"""Kinds of arguments that commands share."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn


def program() -> str:
    """Return the beginning of the command line: the name of the script, or of the module."""
    return "penstock" if Path(sys.argv[0]).name == "penstock" else "python -m penstock"


def seconds(text: str) -> float:
    """Parse a time in seconds.

    Raises:
        argparse.ArgumentTypeError: the text is not a number above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def count(text: str) -> int:
    """Parse a number of calls, keys or other things.

    Raises:
        argparse.ArgumentTypeError: the text is not a whole number of at least 1.
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, at least 1")
    return int(text)


def refuse(options: argparse.Namespace, message: str) -> NoReturn:
    """Exit with the usage of the command and a message, as argparse does for wrong arguments."""
    parser: argparse.ArgumentParser = options.parser
    parser.error(message)
