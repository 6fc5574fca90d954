"""Where durable loops are kept: `LoopStore`, which has three methods, and `SQLiteStore`, the default."""

import asyncio
import errno
import os
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from .._errors import CheckpointError, OptionsError
from ..actors.threads import ThreadPool, end_with_loop

T = TypeVar("T")


@dataclass(frozen=True)
class LoopRecord:
    """What a store keeps of one key at one step.

    Attributes:
        version: the number of the write, from 1; each write of a key has the next one.
        step: how many iterations were made.
        content: everything else, which only `Durable` reads.
    """

    version: int
    step: int
    content: bytes


class LoopStore(ABC):
    """Where durable loops are kept: under each key, one record for each step.

    `SQLiteStore` is one. Derive another from this class to keep loops in a database of your own, such as one that
    several machines share. A method that raises ends the call with that error.
    """

    @abstractmethod
    async def load(self, key: str, /) -> LoopRecord | None:
        """Return the present record of a key, which is that of its highest step; None if there is none."""

    @abstractmethod
    async def store(self, key: str, record: LoopRecord, /, *, expected_version: int) -> bool:
        """Keep a record, if the present one has the version that is expected, in one transaction.

        The record replaces those of the same step and of later ones; so a record of step 0 begins anew. When this
        returns, the record must outlast a crash.

        Args:
            key: the key.
            record: the record.
            expected_version: the version of the present record; 0 if there must be none.

        Returns:
            False if the present record has another version; nothing is changed then.
        """

    @abstractmethod
    async def history(self, key: str, /) -> Sequence[LoopRecord]:
        """Return the records of a key, by their steps."""


class SQLiteStore(LoopStore):
    """Loops in a file of SQLite, for processes of one machine.

    Each write outlasts a crash of the process and of the machine (WAL, `synchronous=FULL`). All calls run in one
    thread, which ends with the event loop.

    Args:
        path: the file, which is made if there is none; its folder must exist.

    Raises:
        OptionsError: the file is in a folder that does not exist, or on a network file system, where what several
            processes do to a file of SQLite damages it.

    Its methods raise `CheckpointError`, which names the key, the file and the remedy, if the file is damaged, is not
    an SQLite database, cannot be written, or stays locked by another program.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        folder = self._path.parent
        if not folder.is_dir():
            raise OptionsError(f"SQLiteStore({str(path)!r}): there is no folder {folder}; make it first")
        kind = file_system_of(folder)
        if kind in _NETWORK_FILE_SYSTEMS:
            raise OptionsError(
                f"SQLiteStore({str(path)!r}): {folder} is on a network file system ({kind}), where SQLite cannot keep "
                "processes apart; use a folder on a disk of this machine, or a LoopStore of your own that keeps loops "
                "in a database server"
            )
        # By their loops. Not a WeakKeyDictionary: each refers to its loop. Closed ones are removed when one is added.
        self._databases: dict[asyncio.AbstractEventLoop, _Database] = {}

    async def load(self, key: str, /) -> LoopRecord | None:
        """Return the present record of a key; None if there is none."""
        return await self._in_thread(_load, key)

    async def store(self, key: str, record: LoopRecord, /, *, expected_version: int) -> bool:
        """Keep a record, if the present one has the version that is expected."""
        return await self._in_thread(_store, key, record, expected_version)

    async def history(self, key: str, /) -> Sequence[LoopRecord]:
        """Return the records of a key, by their steps."""
        return await self._in_thread(_history, key)

    async def _in_thread(self, work: "Callable[..., T]", key: str, *args: Any) -> T:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _BUSY_SECONDS
        while True:
            try:
                return await self._database(loop).submit(Context(), None, self._database(loop).run, work, key, *args)
            except sqlite3.Error as error:
                # `error.sqlite_errorcode` has details in its higher bytes; errors of the module itself have none.
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or loop.time() >= give_up_at:
                    what = _WRONG.get(code, "SQLite has refused it")
                    raise CheckpointError(
                        f"the loop of key {key!r} in {self._path}: {what} ({error})", _ERRNO.get(code)
                    ) from error
            # Not in the thread, which is also there for other keys, and which a caller could not be released from.
            await asyncio.sleep(_PAUSE_SECONDS)

    def _database(self, loop: asyncio.AbstractEventLoop) -> "_Database":
        database = self._databases.get(loop)
        if database is None or database.is_closed:
            for other in [other for other in self._databases if other.is_closed()]:
                self._databases.pop(other, None)
            database = self._databases[loop] = _Database(self._path)
            database.guard = end_with_loop(database.aclose)
        return database


class _Database(ThreadPool):
    """One connection to a file of SQLite, and the thread that it is used in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self.guard: AsyncGenerator[None, None] | None = None
        super().__init__(1, name="penstock-sqlite")

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more work."""
        return self._closed

    def begin_without_threads(self) -> None:
        """Have no connection in a process that was forked; that of the parent must not even be closed here."""
        if self._connection is not None:
            _of_parents.append(self._connection)
            self._connection = None
        super().begin_without_threads()

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do something with the connection; in the thread."""
        if self._connection is None:
            self._connection = self._connected()
        return work(self._connection, *args)

    def _connected(self) -> sqlite3.Connection:
        # In the thread, and closed by another if the interpreter ends before the loop.
        connection = sqlite3.connect(self._path, timeout=_PAUSE_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise OptionsError(
                    f"SQLite has journal_mode={mode} for {self._path}, and keeps no write-ahead log beside it: use a "
                    "file in a folder on a disk of this machine"
                )
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(_TABLE)
        except BaseException:
            connection.close()
            raise
        return connection

    async def aclose(self) -> None:
        """Close the connection, which moves the write-ahead log into the file, and end the thread."""
        if self._threads and not self._closed:
            await self.submit(Context(), None, self._disconnect)
        await super().aclose()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


# A process that holds the lock for writing needs a fraction of a second.
_BUSY_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.02
_WRONG: Final = {
    sqlite3.SQLITE_BUSY: f"another program has locked the file for more than {_BUSY_SECONDS:g} s; end its transaction",
    sqlite3.SQLITE_LOCKED: f"the file was locked for more than {_BUSY_SECONDS:g} s; end the transaction that holds it",
    sqlite3.SQLITE_FULL: "the disk is full; make room, and the key goes on from the last state that was kept",
    sqlite3.SQLITE_READONLY: "the file cannot be written; give this process the right to write it and its folder",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; look at the rights of it and of its folder",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; put a copy in its place, or what `sqlite3 FILE .recover` can read",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database; choose another path",
    sqlite3.SQLITE_IOERR: "the disk has failed to read or write",
}
_ERRNO: Final = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}
_TABLE: Final = """
    CREATE TABLE IF NOT EXISTS penstock_loops (
        key TEXT NOT NULL, step INTEGER NOT NULL, version INTEGER NOT NULL, content BLOB NOT NULL,
        PRIMARY KEY (key, step)
    )
"""
# Connections of the process that this one was forked from. Closing one here would write to the file of the parent.
_of_parents: list[sqlite3.Connection] = []


