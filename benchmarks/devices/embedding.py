"""Texts embedded with all-MiniLM-L6-v2: by the graph of the examples, and by a loop written by hand."""

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import jax

from examples import minilm
from examples.embedding import embed, encode
from examples.plain_embedding import embed_plain
from penstock import engine

from ..encoders.shared import IN_FLIGHT, TEXTS
from ..harness import Contenders, Row, Workload
from ..summary import Limits


@asynccontextmanager
async def contenders(which: str, quick: bool) -> AsyncIterator[Contenders]:
    make, many, few = TEXTS[which]
    texts = make(few if quick else many)
    parameters: Any = jax.device_put(minilm.load_parameters(minilm.find_model()))
    tokenizer = minilm.load_tokenizer(minilm.find_model())
    async with engine.deploy(embed, max_in_flight=IN_FLIGHT) as service:

        async def with_graph() -> float:
            began = time.perf_counter()
            async with service.stream((embed(text) for text in texts), ordered=False) as vectors:
                count = len([vector async for vector in vectors])
            return count / (time.perf_counter() - began)

        async def by_hand() -> float:
            began = time.perf_counter()
            embed_plain(parameters, tokenizer, texts)
            return len(texts) / (time.perf_counter() - began)

        async def programs() -> float:
            return float(encode.compile_statistics().programs)

        yield {"graph": with_graph, "plain": by_hand, "programs": programs}


def workload(which: str) -> Workload:
    def opened(quick: bool) -> AbstractAsyncContextManager[Contenders]:
        return contenders(which, quick)

    return Workload(
        name=f"embedding {which}",
        contenders=opened,
        control="plain",
        rounds=(9, 3),
        rows=(
            Row(
                title=f"embedding {which}, packed by the graph, over a loop in buckets by hand",
                subject="graph",
                reference="plain",
                unit="times",
                limits=Limits(must=0.95, aim=1.1, at_least=True),
            ),
            Row(title=f"embedding {which}, packed by the graph", subject="graph", unit="texts/s"),
            Row(title=f"embedding {which}, in buckets by hand", subject="plain", unit="texts/s"),
            Row(title="programs of the graph, so far", subject="programs", limits=Limits(must=4, aim=2)),
        ),
    )


EMBEDDING = tuple(workload(which) for which in TEXTS)
