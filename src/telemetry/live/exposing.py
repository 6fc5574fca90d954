"""expose: let other processes of the same user look at this one."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def expose(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """Let `python -m penstock top PATH` look at everything that this process runs inside of the `with` block.

    A thread of its own answers at a Unix socket, so a process whose event loop is blocked can be looked at, too. All
    Engines count, whichever thread they run in. The socket has mode 0600: only its user, and root, may connect. Its
    file is gone after the block. That of a process that has died is replaced.

    It costs nothing while nobody looks. While somebody does, `async def` nodes are timed, as by `profile()`.

    Args:
        path: where the socket is to be, in a folder that is there; at most 107 bytes, on Linux. Each process needs one
            of its own.

    Returns:
        The absolute path.

    Raises:
        FileExistsError: another process listens there, or there is something that is no socket.
        OSError: there cannot be a socket; the message says why, and what to do.
    """
    # With the first use: not every system has Unix sockets, and most programs expose nothing.
    from .server import Server
    from .socket_file import listening

    absolute = Path(path).absolute()
    with listening(absolute) as listener:
        server = Server(listener)
        server.start()
        try:
            yield absolute
        finally:
            server.stop()
