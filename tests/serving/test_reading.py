"""What upstreams answer, over real sockets: sizes, lines, forms and errors, as the client of OpenAI sees them."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import pytest

import penstock as ps
from penstock import serving
from tests.serving.openai_server import Messages, asking, client

ASKED: Messages = [{"role": "user", "content": "hi"}]
JSON, SSE = "application/json", "text/event-stream"
DONE = b"data: [DONE]\n\n"


def part(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a part of a streamed answer."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def whole(text: str = "hi", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **more}


GOOD = event(part("first ")) + event(part("second", "stop")) + DONE


class Raw:
    """A server that answers each request with given bytes.

    Attributes:
        body: the body of each answer, or its pieces, which are sent one by one.
        status: the status, with its name.
        headers: further lines of headers.
        asked: how many requests have come.
        connected: how many connections were opened.
        ends: whether an answer ends; otherwise its connection stays open.
    """

    def __init__(self, body: bytes | list[bytes], kind: str = SSE, status: str = "200 OK", *headers: str) -> None:
        self.body, self.status, self.headers = body, status, [f"content-type: {kind}", *headers]
        self.asked = self.connected = 0
        self.ends = True

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0) as server:
            yield "http://{}:{}/v1".format(*server.sockets[0].getsockname())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
                self.asked += 1
                lines = [f"HTTP/1.1 {self.status}", "transfer-encoding: chunked", *self.headers, "", ""]
                writer.write("\r\n".join(lines).encode())
                for piece in [self.body] if isinstance(self.body, bytes) else self.body:
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0)
                if not self.ends:
                    await reader.read()
                writer.write(b"0\r\n\r\n")
        writer.close()


@contextlib.asynccontextmanager
async def behind(server: Raw, **options: Any) -> AsyncIterator[tuple[Any, serving.Upstream]]:
    """Give a client of OpenAI that asks the server through models: "m" as it is, and "read" through a graph."""
    async with server.listening() as url:
        up = serving.upstream(url, **{"breaker": serving.Breaker(failures=10_000), "check_seconds": None, **options})

        @ps.node
        async def texts(parts: AsyncIterator[serving.Delta]) -> AsyncIterator[str]:
            async for one in parts:
                yield one.text

        @ps.graph
        async def read(messages: Messages, request: serving.Request) -> AsyncIterator[str]:
            return texts(up.chat(messages, request))

        async with asking({"m": up, "read": read}) as http, client(http.base_url) as ask:
            yield ask, up


async def said(ask: Any, model: str = "m", *, stream: bool = True) -> str:
    """Return the text of an answer; raise what the client raises, also for an answer that has no end."""
    if not stream:
        done = await ask.chat.completions.create(model=model, messages=ASKED)
        return str(done.choices[0].message.content)
    ends, text = [], ""
    async for chunk in await ask.chat.completions.create(model=model, messages=ASKED, stream=True):
        text += chunk.choices[0].delta.content or ""
        ends.append(chunk.choices[0].finish_reason)
    assert ends[-1] == "stop"
    return text


@pytest.mark.parametrize("place", ["status", "first event", "whole", "late event"])
async def test_an_error_is_the_requests_or_the_servers_wherever_it_stands(place: str) -> None:
    openai = pytest.importorskip("openai")
    server = Raw(b"", JSON if place in ("status", "whole") else SSE)
    async with behind(server) as (ask, up):
        for status, model in product((400, 401, 404, 408, 409, 422, 425, 429, 451, 500, 503), ("m", "read")):
            is_own = status < 500 and status not in (408, 425, 429)
            error = {"error": {"message": "so it is", "type": "some", "param": "seed", "code": status}}
            server.body = json.dumps(error).encode()
            if place == "status":
                server.status = f"{status} No"
            elif place != "whole":
                server.body = (event(part("half")) if place == "late event" else b"") + event(error) + DONE
            before = up.replicas[0].breaker.failed
            with pytest.raises(openai.APIError, match="so it is") as raised:
                await said(ask, model, stream=place != "whole")
            assert up.replicas[0].breaker.failed == before + (not is_own and status not in (429, 503))
            told: Any = raised.value
            if place != "late event":  # behind a status that was sent before
                assert told.status_code == (status if is_own or status in (429, 503) else 502)
            if is_own:
                assert (told.param, str(told.code)) == ("seed", str(status))


async def test_an_error_without_a_number_is_known_by_its_kind() -> None:
    openai = pytest.importorskip("openai")
    server = Raw(b"")
    async with behind(server) as (ask, up):
        for kind, expected in (("invalid_request_error", 400), ("rate_limit_error", 429), (["x"], 502)):
            server.body = event({"error": {"message": "so it is", "type": kind, "code": "long"}})
            with pytest.raises(openai.APIStatusError) as raised:
                await said(ask)
            assert raised.value.status_code == expected
        assert up.replicas[0].breaker.failed == 1  # a server at its limit is busy, not down


ERRORS: dict[str, bytes] = {
    "object": event({"object": "error", "message": "out of memory", "type": "InternalServerError", "code": 500}),
    "error_message": event({"error_type": "server", "error_message": "out of memory"}),
    "detail": event({"detail": "out of memory"}),
    "message": b"event: error\n" + event({"message": "out of memory"}),
    "text": event({"error": "out of memory"}),
    "behind another field": event({"id": "c", "error": {"message": "out of memory"}}),
    "half": event(part("half")) + event({**part("", "error"), "error": {"code": 502, "message": "out of memory"}}),
    "half and type": event(part("half")) + event({"type": "error", "error": {"message": "out of memory"}}),
    "in a choice": event({**part(""), "choices": [{**part("")["choices"][0], "error": {"message": "out of memory"}}]}),
}


@pytest.mark.parametrize("model", ["m", "read"])
@pytest.mark.parametrize("name", ERRORS)
async def test_an_answer_with_an_error_never_looks_complete(name: str, model: str) -> None:
    openai = pytest.importorskip("openai")
    async with behind(Raw(ERRORS[name] + DONE)) as (ask, up):
        with pytest.raises(openai.APIError, match="out of memory"):
            await said(ask, model)
        assert up.replicas[0].breaker.failed == 1
    if "half" not in name:
        body = ERRORS[name].partition(b"data: ")[2]
        async with behind(Raw(body, JSON)) as (ask, _):
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                await said(ask, model, stream=False)


@pytest.mark.parametrize("model", ["m", "read"])
async def test_an_answer_that_only_has_the_word_error_is_complete(model: str) -> None:
    parts = event({"error": None, **part('an "error" ')}) + event(part("is told", "stop", error={})) + DONE
    async with behind(Raw(parts)) as (ask, _):
        assert await said(ask, model) == 'an "error" is told'
    async with behind(Raw(json.dumps({"error": None, **whole('"error"')}).encode(), "Application/JSON")) as (ask, _):
        assert await said(ask, model, stream=False) == '"error"'


NO_ANSWER = r"something else than an object of JSON|JSON that is no answer"
NO_ANSWERS: list[bytes] = [
    b"", b"oops", b"[1, 2]", b'"text"', b"null", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"choices": "\xff"}',
    *(json.dumps(one).encode() for one in (
        {"choices": "text"}, {"choices": {"0": 1}}, {"choices": [1]}, {"choices": [{"message": "text"}]},
        {"choices": [{"message": {"content": 5}}]}, {"choices": [{"message": {"tool_calls": 5}}]},
        {"choices": [{"message": {"tool_calls": [{"function": {"arguments": {}}}]}}]},
        {"choices": [{"message": {"tool_calls": [{"index": []}]}}]}, whole(usage=[1]),
    )),
]  # fmt: skip


async def test_what_is_no_answer_is_a_failure_of_the_server_and_fails_over() -> None:
    openai = pytest.importorskip("openai")
    bad, good = Raw(b""), Raw(json.dumps(whole()).encode(), JSON)
    async with bad.listening() as one, good.listening() as two:
        first, second = (
            serving.upstream(url, breaker=serving.Breaker(failures=10_000), check_seconds=None) for url in (one, two)
        )
        models = {"alone": first, "safe": first.chat.with_policy(failover=second.chat)}
        async with asking(models, parts=[second]) as http, client(http.base_url) as ask:
            for body in NO_ANSWERS:
                bad.headers, bad.body = [f"content-type: {JSON}"], body
                with pytest.raises(openai.InternalServerError, match=NO_ANSWER):
                    await said(ask, "alone", stream=False)
                assert await said(ask, "safe", stream=False) == "hi"
                bad.headers, bad.body = [f"content-type: {SSE}"], event(part("half")) + b"data: %b\n\n" % body + DONE
                if body and b'"choices"' not in body:  # what may be a part goes on in bytes
                    with pytest.raises(openai.APIError, match=NO_ANSWER):
                        await said(ask, "alone")


MANY_LINES = b"".join(b"data: %b\n" % line for line in json.dumps(part("first "), indent=1).encode().split(b"\n"))
FORMS: dict[str, bytes] = {
    "plain": GOOD,
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "several lines": MANY_LINES + b"\n" + event(part("second", "stop")) + DONE,
    "returns": (MANY_LINES + b"\n" + event(part("second", "stop")) + DONE).replace(b"\n", b"\r\n"),
    "no space": GOOD.replace(b"data: ", b"data:"),
    "no empty lines": GOOD.replace(b"\n\n", b"\n"),
    "fields and comments": b": hello\n\nid: 1\nretry: 5\ndata\n\ndata:\n\n"
    + GOOD.replace(b"data", b": x\nid: 7\ndata"),
    "no last line": GOOD.removesuffix(b"\n\n"),
    "more behind the end": GOOD + event({"error": {"message": "late"}}),
}


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("name", FORMS)
async def test_events_are_read_as_their_format_says_however_they_are_cut(name: str, in_bytes: bool) -> None:
    form = FORMS[name]
    server = Raw([form[at : at + 1] for at in range(len(form))] if in_bytes else form)
    async with behind(server) as (ask, _):
        for model in ("m", "read"):
            assert await said(ask, model) == "first second"


async def test_a_stream_that_stays_open_behind_its_end_is_complete() -> None:
    server = Raw(GOOD)
    server.ends = False
    async with behind(server, timeout_seconds=60) as (ask, up):
        assert await said(ask) == "first second"
        assert (up.replicas[0].in_flight, up.replicas[0].breaker.failed) == (0, 0)


async def test_a_connection_is_used_again_when_its_stream_has_ended() -> None:
    server = Raw(GOOD)
    async with behind(server) as (ask, _):
        for _ in range(3):
            assert await said(ask) == "first second"
    assert (server.asked, server.connected) == (3, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_too_large_or_packed_is_not_read(stream: bool) -> None:
    openai = pytest.importorskip("openai")
    endless = [b"data: {" if stream else b"{", *[b" " * 1000] * 5000]
    kind = SSE if stream else JSON
    for body in (endless, [b"data: x\n" * 100] * 5000):
        async with behind(Raw(body, kind), max_answer_bytes=10_000) as (ask, up):
            with pytest.raises(openai.InternalServerError, match="more than 10000 bytes"):
                await said(ask, stream=stream)
            assert up.replicas[0].breaker.failed == 1
    async with behind(Raw(gzip.compress(GOOD), kind, "200 OK", "content-encoding: gzip")) as (ask, _):
        with pytest.raises(openai.InternalServerError, match="compressed"):
            await said(ask, stream=stream)


async def test_the_status_of_an_error_is_told_whatever_its_body_is() -> None:
    openai = pytest.importorskip("openai")
    endless = Raw([b" " * (1 << 20)] * 3, JSON, "429 Busy", "retry-after: 7")
    endless.ends = False
    packed = Raw(gzip.compress(b" " * (64 << 20)), JSON, "429 Busy", "content-encoding: gzip", "retry-after: 7")
    strange = Raw(b'{"error": {"message": "\\ud800", "code": "\\ud800"}}', JSON, "429 Busy", "retry-after: \u20ac")
    wrong = Raw(strange.body, JSON, "400 Wrong")
    for server, after in ((endless, "7"), (packed, "7"), (strange, None), (wrong, None)):
        async with behind(server) as (ask, _):
            with pytest.raises(openai.APIStatusError) as raised:
                await said(ask)
        assert raised.value.status_code == int(server.status[:3])
        assert raised.value.response.headers.get("retry-after") == after
    async with behind(Raw(b'{"detail": "log in first"}', JSON, "302 Found", "location: /login")) as (ask, _):
        with pytest.raises(openai.InternalServerError, match="log in first"):
            await said(ask, stream=False)
