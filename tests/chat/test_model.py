"""The model of the chat: files, tokens, scores and samples, against llama.cpp and against slow programs."""

import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from examples.chat import gguf
from examples.chat.model import BLOCK, NAMES, Config, Llama, Parameters, Sampling, from_gguf, sample, transposed
from examples.language_model import predict
from penstock import data

CONFIG = Config(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2 * BLOCK,
)  # fmt: skip
RANDOM = np.random.default_rng(0)
PARAMETERS: Parameters = {name: RANDOM.normal(0, 0.2, shape).astype(np.float32) for name, shape in CONFIG.shapes()}
MODEL = Llama(CONFIG, 2 * BLOCK)
TOKENS = RANDOM.integers(0, 300, (2, BLOCK + 40)).astype(np.int32)
Numbers = npt.NDArray[Any]


def sampling(*rows: tuple[int, float, int, float]) -> Sampling:
    """Return options of rows: seed, temperature, top_k and top_p."""
    dtypes = (np.uint32, np.float32, np.int32, np.float32)
    return Sampling(*map(np.array, zip(*rows, strict=True), dtypes))


GREEDY = (0, 0.0, 0, 1.0)


def int32(*values: int) -> Numbers:
    return np.array(values, np.int32)


# --- The cache ---


@pytest.fixture(scope="module")
def forward() -> Numbers:
    """The scores of a training's forward pass."""
    whole = data.Packed(TOKENS, np.ones_like(TOKENS), np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape))
    return np.asarray(jax.jit(partial(predict, CONFIG))(PARAMETERS, whole))


# One program each, for four slots, of which three are asked for.
prefill, step = jax.jit(MODEL.prefill), jax.jit(MODEL.step)


def chunk_of(begins: int, size: int) -> Numbers:
    """Return tokens of both texts and a row of padding."""
    chunk = np.zeros((3, 64), np.int32)
    chunk[:2, :size] = TOKENS[:, begins : begins + size]
    return chunk


@pytest.mark.parametrize("layout", [pytest.param(dict, marks=pytest.mark.long), transposed])
def test_chunks_and_steps_give_the_scores_of_a_training_in_any_slot(
    layout: Callable[[Parameters], Parameters], forward: Numbers
) -> None:
    parameters, state = layout(PARAMETERS), MODEL.state(4)
    for begins, size in ((0, 64), (64, 50)):  # the texts go into slots 2 and 0
        at, sizes = int32(begins, begins, 0), int32(size, size, 0)
        state, scores = prefill(parameters, state, chunk_of(begins, size), int32(2, 0, 4), at, sizes)
        np.testing.assert_allclose(scores[:2], forward[:, begins + size - 1], atol=1e-5)
    for place in range(114, TOKENS.shape[1]):  # beyond a block
        token, at = int32(TOKENS[1, place], 7, TOKENS[0, place]), int32(place, -1, place)
        state, scores = step(parameters, state, token, at)
        np.testing.assert_allclose(np.asarray(scores)[[2, 0]], forward[:, place], atol=1e-5)
    assert all(not np.asarray(cache)[[1, 3]].any() for layer in state for cache in layer)


def test_a_request_gets_the_same_bits_beside_a_longer_one() -> None:
    parameters, state = transposed(PARAMETERS), MODEL.state(4)
    for begins, sizes in ((0, int32(9, 64, 0)), (64, int32(0, 64, 0))):
        at = int32(begins, begins, 0)
        state, _ = prefill(parameters, state, chunk_of(begins, 64), int32(0, 1, 4), at, sizes)
    (_, alone), (_, beside) = (
        step(parameters, state, int32(5, 6, 0), at) for at in (int32(9, -1, -1), int32(9, BLOCK, -1))
    )
    np.testing.assert_array_equal(alone[0], beside[0])


