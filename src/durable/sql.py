"""Durable runs in SQL: what `SQLiteStore`, `PostgresStore` and `MemoryStore` have in common, and their tables."""

import asyncio
import os
import sys
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from .._errors import CheckpointError
from ..actors.accepted import check
from ..extension import end_with_loop
from .store import (
    ENDED,
    EVENTS_KEPT,
    KEY,
    WAITING,
    Answer,
    Batch,
    Cancel,
    Change,
    Entry,
    Event,
    NewRun,
    Question,
    Resume,
    Run,
    State,
    Store,
    Written,
    is_gone,
)

T = TypeVar("T")

# A row of entries or events has one number: the number of the run in its upper half, and below its own number.
_ROWS: Final = 1 << 32
_ACTIVE: Final = ("running", *WAITING)
_WITH_PREFIX: Final = "key >= ? AND key < ?"
_FEW: Final = 500  # runs that are sorted in some milliseconds
_MOST_NAMED: Final = 500  # rows in one statement
_EXPIRED_AT_ONCE: Final = 20  # so that a worker that claims waits for a few milliseconds at most

# Each version of the tables by the statements that make it of the version before; SQLite and PostgreSQL take them.
MIGRATIONS: list[tuple[str, ...]] = [
    (
        """
        CREATE TABLE penstock_runs (
            run IDENTITY, key TEXT NOT NULL UNIQUE, thread TEXT, turn BIGINT NOT NULL, graph TEXT NOT NULL,
            plan TEXT NOT NULL, state TEXT NOT NULL, epoch BIGINT NOT NULL, owner TEXT, lease_until DOUBLE PRECISION,
            wakes_at DOUBLE PRECISION, cancel BOOLEAN NOT NULL DEFAULT FALSE, lost BIGINT NOT NULL DEFAULT 0,
            created_at DOUBLE PRECISION NOT NULL, changed_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION,
            keep_seconds DOUBLE PRECISION, error BLOB, result BIGINT, stored_bytes BIGINT NOT NULL DEFAULT 0
        )
        """,
        "CREATE INDEX penstock_runs_due ON penstock_runs (state, wakes_at)",
        "CREATE INDEX penstock_runs_graph ON penstock_runs (graph, state, changed_at, key)",
        "CREATE INDEX penstock_runs_state ON penstock_runs (state, changed_at, key)",
        "CREATE INDEX penstock_runs_changed ON penstock_runs (changed_at, key)",
        "CREATE INDEX penstock_runs_thread ON penstock_runs (thread, turn) WHERE thread IS NOT NULL",
        "CREATE INDEX penstock_runs_expires ON penstock_runs (expires_at) WHERE expires_at IS NOT NULL",
        """
        CREATE TABLE penstock_entries (
            id BIGKEY, path TEXT NOT NULL, kind TEXT NOT NULL, moment BIGINT NOT NULL, at DOUBLE PRECISION NOT NULL,
            value BLOB, parts BLOB
        )
        """,
        """
        CREATE TABLE penstock_questions (
            token TEXT NOT NULL PRIMARY KEY, run BIGINT NOT NULL, path TEXT NOT NULL, question BLOB NOT NULL, type BLOB,
            asked_at DOUBLE PRECISION NOT NULL, answer BLOB, answered_at DOUBLE PRECISION
        )
        """,
        "CREATE INDEX penstock_questions_run ON penstock_questions (run, asked_at)",
        "CREATE TABLE penstock_events (id BIGKEY, count BIGINT NOT NULL, content BLOB NOT NULL)",
    ),
]
_RUN: Final = (
    "run, key, graph, plan, state, thread, turn, epoch, owner, lease_until, wakes_at, cancel, lost, created_at, "
    "changed_at, expires_at, keep_seconds, error, result, stored_bytes, COALESCE((SELECT id + count - 1 - run * "
    f"{_ROWS} FROM penstock_events WHERE id >= run * {_ROWS} AND id < (run + 1) * {_ROWS} ORDER BY id DESC LIMIT 1), 0)"
)
_QUESTION: Final = "token, path, question, type, asked_at, answer, answered_at"


