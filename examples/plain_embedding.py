"""Embed many texts with a loop written by hand: pad, stack, run, wait, next batch.

This module does not use Penstock: the graph in `semantic_search.py` is measured against it.
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from examples.minilm import DIMENSIONS, Array, Parameters, encode

# The lengths and sizes to which texts and batches are padded: ten programs, which compile in half a second each. Few
# texts are shorter than 16 tokens, and most batches are full, or the query of one person. On two cores, batches of more
# than 16 texts gave no more texts a second, and Ctrl-C has to wait for the running batch.
LENGTHS = (16, 32, 64, 128, 256)
BATCH_SIZES = (1, 16)
MAX_BATCH = BATCH_SIZES[-1]

encode_batch: Callable[[Parameters, Array, Array], jax.Array] = jax.jit(jax.vmap(encode, in_axes=(None, 0, 0)))


def embed_plain(parameters: Parameters, tokenizer: Tokenizer, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the vectors of texts, in their order.

    Texts are batched with texts of about the same length. Lengths and sizes of batches are rounded up to a few numbers,
    so at most ten programs are compiled for any texts.

    Args:
        parameters: From `load_parameters`; they are placed on a device, which takes no time if they are on it already.
        tokenizer: From `load_tokenizer`.
        texts: Any number of texts, also none.

    Returns:
        float32 [texts, 384], each vector of length 1.
    """
    placed: Parameters = jax.device_put(parameters)  # host arrays would be copied for every batch
    tokens = [np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch(list(texts))]
    numbers_by_length: defaultdict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(tokens):
        numbers_by_length[round_up(len(each), LENGTHS)].append(number)
    vectors = np.empty((len(texts), DIMENSIONS), np.float32)
    for length, numbers in numbers_by_length.items():
        for start in range(0, len(numbers), MAX_BATCH):
            batch = numbers[start : start + MAX_BATCH]
            padded, mask = pad([tokens[number] for number in batch], length)
            vectors[batch] = np.asarray(encode_batch(placed, padded, mask))[: len(batch)]
    return vectors


def pad(tokens: Sequence[npt.NDArray[np.int32]], length: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Stack texts of at most `length` tokens, and empty texts that round the batch up.

    Returns:
        The tokens, int32 [batch, length], and a mask that is False for padding, bool [batch, length].
    """
    shape = (round_up(len(tokens), BATCH_SIZES), length)
    padded, mask = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for row, each in enumerate(tokens):
        padded[row, : len(each)] = each
        mask[row, : len(each)] = True
    return padded, mask


def round_up(size: int, sizes: Sequence[int]) -> int:
    """Return the first of some ascending sizes that is not below `size`; the last must not be below it."""
    return sizes[bisect_left(sizes, size)]
