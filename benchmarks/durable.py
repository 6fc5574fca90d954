"""What durable runs cost below their journal: commits beside a bare thread, bytes of files, encoding, loading, lists.

`python -m benchmarks.durable` prints each row beside its bar. With `--postgres`, also commits to a server of its own.
"""

import argparse
import asyncio
import json
import random
import resource
import sqlite3
import statistics
import string
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.durable.parts import Values
from penstock.durable.sqlite import SQLiteStore
from penstock.durable.store import Batch, Entry, NewRun, Owner, Run, Store

LETTERS = string.ascii_letters
ROUNDS, EFFECTS = 15, 40


def told(row: str, measured: float, bar: float) -> None:
    print(f"{row:<72}{measured:>9.2f}   bar {bar:g}", flush=True)


def text(chosen: random.Random, size: int) -> str:
    return "".join(chosen.choices(LETTERS, k=size))


async def begun(store: Store, values: Values, owner: Owner, key: str = "k") -> Run:
    entry = Entry(0, "", "arguments", 0, 0.0, *values.encode([], "arguments", 0))
    return await store.begin(NewRun(key=key, graph="g", plan="p", entries=[entry], owner=owner.name))


async def commits(store: Store, bare: Callable[[list[bytes]], float]) -> float:
    """Return the time of a chain of effects of 4 KB, over that of a thread that commits the same bytes; the median."""
    chosen, owner, values, ratios, seq = random.Random(1), Owner(), Values(), list[float](), 0
    run = await begun(store, values, owner)
    for _ in range(ROUNDS):
        results = [text(chosen, 4096) for _ in range(EFFECTS)]
        alone = await asyncio.to_thread(bare, [result.encode() for result in results])
        begin = time.perf_counter()
        for result in results:  # one commit holds the result of an effect, and that the next one has begun
            seq += 2
            kept = Entry(seq - 1, "loop[1]/pay", "result", 1, time.time(), *values.encode(result, "result", seq - 1))
            entries = [kept, Entry(seq, "loop[1]/pay", "begun", 1, time.time(), b"digest of 16 b..")]
            await store.write([Batch(run=run.run, epoch=1, entries=entries)])
        ratios.append((time.perf_counter() - begin) / alone)
    return statistics.median(ratios)


def bare_sqlite(path: Path) -> Callable[[list[bytes]], float]:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE t (content BLOB)"):
        connection.execute(statement)

    def committed(contents: list[bytes]) -> float:
        begin = time.perf_counter()
        for content in contents:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO t (content) VALUES (?)", (content,))
            connection.execute("COMMIT")
        return time.perf_counter() - begin

    return committed


