"""A model server behind OpenAI's protocol, over raw sockets, which behaves as badly as a test says."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

WORDS = ("one ", "two ", "three")
CUT = 2  # words of an answer that is cut
# Status, body and headers of the answers that are errors.
ERRORS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "busy": ("429 Too Many Requests", {"error": {"message": "busy"}}, ["Retry-After: 0"]),
    "busy for long": ("429 Too Many Requests", {"error": {"message": "busy"}}, ["Retry-After: 60"]),
    "overloaded": ("503 Service Unavailable", {"error": {"message": "overloaded"}}, []),
    "fails": ("500 Internal Server Error", {"error": {"message": "internal"}}, []),
    "rejects": ("400 Bad Request", {"error": {"message": "no such thing", "param": "seed", "code": "x"}}, []),
    "no path": ("404 Not Found", {"detail": "Not Found"}, []),
}


class ModelServer:
    """A server that treats requests by a plan, and counts requests whose connections are open.

    A connection without a request does not count: httpcore (1.0.9) keeps a connection whose request was cancelled
    before it was sent.

    Attributes:
        plan: "good" or "long" (a whole answer), a key of `ERRORS`, "page", "no JSON" or "error in a part" (something
            else in the answer), "no parts", "ends early", "cut before" or "cut after" (not all of an answer),
            "refuses", "hangs" or "silent" (no answer), "endless", or "pauses" (until `resumed` is set).
        bodies: the requests.
        headers: their headers.
        open: how many requests it has now.
        usage: what its answers say of tokens.
        health: the status of its health.
        checks: how often it was asked for its health.
    """

    def __init__(self, plan: str = "good") -> None:
        self.plan = plan
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open = 0
        self.usage: dict[str, Any] = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        self.health, self.checks = 200, 0
        self.hanging: list[asyncio.StreamWriter] = []
        self.resumed = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024) as server:
            yield "http://{}:{}/v1".format(*server.sockets[0].getsockname())

    def plan_of(self, body: dict[str, Any]) -> str:
        return self.plan

    def words_of(self, body: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Returns the words of an answer, and its usage."""
        return [*WORDS], self.usage

    async def has_changed(self) -> None:
        """Is called when a request has come or gone."""

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                asked, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
                if asked.startswith("GET"):
                    self.checks += 1
                    writer.write(b"HTTP/1.1 %d Told\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % self.health)
                    return
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                self.headers.append(headers)
                self.bodies.append(body := json.loads(await reader.readexactly(int(headers["content-length"]))))
                self.open += 1
                try:
                    await self._answer(reader, writer, body)
                    await writer.drain()
                finally:
                    self.open -= 1
        finally:
            writer.close()
            await self.has_changed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        plan = self.plan_of(body)
        parts = self._parts(body, plan)
        await self.has_changed()
        if plan in ("silent", "hangs"):
            if plan == "hangs":
                self.hanging.append(writer)
            await reader.read()  # until one side closes the connection
        if plan in ("silent", "hangs", "refuses"):
            return
        if plan in ERRORS:
            status, error, headers = ERRORS[plan]
            text = json.dumps(error)
            lines = [f"HTTP/1.1 {status}", "Connection: close", f"Content-Length: {len(text)}", *headers]
            writer.write("\r\n".join([*lines, "", text]).encode())
            return

        def send(*parts: str) -> None:
            writer.writelines(b"%x\r\n%s\r\n" % (len(part), part.encode()) for part in parts)

        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        if plan == "cut before":
            return
        send(*parts[:CUT])
        if plan == "cut after" or (plan == "ends early" and not body.get("stream")):
            return
        if plan == "endless":
            await reader.read()
        if plan == "pauses":
            await self.resumed.wait()
        if plan != "ends early":
            send(*parts[CUT:])
        writer.write(b"0\r\n\r\n")

    def _parts(self, body: dict[str, Any], plan: str) -> list[str]:
        """Returns the parts of a stream, or three pieces of a whole answer."""
        if plan in ("page", "no parts"):
            return ["<html>"] if plan == "page" else []
        (words, usage), reason = self.words_of(body), "length" if plan == "long" else "stop"
        common = {"id": "up", "created": 1, "model": body["model"], "system_fingerprint": "f"}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(words)}, "finish_reason": reason}
            text = json.dumps({**common, "object": "chat.completion", "choices": [choice], "usage": usage})
            return [text[:9], text[9:18], text[18:]]
        common["object"] = "chat.completion.chunk"
        ends: list[Any] = [*(({"content": word}, None) for word in words), ({}, reason)]
        values = [{"choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in ends]
        if (body.get("stream_options") or {}).get("include_usage"):
            values.append({"choices": [], "usage": usage})
        parts = [f"data: {json.dumps({**common, **value})}\n\n" for value in values]
        if plan == "error in a part":
            return [parts[0], 'data: {"error": {"message": "out of memory"}}\n\n']
        if plan == "no JSON":
            parts.insert(1, "data: oops\n\n")
        return [*parts, "data: [DONE]\n\n"]


class InAProcess(ModelServer):
    """Takes a while for an answer, and prints what it is asked, up to the first chat."""

    def plan_of(self, body: dict[str, Any]) -> str:
        if len(self.bodies) == 1:
            print("chat", flush=True)
        return str(body.get("user", "good"))

    async def has_changed(self) -> None:
        if not self.bodies:
            print("check", flush=True)
        for _ in range(20):
            await asyncio.sleep(0)

    async def serve(self, port: int) -> None:
        async with await asyncio.start_server(self._connected, "127.0.0.1", port, backlog=1024) as server:
            print(server.sockets[0].getsockname()[1], flush=True)
            await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(InAProcess().serve(int(sys.argv[1])))
