"""Responses and embeddings with the client of OpenAI: a streamed response, gathered, equals the whole response."""

import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import serving
from tests.serving.model_server import ModelServer
from tests.serving.openai_server import Messages, asking, chat, client, fails, length, thinker

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}


@ps.node
async def mixed(messages: Messages) -> AsyncIterator[serving.Delta]:
    """Give text, interleaved parts of two tool calls, thoughts, and text again, cut off."""
    yield serving.Delta("a")
    yield serving.Delta(
        tool_calls=[{"index": number, "id": f"c{number}", "function": {"name": f"f{number}"}} for number in (0, 1)]
    )
    for part in ('{"x":', "1}"):
        yield serving.Delta(tool_calls=[{"index": number, "function": {"arguments": part}} for number in (1, 0)])
    yield serving.Delta(reasoning="hm")
    yield serving.Delta("b", reasoning="!", finish_reason="length")


def plain(response: Any) -> Any:
    """Return a response as JSON, without ids and times, which differ between responses."""
    found = json.loads(response.to_json())
    for item in found["output"]:
        item.pop("id")
        for part in item.get("content") or ():
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    return {**found, "id": "", "created_at": 0}


# The node `mixed` does not take the request, so it takes no tools.
@pytest.mark.parametrize(("model", "has_tools"), [("thinker", False), ("thinker", True), ("mixed", False)])
async def test_what_the_client_gathers_from_events_is_the_whole_response(model: str, has_tools: bool) -> None:
    asked: dict[str, Any] = {"model": model, "input": "hi", "instructions": "Be brief.", "metadata": {"a": "b"}}
    if has_tools:
        asked["tools"] = [TOOL]
    events: list[Any] = []
    async with asking({"thinker": thinker, "mixed": mixed}) as http, client(http.base_url) as ask:
        whole = await ask.responses.create(**asked)
        async with ask.responses.stream(**asked) as stream:
            events += [event async for event in stream]
            gathered = events[-1].response  # the client has no method for an incomplete response
            if model == "thinker":
                gathered = await stream.get_final_response()
    assert plain(gathered) == plain(whole)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == ("response.incomplete" if model == "mixed" else "response.completed")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)
    assert (whole.store, whole.status) == (False, "incomplete" if model == "mixed" else "completed")
    types = [item.type for item in whole.output]
    if model == "mixed":
        assert types == ["message", "function_call", "function_call", "reasoning", "message"]
        assert [item.arguments for item in whole.output[1:3]] == ['{"x":1}'] * 2
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.output_text == "ab"
    elif has_tools:
        assert types == ["reasoning", "function_call"]
        assert (whole.output[1].name, whole.output[1].arguments) == ("weather", '{"city":"Ulm"}')
        assert "response.function_call_arguments.delta" in kinds
    else:
        assert types == ["reasoning", "message"]
        assert whole.output[0].content[0].text == "Hm, a question."
        assert (whole.output_text, whole.usage.input_tokens, whole.usage.output_tokens) == ("It is hi.", 5, 7)
        assert {"response.reasoning_text.delta", "response.content_part.done", "response.output_text.done"} <= {*kinds}


async def test_a_structured_output() -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    async with asking({"thinker": thinker}) as http, client(http.base_url) as ask:
        found = await ask.responses.parse(model="thinker", input="hi", text_format=City)
    assert found.output_parsed == City(city="Ulm")


