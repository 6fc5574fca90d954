"""`penstock studio` as a browser asks it: who may look, and the data of several processes."""

import json
import re
import signal
import socket
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.devices.processes import command

from .studio import Studio
from .test_top import exposed


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    path = tmp_path_factory.mktemp("studio") / "app.sock"
    with exposed(path), Studio(path, "--host-name", "Proxy.example") as found:
        yield found


# --- Who may look ---


@pytest.mark.parametrize("token", ["", "wrong", "x" * 4000])
@pytest.mark.parametrize("asked", ["GET /looks", "GET /drawing", "POST /record", "GET /none"])
def test_without_the_token_nothing_is_told(studio: Studio, asked: str, token: str) -> None:
    method, path = asked.split()
    status, _, content = studio.ask(path, method=method, token=token)
    assert status == 401
    assert b"open the address that penstock studio has printed" in content


def test_the_token_counts_in_its_header_alone(studio: Studio) -> None:
    assert studio.ask(f"/looks?token={studio.token}", token="")[0] == 401
    assert studio.ask("/looks")[0] == 200
    assert len(studio.token) >= 32


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8080", "[::1]", "proxy.example:443"])
def test_a_name_of_the_machine_is_served_whatever_the_port(studio: Studio, host: str) -> None:
    assert studio.ask("/", host=host)[0] == 200


@pytest.mark.parametrize("host", ["", "evil.example:80", "127.0.0.1.evil.example", "::1", "127.0.0.1:x"])
@pytest.mark.parametrize("path", ["/", "/looks"])
def test_another_name_of_the_machine_is_refused(studio: Studio, path: str, host: str) -> None:
    status, _, content = studio.ask(path, host=host)
    assert status == 421
    assert b"--host-name" in content


def test_the_page_runs_its_own_script_and_nothing_else(studio: Studio) -> None:
    status, headers, content = studio.ask("/", token="")
    assert status == 200
    page = content.decode()
    assert studio.token not in page
    hashes = {
        kind: b64encode(sha256(re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)[0].encode()).digest()).decode()
        for kind in ("script", "style")
    }
    assert headers["content-security-policy"] == (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert "style=" not in page
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)


@pytest.mark.parametrize("path", ["/", "/looks", "/profiles/none"])
def test_nothing_is_kept_or_framed_or_guessed(studio: Studio, path: str) -> None:
    _, headers, _ = studio.ask(path)
    protecting = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    assert headers.items() >= protecting.items()
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/drawing?graph=none", "this graph is not drawn"),
        ("/drawing?process=7", "there is no such process"),
        ("/looks?newer=x", "newer= is a whole number, not 'x'"),
        ("/profiles/none", "there is no such profile: record another"),
        ("/none", "there is nothing at this path"),
    ],
)
def test_what_is_not_there_is_said_so(studio: Studio, path: str, says: str) -> None:
    status, _, content = studio.ask(path)
    assert status == 404
    assert says in content.decode()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace-url", "javascript:alert({trace_id})"], "is no address of a trace: write one that begins with http"),
        (["--trace-url", "http://jaeger/trace/"], "has {trace_id}"),
        (["--port", "99999"], "--port: 99999 cannot be used"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, errors = command(capsys, "studio", "app.sock", *arguments)
    assert status == 2
    assert says in " ".join(errors.split())


def test_signals_in_a_row_end_the_command(tmp_path: Path) -> None:
    with Studio(tmp_path / "app.sock") as studio:  # whose end sees the exit status
        for number in (signal.SIGTERM, signal.SIGINT) * 20:
            studio.process.send_signal(number)


def test_a_process_that_does_not_answer_holds_up_no_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "app.sock"))
        silent.listen()
        patient = "from penstock.studio.live import protocol\nprotocol._ANSWER_SECONDS = 3600.0"
        with Studio(tmp_path / "app.sock", before=patient):
            asking, _ = silent.accept()
            assert asking.recv(9)
        asking.close()


# --- Several processes ---


