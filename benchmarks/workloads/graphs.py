"""Chains of nodes that do nothing, and the time of a stream through a graph."""

import time
from collections.abc import Awaitable, Callable
from typing import Unpack

import penstock as ps
from penstock import engine

from ..baselines.chain import BUFFER


@ps.node(capacity=BUFFER)
async def pass_on(value: int) -> int:
    return value


@ps.node
def pass_on_plain(value: int) -> int:
    return value


def chain(length: int, node: ps.Node[[int], Awaitable[int]] = pass_on) -> ps.Graph[[int], int]:
    """Return a graph of `length` async nodes, one after the other."""

    @ps.graph
    async def async_chain(value: int) -> int:
        for _ in range(length):
            value = await node(value)
        return value

    return async_chain


def plain_chain(length: int) -> ps.Graph[[int], int]:
    """Return a graph of `length` plain functions, one after the other."""

    @ps.graph
    async def def_chain(value: int) -> int:
        for _ in range(length):
            value = pass_on_plain(value)
        return value

    return def_chain


async def stream_seconds(
    graph: ps.Graph[[int], int],
    items: int,
    at_item: Callable[[int], None] | None = None,
    **options: Unpack[engine.CallOptions],
) -> float:
    """Stream `items` calls, check number and order, and return seconds; `at_item` gets the number of results so far."""
    received = 0
    started = time.perf_counter()
    async with engine.stream((graph(value) for value in range(items)), **options) as results:
        async for result in results:
            assert result == received
            received += 1
            if at_item is not None:
                at_item(received)
    elapsed = time.perf_counter() - started
    assert received == items
    return elapsed
