"""Train a language model of the Llama kind on the standard library's sources, and let it complete texts.

    python examples/language_model.py                                 four minutes, then its loss beside a trigram model
    python examples/language_model.py --devices 4 --profile           on a mesh of simulated devices, with a profile
    python examples/language_model.py --seconds 3600 --save model     writes files for Hugging Face's transformers
    python examples/language_model.py --load model --complete "def main("

The feed is shuffled over all files, packed into rows, and batched; batches are on the mesh before they are needed. The
model is the Llama of `chat/model.py`: its parameters have the same names and shapes as in the file. A token stands for
one byte or several bytes. Losses are given per byte, so that they can be compared with the losses of a model of bytes.

- Sennrich et al., 2016, byte pair encoding: https://arxiv.org/abs/1508.07909
"""

# The types of JAX, optax, safetensors and tokenizers leave parameters of some functions open, or are missing.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import examples`: the path has only this file's folder

import argparse
import asyncio
import json
import math
import re
import signal
import sysconfig
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import penstock as ps
from examples.chat.model import (
    Config,
    Llama,
    Parameters,
    Sampled,
    Sampling,
    Slots,
    State,
    begin,
    go_on,
    hidden_states,
    mapped,
    open_slots,
    sample,
    transposed,
)
from penstock import data, devices, engine, telemetry
from penstock.devices import Array

START = 0  # the token that comes before every piece of text, and stands for no byte
BYTES = 256
ROWS = 8  # rows of a batch; in a few minutes, many small steps learn more than few large steps
QUERIES = 64  # queries that attend at a time
SEED = 0
SAMPLES = 64  # texts that the model writes while it learns
SAMPLE_TOKENS = 32

Tokens = npt.NDArray[np.uint16]
Numbers = npt.NDArray[Any]


# --- The texts to learn from ---


class Corpus(NamedTuple):
    """Files to learn from, and held out files to judge the model with."""

    learned: list[bytes]
    held_out: list[bytes]


def read_sources(folder: Path) -> Corpus:
    """Read the sources below a folder. One in twenty is held out; the choice depends only on the names."""
    corpus = Corpus([], [])
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        text = path.read_bytes()
        if "site-packages" not in name and text:
            (corpus.held_out if zlib.crc32(name.encode()) % 20 == 0 else corpus.learned).append(text)
    return corpus


class Vocabulary:
    """Tokens of one byte or more. Each single byte is a token, so that the tokens can represent any text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True  # the name of START in a text is read as plain characters
        self.tokenizer = tokenizer
        # A tokenizer shows a byte as a character: itself if it can be printed, else a character from 256 on, in order.
        shown = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
        printed = [ord(character) for character in shown if ord(character) < BYTES]
        byte_of = dict(zip(shown, printed + sorted(set(range(BYTES)) - set(printed)), strict=True))
        tokens = tokenizer.get_vocab()
        self._of_byte = {byte: tokens[character] for character, byte in byte_of.items()}
        names = sorted(tokens, key=tokens.__getitem__)
        self._bytes = [b"", *(bytes(byte_of[each] for each in name) for name in names[START + 1 :])]
        self.sizes: Numbers = np.array([len(each) for each in self._bytes], np.int32)  # in bytes

    @classmethod
    def learn(cls, texts: Iterable[bytes], size: int) -> Self:
        """Join tokens that are often neighbours in texts, until there are `size` tokens, or nothing is left to join."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
        return cls(tokenizer)

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens of a text, without START."""
        tokens: list[int] = []
        # The tokenizer reads characters: a byte that is not part of a character becomes a token of its own.
        for part in re.split("([\udc80-\udcff])", text.decode(errors="surrogateescape")):
            if "\udc80" <= part <= "\udcff":
                tokens.append(self._of_byte[ord(part) - 0xDC00])
            else:
                tokens += self.tokenizer.encode(part, add_special_tokens=False).ids
        return np.array(tokens, np.uint16)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes that tokens stand for."""
        return b"".join(self._bytes[token] for token in tokens)