class Connection(Protocol):
    """A connection to a database, of SQLite or of PostgreSQL."""

    @property
    def is_usable(self) -> bool:
        """Whether the connection can be used again."""
        ...

    @property
    def lock(self) -> str:
        """What a SELECT ends with so that no other transaction changes the rows."""
        ...

    def now(self) -> float:
        """Return the time of the store, in seconds since 1970."""
        ...

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        """Execute a statement, which has a `?` for each value, and return a cursor."""

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Any:
        """Execute a statement for each row, and return a cursor, whose `rowcount` is the sum."""

    def begin(self, thread: str | None = None, *, pipelined: bool = False) -> None:
        """Begin a transaction that writes.

        Args:
            thread: a thread of which no other transaction begins a run at the same time.
            pipelined: whether statements may be sent before the ones before them have returned; then their `rowcount`
                is not known.
        """

    def commit(self) -> None:
        """Commit the transaction, and return once it outlasts a crash."""

    def rollback(self) -> None:
        """End the transaction without its writes, if it goes on."""

    def tell(self, runs: Collection[int]) -> None:
        """Tell other processes that these runs were changed, once the transaction ends."""

    def close(self) -> None:
        """Close it."""


class Watcher:
    """A reader of `changes`: what has changed since it looked last.

    Attributes:
        runs: the runs that have changed; None if any may have.
        event: set if something has changed.
    """

    def __init__(self) -> None:
        self.runs: set[int] | None = None  # nobody has told of what has changed before
        self.event = asyncio.Event()
        self.event.set()

    def add(self, runs: Collection[int] | None) -> None:
        """Add runs that have changed; None if any may have."""
        self.runs = None if runs is None or self.runs is None else self.runs | set(runs)
        self.event.set()

    def take(self) -> frozenset[int] | None:
        """Return what has changed since the last call."""
        found, self.runs = self.runs, set()
        self.event.clear()
        return None if found is None else frozenset(found)


