"""`SQLiteStore`: durable runs in one file, for processes of one machine; and `MemoryStore`, for tests."""

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

from .._errors import CheckpointError, OptionsError
from .._machine import network_file_system_of
from .sql import Database, SQLStore, Watcher, prepare

T = TypeVar("T")

# How often a reader of `changes` looks for writes of other processes. A look takes about 0.1 ms of the processor.
_LOOK_SECONDS: Final = 0.05


class SQLiteStore(SQLStore):
    """Durable runs in a file of SQLite, for processes of one machine.

    Each write outlasts a crash of the process and of the machine (WAL, `synchronous=FULL`). All calls run in one
    thread, which ends with the event loop.

    Args:
        path: the file, which is made if it does not exist; its folder must exist.

    Raises:
        OptionsError: the folder of the file does not exist, or is on a network file system, where several processes
            would damage a file of SQLite.

    Its methods raise `CheckpointError`, which names the file and the remedy, if the file is damaged, is not an SQLite
    database, cannot be written, was made by another version, or stays locked by another program.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        folder = self._path.parent
        if not folder.is_dir():
            raise OptionsError(f"SQLiteStore({str(path)!r}): there is no folder {folder}; make it first")
        if kind := network_file_system_of(folder):
            raise OptionsError(
                f"SQLiteStore({str(path)!r}): {folder} is on a network file system ({kind}), where SQLite cannot keep "
                "processes apart; use a folder on a disk of this machine, or ps.PostgresStore, which keeps runs in a "
                "database server"
            )
        super().__init__("penstock-sqlite", 1, sqlite3.Error)

    async def _heard(self, watcher: Watcher) -> AsyncGenerator[None, None]:
        seen = await self._do(_data_version)
        while True:
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await watcher.event.wait()
            except TimeoutError:
                version = await self._do(_data_version)
                if version != seen:
                    seen = version
                    watcher.add(None)
            if watcher.event.is_set():
                yield

    def _is_passing(self, error: Exception) -> bool:
        return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

    def _refused(self, error: Exception) -> CheckpointError:
        what = _WRONG.get(_code(error), "SQLite has refused it")
        return CheckpointError(f"the durable runs in {self._path}: {what} ({error})", _ERRNO.get(_code(error)))

    def _connected(self) -> "_SQLiteConnection":
        # Opened in the thread, and closed by another thread if the interpreter ends before the event loop.
        connection = sqlite3.connect(
            self._path, timeout=self._pause_seconds, isolation_level=None, check_same_thread=False,
            factory=_SQLiteConnection,
        )  # fmt: skip
        with ExitStack() as on_error:
            on_error.callback(connection.close)
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise OptionsError(
                    f"SQLite has journal_mode={mode} for {self._path}, and keeps no write-ahead log beside it: use a "
                    "file in a folder on a disk of this machine"
                )
            connection.execute("PRAGMA synchronous=FULL")
            prepare(connection, str(self._path), _as_sqlite)
            on_error.pop_all()
        return connection


class MemoryStore(SQLStore):
    """Durable runs in the memory of this process, for tests: they are lost with the process.

    Its time is that of the event loop, so leases and sleeps pass in virtual time. A store that is given to several
    event loops, one after the other, keeps its runs.
    """

    def __init__(self) -> None:
        super().__init__("penstock-memory", 1, sqlite3.Error)
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, factory=_MemoryConnection
        )
        prepare(self._connection, "MemoryStore()", _as_sqlite)

    def __del__(self) -> None:
        self._connection.close()

    async def _run(self, database: Database, work: Callable[..., T], args: Sequence[Any]) -> tuple[T, set[int]]:
        # A turn of the loop before and after, so that a caller may be cancelled on either side, as with a database.
        await asyncio.sleep(0)
        changed: set[int] = set()
        done = work(self._connection, changed, *args)
        await asyncio.sleep(0)
        return done, changed

    def _connected(self) -> "_SQLiteConnection":
        return self._connection

    def _is_passing(self, error: Exception) -> bool:
        return False

    def _refused(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"the durable runs in memory: {error}")


class _SQLiteConnection(sqlite3.Connection):
    is_usable = True
    lock = ""

    def now(self) -> float:
        return time.time()

    def begin(self, thread: str | None = None, *, pipelined: bool = False) -> None:
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.execute("COMMIT")

    def rollback(self) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK")

    def tell(self, runs: Collection[int]) -> None:
        """Do nothing: other processes look at the version of the file."""


class _MemoryConnection(_SQLiteConnection):
    def now(self) -> float:
        return asyncio.get_running_loop().time()


def _data_version(connection: Any, _: set[int]) -> int:
    (version,) = connection.execute("PRAGMA data_version").fetchone()
    return int(version)


def _as_sqlite(statement: str) -> str:
    return statement.replace("IDENTITY", "INTEGER PRIMARY KEY AUTOINCREMENT").replace("BIGKEY", "INTEGER PRIMARY KEY")


def _code(error: Exception) -> int:
    # The higher bytes of `error.sqlite_errorcode` are details; errors of the module itself have no code.
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


_BUSY_SECONDS: Final = SQLStore._give_up_after_seconds
_WRONG: Final = {
    sqlite3.SQLITE_BUSY: f"another program has locked the file for more than {_BUSY_SECONDS:g} s; end its transaction",
    sqlite3.SQLITE_LOCKED: f"the file was locked for more than {_BUSY_SECONDS:g} s; end the transaction that holds it",
    sqlite3.SQLITE_FULL: "the disk is full; make room, and the runs go on from the last entry that was kept",
    sqlite3.SQLITE_READONLY: "the file cannot be written; give this process the right to write it and its folder",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check the permissions of the file and of its folder",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a copy, or the data that `sqlite3 FILE .recover` can read",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database; choose another path",
    sqlite3.SQLITE_IOERR: "the disk has failed to read or write",
}
_ERRNO: Final = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}