def test_scores_that_are_no_numbers_leave_no_trace_in_the_slot() -> None:
    parameters, which, zeros = transposed(PARAMETERS), int32(0, 1, 4), int32(0, 0, 0)
    broken = {**parameters, "model.layers.0.mlp.up_proj.weight.T": np.full((32, 48), np.nan, np.float32)}
    spoiled, scores = prefill(broken, MODEL.state(4), chunk_of(0, 30), which, zeros, int32(30, 9, 0))
    assert np.isnan(scores[:2]).all()
    found: list[Numbers] = []
    for before in (spoiled, MODEL.state(4)):
        state, scores = prefill(parameters, before, chunk_of(0, 9), which, zeros, int32(9, 9, 0))
        state, following = step(parameters, state, int32(5, 6, 0), int32(9, 9, -1))
        found.append(np.stack([scores[:2], following[:2]]))
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(found[0], found[1])


# --- Sampling ---

SCORES = np.log(np.random.default_rng(3).dirichlet(np.full(1000, 0.05), 1)).astype(np.float32).clip(-40)
draw = jax.jit(sample)


def drawn(count: int, temperature: float, top_k: int, top_p: float) -> Counter[int]:
    rows = [(seed, temperature, top_k, top_p) for seed in range(count)]
    return Counter(
        np.asarray(draw(np.repeat(SCORES, count, 0), np.full(count, 7, np.int32), sampling(*rows)).tokens).tolist()
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1, 0, 1), (0.5, 0, 1), (1.5, 4, 1), (1, 0, 0.7), (0.8, 256, 0.9)]
)
def test_tokens_come_as_often_as_the_options_say(temperature: float, top_k: int, top_p: float) -> None:
    shares = np.exp(SCORES[0].astype(np.float64) / temperature)
    shares /= shares.sum()
    order = np.argsort(-shares)
    kept = order[: top_k or None]
    before = np.cumsum(shares[order])[: len(kept)] - shares[kept]
    kept = kept[before < top_p]
    expected = np.zeros(1000)
    expected[kept] = shares[kept] / shares[kept].sum()
    count = 4000
    found = drawn(count, temperature, top_k, top_p)
    assert set(found) <= set(kept.tolist())
    errors = np.array([found[token] / count for token in range(1000)]) - expected
    assert np.abs(errors).max() < 5 * (0.25 / count) ** 0.5
    assert (errors**2 / np.maximum(expected, 1e-12))[expected * count > 5].sum() * count < 2 * (
        expected * count > 5
    ).sum() + 20


def test_the_random_number_depends_on_seed_and_position_alone() -> None:
    scores = np.repeat(SCORES, 64, 0)
    rows, places = [(seed % 8, 1.0, 0, 1.0) for seed in range(64)], np.arange(64, dtype=np.int32) // 8
    together = np.asarray(draw(scores, places, sampling(*rows)).tokens)
    assert len(set(together.tolist())) > 5
    mixed = np.random.default_rng(0).permutation(64)
    again = np.asarray(draw(scores, places[mixed], sampling(*(rows[each] for each in mixed))).tokens)
    np.testing.assert_array_equal(again, together[mixed])
    for row in (0, 9, 63):
        alone = draw(SCORES, places[row : row + 1], sampling(rows[row])).tokens
        assert int(alone[0]) == together[row]


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = np.concatenate([SCORES, np.roll(SCORES, 1, 1)]) * 2
    shares = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    found = draw(logits, int32(1, 1), sampling((1, 0.7, 3, 1), GREEDY))
    np.testing.assert_allclose(found.log_probabilities, shares[[0, 1], np.asarray(found.tokens)], atol=1e-5)
    assert int(found.tokens[1]) == int(logits[1].argmax())
    np.testing.assert_array_equal(found.likeliest, np.argsort(-logits, axis=1, kind="stable")[:, :20])
    np.testing.assert_allclose(
        found.likeliest_log_probabilities, np.take_along_axis(shares, np.asarray(found.likeliest), 1), atol=1e-5
    )