class SQLStore(Store):
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

    async def begin(self, new: NewRun, /) -> Run:
        """Keep a new run, or return the run that is there under its key; see `Store.begin`."""
        check("key", new.key, KEY, "begin(")
        if new.thread is not None:
            check("thread", new.thread, KEY, "begin(")
        return await self._do(_begin, new)

    async def claim(
        self,
        graphs: Collection[str],
        owner: str,
        lease_seconds: float,
        limit: int,
        *,
        key: str | None = None,
        without: Collection[int] = (),
    ) -> Sequence[Run]:
        """Give runs to a worker; see `Store.claim`."""
        return await self._do(_claim, tuple(graphs), owner, lease_seconds, limit, key, tuple(without))

    async def write(self, batches: Sequence[Batch], /) -> Sequence[Written]:
        """Keep what owners have to write, in one transaction; see `Store.write`."""
        return await self._do(_write, batches) if batches else ()

    async def load(self, run: int, /, seqs: Collection[int] | None = None) -> Sequence[Entry]:
        """Return the entries of a run; see `Store.load`."""
        return await self._do(_load, run, None if seqs is None else tuple(seqs))

    async def read(self, key: str, /) -> Run | None:
        """Return the run under a key; None if there is none."""
        found = await self._do(_runs, "WHERE key = ?", (key,))
        return found[0] if found else None

    async def change(self, key: str, change: Change, /) -> Run | None:
        """Answer, cancel or resume a run; see `Store.change`."""
        return await self._do(_change, key, change)

    async def events(self, run: int, /, after: int, limit: int) -> Sequence[Event]:
        """Return events behind a number; see `Store.events`."""
        return await self._do(_events, run, after, limit)

    async def list(
        self,
        *,
        state: State | None = None,
        graph: str | None = None,
        prefix: str = "",
        thread: str | None = None,
        before: tuple[float, str] | None = None,
        limit: int = 50,
    ) -> Sequence[Run]:
        """Return runs, the last changed first; see `Store.list`."""
        wanted: dict[str, Sequence[object]] = {}
        if graph is not None:
            wanted["graph = ?"] = (graph,)
        if thread is not None:
            wanted["thread = ?"] = (thread,)
        if prefix:
            wanted[_WITH_PREFIX] = prefix, _behind(prefix) or "\U0010ffff" * 513
        if before is not None:
            wanted["(changed_at, key) < (?, ?)"] = before
        return await self._do(_list, wanted, state, limit)

    async def delete(self, keys: Collection[str], /, *, states: Collection[State] = (*WAITING, *ENDED)) -> int:
        """Delete runs with everything that is kept of them; see `Store.delete`."""
        return await self._do(_delete, tuple(keys), tuple(states)) if keys else 0

    async def changes(self) -> AsyncGenerator[frozenset[int] | None, None]:
        """Yield after changes that somebody may wait for; see `Store.changes`."""
        database = self._database(asyncio.get_running_loop())
        watcher = Watcher()
        database.watchers.append(watcher)
        try:
            async with aclosing(self._heard(watcher)) as heard:
                async for _ in heard:
                    yield watcher.take()
        finally:
            database.watchers.remove(watcher)

    async def _heard(self, watcher: Watcher) -> AsyncGenerator[None, None]:
        """Yield once something has changed, in this process or another one."""
        while True:
            await watcher.event.wait()
            yield

    async def _do(self, work: Callable[..., T], *args: Any) -> T:
        """Do work in a thread, with a connection, again while the database is away; then wake those who wait for it."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._give_up_after_seconds
        while True:
            database = self._database(loop)
            try:
                done, changed = await self._run(database, work, args)
            except self._error as error:
                if not self._is_passing(error) or loop.time() >= give_up_at:
                    raise self._refused(error) from error
            else:
                for watcher in database.watchers if changed else ():
                    watcher.add(changed)
                return done
            # The pause is not in the thread: others need the thread, and a caller could not be cancelled there.
            await asyncio.sleep(self._pause_seconds)

    async def _run(self, database: "Database", work: Callable[..., T], args: Sequence[Any]) -> tuple[T, set[int]]:
        return await database.run(work, args)

    def _database(self, loop: asyncio.AbstractEventLoop) -> "Database":
        database = self._databases.get(loop)
        if database is None or database.is_closed:
            for other in [other for other in self._databases if other.is_closed()]:
                self._databases.pop(other, None)
            database = self._databases[loop] = Database(self._max_connections, self._name, self._connected)
        return database

    @abstractmethod
    def _connected(self) -> Connection:
        """Return a new connection. Called in a thread."""

    @abstractmethod
    def _is_passing(self, error: Exception) -> bool:
        """Whether the same work may succeed in a moment."""

    @abstractmethod
    def _refused(self, error: Exception) -> CheckpointError: ...


class Database:
    """Threads of one event loop, and the connections to a database that the threads use.

    Args:
        max_connections: the most threads and connections.
        name: a prefix of the threads' names.
        connect: makes a connection, in a thread.

    Attributes:
        is_closed: whether its event loop has ended.
        connections: all connections.
        watchers: the readers of `changes`.
    """

    def __init__(self, max_connections: int, name: str, connect: Callable[[], Connection]) -> None:
        self._threads = ThreadPoolExecutor(max_connections, name)
        self._connect = connect
        self._idle: list[Connection] = []
        self.is_closed = False
        self.connections: list[Connection] = []
        self.watchers: list[Watcher] = []
        self._guard = end_with_loop(self._aclose)
        _open.add(self)

    async def run(self, work: Callable[..., T], args: Sequence[Any]) -> tuple[T, set[int]]:
        """Call a function in a thread, with a connection and a set for the runs that it changes."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work, args)

    def _run(self, work: Callable[..., T], args: Sequence[Any]) -> tuple[T, set[int]]:
        if self._idle:
            connection = self._idle.pop()
        else:
            self.connections.append(connection := self._connect())
        changed: set[int] = set()
        try:
            return work(connection, changed, *args), changed
        finally:
            if connection.is_usable:
                self._idle.append(connection)
            else:
                self._disconnect(connection)

    async def _aclose(self) -> None:
        self.is_closed = True
        _open.discard(self)
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        for connection in self._idle:
            self._disconnect(connection)  # SQLite moves its write-ahead log into the file then

    def _disconnect(self, connection: Connection) -> None:
        self.connections.remove(connection)
        connection.close()


# Those whose event loop goes on, also if nobody else refers to them: their connections have to be closed.
_open: set[Database] = set()
# Connections of the process that this one was forked from. To close such a connection would write to the parent's file.
_of_parents: list[Connection] = []


