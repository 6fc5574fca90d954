"""The language model: it learns, its files are those of transformers, and what it is compared with counts rightly."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from examples import language_model
from examples.language_model import (
    START,
    Config,
    Pieces,
    Step,
    Text,
    create_model,
    judge,
    load,
    measure,
    predict,
    read_sources,
    save,
    train,
    trigram_loss,
)
from penstock import data, devices
from tests.examples import programs

TINY = Config(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=80,  # more than one block of queries, and no multiple of one
)
Values = npt.NDArray[np.floating[Any]]
MESH = devices.DeviceMesh(shape=(1,), axis_names=("data",))


def text(words: str) -> Text:
    return np.frombuffer(words.encode(), np.uint8)


def pieces_of(texts: list[Text], length: int) -> list[Text]:
    pieces = Pieces(texts, length)
    return [pieces[index] for index in range(len(pieces))]


def row_of(*sequences: Text) -> data.Packed:
    """Return a batch of one row that has these sequences, and padding behind them."""
    row = data.Packed(*(np.zeros((1, TINY.max_position_embeddings), np.int32) for _ in range(3)))
    begin = 0
    for number, sequence in enumerate(sequences, 1):
        here = slice(begin, begin := begin + len(sequence))
        row.tokens[0, here], row.segment_ids[0, here], row.positions[0, here] = sequence, number, range(len(sequence))
    return row


# --- Training ---


async def test_it_learns_and_is_judged_by_what_it_has_not_seen() -> None:
    texts = [text("def main() -> int:\n    return 0\n" * count) for count in range(1, 40)]
    model = create_model(TINY)
    before = await judge(model, texts[:4], MESH)
    steps: list[Step] = []
    await train(model, texts, MESH, steps.append, steps=60)
    assert [step.number for step in steps] == list(range(60))
    assert [step.done for step in steps] == [number / 60 for number in range(60)]
    assert before == pytest.approx(math.log(256), rel=0.05)  # it knows nothing, and guesses
    assert await judge(model, texts[:4], MESH) < 0.6 * before
    assert steps[-1].loss < 0.6 * steps[0].loss


async def test_every_byte_of_a_text_is_judged_once() -> None:
    model = create_model(TINY)
    texts = [text("x = 1\n" * 40), text("y"), text("pass\n" * 31)]
    nats = count = 0.0
    for piece in pieces_of(texts, TINY.max_position_embeddings):
        piece_nats, piece_count = measure(TINY, model.parameters, row_of(piece))
        nats, count = nats + float(piece_nats), count + int(piece_count)
    assert count == sum(map(len, texts))
    assert await judge(model, texts, MESH) == pytest.approx(nats / count, rel=1e-5)


def test_pieces_are_the_text_and_each_has_a_beginning() -> None:
    texts = [text("abcdefg"), text("hij")]
    assert [bytes(piece) for piece in pieces_of(texts, 4)] == [b"\0abc", b"\0def", b"\0g", b"\0hij"]


def test_files_are_held_out_by_their_names(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"m{number}.py").write_text(f"x = {number}")
    learned, held_out = read_sources(tmp_path)
    assert len(learned) + len(held_out) == 200
    assert 1 <= len(held_out) <= 30
    (tmp_path / "m0.py").unlink()
    again = {bytes(each) for each in read_sources(tmp_path).held_out}
    assert again == {bytes(each) for each in held_out} - {b"x = 0"}


# --- The model ---


def test_sequences_of_a_row_do_not_see_each_other_and_no_byte_sees_what_follows() -> None:
    parameters = create_model(TINY).parameters
    first, second = text("\0import this"), text("\0while True:\n    pass\n" * 2)
    together = np.asarray(predict(TINY, parameters, row_of(first, second)))[0]
    for sequence, found in ((first, together), (second, together[len(first) :])):
        alone = np.asarray(predict(TINY, parameters, row_of(sequence)))[0]
        np.testing.assert_allclose(found[: len(sequence)], alone[: len(sequence)], atol=1e-5)
    cut = np.asarray(predict(TINY, parameters, row_of(second[:20])))[0]
    np.testing.assert_allclose(cut[:20], together[len(first) : len(first) + 20], atol=1e-5)
    other = np.asarray(predict(TINY, parameters, row_of(text("\0import that"))))[0]
    assert np.abs(other[10] - together[10]).max() > 1e-3  # and what is before counts


def by_hand(config: Config, parameters: dict[str, Any], tokens: Text) -> Values:
    """Return the scores of one sequence: a Llama as its papers have it, one head and one place after the other."""

    def norm(values: Values, name: str) -> Values:
        size = np.sqrt((values**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        normed: Values = values / size * parameters[f"{name}.weight"]
        return normed

    def turned(values: Values) -> Values:
        half = config.head_size // 2
        turned = np.empty_like(values)
        for place in range(len(values)):
            for pair in range(half):
                angle = place * config.rope_theta ** (-2 * pair / config.head_size)
                a, b = values[place, pair], values[place, pair + half]
                turned[place, pair] = a * math.cos(angle) - b * math.sin(angle)
                turned[place, pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    hidden: Values = parameters["model.embed_tokens.weight"][tokens]
    size, shared = config.head_size, config.num_attention_heads // config.num_key_value_heads
    for number in range(config.num_hidden_layers):
        weights = {name.split(".")[-2]: value for name, value in parameters.items() if f"layers.{number}." in name}
        inputs = norm(hidden, f"model.layers.{number}.input_layernorm")
        mixed = np.zeros((len(tokens), config.hidden_size))
        for head in range(config.num_attention_heads):
            own, group = (slice(which * size, (which + 1) * size) for which in (head, head // shared))
            query, key = turned(inputs @ weights["q_proj"][own].T), turned(inputs @ weights["k_proj"][group].T)
            value = inputs @ weights["v_proj"][group].T
            for place in range(len(tokens)):
                likely = np.exp(key[: place + 1] @ query[place] / math.sqrt(size))
                mixed[place, own] = likely @ value[: place + 1] / likely.sum()
        hidden = hidden + mixed @ weights["o_proj"].T
        inputs = norm(hidden, f"model.layers.{number}.post_attention_layernorm")
        gate = inputs @ weights["gate_proj"].T
        hidden = hidden + gate / (1 + np.exp(-gate)) * (inputs @ weights["up_proj"].T) @ weights["down_proj"].T
    scores: Values = norm(hidden, "model.norm") @ parameters["model.embed_tokens.weight"].T
    return scores


def test_it_computes_what_a_llama_computes() -> None:
    random = np.random.default_rng(1)
    parameters: dict[str, Any] = {
        name: random.normal(0, 0.4, shape).astype(np.float32) for name, shape in TINY.shapes()
    }
    tokens = text("\0" + "for x in range(10): print(x)\n" * 2)
    scores = np.asarray(predict(TINY, parameters, row_of(tokens)))[0, : len(tokens)]
    np.testing.assert_allclose(scores, by_hand(TINY, parameters, tokens), rtol=1e-3, atol=1e-3)


def test_it_has_two_million_parameters() -> None:
    assert 2e6 < sum(math.prod(shape) for _, shape in Config().shapes()) < 2.5e6


# --- Files ---


def test_a_model_that_is_saved_is_read_back_the_same(tmp_path: Path) -> None:
    model = create_model(TINY)
    half: dict[str, Any] = {
        name: np.asarray(value).astype(np.float16).astype(np.float32) for name, value in model.parameters.items()
    }
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config == TINY
    row = row_of(text("\0import numpy as np\n"))
    np.testing.assert_array_equal(predict(TINY, again.parameters, row), predict(TINY, half, row))
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "model/model.safetensors").values()} == {"float16"}
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["tie_word_embeddings"]) == ("llama", 256, True)


def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    save(create_model(TINY), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"other tensors than config\.json says"):
        load(tmp_path)


def test_the_tokenizer_gives_bytes(tmp_path: Path) -> None:
    save(create_model(TINY), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = "def f():\n\treturn 'größer — 値 🙂'  # <0x41> </s>\r\n"
    assert tokenizer.encode(words).ids == [START, *words.encode()]
    assert tokenizer.decode(list(words.encode())) == words


# --- What it is compared with ---


def slow_trigram_loss(learned: Sequence[Text], held_out: Sequence[Text]) -> float:
    """Return the same, with counts in dictionaries, one byte after the other."""
    counts: Counter[tuple[bytes, int]] = Counter()
    for each in learned:
        padded = b"\0\0" + bytes(each)
        for end in range(2, len(padded)):
            counts.update((padded[end - order : end], padded[end]) for order in range(3))
    nats, count = 0.0, 0
    for each in held_out:
        padded = b"\0\0" + bytes(each)
        for end in range(2, len(padded)):
            likely = 1 / 256
            for order in range(3):
                context = padded[end - order : end]
                found = {byte: times for (seen, byte), times in counts.items() if seen == context}
                if found:
                    own = found.get(padded[end], 0) + len(found) * likely
                    likely = own / (sum(found.values()) + len(found))
            nats, count = nats - math.log(likely), count + 1
    return nats / count


def test_trigrams_are_counted_as_a_slow_program_counts_them() -> None:
    learned = [text("for x in xs:\n    print(x)\n"), text("import os\nimport re\n"), text("x")]
    held_out = [text("for y in ys:\n    if y: print(re)\n"), text("ÿz")]
    assert trigram_loss(learned, held_out) == pytest.approx(slow_trigram_loss(learned, held_out), rel=1e-12)


# --- The program ---


def test_the_program_trains_on_four_devices_saves_and_writes_on(tmp_path: Path) -> None:
    sources, model = tmp_path / "sources", tmp_path / "model"
    sources.mkdir()
    for number in range(40):
        (sources / f"m{number}.py").write_text(f"x = {number}\n" * 200)
    program = Path(language_model.__file__)
    short = ("--steps", "2", "--layers", "1")
    done = programs.run(program, sources, *short, "--devices", "4", "--profile", "--save", model)
    assert (done.returncode, done.stderr) == (0, "")
    assert "406,080 parameters" in done.stdout
    assert "Trainer" in done.stdout
    [found] = re.findall(r"held out: (\d\.\d+) nats a byte; a trigram model: (\d\.\d+)", done.stdout)
    assert 0 < float(found[1]) < float(found[0]) < 6
    written = language_model.complete(load(model), b"x = ", 5)
    assert written.startswith(b"x = ")
    assert len(written) == 9
