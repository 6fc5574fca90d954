"""`penstock.asgi`: the bytes that it sends, and calls whose client leaves or stalls, over real sockets too."""

import asyncio
import enum
import functools
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import structlog
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock as ps
from penstock import asgi, engine, testing
from tests.kit import begun, outcomes, virtual
from tests.serving.servers import (
    WAYS_TO_LEAVE,
    client,
    places_kept,
    places_of_a_client_who_stalls,
    server,
    settled,
)

APPLICATION = "tests.serving.asgi_app"
# Each server on its usual event loop, and on the other loop.
SERVERS = [
    ("uvicorn", "uvloop"),
    ("hypercorn", "asyncio"),
    pytest.param(("uvicorn", "asyncio"), marks=pytest.mark.long),
    pytest.param(("hypercorn", "uvloop"), marks=pytest.mark.long),
]


@dataclass(frozen=True)
class Progress:
    done: int


@ps.node(effectful="unordered")
async def work(count: int) -> dict[str, int]:
    for done in range(count):
        await ps.emit(Progress(done))
    return {"done": count}


@ps.node(effectful="unordered")
async def say(text: str) -> AsyncIterator[str]:
    for word in text.split(" "):
        await ps.emit(Progress(len(word)))
        yield word


@ps.node
async def breaks(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number
    raise LookupError("a secret")


told, said, broken = ps.graph(work), ps.graph(say), ps.graph(breaks)


class Client:
    """Stands for server and client of one request: it keeps all messages, and leaves or stalls when a test says so."""

    def __init__(self) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.gone = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()

    async def receive(self) -> MutableMapping[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self.takes.wait()
        self.sent.append(message)

    async def asks_for(self, response: Response, method: str = "GET") -> str:
        """Take a response; return the body that was sent."""
        scope = {"type": "http", "method": method, "asgi": {"version": "3.0", "spec_version": "2.3"}}
        await response(scope, self.receive, self.send)
        return self.body

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def events(call: Any, emitted: Any = None, **options: Any) -> Response:
    """Return a response with the values of a call, and with what it emits of this type, as server-sent events."""
    return asgi.event_stream(engine.stream(call, events=emitted) if emitted else engine.stream(call), **options)


def lines(call: Any, emitted: Any = None, **options: Any) -> Response:
    """Return the same as lines of JSON."""
    return asgi.ndjson(engine.stream(call, events=emitted) if emitted else engine.stream(call), **options)


async def test_events_values_and_the_result_as_server_sent_events() -> None:
    response = events(told(2), Progress)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store, no-transform"
    assert "content-length" not in response.headers
    assert await Client().asks_for(response) == (
        'event: Progress\ndata: {"done": 0}\n\nevent: Progress\ndata: {"done": 1}\n\nevent: end\ndata: {"done": 2}\n\n'
    )
    body = await Client().asks_for(events(said("ä\nb c")))
    assert body == "data: ä\ndata: b\n\ndata: c\n\nevent: end\ndata: \n\n"
    assert await Client().asks_for(events(said("ab c"), Progress, encode=lambda value: repr(value)[:4])) == (
        "event: Progress\ndata: Prog\n\ndata: 'ab'\n\nevent: Progress\ndata: Prog\n\ndata: 'c'\n\n"
        "event: end\ndata: \n\n"
    )


async def test_the_same_as_lines_of_json() -> None:
    body = await Client().asks_for(lines(told(1), Progress))
    assert list(map(json.loads, body.splitlines())) == [
        {"value": {"done": 0}, "node": "work", "item": 0, "attempt": 1, "kind": "event"},
        {"kind": "result", "value": {"done": 1}},
    ]
    response = lines(said("ä b"), status_code=203, headers={"x-mine": "1"})
    assert (response.headers["content-type"], response.headers["x-mine"]) == ("application/x-ndjson", "1")
    assert response.headers["x-accel-buffering"] == "no"
    client = Client()
    assert await client.asks_for(response) == '"ä"\n"b"\n'
    assert [message.get("status") for message in client.sent] == [203, None, None]
    body = await Client().asks_for(lines(said("a b"), Progress))
    assert [json.loads(line)["kind"] for line in body.splitlines()] == ["event", "value"] * 2
    assert await Client().asks_for(lines(list[ps.Call[AsyncIterator[str]]]())) == ""
    with pytest.raises(TypeError, match="pass encode="):
        await Client().asks_for(lines(one_object()))


@ps.graph
@ps.node
async def one_object() -> AsyncIterator[object]:
    yield object()


@ps.graph
@ps.node
async def floats(text: str) -> AsyncIterator[float]:
    yield float(text)


async def test_values_that_are_ready_go_out_in_one_chunk_and_those_before_an_error_arrive() -> None:
    def picky(value: str) -> str:
        if value == "c":
            raise LookupError
        return value.upper()

    def as_comment(event: Progress) -> bytes:
        return b": %d\n\n" % event.done

    for response, chunk in (
        (events(said("a b")), b"data: a\n\ndata: b\n\n"),
        (events(said("a bc"), Progress, encode_event=as_comment), b": 1\n\ndata: a\n\n: 2\n\ndata: bc\n\n"),
    ):
        client = Client()
        await client.asks_for(response)
        assert [message.get("body") for message in client.sent] == [None, chunk, b"event: end\ndata: \n\n"]
    client = Client()
    with pytest.raises(LookupError):
        await client.asks_for(events(said("a b c d"), encode=picky))
    assert client.body == "data: A\n\ndata: B\n\nevent: failed\ndata: LookupError\n\n"
    # A reader that takes a value each turn sees how many values are ready, at most as many as the stream buffers.
    async with engine.stream(said(" ".join("x" * 40))) as stream:
        assert stream.ready == 0
        await anext(stream)
        assert 0 < stream.ready <= 16
        left = [stream.ready async for _ in stream]
        assert left[-1] == 0
    async with engine.stream(said("a"), events=Progress) as both:
        await both.wait_started()
        assert both.ready == 2
    async with engine.stream(map(told, (0, 0))) as calls:
        assert calls.ready == 0


async def test_what_neither_json_nor_utf_8_can_say() -> None:
    client = Client()
    with pytest.raises(ValueError, match="not JSON compliant"):
        await client.asks_for(lines(floats("nan")))
    assert client.sent == []
    assert await Client().asks_for(events(said("a\udc80"))) == "data: a?\n\nevent: end\ndata: \n\n"


class Color(str, enum.Enum):  # noqa: UP042 - a StrEnum writes its value in a format as well
    RED = "red"


@ps.graph
@ps.node(effectful="unordered")
async def colored(count: int) -> AsyncIterator[Any]:
    await ps.emit(Color.RED)
    for _ in range(count):
        yield Color.RED


async def test_text_is_sent_as_it_is_though_it_has_another_format() -> None:
    for response, body in (
        (events(colored(1), Color), "event: Color\ndata: red\n\ndata: red\n\nevent: end\ndata: \n\n"),
        (events(said("a"), encode=lambda _: Color.RED), "data: red\n\nevent: end\ndata: \n\n"),
        (lines(colored(1)), '"red"\n'), (lines(said("a"), encode=lambda _: Color.RED), "red\n"),
    ):  # fmt: skip
        assert await Client().asks_for(response) == body


@ps.node
def is_open(state: str) -> bool:
    return not state


def asking(folder: Path, question: object, words: int = 1) -> Callable[[], Any]:
    """Return a function that calls an agent, which emits some texts and then asks."""
    durable = ps.Durable(folder / "loops.db")

    @ps.node(effectful="unordered")
    async def asks(state: str) -> str:
        for _ in range(words):
            await ps.emit("I want to pay")
        answer: str = await ps.interrupt(question)
        return answer

    @ps.graph
    async def agent() -> str:
        return await ps.while_loop(is_open, asks, "", durable=durable)

    return agent


async def test_a_value_is_one_line_for_whatever_reads_lines() -> None:
    @ps.node
    async def values(count: int) -> AsyncIterator[list[str]]:
        yield ["one\u2028two\u2029three\x85four\r\n"] * count

    for make in (lines, events):
        first, *_ = (await Client().asks_for(make(ps.graph(values)(1)))).splitlines()
        assert json.loads(first.removeprefix("data: ")) == ["one\u2028two\u2029three\x85four\r\n"]


@pytest.mark.parametrize("make", [asgi.event_stream, asgi.ndjson])
@pytest.mark.parametrize("words", [0, 1], ids=["before the status", "after an event"])
async def test_a_question_ends_a_response_that_is_complete(
    make: Callable[[engine.Stream[Any]], Response], words: int, tmp_path: Path
) -> None:
    agent, client = asking(tmp_path, {"pay": 120}, words), Client()
    body = await client.asks_for(make(engine.stream(agent(), durable_key="a", events=str)))
    assert body.count("I want to pay") == words
    last = body.splitlines()[-1 if make is asgi.ndjson else -2]
    asked = json.loads(last.removeprefix("data: "))
    token = asked.pop("token")
    kind = {"kind": "question"} if make is asgi.ndjson else {}
    assert asked == {**kind, "key": "a", "question": {"pay": 120}}
    assert ("event: question" in body) == (make is asgi.event_stream)
    assert [message.get("more_body") for message in client.sent] == [None, *[True] * words, False]
    assert client.sent[0]["status"] == 200
    assert await engine.run(agent(), durable_key="a", answer=ps.Answer("yes", token)) == "yes"


@pytest.mark.parametrize("make", [asgi.event_stream, asgi.ndjson])
async def test_a_question_that_json_does_not_have_is_encoded_or_a_failure(
    make: Callable[..., Response], tmp_path: Path
) -> None:
    agent, client = asking(tmp_path, {"may": b"\x01"}), Client()
    with pytest.raises(TypeError, match="JSON cannot write a 'bytes'"):
        await client.asks_for(make(engine.stream(agent(), durable_key="a", events=str)))
    assert "failed" in client.body
    encoded = make(
        engine.stream(agent(), durable_key="a", events=str), encode=lambda one: "x" if type(one) is bytes else "e"
    )
    assert '"question": {"may": "x"}' in await Client().asks_for(encoded)


async def test_a_client_of_a_detached_call_leaves_and_comes_again_with_the_id_of_its_last_event(
    tmp_path: Path,
) -> None:
    durable, gate = ps.Durable(tmp_path / "loops.db"), asyncio.Event()

    @ps.node(effectful=True)
    async def step(state: int) -> int:
        await ps.emit(Progress(state))
        if state == 1:
            await gate.wait()
        return state + 1

    @ps.graph
    async def agent() -> int:
        return await ps.while_loop(ps.node(lambda state: state < 3), step, 0, durable=durable)

    async with engine.deploy(agent) as service:
        client = Client()
        with pytest.raises(ps.UnknownKey):
            await client.asks_for(asgi.event_stream(service.attach("a", events=Progress)))
        assert client.sent == []
        begun = service.stream(agent(), events=Progress, durable_key="a", detached=True)
        asking = asyncio.ensure_future(client.asks_for(asgi.event_stream(begun)))
        while '{"done": 1}' not in client.body:
            await asyncio.sleep(0)
        client.gone.set()
        first = re.fullmatch(
            r'id: (\d+)\nevent: Progress\ndata: {"done": 0}\n\nid: (\d+)\nevent: Progress\ndata: {"done": 1}\n\n',
            await asking,
        )
        assert first is not None
        await Client().asks_for(asgi.event_stream(service.attach("a", events=Progress)), "HEAD")
        gate.set()
        again = await Client().asks_for(asgi.event_stream(service.attach("a", events=Progress, after=int(first[1]))))
        assert again.startswith(f'id: {first[2]}\nevent: Progress\ndata: {{"done": 1}}\n\nid: ')
        assert again.endswith('data: {"done": 2}\n\nevent: end\ndata: 3\n\n')
        late = asgi.event_stream(service.attach("a", events=str, after=1), encode=lambda value: f"<{value}>")
        missed, number = '{"kind": "missed", "count": null}', int(first[1]) - 1
        assert await Client().asks_for(late) == (
            f"id: {number}\nevent: missed\ndata: {missed}\n\nevent: end\ndata: <3>\n\n"
        )
        lines = await Client().asks_for(asgi.ndjson(service.attach("a", events=str, after=1)))
        assert lines == f'{missed}\n{{"kind": "result", "value": 3}}\n'


async def test_an_error_comes_before_the_status_or_is_told_without_its_text_and_raised() -> None:
    for make, count, told in (
        (events, 0, ""),
        (events, 1, "data: 0\n\nevent: failed\ndata: LookupError\n\n"),
        (lines, 1, '0\n{"kind": "failed", "error": "LookupError"}\n'),
    ):
        client = Client()
        with pytest.raises(LookupError):
            await client.asks_for(make(broken(count)))
        assert (client.body, bool(client.sent)) == (told, bool(count))
        assert all(message.get("more_body", True) for message in client.sent)


async def test_another_protocol_is_two_arguments() -> None:
    """Unnamed events, and an error as JSON: the response ends in good order, and the error is logged once."""
    openai: dict[str, Any] = {"end": "[DONE]", "encode_error": lambda error: json.dumps({"error": str(error)})}
    client = Client()
    assert await client.asks_for(events(said("a"), **openai)) == "data: a\n\ndata: [DONE]\n\n"
    assert client.sent[-1]["more_body"] is False
    assert await Client().asks_for(events(told(1), Progress, **openai)) == (
        'event: Progress\ndata: {"done": 0}\n\ndata: {"done": 1}\n\ndata: [DONE]\n\n'
    )
    with structlog.testing.capture_logs() as logged:
        client = Client()
        body = await client.asks_for(events(broken(1), **openai))
    assert body == 'data: 0\n\ndata: {"error": "a secret"}\n\ndata: [DONE]\n\n'
    assert [message.get("more_body") for message in client.sent] == [None, True, False]
    assert [(event["event"], event["error"]) for event in logged] == [("asgi.failed", "LookupError('a secret')")]
    assert logged[0]["exception"].startswith("Traceback")
    with structlog.testing.capture_logs() as logged:
        assert await Client().asks_for(events(broken(1), statuses={LookupError: 404}, **openai)) == body
    assert "exception" not in logged[0]  # an expected error, logged without a traceback
    del openai["end"]
    body = await Client().asks_for(events(broken(1), **openai))
    assert body == 'data: 0\n\nevent: failed\ndata: {"error": "a secret"}\n\n'
    client = Client()
    with pytest.raises(LookupError):
        await client.asks_for(events(broken(0), **openai))
    assert client.sent == []


async def test_bytes_are_sent_as_they_are() -> None:
    """Several events for a value or none, a comment for an emitted value, and last events of the caller's own."""
    raw: dict[str, Any] = {
        "encode": lambda value: f"event: x\ndata: {value}\n\n".encode() if value != 0 else b"",
        "encode_event": lambda event: f": {event.done}\n\n".encode(),
        "end": lambda: b"event: done\ndata: 1\n\n",
        "encode_error": lambda error: b"event: over\ndata: 2\n\n",
    }
    body = await Client().asks_for(events(told(1), Progress, **raw))
    assert body.startswith(": 0\n\nevent: x\n")
    assert body.endswith("\n\nevent: done\ndata: 1\n\n")
    with structlog.testing.capture_logs():
        body = await Client().asks_for(events(broken(2), **raw))
    assert body == "event: x\ndata: 1\n\nevent: over\ndata: 2\n\n"


class Missing(LookupError):
    pass


class Answers:
    """A deployment with one place behind a plain endpoint. Its node raises or returns its argument, or waits."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()

        @ps.node(timeout_seconds=5)
        async def work(given: object) -> object:
            if isinstance(given, Exception):
                raise given
            if given == "waits":
                await self.goes_on.wait()
            return given

        self.service = engine.Engine().deploy(ps.graph(work), max_in_flight=1, max_queue=0, key=lambda given: "tenant")

    async def ask(self, client: Client, given: object, **options: Any) -> Response:
        scope = {"type": "http", "method": "GET"}
        return await asgi.answer(Request(scope, client.receive), self.service(given), **options)


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (TimeoutError("upstream"), 504, None),
        (ps.NodeTimeoutError("n"), 504, None),
        (ps.Overloaded("options", 3.2), 503, "4"),
        (ps.Overloaded("options", key="tenant"), 429, "1"),
        (ps.EngineClosedError("it drains"), 503, "1"),
        (Missing("row"), 404, None),
        (ConnectionResetError("upstream"), 502, None),
    ],
    ids=repr,
)
async def test_an_error_that_has_a_status_is_answered_without_its_text(
    error: Exception, status: int, retry_after: str | None
) -> None:
    statuses = {OSError: 502, LookupError: 502, Missing: 404}
    answers, client = Answers(), Client()
    async with answers.service:
        with structlog.testing.capture_logs() as logged:
            response = await answers.ask(client, error, statuses=statuses)
            named = await answers.ask(client, error, statuses=statuses, encode_error=lambda error: '{"error": 1}')
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
    assert response.headers["content-type"].startswith("text/plain")
    assert not any(text in response.body for text in (b"tenant", b"options", b"upstream", b"row", b"drains"))
    assert (named.status_code, named.body, named.headers["content-type"]) == (
        status, b'{"error": 1}', "application/json",
    )  # fmt: skip
    told = [] if isinstance(error, ps.Overloaded) else ["asgi.failed"] * 2
    assert [event["event"] for event in logged] == told


async def test_a_stream_that_fails_before_its_first_item_has_the_status_of_the_error() -> None:
    @ps.graph
    @ps.node
    async def failing(error: Exception, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number
        raise error

    statuses, busy = {OSError: 502}, ps.Overloaded("options", 3.2, "tenant")
    client = Client()
    body = await client.asks_for(events(failing(busy, 0), statuses=statuses, encode_error=lambda error: "{}"))
    begin, _ = client.sent
    assert (begin["status"], body) == (429, "{}")
    assert {(b"retry-after", b"4"), (b"content-type", b"application/json")} <= set(begin["headers"])
    client = Client()
    assert await client.asks_for(events(failing(ConnectionError("x"), 0), statuses=statuses)) == "Bad Gateway"
    assert client.sent[0]["status"] == 502
    assert await Client().asks_for(events(failing(TimeoutError("x"), 0), statuses={})) == "Gateway Timeout"
    client = Client()
    with pytest.raises(LookupError):  # a mistake, which has no status
        await client.asks_for(events(failing(LookupError("x"), 0), statuses=statuses))
    assert client.sent == []
    with pytest.raises(ConnectionError):  # the status was sent before the error
        await client.asks_for(events(failing(ConnectionError("x"), 1), statuses=statuses))
    assert client.body == "data: 0\n\nevent: failed\ndata: ConnectionError\n\n"
    with pytest.raises(ps.OptionsError, match="statuses="):
        events(failing(busy, 0), statuses={OSError: 200})


async def test_what_has_no_status_is_raised_and_a_result_is_json() -> None:
    answers, client = Answers(), Client()
    async with answers.service:
        with pytest.raises(KeyError):
            await answers.ask(client, KeyError("a mistake"), statuses={OSError: 502})
        response = await answers.ask(client, Progress(1))
        assert (response.status_code, response.body) == (200, b'{"done": 1}')
        assert response.headers["content-type"] == "application/json"
        assert (await answers.ask(client, Progress(1), encode=repr)).body == b"Progress(done=1)"
        own = Response("mine")
        assert await answers.ask(client, own) is own
    request = Request({"type": "http", "method": "GET"}, client.receive)
    with pytest.raises(TypeError, match=r"asgi.answer takes an awaitable, such as .*, got 3"):
        await asgi.answer(request, 3)  # type: ignore[arg-type]
    for statuses in ({OSError: 200}, {3: 502}, [OSError]):
        with pytest.raises(ps.OptionsError, match="statuses="):
            await asgi.answer(request, asyncio.Future(), statuses=statuses)  # type: ignore[arg-type]


def test_a_client_of_a_plain_endpoint_that_leaves_ends_its_call(effort: int) -> None:
    """Either the result or the client's end comes first; in both cases, nothing is left."""

    async def main() -> int:
        answers, client = Answers(), Client()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, testing.SeededLoop)
        async with answers.service:
            asking = asyncio.create_task(answers.ask(client, "waits"))
            for _ in range(loop.seed % 7):
                await asyncio.sleep(0)
            if loop.seed % 3 != 1:
                client.gone.set()
            if loop.seed % 3:
                answers.goes_on.set()
            response = await asking
            await testing.wait_quiescent()
            assert answers.service.statistics().admission.in_flight == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}
        return response.status_code

    assert {*testing.interleavings(main, count=60 * effort)} == {200, 499}


