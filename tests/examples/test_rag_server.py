"""The RAG server over HTTP: one source fails, one fails once, a needed one fails for good, a client leaves."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from examples import rag_server
from examples.rag_server import Document, build, create_app, create_sources, serving
from penstock import engine, testing

PROGRAM = Path(rag_server.__file__)
SOURCES = ["wiki", "docs", "mail", "code"]


@asynccontextmanager
async def client(broken: frozenset[str]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the server, which has local sources."""
    async with (
        serving(create_sources(broken)) as sources,
        serving(create_app(sources)) as address,
        httpx.AsyncClient(base_url=address, timeout=30) as http,
    ):
        yield http


async def test_an_optional_source_that_fails_is_named_and_the_answer_comes() -> None:
    async with client(frozenset({"web"})) as http:
        response = await http.get("/rag", params={"q": "gates"})
    assert response.status_code == 200
    *found, missing = response.text.splitlines()
    assert found == [f"{source}: about gates" for source in SOURCES]
    assert missing == "(web is not available: HTTPStatusError)"


async def test_a_needed_source_that_fails_is_an_error_before_the_headers() -> None:
    async with client(frozenset({"mail"})) as http:
        response = await http.get("/rag", params={"q": "gates"})
    assert response.status_code == 502
    assert "/mail" in response.json()["detail"]


async def test_ten_questions_at_a_time() -> None:
    async with client(frozenset({"web"})) as http, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(http.get("/rag", params={"q": f"q{number}"})) for number in range(10)]
    for number, task in enumerate(asked):
        assert task.result().text.splitlines()[0] == f"wiki: about q{number}"


async def test_the_graph_is_tested_without_any_server() -> None:
    async def fake(client: httpx.AsyncClient, source: str, query: str) -> list[Document]:
        return [{"title": source, "text": query * len(source)}]

    rag = build("http://nowhere.invalid")
    with testing.replace(rag_server.fetch, fake):
        async with engine.stream(rag("q")) as pieces:
            assert [piece async for piece in pieces] == [f"{source}\n" for source in [*SOURCES, "web"]]


def test_the_program_answers_and_ends() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--question", "valves"], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.endswith("code: about valves\n(web is not available: HTTPStatusError)\n")
    assert done.stderr == ""
