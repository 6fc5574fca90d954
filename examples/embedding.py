"""The sentence encoder as a device node: callers embed one text each, and the device computes batches of them.

Not imported by what worker processes import, since it loads JAX.
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
from examples.plain_embedding import BATCH_SIZES, LENGTHS, MAX_BATCH
from penstock import devices, engine

Vector: TypeAlias = npt.NDArray[np.float32]

# One that is late for a batch can wait for the next: so long a batch takes anyway.
BATCHED = devices.DeviceBatch(
    MAX_BATCH, buckets=BATCH_SIZES, max_wait_seconds=0.02, pad_axes={"tokens": 0}, length_buckets=LENGTHS
)


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


# A few batches of each length may gather; beyond that, those who bring texts wait.
@ps.device_node(batch=BATCHED, concurrency=8 * MAX_BATCH)
def encode(parameters: Parameters, tokens: Array, mask: Array | None = None) -> jax.Array:
    """Return what one text means: float32 [384], of length 1."""
    return minilm.encode(parameters, tokens, jnp.ones(len(tokens), bool) if mask is None else mask)


@ps.graph
async def embed(text: str) -> jax.Array:
    """Return what one text means."""
    return encode(await parameters(), tokenize(await tokenizer(), text))


async def embed_all(texts: Sequence[str]) -> Vector:
    """Return the vectors of texts, in their order: float32 [texts, 384], each of length 1."""
    vectors = np.empty((len(texts), DIMENSIONS), np.float32)
    async with engine.stream((embed(text) for text in texts), max_in_flight=8 * MAX_BATCH) as stream:
        number = 0
        async for vector in stream:
            vectors[number] = vector
            number += 1
    return vectors
