"""Penstock: the graph of the examples, deployed."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from examples.embedding import embed
from examples.minilm import DIMENSIONS
from penstock import engine

from .shared import IN_FLIGHT, Encode, Vectors


@asynccontextmanager
async def open_encoder() -> AsyncIterator[Encode]:
    async with engine.deploy(embed, max_in_flight=IN_FLIGHT) as service:

        async def encode(texts: Sequence[str]) -> Vectors:
            vectors = np.empty((len(texts), DIMENSIONS), np.float32)
            async with service.stream((embed(text) for text in texts), ordered=False) as stream:
                async for outcome in stream.outcomes():
                    vectors[outcome.index] = outcome.value
            return vectors

        yield encode


ENCODERS = {"Penstock": open_encoder}
