"""Streams as values, and events: 64 answers, token by token, beside a hand-written queue for each."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import penstock as ps
from penstock import engine

from ..baselines.chain import BUFFER
from ..baselines.tokens import queued, read_at_once, ready, stepwise
from ..harness import Contenders, Row, Workload
from ..summary import Limits

STREAMS = 64

ready_node = ps.node(capacity=BUFFER)(ready)
stepwise_node = ps.node(capacity=BUFFER)(stepwise)


@ps.graph
async def ready_answer(tokens: int) -> AsyncIterator[int]:
    return ready_node(tokens)


@ps.graph
async def stepwise_answer(tokens: int) -> AsyncIterator[int]:
    return stepwise_node(tokens)


@ps.node(effectful="unordered")
async def tell(tokens: int) -> int:
    for token in range(tokens):
        await ps.emit(token)
    return tokens


@ps.graph
async def told(tokens: int) -> int:
    return await tell(tokens)


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    tokens = 100 if quick else 500
    async with engine.deploy(ready_answer, stepwise_answer, told, max_in_flight=STREAMS) as service:

        def ready_stream(tokens: int) -> AsyncIterator[int]:
            return service.stream(ready_answer(tokens))

        def stepwise_stream(tokens: int) -> AsyncIterator[int]:
            return service.stream(stepwise_answer(tokens))

        async def events(tokens: int) -> AsyncIterator[int]:
            async with service.stream(told(tokens), events=int, capacity=BUFFER) as stream:
                async for event in stream:
                    yield event.value

        yield {
            "events": partial(read_at_once, events, STREAMS, tokens),
            "deployment": partial(read_at_once, ready_stream, STREAMS, tokens),
            "queues": partial(read_at_once, queued(ready), STREAMS, tokens),
            "deployment, stepwise": partial(read_at_once, stepwise_stream, STREAMS, tokens),
            "queues, stepwise": partial(read_at_once, queued(stepwise), STREAMS, tokens),
        }


TOKENS = Workload(
    name="tokens",
    contenders=contenders,
    control="queues",
    rows=(
        Row(
            title="64 open streams, per token / an asyncio.Queue per stream",
            subject="deployment",
            reference="queues",
            limits=Limits(must=1.5, aim=1.0),
        ),
        Row(
            title="the same, each token after one turn of the loop",
            subject="deployment, stepwise",
            reference="queues, stepwise",
            limits=Limits(must=1.5, aim=1.0),
        ),
        Row(
            title="64 calls whose node emits, per event / an asyncio.Queue per call",
            subject="events",
            reference="queues",
            limits=Limits(must=1.5, aim=1.0),
        ),
    ),
)
