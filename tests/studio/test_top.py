"""`python -m penstock top` against processes that run, have ended, or have never run."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.devices.processes import ROOT, command, run
from tests.examples.programs import CTRL_C, terminal

QUICK = ("--interval-seconds", "0.2")


@contextmanager
def exposed(path: Path, kind: str = "chew") -> "Generator[subprocess.Popen[str]]":
    """Runs a program of `alive` until the end of the `with` block."""
    words = [sys.executable, "-m", "tests.studio.alive", str(path), kind]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "exposed\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a process that runs."""
    found = tmp_path_factory.mktemp("top") / "socket"
    with exposed(found):
        yield found


def test_once_prints_a_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, errors = command(capsys, "top", path, "--once")
    assert (status, errors) == (0, "")
    head, table = printed.strip().split("\n\n")
    process, limits = head.splitlines()[:2]
    assert process.startswith("process  ")
    assert limits.startswith('limits   "slow" limits the pipeline: ')
    graph, paused, slow = table.splitlines()[-3:]
    assert (graph, paused.split()[0]) == ("paused_to_slow", "paused")
    # the rate, the places, the inbox, and the share of the time in which the places are busy
    assert re.match(r"slow ◀ limits [\d,.]+ [012]/2 \d+/16 \d+%", " ".join(slow.split()))


def test_json_has_a_line_for_each_look(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, errors = command(capsys, "top", path, "--once", "--json", *QUICK)
    assert (status, errors) == (0, "")
    look = json.loads(printed)
    assert look["seconds"] >= 0.2
    [paused, slow] = look["nodes"]
    assert (paused["node"], slow["node"], slow["limit"], slow["inbox_capacity"]) == ("paused", "slow", 2, 16)
    assert slow["total_failed"] >= slow["failed"] > 0
    assert look["verdict"]["node"] == "slow"


def test_where_the_output_is_no_terminal_tables_follow_each_other(path: Path) -> None:
    program = [sys.executable, "-m", "penstock", "top", str(path), *QUICK]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = (line for line in process.stdout if "limits the pipeline" in line)
        assert next(lines).startswith("limits ")
        assert next(lines).startswith("limits ")
        process.stdout.close()  # as `head` does
        assert process.wait() == 0
        assert process.stderr.read() == ""


def test_a_terminal_shows_a_table_until_ctrl_c(path: Path) -> None:
    with terminal(Path("-m"), "penstock", "top", path, *QUICK, typing=True) as shown:
        shown.until(r'"slow" limits the(.|\n)*"slow" limits the')
        shown.type(CTRL_C)
        assert shown.end() == 0
    assert "Traceback" not in shown.printed
    assert "◀ limits" in shown.printed


def test_a_process_that_goes_away_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with exposed(tmp_path / "socket") as process:
        with terminal(
            Path("-m"), "penstock", "top", tmp_path / "socket", "--interval-seconds", "600", typing=True
        ) as shown:
            shown.until("slow +-")
            process.kill()
            assert shown.end() == 1
        assert f"process {process.pid} has gone away: it has ended" in " ".join(shown.printed.split())
    status, printed, errors = command(capsys, "top", tmp_path / "socket")
    assert (status, printed) == (1, "")
    assert "the process that opened it has ended, or the path" in errors
    with exposed(tmp_path / "socket"):  # replaces the file that the dead process has left
        assert command(capsys, "top", tmp_path / "socket", "--once", *QUICK)[0] == 0


def test_a_process_that_is_stopped_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.studio.live.protocol._ANSWER_SECONDS", 0.2)
    with exposed(tmp_path / "socket") as process:
        process.send_signal(signal.SIGSTOP)
        status, _, errors = command(capsys, "top", tmp_path / "socket")
    assert status == 1
    assert "does not answer: it is stopped" in errors


@pytest.mark.parametrize("program", ["top", "items"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", 'there is no socket {path}: the application opens it, `with telemetry.expose("{path}"):`'),
        ("file", "no process listens at {path}: the process that opened it has ended, or the path is not the one"),
        ("x" * 200, "{path} cannot be connected to: AF_UNIX path too long"),
    ],
)
def test_wrong_paths_are_told_of(
    program: str, name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    status, printed, errors = command(capsys, program, tmp_path / name)
    assert (status, printed) == (1, "")
    assert errors.startswith(f"python -m penstock {program}: " + message.format(path=tmp_path / name))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"version": 2, "look": {}}\n', "it speaks version 2 of the protocol, and this is version 1: use the same"),
        (b"HTTP/1.1 400 Bad Request\n", "this is no line of JSON"),
        (b"[1]\n", "this is no JSON object"),
        (b'{"version": 1, "look": {"process": 1}}\n', "its answer is not one of penstock"),
        (b'{"version": 1, "error": "16 clients look"}\n', "16 clients look"),
        (b"", "has gone away"),
    ],
)
def test_what_answers_otherwise_is_told_of(
    tmp_path: Path, answer: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(4096)
                client.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        status, _, errors = command(capsys, "top", path, "--once")
        serving.join()
    assert status == 1
    assert message in errors


def test_without_rich_it_names_the_extra_and_looks_once(path: Path, tmp_path: Path) -> None:
    without_rich = "import sys; sys.modules['rich'] = None\n"
    program = tmp_path / "program.py"
    program.write_text(without_rich + "from penstock.__main__ import main; sys.exit(main(sys.argv[1:]))")
    with terminal(program, "top", path, typing=True) as shown:
        assert shown.end() == 1
    assert 'the live table needs rich: pip install "penstock[rich]"; or look once, with --once' in " ".join(
        shown.printed.split()
    )
    with terminal(program, "top", path, "--once", *QUICK, typing=True) as shown:
        assert shown.end() == 0
    assert "◀ limits" in shown.printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "required: PATH"), (("x", "--interval-seconds", "0"), "'0' is no number of seconds above 0")],
)
def test_wrong_arguments_exit_with_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed, errors = command(capsys, "top", *arguments)
    assert (status, printed) == (2, "")
    assert message in errors


def test_a_socket_of_another_user_is_refused(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    program = "import os, pwd, sys; from penstock.__main__ import main; os.setuid(65534); sys.exit(main())"
    with tempfile.TemporaryDirectory() as folder:  # other users may not read the folders of pytest
        Path(folder).chmod(0o755)
        with exposed(Path(folder, "socket")):
            done = run("-c", program, "top", f"{folder}/socket", "--once")
    assert done.returncode == 1
    assert "belongs to another user: look as that user" in done.stderr


def test_items_prints_what_is_in_flight_and_what_has_failed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, errors = command(capsys, "items", path, "slow", "--interval-seconds", "0.05")
    assert (status, errors) == (0, "")
    assert re.search(r"^in flight +\d+$", printed, re.MULTILINE)
    assert re.search(r"^ *slow +[\d,]+", printed, re.MULTILINE)
    # What is the same in all rows has no column: it stands below the table.
    assert re.search(r"\b(working|waiting)\b", printed)
    assert re.search(r"\bage\b", printed)
    _, printed, _ = command(capsys, "items", path, "--failures", "--json")
    [failure] = [json.loads(line) for line in printed.splitlines()]
    assert (failure["node"], failure["type"], failure["message"]) == ("slow", "ValueError", "")
    _, printed, _ = command(capsys, "items", path, "no such node", "--interval-seconds", "0")
    assert "in flight  0" in printed
