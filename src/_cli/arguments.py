"""Kinds of arguments that commands share."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn


def program() -> str:
    """Return how the command line was called: as the script, or as a module."""
    return "penstock" if Path(sys.argv[0]).name == "penstock" else "python -m penstock"


def seconds(text: str) -> float:
    """Return a time in seconds.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above 0.
    """
    return _above_zero(text, "number of seconds")


def factor(text: str) -> float:
    """Return how many times as much.

    Raises:
        argparse.ArgumentTypeError: it is no number, or not above 0.
    """
    return _above_zero(text, "factor")


def count(text: str) -> int:
    """Return a number of things.

    Raises:
        argparse.ArgumentTypeError: it is none, or below 1.
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, at least 1")
    return int(text)


def refuse(options: argparse.Namespace, message: str) -> NoReturn:
    """Exit as for wrong arguments, with the usage of the command."""
    parser: argparse.ArgumentParser = options.parser
    parser.error(message)


def _above_zero(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what} above 0")
    return value
