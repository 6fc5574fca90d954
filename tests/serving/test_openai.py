"""Graphs behind OpenAI's protocol, called by the client of OpenAI and by hand, over real HTTP."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import structlog

import penstock as ps
from penstock import asgi, engine, serving
from tests.kit import virtual
from tests.serving import openai_server
from tests.serving.openai_server import Messages, asking, chat, client, echo, endless, served, thinker, whole

MODELS = {"echo": echo, "endless": endless, "thinker": thinker, "fails": openai_server.fails, "whole": whole}
ASKED: Messages = [{"role": "user", "content": "one two three"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


async def events_of(http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[Any]:
    """Return the data of all events, and the comments, of a stream."""
    async with http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line]
    return [json.loads(line[6:]) if line[6:7] == "{" else line for line in lines]


async def test_a_chat_is_answered_whole_and_streamed() -> None:
    async with asking(MODELS) as http, client(http.base_url) as asked:
        done = await asked.chat.completions.create(model="echo", messages=ASKED)
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("one two three ", "stop")
        assert done.usage is None  # the graph counts no tokens
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await asked.chat.completions.create(model="echo", messages=ASKED, **options)]
        response = await asked.responses.create(model="echo", input="one")
        assert (response.output_text, response.usage) == ("one ", None)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["one ", "two ", "three ", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {(chunk.id, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, "echo", "chat.completion.chunk")
    }


async def test_the_end_of_a_line_in_a_text_is_no_end_of_an_event_for_a_client_that_reads_lines() -> None:
    text = "one\u2028two\u2029three\x85four\r\n"
    async with asking(MODELS) as front, asking({"up": serving.upstream(f"{front.base_url}/v1", model="echo")}) as http:
        for url, model in ((front, "echo"), (http, "up")):
            ask: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}]}
            parts = [event["choices"][0]["delta"] for event in (await events_of(url, ask))[:-1]]
            assert "".join(part.get("content") or "" for part in parts) == f"{text} "
            events = await events_of(url, {"model": model, "input": text}, "/v1/responses")
            said = [event["text"] for event in events if isinstance(event, dict) and "text" in event]
            assert said == [f"{text} "]


async def test_what_the_client_gathers_from_a_stream_is_the_whole_answer() -> None:
    async with asking(MODELS) as http, client(http.base_url) as asked:
        request: dict[str, Any] = {"model": "thinker", "messages": ASKED, "tools": [TOOL]}
        done = await asked.chat.completions.create(**request)
        async with asked.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
            gathered = await stream.get_final_completion()
    (call,) = gathered.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments, call.id) == ("weather", '{"city":"Ulm"}', "call_1")
    assert gathered.choices[0].finish_reason == done.choices[0].finish_reason == "tool_calls"
    assert done.choices[0].message.tool_calls[0].to_dict() == {
        "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'},
    }  # fmt: skip
    assert done.choices[0].message.content is None
    assert gathered.usage.to_dict() == done.usage.to_dict()
    assert done.usage.to_dict() == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    for name in ("reasoning", "reasoning_content"):
        assert getattr(done.choices[0].message, name) == "Hm, a question."


async def test_reasoning_goes_on_under_both_names() -> None:
    seen: list[Any] = []

    @ps.node
    async def look(messages: Messages) -> str:
        seen.append(messages)
        return "seen"

    async with asking({"look": look}) as http:
        for name in ("reasoning", "reasoning_content"):
            messages = [{"role": "assistant", "content": "x", name: "because"}, *ASKED]
            await chat(http, "look", messages)
    assert [one[0]["reasoning"] for one in seen] == [one[0]["reasoning_content"] for one in seen] == ["because"] * 2


async def test_structured_output_of_a_graph_that_takes_the_request() -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    async with asking(MODELS) as http, client(http.base_url) as asked:
        done = await asked.chat.completions.parse(model="thinker", messages=ASKED, response_format=City)
    assert done.choices[0].message.parsed == City(city="Ulm")


async def test_a_result_that_is_whole_is_streamed_as_one_part_and_calls_get_an_index() -> None:
    async with asking(MODELS, events="comments") as http:
        *comments, first, last, done = await events_of(http, {"model": "whole", "messages": ASKED})
    assert (comments, done) == ([': {"step":1}', ': {"done":2}'], "data: [DONE]")
    delta = first["choices"][0]["delta"]
    assert [(one["index"], one["function"]["name"], one["type"]) for one in delta["tool_calls"]] == [
        (0, "one", "function"), (1, "two", "function"),
    ]  # fmt: skip
    assert delta["tool_calls"][0]["id"] != delta["tool_calls"][1]["id"]
    assert (delta["content"], last["choices"][0]["finish_reason"]) == ("text", "tool_calls")


async def test_completions_and_models() -> None:
    async with asking(MODELS) as http, client(http.base_url) as asked:
        done = await asked.completions.create(model="echo", prompt="one two")
        parts = [part async for part in await asked.completions.create(model="echo", prompt=["one two"], stream=True)]
        assert [one.id async for one in await asked.models.list()] == [*MODELS]
        assert (await asked.models.retrieve("echo")).id == "echo"
        with pytest.raises(pytest.importorskip("openai").NotFoundError):
            await asked.models.retrieve("other")
    assert done.choices[0].text == "".join(part.choices[0].text for part in parts) == "one two "
    assert (done.choices[0].finish_reason, parts[-1].choices[0].finish_reason) == ("stop", "stop")


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "echo"}, 400, "messages"),
    ({"model": "echo", "messages": []}, 400, "messages"),
    ({"messages": ASKED}, 400, "model"),
    ({"model": "echo", "messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400, "messages[0].content[0].type"),
    ({"model": "echo", "messages": ASKED, "temperature": 3}, 400, "temperature"),
    ({"model": "echo", "messages": ASKED, "max_tokens": 2**40}, 400, "max_tokens"),
    ({"model": "other", "messages": ASKED}, 404, "model"),
    ({"model": "echo", "messages": ASKED, "tools": [TOOL]}, 400, "tools"),
    ({"model": "echo", "messages": ASKED, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"model": "thinker", "messages": ASKED, "n": 2}, 400, "n"),
    ({"model": "echo", "messages": ASKED, "logprobs": True}, 400, "logprobs"),
    (
        {"model": "echo", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0]",
    ),
    ({"model": "fails", "messages": [{"role": "user", "content": "refused"}]}, 422, "messages"),
    ({"model": "fails", "messages": ASKED}, 500, None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_name_the_field_before_the_first_byte(stream: bool) -> None:
    async with asking(MODELS) as http:
        for body, status, param in WRONG:
            response = await http.post("/v1/chat/completions", json={**body, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (status, param), error
            assert "secret" not in response.text
        for raw in (b"{", b'{"model": NaN}', b'"\\ud800"', b"[]", b"[" * 100_000):
            response = await http.post("/v1/chat/completions", content=raw)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await http.get("/v1/chat/completions")).json()["error"]["message"] == "Method Not Allowed"
        for path in ("/v1/audio/speech", "/chat/completions"):
            told = await http.post(path, json={"model": "echo", "messages": ASKED})
            assert (told.status_code, told.json()["error"]["type"]) == (404, "not_found_error")
            assert "the base URL of clients ends with /v1" in told.json()["error"]["message"]
        assert "there is 'echo', " in (await chat(http, "other")).json()["error"]["message"]


async def test_an_error_behind_the_first_byte_is_told_and_never_looks_complete() -> None:
    body = {"model": "fails", "messages": [{"role": "user", "content": "late"}]}
    async with asking(MODELS) as http, client(http.base_url) as asked:
        first, error, end = await events_of(http, body)
        assert first["choices"][0]["finish_reason"] is None
        assert error["error"] == {
            "message": "The server had an error.", "type": "server_error", "param": None, "code": None,
        }  # fmt: skip
        assert end == "data: [DONE]"
        with pytest.raises(pytest.importorskip("openai").APIError, match="The server had an error"):
            async for _ in await asked.chat.completions.create(**body, stream=True):
                pass


async def test_keys_open_the_door_and_share_places_by_name() -> None:
    callers: list[str | None] = []

    @ps.node
    async def who(messages: Messages, request: serving.Request) -> str:
        callers.append(request.caller)
        return "you"

    keys = {"sk-1": "one", "sk-2": "two", "sk-\u00e4": "three"}
    async with asking({"who": who}, api_keys=keys, weights={"one": 2}) as http:
        for key in ("sk-1", "sk-2"):
            async with client(http.base_url, key) as asked:
                await asked.chat.completions.create(model="who", messages=ASKED)
        for key in ("sk-3", "x" * 10_000, "sk-1x"):
            headers = {"authorization": f"Bearer {key}"}
            refused = await http.post("/v1/chat/completions", json={"model": "who"}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).json() == {"who": "ready"}
        asked = {"model": "who", "messages": ASKED}
        for header, status in (
            ("bearer sk-1", 200), ("BEARER sk-1", 200), ("Bearer  sk-1", 200), ("Bearer sk-\u00e4".encode(), 200),
            ("sk-1", 401), ("Basic sk-1", 401), ("Bearersk-1", 401), ("Bearer", 401), ("Bearer sk-1 sk-1", 401),
        ):  # fmt: skip
            answer = await http.post("/v1/chat/completions", json=asked, headers={"authorization": header})
            assert answer.status_code == status, header
    assert callers == ["one", "two", "one", "one", "one", "three"]


async def test_a_full_deployment_refuses_and_says_when_to_come_back() -> None:
    async with asking(MODELS, max_in_flight=1, max_queue=0) as http:
        body = {"model": "endless", "messages": ASKED, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            chunks = stream.aiter_raw()  # keep the generator: without a reference, it would close the response
            await anext(chunks)
            for asked in (body, {**body, "stream": False}):
                refused = await http.post("/v1/chat/completions", json=asked)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["type"] == "overloaded_error"


async def test_one_key_at_its_limit_gets_429_and_the_others_are_served() -> None:
    limits = {"max_in_flight_per_key": 1, "max_queue_per_key": 0}
    async with asking(MODELS, api_keys=["sk-1", "sk-2"], **limits) as http, client(http.base_url, "sk-2") as other:
        first = {"authorization": "Bearer sk-1"}
        body = {"model": "endless", "messages": ASKED, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=first) as stream:
            chunks = stream.aiter_raw()  # keep the generator: without a reference, it would close the response
            await anext(chunks)
            refused = await http.post("/v1/chat/completions", json=body, headers=first)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
            await other.chat.completions.create(model="echo", messages=ASKED)


async def test_a_body_that_is_too_large_is_not_read() -> None:
    async with asking(MODELS, max_body_bytes=1000) as http:
        response = await http.post("/v1/chat/completions", content=b"x" * 2000)
    assert (response.status_code, response.json()["error"]["message"]) == (413, "The body has more than 1000 bytes.")


async def test_a_client_that_leaves_frees_its_place() -> None:
    async with asking(MODELS, max_in_flight=1, max_queue=8) as http, client(http.base_url) as asked:
        for body in ({"stream": True}, {"stream": False}):
            before = openai_server.opened.total
            with contextlib.suppress(httpx.ReadTimeout):
                async with http.stream(
                    "POST", "/v1/chat/completions", json={"model": "endless", "messages": ASKED, **body}, timeout=0.1
                ) as response:
                    await anext(response.aiter_raw())
            await asked.chat.completions.create(model="echo", messages=ASKED)  # waits for a free place
            assert (openai_server.opened.now, openai_server.opened.total) == (0, before + 2)


@virtual
async def test_a_client_that_stalls_is_ended_after_30_seconds() -> None:
    body = json.dumps({"model": "endless", "messages": ASKED, "stream": True}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    app, loop, never = serving.openai(MODELS), asyncio.get_running_loop(), asyncio.Event()
    sent: list[Any] = []

    async def takes_all(message: Any) -> None:
        sent.append(message)

    async def takes_two(message: Any) -> None:
        sent.append(message)
        if len(sent) > 2:
            await never.wait()

    async def sends_nothing() -> Any:
        await never.wait()

    asked = iter([{"type": "http.request", "body": body}])

    async def sends_a_body() -> Any:
        return next(asked, None) or await sends_nothing()

    async with app:
        began = loop.time()
        await app(scope, sends_nothing, takes_all)
        assert (loop.time() - began, sent[0]["status"]) == (30, 408)
        assert "not complete after 30 seconds" in json.loads(sent[1]["body"])["error"]["message"]
        sent.clear()
        began, before = loop.time(), openai_server.opened.total
        await app(scope, sends_a_body, takes_two)
        assert 30 <= loop.time() - began < 31
        opened = openai_server.opened
        assert (sent[0]["status"], opened.now, opened.total) == (200, 0, before + 1)


async def test_unknown_fields_are_logged_once_by_name() -> None:
    body = {"model": "echo", "messages": ASKED, "store": True, "never_heard_of": {"x": 1}}
    with structlog.testing.capture_logs() as logs:
        async with asking(MODELS) as http:
            for _ in range(2):
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    told = [log["fields"] for log in logs if log["event"] == "serving.unknown_fields"]
    assert len(told) <= 1
    assert "never_heard_of" in serving.Request.model_validate(body).model_extra  # type: ignore[operator]


async def test_a_client_cannot_fill_the_log_with_names() -> None:
    body = {"model": "echo", "messages": ASKED}
    tools = [{"type": f"{number} of some kind"} for number in range(5000)]
    with structlog.testing.capture_logs() as logs:
        async with asking(MODELS) as http:
            for request in range(3):
                flood = {f"{number} in {request} {'x' * 200}": 1 for number in range(5000)}
                assert (await http.post("/v1/chat/completions", json={**body, **flood})).status_code == 200
            assert (await http.post("/v1/responses", json={"model": "echo", "input": "x", "tools": tools})).is_success
    told = [log.get("fields") or log["types"] for log in logs]
    assert len(told) <= 4
    assert all(len(names) <= 20 and len(name) <= 64 for names in told for name in names)


async def test_an_application_is_mounted_into_ones_own_with_a_service_that_others_use() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    own = engine.Engine()
    service = own.deploy(echo, max_in_flight=4)
    app = serving.openai({"echo": service, "thinker": thinker})
    around: Any = asgi.lifespan(own, service, app)
    async with served(Starlette(routes=[Mount("/llm", app)], lifespan=around)) as url:
        async with client(f"{url}/llm") as asked:
            done = await asked.chat.completions.create(model="echo", messages=ASKED)
            assert done.choices[0].message.content == "one two three "
        assert (service.statistics().completed, service.graphs) == (1, (echo,))


async def test_the_document_describes_what_is_accepted() -> None:
    async with asking(MODELS) as http:
        found = (await http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= found["paths"].keys()
    assert found["components"]["schemas"]["ChatRequest"]["required"] == ["model", "messages"]


async def test_a_closed_deployment_that_a_node_calls_is_an_error_of_the_server_and_in_its_log() -> None:
    inner = engine.Engine().deploy(echo)  # which nobody enters

    @ps.node
    async def calls(messages: Messages) -> AsyncIterator[str]:
        if messages[-1]["content"] == "late":
            yield "some"
        yield str(await inner.run(echo(messages)))

    @ps.node
    async def calls_whole(messages: Messages) -> str:
        return str(await inner.run(echo(messages)))

    with structlog.testing.capture_logs() as logs:
        async with asking({"calls": calls, "whole": calls_whole}) as http:
            for model, stream in itertools.product(("calls", "whole"), (False, True)):
                answer = await chat(http, model, stream=stream)
                assert (answer.status_code, answer.json()["error"]["message"]) == (500, "The server had an error.")
            late = (await chat(http, "calls", "late", stream=True)).text
    assert "going down" not in late
    told = [log["error"] for log in logs if log["event"] in ("serving.failed", "asgi.failed")]
    assert len(told) == 5
    assert all("enter it first" in str(error) for error in told)


async def test_a_model_that_takes_no_calls_says_so() -> None:
    own = engine.Engine()
    async with own, own.deploy(echo) as service, asking({"echo": service}) as http:
        await service.drain()
        for stream in (False, True):
            answer = await chat(http, "echo", stream=stream)
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "The server takes no calls now.")
            assert answer.headers["retry-after"] == "1"


@ps.node
async def added(first: int, second: int) -> int:
    return first + second


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: serving.openai({}), "there is no model"),
        (lambda: serving.openai({"x": 3}), "serving.openai"),
        (lambda: serving.openai({"echo": echo}, events="all"), "'comments' or 'drop'"),  # type: ignore[arg-type]
        (lambda: serving.openai({"echo": echo}, api_keys=[]), "a collection of keys"),
        (lambda: serving.openai({"echo": echo}, api_keys="sk-1"), "a collection of keys"),
        (lambda: serving.openai({"sum": added}), "it has to take messages"),
        (lambda: serving.openai({"echo": echo}, weights={"one": 1}), "needs key="),
        (lambda: serving.openai({"": echo}), "a name of 1 to 256 characters"),
        (lambda: serving.openai({"echo": echo}, max_body_bytes=0), "max_body_bytes=0"),
        (lambda: serving.openai({"echo": engine.Engine().deploy(echo)}, max_queue=5), "give it to engine.deploy"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ps.OptionsError, match=told):
        make()


async def test_an_answer_without_parts_is_complete() -> None:
    @ps.node
    async def nothing(messages: Messages) -> AsyncIterator[str]:
        for _ in ():
            yield ""

    async with asking({"nothing": nothing}) as http:
        last, done = await events_of(http, {"model": "nothing", "messages": ASKED})
    assert (last["choices"][0]["finish_reason"], done) == ("stop", "data: [DONE]")