def _forget_connections_of_parent() -> None:
    for database in _open:
        _of_parents.extend(database.connections)
        database.is_closed = True


os.register_at_fork(after_in_child=_forget_connections_of_parent)


def prepare(connection: Connection, place: str, words: Callable[[str], str]) -> None:
    """Make the tables, or bring them to this version.

    Args:
        connection: the connection.
        place: the file or database, for errors.
        words: returns a statement in the words of the database.

    Raises:
        CheckpointError: the tables are those of a newer version, or of the mechanism before this one.
    """
    if _version(connection, place) == len(MIGRATIONS):
        return
    with _transaction(connection, set(), "penstock_meta"):
        version = _version(connection, place)
        if version == 0:
            connection.execute("CREATE TABLE penstock_meta (version BIGINT NOT NULL)")
            connection.execute("INSERT INTO penstock_meta (version) VALUES (0)")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(words(statement))
        connection.execute("UPDATE penstock_meta SET version = ?", (len(MIGRATIONS),))


def _version(connection: Connection, place: str) -> int:
    tables = connection.execute(_TABLES[connection.lock]).fetchall()
    if ("penstock_meta",) in tables:
        (version,) = connection.execute("SELECT version FROM penstock_meta").fetchone()
        if version > len(MIGRATIONS):
            raise CheckpointError(
                f"{place} has tables of version {version}, and this version of Penstock knows {len(MIGRATIONS)}: use "
                "the version of Penstock that made them, or a newer one"
            )
        return int(version)
    if ("penstock_loops",) in tables:
        raise CheckpointError(
            f"{place} holds loops that an earlier version of Penstock has kept with while_loop(durable=...), and this "
            "version keeps runs of graphs: let that version finish these loops, and use another file or database here; "
            "or drop the tables penstock_loops and penstock_runs"
        )
    return 0


# By the lock of a connection: how it lists its tables.
_TABLES: Final = {
    "": "SELECT name FROM sqlite_master",
    " FOR UPDATE": "SELECT table_name FROM information_schema.tables WHERE table_schema = ANY (current_schemas(false))",
}


@contextmanager
def _transaction(
    connection: Connection, changed: set[int], thread: str | None = None, *, pipelined: bool = False
) -> Generator[None]:
    try:
        connection.begin(thread, pipelined=pipelined)
        yield
        if changed:
            connection.tell(changed)
        connection.commit()
    finally:
        connection.rollback()


def _runs(connection: Connection, _: set[int], rest: str, values: Sequence[Any], questions: str = "") -> Sequence[Run]:
    rows = connection.execute(f"SELECT {_RUN} FROM penstock_runs {rest}", values).fetchall()
    asked: dict[int, list[Question]] = {row[0]: [] for row in rows}
    if rows:
        found = connection.execute(
            f"SELECT run, {_QUESTION} FROM penstock_questions WHERE run IN ({_marks(rows)}) {questions} "
            "ORDER BY asked_at, token",
            tuple(asked),
        )
        for run, *question in found.fetchall():
            asked[run].append(Question(*question))
    now = connection.now()
    fields: Any = ((*row[:11], bool(row[11]), *row[12:], tuple(asked[row[0]]), now) for row in rows)
    return [Run(*of_run) for of_run in fields]


def _list(
    connection: Connection, _: set[int], wanted: dict[str, Sequence[Any]], state: State | None, limit: int
) -> Sequence[Run]:
    # The index of graphs is sorted by state before time, so each state is asked for separately.
    states = [state] if state is not None else [*_ACTIVE, *ENDED] if "graph = ?" in wanted else []
    # Few keys are sorted; of many, the last changed ones are found soon in the order of time.
    few = (
        wanted.get(_WITH_PREFIX)
        and not connection.execute(
            f"SELECT 1 FROM penstock_runs WHERE {_WITH_PREFIX} LIMIT 1 OFFSET {_FEW}", wanted[_WITH_PREFIX]
        ).fetchone()
    )
    found: list[Run] = []
    for which in [{**wanted, "state = ?": (one,)} for one in states] or [wanted]:
        where = f"WHERE {' AND '.join(which)} " if which else ""
        where = where if few else where.replace("key ", "key || '' ")  # an expression, so that its index is not used
        values = [value for values in which.values() for value in values]
        order = f"{where}ORDER BY changed_at{' + 0' if few else ''} DESC, key DESC LIMIT ?"
        found += _runs(connection, _, order, (*values, limit), "AND answered_at IS NULL")
    return sorted(found, key=lambda run: (run.changed_at, run.key), reverse=True)[:limit]


