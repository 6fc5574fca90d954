"""sentence-transformers: `encode`, which sorts texts by length, on PyTorch with its own number of threads."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sentence_transformers import SentenceTransformer

from examples import minilm

from .shared import Encode, Vectors

# The size with the most texts a second on two cores, among 8, 16, 32 (the default), 64 and 128.
BATCH_SIZE = 16


@asynccontextmanager
async def open_encoder() -> AsyncIterator[Encode]:
    model = SentenceTransformer(str(minilm.find_model()), device="cpu")

    async def encode(texts: Sequence[str]) -> Vectors:
        vectors: Vectors = model.encode(list(texts), batch_size=BATCH_SIZE, show_progress_bar=False)
        return vectors

    yield encode


ENCODERS = {"sentence-transformers": open_encoder}
