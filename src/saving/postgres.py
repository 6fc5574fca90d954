"""`PostgresStore`: durable loops in a database of PostgreSQL, for agents behind several servers."""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Final

from .._errors import CheckpointError, MissingExtraError
from ..actors.accepted import NAME, check, whole
from .store import TABLES, Connection, SQLStore, make_tables

# TCP settings that tell a dead server from a slow one: a slow server still acknowledges packets.
_LOST_AFTER_SECONDS: Final = 10
# How far the database's clock may leap before leases follow the new time.
_CLOCK_SECONDS: Final = 1.0
# Words of a server that will refuse the next connection as well: psycopg gives no code for them.
_REFUSALS: Final = "authentication failed", "no password supplied", "no pg_hba.conf entry", "does not exist"


class PostgresStore(SQLStore):
    """Loops in a database of PostgreSQL, for processes of several machines. It needs psycopg, the extra `postgres`.

    The two tables are made if they do not exist. Leases end by the clock of the database. While the server is
    restarted, a call waits for up to 30 seconds, and never beyond its deadline.

    Args:
        dsn: how to connect, as libpq takes it: "postgresql://user@host/database", or "host=... dbname=...".
        max_connections: the most connections of a process.

    Raises:
        MissingExtraError: psycopg is not installed.
        OptionsError: an argument does not accept its value.

    Its methods raise `CheckpointError` if the server cannot be reached, or refuses a statement.
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
        self._ahead_seconds = 0.0  # the clock of the database minus `time.monotonic`
        self._asked_at = -_CLOCK_SECONDS
        super().__init__("penstock-postgres", max_connections, self._psycopg.Error)

    async def now(self) -> float:
        """Return the time of the database, in seconds since 1970."""
        if time.monotonic() >= self._asked_at + _CLOCK_SECONDS:
            database_time = await self._in_thread(_time, "")
            self._asked_at = time.monotonic()
            self._ahead_seconds = database_time - self._asked_at
        return time.monotonic() + self._ahead_seconds

    def _is_passing(self, error: Exception) -> bool:
        is_refused = any(words in str(error) for words in _REFUSALS)
        return isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError) and not is_refused

    def _refused(self, key: str, error: Exception) -> CheckpointError:
        named = f"the loop of key {key!r}" if key else "the loops"
        return CheckpointError(f"{named} in PostgreSQL: {str(error).strip() or repr(error)}")

    def _connected(self) -> Connection:
        connection = _PostgresConnection(
            self._psycopg.connect(
                self._dsn, autocommit=True, connect_timeout=_LOST_AFTER_SECONDS, keepalives_idle=_LOST_AFTER_SECONDS,
                tcp_user_timeout=1000 * _LOST_AFTER_SECONDS,
            )
        )  # fmt: skip
        with ExitStack() as on_error:
            on_error.callback(connection.close)
            if connection.execute("SELECT to_regclass('penstock_runs_by_graph')").fetchone() == (None,):
                make_tables(connection, map(_as_postgres, TABLES))
            on_error.pop_all()
        return connection


def _as_postgres(statement: str) -> str:
    # Keys are sorted as in Python and SQLite.
    return statement.replace("BLOB", "BYTEA").replace("key TEXT", 'key TEXT COLLATE "C"')


def _time(connection: Connection, _: str) -> float:
    return float(connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()[0])


class _PostgresConnection:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @property
    def is_usable(self) -> bool:
        return not self._connection.closed

    @property
    def in_transaction(self) -> bool:
        return self.is_usable and bool(self._connection.info.transaction_status.name != "IDLE")

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        return self._connection.execute(statement.replace("?", "%s"), values)

    def begin(self, keys: Iterable[str]) -> None:
        # An advisory lock for each key, because a key that does not exist yet has no row to lock.
        self.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        for key in keys:
            self.execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (key,))

    def close(self) -> None:
        self._connection.close()
