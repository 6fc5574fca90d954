"""One worker process, seen from the engine's process: spawned, spoken to over a socket, killed and reaped."""

import multiprocessing
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import process, resource_tracker
from typing import Any, cast

from ..telemetry import spans
from . import pickling
from ._process_worker import READY, serve

# How often a thread that waits for a reply looks whether the process still exists. The closed socket says so at once,
# unless the process left a forked child behind that holds the socket open.
_ALIVE_CHECK_MILLISECONDS = 1000

_spawn = multiprocessing.get_context("spawn")
# multiprocessing's list of children is not made for threads: starting polls, and forgets, those that others close.
_children_lock = threading.Lock()
_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


class WorkerProcess:
    """A spawned process and the parent's end of its socket. Methods block, except `kill`, `hang_up` and `alive`."""

    def __init__(self) -> None:
        self.killed = False
        self._connection, child_end = socket.socketpair()
        _sockets.update((self._connection, child_end))
        # The first start would start it inside, which unblocks SIGINT again.
        resource_tracker.ensure_running()
        # Until the worker ignores SIGINT, it is blocked: a Ctrl-C while it starts must not print a traceback.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with child_end, _children_lock, _as_no_daemon():
                arguments = child_end, spans.set_up_of_workers()
                self._process = _spawn.Process(target=serve, args=arguments, name="penstock-worker")
                self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        self._replies = select.poll()
        self._replies.register(self._connection, select.POLLIN)

    def wait_ready(self) -> bool:
        """Block until the worker can take calls; False when it died before."""
        try:
            self._wait_for_reply()
            return self._connection.recv(len(READY)) == READY
        except (EOFError, OSError):
            return False

    def exchange(self, request: pickling.Message) -> pickling.Received:
        """Send a call and block until its reply; raises EOFError or OSError when the process died."""
        pickling.send(self._connection, request)
        self._wait_for_reply()
        return pickling.receive(self._connection)

    def _wait_for_reply(self) -> None:
        while not self._replies.poll(_ALIVE_CHECK_MILLISECONDS):
            if not self.alive():
                raise EOFError("the process is gone")

    def alive(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process.exitcode is None

    def kill(self) -> None:
        """End the process now, and whoever waits for its reply."""
        self.killed = True
        self._process.kill()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the process was gone already, and its end of the socket with it
            pass

    def hang_up(self) -> None:
        """Tell an idle process to end."""
        self._connection.close()

    def reap(self, grace_seconds: float) -> str:
        """Wait until the process has ended, killing it after `grace_seconds`, and say how it ended."""
        self._connection.close()
        self._process.join(grace_seconds)
        if self.alive():
            self._process.kill()
        exit_code = None
        # More than once: when another thread polls this process at the same moment, only one of the two is told.
        for _ in range(100):
            if (exit_code := self._process.exitcode) is not None:
                with _children_lock:
                    self._process.close()
                break
            self._process.join(0.01)
        return _describe(exit_code)


@contextmanager
def _as_no_daemon() -> Generator[None]:
    """Start a process though this one is a daemon of multiprocessing, as the workers of some servers are.

    It forbids that to its daemons because they could leave their children behind; workers end with their parent.
    """
    configuration = cast("dict[str, Any]", getattr(process.current_process(), "_config"))  # noqa: B009 - not in its types
    is_daemon = configuration.pop("daemon", False)
    try:
        yield
    finally:
        configuration["daemon"] = is_daemon


def _leave_to_parent() -> None:
    """In a process that was forked: hold no socket of a worker open, and take none for a child."""
    global _children_lock  # noqa: PLW0603 - a thread of the parent may hold it, and is not here
    _children_lock = threading.Lock()
    for each in list(_sockets):
        each.close()
    # At exit, multiprocessing waits for its children, and fails if they are those of another process. In a process
    # that it has forked itself, it forgets them in the same way.
    process._children.clear()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


os.register_at_fork(after_in_child=_leave_to_parent)


def _describe(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name of its own
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + (", often a sign of too little memory" if name == "SIGKILL" else "")
