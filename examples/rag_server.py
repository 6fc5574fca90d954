"""Answer questions from several sources over HTTP: fetch them together, rank what they found, stream the answer.

    python examples/rag_server.py                       ask one question of a server made for it, and end
    python examples/rag_server.py --question "valves"
    python examples/rag_server.py --serve 8000          and then: curl 'http://127.0.0.1:8000/rag?q=valves'

Five sources are asked at the same time. Four are needed and are asked again if they fail once; the fifth, the web, is
optional: here it always fails, and the answer says so. A client that leaves in the middle frees everything.
"""

import argparse
import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import TypedDict

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette

import penstock as ps
from penstock import asgi, engine

SOURCES = ("wiki", "docs", "mail", "code")
OPTIONAL = "web"
SECONDS = 10  # for a whole answer, streaming included


class Document(TypedDict):
    """What a source finds."""

    title: str
    text: str


# --- the graph


@ps.resource
async def http(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The client that all calls share."""
    async with httpx.AsyncClient(base_url=base_url) as client:
        yield client


@ps.node(timeout_seconds=2, retry=ps.Retry(attempts=2, backoff_seconds=0.05), concurrency=32)
async def fetch(client: httpx.AsyncClient, source: str, query: str) -> list[Document]:
    """Ask one source."""
    response = await client.get(f"/{source}", params={"q": query}, timeout=ps.current().remaining_seconds())
    response.raise_for_status()
    documents: list[Document] = response.json()
    return documents


def say_missing(error: Exception) -> list[Document]:
    """Stand in for a source that failed."""
    return [{"title": f"({OPTIONAL} is not available: {type(error).__name__})", "text": ""}]


fetch_optional = fetch.with_policy(name="fetch_optional", fallback=say_missing)


@ps.node
def rank(query: str, found: list[list[Document]]) -> list[Document]:
    """Order what was found by how often it names the query."""
    return sorted(itertools.chain.from_iterable(found), key=lambda document: -document["text"].count(query))


@ps.node
async def answer(documents: list[Document]) -> AsyncIterator[str]:
    """Give the answer piece by piece, as a language model would."""
    for document in documents:
        yield f"{document['title']}\n"
        await asyncio.sleep(0)


def build(base_url: str) -> ps.Graph[[str], AsyncIterator[str]]:
    """Make the graph for the sources at `base_url`."""

    @ps.graph
    async def rag(query: str) -> AsyncIterator[str]:
        client = await http(base_url)
        found = [await fetch(client, source, query) for source in SOURCES]
        return answer(rank(query, [*found, await fetch_optional(client, OPTIONAL, query)]))

    return rag


# --- the server


def create_app(base_url: str) -> FastAPI:
    """Make the application, which answers from the sources at `base_url`."""
    rag = build(base_url)
    owner = engine.Engine()
    service = owner.deploy(rag, max_in_flight=64, max_queue=64)

    app = FastAPI(lifespan=asgi.lifespan(owner, service, tuned=True))
    app.add_exception_handler(ps.Overloaded, lambda request, error: asgi.overloaded(error))

    @app.get("/rag")
    async def endpoint(q: str) -> StreamingResponse:
        pieces = service.stream(rag(q), timeout_seconds=SECONDS)
        try:
            await pieces.wait_started()  # an error or a refusal comes before the headers are sent
        except TimeoutError as error:
            raise HTTPException(504, f"a source is too slow: {error}") from error
        except httpx.HTTPError as error:
            raise HTTPException(502, f"a source failed: {error}") from error
        return StreamingResponse(pieces, media_type="text/plain")

    return app


# --- sources to try it with


def create_sources(broken: frozenset[str] = frozenset({OPTIONAL})) -> FastAPI:
    """Make an application with all sources, some of them broken. The wiki fails when it is first asked a question."""
    app = FastAPI(docs_url=None)  # "docs" is a source
    asked: set[str] = set()

    @app.get("/{source}", response_model=None)
    async def ask(source: str, q: str) -> list[Document]:
        if source in broken or (source == "wiki" and q not in asked):
            asked.add(q)
            raise HTTPException(500, f"{source} is out of order")
        weight = len(source)
        return [{"title": f"{source}: about {q}", "text": f"{q} " * weight}]

    return app


class _Server(uvicorn.Server):
    """A server beside other code: Ctrl-C belongs to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Starlette, port: int = 0) -> AsyncGenerator[str, None]:
    """Serve an application on this event loop, and give its address."""
    with socket.create_server(("127.0.0.1", port), backlog=512) as listener:
        server = _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def main() -> None:
    """Serve the sources and the application, and ask the question, or wait for questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", default="turbines")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve until Ctrl-C")
    arguments = parser.parse_args()
    async with serving(create_sources()) as sources, serving(create_app(sources), arguments.serve or 0) as address:
        if arguments.serve:
            print(f"try: curl '{address}/rag?q={arguments.question}'")
            await asyncio.Event().wait()
        print(build(sources))
        async with (
            httpx.AsyncClient(base_url=address) as client,
            client.stream("GET", "/rag", params={"q": arguments.question}) as response,
        ):
            async for piece in response.aiter_text():
                print(piece, end="")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
