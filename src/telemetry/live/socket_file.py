"""The file of a listening Unix socket: made for its owner alone, and never in the place of one that is in use."""

import errno
import fcntl
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

# What fits into `sun_path` with its end: unix(7).
MAX_PATH_BYTES: Final = 107 if sys.platform == "linux" else 103
_MODE: Final = 0o600
# Who else opens a socket in this folder is done in a moment.
_LOCK_SECONDS: Final = 5.0


@contextmanager
def listening(path: Path) -> Generator[socket.socket, None, None]:
    """Listen at an absolute path inside of the block; then its file is gone.

    Raises:
        OSError: nobody can listen there; the message says why, and what to do.
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
            # While it still listens, so that nobody takes it for a dead one and puts another into its place.
            with suppress(FileNotFoundError):
                if _identity(path) == file and os.getpid() == process:  # not in one that was forked inside of the block
                    path.unlink()


@contextmanager
def _alone_in(folder: Path) -> Generator[None, None, None]:
    """Keep others who do this from looking at, removing and making sockets in a folder at the same time.

    By a lock on the folder itself, which leaves nothing behind, also if the process is killed.
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
            errno.ENOTDIR, "this is no folder for the socket: choose another", str(folder)
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
    """Make the file, and listen; returns what tells it from others."""
    # Linux gives the file the mode of its descriptor, less the umask. Other systems refuse to set that, or leave it
    # alone: there, and under a umask that takes bits from the owner, the mode is set before anybody can connect.
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
        FileExistsError: it is no socket, or somebody listens there.
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
    """Return who listens at a socket; empty if nobody does."""
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
