"""Connection: one client of the socket: the bytes that came, those that have to go, and what it has seen."""

import socket

from .. import logs
from ..profiling import registry
from .protocol import MAX_REQUEST_BYTES, ProtocolError, answer, check_request, refusal
from .watch import Watch


class Connection:
    """Answers a client as it reads: while an answer waits to be read, nothing more is read of it, and nothing is held.

    Attributes:
        socket: the client's.
        is_open: whether there is somebody to answer.
    """

    def __init__(self, client: socket.socket) -> None:
        client.setblocking(False)
        self.socket = client
        self.is_open = True
        self._received = bytearray()
        self._answer = memoryview(b"")
        self._hangs_up = False  # after this answer
        self._watch: Watch | None = None

    @property
    def has_answers(self) -> bool:
        """Whether there is something to send, or to answer before more is read."""
        return bool(self._answer) or b"\n" in self._received

    def go_on(self) -> None:
        """Do what can be done without waiting: answer one request, or send what is left of an answer, or read."""
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
        if self._watch is not None:
            self._watch.end()
        self.socket.close()

    def leave_to_parent(self) -> None:
        """In a process that was forked: keep nothing open, and look at nothing."""
        if self._watch is not None:
            registry.end(self._watch)  # not `Watch.end`: its lock may be held by a thread that is not here
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
            if self._watch is None:
                self._watch = Watch()
            return answer(self._watch.look())
        except ProtocolError as error:
            return refusal(str(error))
        except Exception as error:  # noqa: BLE001 - a look that fails must not end those of the others
            logs.warning("expose.look_failed", error=repr(error))
            return refusal(f"it could not be looked at: {error!r}")