class Pieces:
    """Tokens of texts, cut into pieces of at most a row. START begins each piece, so that every token is predicted."""

    def __init__(self, texts: Sequence[Tokens], length: int) -> None:
        self._length = length - 1
        self._texts = texts
        self._places = [(which, at) for which, text in enumerate(texts) for at in range(0, len(text), self._length)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Tokens:
        which, at = self._places[index]
        return np.insert(self._texts[which][at : at + self._length], 0, START)


def feed(
    pieces: Pieces, length: int, mesh: devices.DeviceMesh, *, shuffle_seed: int | None, epochs: int | None
) -> AsyncIterator[data.Packed]:
    """Return the batches of a graph, [ROWS, length], with rows split over a mesh; padding fills the last batch."""

    def stacked(rows: list[data.Packed]) -> data.Packed:
        padding = data.Packed(*map(np.zeros_like, rows[0]))
        batch: data.Packed = data.collate(rows + [padding] * (ROWS - len(rows)))
        return batch

    records = data.order(pieces, shuffle_seed=shuffle_seed, epochs=epochs) >> data.read(pieces, runs_on="loop")
    rows = records >> data.packed(length)
    return rows >> data.batched(ROWS, collate=stacked) >> data.to_device(mesh, jax.P("data"))  # type: ignore[no-untyped-call]


# --- The model ---


@dataclass
class Model:
    """The shapes, the tokens, and the parameters of a model in float32, which each step of training replaces."""

    config: Config
    vocabulary: Vocabulary
    parameters: Parameters


def create_model(config: Config, vocabulary: Vocabulary) -> Model:
    """Return a model before any training."""
    random = np.random.default_rng(SEED)
    parameters: Parameters = {}
    for name, shape in config.shapes():
        if len(shape) == 1:
            parameters[name] = np.ones(shape, np.float32)
            continue
        scale = 0.02 if "embed" in name else shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:  # maps whose results are added to the sum of all layers
            scale /= (2 * config.num_hidden_layers) ** 0.5
        parameters[name] = random.normal(0, scale, shape).astype(np.float32)
    return Model(config, vocabulary, parameters)


def predict(config: Config, parameters: Parameters, batch: data.Packed) -> jax.Array:
    """Return a score for each possible next token: float32 [rows, length, tokens]. Sequences do not see each other."""
    tokens, segment_ids, positions = (jnp.asarray(each) for each in batch)
    rows, length = tokens.shape
    sees = (segment_ids[:, None, :, None] == segment_ids[:, None, None, :]) & jnp.tri(length, dtype=bool)

    def attend(queries: jax.Array, keys: jax.Array, contents: jax.Array, _: None) -> tuple[jax.Array, None]:
        mixed: list[jax.Array] = []
        # Some queries at a time, with only the keys before their end: on a CPU three times as fast as all at once.
        for at in range(0, length, QUERIES):
            end = min(at + QUERIES, length)
            # Neighbouring heads share keys and contents, so their queries are rows of one product.
            some = queries[:, :, at:end].reshape(rows, config.num_key_value_heads, -1, config.head_size)
            scores = (some @ keys[:, :, :end].swapaxes(2, 3)).reshape(rows, -1, end - at, end)
            masked = jnp.where(sees[:, :, at:end, :end], scores * config.head_size**-0.5, np.finfo(np.float32).min)
            shares: jax.Array = jax.nn.softmax(masked, axis=-1)
            taken = shares.reshape(*some.shape[:3], end) @ contents[:, :, :end]
            mixed.append(taken.reshape(rows, -1, end - at, config.head_size))
        return jnp.concatenate(mixed, axis=2), None

    stateless = [None] * config.num_hidden_layers
    hidden, _ = hidden_states(config, parameters, tokens, positions, attend, stateless)
    return mapped(parameters, hidden.reshape(rows * length, -1), "model.embed_tokens").reshape(rows, length, -1)


def measure(config: Config, parameters: Parameters, sizes: Array, batch: data.Packed) -> tuple[jax.Array, jax.Array]:
    """Return the loss of a batch in nats, and how many bytes its tokens stand for; START and padding do not count."""
    scores, segment_ids = predict(config, parameters, batch)[:, :-1], jnp.asarray(batch.segment_ids)
    following = jnp.asarray(batch.tokens)[:, 1:]
    counts = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    nats = optax.losses.softmax_cross_entropy_with_integer_labels(scores, following)
    return (nats * counts).sum(), (jnp.asarray(sizes)[following] * counts).sum()


# --- Training ---

# The rate of learning. After 300 steps of 1 KB, a model of 0.4 million parameters had a loss of 1.92 nats a byte; 2.14
# with a rate of 3e-3, and 2.26 with AdamW alone.
RATE = 1e-2
WARM_UP_STEPS = 20


def optimizer(rate: float) -> Any:
    """Return Muon (Jordan, 2024), which makes the update of a matrix orthogonal; other parameters use AdamW."""
    return optax.contrib.muon(
        rate, consistent_rms=0.2, weight_decay=0.1, adam_b2=0.95, muon_weight_dimension_numbers=_kinds
    )


def _kinds(parameters: Any) -> Any:
    """Return for each parameter its axes of outputs and inputs if the parameter is a map, None otherwise."""
    return {name: optax.contrib.MuonDimensionNumbers(1, 0) if "proj" in name else None for name in parameters}


def train_step(
    config: Config, parameters: Parameters, optimizer_state: Any, sizes: Array, batch: data.Packed, rate: float
) -> tuple[Parameters, Any, jax.Array]:
    """Return parameters and state after a step at this rate, and the loss before the step, in nats a byte."""

    def mean_loss(parameters: Parameters) -> jax.Array:
        nats, count = measure(config, parameters, sizes, batch)
        return nats / jnp.maximum(count, 1)

    loss, gradients = jax.value_and_grad(mean_loss)(parameters)
    updates, optimizer_state = optimizer(rate).update(gradients, optimizer_state, parameters)
    updated: Any = optax.apply_updates(parameters, updates)
    return updated, optimizer_state, loss


class Samples(NamedTuple):
    """Texts that the model has written, and the log probability that it gave each token."""

    tokens: Array  # int32 [SAMPLES, SAMPLE_TOKENS]
    log_probabilities: Array  # float32 [SAMPLES, SAMPLE_TOKENS]


def write_samples(config: Config, parameters: Parameters, number: int | Array) -> Samples:
    """Write texts from START on; each number gives other texts. One program, which keeps no other state."""
    llama, rows = Llama(config, 1 + SAMPLE_TOKENS), jnp.arange(SAMPLES)
    seeds = rows.astype(jnp.uint32) + jnp.uint32(number) * SAMPLES
    sampling = Sampling(seeds, jnp.ones(SAMPLES), 0 * rows, jnp.ones(SAMPLES))
    starts = jnp.full((SAMPLES, 1), START, jnp.int32)
    slots, first = begin(llama, parameters, open_slots(llama, SAMPLES), starts, rows, 0 * rows, 0 * rows + 1, sampling)

    def following(slots: Slots, place: jax.Array) -> tuple[Slots, Sampled]:
        return go_on(llama, parameters, slots, 0 * rows + place, sampling)

    _, others = jax.lax.scan(following, slots, jnp.arange(1, SAMPLE_TOKENS))
    tokens = jnp.vstack([first.tokens, others.tokens]).T
    return Samples(tokens, jnp.vstack([first.log_probabilities, others.log_probabilities]).T)


class Step(NamedTuple):
    """One step: its number from 0, its loss in nats a byte, and the share of the training that is done, up to 1."""

    number: int
    loss: float
    done: float
    samples: Samples | None = None  # texts written after the step; None for most steps


@ps.node
class Trainer:
    """Learns from batches, one at a time, until time or steps are used up; the rate follows a cosine from 1 to 0."""

    def __init__(
        self,
        model: Model,
        mesh: devices.DeviceMesh,
        seconds: float,
        steps: int | None,
        samples_every: int | None = None,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._seconds = seconds
        self._steps = steps
        self._samples_every = samples_every

    async def __aenter__(self) -> Self:
        device = devices.actor(self._mesh)
        # A call that donates is not interrupted: even after a cancellation, the parameters are from a whole step.
        self._step = device.bind(train_step, donate_argnums=(1, 2))
        # ready=False: the device keeps the order of calls, so samples read the parameters before the next step takes
        # their memory.
        self._write = device.bind(write_samples, ready=False)
        self._model.parameters, self._state = await device.run(with_state, self._model.parameters)
        self._number, self._began, self._before = 0, math.inf, 0.0
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self._state

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        leaves = jax.tree.leaves(self._state)
        seconds = max(self._before, perf_counter() - self._began)
        return {"parameters": self._model.parameters, "optimizer": leaves, "number": self._number, "seconds": seconds}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        self._model.parameters, self._number = state["parameters"], state["number"]
        self._state = jax.tree.unflatten(jax.tree.structure(self._state), state["optimizer"])
        self._before = state["seconds"]

    async def __call__(self, batch: data.Packed) -> Step:
        number, model = self._number, self._model
        self._began = min(
            self._began, perf_counter() - self._before
        )  # set at the first batch, when all texts are tokens
        done = min(number / self._steps if self._steps else (perf_counter() - self._began) / self._seconds, 1)
        rate = RATE * min(1, (number + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * done)) / 2
        # A step takes about half a second on two cores. So waiting for the step costs nothing, and the clock is right.
        model.parameters, self._state, loss = await self._step(
            model.config, model.parameters, self._state, model.vocabulary.sizes, batch, rate
        )
        self._number += 1
        wanted = self._samples_every is not None and self._number % self._samples_every == 0
        samples = await self._write(model.config, model.parameters, number) if wanted else None
        return Step(number, float(loss), done, samples)


def with_state(parameters: Parameters) -> tuple[Parameters, Any]:
    """Return parameters, and the state of the optimizer before the first step."""
    return parameters, optimizer(0.0).init(parameters)


async def train(
    model: Model,
    texts: Sequence[bytes],
    mesh: devices.DeviceMesh,
    report: Callable[[Step], None],
    *,
    seconds: float = math.inf,
    steps: int | None = None,
    checkpoint: ps.Checkpoint | None = None,
    samples_every: int | None = None,
) -> None:
    """Let a model learn from texts for a number of seconds or steps; `report` is called with each step."""
    trainer, length = Trainer(model, mesh, seconds, steps, samples_every), model.config.max_position_embeddings

    @ps.graph
    async def learn() -> AsyncIterator[Step]:
        """Learn from all pieces, in another order in each epoch, without an end."""
        pieces = cut(model.vocabulary, texts, length)
        return ps.map_each(trainer, feed(pieces, length, mesh, shuffle_seed=SEED, epochs=None))

    async with engine.stream(learn(), checkpoint=checkpoint) as done:
        async for step in done:
            if step.done == 1:
                return
            if step.samples is not None:
                step = step._replace(samples=await devices.to_host(step.samples))
            report(step)


@ps.node(runs_on="thread")
def cut(vocabulary: Vocabulary, texts: Sequence[bytes], length: int) -> Pieces:
    """Encode all texts as tokens, before the training: 30 MB take some seconds."""
    return Pieces([vocabulary.encode(text) for text in texts], length)


async def judge(model: Model, texts: Sequence[bytes], mesh: devices.DeviceMesh) -> float:
    """Return the mean loss for a byte of the texts, in nats; the model sees only the piece before a byte."""
    bound = devices.actor(mesh).bind(measure)
    length = model.config.max_position_embeddings

    @ps.node
    async def measured(batch: data.Packed) -> tuple[float, int]:
        nats, count = await bound(model.config, model.parameters, model.vocabulary.sizes, batch)
        return float(nats), int(count)

    @ps.graph
    async def losses() -> AsyncIterator[tuple[float, int]]:
        pieces = cut(model.vocabulary, texts, length)
        return feed(pieces, length, mesh, shuffle_seed=None, epochs=1) >> measured

    async with engine.stream(losses()) as batches:
        found = [batch async for batch in batches]
    return sum(nats for nats, _ in found) / sum(count for _, count in found)


def complete(model: Model, prompt: bytes, count: int, temperature: float = 0.5) -> bytes:
    """Return a prompt, completed by the model with `count` tokens."""
    config, length = model.config, model.config.max_position_embeddings
    llama, allowed = Llama(config, length), np.zeros(config.vocab_size, bool)
    allowed[START + 1 : len(model.vocabulary.sizes)] = True
    sampling = Sampling(
        np.array([SEED], np.uint32), np.array([temperature], np.float32), np.zeros(1, np.int32), np.ones(1, np.float32)
    )

    def chosen(logits: jax.Array, place: Array) -> jax.Array:
        return sample(jnp.where(allowed, logits, -jnp.inf), place, sampling).tokens

    @partial(jax.jit, donate_argnums=1)
    def read(parameters: Parameters, state: State, row: Array, size: Array, place: Array) -> tuple[State, jax.Array]:
        first = np.zeros(1, np.int32)
        state, logits = llama.prefill(parameters, state, row, first, first, size)
        return state, chosen(logits, place)

    @partial(jax.jit, donate_argnums=1)
    def go_on(parameters: Parameters, state: State, last: Array, at: Array, place: Array) -> tuple[State, jax.Array]:
        state, logits = llama.step(parameters, state, last, at)
        return state, chosen(logits, place)

    parameters, state, last, at = transposed(model.parameters), llama.state(1), np.zeros(1, np.int32), length
    tokens = [START, *model.vocabulary.encode(prompt).tolist()]
    for _ in range(count):
        place = np.array([len(tokens)], np.int32)
        if at == length:  # at first, and when the context is full: then only the newer half is kept
            seen = tokens[-(length // 2) :]
            row = np.array([seen + [START] * (length - len(seen))], np.int32)
            state, last = read(parameters, state, row, np.array([len(seen)], np.int32), place)
            at = len(seen)
        else:
            state, last = go_on(parameters, state, last, np.array([at], np.int32), place)
            at += 1
        tokens.append(int(last[0]))
    return model.vocabulary.decode(tokens)


# --- A trigram model to compare with ---


def trigram_loss(learned: Sequence[bytes], held_out: Sequence[bytes]) -> float:
    """Return the mean loss for a byte of held out texts, in nats, of a model that sees the two bytes before.

    The model mixes four estimates: the frequency of a byte after the two bytes before, after the one byte before, the
    frequency of the byte at all, and 1/256. A context that was followed by many different bytes gets a smaller weight:
    Witten and Bell, 1991, The zero-frequency problem.
    """
    asked = np.concatenate([_with_context(text) for text in held_out], axis=1)
    likelihoods: Numbers = np.full(asked.shape[1], 1 / BYTES)
    for order in range(3):
        counts = _count(learned, order)
        context, byte = np.divmod(_codes(asked[2 - order :]), BYTES)
        totals: Numbers = counts.sum(axis=1)[context]
        kinds: Numbers = np.count_nonzero(counts, axis=1)[context]
        mixed: Numbers = (counts[context, byte] + kinds * likelihoods) / np.maximum(totals + kinds, 1)
        likelihoods = np.where(totals > 0, mixed, likelihoods)
    return float(-np.log(likelihoods).mean())


def _count(texts: Sequence[bytes], order: int) -> Numbers:
    """Return how often each byte followed each `order` bytes: [256 ** order, 256]."""
    counts: Numbers = np.zeros(BYTES ** (order + 1), np.int64)
    for some in range(0, len(texts), 100):  # some texts at a time: the codes take 32 bytes for each byte of text
        seen = np.concatenate([_with_context(text) for text in texts[some : some + 100]], axis=1)
        counts += np.bincount(_codes(seen[2 - order :]), minlength=counts.shape[0])
    return counts.reshape(-1, BYTES)


def _with_context(text: bytes) -> Numbers:
    """Return three rows: the bytes of a text in the last row, and above each byte the two bytes before it, or zeros."""
    padded = np.frombuffer(bytes(2) + text, np.uint8)
    return np.stack([padded[:-2], padded[1:-1], padded[2:]])


def _codes(rows: Numbers) -> Numbers:
    """Return one number for each column of bytes."""
    codes: Numbers = np.zeros(rows.shape[1], np.int64)
    for row in rows:
        codes = codes * BYTES + row
    return codes


# --- Files ---


def save(model: Model, folder: Path) -> None:
    """Write a model for transformers: `config.json`, `model.safetensors` in float16, and `tokenizer.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": START,
        "eos_token_id": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        **asdict(model.config),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: np.asarray(value).astype(np.float16) for name, value in model.parameters.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.vocabulary.tokenizer.save(str(folder / "tokenizer.json"))


def load(folder: Path) -> Model:
    """Read a model that `save` has written.

    Raises:
        ValueError: The tensors do not fit the config.
    """
    read: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = Config(**{field.name: read[field.name] for field in fields(Config)})
    tensors: dict[str, Numbers] = load_file(folder / "model.safetensors")
    if {name: tensor.shape for name, tensor in tensors.items()} != dict(config.shapes()):
        raise ValueError(f"{folder}: model.safetensors has other tensors than config.json says")
    vocabulary = Vocabulary(Tokenizer.from_file(str(folder / "tokenizer.json")))
    return Model(config, vocabulary, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})


# --- The program ---


class Report:
    """Prints the mean loss of the last steps now and then, and the first of the samples."""

    def __init__(self, every_seconds: float, vocabulary: Vocabulary) -> None:
        self._every_seconds = every_seconds
        self._vocabulary = vocabulary
        self._began = self._told = perf_counter()
        self._losses: list[float] = []

    def __call__(self, step: Step) -> None:
        now = perf_counter()
        self._losses.append(step.loss)
        if step.number == 0 or now - self._told >= self._every_seconds:
            mean = sum(self._losses) / len(self._losses)
            print(f"{now - self._began:5.0f} s  step {step.number:5}  {mean:.3f} nats a byte", flush=True)
            self._told, self._losses = now, []
        if step.samples is not None:
            known = [token for token in step.samples.tokens[0].tolist() if token < len(self._vocabulary.sizes)]
            surprise = -float(step.samples.log_probabilities.mean())
            text = self._vocabulary.decode(known).decode(errors="replace")
            print(f"{now - self._began:5.0f} s  it writes, at {surprise:.2f} nats a token: {text!r}", flush=True)


def main() -> int:
    """Train, judge, save and complete, as the options say."""
    parser = argparse.ArgumentParser(description="Train a small language model on sources of Python.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--seconds", type=float, metavar="N", help="how long to train; 240, or 0 with --load")
    parser.add_argument("--steps", type=int, metavar="N", help="how many steps to train, instead of a time")
    parser.add_argument(
        "--layers", type=int, default=Config().num_hidden_layers, metavar="N", help="layers of a new model"
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many devices the CPU simulates")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save snapshots there, and go on from them")
    parser.add_argument(
        "--samples", action="store_true", help="every 50 steps, let the model write 64 texts, and show the first"
    )
    parser.add_argument("--profile", action="store_true", help="show a profile, with the step that limits the training")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the model")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="begin with this model")
    parser.add_argument("--complete", metavar="PROMPT", help="complete this text")
    options = parser.parse_args()
    if options.devices < 1 or ROWS % options.devices:
        parser.error(f"--devices must divide the {ROWS} rows of a batch")
    if options.devices > 1:
        jax.config.update("jax_num_cpu_devices", options.devices)  # type: ignore[no-untyped-call]
    platform = "cpu" if options.devices > 1 else "auto"
    mesh = devices.DeviceMesh(shape=(options.devices,), axis_names=("data",), device=platform)
    seconds = options.seconds if options.seconds is not None else 0 if options.load else 240

    trains = seconds > 0 or options.steps
    corpus = read_sources(options.folder) if trains or not options.load else Corpus([], [])
    if trains and not (corpus.learned and corpus.held_out):
        parser.error(f"{options.folder} has too few sources of Python")
    if options.load:
        model = load(options.load)
    else:
        config = Config(num_hidden_layers=options.layers)
        model = create_model(config, Vocabulary.learn(corpus.learned[::8], config.vocab_size))
    print(f"{sum(math.prod(shape) for _, shape in model.config.shapes()):,} parameters")
    if trains:
        sizes = [sum(map(len, texts)) for texts in corpus]
        print(f"{sizes[0]:,} bytes of {len(corpus.learned):,} files to learn from, {sizes[1]:,} held out", flush=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for background jobs
        signal.signal(signal.SIGTERM, lambda _signal, _frame: signal.raise_signal(signal.SIGINT))
        stopped = False
        with telemetry.profile() if options.profile else nullcontext() as profile:
            # About 200 records, which are pieces of files, are in 60 steps, or half a minute.
            checkpoint = None if options.checkpoint is None else ps.Checkpoint(options.checkpoint, every_values=50)
            report, samples = Report(10, model.vocabulary), 50 if options.samples else None
            work = train(
                model,
                corpus.learned,
                mesh,
                report,
                seconds=seconds,
                steps=options.steps,
                checkpoint=checkpoint,
                samples_every=samples,
            )
            try:
                asyncio.run(work)
            except KeyboardInterrupt:
                stopped = True
        if profile is not None:
            print(f"\n{profile}\n")
        if options.save:
            save(model, options.save)
            print(f"saved in {options.save}", flush=True)
        if stopped:
            return 130
        print("now the files that were held out, for a minute or so", flush=True)
        loss = asyncio.run(judge(model, corpus.held_out, mesh))
        print(f"held out: {loss:.3f} nats a byte; a trigram model: {trigram_loss(*corpus):.3f}", flush=True)
    if options.complete is not None:
        print(complete(model, options.complete.encode(), 300).decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
