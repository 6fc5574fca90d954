"""Train a language model of the Llama kind on the standard library's sources, byte by byte; and let it write on.

    python examples/language_model.py                                 four minutes, then its loss beside a trigram model
    python examples/language_model.py --devices 4 --profile           on a mesh of simulated devices; says what limits
    python examples/language_model.py --seconds 3600 --save model     writes what Hugging Face's transformers read
    python examples/language_model.py --load model --complete "def main("

The feed is shuffled over all files, packed into rows, batched, and on the mesh before it is needed. The model is a
Llama as in transformers, with bytes for tokens: its parameters have the names and shapes that they have in the file.

- Touvron et al., 2023, LLaMA: https://arxiv.org/abs/2302.13971
- Zhang and Sennrich, 2019, RMSNorm: https://arxiv.org/abs/1910.07467
- Su et al., 2021, RoPE: https://arxiv.org/abs/2104.09864
- Ainslie et al., 2023, grouped attention: https://arxiv.org/abs/2305.13245
- Shazeer, 2020, SwiGLU: https://arxiv.org/abs/2002.05202
"""

# The types of JAX, optax, safetensors and tokenizers leave parameters of some functions open, or are missing.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import argparse
import asyncio
import json
import math
import sys
import sysconfig
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.tree_util import register_static
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, processors

import penstock as ps
from penstock import data, devices, engine, telemetry
from penstock.devices import Array

START = 0  # comes before every piece of text; no source of Python has this byte
BYTES = 256
ROWS = 8  # of a batch; in a few minutes, many small steps learn more than few large ones
QUERIES = 64  # that attend at a time
SEED = 0

Text = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]
Parameters = dict[str, Array]


# --- What it learns from ---


class Corpus(NamedTuple):
    """Files to learn from, and files to be judged by."""

    learned: list[Text]
    held_out: list[Text]


def read_sources(folder: Path) -> Corpus:
    """Read the sources below a folder. Which are held out, one in twenty, depends on their names alone."""
    corpus = Corpus([], [])
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        text = np.frombuffer(path.read_bytes(), np.uint8)
        if "site-packages" not in name and text.size:
            (corpus.held_out if zlib.crc32(name.encode()) % 20 == 0 else corpus.learned).append(text)
    return corpus


