"""Programs in a process of their own, for things that a process does only once, such as loading JAX."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock._cli import main

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python with arguments and additional environment variables; warnings are errors."""
    command = [sys.executable, "-W", "error", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False)


def command(capsys: pytest.CaptureFixture[str], *arguments: "str | Path") -> tuple[int, str, str]:
    """Runs a command of Penstock in this process; returns its status, its standard output and its standard error."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def run_program(program: str, *arguments: str, **variables: str) -> str:
    """Runs a program that must succeed; returns its output."""
    done = run("-c", program, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@ps.node(runs_on="process")
def sent(count: int) -> dict[str, Any]:
    return {"x": np.arange(count, dtype=np.float32), "y": np.ones(3), "z": np.arange(2 * count)}