def _marks(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values)) or "NULL"


def _behind(prefix: str) -> str:
    """Return the least text behind all texts with this prefix, in the order of code points; empty if there is none."""
    rest = prefix.rstrip(chr(sys.maxunicode))
    following = chr(ord(rest[-1]) + 1) if rest else ""
    return rest[:-1] + ("\ue000" if following == "\ud800" else following)


def _begin(connection: Connection, changed: set[int], new: NewRun) -> Run:
    with _transaction(connection, changed, new.thread):
        now = connection.now()
        found = _runs(connection, changed, "WHERE key = ?", (new.key,))
        if found and not _drop(connection, (new.key,), ENDED, expired_at=now):
            return found[0]
        before: Sequence[Run] = ()
        turn = 0
        if new.thread is not None:
            active = f"WHERE thread = ? AND state IN ({_marks(_ACTIVE)}) ORDER BY turn{connection.lock}"
            before = _runs(connection, changed, active, (new.thread, *_ACTIVE))
            if before and new.busy == "refuse":
                return before[0]
            for run in before if new.busy == "cancel" else ():
                _cancel(connection, changed, run)
            if new.busy == "cancel":
                before = [run for run in before if run.state == "running"]
            (last,) = connection.execute(
                "SELECT MAX(turn) FROM penstock_runs WHERE thread = ?", (new.thread,)
            ).fetchone()
            turn = (last or 0) + 1
        is_later = new.wakes_at is not None and new.wakes_at > now
        owner = None if is_later or before else new.owner
        state = "sleeping" if is_later else "queued" if owner is None else "running"
        lease_until = None if owner is None else now + new.lease_seconds
        wakes_at = new.wakes_at if is_later else now if owner is None else None
        inserted = connection.execute(
            "INSERT INTO penstock_runs (key, graph, plan, state, thread, turn, epoch, owner, lease_until, wakes_at, "
            "created_at, changed_at, keep_seconds, stored_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (key) DO NOTHING",
            (
                new.key, new.graph, new.plan, state, new.thread, turn, int(owner is not None), owner, lease_until,
                wakes_at, now, now, new.keep_seconds, sum(map(_size, new.entries)),
            ),
        )  # fmt: skip
        (run,) = _runs(connection, changed, "WHERE key = ?", (new.key,))
        if inserted.rowcount:
            _insert_entries(connection, [(run.run, entry) for entry in new.entries])
            changed.add(run.run)
        return run


def _size(entry: Entry) -> int:
    return len(entry.path) + len(entry.value or b"") + len(entry.parts or b"")


def _insert_entries(connection: Connection, entries: Sequence[tuple[int, Entry]]) -> None:
    """Insert entries that are not there."""
    if entries:
        connection.executemany(
            "INSERT INTO penstock_entries (id, path, kind, moment, at, value, parts) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO NOTHING",
            [(run * _ROWS + entry[0], *entry[1:]) for run, entry in entries],
        )


