"""`PostgresStore`: durable runs in a database of PostgreSQL, for processes of several machines."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Final

from .._errors import CheckpointError, MissingExtraError
from ..actors.accepted import NAME, check, whole
from .sql import Connection, SQLStore, Watcher, prepare

# TCP settings that tell a dead server from a slow one: a slow server still acknowledges packets.
_LOST_AFTER_SECONDS: Final = 10
# How far the database's clock may leap before leases follow the new time.
_CLOCK_SECONDS: Final = 1.0
# Words of a server that will refuse the next connection as well: psycopg gives no code for them.
_REFUSALS: Final = "authentication failed", "no password supplied", "no pg_hba.conf entry", "does not exist"
_CHANNEL: Final = "penstock_runs"
_MOST_NAMED: Final = 500  # runs in one message, which may have 8,000 bytes


class PostgresStore(SQLStore):
    """Durable runs in a database of PostgreSQL, for processes of several machines.

    It needs psycopg, the extra `postgres`. The tables are made if they do not exist. Leases end by the clock of
    the database. While the server is restarted, a call waits for up to 30 seconds.

    Args:
        dsn: how to connect, as libpq takes it: "postgresql://user@host/database", or "host=... dbname=...".
        max_connections: the most connections of a process, besides one that hears of changes.

    Raises:
        MissingExtraError: psycopg is not installed.
        OptionsError: an argument does not accept its value.

    Its methods raise `CheckpointError` if the server cannot be reached, refuses a statement, or has tables of another
    version.
    """

    _pause_seconds = 0.1
    _give_up_after_seconds = 30.0  # a server needs some seconds to restart

    def __init__(self, dsn: str, *, max_connections: int = 4) -> None:
        check("dsn", dsn, NAME, "PostgresStore(")
        check("max_connections", max_connections, whole(1), "PostgresStore(")
        try:
            self._psycopg: Any = import_module("psycopg")
        except ImportError as error:
            raise MissingExtraError(
                'ps.PostgresStore needs psycopg: pip install "penstock[postgres]"', name="psycopg"
            ) from error
        self._dsn = dsn
        super().__init__("penstock-postgres", max_connections, self._psycopg.Error)

    async def _heard(self, watcher: Watcher) -> AsyncGenerator[None, None]:
        while True:
            try:
                connection: Any = await self._psycopg.AsyncConnection.connect(self._dsn, autocommit=True, **_SETTINGS)
                async with connection:
                    await connection.execute(f"LISTEN {_CHANNEL}")
                    watcher.add(None)
                    while True:
                        yield
                        async for notice in connection.notifies(stop_after=1):
                            watcher.add({int(run) for run in notice.payload.split()} or None)
            except self._error:  # the server is away, and `LISTEN` begins anew once it is back
                await asyncio.sleep(self._pause_seconds)

    def _is_passing(self, error: Exception) -> bool:
        is_refused = any(words in str(error) for words in _REFUSALS)
        return isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError) and not is_refused

    def _refused(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"the durable runs in PostgreSQL: {str(error).strip() or repr(error)}")

    def _connected(self) -> Connection:
        connection = _PostgresConnection(self._psycopg.connect(self._dsn, autocommit=True, **_SETTINGS))
        with ExitStack() as on_error:
            on_error.callback(connection.close)
            prepare(connection, "the database", _as_postgres)
            on_error.pop_all()
        return connection


_SETTINGS: Final = {
    "connect_timeout": _LOST_AFTER_SECONDS, "keepalives_idle": _LOST_AFTER_SECONDS,
    "tcp_user_timeout": 1000 * _LOST_AFTER_SECONDS,
}  # fmt: skip


def _as_postgres(statement: str) -> str:
    # Keys are sorted as in Python and SQLite.
    for word, meant in (
        ("BLOB", "BYTEA"), ("key TEXT", 'key TEXT COLLATE "C"'), ("BIGKEY", "BIGINT PRIMARY KEY"),
        ("IDENTITY", "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"),
    ):  # fmt: skip
        statement = statement.replace(word, meant)
    return statement


class _PostgresConnection:
    lock = " FOR UPDATE"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._pipeline = ExitStack()
        self._ahead_seconds = 0.0  # the clock of the database minus `time.monotonic`
        self._asked_at = -_CLOCK_SECONDS

    @property
    def is_usable(self) -> bool:
        return not self._connection.closed

    def now(self) -> float:
        if time.monotonic() >= self._asked_at + _CLOCK_SECONDS:
            (database_time,) = self.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
            self._asked_at = time.monotonic()
            self._ahead_seconds = float(database_time) - self._asked_at
        return time.monotonic() + self._ahead_seconds

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        return self._connection.execute(statement.replace("?", "%s"), values)

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Any:
        cursor = self._connection.cursor()
        cursor.executemany(statement.replace("?", "%s"), rows)
        return cursor

    def begin(self, thread: str | None = None, *, pipelined: bool = False) -> None:
        if pipelined:
            self._pipeline.enter_context(self._connection.pipeline())
        self.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        if thread is not None:  # an advisory lock, because a thread that does not exist yet has no row to lock
            self.execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (thread,))

    def commit(self) -> None:
        self.execute("COMMIT")
        self._pipeline.close()

    def rollback(self) -> None:
        try:
            self._pipeline.close()
        finally:
            if self.is_usable and self._connection.info.transaction_status.name != "IDLE":
                self.execute("ROLLBACK")

    def tell(self, runs: Collection[int]) -> None:
        named = " ".join(map(str, runs)) if len(runs) <= _MOST_NAMED else ""
        self.execute("SELECT pg_notify(?, ?)", (_CHANNEL, named))

    def close(self) -> None:
        self._connection.close()
