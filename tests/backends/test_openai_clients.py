"""Clients of OpenAI's protocol, in their own environment, each call a tool of a graph: `make test-backends`."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.server import program

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    program("clients", "python")  # skips the test before a server starts
    command = [sys.executable, "-m", "penstock", "serve", "tests.serving.openai_server:thinker", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+/v1", process.stdout.readline())
    assert found
    yield found[0]
    process.kill()
    process.communicate()


def says(client: str, url: str) -> list[str]:
    """Return the lines that the script of a client prints; skips the test if the clients are not installed."""
    python = program("clients", "python")
    done = subprocess.run(
        [python, Path(__file__).with_name("openai_clients.py"), client, url],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.splitlines()


# The versions of the clients for which this transcript holds.
VERSIONS = {"openai": "3.57.0", "openai-agents": "0.24.0", "langchain-openai": "1.7.4", "pydantic-ai-slim": "2.68.0"}


@pytest.mark.parametrize("client", VERSIONS)
def test_a_streamed_call_of_a_tool(client: str, url: str) -> None:
    assert says(client, url) == [f"{client} {VERSIONS[client]}", "weather('Ulm')", "It is sunny in Ulm."]


def test_requests_that_the_document_allows_are_answered_and_none_is_a_500(url: str) -> None:
    _, has_asked = says("schemathesis", url)
    assert has_asked == "True"
