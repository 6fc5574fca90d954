"""Where durable loops are kept: `LoopStore`, the base class of stores with SQL, and `SQLiteStore`, the default."""

import asyncio
import errno
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from .._errors import CheckpointError, OptionsError
from .._machine import network_file_system_of
from ..actors.threads import ThreadPool, end_with_loop
from .loops import Loop, LoopRecord

T = TypeVar("T")


class LoopStore(ABC):
    """Where durable loops are kept: under each key, one record for each step.

    `SQLiteStore` and `PostgresStore` are two stores. Derive a class from this one to keep loops in another database.
    The class needs `load`, `store` and `history`; with `runs` and `delete`, keys can be listed and deleted as well. If
    a method raises an error, the call ends with that error.
    """

    @abstractmethod
    async def load(self, key: str, /) -> LoopRecord | None:
        """Return the present record of a key, which is the record of its highest step; None if there is no record."""

    @abstractmethod
    async def store(self, key: str, record: LoopRecord, /, *, expected_version: int) -> bool:
        """Keep a record in one transaction, if the present record has the expected version.

        The record replaces the records of the same step and of later steps; so a record of step 0 begins anew. Once
        this method returns, the record must outlast a crash.

        Args:
            key: the key.
            record: the record.
            expected_version: the version of the present record; 0 if there must be no record.

        Returns:
            False if the present record has another version; then nothing is changed.
        """

    @abstractmethod
    async def history(self, key: str, /) -> Sequence[LoopRecord]:
        """Return the records of a key, by their steps."""

    async def first(self, key: str, /) -> LoopRecord | None:
        """Return the record of the lowest step of a key, which has the arguments; None if there is no record."""
        return next(iter(await self.history(key)), None)

    async def now(self) -> float:
        """Return the time by which leases end, in seconds since 1970; by default the clock of this machine."""
        return time.time()

    async def runs(
        self, *, state: str | None, graph: str | None, before: tuple[float, str], limit: int
    ) -> Sequence[tuple[str, LoopRecord, int]]:
        """Return keys, each with its present record and its stored bytes, the latest `changed_at` first.

        Args:
            state: only keys whose record has this state; None for all.
            graph: only keys whose record is of this graph; None for all.
            before: only keys whose pair of `changed_at` and key is less than this pair.
            limit: the most keys.

        Returns:
            The keys. The content of the records may be empty.

        Raises:
            OptionsError: this store cannot be listed.
        """
        raise OptionsError(f"{type(self).__name__} cannot be listed: it has no method `runs`; see ps.LoopStore.runs")

    async def delete(self, versions: Mapping[str, int], /) -> int:
        """Delete all records of the keys whose present records have these versions. Other keys are not changed.

        Args:
            versions: the version of each key.

        Returns:
            How many keys were deleted.

        Raises:
            OptionsError: this store cannot delete.
        """
        raise OptionsError(f"{type(self).__name__} cannot delete: it has no method `delete`; see ps.LoopStore.delete")


