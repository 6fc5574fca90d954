"""The language model: it learns, it reads and writes files of transformers, and its trigram baseline is correct."""

import json
import math
import re
import signal
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from examples import language_model as lm
from examples.chat.model import Config, Llama
from penstock import data, devices
from tests.examples import programs

TINY = Config(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=80,  # more than one block of queries, and no multiple of a block
)  # fmt: skip
SHALLOW = replace(TINY, num_hidden_layers=1)  # its training step compiles in half the time
MESH = devices.DeviceMesh(shape=(1,), axis_names=("data",))


PROGRAM = Path(lm.__file__)
SOURCES = [b"def main() -> int:\n    return 0\n" * count for count in range(1, 40)]
VOCABULARY = lm.Vocabulary.learn([*SOURCES, PROGRAM.read_bytes()], TINY.vocab_size)


def text(words: str) -> lm.Tokens:
    return VOCABULARY.encode(words.encode())


def after_start(words: str) -> lm.Tokens:
    return np.insert(text(words), 0, lm.START)


def row_of(*sequences: lm.Tokens) -> data.Packed:
    """Return a batch of one row with these sequences, and padding after them."""
    row = data.Packed(*(np.zeros((1, TINY.max_position_embeddings), np.int32) for _ in range(3)))
    begin = 0
    for number, sequence in enumerate(sequences, 1):
        here = slice(begin, begin := begin + len(sequence))
        row.tokens[0, here], row.segment_ids[0, here], row.positions[0, here] = sequence, number, range(len(sequence))
    return row


# --- Tokens ---


@given(st.binary() | st.text().map(str.encode))
@example(b"print('<s>')")  # names the beginning
def test_any_bytes_are_tokens_and_come_back(content: bytes) -> None:
    tokens = VOCABULARY.encode(content)
    assert VOCABULARY.decode(tokens) == VOCABULARY.decode([lm.START, *tokens]) == content
    assert VOCABULARY.sizes[tokens].sum() == len(content)
    assert lm.START not in tokens


def test_what_often_comes_together_is_one_token_and_always_the_same() -> None:
    assert len(text(" return")) == 1
    assert len(VOCABULARY.sizes) == TINY.vocab_size
    again = lm.Vocabulary.learn([*SOURCES, PROGRAM.read_bytes()], TINY.vocab_size)
    assert again.tokenizer.to_str() == VOCABULARY.tokenizer.to_str()


def test_pieces_are_the_text_and_each_has_a_beginning() -> None:
    pieces = lm.Pieces([np.arange(1, 8, dtype=np.uint16), np.arange(8, 11, dtype=np.uint16)], 4)
    found = [pieces[index].tolist() for index in range(len(pieces))]
    assert found == [[lm.START, 1, 2, 3], [lm.START, 4, 5, 6], [lm.START, 7], [lm.START, 8, 9, 10]]


# --- Training ---


