"""Kinds of arguments that commands share."""

import argparse


def seconds(text: str) -> float:
    """Return a time in seconds.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value
