"""`python -m penstock checkpoints`: the snapshots in a folder, and whether they are whole."""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Final

from .. import Checkpoint, engine
from ..telemetry.tables import UNKNOWN, Column, Table, count, duration, scaled, to_text

SUMMARY: Final = "list the checkpoints in a folder, and check that they are whole"

_COLUMNS: Final = (
    Column("checkpoint", is_number=False), Column("record"), Column("age"), Column("size"),
    Column("whole", is_number=False),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "List the checkpoints in a folder, each with its record, its age, its size, and whether it is whole. A run may "
        "write to the folder meanwhile. The exit status is 0 if there are checkpoints and all are whole, 1 otherwise."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that `ps.Checkpoint` was given")
    parser.add_argument("--verify", action="store_true", help="also read the checkpoints, and compare the checksums")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each checkpoint")


def run(options: argparse.Namespace) -> int:
    """List the snapshots; return the exit status."""
    snapshots = Checkpoint(options.folder).stored(verify=options.verify)
    damaged = [
        f"{snapshot.path.name} is damaged: {snapshot.damage}" for snapshot in snapshots if snapshot.damage is not None
    ]
    if options.json:
        for snapshot in snapshots:
            print(json.dumps({**dataclasses.asdict(snapshot), "path": str(snapshot.path)}))
    else:
        remark = "\n".join(damaged) if snapshots else f"no checkpoints in {options.folder}"
        print(to_text(Table((), _COLUMNS, tuple(map(_row, snapshots)), remark)).strip("\n"))
    return 1 if damaged or not snapshots else 0


def _row(snapshot: engine.StoredSnapshot) -> tuple[str, ...]:
    age = UNKNOWN if snapshot.saved_at is None else duration(max(time.time() - snapshot.saved_at, 0))
    record = f"{count(snapshot.record)}{' (the end)' if snapshot.ended else ''}"
    return snapshot.path.name, record, age, scaled(snapshot.bytes, "B"), "no" if snapshot.damage else "yes"
