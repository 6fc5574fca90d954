"""Spans and metrics of answers: names of OpenTelemetry for generative AI, and one tree over two services."""

from typing import Any

import httpx
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock import serving
from penstock.serving import measures
from tests.serving.openai_server import Messages, fails, length, served, thinker
from tests.serving.test_upstreams import Server
from tests.tracing import Tracing

ASKED: Messages = [{"role": "user", "content": "a secret"}]


async def test_a_chat_through_two_services_is_one_tree(tracing: Tracing) -> None:
    inner = serving.openai({"thinker": thinker})
    async with served(inner) as url:
        outer = serving.openai({"front": serving.upstream(f"{url}/v1", model="thinker")})
        async with served(outer) as front, httpx.AsyncClient(base_url=front) as http:
            for stream in (False, True):
                headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
                body = {"model": "front", "messages": ASKED, "stream": stream}
                assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    spans = {span.context.span_id: span for span in tracing.spans() if span.context is not None}
    assert {span.context.trace_id for span in spans.values() if span.context} == {int("ab" * 16, 16)}
    for root in tracing.named("chat front"):
        assert root.parent is not None
        assert root.parent.span_id == int("cd" * 8, 16)
        assert root.attributes is not None
        assert root.attributes["gen_ai.operation.name"] == "chat"
        assert root.attributes["gen_ai.usage.output_tokens"] == 7
        assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    for below in tracing.named("chat thinker"):
        names = []
        parent = below.parent
        while parent is not None and parent.span_id in spans:
            names.append(spans[parent.span_id].name)
            parent = spans[parent.span_id].parent
        assert names[-1] == "chat front"
        assert len(names) > 1  # the run of the gateway is between them
    assert len(tracing.named("chat thinker")) == 2
    assert "a secret" not in "".join(str(span.attributes) for span in spans.values())


async def test_embeddings_have_a_span_with_the_tokens_that_a_server_has_counted(tracing: Tracing) -> None:
    server = Server()
    async with served(server.app) as url:
        app = serving.openai({"up": serving.upstream(f"{url}/v1"), "length": length})
        async with served(app) as front, httpx.AsyncClient(base_url=front) as http:
            for model in ("up", "length"):
                assert (await http.post("/v1/embeddings", json={"model": model, "input": "a"})).status_code == 200
    for model, tokens in (("up", 2), ("length", None)):
        [span] = tracing.named(f"embeddings {model}")
        assert span.attributes is not None
        assert span.attributes["gen_ai.operation.name"] == "embeddings"
        assert span.attributes.get("gen_ai.usage.input_tokens") == tokens
        assert "gen_ai.response.finish_reasons" not in span.attributes


async def test_how_long_answers_take(monkeypatch: Any) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", lambda name, **_: provider.get_meter(name))
    measures._histograms.cache_clear()
    app = serving.openai({"thinker": thinker, "fails": fails, "length": length}, api_keys=["sk-1"])
    try:
        async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/metrics")).status_code == 401
            http.headers["authorization"] = "Bearer sk-1"
            assert (await http.get("/metrics")).status_code == 200
            for model, stream in (("thinker", True), ("thinker", False), ("fails", False)):
                body = {"model": model, "messages": ASKED, "stream": stream}
                await http.post("/v1/chat/completions", json=body)
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
    }
    assert found == {
        ("gen_ai.server.request.duration", "thinker", None): 2,
        ("gen_ai.server.request.duration", "fails", "KeyError"): 1,
        ("gen_ai.server.request.duration", "length", None): 1,  # the other one was refused
        ("gen_ai.server.time_to_first_token", "thinker", None): 2,
        ("gen_ai.server.time_per_output_token", "thinker", None): 2,
    }
