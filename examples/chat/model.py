"""A language model of the Llama kind: its forward pass for a training, and decoding with a cache for many requests.

All functions are plain JAX, and take the parameters as an argument: the names and shapes are those of the files of
Hugging Face's transformers. `begin` and `go_on` are the two programs of a decoder; they take any `Model`.

- Touvron et al., 2023, LLaMA: https://arxiv.org/abs/2302.13971
- Zhang and Sennrich, 2019, RMSNorm: https://arxiv.org/abs/1910.07467
- Su et al., 2021, RoPE: https://arxiv.org/abs/2104.09864
- Ainslie et al., 2023, grouped attention: https://arxiv.org/abs/2305.13245
- Shazeer, 2020, SwiGLU: https://arxiv.org/abs/2002.05202
- Milakov and Gimelshein, 2018, softmax in one pass: https://arxiv.org/abs/1805.02867
- Holtzman et al., 2019, nucleus sampling (top_p): https://arxiv.org/abs/1904.09751
- Maddison et al., 2014, Gumbel's trick: https://arxiv.org/abs/1411.0030
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_static

from penstock.devices import Array

from .gguf import Floats

BLOCK = 128  # positions of the cache that are read at a time, or all if they are fewer
CANDIDATES = 256  # tokens that top_k and top_p choose from; to find them costs a twentieth of a sort
LIKELIEST = 20  # tokens that are told with their log probabilities; OpenAI's protocol asks for 20 at most

Parameters: TypeAlias = dict[str, Array]
State: TypeAlias = Any  # a pytree of arrays with a row for each slot


# --- The model ---


@register_static  # it may be an argument of what is compiled, and is no array
@dataclass(frozen=True)
class Config:
    """The shapes of a model, under the names that transformers give them; by default, 2.4 million parameters."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 416
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    max_position_embeddings: int = 256
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_size(self) -> int:
        """How many numbers a query, a key or a value of one head has."""
        return self.hidden_size // self.num_attention_heads

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Give the name and the shape of each parameter; those of matrices are [outputs, inputs]."""
        width, hidden, narrow = self.hidden_size, self.intermediate_size, self.num_key_value_heads * self.head_size
        yield "model.embed_tokens.weight", (self.vocab_size, width)
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (narrow, width),
            "self_attn.v_proj": (narrow, width), "self_attn.o_proj": (width, width),
            "post_attention_layernorm": (width,), "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden),
        }  # fmt: skip
        for number in range(self.num_hidden_layers):
            yield from ((f"model.layers.{number}.{name}.weight", shape) for name, shape in layer.items())
        yield "model.norm.weight", (width,)


# The names of a GGUF file that stand for those above.
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
# What the metadata of such a file say of a model, in the order of Config.
SIZES = (
    "embedding_length", "feed_forward_length", "block_count", "attention.head_count", "attention.head_count_kv",
    "context_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
)  # fmt: skip


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Floats]) -> tuple[Config, Parameters]:
    """Return the configuration and the parameters of a GGUF file.

    Raises:
        ValueError: The file is no Llama, has RoPE scaling, or has other tensors than its metadata say.
    """
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise ValueError(f"the architecture is {architecture!r}; only 'llama' can be run")
    about = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    about.setdefault("rope.freq_base", 10000.0)
    config = Config(len(metadata["tokenizer.ggml.tokens"]), *(about[name] for name in SIZES))
    scaled = sorted(name for name in about if "rope.scal" in name and about[name] != "none")
    if scaled or about.get("rope.dimension_count", config.head_size) != config.head_size:
        raise ValueError(f"RoPE of another kind cannot be run: {', '.join(scaled) or 'of a part of each head'}")
    parameters: Parameters = {}
    for name, value in tensors.items():
        short = name.removesuffix(".weight").split(".")  # blk, the layer, and the name
        layer = f"model.layers.{short[1]}." if len(short) == 3 else ""
        if short[-1] in ("attn_q", "attn_k"):  # pairs lie side by side in the file, and half a head apart here
            pairs = value.reshape(-1, config.head_size // 2, 2, config.hidden_size)
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        parameters[f"{layer}{NAMES.get(short[-1], name)}.weight"] = value
    found, expected = {name: value.shape for name, value in parameters.items()}, dict(config.shapes())
    if others := sorted(name for name in found | expected if found.get(name) != expected.get(name)):
        raise ValueError(f"other tensors than the metadata say, such as {', '.join(others[:3])}")
    return config, parameters


def transposed(parameters: Parameters) -> Parameters:
    """Return the parameters with matrices [inputs, outputs], as a CPU decodes up to twice as fast with them.

    All functions here take either. The matrices of queries, keys and contents are joined. The embedding stays, since
    its rows are read, and its transposed copy is added. All lie in one block of memory, which has larger pages than
    many small ones; `jax.device_put` takes it without a copy on a CPU.
    """
    changed: dict[str, Floats] = {}
    for name, value in parameters.items():
        if ".q_proj" in name:
            parts = [parameters[name.replace(".q_proj", f".{letter}_proj")] for letter in "qkv"]
            changed[f"{name.replace('.q_proj', '.qkv_proj')}.T"] = np.concatenate(parts).T
        elif value.ndim == 2 and ".k_proj" not in name and ".v_proj" not in name:
            changed[f"{name}.T"] = np.asarray(value).T
        if value.ndim == 1 or "embed" in name:
            changed[name] = np.asarray(value)
    sizes = [-(-value.size // 16) * 16 for value in changed.values()]  # XLA wants borders of 64 bytes
    memory = np.empty(sum(sizes) + 16, np.float32)
    begins = np.cumsum([-memory.ctypes.data % 64 // 4, *sizes])
    for (name, value), at in zip(changed.items(), begins[:-1], strict=True):
        changed[name] = memory[at : at + value.size].reshape(value.shape)
        changed[name][...] = value
    return {**changed}


def mapped(parameters: Parameters, values: jax.Array, name: str) -> jax.Array:
    """Return the product of values with a matrix."""
    weight = parameters.get(f"{name}.weight.T")
    return values @ (jnp.asarray(parameters[f"{name}.weight"]).T if weight is None else jnp.asarray(weight))


def hidden_states(
    config: Config, parameters: Parameters, tokens: jax.Array, positions: jax.Array,
    attend: Callable[[jax.Array, jax.Array, jax.Array, State], tuple[jax.Array, State]], states: Sequence[State],
) -> tuple[jax.Array, list[State]]:  # fmt: skip
    """Return what the last layer gives for tokens [rows, length]: float32 [rows, length, width], and a state a layer.

    `attend` takes queries, keys and contents, [rows, heads, length, head], and the state of a layer. It returns the
    mixed contents for each query, and the new state.
    """
    rates = config.rope_theta ** (-jnp.arange(0, config.head_size, 2) / config.head_size)
    angles = positions[:, None, :, None] * rates  # [rows, 1, length, head / 2]
    cosines, sines = jnp.cos(angles), jnp.sin(angles)

    def normalised(weights: Parameters, values: jax.Array, name: str) -> jax.Array:
        mean_square = jnp.square(values).mean(axis=-1, keepdims=True)
        return values * jax.lax.rsqrt(mean_square + config.rms_norm_eps) * weights[f"{name}.weight"]

    def rotated(values: jax.Array) -> jax.Array:
        """Turn pairs of numbers by their place in the sequence; a pair is i and i + head / 2, as in transformers."""
        first, second = jnp.split(values, 2, axis=-1)
        return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)

    @jax.jit  # so that it is traced once for all layers
    def layer(weights: Parameters, hidden: jax.Array, state: State) -> tuple[jax.Array, State]:
        inputs = normalised(weights, hidden, "input_layernorm")
        if "self_attn.qkv_proj.weight.T" in weights:
            narrow = config.num_key_value_heads * config.head_size
            joined = mapped(weights, inputs, "self_attn.qkv_proj")
            parts = jnp.split(joined, (config.hidden_size, config.hidden_size + narrow), axis=-1)
        else:
            parts = [mapped(weights, inputs, f"self_attn.{letter}_proj") for letter in "qkv"]
        shape = (*tokens.shape, -1, config.head_size)
        queries, keys, contents = (each.reshape(shape).swapaxes(1, 2) for each in parts)
        mixed, state = attend(rotated(queries), rotated(keys), contents, state)
        hidden += mapped(weights, mixed.swapaxes(1, 2).reshape(hidden.shape), "self_attn.o_proj")
        inputs = normalised(weights, hidden, "post_attention_layernorm")
        gate = jax.nn.silu(mapped(weights, inputs, "mlp.gate_proj"))
        hidden += mapped(weights, gate * mapped(weights, inputs, "mlp.up_proj"), "mlp.down_proj")
        return hidden, state

    hidden = jnp.asarray(parameters["model.embed_tokens.weight"])[tokens.reshape(-1)]  # [rows * length, width]
    changed: list[State] = []
    for number, state in enumerate(states):
        begin = f"model.layers.{number}."
        weights = {name.removeprefix(begin): each for name, each in parameters.items() if name.startswith(begin)}
        hidden, state = layer(weights, hidden, state)
        changed.append(state)
    return normalised(parameters, hidden, "model.norm").reshape(*tokens.shape, -1), changed


# --- Decoding ---


class Model(Protocol):
    """What a decoder needs of a language model: a static argument of compiled functions, with these pure functions."""

    @property
    def context(self) -> int:
        """How many tokens a slot has room for, prompt and answer together."""
        ...

    def state(self, slots: int) -> State:
        """Return the state of so many slots before any token."""

    def prefill(
        self, parameters: Parameters, state: State, tokens: Array, slots: Array, positions: Array, lengths: Array
    ) -> tuple[State, jax.Array]:
        """Take in a chunk of a prompt for some slots.

        Args:
            parameters: of the model.
            state: of all slots.
            tokens: int32 [rows, chunk], with padding behind the length of each row.
            slots: int32 [rows]; a row that is only padding has the number of all slots, and changes nothing.
            positions: int32 [rows], that of the first token of each chunk. A row at 0 begins anew in its slot.
            lengths: int32 [rows], how many tokens each row has; 0 in a row that is only padding.

        Returns:
            The new state, and a score for each token to come after the chunk: float32 [rows, tokens].
        """
        ...

    def step(self, parameters: Parameters, state: State, tokens: Array, positions: Array) -> tuple[State, jax.Array]:
        """Take in one token for each of the first slots; tokens and positions are int32 [rows].

        A row at position -1 is idle, or still in its prefill: its state stays, and its scores mean nothing.

        Returns:
            The new state, and a score for each token to come next: float32 [rows, tokens].
        """
        ...


@register_static
@dataclass(frozen=True)
class Llama:
    """A model of this configuration, with room for `context` tokens in a slot."""

    config: Config
    context: int

    def state(self, slots: int) -> State:
        """Return caches of keys and contents for each layer: float32 [slots, heads, positions, head]."""
        config, width = self.config, min(BLOCK, self.context)
        shape = (slots, config.num_key_value_heads, -(-self.context // width) * width, config.head_size)
        return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_hidden_layers)]

    def prefill(
        self, parameters: Parameters, state: State, tokens: Array, slots: Array, positions: Array, lengths: Array
    ) -> tuple[State, jax.Array]:
        """Take in a chunk of a prompt for some slots, as `Model` says."""
        lengths, places = jnp.asarray(lengths), jnp.arange(tokens.shape[1])
        at = jnp.where(places < lengths[:, None], jnp.asarray(positions)[:, None] + places, -1)
        hidden, state = self._cached(parameters, state, jnp.asarray(tokens), at, jnp.asarray(slots))
        last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return state, mapped(parameters, last, "model.embed_tokens")

    def step(self, parameters: Parameters, state: State, tokens: Array, positions: Array) -> tuple[State, jax.Array]:
        """Take in one token for each of the first slots, as `Model` says."""
        at = jnp.asarray(positions)[:, None]
        hidden, state = self._cached(parameters, state, jnp.asarray(tokens)[:, None], at, None)
        return state, mapped(parameters, hidden[:, 0], "model.embed_tokens")

    def _cached(
        self, parameters: Parameters, state: State, tokens: jax.Array, at: jax.Array, slots: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """Write keys and contents of tokens into the cache, at these positions of these slots; attend to all before.

        Without slots, they are the first. A token at position -1 is written nowhere.
        """
        (rows, length), width = tokens.shape, min(BLOCK, self.context)
        size, kinds = self.config.head_size, self.config.num_key_value_heads
        written = jnp.where(at < 0, state[0][0].shape[2], at)  # what is written behind the end is dropped
        which = jnp.arange(rows) if slots is None else slots
        blocks = at.max() // width + 1

        def block_of(cache: jax.Array, block: jax.Array) -> jax.Array:
            if slots is None:
                return jax.lax.dynamic_slice(cache, (0, 0, block * width, 0), (rows, kinds, width, size))
            begins = ((slot, 0, block * width, 0) for slot in slots)
            return jnp.concatenate([jax.lax.dynamic_slice(cache, at, (1, kinds, width, size)) for at in begins])

        def attend(queries: jax.Array, keys: jax.Array, contents: jax.Array, cache: State) -> tuple[jax.Array, State]:
            # A content that is no number would reach later requests of the slot, even with a share of 0.
            fresh = (keys, jnp.where(jnp.isfinite(contents), contents, 0))
            places = which[:, None], slice(None), written
            pairs = zip(cache, fresh, strict=True)
            cache = tuple(old.at[places].set(new.swapaxes(1, 2), mode="drop") for old, new in pairs)
            grouped = queries.reshape(rows, kinds, -1, size) * size**-0.5  # heads that share keys are rows of a product

            # Block by block, as far as the longest sequence needs; a block that a row does not see changes no bit.
            def add(block: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
                most, total, mixed = sums
                scores = grouped @ block_of(cache[0], block).swapaxes(2, 3)
                sees = (block * width + jnp.arange(width)) <= jnp.maximum(at, 0)[:, None, :, None]
                scores = jnp.where(jnp.tile(sees, (1, 1, grouped.shape[2] // length, 1)), scores, -jnp.inf)
                higher = jnp.maximum(most, scores.max(-1, keepdims=True))
                shares, kept = jnp.exp(scores - higher), jnp.exp(most - higher)
                mixed = mixed * kept + shares @ block_of(cache[1], block)
                return higher, total * kept + shares.sum(-1, keepdims=True), mixed

            first = (*grouped.shape[:3], 1)
            sums = (jnp.full(first, -jnp.inf), jnp.zeros(first), jnp.zeros(grouped.shape))
            _, total, mixed = jax.lax.fori_loop(0, blocks, add, sums)
            return jnp.reshape(mixed / total, queries.shape), cache

        return hidden_states(self.config, parameters, tokens, jnp.maximum(at, 0), attend, state)


# --- Sampling ---


class Sampling(NamedTuple):
    """How the next tokens are chosen, an entry for each row."""

    seeds: Array  # uint32
    temperatures: Array  # float32; at 0 the likeliest token is taken
    top_ks: Array  # int32, up to 256: among so many of the likeliest; 0 is all
    top_ps: Array  # float32: among the likeliest that have this probability together, 256 at most; 1 is all


class Sampled(NamedTuple):
    """Tokens that were chosen. Log probabilities are those of the model, without temperature and limits."""

    tokens: jax.Array  # int32 [rows]
    log_probabilities: jax.Array  # float32 [rows]; NaN where the scores of a row are no numbers
    likeliest: jax.Array  # int32 [rows, 20], best first
    likeliest_log_probabilities: jax.Array  # float32 [rows, 20]


def sample(logits: jax.Array, positions: Array, sampling: Sampling) -> Sampled:
    """Choose a token for each row of scores [rows, tokens].

    The random numbers of a row depend on its seed and on the position of the token, int32 [rows], alone: a request gets
    the same tokens in any slot, beside any others.
    """
    seeds, temperatures, top_ks, top_ps = (jnp.asarray(each) for each in sampling)
    log_probabilities = jax.nn.log_softmax(logits)
    found = jax.lax.top_k(log_probabilities, min(CANDIDATES, logits.shape[1]))
    # Without the barrier, XLA on CPU makes a sort of it as soon as a part is read: 30 times slower.
    best, candidates = jax.lax.optimization_barrier(found)  # type: ignore[no-untyped-call]
    heat = jnp.where(temperatures > 0, temperatures, 1)[:, None]
    some = jnp.exp((best - best[:, :1]) / heat)
    before = jnp.cumsum(some, axis=-1) - some
    total = jnp.exp((log_probabilities - best[:, :1]) / heat).sum(-1, keepdims=True)
    allowed = (before < top_ps[:, None] * total) & (
        (top_ks[:, None] == 0) | (jnp.arange(some.shape[1]) < top_ks[:, None])
    )
    border = jnp.take_along_axis(best, jnp.maximum(allowed.sum(-1, keepdims=True), 1) - 1, axis=-1)
    limited = ((top_ks > 0) | (top_ps < 1))[:, None]
    scores = jnp.where(limited & (log_probabilities < border), -jnp.inf, log_probabilities / heat)
    scores -= jnp.log(times(seeds, jnp.asarray(positions), scores.shape[1]))
    # An argmax takes XLA on CPU three times as long.
    is_first = scores == scores.max(-1, keepdims=True)
    first = jnp.where(is_first, jnp.arange(scores.shape[1]), scores.shape[1]).min(-1)
    tokens = jnp.where(temperatures > 0, first, candidates[:, 0]).astype(jnp.int32)
    own = jnp.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]
    return Sampled(tokens, own, candidates[:, :LIKELIEST], best[:, :LIKELIEST])


def times(seeds: jax.Array, positions: jax.Array, tokens: int) -> jax.Array:
    """Return a random time for each token of each row, exponentially distributed: float32 [rows, tokens].

    If a token needs less time the likelier it is, each is the first as often as it is likely (Gumbel's trick). Numbers
    mixed of seed, position and token alone are good enough for that, and ten times as fast as those of `jax.random`.
    """

    def mixed(bits: jax.Array) -> jax.Array:  # https://nullprogram.com/blog/2018/07/31
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            bits = (bits ^ bits >> shift) * jnp.uint32(factor)
        return bits ^ bits >> 16

    rows = mixed(mixed(seeds) + positions.astype(jnp.uint32))[:, None]
    bits = mixed(mixed(jnp.arange(tokens, dtype=jnp.uint32)) + rows)
    return -jnp.log1p(-jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24))


# --- The programs of a decoder ---


class Slots(NamedTuple):
    """What a decoder keeps on the device between two steps, and each step donates to the next."""

    state: State
    tokens: jax.Array  # int32 [slots], the last of each


def open_slots(model: Model, slots: int) -> Slots:
    """Return empty slots."""
    return Slots(model.state(slots), jnp.zeros(slots, jnp.int32))


def begin(
    model: Model, parameters: Parameters, slots: Slots, tokens: Array, which: Array, positions: Array, lengths: Array,
    sampling: Sampling,
) -> tuple[Slots, Sampled]:  # fmt: skip
    """Take in a chunk of a prompt for the slots `which`, as `Model.prefill` says, and choose the token after each."""
    state, logits = model.prefill(parameters, slots.state, tokens, which, positions, lengths)
    sampled = sample(logits, jnp.asarray(positions) + lengths, sampling)
    return Slots(state, slots.tokens.at[jnp.asarray(which)].set(sampled.tokens, mode="drop")), sampled


def go_on(
    model: Model, parameters: Parameters, slots: Slots, positions: Array, sampling: Sampling
) -> tuple[Slots, Sampled]:
    """Take in the last token of each of the first slots, at these positions, and choose the token after it."""
    rows = positions.shape[0]
    state, logits = model.step(parameters, slots.state, slots.tokens[:rows], positions)
    sampled = sample(logits, jnp.asarray(positions) + 1, sampling)
    following = jnp.where(jnp.asarray(positions) < 0, slots.tokens[:rows], sampled.tokens)
    return Slots(state, slots.tokens.at[:rows].set(following)), sampled
