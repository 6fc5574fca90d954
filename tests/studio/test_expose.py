"""A process that exposes itself: its socket, its clients, and its answers."""

import asyncio
import contextlib
import gc
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import engine, telemetry, testing
from penstock.studio.live import server
from penstock.studio.live.protocol import Client
from penstock.studio.live.watch import LiveSnapshot, Looker, ScopeLook, look_table
from tests.kit import paused
from tests.telemetry.virtual_time import node_of

from .conftest import ASK, Raw


@ps.node(concurrency=2, capacity=3)
async def check(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return number


work = paused >> check
fetched = ps.graph(paused)


def looking(path: Path) -> contextlib.closing[Client]:
    return contextlib.closing(Client(path))


@pytest.fixture
def client(path: Path) -> Iterator[Client]:
    """A client of this process."""
    with telemetry.expose(path), looking(path) as found:
        yield found


# --- Answers. Clients here block the event loop while they wait, so every answer comes although the loop is blocked ---


async def test_a_look_tells_what_nodes_did_since_the_one_before(client: Client) -> None:
    assert client.look().nodes == ()
    async with engine.deploy(work) as service:
        await asyncio.gather(*(service(number) for number in range(5)))
        first = node_of(client.look(), "check")
        with pytest.raises(ValueError, match="-1"):
            await service(-1)
        await service(1)
        look = client.look()
    second = node_of(look, "check")
    counts = [(one.completed, one.failed, one.total_completed, one.total_failed) for one in (first, second)]
    assert counts == [(5, 0, 5, 0), (1, 1, 6, 1)]
    assert (second.graph, second.runs_on, second.limit, second.inbox_capacity) == ("paused_to_check", "loop", 2, 3)
    assert node_of(look, "paused").completed == 2


async def test_the_first_look_has_no_interval_and_no_verdict(path: Path) -> None:
    async with engine.deploy(work) as service:
        await service(1)
        with telemetry.expose(path), looking(path) as client:
            first, second = client.look(), client.look()
    assert (first.seconds, first.verdict) == (None, None)
    assert node_of(first, "check").total_completed == 1
    assert node_of(first, "check").completed == 0
    assert (second.seconds is None, second.verdict) == (False, None)  # nothing has left a node meanwhile


async def test_what_a_loop_tells_of_itself_shows_over_all_of_its_scopes(client: Client) -> None:
    @ps.node
    class Slots(ps.Actor[int, int]):
        async def loop(self, inbox: ps.Inbox[ps.Work[int, int]], /) -> None:
            while True:
                work = await inbox.get()
                self.report(slots=work.value, step_seconds=0.25, mean=float("inf"))
                work.finish(work.value)

    graph = ps.graph(Slots())
    async with engine.deploy(graph) as one, engine.deploy(graph) as other:
        assert (await one(3), await other(4)) == (3, 4)
        look = client.look()
    table = look_table(look)
    assert [column.title for column in table.columns[-2:]] == ["slots", "step (s)"]
    assert table.rows[0][-2:] == ("7", "0.500")


async def test_runs_of_graphs_made_for_one_call_count_and_leave_nothing_behind(client: Client) -> None:
    client.look()
    graphs = [paused >> check for _ in range(3)]
    for number in range(3):
        await engine.run(graphs[number](number))
    plans = [weakref.ref(graph._planned()) for graph in graphs]
    del graphs
    gc.collect()
    assert node_of(client.look(), "paused").completed == 3
    client.look()
    gc.collect()
    assert [plan() for plan in plans] == [None] * 3


async def test_clients_do_not_disturb_each_other(path: Path) -> None:
    with telemetry.expose(path), looking(path) as one, looking(path) as other:
        async with engine.deploy(work) as service:
            one.look()
            other.look()
            await service(1)
            assert node_of(one.look(), "check").completed == 1
            await service(1)
            assert node_of(one.look(), "check").completed == 1
            assert node_of(other.look(), "check").completed == 2


async def test_engines_in_other_threads_are_seen(client: Client) -> None:
    async def other() -> int:
        async with engine.Engine() as own, own.deploy(fetched) as service:
            await service(1)
            return int(node_of(client.look(), "paused").total_completed)

    assert await asyncio.to_thread(asyncio.run, other()) == 1


def is_timed() -> bool:
    return any(step.timed is not None for scope in telemetry.snapshot().scopes for step in scope.steps)


async def test_handlers_are_timed_only_while_somebody_looks(path: Path) -> None:
    with telemetry.expose(path):
        async with engine.deploy(fetched) as service:
            assert not is_timed()
            with looking(path) as client:
                client.look()
                await asyncio.sleep(0)  # the loop itself starts timing, so a blocked loop cannot be timed
                assert is_timed()
                await service(1)
                assert (node_of(client.look(), "paused").busy_share or 0) > 0
            while is_timed():  # until the server has seen that the client has left, and has told the loop
                await asyncio.sleep(0)


def test_an_outage_is_shown() -> None:
    @ps.node(retry=ps.Retry(None, backoff_seconds=1, max_backoff_seconds=5, retry_on=ConnectionError))
    async def write(number: int) -> int:
        raise ConnectionRefusedError

    store = ps.graph(write)

    async def look_at_it() -> LiveSnapshot:
        with contextlib.closing(telemetry.Monitor()) as monitor:
            async with engine.stream(store(number) for number in range(3)):
                await asyncio.sleep(30)
                return Looker().look(monitor.snapshot())

    look = testing.run_virtual(look_at_it)
    assert ("outage", "write has been retried for 30.0 s: ConnectionRefusedError") in look_table(look).facts


def test_a_table_tells_progress_and_cuts() -> None:
    stream = ScopeLook("1", "train", "stream", cut_asked="every 60 s", cut_age=12.0, cut_bytes=1_200_000, done=5)
    loop = ScopeLook("2", "ask", "durable loop", cut_asked="every iteration", cut_reached=2.0, cuts=2)
    calls = ScopeLook("3", "fetch", "stream", done=5, total=20, left=9.0)
    look = LiveSnapshot(1, 1.0, (), None, scopes=(stream, loop, calls, ScopeLook("4", "other")))
    assert look_table(look).facts[2:] == (
        ("stream", "train: 5 done; newest cut 12.0 s old, 1.2 MB; cuts every 60 s"),
        ("durable loop", "ask: cuts every iteration, 2.00 s between the last two"),
        ("stream", "fetch: 5/20 done; 9.00 s left"),
    )


# --- Clients ---


@pytest.mark.parametrize(
    ("request_line", "message"),
    [
        (b"\n", "this is no line of JSON"),
        (b"{\n", "this is no line of JSON"),
        (b"\xff\n", "this is no line of JSON"),
        (b"[" * 4000 + b"\n", "this is no line of JSON"),
        (b"[]\n", "this is no JSON object"),
        (b"{}\n", "this process speaks version 1 of the protocol, not None: use the same version of penstock"),
        (b'{"version": 2, "request": "look"}\n', "this process speaks version 1 of the protocol, not 2"),
        (b'{"version": 1, "request": "stop"}\n', 'there is no request \'stop\'; there are "look", "drawing" and'),
    ],
)
def test_a_malformed_request_is_answered_and_the_next_one_too(raw: Raw, request_line: bytes, message: str) -> None:
    raw.send(request_line + ASK)
    assert message in raw.answer()["error"]
    assert raw.answer()["look"]["process"] == os.getpid()


def test_a_request_without_an_end_is_refused(raw: Raw) -> None:
    raw.send(b"x" * (server.MAX_REQUEST_BYTES + 1))
    assert raw.answer()["error"] == "a request is a line of at most 4096 bytes"
    assert raw.has_ended()


def test_a_request_may_come_in_pieces(raw: Raw) -> None:
    for byte in ASK:
        raw.send(bytes([byte]))
    assert "look" in raw.answer()


def test_a_client_that_does_not_read_holds_nobody_up(path: Path) -> None:
    with telemetry.expose(path), Raw(path) as deaf:
        deaf.flood(ASK * 100)
        with looking(path) as client:
            assert client.look().process == os.getpid()
        # Event loops offer turns to a thread that looks, and not while the thread sends.
        [exposing] = server._SERVERS
        while any(monitor.turns.is_looking for monitor, _ in [*exposing._clients.values()]):
            time.sleep(0.001)


def test_more_clients_than_there_is_room_for_are_told(path: Path) -> None:
    with telemetry.expose(path), contextlib.ExitStack() as stack:
        for _ in range(server.MAX_CLIENTS):
            stack.enter_context(looking(path)).look()
        with pytest.raises(OSError, match="16 clients look at this process already"), looking(path) as client:
            client.look()


def test_without_a_descriptor_for_one_more_client_it_tries_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_RETRY_SECONDS", 0.001)
    refusals = [OSError(24, "Too many open files")] * 2

    class Full(socket.socket):
        def accept(self) -> Any:
            if refusals:
                raise refusals.pop()
            return super().accept()

    monkeypatch.setattr(server.socket, "socket", Full)
    with telemetry.expose(path), looking(path) as client:
        assert client.look().process == os.getpid()


def test_a_look_that_fails_is_answered(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_monitor: telemetry.Monitor, _matching: str) -> telemetry.Snapshot:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(telemetry.Monitor, "snapshot", fail)
        raw.send(ASK)
        assert raw.answer()["error"] == "it could not be looked at: ZeroDivisionError()"
    raw.send(ASK)
    assert "look" in raw.answer()


def test_a_client_is_told_when_the_block_ends(path: Path) -> None:
    with contextlib.ExitStack() as block:
        block.enter_context(telemetry.expose(path))
        with looking(path) as client:
            client.look()
            block.close()
            with pytest.raises(ConnectionError, match=rf"process {os.getpid()} has gone away"):
                client.wait(60)
            with pytest.raises(ConnectionError, match="has gone away"):
                client.look()


# --- The socket ---


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_only_the_owner_may_connect_whatever_the_umask(path: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    identity = server._identity

    def record(file: Path) -> tuple[int, int]:  # the first call after the file was made
        modes.append(mode_of(file))
        return identity(file)

    monkeypatch.setattr(server, "_identity", record)
    before = os.umask(umask)
    try:
        with telemetry.expose(path):
            assert mode_of(path) == 0o600
    finally:
        os.umask(before)
    assert modes[0] == 0o600 & ~umask


def test_nothing_is_left_after_the_block_also_if_it_fails(path: Path) -> None:
    threads = threading.active_count()
    with contextlib.suppress(ZeroDivisionError), telemetry.expose(path) as exposed:
        assert exposed == path
        assert threading.active_count() == threads + 1
        raise ZeroDivisionError
    assert not path.exists()
    assert threading.active_count() == threads
    with telemetry.expose(path):
        pass


FORKING = """
import asyncio, os, sys
from pathlib import Path

import penstock as ps
from penstock import engine, telemetry
from penstock.studio.live.protocol import Client
from penstock.telemetry.profiling import collectors
from tests.kit import paused


async def main():
    await engine.run(ps.graph(paused)(1))


path = Path(sys.argv[1])
child_has_left, parent_has_ended = os.pipe(), os.pipe()
with telemetry.expose(path):
    client = Client(path)
    client.look()
    child = os.fork()
    if child:
        os.close(parent_has_ended[0])
        os.read(child_has_left[0], 1)
        client.look()
    else:
        os.close(parent_has_ended[1])
        assert not collectors.running
        asyncio.run(main())
if not child:
    os.write(child_has_left[1], b"!")
    os.read(parent_has_ended[0], 1)
    os._exit(0)
with telemetry.expose(path):  # of the child, nothing is left that listens
    os._exit(0)
"""


def test_a_process_that_is_forked_leaves_everything_to_its_parent(path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKING, str(path)], timeout=30, check=True)
    with telemetry.expose(path):
        pass


def test_a_file_that_was_put_in_the_place_of_ours_stays(path: Path) -> None:
    with telemetry.expose(path):
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine"


def test_a_socket_that_somebody_listens_at_is_left_alone(path: Path) -> None:
    with telemetry.expose(path):
        with pytest.raises(FileExistsError, match="this very process listens there already"), telemetry.expose(path):
            pass
        with looking(path) as client:
            client.look()


def test_a_socket_whose_listener_has_no_time_is_left_alone(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as stack:
        busy.bind(str(path))
        busy.listen(0)
        stack.enter_context(Raw(path))  # the queue is full
        with pytest.raises(FileExistsError, match="another process listens there"), telemetry.expose(path):
            pass


def test_of_many_that_find_a_dead_socket_one_gets_the_path(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    start, done = threading.Barrier(8), threading.Barrier(8)

    def gets_the_path(_: int) -> bool:
        start.wait()
        try:
            with telemetry.expose(path):
                done.wait()
        except FileExistsError:
            done.wait()
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(gets_the_path, range(8))) == 1
    assert not path.exists()


@pytest.mark.parametrize(
    "make", [Path.touch, lambda path: path.symlink_to("nowhere"), Path.mkdir], ids=["file", "link", "folder"]
)
def test_what_is_no_socket_is_left_alone(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(FileExistsError, match="no socket: remove it, or choose another path"), telemetry.expose(path):
        pass
    assert os.path.lexists(path)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gone/socket", FileNotFoundError, "/gone'$"),
        ("file/socket", NotADirectoryError, "/file'$"),
        ("x" * 200, OSError, "AF_UNIX path too long"),
    ],
)
def test_a_folder_that_cannot_hold_it_is_named(tmp_path: Path, name: str, error: type[OSError], message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=message), telemetry.expose(tmp_path / name):
        pass


def test_the_longest_path_works(tmp_path: Path) -> None:
    path = tmp_path / ("x" * ((107 if sys.platform == "linux" else 103) - len(str(tmp_path)) - 1))
    with telemetry.expose(path), looking(path) as client:
        client.look()


def test_a_relative_path_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with telemetry.expose("socket") as path:
        assert path == tmp_path / "socket"
        monkeypatch.chdir("/")
    assert not path.exists()


def test_who_holds_the_lock_of_the_folder_is_not_waited_for_without_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_LOCK_SECONDS", 0.0)
    with (
        server._alone_in(path.parent),
        pytest.raises(TimeoutError, match=r"another process holds a lock \(flock\) on the folder"),
        telemetry.expose(path),
    ):
        pass
