"""`python -m penstock runs`: list the keys of durable loops in a file, with their states."""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Final, get_args

from .. import Durable, LoopStore, PostgresStore, Run
from ..telemetry.tables import Column, Table, count, duration, scaled, to_text
from . import arguments

SUMMARY: Final = "list the durable loops in a file, with their states"

_COLUMNS: Final = (
    Column("key", is_number=False), Column("graph", is_number=False), Column("state", is_number=False), Column("step"),
    Column("changed"), Column("size"), Column("question or error", is_number=False),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "List the keys of durable loops, the last changed keys first. Processes may run the loops meanwhile. The exit "
        "status is 0, or 1 if the file cannot be read."
    )
    parser.add_argument("file", metavar="FILE", help="the file of `ps.Durable`, or the postgresql:// of a database")
    states = get_args(Run.__annotations__["state"])
    parser.add_argument("--state", choices=states, help="list only the keys in this state")
    parser.add_argument("--graph", help="list only the keys of the graph of this name")
    parser.add_argument("--limit", type=arguments.count, default=50, help="the most keys (default 50)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each key")


def run(options: argparse.Namespace) -> int:
    """List the keys; return the exit status."""
    store: LoopStore | str = options.file
    if options.file.startswith(("postgres://", "postgresql://")):
        store = PostgresStore(options.file)
    elif not Path(options.file).is_file():
        arguments.refuse(options, f"there is no file {options.file}")
    durable = Durable(store)
    runs = asyncio.run(durable.runs(state=options.state, graph=options.graph, limit=options.limit))
    if options.json:
        for one in runs:
            print(json.dumps(one._asdict(), default=repr))
    else:
        remark = "" if runs else f"no such keys in {options.file}" if options.state or options.graph else "no keys"
        print(to_text(Table((), _COLUMNS, tuple(map(_row, runs)), remark)).strip("\n"))
    return 0


def _row(run: Run) -> tuple[str, ...]:
    state = f"{run.state} ({run.owner})" if run.owner else run.state
    said = run.error if run.question is None else repr(run.question)
    changed = duration(max(time.time() - run.changed_at, 0))
    return run.key, run.graph, state, count(run.step), changed, scaled(run.bytes, "B"), f"{said:.60}"
