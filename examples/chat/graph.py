"""A language model as a graph behind OpenAI's protocol: chats become tokens, and tokens become text."""

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import penstock as ps
from penstock import serving

from .actor import Asked, Part, Writer
from .model import Parameters

Messages = list[dict[str, Any]]
Answer = AsyncIterator[str | serving.Delta]
REFUSED = ("presence_penalty", "frequency_penalty", "logit_bias", "tools", "functions", "response_format")
# What the authors of SmolLM2 recommend, for clients that do not say.
TEMPERATURE, TOP_P = 0.2, 0.9


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message.

    Raises:
        APIError: there is more in it than text.
    """
    if isinstance(content, list):
        if any(part["type"] != "text" or not isinstance(part.get("text"), str) for part in content):
            raise serving.APIError(400, "messages: this model reads parts with a text alone", "messages")
        return "".join(part["text"] for part in content)
    return content or ""


def asked_of(request: serving.Request, prompt: Sequence[int]) -> Asked:
    """Return what a request asks for.

    Raises:
        APIError: it asks for something that this model cannot honour.
    """
    for name in REFUSED:
        if request.body.get(name) and request.body[name] != {"type": "text"}:
            raise serving.APIError(400, f"{name}: this model cannot honour this", name, "unsupported_value")
    top_k = request.body.get("top_k") or 0  # not in the protocol, and yet sent by many
    if not isinstance(top_k, int) or not 0 <= top_k <= 256:
        raise serving.APIError(400, f"top_k: it is 0 to 256, and not {top_k!r}", "top_k")
    return Asked(
        prompt, max_tokens=request.max_completion_tokens or request.max_tokens,
        temperature=TEMPERATURE if request.temperature is None else request.temperature,
        top_k=top_k, top_p=TOP_P if request.top_p is None else request.top_p, likeliest=request.top_logprobs or 0,
        seed=secrets.randbits(32) if request.seed is None else request.seed % 2**32,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or (),
    )  # fmt: skip


def chat(
    writer: Writer, weights: ps.Resource[[], Parameters], tokens_of: Callable[[Messages], list[int]],
    bytes_of: Callable[[int], bytes],
) -> ps.Graph[[Messages, serving.Request], Answer]:  # fmt: skip
    """Return a graph that answers chats with a model.

    `tokens_of` writes a chat up to where the answer begins, and `bytes_of` spells a token.
    """

    @ps.node(runs_on="thread")
    def read(messages: Messages, request: serving.Request) -> Asked:
        texts = [{"role": message["role"], "content": text_of(message.get("content"))} for message in messages]
        return asked_of(request, tokens_of(texts))

    def scored(token: int, log_probability: float) -> dict[str, Any]:
        spelled = bytes_of(token)
        return {"token": spelled.decode(errors="replace"), "logprob": log_probability, "bytes": [*spelled]}

    @ps.node
    async def told(asked: Asked, request: serving.Request, parts: AsyncIterator[Part]) -> Answer:
        count, usage, scores, wants_scores = 0, None, list[dict[str, Any]](), request.body.get("logprobs")
        async for part in parts:
            count += 1
            if wants_scores:
                others = [scored(*one) for one in part.likeliest]
                scores = [scored(part.token, part.log_probability) | {"top_logprobs": others}]
            if part.finish_reason:
                usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": count}
            if usage or scores:
                yield serving.Delta(part.text, finish_reason=part.finish_reason, usage=usage, log_probabilities=scores)
            elif part.text:
                yield part.text

    @ps.graph
    async def answer(messages: Messages, request: serving.Request) -> Answer:
        return told(asked := read(messages, request), request, writer(await weights(), asked))

    return answer
