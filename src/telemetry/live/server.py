"""Server: answers the clients of a listening socket, in a thread of its own."""

import os
import socket
import threading
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Final
from weakref import WeakSet

from .. import logs
from .connection import Connection
from .protocol import refusal

# Each client that looks has counters of its own, and a descriptor. More than a few are a mistake.
MAX_CLIENTS: Final = 16
# Until a descriptor is free, if the process has no more.
_RETRY_SECONDS: Final = 1.0


_SERVERS: Final[WeakSet["Server"]] = WeakSet()


class Server:
    """Serves until `stop`. Nothing here waits for a client, or for an event loop.

    Args:
        listener: where clients connect.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._clients: dict[socket.socket, Connection] = {}
        self._selector = DefaultSelector()
        self._is_paused = False
        self._wake, self._woken = socket.socketpair()
        # A daemon: who never leaves the block does not keep the interpreter from ending.
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
            self._wake.shutdown(socket.SHUT_RDWR)  # closing it says nothing while a forked process has it as well
        self._wake.close()
        self._thread.join()

    def leave_to_parent(self) -> None:
        """In a process that was forked, and has no such thread: keep nothing open, and look at nothing."""
        for connection in [*self._clients.values()]:
            connection.leave_to_parent()
        # Nothing is unregistered: the selector asks the same queue of the kernel as that of the parent.
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
            return  # who knocked is gone again
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