def postgres() -> None:
    import psycopg

    from penstock.durable.postgres import PostgresStore
    from tests.postgres import Server, postgres_server

    # The server of the tests does not write to the disk.
    Server.start = lambda self: self.control("-w", "-o", f"-k {self.folder} -c listen_addresses=", "start")  # type: ignore[method-assign]
    with postgres_server() as server, psycopg.connect(server.new_database(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (content BYTEA)")

        def committed(contents: list[bytes]) -> float:
            begin = time.perf_counter()
            for content in contents:
                connection.execute("BEGIN")
                connection.execute("INSERT INTO t (content) VALUES (%s)", (content,))
                connection.execute("COMMIT")
            return time.perf_counter() - begin

        dsn = server.new_database()
        told(
            "a chain of effects of 4 KB / a bare thread, PostgreSQL",
            asyncio.run(commits(PostgresStore(dsn), committed)),
            1.3,
        )


async def kept(path: Path, states: Iterator[Any]) -> None:
    """Keep each state."""
    store, values, owner = SQLiteStore(path), Values(), Owner()
    run = await begun(store, values, owner)
    for seq, state in enumerate(states, 1):
        entry = Entry(seq, f"loop[{seq}]", "state", seq, time.time(), *values.encode(state, "state", seq))
        await store.write([Batch(run=run.run, epoch=1, entries=[entry])])


def file_bytes(states: Iterator[Any]) -> int:
    with TemporaryDirectory() as folder:
        asyncio.run(kept(Path(folder) / "runs.db", states))
        return (Path(folder) / "runs.db").stat().st_size


def growing(iterations: int, most: int) -> Iterator[list[dict[str, str]]]:
    chosen, state = random.Random(1), list[dict[str, str]]()
    for _ in range(iterations):
        state = [*state[1 - most :], {"role": "user", "content": text(chosen, 1000)}]
        yield state


def growing_text(iterations: int, size: int) -> Iterator[dict[str, str]]:
    chosen, notes = random.Random(1), ""
    for _ in range(iterations):
        notes += text(chosen, size)
        yield {"notes": notes}


def sizes() -> None:
    *_, last = growing(1732, 9999)
    told("1,732 iterations of 1 KB: file / last state", file_bytes(growing(1732, 9999)) / len(json.dumps(last)), 2)
    told(
        "a window of 200, 1,732 iterations: file / what was new",
        file_bytes(growing(1732, 200)) / len(json.dumps(last)),
        2,
    )
    for size in (1000, 100):
        told(
            f"text that grows by {size}, 1,000 times: file / what was new",
            file_bytes(growing_text(1000, size)) / 1000 / size,
            4,
        )
    steps = 5000
    told("bytes of a kept step besides its value of 100", file_bytes("x" * 98 for _ in range(steps)) / steps - 100, 150)


def encoding() -> None:
    values, last, took = Values(), list[dict[str, str]](), 0.0
    for seq, last in enumerate(growing(1732, 9999)):
        begin = time.process_time()
        values.encode(last, "state", seq)
        took = time.process_time() - begin
    begin = time.process_time()
    Values().encode(last, "state", 0)
    told("encoding the 1,732nd state / all of it", took / (time.process_time() - begin), 0.25)


async def many_entries(path: Path) -> None:
    store, values, owner = SQLiteStore(path), Values(), Owner()
    run = await begun(store, values, owner)
    for first in range(1, 100_001, 2000):
        entries = [
            Entry(
                seq, f"map[{seq}]/pay", "result", seq, 1.0, *values.encode({"paid": seq, "text": "y" * 100}, "r", seq)
            )
            for seq in range(first, first + 2000)
        ]
        await store.write([Batch(run=run.run, epoch=1, entries=entries)])
    del values
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    loaded = Values()
    loaded.add(await SQLiteStore(path).load(run.run))
    for seq in range(1, 100_001):
        loaded.decode(seq)
    told("loading and decoding 100,000 entries, s of the processor", time.process_time() - begin, 3)
    told("the same, MB", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 300)


async def many_keys(path: Path) -> None:
    store, owner = SQLiteStore(path), Owner()
    await store.read("k")
    states = ["finished", "finished", "queued", "failed", "asking", "cancelled", "sleeping"]
    with sqlite3.connect(path) as connection:
        connection.executemany(
            "INSERT INTO penstock_runs (key, graph, plan, state, turn, epoch, created_at, changed_at) "
            "VALUES (?, ?, 'p', ?, 0, 1, 0, ?)",
            [(f"order-{n % 317}-{n}", f"g{n % 5}", states[n % 7], n * 7919 % 100_003) for n in range(100_000)],
        )
    connection.close()
    slowest = 0.0
    for wanted in (
        {}, {"state": "failed"}, {"graph": "g3"}, {"graph": "g3", "state": "asking"}, {"prefix": "order-12"},
        {"prefix": "order-12-12"}, {"prefix": "order"}, {"prefix": "none"}, {"before": (50_000.0, ""), "graph": "g1"},
    ):  # fmt: skip
        times = list[float]()
        for _ in range(5):
            begin = time.perf_counter()
            await store.list(**wanted)
            times.append(time.perf_counter() - begin)
        slowest = max(slowest, statistics.median(times))
    told("the slowest list of 50 in 100,000 keys, ms", 1000 * slowest, 20)
    del owner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres", action="store_true", help="also commit to a PostgreSQL server of its own")
    chosen = parser.parse_args(sys.argv[1:])
    with TemporaryDirectory() as folder:
        bare = bare_sqlite(Path(folder) / "bare.db")
        ratio = asyncio.run(commits(SQLiteStore(Path(folder) / "runs.db"), bare))
        told("a chain of effects of 4 KB / a bare thread, SQLite", ratio, 1.3)
        asyncio.run(many_entries(Path(folder) / "entries.db"))
        asyncio.run(many_keys(Path(folder) / "keys.db"))
    if chosen.postgres:
        postgres()
    sizes()
    encoding()


if __name__ == "__main__":
    main()