class SQLStore(LoopStore):
    """The base class of stores in SQL databases: the work is done in threads, each with a connection."""

    _pause_seconds = 0.02
    _give_up_after_seconds = 10.0  # a process that holds the lock for writing needs a fraction of a second

    def __init__(self, name: str, max_connections: int, error: type[Exception]) -> None:
        self._name = name
        self._max_connections = max_connections
        self._error = error  # the class of the errors of the database
        # By event loop. Not a WeakKeyDictionary, because each database refers to its loop. Databases of closed loops
        # are removed when one is added.
        self._databases: dict[asyncio.AbstractEventLoop, Database] = {}

    async def load(self, key: str, /) -> LoopRecord | None:
        """Return the present record of a key; None if there is no record."""
        return await self._in_thread(_load, key, "DESC")

    async def store(self, key: str, record: LoopRecord, /, *, expected_version: int) -> bool:
        """Keep a record, if the present record has the expected version."""
        return await self._in_thread(_store, key, record, expected_version)

    async def history(self, key: str, /) -> Sequence[LoopRecord]:
        """Return the records of a key, by their steps."""
        return await self._in_thread(_history, key)

    async def first(self, key: str, /) -> LoopRecord | None:
        """Return the record of the lowest step of a key; None if there is no record."""
        return await self._in_thread(_load, key, "ASC")

    async def runs(
        self, *, state: str | None, graph: str | None, before: tuple[float, str], limit: int
    ) -> Sequence[tuple[str, LoopRecord, int]]:
        """Return keys, each with its present record, the latest first; see `LoopStore.runs`."""
        return await self._in_thread(_runs, "", state, graph, before, limit)

    async def delete(self, versions: Mapping[str, int], /) -> int:
        """Delete all records of the keys whose present records have these versions."""
        return await self._in_thread(_delete, min(versions), versions) if versions else 0

    async def _in_thread(self, work: Callable[..., T], key: str, *args: Any) -> T:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._give_up_after_seconds
        while True:
            try:
                return await self._database(loop).submit(Context(), None, self._database(loop).run, work, key, *args)
            except self._error as error:
                if not self._is_passing(error) or loop.time() >= give_up_at:
                    raise self._refused(key, error) from error
            # The pause is not in the thread: other keys need the thread, and a caller could not be cancelled there.
            await asyncio.sleep(self._pause_seconds)

    def _database(self, loop: asyncio.AbstractEventLoop) -> "Database":
        database = self._databases.get(loop)
        if database is None or database._closed:
            for other in [other for other in self._databases if other.is_closed()]:
                self._databases.pop(other, None)
            database = self._databases[loop] = Database(self._max_connections, self._name, self._connected)
            database.guard = end_with_loop(database.aclose)
        return database

    @abstractmethod
    def _connected(self) -> "Connection":
        """Return a new connection. Called in a thread."""

    @abstractmethod
    def _is_passing(self, error: Exception) -> bool:
        """Whether the same work may succeed in a moment."""

    @abstractmethod
    def _refused(self, key: str, error: Exception) -> CheckpointError: ...


class SQLiteStore(SQLStore):
    """Loops in a file of SQLite, for processes of one machine.

    Each write outlasts a crash of the process and of the machine (WAL, `synchronous=FULL`). All calls run in one
    thread, which ends with the event loop.

    Args:
        path: the file, which is made if it does not exist; its folder must exist.

    Raises:
        OptionsError: the folder of the file does not exist, or is on a network file system, where several processes
            would damage a file of SQLite.

    Its methods raise `CheckpointError`, which names the key, the file and the remedy, if the file is damaged, is not
    an SQLite database, cannot be written, or stays locked by another program.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        folder = self._path.parent
        if not folder.is_dir():
            raise OptionsError(f"SQLiteStore({str(path)!r}): there is no folder {folder}; make it first")
        if kind := network_file_system_of(folder):
            raise OptionsError(
                f"SQLiteStore({str(path)!r}): {folder} is on a network file system ({kind}), where SQLite cannot keep "
                "processes apart; use a folder on a disk of this machine, or ps.PostgresStore, which keeps loops "
                "in a database server"
            )
        super().__init__("penstock-sqlite", 1, sqlite3.Error)

    def _is_passing(self, error: Exception) -> bool:
        return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

    def _refused(self, key: str, error: Exception) -> CheckpointError:
        what = _WRONG.get(_code(error), "SQLite has refused it")
        named = f"the loop of key {key!r}" if key else "the loops"
        return CheckpointError(f"{named} in {self._path}: {what} ({error})", _ERRNO.get(_code(error)))

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
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'penstock_runs_by_graph'").fetchone():
                make_tables(connection)
            on_error.pop_all()
        return connection


class _SQLiteConnection(sqlite3.Connection):
    is_usable = True

    def begin(self, keys: Iterable[str]) -> None:
        """Begin a transaction that writes."""
        self.execute("BEGIN IMMEDIATE")


class Connection(Protocol):
    """A connection to a database, of SQLite or of PostgreSQL."""

    @property
    def is_usable(self) -> bool:
        """Whether the connection can be used again."""
        ...

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction has begun and not ended."""
        ...

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        """Execute a statement, which has a `?` for each value, and return a cursor."""

    def begin(self, keys: Iterable[str]) -> None:
        """Begin a transaction on these keys. No other transaction reads and writes them at the same time."""

    def close(self) -> None:
        """Close it."""


