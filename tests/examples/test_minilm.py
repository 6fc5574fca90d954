"""The encoder against vectors of sentence-transformers 6.2.0 for the same weights."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from examples import embedding, minilm, plain_embedding
from examples.minilm import Parameters, load_parameters, load_tokenizer, tokenize
from examples.plain_embedding import embed_plain

DATA = Path(__file__).parent / "data" / "minilm"
SENTENCES: list[str] = json.loads((DATA / "sentences.json").read_text())
EXPECTED: npt.NDArray[np.float32] = np.load(DATA / "normalized.npy")

encode = jax.jit(minilm.encode)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(minilm.find_model())


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    placed: Parameters = jax.device_put(load_parameters(minilm.find_model()))
    return placed


@pytest.fixture(scope="module")
def plain(parameters: Parameters, tokenizer: Tokenizer) -> npt.NDArray[np.float32]:
    """The vectors of all sentences, by a plain loop."""
    return embed_plain(parameters, tokenizer, SENTENCES)


def cosines(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    assert vectors.shape == EXPECTED.shape
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    return np.vecdot(vectors, EXPECTED)


def test_the_plain_loop(plain: npt.NDArray[np.float32]) -> None:
    assert cosines(plain).min() >= 0.9999


def test_the_graph_packs_texts_into_rows_with_few_programs(plain: npt.NDArray[np.float32]) -> None:
    vectors = asyncio.run(embedding.embed_all(SENTENCES))
    assert cosines(vectors).min() >= 0.9999
    np.testing.assert_allclose(vectors, plain, atol=2e-6)
    assert embedding.encode.compile_statistics().programs <= 4
    assert embedding.encode.batch_statistics().calls == len(SENTENCES)


def test_one_text_without_padding_and_with(parameters: Parameters, tokenizer: Tokenizer) -> None:
    tokens = tokenize(tokenizer, SENTENCES[0])
    vector = encode(parameters, tokens, np.ones(len(tokens), np.bool_))
    assert vector.shape == (minilm.DIMENSIONS,)
    assert vector @ EXPECTED[0] >= 0.9999
    padded = np.pad(tokens, (0, 20 - len(tokens)), constant_values=7)  # tokens outside the mask do not matter
    np.testing.assert_allclose(encode(parameters, padded, np.arange(20) < len(tokens)), vector, atol=2e-6)


def test_what_is_all_padding_gives_zeros(parameters: Parameters) -> None:
    vector = encode(parameters, np.zeros(20, np.int32), np.zeros(20, np.bool_))
    np.testing.assert_array_equal(vector, np.zeros(minilm.DIMENSIONS, np.float32))


def test_parameters_are_loaded_as_numpy_arrays_of_float32() -> None:
    leaves: list[Any] = jax.tree.leaves(load_parameters(minilm.find_model()))
    assert {type(leaf) for leaf in leaves} == {np.ndarray}
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    assert sum(leaf.nbytes for leaf in leaves) < 100e6


def test_the_tokenizer_cuts_at_256_and_pads_nothing(tokenizer: Tokenizer) -> None:
    assert len(tokenize(tokenizer, "word " * 1000)) == 256
    assert tokenize(tokenizer, "").tolist() == [101, 102]


@pytest.mark.parametrize("text", [
    Path(minilm.__file__).read_text(), "word " * 300, "word\x1c " * 300, "a-b\n" * 300, "word\u2003" * 300,
    "\u200b\n" * 300 + "word " * 300, "x" * 3000, " " * 3000, "\u0301 word" * 300,
])  # fmt: skip
def test_long_texts_have_the_tokens_that_they_have_when_read_to_the_end(tokenizer: Tokenizer, text: str) -> None:
    assert tokenize(tokenizer, text).tolist() == tokenizer.encode(text).ids


def test_there_are_few_shapes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def encode_nothing(_parameters: object, padded: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]) -> object:
        shapes.append(padded.shape)
        assert mask.shape == padded.shape
        return np.repeat(mask.sum(axis=1, keepdims=True), minilm.DIMENSIONS, axis=1)

    monkeypatch.setattr(plain_embedding, "encode_batch", encode_nothing)
    # Numbers of words; a text has two tokens more, for its marks.
    words = [1, 14, 15, 900, *[20] * 40]
    nothing: Any = ()
    vectors = embed_plain(nothing, tokenizer, ["word " * number for number in words])
    assert sorted(shapes) == [(1, 256), (16, 16), (16, 32), (16, 32), (16, 32)]
    assert vectors[:, 0].tolist() == [min(number + 2, 256) for number in words]