@virtual
async def test_a_timeout_of_the_call_is_none_of_the_client() -> None:
    answers = Answers()
    async with answers.service:
        assert (await answers.ask(Client(), "waits")).status_code == 504
        asking = asyncio.create_task(answers.ask(Client(), "waits"))
        await asyncio.sleep(1)
        asking.cancel()  # as a server that ends cancels its requests
        assert await outcomes(asking) == [asyncio.CancelledError]
        assert answers.service.statistics().admission.in_flight == 0


class Held:
    """A graph that gives a value, and then waits until it is told to continue."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.closed = False

        @ps.node
        async def held(count: int) -> AsyncIterator[str]:
            try:
                for _ in range(count):
                    yield "x"
                await self.goes_on.wait()
                yield "y"
            finally:
                self.closed = True

        self.graph = ps.graph(held)

    async def answered_to(self, client: "Client", count: int = 1) -> "asyncio.Future[str]":
        """Begin a response with so many values; return its body to come, once the response waits."""
        [answering] = await begun(client.asks_for(events(self.graph(count))))
        return answering


@pytest.fixture
def held() -> Iterator[Held]:
    """Gives a graph that waits, and sees its call ended after the test."""
    yield (held := Held())
    assert held.closed


@pytest.mark.parametrize("count", [0, 1], ids=["before the status", "between two values"])
async def test_a_client_that_goes_ends_its_call(held: Held, count: int) -> None:
    client = Client()
    answering = await held.answered_to(client, count)
    client.gone.set()
    await answering
    assert client.sent[0]["status"] == (200 if count else 499)


@pytest.mark.parametrize("make", [asgi.event_stream, asgi.ndjson])
async def test_head_has_the_status_and_ends_the_call(
    held: Held, make: Callable[[engine.Stream[Any]], Response]
) -> None:
    client = Client()
    assert await client.asks_for(make(engine.stream(held.graph(1))), "HEAD") == ""
    assert [message.get("status") for message in client.sent] == [200, None]
    assert client.sent[-1]["more_body"] is False
    with pytest.raises(LookupError):
        await client.asks_for(make(engine.stream(broken(0))), "HEAD")


async def test_a_request_that_is_cancelled_ends_its_call(held: Held) -> None:
    answering = await held.answered_to(Client())
    answering.cancel()
    assert await outcomes(answering) == [asyncio.CancelledError]


async def test_a_server_that_raises_for_a_client_that_has_gone(held: Held) -> None:
    client = Client()
    client.send = AsyncMock(side_effect=OSError("gone"))  # type: ignore[method-assign]
    assert await client.asks_for(events(held.graph(1))) == ""


@pytest.mark.parametrize("turns", range(6))
async def test_a_client_may_leave_while_the_response_ends(turns: int) -> None:
    client = Client()

    async def send(message: MutableMapping[str, Any]) -> None:
        client.sent.append(message)
        if message.get("more_body") is False:
            client.gone.set()
            for _ in range(turns):
                await asyncio.sleep(0)

    client.send = send  # type: ignore[method-assign]
    assert await client.asks_for(events(said("a"))) == "data: a\n\nevent: end\ndata: \n\n"


async def test_an_error_of_the_server_while_it_watches_the_client_is_raised(held: Held) -> None:
    client = Client()

    async def receive() -> MutableMapping[str, Any]:
        await client.gone.wait()
        raise LookupError("middleware")

    client.receive = receive  # type: ignore[method-assign]
    answering = await held.answered_to(client)
    client.gone.set()
    with pytest.raises(LookupError, match="middleware"):
        await answering


class Transport:
    """A connection whose loss only its transport knows: the server does not report it."""

    is_lost = False

    def is_closing(self) -> bool:
        return self.is_lost


@pytest.mark.parametrize("count", [0, 1], ids=["before the status", "between two values"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "in middleware"])
async def test_a_lost_connection_that_only_its_transport_knows_ends_the_call(
    held: Held, count: int, is_wrapped: bool
) -> None:
    client, transport = Client(), Transport()
    client.transport = transport  # type: ignore[attr-defined]
    if is_wrapped:
        inner = client.receive

        @functools.wraps(inner)
        async def receive() -> MutableMapping[str, Any]:
            return await inner()

        client.receive = receive  # type: ignore[method-assign]

    async def send(message: MutableMapping[str, Any]) -> None:
        assert not transport.is_lost or not message.get("body")
        client.sent.append(message)

    client.send = send  # type: ignore[method-assign]
    answering = await held.answered_to(client, count)
    transport.is_lost = True
    held.goes_on.set()
    await answering
    assert client.sent[0]["status"] == (200 if count else 499)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_error_of_a_write_is_raised_unless_the_connection_is_lost(held: Held, is_lost: bool) -> None:
    client, transport = Client(), Transport()
    client.transport = transport  # type: ignore[attr-defined]

    async def send(message: MutableMapping[str, Any]) -> None:
        transport.is_lost = is_lost
        raise RuntimeError("the handler is closed")

    client.send = send  # type: ignore[method-assign]
    assert await outcomes(client.asks_for(events(held.graph(1)))) == ["" if is_lost else RuntimeError]


@virtual
async def test_a_client_that_stalls_ends_its_call_and_one_that_is_only_slow_does_not() -> None:
    held, client = Held(), Client()
    client.takes.clear()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await client.asks_for(events(held.graph(1)))
    assert loop.time() - began == 30
    assert held.closed
    assert client.sent == []

    async def slowly(message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(29)
        client.sent.append(message)

    client.send = slowly  # type: ignore[method-assign]
    stream = engine.stream(said("a b c"))
    await client.asks_for(asgi.event_stream(stream, stall_timeout_seconds=60))
    assert client.body == "data: a\n\ndata: b\n\ndata: c\n\nevent: end\ndata: \n\n"


@virtual
async def test_a_comment_is_sent_while_there_is_nothing() -> None:
    held, client = Held(), Client()
    answering = asyncio.ensure_future(client.asks_for(events(held.graph(0))))
    await asyncio.sleep(40)
    assert client.body == ":\n\n" * 2
    assert client.sent[0]["status"] == 200
    held.goes_on.set()
    assert await answering == ":\n\n:\n\ndata: y\n\nevent: end\ndata: \n\n"


@virtual
async def test_limits_of_silence_and_of_stalls_begin_anew_with_each_item() -> None:
    @ps.graph
    @ps.node
    async def every_ten_seconds(count: int) -> AsyncIterator[str]:
        for number in range(count):
            await asyncio.sleep(10)
            yield str(number)
        await asyncio.sleep(16)

    client, loop = Client(), asyncio.get_running_loop()
    told: list[tuple[float, str]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if text := message.get("body", b"").decode():
            told.append((loop.time() - began, text))
        if text == "data: 4\n\n":
            await asyncio.Event().wait()

    client.send = send  # type: ignore[method-assign]
    began = loop.time()
    await client.asks_for(events(every_ten_seconds(3)))
    assert told == [
        *((10.0 * (number + 1), f"data: {number}\n\n") for number in range(3)),
        (45, ":\n\n"),
        (46, "event: end\ndata: \n\n"),
    ]
    told.clear()
    began = loop.time()
    await client.asks_for(events(every_ten_seconds(9)))
    assert told[-1] == (50, "data: 4\n\n")
    assert loop.time() - began == 80


@pytest.mark.parametrize("make", [FastAPI, Starlette])
async def test_both_frameworks_take_the_responses_and_the_lifespan(make: Callable[..., Any]) -> None:
    own = engine.Engine()
    service = own.deploy(told, max_in_flight=1, max_queue=0)
    app = make(lifespan=asgi.lifespan(own, service, drain_timeout_seconds=5, tuned=True))
    held: list[Any] = []

    async def stream(request: Request) -> Response:
        return asgi.ndjson(service.stream(told(1), events=Progress))

    app.router.routes.append(Route("/", stream))
    app.add_exception_handler(ps.Overloaded, lambda request, error: asgi.overloaded(error))
    states: list[engine.ServiceState] = [service.state]
    async with app.router.lifespan_context(app):
        states.append(service.state)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            assert len((await http.get("/")).text.splitlines()) == 2
            async with service.stream(told(20), events=Progress) as events:
                held.append(await anext(events))
                refused = await http.get("/")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "work" not in refused.text
    assert [*states, service.state] == ["starting", "ready", "stopped"]


@virtual
async def test_a_lifespan_ends_calls_that_take_too_long() -> None:
    held = Held()
    service = engine.deploy(held.graph)
    lifespan = asgi.lifespan(service, drain_timeout_seconds=5)
    async with lifespan(None):
        stream = service.stream(held.graph(1))
        await anext(stream)
    assert held.closed
    with pytest.raises(ps.EngineClosedError):
        await anext(stream)


async def test_a_refusal_says_when_to_come_back() -> None:
    response = asgi.overloaded(ps.Overloaded("full", 3.2))
    assert (response.status_code, response.headers["retry-after"], response.body) == (503, "4", b"Service Unavailable")
    assert asgi.overloaded(ps.Overloaded("full")).headers["retry-after"] == "1"
    assert asgi.overloaded(ps.Overloaded("too much from one tenant", key="a")).status_code == 429
    with pytest.raises(LookupError):
        asgi.overloaded(LookupError())


@pytest.mark.parametrize("option", ["heartbeat_seconds", "stall_timeout_seconds"])
async def test_options_that_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(ps.OptionsError, match=f"{option}=0"):
        asgi.event_stream(engine.stream(said("a")), **options)
    with pytest.raises(ps.OptionsError, match="drain_timeout_seconds"):
        asgi.lifespan(drain_timeout_seconds=-1)


@pytest.mark.parametrize("function", [asgi.event_stream, asgi.ndjson, asgi.lifespan])
def test_arguments_that_are_refused(function: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=f"asgi.{function.__name__} takes .*, got 3"):
        function(3)


def test_the_import_needs_neither_framework_and_a_response_says_what_it_needs() -> None:
    program = """
