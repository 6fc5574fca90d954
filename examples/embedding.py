"""The sentence encoder as a device node: callers embed one text each, and the device computes rows of several.

Modules that worker processes import do not import this module, since it loads JAX.
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

import penstock as ps
from examples import minilm
from examples.minilm import DIMENSIONS, Array, Parameters
from penstock import devices, engine

Vector: TypeAlias = npt.NDArray[np.float32]

# Four rows of 128 tokens gave as many texts a second as more rows, and more than fewer or longer rows. The few longer
# texts share rows of 256 tokens. A text waits at most 0.02 s for others, about as long as a batch takes anyway.
PACKED = devices.PackedBatch(lengths=(128, 256), rows=4, items_per_row=32, max_wait_seconds=0.02)
# Enough texts for some batches, so that rows can be filled; callers with further texts wait.
IN_FLIGHT = 256


@ps.resource
async def parameters() -> AsyncIterator[Parameters]:
    """The weights: read once, and placed on the device once."""
    yield await asyncio.to_thread(lambda: minilm.load_parameters(minilm.find_model()))


@ps.resource
async def tokenizer() -> AsyncIterator[Tokenizer]:
    """The tokenizer, which threads can share."""
    yield await asyncio.to_thread(lambda: minilm.load_tokenizer(minilm.find_model()))


@ps.node(runs_on="thread")
def tokenize(tokenizer: Tokenizer, text: str) -> npt.NDArray[np.int32]:
    return minilm.tokenize(tokenizer, text)


@ps.device_node(batch=PACKED, concurrency=IN_FLIGHT)
def encode(
    parameters: Parameters, tokens: Array, segments: Array | None = None, positions: Array | None = None
) -> jax.Array:
    """Return the vectors of the texts in some rows, float32 [rows, texts, 384]; for one text alone, its vector."""
    if segments is None or positions is None:
        return minilm.encode(parameters, tokens, jnp.ones(len(tokens), bool))
    return minilm.encode_packed(parameters, tokens, segments, positions, PACKED.items_per_row)


@ps.graph
async def embed(text: str) -> jax.Array:
    """Return the vector of one text."""
    return encode(await parameters(), tokenize(await tokenizer(), text))


async def embed_all(texts: Sequence[str]) -> Vector:
    """Return the vectors of texts, in their order: float32 [texts, 384], each vector of length 1."""
    vectors = np.empty((len(texts), DIMENSIONS), np.float32)
    async with engine.stream((embed(text) for text in texts), max_in_flight=IN_FLIGHT) as stream:
        number = 0
        async for vector in stream:
            vectors[number] = vector
            number += 1
    return vectors
