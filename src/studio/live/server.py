"""The socket on which a process answers live looks: its file, its clients, and the thread that answers them."""

import errno
import fcntl
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Final
from weakref import WeakSet

from ...telemetry import Monitor, logs
from .protocol import MAX_REQUEST_BYTES, ProtocolError, answer, check_request, refusal
from .watch import look_of

# The size of `sun_path` without its final null byte: unix(7).
MAX_PATH_BYTES: Final = 107 if sys.platform == "linux" else 103
_MODE: Final = 0o600
# How long to wait for other processes that open a socket in the same folder, which takes them only a moment.
_LOCK_SECONDS: Final = 5.0


@contextmanager
def listening(path: Path) -> Generator[socket.socket, None, None]:
    """Listen at an absolute path inside of the `with`, and remove the file of the socket afterwards.

    Raises:
        OSError: a socket cannot be opened there; the message says why, and what to do.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the path of a socket has at most {MAX_PATH_BYTES} bytes, and this one has {len(os.fsencode(path))}: "
            "choose a shorter one, such as one in /run or /tmp",
            str(path),
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        process = os.getpid()
        with _alone_in(path.parent):
            file = _bind(listener, path)
        try:
            yield listener
        finally:
            # Removed while the socket still listens. Otherwise another process could take it for the socket of a dead
            # process and replace it, and this would remove the new one.
            with suppress(FileNotFoundError):
                if _identity(path) == file and os.getpid() == process:  # not in a process that was forked in the block
                    path.unlink()


@contextmanager
def _alone_in(folder: Path) -> Generator[None, None, None]:
    """Keep other processes from testing, removing and making sockets in a folder at the same time.

    The lock is on the folder itself, so no file is left behind, even if the process is killed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT,
            "there is no such folder for the socket: make it (mkdir -m 700), or choose another",
            str(folder),
        ) from None
    except NotADirectoryError:
        raise NotADirectoryError(
            errno.ENOTDIR, "this is not a folder for the socket: choose another", str(folder)
        ) from None
    except PermissionError:
        raise PermissionError(
            errno.EACCES, "this process may not look into the folder for the socket: choose another", str(folder)
        ) from None
    try:
        give_up = time.monotonic() + _LOCK_SECONDS
        while not _locked(descriptor):
            if time.monotonic() > give_up:
                raise TimeoutError(
                    errno.ETIMEDOUT, "another process holds a lock (flock) on the folder for the socket", str(folder)
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _bind(listener: socket.socket, path: Path) -> tuple[int, int]:
    """Make the file, and listen; return the identity of the file."""
    # Linux gives the file the mode of its descriptor, less the umask. Other systems refuse to set that mode, or ignore
    # it: for these, and for a umask that removes bits of the owner, the mode is set again before a client can connect.
    with suppress(OSError):
        os.fchmod(listener.fileno(), _MODE)
    try:
        try:
            listener.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(path)
            listener.bind(str(path))
    except PermissionError:
        raise PermissionError(
            errno.EACCES, "this process may not make a socket in the folder: choose another", str(path)
        ) from None
    file = _identity(path)
    if stat.S_IMODE(path.lstat().st_mode) != _MODE:
        path.chmod(_MODE)
    listener.listen()
    return file


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that has ended.

    Raises:
        FileExistsError: the file is not a socket, or another process listens there.
    """
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise FileExistsError(
            errno.EEXIST, "there is something else already, and no socket: remove it, or choose another path", str(path)
        )
    if listener := _who_listens(path):
        raise FileExistsError(
            errno.EEXIST,
            f"{listener} listens there already: end it, or choose a path for each process, such as one with its "
            f"number, {os.getpid()}",
            str(path),
        )
    path.unlink()


def _who_listens(path: Path) -> str:
    """Return which process listens at a socket; empty if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return ""
        except OSError:  # it has no room for one more, is not ours to look at, or is of another kind
            return "another process"
        if not hasattr(socket, "SO_PEERCRED"):
            return "another process"
        size = struct.calcsize("3i")
        process, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return "this very process" if process == os.getpid() else f"process {process}"


def _identity(path: Path) -> tuple[int, int]:
    file = path.lstat()
    return file.st_dev, file.st_ino


class Connection:
    """The connection of one client. While an answer waits to be sent, no further requests are read.

    Attributes:
        socket: the socket of the connection.
        is_open: whether the client is still connected.
    """

    def __init__(self, client: socket.socket) -> None:
        client.setblocking(False)
        self.socket = client
        self.is_open = True
        self._received = bytearray()
        self._answer = memoryview(b"")
        self._hangs_up = False  # after this answer
        self._monitor: Monitor | None = None

    @property
    def has_answers(self) -> bool:
        """Whether there is an answer to send, or a request to answer, before more is read."""
        return bool(self._answer) or b"\n" in self._received

    def go_on(self) -> None:
        """Take one step without waiting: answer one request, or send the rest of an answer, or read."""
        try:
            if not self.has_answers:
                self._receive()
            if not self._answer:
                self._take_request()
            if self._answer:
                self._answer = self._answer[self.socket.send(self._answer) :]
                if self._hangs_up and not self._answer:
                    self.is_open = False
        except BlockingIOError:
            pass
        except OSError:  # the client is gone
            self.is_open = False

    def close(self) -> None:
        """Hang up."""
        if self._monitor is not None:
            self._monitor.close()
        self.socket.close()

    def _receive(self) -> None:
        received = self.socket.recv(MAX_REQUEST_BYTES)
        self._received += received
        self.is_open = bool(received)

    def _take_request(self) -> None:
        line, end, rest = self._received.partition(b"\n")
        if end:
            self._received = rest
            self._answer = memoryview(self._answered(bytes(line)))
        elif len(line) > MAX_REQUEST_BYTES:
            self._hangs_up = True
            self._answer = memoryview(refusal(f"a request is a line of at most {MAX_REQUEST_BYTES} bytes"))

    def _answered(self, line: bytes) -> bytes:
        try:
            check_request(line)
            if self._monitor is None:
                self._monitor = Monitor()
            return answer(look_of(self._monitor.snapshot()))
        except ProtocolError as error:
            return refusal(str(error))
        except Exception as error:  # noqa: BLE001 - a look that fails must not end the looks of other clients
            logs.warning("expose.look_failed", error=repr(error))
            return refusal(f"it could not be looked at: {error!r}")


# Each client costs counters and a file descriptor. More than a few are a mistake.
MAX_CLIENTS: Final = 16
# After how many seconds to accept clients again, if the process had no free file descriptor.
_RETRY_SECONDS: Final = 1.0


_SERVERS: Final[WeakSet["Server"]] = WeakSet()


class Server:
    """Answers clients in a thread, until `stop`. It never waits for a single client, or for an event loop.

    Args:
        listener: the socket that clients connect to.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._clients: dict[socket.socket, Connection] = {}
        self._selector = DefaultSelector()
        self._is_paused = False
        self._wake, self._woken = socket.socketpair()
        # A daemon, so that a program that never leaves the block can still end.
        self._thread = threading.Thread(target=self._serve, name="penstock-expose", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._selector.register(self._listener, EVENT_READ)
        self._selector.register(self._woken, EVENT_READ)
        self._thread.start()
        _SERVERS.add(self)

    def stop(self) -> None:
        """End; waits for the thread."""
        _SERVERS.discard(self)
        with suppress(OSError):  # it was left to the process that this one is forked from
            self._wake.shutdown(socket.SHUT_RDWR)  # closing would not wake the thread if a forked process has it open
        self._wake.close()
        self._thread.join()

    def leave_to_parent(self) -> None:
        """In a process that was forked, and has no such thread: keep nothing open, and look at nothing."""
        for connection in [*self._clients.values()]:
            connection.close()
        # Nothing is unregistered: the selector shares the kernel's queue with that of the parent.
        for ours in (self._listener, self._wake, self._woken, self._selector):
            ours.close()

    def _serve(self) -> None:
        is_stopping = False
        while not is_stopping:
            ready = [key.fileobj for key, _ in self._selector.select(self._timeout())]
            self._listen_again()
            for source in ready:
                if source is self._woken:
                    is_stopping = True
                elif source is self._listener:
                    self._accept()
                elif isinstance(source, socket.socket):
                    self._go_on(self._clients[source])
        for connection in [*self._clients.values()]:
            self._hang_up(connection)
        self._selector.close()
        self._woken.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has left already
        except OSError as error:  # no descriptor, or no memory, for now
            logs.warning("expose.not_accepted", error=repr(error))
            self._selector.unregister(self._listener)
            self._is_paused = True
            return
        connection = Connection(client)
        if len(self._clients) >= MAX_CLIENTS:
            with suppress(OSError):
                client.send(refusal(f"{MAX_CLIENTS} clients look at this process already: end one of them"))
            connection.close()
            return
        self._clients[client] = connection
        self._selector.register(client, EVENT_READ)

    def _timeout(self) -> float | None:
        return _RETRY_SECONDS if self._is_paused else None

    def _listen_again(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._selector.register(self._listener, EVENT_READ)

    def _go_on(self, connection: Connection) -> None:
        connection.go_on()
        if not connection.is_open:
            self._hang_up(connection)
        else:
            self._selector.modify(connection.socket, EVENT_WRITE if connection.has_answers else EVENT_READ)

    def _hang_up(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        del self._clients[connection.socket]
        connection.close()


def _leave_to_parent() -> None:
    for server in [*_SERVERS]:
        server.leave_to_parent()
    _SERVERS.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@contextmanager
def expose(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """Let `python -m penstock top PATH` show the nodes of this process, inside of the `with`.

    A thread answers at a Unix socket, so that a process whose event loop is blocked can be looked at, too. All Engines
    of the process are shown, in any thread. The socket has mode 0600: only its user, and root, may connect. Its file is
    removed at the end of the block; the file of a process that has died is replaced.

    It costs nothing while no client is connected. While one is, `async def` nodes are timed, as by `profile()`.

    Args:
        path: the path of the socket, in an existing folder; at most 107 bytes, on Linux. Each process needs a path of
            its own.

    Returns:
        A context manager, whose value is the absolute path.

    Raises:
        FileExistsError: another process listens there, or the file is not a socket.
        OSError: a socket cannot be opened there; the message says why, and what to do.
    """
    # Imported at the first use: not all systems have Unix sockets, and most programs expose none.

    absolute = Path(path).absolute()
    with listening(absolute) as listener:
        server = Server(listener)
        server.start()
        try:
            yield absolute
        finally:
            server.stop()