def _claim(
    connection: Connection,
    changed: set[int],
    graphs: Sequence[str],
    owner: str,
    lease_seconds: float,
    limit: int,
    key: str | None,
    without: Sequence[int],
) -> Sequence[Run]:
    with _transaction(connection, changed):
        now = connection.now()
        if key is None:
            expired = "SELECT key FROM penstock_runs WHERE expires_at <= ? LIMIT ?"
            keys = [key for (key,) in connection.execute(expired, (now, _EXPIRED_AT_ONCE)).fetchall()]
            _drop(connection, keys, ENDED, expired_at=now)
        running = "SELECT DISTINCT owner FROM penstock_runs WHERE state = 'running' AND lease_until >= ?"
        dead = [name for (name,) in connection.execute(running, (now,)).fetchall() if is_gone(name)]
        over = f"lease_until < ? OR owner IN ({_marks(dead)})" if dead else "lease_until < ?"
        rest = (
            f"AND graph IN ({_marks(graphs)}) {'' if key is None else 'AND key = ? '}"
            f"{f'AND run NOT IN ({_marks(without)}) ' if without else ''}AND (thread IS NULL OR NOT EXISTS (SELECT 1 "
            "FROM penstock_runs AS earlier WHERE earlier.thread = penstock_runs.thread AND earlier.turn < "
            f"penstock_runs.turn AND earlier.state IN ({_marks(_ACTIVE)})))"
        )
        values = (*graphs, *(() if key is None else (key,)), *without, *_ACTIVE)
        found: list[int] = []
        for which, first in (
            (f"state = 'running' AND ({over})", (now, *dead)),
            *((f"state = '{state}' AND wakes_at <= ?", (now,)) for state in ("sleeping", "asking", "queued")),
        ):
            if graphs and len(found) < limit:
                rows = connection.execute(
                    f"SELECT run FROM penstock_runs WHERE {which} {rest} ORDER BY wakes_at, run LIMIT ?"
                    f"{connection.lock and f'{connection.lock} SKIP LOCKED'}",
                    (*first, *values, limit - len(found)),
                )
                found += [run for (run,) in rows.fetchall()]
        if not found:
            return ()
        connection.execute(
            "UPDATE penstock_runs SET lost = lost + CASE WHEN state = 'running' THEN 1 ELSE 0 END, state = 'running', "
            "epoch = epoch + 1, owner = ?, lease_until = ?, wakes_at = NULL, changed_at = ? "
            f"WHERE run IN ({_marks(found)})",
            (owner, now + lease_seconds, now, *found),
        )
        changed.update(found)
        runs = {run.run: run for run in _runs(connection, changed, f"WHERE run IN ({_marks(found)})", found)}
        return [runs[run] for run in found]


def _write(connection: Connection, changed: set[int], batches: Sequence[Batch]) -> Sequence[Written]:
    with _transaction(connection, changed, pipelined=True):
        now = connection.now()
        runs = sorted({batch.run for batch in batches})
        rows = connection.execute(
            "SELECT run, epoch, state, cancel, stored_bytes, (SELECT COUNT(answered_at) FROM penstock_questions WHERE "
            "penstock_questions.run = penstock_runs.run), (SELECT MAX(id) FROM penstock_entries WHERE "
            f"id >= penstock_runs.run * {_ROWS} AND id < (penstock_runs.run + 1) * {_ROWS}) FROM penstock_runs "
            f"WHERE run IN ({_marks(runs)}) ORDER BY run{connection.lock}",
            runs,
        )
        found = {run: _Found(*row) for run, *row in rows.fetchall()}
        written = [_outcome(batch, found.get(batch.run), now) for batch in batches]
        # The batch of a run that its owner has left is a repetition: its rows are there.
        taken = [
            (batch, one)
            for batch, one in zip(batches, written, strict=True)
            if one.state is not None and found[batch.run].state == "running"
        ]
        _insert_entries(connection, [(batch.run, entry) for batch, _ in taken for entry in batch.entries])
        staying: list[Sequence[Any]] = []
        for batch, one in taken:
            _insert_others(connection, batch)
            new_bytes = sum(map(_size, batch.entries))
            last = found[batch.run].last_id or 0
            if batch.drops or any(batch.run * _ROWS + entry.seq <= last for entry in batch.entries):  # some are there
                new_bytes = _bytes(connection, batch.run) - found[batch.run].stored_bytes
            if one.state == "running":
                staying.append((one.lease_until, bool(batch.entries), new_bytes, batch.run))
            else:
                _leave(connection, batch, one, now, new_bytes)
            if one.state != "running" or batch.questions or batch.events:
                changed.add(batch.run)
        if staying:  # a statement without columns of an index, so that SQLite leaves the indexes alone
            connection.executemany(
                "UPDATE penstock_runs SET lease_until = ?, lost = CASE WHEN ? THEN 0 ELSE lost END, "
                "stored_bytes = stored_bytes + ? WHERE run = ?",
                staying,
            )
    return written


class _Found(NamedTuple):
    """What a write finds of a run."""

    epoch: int
    state: State
    cancel: bool
    stored_bytes: int
    answers: int
    last_id: int | None


