"""The socket on which a process answers live looks: its file, its clients, and the thread that answers them."""

import errno
import fcntl
import gc
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from select import POLLIN, poll
from typing import Final
from weakref import WeakSet

from ...telemetry import Monitor, logs, profile
from .protocol import MAX_REQUEST_BYTES, ProtocolError, answer, answer_drawing, answer_profile, read_request, refusal
from .watch import Looker

_MODE: Final = 0o600
# How long to wait for other processes that open a socket in the same folder; opening takes only a moment.
_LOCK_SECONDS: Final = 5.0


@contextmanager
def listening(path: Path) -> Generator[socket.socket, None, None]:
    """Listen at an absolute path inside of the `with`, and remove the file of the socket afterwards.

    Raises:
        OSError: a socket cannot be opened there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        process = os.getpid()
        with _alone_in(path.parent):
            file = _bind(listener, path)
        try:
            yield listener
        finally:
            # Remove the file while the socket still listens. Otherwise another process could think that this process is
            # dead and replace the file, and this process would remove the new file.
            with suppress(FileNotFoundError):
                if _identity(path) == file and os.getpid() == process:  # a process forked in the block leaves the file
                    path.unlink()


@contextmanager
def _alone_in(folder: Path) -> Generator[None, None, None]:
    """Keep other processes from testing, removing and making sockets in a folder at the same time.

    The lock is on the folder itself, so no file is left behind, even if the process is killed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
    """Make the socket's file, and listen; return the identity of the file."""
    # Linux gives the file the mode of its descriptor, less the umask. Other systems refuse to set this mode, or ignore
    # it. For such systems, and for a umask that removes bits of the owner, set the mode again before clients connect.
    with suppress(OSError):
        os.fchmod(listener.fileno(), _MODE)
    try:
        listener.bind(str(path))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        _remove_stale(path)
        listener.bind(str(path))
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
    """Return which process listens at a socket; empty if no process does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return ""
        except OSError:  # its backlog is full, we may not connect to it, or it is another kind of socket
            return "another process"
        if not hasattr(socket, "SO_PEERCRED"):
            return "another process"
        size = struct.calcsize("3i")
        process, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return "this very process" if process == os.getpid() else f"process {process}"


def _identity(path: Path) -> tuple[int, int]:
    file = path.lstat()
    return file.st_dev, file.st_ino


# Each client costs counters, a thread and a file descriptor. More clients than this are a mistake.
MAX_CLIENTS: Final = 16
# After how many seconds to accept clients again, if the process had no free file descriptor.
_RETRY_SECONDS: Final = 1.0


_SERVERS: Final[WeakSet["Server"]] = WeakSet()
# The first look at thousands of steps makes so many records that one collection of the new objects takes 40 ms.
_MANY_RECORDS: Final = 20_000
_COLLECTS_LATER: Final[list[bool]] = []  # has an entry while a look has turned the garbage collection off


class Server:
    """Answers each client in a thread, until `stop`. It never waits for an event loop.

    Args:
        listener: the socket that clients connect to.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._clients: dict[socket.socket, tuple[Monitor, threading.Thread]] = {}
        self._wake, self._woken = socket.socketpair()
        # Daemons, so that a program that never leaves the block can still end.
        self._thread = threading.Thread(target=self._serve, name="penstock-expose", daemon=True)

    def start(self) -> None:
        """Begin to accept clients."""
        self._thread.start()
        _SERVERS.add(self)

    def stop(self) -> None:
        """Disconnect all clients, and wait until the threads have ended."""
        _SERVERS.discard(self)
        with suppress(OSError):  # a forked process has left the socket to its parent
            self._wake.shutdown(socket.SHUT_RDWR)  # `close` wakes no thread while a forked process has the socket open
        self._wake.close()
        self._thread.join()

    def leave_to_parent(self) -> None:
        """Close all files without answering; for a forked process, which does not have the threads of its parent."""
        for client, (monitor, _) in [*self._clients.items()]:
            monitor.close()
            os.close(client.detach())  # not `close`: the parent's thread has made a file of the socket, still open here
        for ours in (self._listener, self._wake, self._woken):
            ours.close()

    def _serve(self) -> None:
        while self._woken.fileno() not in _readable(None, self._listener, self._woken):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # the client has left already
            except OSError as error:  # no free descriptor, or no memory, for now
                logs.warning("expose.not_accepted", error=error)
                _readable(_RETRY_SECONDS, self._woken)
                continue
            client.setblocking(True)
            if len(self._clients) >= MAX_CLIENTS:
                with suppress(OSError), client:
                    client.send(refusal(f"{MAX_CLIENTS} clients look at this process already: end one of them"))
                continue
            thread = threading.Thread(target=self._answer, args=(client,), name="penstock-expose-client", daemon=True)
            self._clients[client] = Monitor(), thread
            thread.start()
        for client, (_, thread) in [*self._clients.items()]:
            with suppress(OSError):  # the client has left just now
                client.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._woken.close()

    def _answer(self, client: socket.socket) -> None:
        """Answer the requests of a client until it leaves."""
        monitor, _ = self._clients[client]
        looker, pace = Looker(), _Pace(client, monitor)
        try:
            for line in _requests(client, monitor):
                _send(client, _answered(line, monitor, looker, pace), monitor)
        except OSError:
            pass  # the client is gone
        finally:
            monitor.close()
            del self._clients[client]
            client.close()


