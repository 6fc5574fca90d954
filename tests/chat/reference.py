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

KEPT: dict[str, Any] = json.loads((DATA / "smollm2.json").read_text())
QUESTIONS: list[str] = KEPT["questions"]
TEXTS: list[str] = KEPT["texts"]  # odd ones, whose tokens are compared


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

    strings: list[list[int]]  # the tokens of each of TEXTS
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

        strings = [post("/tokenize", content=text, add_special=False, parse_special=False)["tokens"] for text in TEXTS]
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
    about = {"questions": QUESTIONS, "texts": TEXTS, **found._asdict(), "gaps": gaps, "log_probabilities": None}
    text = json.dumps(about, separators=(",", ":"))
    (DATA / "smollm2.json").write_text(text.replace("]],", "]],\n").replace('"],"', '"],\n"') + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write(ask(Path(name)))
    sys.exit(0)
