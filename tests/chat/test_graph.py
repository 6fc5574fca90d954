"""The chat example behind OpenAI's protocol, with a tiny model: over HTTP, and with tools."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import penstock as ps
from examples.chat.actor import Asked, Writer
from examples.chat.graph import Messages, chat
from penstock import engine, serving
from tests.chat.recurrent import END, Recurrent, bytes_of, tokens_of, weights
from tests.chat.test_actor import alone
from tests.devices.kit import resource_of
from tests.serving.openai_server import served

CLIENTS = 60


def tiny() -> ps.Graph[[Messages, serving.Request], AsyncIterator[str | serving.Delta]]:
    writer = Writer(Recurrent(), bytes_of, [END], weights(), rows=(8,), sizes=(16,), device="cpu")
    return chat(writer, resource_of(weights), tokens_of, bytes_of)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with served(serving.openai({"tiny": tiny()})) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


def body(text: str | list[dict[str, str]], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 1, "top_p": 1, "seed": 3, "max_tokens": 20, **more}


def expected(text: str, **more: Any) -> str:
    prompt = tokens_of([{"content": text}])
    tokens = alone(weights(), Asked(prompt, temperature=1, seed=3, max_tokens=20, **more))
    return "".join(chr(97 + token) for token in tokens if token != END)


def said(answer: str) -> str:
    chunks = [json.loads(line[6:]) for line in answer.split("\n") if line[6:7] == "{"]
    return "".join(one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"])


async def test_many_clients_of_whom_a_third_leave_have_one_outcome_each_and_leave_no_slot() -> None:
    chance = random.Random(1)
    texts = ["".join(chance.choices("abcdefgh", k=chance.randint(1, 40))) for _ in range(CLIENTS)]
    service = engine.deploy(tiny(), max_in_flight=CLIENTS)
    # A client asks anew where its connection is closed while the server is busy; none here may have to.
    limits = httpx.Limits(max_connections=CLIENTS)
    async with service, served(serving.openai({"tiny": service})) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:

            async def client(number: int) -> str | None:
                asked = body(texts[number], stream=True)
                async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
                    assert answer.status_code == 200
                    if number % 3:
                        return said((await answer.aread()).decode())
                    async for _ in answer.aiter_raw(1):  # the first byte, and then the client leaves
                        return None
                return None

            answers = await asyncio.gather(*(client(number) for number in range(CLIENTS)))
            async with asyncio.timeout(30):
                while (now := service.statistics()).completed + now.cancelled < CLIENTS:
                    await asyncio.sleep(0)
        figures = {figure.name: figure.value for actor in service.statistics().actors for figure in actor.figures}
    assert (now.failed, now.expired) == (0, 0)
    assert answers == [expected(text) if number % 3 else None for number, text in enumerate(texts)]
    assert (figures["slots"], figures["queue"]) == (0, 0)


async def test_an_answer_whole_says_why_it_ends_and_how_many_tokens_there_were(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/chat/completions", json=body("abc"))).json()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]
    in_parts = (await http.post("/v1/chat/completions", json=body(parts))).json()
    legacy = (await http.post("/v1/completions", json={**body("abc"), "prompt": "abc"})).json()
    asked = {"model": "tiny", "input": "abc", "temperature": 0, "max_output_tokens": 5}
    response = (await http.post("/v1/responses", json=asked)).json()
    assert answer["choices"][0]["message"]["content"] == legacy["choices"][0]["text"] == expected("abc")
    assert in_parts["choices"] == answer["choices"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert response["usage"]["output_tokens"] <= 5


async def test_a_client_that_asks_for_log_probabilities_gets_those_of_each_token(http: httpx.AsyncClient) -> None:
    asked = body("abc", temperature=0, logprobs=True, top_logprobs=2)
    whole = (await http.post("/v1/chat/completions", json=asked)).json()
    answer = (await http.post("/v1/chat/completions", json={**asked, "stream": True})).text
    without = (await http.post("/v1/chat/completions", json=body("abc"))).json()
    scores = whole["choices"][0]["logprobs"]["content"]
    assert len(scores) == whole["usage"]["completion_tokens"]
    text = "".join(score["token"] for score in scores if score["token"] != chr(97 + END))
    assert text == whole["choices"][0]["message"]["content"]
    for score in scores:
        assert score["bytes"] == [*score["token"].encode()]
        best, second = score["top_logprobs"]  # the likeliest token is the one that is chosen
        assert (best["token"], best["logprob"]) == (score["token"], score["logprob"])
        assert second["logprob"] <= best["logprob"] <= 0
    choices = [json.loads(line[6:])["choices"][0] for line in answer.split("\n") if line[6:7] == "{"]
    assert [one for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]] == scores
    assert without["choices"][0]["logprobs"] is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"logit_bias": {"1": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_k": 1000}, "top_k"),
    ({"messages": [{"role": "user", "content": "a" * 200}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "messages"),
]


async def test_what_the_model_cannot_honour_is_refused_by_name_and_keeps_no_slot(http: httpx.AsyncClient) -> None:
    for more, param in REFUSED:
        answer = await http.post("/v1/chat/completions", json=body("abc", **more))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    asked = {**body("abc"), "prompt": "abc"}
    for name in ("max_completion_tokens", "top_logprobs", "top_k") * 3:
        answer = await http.post("/v1/completions", json={**asked, name: "many"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    legacy = (await http.post("/v1/completions", json=asked)).json()
    assert legacy["choices"][0]["text"] == expected("abc")