def _requests(client: socket.socket, monitor: Monitor) -> Iterator[bytes]:
    """Yield the requests of a client until it leaves."""
    with client.makefile("rb") as lines:
        while True:
            monitor.turns.asked = partial(_readable, 0.0, client)
            line = lines.readline(MAX_REQUEST_BYTES + 1)
            monitor.turns.asked = None
            if not line.endswith(b"\n"):
                break
            yield line
    if len(line) > MAX_REQUEST_BYTES:
        client.sendall(refusal(f"a request is a line of at most {MAX_REQUEST_BYTES} bytes"))


def _send(client: socket.socket, answer: bytes, monitor: Monitor) -> None:
    """Send an answer, and end the look; no loop waits for a client that does not read."""
    sent = 0
    with suppress(BlockingIOError):
        sent = client.send(answer, socket.MSG_DONTWAIT)
    monitor.turns.end()
    if sent < len(answer):
        client.sendall(answer[sent:])


def _answered(line: bytes, monitor: Monitor, looker: Looker, pace: "_Pace") -> bytes:
    try:
        asked = read_request(line)
        if asked.request == "drawing":
            return answer_drawing(monitor.drawing(asked.digest))
        if asked.request == "profile":
            return answer_profile(_profile(asked.seconds, pace.client))
        in_turns = monitor.turns.of
        with pace.look(), _without_collections():
            return answer(looker.look(monitor.snapshot(asked.matching), asked, in_turns), in_turns)
    except ProtocolError as error:
        return refusal(str(error))
    except Exception as error:  # noqa: BLE001 - a look that fails must not end the looks of other clients
        logs.warning("expose.look_failed", error=error)
        return refusal(f"it could not be looked at: {error!r}")


# If two looks in a row, at many busy steps, take longer than this, the next look is answered later: looks of a client
# take this share of the time, unless the next look would have to wait for longer than the last number of seconds. A
# quicker look is answered at once, also to a client that asks all the time, such as a test.
_QUICK_SECONDS: Final = 0.03
_MOST_SHARE: Final = 0.015
_MOST_PAUSE_SECONDS: Final = 4.0  # after eight seconds, a page says that a process does not answer


def _readable(for_seconds: float | None, *sockets: socket.socket) -> set[int]:
    """Wait until one of some sockets can be read; returns the descriptors of those that can."""
    waiting = poll()  # `select` refuses a descriptor of 1,024 or more
    for one in sockets:
        waiting.register(one, POLLIN)
    return {descriptor for descriptor, _ in waiting.poll(None if for_seconds is None else for_seconds * 1000)}


class _Pace:
    """Delays the looks of a client after a long look, so that looks take a small share of the time.

    Args:
        client: the client.
        monitor: the monitor of the client.
    """

    def __init__(self, client: socket.socket, monitor: Monitor) -> None:
        self.client = client
        self._turns = monitor.turns
        self._spent_seconds = 0.0  # by the last look; the first look reads all scopes
        self._due = 0.0

    @contextmanager
    def look(self) -> Generator[None, None, None]:
        """Wait until the next look is due, or the client leaves, and then take the time of the look."""
        _readable(max(0.0, self._due - time.monotonic()), self.client)
        self._turns.begin()
        began, before = time.monotonic(), time.thread_time()
        yield
        last_seconds, self._spent_seconds = self._spent_seconds, time.thread_time() - before
        if (usual_seconds := min(last_seconds, self._spent_seconds)) > _QUICK_SECONDS:
            self._due = began + min(usual_seconds / _MOST_SHARE, _MOST_PAUSE_SECONDS)


@contextmanager
def _without_collections() -> Generator[None, None, None]:
    """Turn the garbage collection off during a look.

    A look makes many short-lived records. A collection during the look would count them as long-lived. The collector
    would then search the whole heap much more often, which stops event loops.
    """
    if not gc.isenabled():  # turned off by the program, or by the look of another client
        yield
        return
    _COLLECTS_LATER.append(True)
    gc.disable()
    try:
        yield
    finally:
        _collect_again()


def _collect_again() -> None:
    if _COLLECTS_LATER:
        _COLLECTS_LATER.clear()
        if gc.get_count()[0] > _MANY_RECORDS and not gc.get_freeze_count():  # a frozen heap must stay frozen
            gc.freeze()  # these two calls make all objects long-lived, and look at none of them
            gc.unfreeze()
        gc.enable()


def _profile(for_seconds: float, client: socket.socket) -> str:
    """Record a profile, and return its page; recording ends at once if the client leaves, or `expose` ends."""
    from ..page.page import page_of

    with profile() as recorded:
        _readable(for_seconds, client)
    return "".join(page_of(recorded))


def _leave_to_parent() -> None:
    for server in [*_SERVERS]:
        server.leave_to_parent()
    _SERVERS.clear()
    _collect_again()  # the thread that looks is not in the child


os.register_at_fork(after_in_child=_leave_to_parent)


@contextmanager
def expose(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """Let `python -m penstock top PATH` show the nodes of this process, inside of the `with` block.

    A thread answers at a Unix socket, so that you can also look at a process whose event loop is blocked. All Engines
    of the process are shown, in any thread. The socket has mode 0600: only the user of the process, and root, may
    connect. The end of the block removes the socket's file; the file of a process that has died is replaced.

    It costs nothing while no client is connected. While a client is connected, `async def` nodes are timed, as by
    `profile()`.

    Args:
        path: the path of the socket, in an existing folder; at most 107 bytes, on Linux. Each process needs a path of
            its own.

    Returns:
        A context manager, whose value is the absolute path.

    Raises:
        FileExistsError: another process listens at the path, or the file is not a socket.
        OSError: a socket cannot be opened at the path, such as in a folder that does not exist.
    """
    absolute = Path(path).absolute()
    with listening(absolute) as listener:
        server = Server(listener)
        server.start()
        try:
            yield absolute
        finally:
            server.stop()
