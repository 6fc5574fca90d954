"""A PostgreSQL server that tests start, kill and restart; it listens on a socket in its own folder, and on no port."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.packages import needs_package

# Debian keeps the programs of a server in a folder for its version, which is not on the path.
FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
PG_CTL = shutil.which("pg_ctl", path=os.pathsep.join([*map(str, FOLDERS[::-1]), os.environ.get("PATH", "")]))
needs_postgres = needs_package("postgresql", PG_CTL)
psycopg: Any = pytest.importorskip("psycopg", reason='needs psycopg: pip install "penstock[postgres]"')


class Server:
    """A server that listens on a socket in its own folder, and on no port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.databases = count()
        # PostgreSQL refuses to run as root; Debian's package has made the user "postgres".
        self.user = "postgres" if os.geteuid() == 0 else None
        if self.user is not None:
            shutil.chown(folder, self.user)
        self.control("initdb", "-o", "-A trust -U penstock --no-sync")
        self.start()

    def control(self, *arguments: str) -> None:
        assert PG_CTL is not None
        subprocess.run(
            [PG_CTL, "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), *arguments], check=True,
            cwd=self.folder, user=self.user, stdout=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip

    def start(self) -> None:
        # Tests kill the server and not the machine, so its writes need not reach the disk.
        self.control("-w", "-o", f"-k {self.folder} -c listen_addresses= -c fsync=off", "start")

    def kill(self) -> None:
        """Kills the server as the kernel does when memory is short; its sessions end when they notice."""
        pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        while True:
            with suppress(subprocess.CalledProcessError):  # until the sessions of the killed server have ended
                return self.start()

    def stop(self) -> None:
        self.control("-w", "-m", "immediate", "stop")

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            done = connection.execute(statement)
            return list(done.fetchall()) if done.description else []

    def dsn(self, database: str) -> str:
        return f"postgresql://penstock@/{database}?host={self.folder}"

    def new_database(self) -> str:
        """Makes a database, and returns its connection string."""
        name = f"test{next(self.databases)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.dsn(name)


@contextmanager
def postgres_server() -> Generator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: a socket's path may have some 100 characters
    server = Server(folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)
