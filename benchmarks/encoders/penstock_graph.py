"""Penstock: the graph of the examples, deployed."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from examples.embedding import embed
from penstock import engine

from .shared import IN_FLIGHT, Encode, Vectors


@asynccontextmanager
async def open_encoder() -> AsyncIterator[Encode]:
    async with engine.deploy(embed, max_in_flight=IN_FLIGHT) as service:

        async def encode(texts: Sequence[str]) -> Vectors:
            async with service.stream(embed(text) for text in texts) as vectors:
                return np.stack([np.asarray(vector) async for vector in vectors])

        yield encode


ENCODERS = {"Penstock": open_encoder}