def until(studio: Studio, number: int, is_so: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the data that the page gets of a process, once a condition holds."""
    give_up = monotonic() + 60
    while not is_so(found := studio.looks()["processes"][number]):
        assert monotonic() < give_up, found
    told: dict[str, Any] = found
    return told


@pytest.mark.timeout(180)
def test_a_process_that_dies_is_told_and_found_again(tmp_path: Path) -> None:
    first, second = tmp_path / "a.sock", tmp_path / "b.sock"
    with Studio(first, second) as studio:
        missing = until(studio, 0, lambda one: "no socket" in one["says"])
        assert not missing["alive"]
        assert missing["look"] is None
        with exposed(first) as app, exposed(second):
            found = until(studio, 0, lambda one: len(one["series"]["times"]) > 1)
            assert found["alive"]
            assert found["look"]["process"] == app.pid
            assert found["look"]["verdict"]["title"] == "slow"
            until(studio, 1, lambda one: one["alive"])
            app.send_signal(signal.SIGKILL)
            dead = until(studio, 0, lambda one: not one["alive"])
            assert "end" in dead["says"]
            assert len(dead["series"]["times"]) > 1  # the minutes before are still there
            before = studio.looks()["number"]
            assert studio.looks()["processes"][1]["alive"]
            with exposed(first) as again:
                found = until(studio, 0, lambda one: one["alive"])
                assert found["look"]["process"] == again.pid
                assert studio.looks(before)["number"] > before


@pytest.mark.long  # the page waits for an answer for ten seconds
def test_a_process_that_is_stopped_is_told_until_it_goes_on(tmp_path: Path) -> None:
    with exposed(tmp_path / "app.sock") as app, Studio(tmp_path / "app.sock") as studio:
        app.send_signal(signal.SIGSTOP)
        until(studio, 0, lambda one: "not answered" in one["says"] and not one["alive"])
        app.send_signal(signal.SIGCONT)
        until(studio, 0, lambda one: one["alive"])


def test_a_page_gets_what_is_newer_than_it_has(studio: Studio) -> None:
    until(studio, 0, lambda one: len(one["series"]["times"]) > 2)
    number = studio.looks()["number"]
    assert studio.looks(number + 1)["processes"][0]["look"] is None
    times = studio.looks(number - 1)["processes"][0]["series"]["times"]
    assert 1 <= len(times) <= 2


def test_one_of_several_scopes_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "app.sock"
    with exposed(path, "scopes"), Studio(path) as studio:
        whole = until(studio, 0, lambda one: one["look"] and len(one["look"]["graphs"][0]["scopes"]) == 20)["look"]
        [graph] = whole["graphs"]
        scopes = [scope for scope, *_ in graph["scopes"]]
        scope, label, _ = graph["scopes"][0]
        assert label.startswith("stream ")

        def done(look: dict[str, Any]) -> int:
            at = [title for title, _ in look["columns"]].index("done")
            step: dict[str, Any] = look["steps"][graph["id"]][0]
            return int(step["cells"][at - 1].replace(",", ""))

        def of_scope() -> int:
            return done(json.loads(studio.ask(f"/looks?scope={scope}")[2])["processes"][0]["look"])

        give_up = monotonic() + 30
        while not 0 < of_scope() < 0.75 * done(studio.looks()["processes"][0]["look"]):
            assert monotonic() < give_up
        # More pages may choose a scope than a process accepts connections.
        number = studio.looks()["number"]
        while studio.looks()["number"] < number + 4:
            assert monotonic() < give_up
            assert [studio.ask(f"/looks?scope={one}")[0] for one in scopes] == [200] * 20
            assert studio.looks()["processes"][0]["alive"]


def test_a_training_tells_its_newest_snapshot_and_the_time_that_is_left(tmp_path: Path) -> None:
    path = tmp_path / "app.sock"

    with exposed(path, "saved"), Studio(path) as studio:
        told = until(studio, 0, lambda one: "between the last two" in str(one) and " left" in str(one))
        [[_, label, share]] = told["look"]["graphs"][0]["scopes"]
    assert re.search(
        r"[\d,]+/1,000,000 done; .* left; newest cut .* s old, .*B; cuts every 0.3 s, .* s between the last two", label
    )
    assert 0 < share < 1


def test_items_in_flight_and_failures_are_told_without_values(studio: Studio) -> None:
    told = until(studio, 0, lambda one: one["look"] and one["look"]["failures"] and one["look"]["items"])
    look = told["look"]
    assert look["failures"][0]["cells"][:2] == ["slow", "ValueError"]
    assert [title for title, _ in look["failure_columns"]] == ["step", "error", "times", "last"]
    graph = look["graphs"][0]["id"]
    steps = {step["key"] for step in look["steps"][graph]}
    assert {row["key"] for row in look["items"] if row["cells"][0] == "slow"} <= steps
    assert look["failures"][0]["graph"] == graph
