"""Client: looks at a process that has exposed itself."""

import os
import select
import socket
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Final

from .protocol import REQUEST, ProtocolError, read_answer
from .watch import Look

# A look takes milliseconds. A process that a debugger has stopped takes for ever.
_ANSWER_SECONDS: Final = 10.0


class Client:
    """A connection to a process. Every error says what to do.

    Args:
        path: that of the socket.

    Raises:
        OSError: nobody can be asked there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_ANSWER_SECONDS)
        self._received = bytearray()
        self._process: int | None = None
        try:
            with self._explained():
                self._socket.connect(os.fspath(path))
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def look(self) -> Look:
        """Look at the process.

        Raises:
            ConnectionError: it has gone away.
            TimeoutError: it does not answer.
            OSError: what answers is something else, or of another version.
        """
        with self._explained():
            with suppress(BrokenPipeError):  # it has hung up, and may have said why: that is still there to be read
                self._socket.sendall(REQUEST)
            give_up = monotonic() + _ANSWER_SECONDS
            while b"\n" not in self._received:
                self._socket.settimeout(max(give_up - monotonic(), 0.001))
                received = self._socket.recv(65536)
                if not received:
                    raise ConnectionResetError
                self._received += received
            line, _, self._received = self._received.partition(b"\n")
            look = read_answer(bytes(line))
        self._process = look.process
        return look

    def wait(self, seconds: float) -> None:
        """Wait, but not for a process that goes away.

        Raises:
            ConnectionError: it has.
        """
        # It says nothing unasked: what can be read is the end.
        if select.select([self._socket], [], [], seconds)[0]:
            raise self._gone()

    @contextmanager
    def _explained(self) -> Generator[None, None, None]:
        """Raise errors that say what happened here, and what to do."""
        path = self._path
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(
                f'there is no socket {path}: the application opens it, `with telemetry.expose("{path}"):`'
            ) from None
        except PermissionError:
            raise PermissionError(f"{path} belongs to another user ({_owner(path)}): look as that user") from None
        except (ConnectionResetError, BrokenPipeError):
            raise self._gone() from None
        except ConnectionRefusedError:
            if not _is_socket(path):
                raise OSError(f"{path} is no socket: give the path that the application passes to expose()") from None
            raise ConnectionRefusedError(
                f"nobody listens at {path} any more: the process that opened it has ended; start it again"
            ) from None
        except TimeoutError:
            raise TimeoutError(
                f"{self._who()} does not answer: it is stopped, or what runs in it does not let go of the interpreter"
            ) from None
        except ProtocolError as error:
            raise OSError(f"{path}: {error}") from error
        except OSError as error:
            raise OSError(
                f"{path} cannot be connected to: {error}; give the path that was passed to expose()"
            ) from None

    def _gone(self) -> ConnectionError:
        return ConnectionError(f"{self._who()} has gone away: it has ended, or has left its `with telemetry.expose()`")

    def _who(self) -> str:
        return f"the process at {self._path}" if self._process is None else f"process {self._process}"


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (OSError, KeyError):  # of a folder that may not be looked into, and of a user without a name
        return "unknown"