async def test_the_input_becomes_the_messages_of_a_chat() -> None:
    seen: list[tuple[Messages, dict[str, Any]]] = []

    @ps.node
    async def look(messages: Messages, request: serving.Request) -> str:
        seen.append((messages, request.body))
        return "ok"

    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u"}]},
    ]
    body = {
        "model": "look", "input": given, "instructions": "Go.", "max_output_tokens": 9, "temperature": 0.5,
        "tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "weather"}, "store": True,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "reasoning": {"effort": "low"},
        "service_tier": "auto", "prompt_cache_key": "k",
    }  # fmt: skip
    with structlog.testing.capture_logs() as logs:
        async with asking({"look": look}) as http:
            response = (await http.post("/v1/responses", json=body)).json()
    assert response["status"] == "completed", response
    ((messages, chat),) = seen
    assert messages == [
        {"role": "system", "content": "Go."},
        {"role": "system", "content": "ab"},
        {
            "role": "assistant", "content": "said", "reasoning": "why", "reasoning_content": "why",
            "tool_calls": [{"id": number, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                           for number in ("c1", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}]},
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather"]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    assert (chat["max_tokens"], chat["reasoning_effort"], chat["temperature"]) == (9, "low", 0.5)
    assert [log["types"] for log in logs if log["event"] == "serving.tools_left_out"] == [["web_search"]]
    assert response["store"] is False


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"tools": [TOOL]}, "tools"),
        ({"input": [{"content": 5}]}, "input[0].content"),
        ({"input": [{"content": [5]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call_output", "output": 7}]}, "input[0].output"),
        ({"text": {"format": "json"}}, "text.format"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(field: dict[str, Any], param: str) -> None:
    async with asking({"mixed": mixed}) as http:
        response = await http.post("/v1/responses", json={"model": "mixed", "input": "hi", **field})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_failure_behind_the_first_event_is_an_event() -> None:
    async with asking({"fails": fails}) as http, client(http.base_url) as ask:
        events = [event async for event in await ask.responses.create(model="fails", input="late", stream=True)]
        with pytest.raises(pytest.importorskip("openai").InternalServerError):
            await ask.responses.create(model="fails", input="early", stream=True)
    assert [event.type for event in events][-2:] == ["response.output_text.delta", "response.failed"]
    assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "The server had an error.")


async def test_a_server_of_chats_answers_responses() -> None:
    server = ModelServer()
    async with (
        server.listening() as url,
        asking({"small": serving.upstream(url)}) as http,
        client(http.base_url) as ask,
    ):
        whole = await ask.responses.create(model="small", input="hi")
        async with ask.responses.stream(model="small", input="hi") as stream:
            gathered = await stream.get_final_response()
    assert whole.output_text == gathered.output_text == "one two three"
    assert whole.usage.total_tokens == gathered.usage.total_tokens == 5
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]


async def test_fields_that_a_chat_has_as_well_reach_the_server() -> None:
    server = ModelServer()
    fields = {
        "seed": 5, "stop": ["lies"], "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"28": 5.0},
        "temperature": 0.5, "top_p": 0.5, "top_k": 3,
    }  # fmt: skip
    async with (
        server.listening() as url,
        asking({"small": serving.upstream(url)}) as http,
        client(http.base_url) as ask,
    ):
        await ask.responses.create(model="small", input="hi", extra_body=fields)
        await ask.responses.create(model="small", input="hi", top_logprobs=2)
        await ask.responses.create(model="small", input="hi", include=["message.output_text.logprobs"])
    plain, scored, included = server.bodies
    assert {name: plain.get(name) for name in fields} == fields
    assert "logprobs" not in plain
    assert (scored["logprobs"], scored["top_logprobs"], included["logprobs"]) == (True, 2, True)
    assert "include" not in included


async def test_log_probabilities_come_with_their_text() -> None:
    scores = [{"token": word, "logprob": -0.5, "bytes": [*word.encode()], "top_logprobs": []} for word in ("a", "b")]

    @ps.node
    async def scored(messages: Messages, request: serving.Request) -> AsyncIterator[serving.Delta]:
        assert request.body["logprobs"]
        yield serving.Delta(reasoning="hm")
        for score in scores:
            yield serving.Delta(str(score["token"]), log_probabilities=[score])

    asked: dict[str, Any] = {"model": "scored", "input": "hi", "top_logprobs": 0}
    async with asking({"scored": scored}) as http, client(http.base_url) as ask:
        whole = await ask.responses.create(**asked)
        events = [event async for event in await ask.responses.create(**asked, stream=True)]
    told = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [[score.token for score in each] for each in told] == [["a"], ["b"]]
    for response in (whole, events[-1].response):
        assert [score.to_dict() for score in response.output[-1].content[0].logprobs] == scores


async def test_embeddings_in_both_forms_and_of_a_server() -> None:
    async with asking({"length": length, "thinker": thinker}) as http, client(http.base_url) as ask:
        # By default, the client asks for base64.
        found = await ask.embeddings.create(model="length", input=["a", "bcd"])
        assert [one.embedding for one in found.data] == [[1.0, 0.5], [3.0, 0.5]]
        raw = (await http.post("/v1/embeddings", json={"model": "length", "input": "ab"})).json()
        assert raw["data"][0]["embedding"] == [2.0, 0.5]
        coded = {"model": "length", "input": "ab", "encoding_format": "base64"}
        text = (await http.post("/v1/embeddings", json=coded)).json()["data"][0]["embedding"]
        assert struct.unpack("<2f", base64.b64decode(text)) == (2.0, 0.5)
        for body, param in (
            ({"model": "length", "input": [1, 2]}, "input"),
            ({"model": "length", "input": "a", "dimensions": 3}, "dimensions"),
            ({"model": "thinker", "input": "a"}, "model"),
        ):
            assert (await http.post("/v1/embeddings", json=body)).json()["error"]["param"] == param
        assert (await chat(http, "length")).json()["error"]["param"] == "model"
    server = ModelServer()
    async with server.listening() as url, asking({"up": serving.upstream(url, model="inside")}) as http:
        answer = await http.post("/v1/embeddings", json={"model": "up", "input": [1, 2], "dimensions": 7})
    assert answer.json()["model"] == "up"
    assert server.bodies == [{"model": "inside", "input": [1, 2], "dimensions": 7}]
