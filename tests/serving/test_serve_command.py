"""`penstock serve` prints what it serves and how to call it, and drains at SIGTERM."""

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.devices.processes import ROOT, command

ENDED = (0, -signal.SIGTERM)  # uvicorn ends by the signal when all calls are done


@contextmanager
def serving(target: str, *options: str) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    program = [sys.executable, "-m", "penstock", "serve", target, "--port", "0", *options]
    process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        while "print(" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        found = re.search(r"at (http://127\.0\.0\.1:\d+)/v1", said)
        assert found, said
        yield found[1], said, process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_it_and_spans_are_printed_if_a_variable_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with serving("examples.library_model:library") as (url, _, process):
        body = {"model": "library", "messages": [{"role": "user", "content": "What is heapq?"}]}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(60) == 0
    assert '"name": "chat library"' in said
    assert '"service.name": "library"' in said
    assert "Traceback" not in said


def output_of(*program: str) -> str:
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout


def test_it_serves_a_graph_that_needs_no_model_and_says_how_to_ask_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1 one\n\nsk-2\n")
    with serving("examples.library_model:library", "--api-key-file", str(keys)) as (url, said, process):
        assert said.startswith("serving library at http://127.0.0.1:")
        assert f'base_url="{url}/v1"' in said
        body = {"model": "library", "messages": [{"role": "user", "content": "Which finds the most common elements?"}]}
        with httpx.Client(base_url=url, headers={"authorization": "Bearer sk-2"}, timeout=30) as http:
            answer = http.post("/v1/chat/completions", json=body).json()
            assert "collections.Counter.most_common" in answer["choices"][0]["message"]["content"]
            # The printed commands can be pasted into a shell, and into Python with OpenAI's synchronous client.
            shell, program = said.replace("KEY", "sk-1").split("\n\n", 1)[1].split("\n\n")
            if shutil.which("curl"):
                assert "data: [DONE]" in output_of("sh", "-c", shell.replace("curl", "curl -sSN"))
            if importlib.util.find_spec("openai"):
                assert "ChatCompletion(" in output_of(sys.executable, "-c", program)
            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert httpx.get(f"{url}/health/ready").status_code == 200
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) in ENDED


def test_an_answer_that_has_begun_is_complete_when_it_drains() -> None:
    with serving("tests.serving.openai_server:slow") as (url, _, process):
        body = {"model": "slow", "messages": [{"role": "user", "content": "x"}], "stream": True}
        lines: list[str] = []
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as stream:
            for line in stream.iter_lines():
                lines.append(line)
                if len(lines) == 1:
                    process.send_signal(signal.SIGTERM)
        assert process.wait(60) in ENDED
    assert lines[-2] == "data: [DONE]"
    words = [json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines if line[6:7] == "{"]
    assert "".join(words) == "0123456789"


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        ("nothing.here:graph", [], "there is no module 'nothing'"),
        ("tests.serving.openai_server:nothing", [], "has no 'nothing'"),
        ("tests.serving.openai_server:slow", ["--api-key-file", "nothing.txt"], "nothing.txt"),
        ("tests.serving.openai_server:slow", ["--api-key-file", "/dev/null"], "has no keys"),
        ("tests.serving.openai_server:opened", [], "serving.openai"),
    ],
)
def test_what_cannot_be_served_is_refused(
    target: str, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, errors = command(capsys, "serve", target, *options)
    assert status in (1, 2)
    assert told in errors