class Database(ThreadPool):
    """Threads, and the connections to a database that the threads use.

    Args:
        max_connections: the most threads and connections.
        name: a prefix of the threads' names.
        connect: makes a connection, in a thread.
    """

    def __init__(self, max_connections: int, name: str, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._connections: list[Connection] = []
        self._idle: list[Connection] = []
        self.guard: AsyncGenerator[None, None] | None = None
        super().__init__(max_connections, name=name)

    def begin_without_threads(self) -> None:
        """Have no connection in a forked process. The connections of the parent must not even be closed here."""
        _of_parents.extend(self._connections)
        self._connections, self._idle = [], []
        super().begin_without_threads()

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function with a connection. Runs in a thread."""
        if self._idle:
            connection = self._idle.pop()
        else:
            self._connections.append(connection := self._connect())
        try:
            return work(connection, *args)
        finally:
            if connection.is_usable:
                self._idle.append(connection)
            else:
                self._connections.remove(connection)
                connection.close()

    async def aclose(self) -> None:
        """Close the connections, and end the threads."""
        if self._threads and not self._closed:
            await self.submit(Context(), None, self._disconnect)  # SQLite moves its write-ahead log into the file then
        await super().aclose()
        self._disconnect()

    def _disconnect(self) -> None:
        while self._idle:
            connection = self._idle.pop()
            self._connections.remove(connection)
            connection.close()


def _code(error: Exception) -> int:
    # The higher bytes of `error.sqlite_errorcode` are details; errors of the module itself have no code.
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


_BUSY_SECONDS: Final = SQLStore._give_up_after_seconds
_WRONG: Final = {
    sqlite3.SQLITE_BUSY: f"another program has locked the file for more than {_BUSY_SECONDS:g} s; end its transaction",
    sqlite3.SQLITE_LOCKED: f"the file was locked for more than {_BUSY_SECONDS:g} s; end the transaction that holds it",
    sqlite3.SQLITE_FULL: "the disk is full; make room, and the key goes on from the last state that was kept",
    sqlite3.SQLITE_READONLY: "the file cannot be written; give this process the right to write it and its folder",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check the permissions of the file and of its folder",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a copy, or the data that `sqlite3 FILE .recover` can read",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database; choose another path",
    sqlite3.SQLITE_IOERR: "the disk has failed to read or write",
}
_ERRNO: Final = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}
# A table with a row for each step, and one with a row for each key, with the columns of a list. SQLite and PostgreSQL
# understand both statements.
TABLES: Final = (
    """
    CREATE TABLE IF NOT EXISTS penstock_loops (
        key TEXT NOT NULL, step BIGINT NOT NULL, version BIGINT NOT NULL, content BLOB NOT NULL,
        PRIMARY KEY (key, step)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS penstock_runs (
        key TEXT NOT NULL PRIMARY KEY, version BIGINT NOT NULL, step BIGINT NOT NULL, state TEXT NOT NULL,
        graph TEXT NOT NULL, began_at DOUBLE PRECISION NOT NULL, changed_at DOUBLE PRECISION NOT NULL, question TEXT,
        header BLOB NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS penstock_runs_by_time ON penstock_runs (changed_at, key)",
    "CREATE INDEX IF NOT EXISTS penstock_runs_by_state ON penstock_runs (state, changed_at, key)",
    "CREATE INDEX IF NOT EXISTS penstock_runs_by_graph ON penstock_runs (graph, state, changed_at, key)",
)
# Connections of the process that this one was forked from. To close such a connection would write to the parent's file.
_of_parents: list[Connection] = []


def make_tables(connection: Connection, tables: Iterable[str] = TABLES) -> None:
    """Make the tables that do not exist, and add the keys that an earlier version has kept to the list."""
    with _transaction(connection, ["penstock_runs"]):
        for table in tables:
            connection.execute(table)
        older = connection.execute(
            "SELECT key FROM penstock_loops WHERE key NOT IN (SELECT key FROM penstock_runs) GROUP BY key"
        ).fetchall()
        for (key,) in older:
            present = _load(connection, key, "DESC")
            assert present is not None
            try:
                loop = Loop.read(present)
            except CheckpointError:
                continue  # the record is damaged, and a call with the key will say so
            _list(connection, key, loop.record(present.version))


@contextmanager
def _transaction(connection: Connection, keys: Iterable[str]) -> Generator[None]:
    connection.begin(keys)
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _load(connection: Connection, key: str, order: str) -> LoopRecord | None:
    query = f"SELECT version, step, content FROM penstock_loops WHERE key = ? ORDER BY step {order} LIMIT 1"
    found = connection.execute(query, (key,)).fetchone()
    return None if found is None else LoopRecord(*found)


def _version(connection: Connection, key: str) -> int:
    query = "SELECT version FROM penstock_loops WHERE key = ? ORDER BY step DESC LIMIT 1"
    found = connection.execute(query, (key,)).fetchone()
    return 0 if found is None else int(found[0])


def _store(connection: Connection, key: str, record: LoopRecord, expected_version: int) -> bool:
    with _transaction(connection, [key]):
        present = _version(connection, key)
        is_expected = present == expected_version
        if is_expected:
            connection.execute("DELETE FROM penstock_loops WHERE key = ? AND step >= ?", (key, record.step))
            connection.execute(
                "INSERT INTO penstock_loops (key, step, version, content) VALUES (?, ?, ?, ?)",
                (key, record.step, record.version, record.content),
            )
            _list(connection, key, record)
        elif present == record.version:  # perhaps this record: the connection may have been lost after the write
            query = "SELECT content FROM penstock_loops WHERE key = ? AND version = ?"
            is_expected = connection.execute(query, (key, present)).fetchone() == (record.content,)
    return is_expected


def _list(connection: Connection, key: str, record: LoopRecord) -> None:
    connection.execute(
        "INSERT INTO penstock_runs (key, version, step, state, graph, began_at, changed_at, question, header) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET version = excluded.version, "
        "step = excluded.step, state = excluded.state, graph = excluded.graph, began_at = excluded.began_at, "
        "changed_at = excluded.changed_at, question = excluded.question, header = excluded.header",
        (
            key, record.version, record.step, record.state, record.graph, record.began_at, record.changed_at,
            record.question, record.header,
        ),
    )  # fmt: skip


def _history(connection: Connection, key: str) -> list[LoopRecord]:
    rows = connection.execute(
        "SELECT version, step, content FROM penstock_loops WHERE key = ? ORDER BY step", (key,)
    ).fetchall()
    return [LoopRecord(*row) for row in rows]


def _runs(
    connection: Connection, _: str, state: str | None, graph: str | None, before: tuple[float, str], limit: int
) -> list[tuple[str, LoopRecord, int]]:
    wanted = {"state = ? AND ": state, "graph = ? AND ": graph}
    values = [value for value in wanted.values() if value is not None]
    where = "".join(text for text, value in wanted.items() if value is not None)
    rows = connection.execute(
        "SELECT key, version, step, state, graph, began_at, changed_at, question, header, "
        "(SELECT SUM(LENGTH(content)) FROM penstock_loops WHERE penstock_loops.key = penstock_runs.key) "
        f"FROM penstock_runs WHERE {where}(changed_at, key) < (?, ?) ORDER BY changed_at DESC, key DESC LIMIT ?",
        (*values, *before, limit),
    ).fetchall()
    return [
        (key, LoopRecord(version, step, b"", *columns), int(size or 0)) for key, version, step, *columns, size in rows
    ]


def _delete(connection: Connection, _: str, versions: Mapping[str, int]) -> int:
    deleted = 0
    with _transaction(connection, sorted(versions)):
        for key, version in versions.items():
            if _version(connection, key) == version:
                deleted += 1
                for table in ("penstock_loops", "penstock_runs"):
                    connection.execute(f"DELETE FROM {table} WHERE key = ?", (key,))
    return deleted