import sys
sys.modules["starlette"] = sys.modules["fastapi"] = None
import penstock as ps
from penstock import asgi
try:
    asgi.overloaded(ps.Overloaded("full"))
except ps.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "the responses of penstock.asgi are those of Starlette: pip install starlette, or fastapi\n"


# Over real sockets.


def arguments(name: str, loop: str) -> list[str]:
    return ["--loop", loop] if name == "uvicorn" else ["--worker-class", loop, "--workers", "0"]


@pytest.fixture(scope="module", params=SERVERS, ids="-".join)
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Starts a server for the tests below; each test leaves it idle."""
    name, loop = request.param
    # Hypercorn logs that the response of a client who stalls is not complete.
    expected = "INFO|asgi.client_stalled|without completing response"
    with server(*arguments(name, loop), application=APPLICATION, name=name, expected=expected) as (url, _):
        yield url


async def is_idle(http: httpx.AsyncClient) -> bool:
    """Whether the server holds nothing after a while, without the tasks of the server itself."""
    state = await settled(http, idle_tasks=0)
    return not any(state[name] for name in ("in_flight", "queued", "open_generators", "tasks"))


STREAMS = ("stream/values", "stream/events", "stream/thread", "stream/both", "lines/values", "lines/events")


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
async def test_a_client_who_goes_in_whatever_way_frees_its_place(address: str) -> None:
    async with client(address) as http:
        await http.post("/disable-collector")
        kept = {(path, how): await places_kept(http, f"/{path}", how) for path in STREAMS for how in WAYS_TO_LEAVE}
        assert kept == dict.fromkeys(kept, 0)
        assert await is_idle(http)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
async def test_a_client_of_a_plain_endpoint_who_goes_frees_its_place(address: str) -> None:
    async with client(address) as http:
        assert (await http.get("/answer", params={"count": 3})).json() == 3
        kept = {how: await places_kept(http, "/answer?count=-1", how, is_stream=False) for how in WAYS_TO_LEAVE}
        assert kept == dict.fromkeys(kept, 0)
        assert await is_idle(http)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
@pytest.mark.parametrize(
    "options",
    [
        ("--loop=asyncio", "--http=httptools"),
        pytest.param(("--loop=uvloop", "--http=httptools"), marks=pytest.mark.long),
        pytest.param(("--loop=asyncio", "--http=h11"), marks=pytest.mark.long),
    ],
)
async def test_a_client_who_goes_with_a_request_behind_its_stream_frees_its_place(options: tuple[str, ...]) -> None:
    with server(*options, application=APPLICATION, expected="INFO|without completing response") as (url, _):
        async with client(url) as http:
            kept = {
                (path, how): await places_kept(http, f"/{path}", how, requests=2)
                for path in ("stream/values", "lines/events")
                for how in ("close", "reset")
            }
            assert kept == dict.fromkeys(kept, 0)
            assert await is_idle(http)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
async def test_a_client_who_stalls_frees_its_place_while_it_stays(address: str) -> None:
    async with client(address) as http:
        assert await places_of_a_client_who_stalls(http, "/stream/blocks?stall_timeout_seconds=0.5") == (1, 0)
        assert await is_idle(http)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
async def test_a_slow_client_gets_everything(address: str) -> None:
    received, last = 0, b""
    async with client(address) as http, http.stream("GET", "/stream/blocks", params={"count": 200}) as response:
        async for part in response.aiter_raw(4096):
            await asyncio.sleep(0)
            received += len(part)
            last = part
    assert received > 200 * 2**16
    assert last.endswith(b"event: end\ndata: \n\n")