# --- Files ---


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> None:
    """Write a file with metadata of whole numbers, floats, texts and lists of texts."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value(of: Any) -> bytes:
        if isinstance(of, str):
            return struct.pack("<I", 8) + text(of)
        if isinstance(of, list):
            return struct.pack("<IIQ", 9, 8, len(of)) + b"".join(map(text, of))
        return struct.pack("<If", 6, of) if isinstance(of, float) else struct.pack("<II", 4, of)

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(name) + value(of) for name, of in metadata.items())
    body = b""
    for name, (shape, kind, content) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(body))
        body += content + bytes(-len(content) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)


def test_each_kind_of_tensor_is_read_as_its_format_says(tmp_path: Path) -> None:
    nibbles = [number % 16 for number in range(32)]
    packed = bytes(low | high << 4 for low, high in zip(nibbles[:16], nibbles[16:], strict=True))
    half, quarter = (np.float16(each).tobytes() for each in (0.5, 0.25))
    eight = bytes(number % 256 for number in range(-16, 16))
    tensors = {
        "f32": ((2, 3), 0, np.arange(6, dtype=np.float32).tobytes()),
        "f16": ((3,), 1, np.arange(3, dtype=np.float16).tobytes()),
        "q4_0": ((2, 32), 2, (half + packed) * 2),
        "q4_1": ((1, 32), 3, half + quarter + packed),
        "q8_0": ((32,), 8, half + eight),
    }
    about = {"a": 7, "b": 0.5, "c": "größe", "d": ["x", "y"], "e": ["x"]}
    write_gguf(tmp_path / "m.gguf", about, tensors)
    metadata, read = gguf.read(tmp_path / "m.gguf")
    assert metadata == about
    assert {name: value.tolist() for name, value in read.items()} == {
        "f32": [[0, 1, 2], [3, 4, 5]],
        "f16": [0, 1, 2],
        "q4_0": [[(number - 8) / 2 for number in nibbles]] * 2,
        "q4_1": [[number / 2 + 0.25 for number in nibbles]],
        "q8_0": [number / 2 for number in range(-16, 16)],
    }


def test_files_that_cannot_be_run_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ValueError, match=r"m\.gguf: no GGUF file of version 3"):
        gguf.read(path)
    write_gguf(path, {}, {"blk.0.attn_q.weight": ((32,), 12, bytes(64))})
    with pytest.raises(ValueError, match=r"'blk\.0\.attn_q\.weight' is of kind 12; F32, F16, Q4_0, Q4_1, Q8_0 can be"):
        gguf.read(path)


ABOUT: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": ["x"] * 300,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 2 * BLOCK,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def as_in_gguf() -> dict[str, Numbers]:
    """Return the parameters under the names of a GGUF file, in its order."""
    found: dict[str, Numbers] = {}
    short = {name: key for key, name in NAMES.items()}
    for name, value in PARAMETERS.items():
        parts = name.removesuffix(".weight").split(".", 3)
        layered = parts[1] == "layers"
        key = f"blk.{parts[2]}.{short[parts[3]]}.weight" if layered else f"{short['.'.join(parts)]}.weight"
        array = np.asarray(value)
        if key.endswith(("attn_q.weight", "attn_k.weight")):
            array = array.reshape(-1, 2, CONFIG.head_size // 2, 32).swapaxes(1, 2).reshape(array.shape)
        found[key] = array
    return found


def test_names_and_rows_of_a_gguf_file_become_those_of_transformers() -> None:
    config, parameters = from_gguf(ABOUT, as_in_gguf())
    assert config == CONFIG
    assert parameters.keys() == PARAMETERS.keys()
    for name, value in PARAMETERS.items():
        np.testing.assert_array_equal(parameters[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("metadata", "tensors", "said"),
    [
        ({"general.architecture": "qwen2"}, {}, "the architecture is 'qwen2'; only 'llama'"),
        ({"llama.rope.scaling.type": "yarn"}, {}, r"rope\.scaling\.type"),
        ({"llama.rope.dimension_count": 4}, {}, "a part of each head"),
        ({}, {"output.weight": np.zeros((300, 32), np.float32)}, r"such as output\.weight"),
        ({}, {"blk.0.attn_q.bias": np.zeros(32, np.float32)}, r"such as blk\.0\.attn_q\.bias"),
        ({"llama.block_count": 3}, {}, r"such as model\.layers\.2"),
    ],
)
def test_models_of_other_kinds_are_refused(metadata: dict[str, Any], tensors: dict[str, Numbers], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_gguf(ABOUT | metadata, as_in_gguf() | tensors)