def _load(connection: sqlite3.Connection, key: str) -> LoopRecord | None:
    found = connection.execute(
        "SELECT version, step, content FROM penstock_loops WHERE key = ? ORDER BY step DESC LIMIT 1", (key,)
    ).fetchone()
    return None if found is None else LoopRecord(*found)


def _store(connection: sqlite3.Connection, key: str, record: LoopRecord, expected_version: int) -> bool:
    connection.execute("BEGIN IMMEDIATE")
    try:
        present = connection.execute(
            "SELECT version FROM penstock_loops WHERE key = ? ORDER BY step DESC LIMIT 1", (key,)
        ).fetchone()
        is_expected = bool((0 if present is None else present[0]) == expected_version)
        if is_expected:
            connection.execute("DELETE FROM penstock_loops WHERE key = ? AND step >= ?", (key, record.step))
            connection.execute(
                "INSERT INTO penstock_loops (key, step, version, content) VALUES (?, ?, ?, ?)",
                (key, record.step, record.version, record.content),
            )
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    return is_expected


def _history(connection: sqlite3.Connection, key: str) -> list[LoopRecord]:
    rows = connection.execute(
        "SELECT version, step, content FROM penstock_loops WHERE key = ? ORDER BY step", (key,)
    ).fetchall()
    return [LoopRecord(*row) for row in rows]


_NETWORK_FILE_SYSTEMS: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.beegfs", "fuse.ceph", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs",
    "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "pvfs2", "smb2", "smb3", "smbfs",
})  # fmt: skip
_MOUNTS: Final = Path("/proc/self/mountinfo")


def file_system_of(folder: Path) -> str:
    """Return the kind of file system that a folder is on, as Linux names it; empty where that is not known."""
    if sys.platform != "linux" or not _MOUNTS.exists():
        return ""
    place, found, longest = folder.resolve(), "", -1
    for line in _MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Spaces and the like are written in octal, as \040.
        mounted = Path(before.split()[4].encode().decode("unicode_escape"))
        if (place == mounted or mounted in place.parents) and len(mounted.parts) >= longest:
            found, longest = after.split()[0], len(mounted.parts)
    return found
