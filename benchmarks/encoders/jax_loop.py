"""A loop written by hand: texts in buckets of lengths, without an engine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax

from examples import minilm
from examples.plain_embedding import embed_plain

from .shared import Encode, Vectors


@asynccontextmanager
async def open_encoder() -> AsyncIterator[Encode]:
    folder = minilm.find_model()
    parameters: Any = jax.device_put(minilm.load_parameters(folder))
    tokenizer = minilm.load_tokenizer(folder)

    async def encode(texts: Sequence[str]) -> Vectors:
        return embed_plain(parameters, tokenizer, texts)

    yield encode


ENCODERS = {"JAX by hand": open_encoder}
