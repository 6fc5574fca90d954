"""A node that calls a model: its span has OpenTelemetry's names for model calls, and the tokens in the result."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind

import penstock as ps
from penstock import engine
from penstock.telemetry import names
from tests.kit import same
from tests.tracing import Tracing, attributes_of

CACHED = {"input_tokens": 2, "output_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 1}
USED = {names.INPUT_TOKENS: 7, names.OUTPUT_TOKENS: 3}


class Broken:
    @property
    def usage(self) -> int:
        raise RuntimeError("not now")


class BrokenMapping(dict[str, object]):
    def get(self, *_: object) -> object:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ({"usage": {"input_tokens": 7, "output_tokens": 3}}, USED),
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}, USED),
        (SimpleNamespace(usage=SimpleNamespace(prompt_tokens=7, completion_tokens=3)), USED),
        (SimpleNamespace(model="m-1", usage=SimpleNamespace(**CACHED)), {**USED, names.RESPONSE_MODEL: "m-1"}),
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}, USED),
        ({"usage": {"input_tokens": 2, "cache_read_input_tokens": None}}, {names.INPUT_TOKENS: 2}),
        ({"usage": {"prompt_tokens": 9}}, {names.INPUT_TOKENS: 9}),
        ({"usage": "much"}, {}),
        ({"usage": {"input_tokens": True}}, {}),
        (Broken(), {}),
        (BrokenMapping(usage=1), {}),
        ("text", {}),
        (None, {}),
    ],
)
async def test_usage_is_read_in_the_shapes_of_the_clients(
    result: Any, found: Mapping[str, object], tracing: Tracing
) -> None:
    @ps.node(model="gpt-5")
    async def ask(x: int) -> Any:
        return result

    await engine.run(ps.graph(ask)(1))
    told = attributes_of(tracing.one("ask"))
    read = {names.INPUT_TOKENS, names.OUTPUT_TOKENS, names.RESPONSE_MODEL}
    assert {name: value for name, value in told.items() if name in read} == found


async def test_a_model_node_keeps_its_name_and_has_the_names_of_a_model_call(tracing: Tracing) -> None:
    @ps.node(model="gpt-5")
    async def answer(question: str) -> dict[str, Any]:
        return {"text": "42", "model": "gpt-5-2026", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}

    @ps.node
    def text_of(reply: dict[str, Any]) -> str:
        return str(reply["text"])

    ask = answer >> text_of
    assert await engine.run(ask("?")) == "42"
    span = tracing.one("answer")
    found = {name: value for name, value in attributes_of(span).items() if name.startswith("gen_ai.")}
    assert found == {
        gen_ai_attributes.GEN_AI_OPERATION_NAME: "chat",
        gen_ai_attributes.GEN_AI_REQUEST_MODEL: "gpt-5",
        gen_ai_attributes.GEN_AI_RESPONSE_MODEL: "gpt-5-2026",
        gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS: 7,
        gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS: 3,
    }
    assert span.kind is SpanKind.CLIENT
    assert tracing.one("text_of").kind is SpanKind.INTERNAL


async def test_model_is_an_option_of_every_kind_of_node(tracing: Tracing) -> None:
    used = {"usage": {"input_tokens": 7, "output_tokens": 3}}

    def call(x: object) -> dict[str, Any]:
        return used

    async def call_all(xs: list[object]) -> list[dict[str, Any]]:
        return [used for _ in xs]

    class Stateful:
        async def __call__(self, x: object) -> dict[str, Any]:
            return used

    nodes: list[Any] = [
        ps.node(model="plain", name="plain")(call), ps.node(model="threaded", name="threaded", runs_on="thread")(call),
        ps.node(model="batched", name="batched", batch=ps.Batch(2))(call_all), ps.node(model="stateful")(Stateful)(),
    ]  # fmt: skip
    ask = same >> nodes[0] >> nodes[1] >> nodes[2] >> nodes[3]
    assert await engine.run(ask(1)) == used
    found = {span.name: attributes_of(span) for span in tracing.spans() if names.REQUEST_MODEL in attributes_of(span)}
    assert {name: attributes[names.REQUEST_MODEL] for name, attributes in found.items()} == {
        "plain": "plain", "threaded": "threaded", "batched": "batched", "Stateful": "stateful",
    }  # fmt: skip
    assert {attributes[names.INPUT_TOKENS] for attributes in found.values()} == {7}


@pytest.mark.parametrize("model", ["", 5, True])
def test_a_model_has_a_name(model: Any) -> None:
    with pytest.raises(ValueError, match="model="):
        ps.node(model=model)
