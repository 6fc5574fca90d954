"""What llama.cpp says of SmolLM2, with its weights as float32; it takes some minutes.

    python -m tests.chat.reference          writes tests/chat/data/ anew

The file as shipped is no reference: llama.cpp computes with 8-bit activations then.
"""

import json
import struct
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt

from examples.chat import gguf

DATA = Path(__file__).parent / "data"
TOKENS = 120  # of each answer
SLOTS = 10
POSITIONS = (5, 5, 5, 5, 4)  # whose log probabilities are compared over the whole vocabulary, of the first five answers

QUESTIONS = [
    "What is the capital of France?", "Write a short story about a cat.", "def quicksort(items):",
    "How do I boil an egg? Answer in three steps.", "Explain photosynthesis to a child.",
    "List the numbers from 1 to 30.", "Translate 'good morning' into German.", "Why is the sky blue?",
    "Give me a recipe for pancakes.", "Who wrote Hamlet?", "What is 17 times 23?", "Write a poem about the sea.",
    "What does HTTP stand for?", "Name five animals that live in Africa.", "Summarise the story of Cinderella.",
    "What is the difference between a list and a tuple in Python?", "Tell me a joke.", "How far away is the moon?",
    "Write an email that asks for a day off.", "Größe, Straße, 北京, 😀: which languages are these?",
]  # fmt: skip

STRINGS = [
    "", " ", "  ", "   a", "a   ", "\n", "\n\n", "\n\n\na", "\t", "\ta\tb", " \n \n ", "\r\n", "a\r\nb", "\u00a0",
    "\u3000x", "a", "Hello", "Hello world", " Hello", "hello  world", "HELLO", "don't", "DON'T", "'s", "'S 't", "it’s",
    "we'll they've I'm he'd it's you're", "1", "12", "1234567890", "3.14159", "1,000,000", "a1b2c3", "½ ² ③ Ⅷ",
    "x=1;y=22", "٣٤٥", "é", "e\u0301", "größer — Straße", "naïve café", "Ελληνικά", "русский текст", "العربية",
    "עברית", "हिन्दी", "ไทย", "北京大学", "こんにちは世界", "한국어", "😀", "👩‍👩‍👧‍👦", "🇩🇪🏳️‍🌈", "a😀b",
    "\u200b\u200d", "\ufeffx",
    "def f(x):\n    return x + 1\n", "    if x:\n\t\tpass", "<|not_special|>", "<|im_end|", "https://a.com/?q=1&r=%20#x",
    "!!!???...", "$%^&*()_+{}|:\"<>?", "\\n\\t\\\\", "a_b__c___d", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "\x00",
    "\x7f\x01", "\U0010fffd", "ﬁ ﬂ", "Ａｂｃ",
]  # fmt: skip


def as_float32(source: Path, target: Path) -> None:
    """Write a GGUF file again with all tensors as float32."""
    _, tensors = gguf.read(source)
    content = source.read_bytes()
    first = content.index(struct.pack("<Q", 17) + b"token_embd.weight")  # the metadata end where the tensors are told
    told, data, size = b"", [], 0
    for name, value in tensors.items():
        shape = value.shape[::-1]
        told += struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        told += struct.pack("<IQ", 0, size)
        data.append(value.tobytes() + bytes(-value.nbytes % 32))
        size += len(data[-1])
    head = content[:first] + told
    with target.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        file.writelines(data)


class Reference(NamedTuple):
    """What llama.cpp says."""

    strings: list[list[int]]  # the tokens of each of STRINGS
    prompts: list[list[int]]
    answers: list[list[int]]  # the likeliest tokens, one after the other
    gaps: list[list[float]]  # by how much the log probabilities of the two likeliest differ
    places: list[tuple[int, int]]  # an answer, and a position in it
    log_probabilities: npt.NDArray[np.float32]  # at each of these places, for the whole vocabulary


def ask(folder: Path) -> Reference:
    """Ask llama.cpp; the folder takes a file of 540 MB."""
    import xllamacpp

    source = gguf.find_model()
    assert source is not None
    as_float32(source, folder / "model.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_parallel, params.n_ctx, params.port = SLOTS, SLOTS * 256, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # several wait for each other, at a low priority
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.no_extra_bufts = True
    params.warmup = False
    server = xllamacpp.Server(params)

    with httpx.Client(base_url=server.listening_address, timeout=None) as client:

        def post(path: str, **body: Any) -> Any:
            return client.post(path, json=body).raise_for_status().json()

        def answer(prompt: list[int], count: int, alternatives: int) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = post(
                "/completion", prompt=prompt, n_predict=count, temperature=-1, n_probs=alternatives, ignore_eos=False,
                cache_prompt=False, logit_bias=[],
            )["completion_probabilities"]  # fmt: skip
            return found

        strings = [
            post("/tokenize", content=text, add_special=False, parse_special=False)["tokens"] for text in STRINGS
        ]
        prompts: list[list[int]] = []
        for question in QUESTIONS:
            text = post("/apply-template", messages=[{"role": "user", "content": question}])["prompt"]
            prompts.append(post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"])
        with ThreadPoolExecutor(SLOTS) as threads:
            said = list(threads.map(lambda prompt: answer(prompt, TOKENS, 2), prompts))
        answers = [[each["id"] for each in tokens] for tokens in said]
        gaps = [
            [each["top_logprobs"][0]["logprob"] - each["top_logprobs"][1]["logprob"] for each in tokens]
            for tokens in said
        ]
        places: list[tuple[int, int]] = []
        rows: list[npt.NDArray[np.float32]] = []
        for which, count in enumerate(POSITIONS):
            for position, each in enumerate(answer(prompts[which], count, 49152)):
                row = np.full(49152, np.nan, np.float32)
                for other in each["top_logprobs"]:
                    row[other["id"]] = other["logprob"]
                places.append((which, position))
                rows.append(row)
    return Reference(strings, prompts, answers, gaps, places, np.stack(rows))


def write(found: Reference) -> None:
    """Keep it, and of each row of log probabilities those of the 128 likeliest tokens and of every 384th."""
    kept = np.sort(np.argsort(-found.log_probabilities, axis=1)[:, :128], axis=1)
    kept = np.concatenate([kept, np.broadcast_to(np.arange(0, 49152, 384), (len(kept), 128))], axis=1)
    np.savez_compressed(
        DATA / "smollm2.npz",
        tokens=kept.astype(np.uint16),
        log_probabilities=np.take_along_axis(found.log_probabilities, kept, axis=1),
    )
    gaps = [[round(gap, 4) for gap in each] for each in found.gaps]
    text = json.dumps({**found._asdict(), "gaps": gaps, "log_probabilities": None}, separators=(",", ":"))
    (DATA / "smollm2.json").write_text(text.replace("]],", "]],\n") + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write(ask(Path(name)))
    sys.exit(0)