def _outcome(batch: Batch, found: _Found | None, now: float) -> Written:
    """Return what becomes of a batch."""
    if found is None or found.epoch != batch.epoch:
        return Written(None)
    if found.state != "running":
        return Written(None if batch.state is None else found.state, bool(found.cancel))
    left = batch.state
    if left is None:
        return Written("running", bool(found.cancel), now + batch.lease_seconds)
    if found.cancel and left in WAITING:
        left = "cancelled"
    elif left in ("asking", "sleeping") and found.answers > batch.answers:
        left = "queued"
    return Written(left, bool(found.cancel))


def _insert_others(connection: Connection, batch: Batch) -> None:
    """Insert the questions and events of a batch that are not there, and delete what is not needed any more."""
    first = batch.run * _ROWS
    if batch.questions:
        connection.executemany(
            f"INSERT INTO penstock_questions (run, {_QUESTION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (token) DO NOTHING",
            [(batch.run, *question) for question in batch.questions],
        )
    if batch.drops:
        drops = [(first + seq,) for seq in batch.drops]
        connection.executemany("DELETE FROM penstock_entries WHERE id = ?", drops)
    if batch.events:
        connection.executemany(
            "INSERT INTO penstock_events (id, count, content) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING",
            [(first + event.first, event.size, event.content) for event in batch.events],
        )
        oldest = max(event.first + event.size for event in batch.events) - EVENTS_KEPT
        connection.execute(
            "DELETE FROM penstock_events WHERE id > ? AND id < ? AND id + count <= ?",
            (first, first + max(oldest, 0), first + oldest),
        )


def _bytes(connection: Connection, run: int) -> int:
    """Return how many bytes the entries of a run take."""
    (found,) = connection.execute(
        "SELECT SUM(LENGTH(path) + COALESCE(LENGTH(value), 0) + COALESCE(LENGTH(parts), 0)) FROM penstock_entries "
        "WHERE id >= ? AND id < ?",
        (run * _ROWS, (run + 1) * _ROWS),
    ).fetchone()
    return int(found or 0)


def _leave(connection: Connection, batch: Batch, written: Written, now: float, new_bytes: int) -> None:
    """Write the state in which an owner leaves a run."""
    wakes_at = batch.wakes_at if written.state in ("asking", "sleeping") else None
    connection.execute(
        "UPDATE penstock_runs SET state = ?, lease_until = NULL, wakes_at = ?, changed_at = ?, error = ?, result = ?, "
        "lost = CASE WHEN ? THEN 0 ELSE lost END, stored_bytes = stored_bytes + ?, "
        "expires_at = CASE WHEN ? THEN ? + keep_seconds END WHERE run = ?",
        (
            written.state, now if written.state == "queued" else wakes_at, now, batch.error, batch.result,
            bool(batch.entries), new_bytes, written.state in ENDED, now, batch.run,
        ),
    )  # fmt: skip


def _load(connection: Connection, _: set[int], run: int, seqs: Sequence[int] | None) -> Sequence[Entry]:
    first = run * _ROWS
    # A statement may have some thousand values; of the entries of a run, all are read then.
    some = seqs if seqs is not None and len(seqs) <= _MOST_NAMED else None
    which = "id >= ? AND id < ?" if some is None else f"id IN ({_marks(some)})"
    values = [first, first + _ROWS] if some is None else [first + seq for seq in some]
    rows = connection.execute(
        f"SELECT id - {first}, path, kind, moment, at, value, parts FROM penstock_entries WHERE {which} ORDER BY id",
        values,
    )
    wanted = None if seqs is None else set(seqs)
    return [Entry._make(row) for row in rows.fetchall() if wanted is None or row[0] in wanted]


def _change(connection: Connection, changed: set[int], key: str, change: Change) -> Run | None:
    with _transaction(connection, changed):
        found = _runs(connection, changed, f"WHERE key = ?{connection.lock}", (key,))
        if not found:
            return None
        (run,) = found
        match change:
            case Answer(token, answer):
                _answer(connection, changed, run, token, answer)
            case Cancel():
                _cancel(connection, changed, run)
            case Resume(forget):
                _resume(connection, changed, run, forget)
        return _runs(connection, changed, "WHERE key = ?", (key,))[0] if changed else run


