"""Documents embedded with all-MiniLM-L6-v2: by the graph of the examples, and by a loop written by hand."""

import importlib
import importlib.util
import inspect
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax

from examples import minilm
from examples.embedding import embed
from examples.plain_embedding import embed_plain
from penstock import engine

from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits

MODULES = ("argparse", "asyncio", "collections", "email", "http", "json", "os", "random", "shutil", "statistics")
IN_FLIGHT = 128
PEER = "sentence-transformers"
HAS_PEER = importlib.util.find_spec("sentence_transformers") is not None


def documents(count: int) -> list[str]:
    """The first paragraphs of docstrings, in an order that mixes lengths."""
    modules = [importlib.import_module(name) for name in MODULES]
    members = [member for module in modules for _, member in inspect.getmembers(module)]
    methods = [method for member in members if inspect.isclass(member) for _, method in inspect.getmembers(member)]
    found = {inspect.cleandoc(each.__doc__).partition("\n\n")[0] for each in (*members, *methods) if _has_text(each)}
    return random.Random(0).sample(sorted(found), count)


def _has_text(member: object) -> bool:
    return callable(member) and isinstance(member.__doc__, str) and len(member.__doc__) > 20


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    texts = documents(128 if quick else 384)
    parameters: Any = jax.device_put(minilm.load_parameters(minilm.find_model()))
    tokenizer = minilm.load_tokenizer(minilm.find_model())
    async with engine.deploy(embed, max_in_flight=IN_FLIGHT) as service:

        async def with_graph() -> float:
            began = time.perf_counter()
            async with service.stream((embed(text) for text in texts), ordered=False) as vectors:
                count = len([vector async for vector in vectors])
            return count / (time.perf_counter() - began)

        def by_hand(run: Callable[[Sequence[str]], object]) -> Sample:
            async def sample() -> float:
                began = time.perf_counter()
                run(texts)
                return len(texts) / (time.perf_counter() - began)

            return sample

        measured = {"graph": with_graph, "plain": by_hand(lambda each: embed_plain(parameters, tokenizer, each))}
        if HAS_PEER:
            measured[PEER] = by_hand(_peer())
        yield measured


def _peer() -> Callable[[Sequence[str]], object]:
    model = importlib.import_module("sentence_transformers").SentenceTransformer(str(minilm.find_model()))
    return lambda texts: model.encode(list(texts), normalize_embeddings=True)


_PEER_ROWS = (Row(title="embedding, graph over sentence-transformers", subject="graph", reference=PEER, unit="times"),)

EMBEDDING = Workload(
    name="embedding",
    contenders=contenders,
    control="plain",
    rounds=(9, 3),
    rows=(
        Row(
            title="embedding documents, graph over a loop written by hand",
            subject="graph",
            reference="plain",
            unit="times",
            limits=Limits(must=0.95, aim=1.1, at_least=True),
        ),
        Row(title="embedding documents, graph", subject="graph", unit="texts/s"),
        Row(title="embedding documents, by hand", subject="plain", unit="texts/s"),
        *(_PEER_ROWS if HAS_PEER else ()),
    ),
)
