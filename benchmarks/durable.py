"""What an iteration of a durable loop with 4 KB of state takes above the loop alone.

`python -m benchmarks.durable [FOLDER]` prints it beside what a commit of SQLite takes on the same disk.
"""

import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import penstock as ps
from penstock import engine

ITERATIONS, ROUNDS = 400, 5
# 4.3 KB as JSON: the messages of an agent.
STATE: dict[str, Any] = {
    "messages": [{"role": "user" if n % 2 else "assistant", "content": "word " * 18, "n": n} for n in range(32)],
    "step": 0,
}

began: list[float] = []


@ps.node
def goes_on(state: dict[str, Any]) -> bool:
    return bool(state["step"] < ITERATIONS)


@ps.node
async def turn(state: dict[str, Any]) -> dict[str, Any]:
    began.append(time.perf_counter())
    return {**state, "step": state["step"] + 1}


def loop(durable: ps.Durable | None) -> "ps.Graph[[], dict[str, Any]]":
    @ps.graph
    async def looped() -> dict[str, Any]:
        return await ps.while_loop(goes_on, turn, STATE, durable=durable)

    return looped


async def iterations(durable: ps.Durable | None) -> list[float]:
    """Returns how long each iteration took, in seconds."""
    began.clear()
    await engine.run(loop(durable), key=None if durable is None else f"{time.time_ns()}")
    return [after - before for before, after in pairwise(began)]


def commits(folder: Path) -> list[float]:
    """Returns how long commits of as many bytes take, in seconds."""
    with sqlite3.connect(folder / "commits.db", isolation_level=None) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE IF NOT EXISTS kept (content BLOB)")
        taken: list[float] = []
        for _ in range(ITERATIONS):
            before = time.perf_counter()
            connection.execute("INSERT INTO kept VALUES (?)", (b"x" * 4_600,))
            taken.append(time.perf_counter() - before)
    connection.close()
    return taken


def main(folder: Path) -> None:
    taken: dict[str, list[float]] = {"loop alone": [], "durable loop": [], "commit": []}
    durable = ps.Durable(folder / "loops.db")
    for _ in range(ROUNDS):
        taken["loop alone"] += asyncio.run(iterations(None))
        taken["durable loop"] += asyncio.run(iterations(durable))
        taken["commit"] += commits(folder)
    print("microseconds an iteration: the quickest tenth, the median")
    for name, seconds in taken.items():
        tenth = statistics.quantiles(seconds, n=10)[0]
        print(f"{name:>12}  {tenth * 1e6:7.0f}  {statistics.median(seconds) * 1e6:7.0f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as temporary:
        main(Path(temporary))