def _answer(connection: Connection, changed: set[int], run: Run, token: str, answer: bytes) -> None:
    if run.state in ENDED:
        return
    taken = connection.execute(
        "UPDATE penstock_questions SET answer = ?, answered_at = ? WHERE token = ? AND run = ? AND answered_at IS NULL",
        (answer, run.now, token, run.run),
    )
    if taken.rowcount:
        changed.add(run.run)
        connection.execute(
            "UPDATE penstock_runs SET changed_at = ?, wakes_at = CASE WHEN state = 'asking' THEN ? ELSE wakes_at END, "
            "state = CASE WHEN state = 'asking' THEN 'queued' ELSE state END WHERE run = ?",
            (run.now, run.now, run.run),
        )


def _cancel(connection: Connection, changed: set[int], run: Run) -> None:
    is_lost = run.lease_until is not None and (run.lease_until < run.now or is_gone(run.owner or ""))
    if run.state in WAITING or is_lost:
        # A new epoch, so that an owner that still runs writes nothing more.
        connection.execute(
            "UPDATE penstock_runs SET state = 'cancelled', epoch = epoch + ?, lease_until = NULL, wakes_at = NULL, "
            "changed_at = ?, expires_at = ? + keep_seconds WHERE run = ?",
            (int(is_lost), run.now, run.now, run.run),
        )
        changed.add(run.run)
    elif run.state == "running" and not run.cancel:
        connection.execute("UPDATE penstock_runs SET cancel = TRUE WHERE run = ?", (run.run,))
        changed.add(run.run)


def _resume(connection: Connection, changed: set[int], run: Run, forget: Sequence[int]) -> None:
    if run.state in ("failed", "cancelled"):
        connection.execute(
            "UPDATE penstock_runs SET state = 'queued', wakes_at = ?, changed_at = ?, cancel = FALSE, lost = 0, "
            "error = NULL, expires_at = NULL WHERE run = ?",
            (run.now, run.now, run.run),
        )
    elif run.state != "queued" or not forget:
        return
    changed.add(run.run)
    rows = [(run.run * _ROWS + seq,) for seq in forget]
    if rows:
        connection.executemany("UPDATE penstock_entries SET kind = 'forgotten' WHERE id = ?", rows)


def _events(connection: Connection, _: set[int], run: int, after: int, limit: int) -> Sequence[Event]:
    first = run * _ROWS
    (begin,) = connection.execute(
        "SELECT MAX(id) FROM penstock_events WHERE id > ? AND id <= ?", (first, first + after + 1)
    ).fetchone()
    rows = connection.execute(
        f"SELECT id - {first}, count, content FROM penstock_events WHERE id >= ? AND id < ? AND id + count > ? "
        "ORDER BY id LIMIT ?",
        (begin or first, first + _ROWS, first + after + 1, limit),
    )
    return [Event._make(row) for row in rows.fetchall()]


def _delete(connection: Connection, changed: set[int], keys: Sequence[str], states: Sequence[State]) -> int:
    with _transaction(connection, changed):
        return _drop(connection, keys, states)


def _drop(
    connection: Connection, keys: Iterable[str], states: Collection[State], expired_at: float | None = None
) -> int:
    """Delete runs and whole threads whose runs are all in these states, and have expired if a time is given."""
    dropped = 0
    for key in keys:
        rows = connection.execute(
            "SELECT run, state, expires_at FROM penstock_runs WHERE key = ? OR thread = (SELECT thread FROM "
            f"penstock_runs WHERE key = ?) ORDER BY run{connection.lock}",
            (key, key),
        ).fetchall()
        if all(state in states for _, state, _ in rows) and all(
            expired_at is None or (expires_at is not None and expires_at <= expired_at) for *_, expires_at in rows
        ):
            for run, *_ in rows:
                dropped += 1
                connection.execute("DELETE FROM penstock_runs WHERE run = ?", (run,))
                connection.execute("DELETE FROM penstock_questions WHERE run = ?", (run,))
                for table in ("penstock_entries", "penstock_events"):
                    connection.execute(
                        f"DELETE FROM {table} WHERE id >= ? AND id < ?", (run * _ROWS, (run + 1) * _ROWS)
                    )
    return dropped
