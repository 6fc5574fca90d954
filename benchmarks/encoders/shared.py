"""The type of every encoder, the texts that it embeds, and the check of its vectors."""

import importlib
import inspect
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
# Takes any number of texts, and returns their vectors in their order: [texts, 384], each of length 1.
Encode = Callable[[Sequence[str]], Awaitable[Vectors]]
Open = Callable[[], AbstractAsyncContextManager[Encode]]

IN_FLIGHT = 600  # all of them
MODULES = ("argparse", "asyncio", "collections", "email", "http", "json", "os", "random", "shutil", "statistics")
# Vectors of sentence-transformers 6.2.0 for some sentences: see tests/examples/test_minilm.py.
EXPECTED = Path(__file__).parents[2] / "tests" / "examples" / "data" / "minilm"
MIN_COSINE = 0.9999


def documents(count: int) -> list[str]:
    """Return first paragraphs of docstrings, in an order that mixes lengths: up to 113 tokens, 16 on average."""
    found = {docstring.partition("\n\n")[0] for docstring in _docstrings()}
    return random.Random(0).sample(sorted(found), count)


def mixed(count: int) -> list[str]:
    """Return beginnings of docstrings, in an order that mixes lengths: 3 to 256 tokens, 34 on average."""
    chosen = random.Random(0)
    texts = chosen.sample(_docstrings(), count)
    return [" ".join(text.split()[: max(1, round(chosen.lognormvariate(3.9, 1.4)))]) for text in texts]


# By the name of the workload: the function that makes the texts, their number, and their number in a quick run.
TEXTS: dict[str, tuple[Callable[[int], list[str]], int, int]] = {
    "documents": (documents, 384, 128),
    "mixed lengths": (mixed, 600, 200),
}


def _docstrings() -> list[str]:
    modules = [importlib.import_module(name) for name in MODULES]
    members = [member for module in modules for _, member in inspect.getmembers(module)]
    methods = [method for member in members if inspect.isclass(member) for _, method in inspect.getmembers(member)]
    return sorted({inspect.cleandoc(each.__doc__ or "") for each in (*members, *methods) if _has_text(each)})


def _has_text(member: object) -> bool:
    return callable(member) and isinstance(member.__doc__, str) and len(member.__doc__) > 20


async def check(encode: Encode) -> None:
    """Refuse an encoder that gives wrong vectors.

    Raises:
        ValueError: A vector points in another direction, or is not of length 1.
    """
    sentences: list[str] = json.loads((EXPECTED / "sentences.json").read_text(encoding="utf-8"))
    expected: Vectors = np.load(EXPECTED / "normalized.npy")
    vectors = await encode(sentences)
    closest = float(np.vecdot(vectors, expected).min())
    if closest < MIN_COSINE or not np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5):
        raise ValueError(f"wrong vectors: a cosine of {closest:.6f} to what is expected")