@pytest.mark.long  # compiles two trainings
async def test_samples_are_of_the_parameters_of_their_step_and_change_nothing_in_the_training() -> None:
    runs: list[tuple[lm.Model, list[lm.Step]]] = []
    for samples_every in (None, 3):
        model, steps = lm.create_model(SHALLOW, VOCABULARY), list[lm.Step]()
        # The last step learns nothing.
        await lm.train(model, SOURCES, MESH, steps.append, steps=6, samples_every=samples_every)
        runs.append((model, steps))
    (alone, without), (model, steps) = runs
    assert [step.loss for step in steps] == [step.loss for step in without]
    for name, value in alone.parameters.items():
        np.testing.assert_array_equal(model.parameters[name], value, err_msg=name)
    found = [step.samples for step in steps if step.samples is not None]
    assert [step.number for step in steps if step.samples is not None] == [2, 5]
    assert not np.array_equal(found[0].tokens, found[1].tokens)
    tokens = np.insert(np.asarray(found[1].tokens), 0, lm.START, axis=1)
    places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    scores = lm.predict(SHALLOW, model.parameters, data.Packed(tokens, np.ones_like(tokens), places))[:, :-1]
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(scores)), tokens[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(found[1].log_probabilities, expected, atol=1e-5)


def test_samples_take_the_memory_of_one_cache_and_no_copy_of_the_weights() -> None:
    config = Config(num_hidden_layers=2)
    parameters = {name: np.zeros(shape, np.float32) for name, shape in config.shapes()}
    weights = sum(math.prod(shape) for _, shape in config.shapes()) * 4
    cache = jax.eval_shape(lambda: Llama(config, 1 + lm.SAMPLE_TOKENS).state(lm.SAMPLES))
    memory: Any = jax.jit(lm.write_samples).lower(config, parameters, 0).compile().memory_analysis()
    assert memory.temp_size_in_bytes < sum(each.size * 4 for each in jax.tree.leaves(cache)) + weights / 2


async def test_every_byte_of_a_text_is_judged_once() -> None:
    model = lm.create_model(TINY, VOCABULARY)
    texts = [b"x = 1\n" * 40, b"y", b"pass\n" * 31, b"\xff\xfe"]
    nats = count = 0.0
    pieces = lm.Pieces([VOCABULARY.encode(each) for each in texts], TINY.max_position_embeddings)
    by_itself = jax.jit(partial(lm.measure, TINY))
    for index in range(len(pieces)):
        piece_nats, piece_count = by_itself(model.parameters, VOCABULARY.sizes, row_of(pieces[index]))
        nats, count = nats + float(piece_nats), count + int(piece_count)
    assert count == sum(map(len, texts))
    assert await lm.judge(model, texts, MESH) == pytest.approx(nats / count, rel=1e-5)


async def test_a_loss_is_that_of_a_byte() -> None:
    model = lm.create_model(TINY, VOCABULARY)
    model.parameters["model.embed_tokens.weight"] = np.zeros((TINY.vocab_size, TINY.hidden_size), np.float32)
    words = "    return self.weights  # größer\n"
    guessing = len(text(words)) * math.log(TINY.vocab_size) / len(words.encode())
    assert await lm.judge(model, [words.encode()], MESH) == pytest.approx(guessing, rel=1e-5)


def test_files_are_held_out_by_their_names(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"m{number}.py").write_text(f"x = {number}")
    learned, held_out = lm.read_sources(tmp_path)
    assert len(learned) + len(held_out) == 200
    assert 1 <= len(held_out) <= 30
    (tmp_path / "m0.py").unlink()
    assert set(lm.read_sources(tmp_path).held_out) == set(held_out) - {b"x = 0"}


# --- The model ---


def test_sequences_of_a_row_do_not_see_each_other_and_no_token_sees_what_follows() -> None:
    parameters = lm.create_model(TINY, VOCABULARY).parameters
    first, second = after_start("import this"), after_start("while True:\n    pass\n" * 2)
    together = np.asarray(lm.predict(TINY, parameters, row_of(first, second)))[0]
    for sequence, found in ((first, together), (second, together[len(first) :])):
        alone = np.asarray(lm.predict(TINY, parameters, row_of(sequence)))[0]
        np.testing.assert_allclose(found[: len(sequence)], alone[: len(sequence)], atol=1e-5)
    cut = np.asarray(lm.predict(TINY, parameters, row_of(second[:9])))[0]
    np.testing.assert_allclose(cut[:9], together[len(first) : len(first) + 9], atol=1e-5)
    changed = first.copy()
    changed[1] += 1
    other = np.asarray(lm.predict(TINY, parameters, row_of(changed)))[0]
    assert np.abs(other[2] - together[2]).max() > 1e-3  # tokens before a token change its scores


# --- Files ---


def test_a_model_that_is_saved_is_read_back_the_same(tmp_path: Path) -> None:
    model = lm.create_model(TINY, VOCABULARY)
    half: dict[str, Any] = {
        name: np.asarray(value).astype(np.float16).astype(np.float32) for name, value in model.parameters.items()
    }
    lm.save(model, tmp_path / "model")
    again = lm.load(tmp_path / "model")
    assert again.config == TINY
    row = row_of(after_start("import numpy as np\n"))
    np.testing.assert_array_equal(lm.predict(TINY, again.parameters, row), lm.predict(TINY, half, row))
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "model/model.safetensors").values()} == {"float16"}
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["tie_word_embeddings"]) == ("llama", 300, True)


