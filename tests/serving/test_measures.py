"""Spans and metrics of answers: OpenTelemetry's names for generative AI, and one trace over two services."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import SpanKind

import penstock as ps
from penstock import serving
from penstock.serving import measures
from tests.kit import Gate, begun
from tests.serving.model_server import ModelServer
from tests.serving.openai_server import Messages, asking, chat, fails, length, served, thinker
from tests.tracing import Tracing, attributes_of

ASKED: Messages = [{"role": "user", "content": "a secret"}]


async def test_a_chat_through_two_services_is_one_tree(tracing: Tracing) -> None:
    async with (
        served(serving.openai({"thinker": thinker})) as url,
        asking({"front": serving.upstream(f"{url}/v1", model="thinker")}) as http,
    ):
        for stream in (False, True):
            headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
            body = {"model": "front", "messages": ASKED, "stream": stream}
            assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    spans: dict[int, Any] = {span.context.span_id: span for span in tracing.spans() if span.context is not None}
    assert {span.context.trace_id for span in spans.values()} == {int("ab" * 16, 16)}
    roots: list[Any] = tracing.named("chat front")
    assert [root.parent.span_id for root in roots] == [int("cd" * 8, 16)] * 2
    for root in roots:
        assert told(root, "operation.name", "usage.output_tokens", "response.finish_reasons") == ["chat", 7, ("stop",)]
    for below in tracing.named("chat thinker"):
        names = []
        parent = below.parent
        while parent is not None and parent.span_id in spans:
            names.append(spans[parent.span_id].name)
            parent = spans[parent.span_id].parent
        assert names[-1] == "chat front"
        assert len(names) > 1  # the run of the gateway is between the two spans
    by_kind = {kind: [span for span in tracing.named("chat thinker") if span.kind is kind] for kind in SpanKind}
    assert len(by_kind[SpanKind.SERVER]) == len(by_kind[SpanKind.CLIENT]) == 2
    for asked in by_kind[SpanKind.CLIENT]:
        said = attributes_of(asked)
        assert url == f"http://{said['server.address']}:{said['server.port']}"
        assert (said["http.response.status_code"], said["gen_ai.usage.output_tokens"]) == (200, 7)
        assert said["gen_ai.response.id"]
    assert {span.parent.span_id for span in by_kind[SpanKind.SERVER] if span.parent} == {
        span.context.span_id for span in by_kind[SpanKind.CLIENT] if span.context
    }
    # By default, spans have no message content.
    assert "a secret" not in "".join(str(span.attributes) for span in spans.values())


async def test_a_failover_names_both_servers_and_the_cause(tracing: Tracing) -> None:
    server = ModelServer()
    async with server.listening() as url:
        down = serving.upstream("http://127.0.0.1:9", model="m").chat.with_policy(failover=serving.upstream(url).chat)
        async with asking({"m": down}) as http:
            assert (await http.post("/v1/chat/completions", json={"model": "m", "messages": ASKED})).status_code == 200
    failed, answered = [span for span in tracing.named("chat m") if span.kind is SpanKind.CLIENT]
    assert (attributes_of(failed)["server.port"], failed.status.status_code.name) == (9, "ERROR")
    assert attributes_of(failed)["error.type"] == "ConnectError"
    assert str(attributes_of(answered)["server.port"]) in url
    [chat] = [span for span in tracing.named("chat m") if span.kind is SpanKind.SERVER]
    assert attributes_of(chat)["gen_ai.response.time_to_first_chunk"] > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_has_left_is_no_stop(tracing: Tracing, stream: bool) -> None:
    gate = Gate()

    @ps.node
    async def talk(messages: Messages) -> AsyncIterator[str]:
        yield "a word"
        await gate.wait(0)
        yield "another"

    async with asking({"talk": ps.graph(talk)}) as http:
        body = {"model": "talk", "messages": ASKED, "stream": stream}
        [client] = await begun(http.post("/v1/chat/completions", json=body))
        await gate.has()
        client.cancel()
        await asyncio.wait([client])
        while not tracing.exporter.get_finished_spans() or tracing.recorder.open:
            await asyncio.sleep(0)
    found = attributes_of(tracing.one("chat talk"))
    assert found["penstock.outcome"] == "cancelled"
    assert "gen_ai.response.finish_reasons" not in found


async def test_embeddings_have_a_span_with_the_tokens_that_a_server_has_counted(tracing: Tracing) -> None:
    server = ModelServer()
    async with server.listening() as url, asking({"up": serving.upstream(url), "length": length}) as http:
        for model in ("up", "length"):
            assert (await http.post("/v1/embeddings", json={"model": model, "input": "a"})).status_code == 200
    for model, tokens in (("up", 2), ("length", None)):
        [span] = tracing.named(f"embeddings {model}")
        found = told(span, "operation.name", "usage.input_tokens", "response.finish_reasons")
        assert found == ["embeddings", tokens, None]


async def test_content_is_in_spans_if_it_is_asked_for(tracing: Tracing) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bonn"}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    talk: Messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "wet"},
        {"role": "user", "content": [{"type": "text", "text": "Ulm?"}, image]},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    async with asking({"thinker": thinker, "fails": fails, "length": length}, trace_content=True) as http:
        sent = ""
        for stream in (False, True):
            sent = (await chat(http, "thinker", talk, tools=tools, stream=stream)).text
            short = {"model": "thinker", "instructions": "Go.", "input": "Ulm", "stream": stream}
            assert (await http.post("/v1/responses", json=short)).status_code == 200
            await chat(http, "fails", "late", stream=stream)
        await http.post("/v1/completions", json={"model": "thinker", "prompt": "Bonn"})
        await http.post("/v1/embeddings", json={"model": "length", "input": "a secret"})
    assert '"id":"call_1"' in sent
    whole, response, streamed, streamed_response = map(content_of, tracing.named("chat thinker"))
    assert whole == streamed
    thought = {"type": "reasoning", "content": "Hm, a question."}
    assert whole == (
        [
            {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
            {"role": "assistant", "parts": [
                {"type": "reasoning", "content": "Hm."},
                {"type": "tool_call", "id": "call_0", "name": "weather", "arguments": {"city": "Bonn"}},
            ]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_0", "response": "wet"}]},
            {"role": "user", "parts": [{"type": "text", "content": "Ulm?"}, {"type": "image_url"}]},
        ],
        [{
            "role": "assistant",
            "parts": [thought, {"type": "tool_call", "id": "call_1", "name": "weather", "arguments": {"city": "Ulm"}}],
            "finish_reason": "tool_calls",
        }],
    )  # fmt: skip
    said = {"role": "assistant", "parts": [thought, {"type": "text", "content": "It is Ulm."}], "finish_reason": "stop"}
    texts = [("system", "Go."), ("user", "Ulm")]
    asked = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in texts]
    assert response == streamed_response == (asked, [said])
    for span in tracing.named("chat fails"):
        [failed] = content_of(span)[1]
        assert failed == {"role": "assistant", "parts": [{"type": "text", "content": "Some"}], "finish_reason": "error"}
    [completion] = tracing.named("text_completion thinker")
    assert content_of(completion)[0] == [{"role": "user", "parts": [{"type": "text", "content": "Bonn"}]}]
    assert "a secret" not in "".join(str(span.attributes) for span in tracing.spans())


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_goes_on_in_bytes_is_the_same_whether_content_is_traced_or_not(
    tracing: Tracing, stream: bool
) -> None:
    answers: list[str] = []
    async with ModelServer("long").listening() as url:
        for trace_content in (False, True):
            async with asking({"up": serving.upstream(url)}, trace_content=trace_content) as http:
                answers.append((await chat(http, "up", ASKED, stream=stream)).text)
    assert answers[0] == answers[1]
    spans: list[Any] = [span for span in tracing.named("chat up") if span.kind is SpanKind.SERVER]
    assert [told(span, "response.finish_reasons") for span in spans] == [[("length",)]] * 2
    assert "a secret" not in str(spans[0].attributes)
    asked = [{"role": "user", "parts": [{"type": "text", "content": "a secret"}]}]
    part = {"type": "text", "content": "one two three"}
    assert content_of(spans[1]) == (asked, [{"role": "assistant", "parts": [part], "finish_reason": "length"}])


ERRORS: dict[str, Exception] = {
    "late": TimeoutError("x" * 1_000_000), "full": ps.Overloaded("there is no room"), "broken": KeyError("a secret"),
    "upstream": serving.UpstreamError(502, "down"), "wrong": serving.APIError(400, "no"),
    "limited": ps.Overloaded("one at a time", key="a"), "good": AssertionError(),
}  # fmt: skip


@ps.node
async def refuses(messages: Messages) -> AsyncIterator[str]:
    content = messages[-1]["content"]
    if content != "good":
        raise ERRORS[content]
    yield "a word"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_span_of_a_server_has_the_names_of_http_and_is_red_if_the_server_has_failed(
    tracing: Tracing, stream: bool
) -> None:
    sent: dict[str, int] = {}
    async with asking({"refuses": ps.graph(refuses)}) as http:
        for content in ERRORS:
            body = {"model": "refuses", "messages": [{"role": "user", "content": content}], "stream": stream}
            sent[content] = (await http.post("/v1/chat/completions", json=body)).status_code
    statuses = {"late": 504, "full": 503, "broken": 500, "upstream": 502, "wrong": 400, "limited": 429, "good": 200}
    assert sent == statuses
    spans: list[Any] = [span for span in tracing.named("chat refuses") if span.kind is SpanKind.SERVER]
    for span, (content, error) in zip(spans, ERRORS.items(), strict=True):
        told_http = [span.attributes[f"http.{name}"] for name in ("request.method", "route", "response.status_code")]
        assert [*told_http, span.attributes["url.path"]] == [
            "POST", "/v1/chat/completions", statuses[content], "/v1/chat/completions"
        ]  # fmt: skip
        is_red = content in ("late", "full", "broken", "upstream")
        assert span.status.status_code is (trace.StatusCode.ERROR if is_red else trace.StatusCode.UNSET)
        assert [event.name for event in span.events] == ["exception"] * is_red
        assert len(span.to_json()) < 50_000
        if content != "good":
            assert span.attributes["error.type"] == type(error).__qualname__
            assert told(span, "response.finish_reasons") == [("error",)]


async def test_arguments_that_are_no_json_stay_text_in_spans(tracing: Tracing) -> None:
    given = ['{"x": NaN}', "[1e999]", "{half"]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": one}} for one in given]
    async with asking({"thinker": thinker}, trace_content=True) as http:
        talk = [{"role": "assistant", "content": None, "tool_calls": calls}, *ASKED]
        await chat(http, "thinker", talk)
    [span] = tracing.named("chat thinker")
    assert [part["arguments"] for part in content_of(span)[0][0]["parts"]] == given


def told(span: Any, *names: str) -> list[Any]:
    """Return attributes of a span by their names behind `gen_ai.`; None for an attribute that it does not have."""
    return [span.attributes.get(f"gen_ai.{name}") for name in names]


def content_of(span: Any) -> tuple[Any, Any]:
    """Return the messages of request and answer in a span."""
    asked, said = (span.attributes[f"gen_ai.{side}.messages"] for side in ("input", "output"))
    return json.loads(asked), json.loads(said)


async def test_how_long_answers_take(monkeypatch: Any) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", lambda name, *_, **__: provider.get_meter(name))
    measures._histograms.cache_clear()
    try:
        async with asking({"thinker": thinker, "fails": fails, "length": length}, api_keys=["sk-1"]) as http:
            assert (await http.get("/metrics")).status_code == 401
            http.headers["authorization"] = "Bearer sk-1"
            assert (await http.get("/metrics")).status_code == 200
            for model, stream in (("thinker", True), ("thinker", False), ("fails", False)):
                await chat(http, model, stream=stream)
            for texts in (["a", "b"], [1]):
                await http.post("/v1/embeddings", json={"model": "length", "input": texts})
        data: Any = reader.get_metrics_data()
    finally:
        measures._histograms.cache_clear()
        provider.shutdown()
    found = {
        (metric.name, point.attributes["gen_ai.request.model"], point.attributes.get("error.type")): point.count
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
        if metric.name.startswith("gen_ai.")
    }
    assert found == {
        ("gen_ai.server.request.duration", "thinker", None): 2,
        ("gen_ai.server.request.duration", "fails", "KeyError"): 1,
        ("gen_ai.server.request.duration", "length", None): 1,  # the other call was refused
        ("gen_ai.server.time_to_first_token", "thinker", None): 2,
        ("gen_ai.server.time_per_output_token", "thinker", None): 2,
    }
