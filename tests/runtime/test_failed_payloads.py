"""The arguments of failed calls are freed without the garbage collector, in every way to run a step."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np
import pytest

import penstock as ps
from penstock import engine
from tests.kit import without_the_collector

alive: "weakref.WeakSet[Payload]" = weakref.WeakSet()


@jax.tree_util.register_pytree_node_class
class Payload:
    """An argument, which devices take for a pytree."""

    def __init__(self) -> None:
        self.array = np.zeros(2, np.float32)
        alive.add(self)

    def tree_flatten(self) -> Any:
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Any) -> "Payload":
        made = cls.__new__(cls)
        made.array = arrays[0]
        return made


def refuse(payload: Any) -> int:
    raise ValueError("refused")


def refuse_each(payloads: list[Any]) -> list[Any]:
    return [ValueError("refused") for _ in payloads]


async def refuse_later(payload: Any) -> int:
    await asyncio.sleep(0)
    raise ValueError("refused")


async def refuse_in_executor(payload: Any) -> int:
    return await asyncio.get_running_loop().run_in_executor(None, refuse, payload)


async def refuse_batch(payloads: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    raise ValueError("refused")


@ps.node
async def passed_on(payload: Any) -> Any:
    return payload


class Refusing(ps.Actor):
    async def loop(self, inbox: Any) -> None:
        while True:
            with await inbox.get():
                raise ValueError("refused")


@ps.node
class Stateful:
    async def __call__(self, payload: Any) -> int:
        raise ValueError("refused")


@ps.node
async def values(payload: Any) -> AsyncIterator[int]:
    yield 1
    raise ValueError("refused")


@ps.node
async def total(numbers: AsyncIterator[int]) -> int:
    return sum([number async for number in numbers])


@ps.node
async def of_two(numbers: list[int]) -> int:
    return sum(numbers)


later = ps.node(name="later")(refuse_later)
thread = ps.node(runs_on="thread", name="thread")(refuse)


@ps.node
async def calling(payload: Any) -> int:
    return await ps.call(thread, payload)


@ps.graph
async def mapped(payload: Any) -> int:
    return await of_two(await ps.map_each(thread, [payload, payload]))


@ps.graph
async def looped(payload: Any) -> int:
    return await ps.while_loop(ps.node(lambda _: True), later, payload)


@ps.graph
async def streamed(payload: Any) -> int:
    return await total(values(payload))


@ps.graph
async def mapped_stream(payload: Any) -> int:
    async def body(number: int) -> int:
        return await later(payload)

    return await total(ps.map_each(body, values(payload)))


NODES: dict[str, Any] = {
    "loop": later,
    "executor": ps.node(name="executor")(refuse_in_executor),
    "plain": ps.node(name="plain")(refuse),
    "thread": thread,
    "process": ps.node(runs_on="process", name="process")(refuse),
    "batch": ps.node(batch=ps.Batch(2), name="batch")(refuse_batch),
    "thread batch": ps.node(batch=ps.Batch(2), runs_on="thread", name="thread_batch")(refuse_each),
    "process batch": ps.node(batch=ps.Batch(2), runs_on="process", name="process_batch")(refuse_each),
    "device": ps.device_node(device="cpu", name="device")(refuse),
    "device batch": ps.device_node(device="cpu", batch=ps.Batch(2), name="device_batch")(refuse),
    "own loop": ps.node(Refusing)(),
    "stateful": Stateful(),
    "retry": ps.node(retry=ps.Retry(attempts=2), timeout_seconds=60, name="retry")(refuse_in_executor),
    "hedge": ps.node(hedge=ps.Hedge(after_seconds=1e-6, max_share=1.0), name="hedge")(refuse_in_executor),
    "cache": ps.node(cache=ps.Cache(max_bytes=1000, key=id), name="cache")(refuse_later),
    "call": calling,
}
GRAPHS: dict[str, ps.Graph[[Any], Any]] = {name: ps.graph(node) for name, node in NODES.items()} | {
    "chain": passed_on >> NODES["plain"],
    "mapped": mapped,
    "looped": looped,
    "streamed": streamed,
    "mapped stream": mapped_stream,
}


async def run(graph: ps.Graph[[Any], Any]) -> None:
    for _ in range(3):
        with suppress(ValueError):
            await engine.run(graph(Payload()))


async def deploy(graph: ps.Graph[[Any], Any]) -> None:
    async with engine.deploy(graph) as service:
        for _ in range(3):
            with suppress(ValueError):
                await service(Payload())


async def stream(graph: ps.Graph[[Any], Any]) -> None:
    async with engine.stream(graph(Payload()) for _ in range(12)) as results:
        assert [type(outcome.error) async for outcome in results.outcomes()] == [ValueError] * 12


async def leave(graph: ps.Graph[[Any], Any]) -> None:
    async with engine.stream((graph(Payload()) for _ in range(12)), max_in_flight=4) as results:
        with suppress(ValueError):
            await anext(results)


async def read(graph: ps.Graph[[Any], Any]) -> None:
    async with engine.stream(graph(Payload())) as numbers:
        with suppress(ValueError):
            [number async for number in numbers]


WAYS = [(name, way) for name in GRAPHS for way in (run, deploy, stream, leave)] + [("values", read)]
GRAPHS["values"] = ps.graph(values)


@pytest.mark.parametrize(("name", "way"), WAYS, ids=lambda given: getattr(given, "__name__", given))
async def test_arguments_of_failed_calls_are_freed_without_the_collector(
    name: str, way: Callable[[ps.Graph[[Any], Any]], Awaitable[None]]
) -> None:
    with without_the_collector():
        await way(GRAPHS[name])
        async with asyncio.timeout(30):  # a thread drops its last job a moment after it has told the error
            while alive:
                await asyncio.sleep(0)
