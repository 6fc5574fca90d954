"""LangGraph: a compiled `StateGraph`, with one `ainvoke` for each item, and `abatch` for many items in flight."""

import operator
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, TypedDict

from langgraph.graph import END, START, StateGraph

from ..baselines import calls, pools
from ..baselines.chain import pass_on
from ..harness import Contenders
from .shared import (
    BRANCHES,
    IO_IN_FLIGHT,
    IO_ITEMS,
    STAGES,
    THREAD_ITEMS,
    THREADS,
    in_turn,
    joined,
    per_item,
    same,
)

NAME = "LangGraph"


class State(TypedDict):
    value: int


class Fan(TypedDict):
    value: int
    parts: Annotated[list[int], operator.add]
    total: int


async def stage(state: State) -> State:
    return {"value": await pass_on(state["value"])}


async def wait(state: State) -> State:
    return {"value": await pools.wait_for_io(state["value"])}


def sleep(state: State) -> State:
    return {"value": pools.release_by_sleeping(state["value"])}


async def branch(state: Fan) -> dict[str, list[int]]:
    return {"parts": [await pass_on(state["value"])]}


async def join(state: Fan) -> dict[str, int]:
    return {"total": calls.join(state["parts"])}


def compiled_chain(node, length):
    builder = StateGraph(State)
    names = [f"stage_{index}" for index in range(length)]
    for name in names:
        builder.add_node(name, node)
    for before, after in zip([START, *names], [*names, END], strict=True):
        builder.add_edge(before, after)
    return builder.compile()


def compiled_fan():
    builder = StateGraph(Fan)
    builder.add_node("join", join)
    for index in range(BRANCHES):
        builder.add_node(f"branch_{index}", branch)
        builder.add_edge(START, f"branch_{index}")
    builder.add_edge([f"branch_{index}" for index in range(BRANCHES)], "join")
    builder.add_edge("join", END)
    return builder.compile()


async def batch_seconds(graph, items: int, in_flight: int) -> float:
    started = time.perf_counter()
    results = await graph.abatch([{"value": value} for value in range(items)], config={"max_concurrency": in_flight})
    assert [result["value"] for result in results] == list(range(items))
    return time.perf_counter() - started


@asynccontextmanager
async def open_chain(quick: bool) -> AsyncIterator[Contenders]:
    graph = compiled_chain(stage, STAGES)

    async def call(value: int) -> int:
        return (await graph.ainvoke({"value": value}))["value"]

    yield {NAME: per_item(50 if quick else 200, in_turn(call, same))}


@asynccontextmanager
async def open_call(quick: bool) -> AsyncIterator[Contenders]:
    graph = compiled_fan()

    async def call(value: int) -> int:
        return (await graph.ainvoke({"value": value, "parts": []}))["total"]

    yield {NAME: per_item(20 if quick else 100, in_turn(call, joined))}


@asynccontextmanager
async def open_io(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    graph = compiled_chain(wait, 1)
    yield {NAME: lambda: batch_seconds(graph, IO_ITEMS, IO_IN_FLIGHT)}


@asynccontextmanager
async def open_threads(quick: bool) -> AsyncIterator[Contenders]:
    del quick
    graph = compiled_chain(sleep, 1)
    yield {NAME: lambda: batch_seconds(graph, THREAD_ITEMS, THREADS)}


WORKLOADS = {"chain": open_chain, "call": open_call, "io": open_io, "threads": open_threads}