class Pieces:
    """Texts, cut into pieces that fill a row at most. START begins each, so that every byte of a text is predicted."""

    def __init__(self, texts: Sequence[Text], length: int) -> None:
        self._length = length - 1
        self._texts = texts
        self._places = [(which, at) for which, text in enumerate(texts) for at in range(0, len(text), self._length)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Text:
        which, at = self._places[index]
        return np.insert(self._texts[which][at : at + self._length], 0, START)


def feed(
    pieces: Pieces, length: int, mesh: devices.DeviceMesh, *, shuffle_seed: int | None, epochs: int | None
) -> AsyncIterator[data.Packed]:
    """Return the batches of a graph, [ROWS, length], their rows split over a mesh; the last is filled with padding."""

    def stacked(rows: list[data.Packed]) -> data.Packed:
        padding = data.Packed(*map(np.zeros_like, rows[0]))
        batch: data.Packed = data.collate(rows + [padding] * (ROWS - len(rows)))
        return batch

    records = data.order(pieces, shuffle_seed=shuffle_seed, epochs=epochs) >> data.read(pieces, runs_on="loop")
    rows = records >> data.packed(length)
    return rows >> data.batched(ROWS, collate=stacked) >> data.to_device(mesh, jax.P("data"))  # type: ignore[no-untyped-call]


# --- The model ---


@register_static  # it may be an argument of what is compiled, and is no array
@dataclass(frozen=True)
class Config:
    """The shapes of a model, under the names that transformers give them; by default, 2.2 million parameters."""

    hidden_size: int = 192
    intermediate_size: int = 448
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
        width, hidden = self.hidden_size, self.intermediate_size
        narrow = self.num_key_value_heads * self.head_size
        yield "model.embed_tokens.weight", (BYTES, width)
        for number in range(self.num_hidden_layers):
            layer = f"model.layers.{number}"
            yield f"{layer}.input_layernorm.weight", (width,)
            yield f"{layer}.self_attn.q_proj.weight", (width, width)
            yield f"{layer}.self_attn.k_proj.weight", (narrow, width)
            yield f"{layer}.self_attn.v_proj.weight", (narrow, width)
            yield f"{layer}.self_attn.o_proj.weight", (width, width)
            yield f"{layer}.post_attention_layernorm.weight", (width,)
            yield f"{layer}.mlp.gate_proj.weight", (hidden, width)
            yield f"{layer}.mlp.up_proj.weight", (hidden, width)
            yield f"{layer}.mlp.down_proj.weight", (width, hidden)
        yield "model.norm.weight", (width,)


@dataclass
class Model:
    """Its shapes, and parameters of float32, which each step of training replaces."""

    config: Config
    parameters: Parameters


def create_model(config: Config) -> Model:
    """Return a model before any training."""
    random = np.random.default_rng(SEED)
    parameters: Parameters = {}
    for name, shape in config.shapes():
        if len(shape) == 1:
            parameters[name] = np.ones(shape, np.float32)
            continue
        scale = 0.02 if "embed" in name else shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:  # what is added to the sum of all layers
            scale /= (2 * config.num_hidden_layers) ** 0.5
        parameters[name] = random.normal(0, scale, shape).astype(np.float32)
    return Model(config, parameters)


def predict(config: Config, parameters: Parameters, batch: data.Packed) -> jax.Array:
    """Return a score for each byte to come next: float32 [rows, length, 256]. Sequences do not see each other."""
    tokens, segment_ids, positions = (jnp.asarray(each) for each in batch)
    rows, length = tokens.shape
    rates = config.rope_theta ** (-jnp.arange(0, config.head_size, 2) / config.head_size)
    angles = positions[:, None, :, None] * rates  # [rows, 1, length, head / 2]
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    sees = (segment_ids[:, None, :, None] == segment_ids[:, None, None, :]) & jnp.tri(length, dtype=bool)

    def normalised(values: jax.Array, name: str) -> jax.Array:
        mean_square = jnp.square(values).mean(axis=-1, keepdims=True)
        return values * jax.lax.rsqrt(mean_square + config.rms_norm_eps) * parameters[f"{name}.weight"]

    def mapped(values: jax.Array, name: str) -> jax.Array:
        return values @ parameters[f"{name}.weight"].T

    def heads(values: jax.Array, name: str) -> jax.Array:
        """Return [rows, heads, length, head]."""
        return mapped(values, name).reshape(rows, length, -1, config.head_size).swapaxes(1, 2)

    def rotated(values: jax.Array) -> jax.Array:
        """Turn pairs of numbers by their place in the sequence; a pair is i and i + head / 2, as in transformers."""
        first, second = jnp.split(values, 2, axis=-1)
        return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)

    def attended(values: jax.Array, name: str) -> jax.Array:
        queries, keys = rotated(heads(values, f"{name}.q_proj")), rotated(heads(values, f"{name}.k_proj"))
        contents = heads(values, f"{name}.v_proj")
        mixed: list[jax.Array] = []
        # Some queries at a time, and only what is before their end: on a CPU three times as fast as all at once.
        for begin in range(0, length, QUERIES):
            end = min(begin + QUERIES, length)
            # Neighbouring heads share keys and contents, so their queries are rows of one product.
            some = queries[:, :, begin:end].reshape(rows, config.num_key_value_heads, -1, config.head_size)
            scores = (some @ keys[:, :, :end].swapaxes(2, 3)).reshape(rows, -1, end - begin, end)
            masked = jnp.where(sees[:, :, begin:end, :end], scores * config.head_size**-0.5, np.finfo(np.float32).min)
            shares: jax.Array = jax.nn.softmax(masked, axis=-1)
            taken = shares.reshape(*some.shape[:3], end) @ contents[:, :, :end]
            mixed.append(taken.reshape(rows, -1, end - begin, config.head_size))
        return mapped(jnp.concatenate(mixed, axis=2).swapaxes(1, 2).reshape(values.shape), f"{name}.o_proj")

    # A product, and not a look-up, whose gradient XLA adds up row by row on a CPU.
    embedding = jnp.asarray(parameters["model.embed_tokens.weight"])
    hidden = jax.nn.one_hot(tokens.reshape(-1), BYTES) @ embedding  # [rows * length, width]
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        hidden += attended(normalised(hidden, f"{layer}.input_layernorm"), f"{layer}.self_attn")
        inputs = normalised(hidden, f"{layer}.post_attention_layernorm")
        gate = jax.nn.silu(mapped(inputs, f"{layer}.mlp.gate_proj"))
        hidden += mapped(gate * mapped(inputs, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return (normalised(hidden, "model.norm") @ embedding.T).reshape(rows, length, BYTES)


def measure(config: Config, parameters: Parameters, batch: data.Packed) -> tuple[jax.Array, jax.Array]:
    """Return the nats that a batch costs, and how many bytes it has: all but START and padding."""
    likelihoods = jax.nn.log_softmax(predict(config, parameters, batch)[:, :-1])
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    counts = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    found = (likelihoods * jax.nn.one_hot(tokens[:, 1:], BYTES)).sum(axis=-1)
    return -(found * counts).sum(), counts.sum()


# --- Training ---

# After 300 steps of 1 KB, a model of 0.4 million parameters was at 1.92 nats a byte, with 3e-3 at 2.14, and with AdamW
# alone at 2.26.
RATE = 1e-2
WARM_UP_STEPS = 20


def optimizer(rate: float) -> Any:
    """Return Muon (Jordan, 2024), which makes the update of a matrix orthogonal; other parameters have AdamW."""
    return optax.contrib.muon(
        rate, consistent_rms=0.2, weight_decay=0.1, adam_b2=0.95, muon_weight_dimension_numbers=_kinds
    )


def _kinds(parameters: Any) -> Any:
    """Return for each parameter its axes of outputs and inputs if it is a map, else None."""
    return {name: optax.contrib.MuonDimensionNumbers(1, 0) if "proj" in name else None for name in parameters}


def train_step(
    config: Config, parameters: Parameters, optimizer_state: Any, batch: data.Packed, rate: float
) -> tuple[Parameters, Any, jax.Array]:
    """Return parameters and state after a step at this rate of learning, and the loss before it, in nats a byte."""

    def mean_loss(parameters: Parameters) -> jax.Array:
        nats, count = measure(config, parameters, batch)
        return nats / jnp.maximum(count, 1)

    loss, gradients = jax.value_and_grad(mean_loss)(parameters)
    updates, optimizer_state = optimizer(rate).update(gradients, optimizer_state, parameters)
    updated: Any = optax.apply_updates(parameters, updates)
    return updated, optimizer_state, loss


class Step(NamedTuple):
    """One step: how many came before it, its loss in nats a byte, and how much of the whole is done, up to 1."""

    number: int
    loss: float
    done: float


@ps.node
class Trainer:
    """Learns from batches, one at a time, until time or steps are used up; the rate follows a cosine from 1 to 0."""

    def __init__(self, model: Model, mesh: devices.DeviceMesh, seconds: float, steps: int | None) -> None:
        self._model = model
        self._mesh = mesh
        self._seconds = seconds
        self._steps = steps

    async def __aenter__(self) -> Self:
        device = devices.actor(self._mesh)
        # A step takes about half a second on two cores, so that waiting for it costs nothing, and the clock is right.
        self._step = device.bind(train_step, donate_argnums=(1, 2))
        self._model.parameters, self._state = await device.run(with_state, self._model.parameters)
        self._number = 0
        self._began = perf_counter()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self._state

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        leaves = jax.tree.leaves(self._state)
        seconds = perf_counter() - self._began
        return {"parameters": self._model.parameters, "optimizer": leaves, "number": self._number, "seconds": seconds}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._model.parameters, self._number = state["parameters"], state["number"]
        self._state = jax.tree.unflatten(jax.tree.structure(self._state), state["optimizer"])
        self._began = perf_counter() - state["seconds"]

    async def __call__(self, batch: data.Packed) -> Step:
        number, model = self._number, self._model
        done = min(number / self._steps if self._steps else (perf_counter() - self._began) / self._seconds, 1)
        rate = RATE * min(1, (number + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * done)) / 2
        model.parameters, self._state, loss = await self._step(model.config, model.parameters, self._state, batch, rate)
        self._number += 1
        return Step(number, float(loss), done)


def with_state(parameters: Parameters) -> tuple[Parameters, Any]:
    """Return parameters, and the state of the optimizer before the first step."""
    return parameters, optimizer(0.0).init(parameters)


async def train(
    model: Model,
    texts: Sequence[Text],
    mesh: devices.DeviceMesh,
    report: Callable[[Step], None],
    *,
    seconds: float = math.inf,
    steps: int | None = None,
    checkpoint: ps.Checkpoint | None = None,
) -> None:
    """Let a model learn from texts for so many seconds, or so many steps; `report` hears of each step."""
    trainer, length = Trainer(model, mesh, seconds, steps), model.config.max_position_embeddings

    @ps.graph
    async def learn(pieces: Pieces) -> AsyncIterator[Step]:
        """Learn from all pieces, in another order in each epoch, without an end."""
        return ps.map_each(trainer, feed(pieces, length, mesh, shuffle_seed=SEED, epochs=None))

    async with engine.stream(learn(Pieces(texts, length)), checkpoint=checkpoint) as done:
        async for step in done:
            if step.done == 1:
                return
            report(step)


async def judge(model: Model, texts: Sequence[Text], mesh: devices.DeviceMesh) -> float:
    """Return what a byte of texts costs, in nats; no byte sees more of a text than its piece."""
    bound = devices.actor(mesh).bind(measure)
    length = model.config.max_position_embeddings

    @ps.node
    async def measured(batch: data.Packed) -> tuple[float, int]:
        nats, count = await bound(model.config, model.parameters, batch)
        return float(nats), int(count)

    @ps.graph
    async def losses(pieces: Pieces) -> AsyncIterator[tuple[float, int]]:
        return feed(pieces, length, mesh, shuffle_seed=None, epochs=1) >> measured

    async with engine.stream(losses(Pieces(texts, length))) as batches:
        found = [batch async for batch in batches]
    return sum(nats for nats, _ in found) / sum(count for _, count in found)


def complete(model: Model, prompt: bytes, count: int, temperature: float = 0.7) -> bytes:
    """Return a prompt with so many bytes after it, as the model would write on."""
    length = model.config.max_position_embeddings
    scores: Callable[..., jax.Array] = jax.jit(predict)
    random = np.random.default_rng(SEED)
    tokens = [START, *prompt]
    for _ in range(count):
        # Rows of one length, so that one program is enough: what comes after the last byte changes nothing before it.
        seen = tokens[-length:]
        row = np.zeros((1, length), np.int32)
        row[0, : len(seen)] = seen
        places = np.arange(length, dtype=np.int32)[None]
        batch = data.Packed(row, np.ones_like(row), places)
        found: Numbers = np.asarray(scores(model.config, model.parameters, batch)[0, len(seen) - 1])
        likely = np.exp((found - found.max()).astype(np.float64) / temperature)
        likely[START] = 0
        tokens.append(int(random.choice(BYTES, p=likely / likely.sum())))
    return bytes(tokens[1:])


# --- What it is compared with ---


def trigram_loss(learned: Sequence[Text], held_out: Sequence[Text]) -> float:
    """Return what a byte of held out texts costs a model of the two bytes before it, in nats.

    How often a byte followed two others is mixed with how often it followed one, that with how often it came at all,
    and that with 1/256. What was followed by many different bytes trusts less in itself: Witten and Bell, 1991, The
    zero-frequency problem.
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


def _count(texts: Sequence[Text], order: int) -> Numbers:
    """Return how often each byte followed each `order` bytes: [256 ** order, 256]."""
    counts: Numbers = np.zeros(BYTES ** (order + 1), np.int64)
    for some in range(0, len(texts), 100):  # a few at a time: the codes take 32 bytes for each byte of text
        seen = np.concatenate([_with_context(text) for text in texts[some : some + 100]], axis=1)
        counts += np.bincount(_codes(seen[2 - order :]), minlength=counts.shape[0])
    return counts.reshape(-1, BYTES)


def _with_context(text: Text) -> Numbers:
    """Return the bytes of a text in the last of three rows, above each the two before it; START before the first."""
    padded = np.concatenate([np.full(2, START), text])
    return np.stack([padded[:-2], padded[1:-1], padded[2:]])


def _codes(rows: Numbers) -> Numbers:
    """Return one number for each column of bytes."""
    codes: Numbers = np.zeros(rows.shape[1], np.int64)
    for row in rows:
        codes = codes * BYTES + row
    return codes


# --- Files ---


def save(model: Model, folder: Path) -> None:
    """Write a model as transformers read it: `config.json`, `model.safetensors` in float16, and `tokenizer.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": BYTES,
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
    # No character is in the vocabulary, so each falls back to its bytes, whose numbers are themselves.
    names = [f"<0x{byte:02X}>" for byte in range(BYTES)]
    tokenizer = Tokenizer(models.BPE({name: byte for byte, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{names[START]} $A", special_tokens=[(names[START], START)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def load(folder: Path) -> Model:
    """Read a model that `save` has written.

    Raises:
        ValueError: Its tensors are not those of its config.
    """
    read: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = Config(**{field.name: read[field.name] for field in fields(Config)})
    tensors: dict[str, Numbers] = load_file(folder / "model.safetensors")
    if {name: tensor.shape for name, tensor in tensors.items()} != dict(config.shapes()):
        raise ValueError(f"{folder}: model.safetensors has other tensors than config.json says")
    return Model(config, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})


# --- The program ---


class Report:
    """Prints the mean loss of the last steps, now and then."""

    def __init__(self, every_seconds: float) -> None:
        self._every_seconds = every_seconds
        self._began = self._told = perf_counter()
        self._losses: list[float] = []

    def __call__(self, step: Step) -> None:
        now = perf_counter()
        self._losses.append(step.loss)
        if step.number == 0 or now - self._told >= self._every_seconds:
            mean = sum(self._losses) / len(self._losses)
            print(f"{now - self._began:5.0f} s  step {step.number:5}  {mean:.3f} nats a byte", flush=True)
            self._told, self._losses = now, []


def main() -> int:
    """Train, judge, save and complete, as far as it is asked for."""
    parser = argparse.ArgumentParser(description="Train a small language model on sources of Python.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--seconds", type=float, metavar="N", help="how long to train; 240, or 0 with --load")
    parser.add_argument("--steps", type=int, metavar="N", help="how many steps to train, instead")
    parser.add_argument("--layers", type=int, default=Config().num_hidden_layers, metavar="N", help="of a new model")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many devices the CPU simulates")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save it as it trains, and go on from there")
    parser.add_argument("--profile", action="store_true", help="say what limits the training")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the model")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="begin with this model")
    parser.add_argument("--complete", metavar="PROMPT", help="write on from here")
    options = parser.parse_args()
    if options.devices < 1 or ROWS % options.devices:
        parser.error(f"--devices must divide the {ROWS} rows of a batch")
    if options.devices > 1:
        jax.config.update("jax_num_cpu_devices", options.devices)  # type: ignore[no-untyped-call]
    platform = "cpu" if options.devices > 1 else "auto"
    mesh = devices.DeviceMesh(shape=(options.devices,), axis_names=("data",), device=platform)
    seconds = options.seconds if options.seconds is not None else 0 if options.load else 240

    model = load(options.load) if options.load else create_model(Config(num_hidden_layers=options.layers))
    print(f"{sum(math.prod(shape) for _, shape in model.config.shapes()):,} parameters")
    if seconds > 0 or options.steps:
        corpus = read_sources(options.folder)
        if not corpus.learned or not corpus.held_out:
            parser.error(f"{options.folder} has too few sources of Python")
        sizes = [sum(map(len, texts)) for texts in corpus]
        print(f"{sizes[0]:,} bytes of {len(corpus.learned):,} files to learn from, {sizes[1]:,} held out")
        with telemetry.profile() if options.profile else nullcontext() as profile:
            # About 200 records, which are pieces of files, are in 60 steps, or half a minute.
            checkpoint = None if options.checkpoint is None else ps.Checkpoint(options.checkpoint, every=200)
            work = train(
                model, corpus.learned, mesh, Report(10), seconds=seconds, steps=options.steps, checkpoint=checkpoint
            )
            asyncio.run(work)
        if profile is not None:
            print(f"\n{profile}\n")
        if options.save:
            save(model, options.save)
        print("now the files that were held out, for a minute or two", flush=True)
        loss = asyncio.run(judge(model, corpus.held_out, mesh))
        print(f"held out: {loss:.3f} nats a byte; a trigram model: {trigram_loss(*corpus):.3f}", flush=True)
    if options.complete is not None:
        print(complete(model, options.complete.encode(), 300).decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
