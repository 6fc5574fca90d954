"""`python -m penstock checkpoints`: the cuts in a folder, and whether they are whole."""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Final

from ..saving.cuts import StoredCut, stored_cuts
from ..telemetry.tables import UNKNOWN, Column, Table, count, duration, scaled, to_text

SUMMARY: Final = "list the checkpoints in a folder, and check that they are whole"

_COLUMNS: Final = (
    Column("checkpoint", is_number=False), Column("record"), Column("age"), Column("size"),
    Column("whole", is_number=False),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "List the checkpoints in a folder: after which record, how old, how large, and whole or not. A run may write "
        "there meanwhile. The exit status is 0 if there are some and all are whole, and 1 otherwise."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that `ps.Checkpoint` was given")
    parser.add_argument("--verify", action="store_true", help="also read them, and compare the checksums")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each")


def run(options: argparse.Namespace) -> int:
    """List the cuts; return the exit status."""
    cuts = stored_cuts(options.folder, verify=options.verify)
    damaged = [f"{cut.path.name} is damaged: {cut.damage}" for cut in cuts if cut.damage is not None]
    if options.json:
        for cut in cuts:
            print(json.dumps({**dataclasses.asdict(cut), "path": str(cut.path)}))
    else:
        remark = "\n".join(damaged) if cuts else f"no checkpoints in {options.folder}"
        print(to_text(Table((), _COLUMNS, tuple(map(_row, cuts)), remark)).strip("\n"))
    return 1 if damaged or not cuts else 0


def _row(cut: StoredCut) -> tuple[str, ...]:
    age = UNKNOWN if cut.saved_at is None else duration(max(time.time() - cut.saved_at, 0))
    record = f"{count(cut.record)}{' (the end)' if cut.ended else ''}"
    return cut.path.name, record, age, scaled(cut.bytes, "B"), "no" if cut.damage else "yes"
