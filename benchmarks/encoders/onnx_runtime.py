"""ONNX Runtime: a session with default options; once in the same buckets, once with batches as short as possible.

ONNX Runtime compiles nothing for a shape. So texts can be sorted by length, and padded to the longest text of a batch.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import onnxruntime

from examples import minilm
from examples.plain_embedding import LENGTHS, MAX_BATCH, pad, round_up

from .onnx_graph import build
from .shared import Encode, Vectors

Tokens = Sequence[npt.NDArray[np.int32]]
Batches = Callable[[Tokens], Iterator[tuple[list[int], int]]]


def bucketed(tokens: Tokens) -> Iterator[tuple[list[int], int]]:
    """Yield for each batch the numbers of its texts, and the length to which they are padded."""
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(tokens):
        by_length[round_up(len(each), LENGTHS)].append(number)
    for length, numbers in by_length.items():
        for start in range(0, len(numbers), MAX_BATCH):
            yield numbers[start : start + MAX_BATCH], length


def sorted_by_length(tokens: Tokens) -> Iterator[tuple[list[int], int]]:
    """Yield batches of texts sorted by length, as `bucketed` does, without buckets."""
    numbers = sorted(range(len(tokens)), key=lambda number: len(tokens[number]))
    for start in range(0, len(numbers), MAX_BATCH):
        batch = numbers[start : start + MAX_BATCH]
        yield batch, len(tokens[batch[-1]])


@asynccontextmanager
async def open_encoder(batches: Batches) -> AsyncIterator[Encode]:
    folder = minilm.find_model()
    tokenizer = minilm.load_tokenizer(folder)
    session = onnxruntime.InferenceSession(build(minilm.load_parameters(folder)).SerializeToString())

    async def encode(texts: Sequence[str]) -> Vectors:
        tokens = [np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch(list(texts))]
        vectors = np.empty((len(texts), minilm.DIMENSIONS), np.float32)
        for batch, length in batches(tokens):
            padded, mask = pad([tokens[number] for number in batch], length)
            (found,) = session.run(None, {"tokens": padded, "mask": mask.astype(np.int32)})
            vectors[batch] = found[: len(batch)]
        return vectors

    yield encode


ENCODERS = {
    "ONNX Runtime, the same buckets": partial(open_encoder, bucketed),
    "ONNX Runtime, sorted by length": partial(open_encoder, sorted_by_length),
}