def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    lm.save(lm.create_model(TINY, VOCABULARY), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"other tensors than config\.json says"):
        lm.load(tmp_path)


def test_the_tokenizer_that_is_saved_begins_with_start_and_gives_the_text_back(tmp_path: Path) -> None:
    lm.save(lm.create_model(TINY, VOCABULARY), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = "def f():\n\treturn 'größer — 値 🙂'  # <0x41> </s>\r\n"
    assert tokenizer.encode(words).ids == [lm.START, *text(words)]
    assert tokenizer.decode(tokenizer.encode(words).ids) == words
    np.testing.assert_array_equal(lm.load(tmp_path).vocabulary.encode(words.encode()), text(words))


# --- The model in the repository ---

TRAINED = PROGRAM.parent / "models" / "stdlib-llama"


@pytest.mark.long  # tests files that are trained anew by hand
async def test_the_trained_model_knows_more_than_trigrams() -> None:
    corpus = lm.read_sources(Path(sysconfig.get_path("stdlib")))
    some = [text[:6000] for text in corpus.held_out[::20]]
    assert await lm.judge(lm.load(TRAINED), some, MESH) < 0.9 * lm.trigram_loss(corpus.learned, some)


def test_the_trained_model_writes_on_and_is_small() -> None:
    assert 2e6 < sum(math.prod(shape) for _, shape in Config().shapes()) < 2.5e6
    assert lm.complete(lm.load(TRAINED), b"def main(", 20).startswith(b"def main(")
    assert sum(path.stat().st_size for path in TRAINED.iterdir()) < 5_000_000


# --- The trigram baseline ---


def test_trigrams_are_counted_and_shorter_contexts_stand_in_for_rare_ones() -> None:
    likely = 1 / 256
    for times, kinds in ((2, 2), (1, 1), (1, 1)):  # bytes behind any context, behind the last byte, and behind two
        likely = (1 + kinds * likely) / (times + kinds)
    assert lm.trigram_loss([b"ab"], [b"ab"]) == pytest.approx(-math.log(likely))
    learned = [b"for x in xs:\n    print(x)\n", b"import os\nimport re\n", b"x"]
    held_out = [b"for y in ys:\n    if y: print(re)\n", "ÿz".encode()]
    # A program that counts in dictionaries, one byte after the other, gave this number.
    assert lm.trigram_loss(learned, held_out) == pytest.approx(2.753784120769775, rel=1e-12)


# --- The program ---


@pytest.fixture
def quickly_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes programs of other processes compile in half the time; they run only twice."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with forty files to learn from."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(40):
        (folder / f"m{number}.py").write_text(f"x = {number}\n" * 200)
    return folder


@pytest.mark.usefixtures("quickly_compiled")
def test_the_program_trains_on_four_devices_saves_and_writes_on(sources: Path, tmp_path: Path) -> None:
    short, model = ("--steps", "2", "--layers", "1"), tmp_path / "model"
    done = programs.run(PROGRAM, sources, *short, "--devices", "4", "--profile", "--samples", "--save", model)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{sum(math.prod(shape) for _, shape in Config(num_hidden_layers=1).shapes()):,} parameters" in done.stdout
    assert "Trainer" in done.stdout
    [found] = re.findall(r"held out: (\d\.\d+) nats a byte; a trigram model: (\d\.\d+)", done.stdout)
    assert 0 < float(found[1]) < float(found[0]) < 8
    assert lm.complete(lm.load(model), b"x = ", 5).startswith(b"x = ")


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("key", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_what_it_has_learned_is_saved_when_it_is_stopped(sources: Path, tmp_path: Path, key: signal.Signals) -> None:
    model = tmp_path / "model"
    arguments = (sources, "--seconds", "600", "--layers", "1", "--save", model)
    with programs.terminal(PROGRAM, *arguments, typing=False) as shown:
        shown.until("step     0")
        shown.process.send_signal(key)
        assert shown.end() == 130
        assert "Traceback" not in shown.printed
    new = lm.create_model(Config(num_hidden_layers=1), lm.load(model).vocabulary).parameters
    name = "model.embed_tokens.weight"
    assert not np.allclose(lm.load(model).parameters[name], new[name], atol=1e-4)
