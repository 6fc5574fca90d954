"""The command line, `penstock` or `python -m penstock`: one module for each command."""

from .main import main as main
