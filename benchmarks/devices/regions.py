"""Regions and einsums against plain JAX on the same device."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import penstock as ps
from penstock import devices, engine
from penstock.engine.planning import make_plan

from ..harness import Contenders, Row, Workload
from ..summary import Limits
from .spinning import busy_core

AGAINST_JAX = Limits(must=1.1, aim=1.02)
STEPS = 10
ELEMENTS = 1_000_000


@ps.device_node
def wave(x: Any) -> Any:
    return jnp.sin(x) * 1.5 + 0.5


@ps.device_node
def total(x: Any) -> Any:
    return x.sum()


@ps.graph
async def ten_nodes(x: Any) -> Any:
    for _ in range(STEPS):
        x = wave(x)
    return x


@ps.graph
async def reduction(x: Any) -> Any:
    return total(x)


@ps.graph
async def three_operands(a: Any, b: Any, c: Any) -> Any:
    return devices.einsum("ij,jk->ik", devices.einsum("ij,jk->ik", a, b), c)


@ps.graph
async def squared_times(a: Any, v: Any) -> Any:
    return devices.einsum("ij,jk,k->i", a, a, v)


@ps.graph
async def thousand_nodes(x: Any) -> Any:
    for _ in range(1_000):
        x = wave(x)
    return x


def waves(x: Any) -> Any:
    for _ in range(STEPS):
        x = jnp.sin(x) * 1.5 + 0.5
    return x


def product(a: Any, b: Any, c: Any) -> Any:
    return a @ b @ c


async def with_penstock(service: Any, graph: Any, args: tuple[Any, ...], calls: int) -> float:
    """Return the seconds of one call, for calls one after the other."""
    began = time.perf_counter()
    for _ in range(calls):
        await service.run(graph(*args))
    return (time.perf_counter() - began) / calls


async def many_with_penstock(service: Any, graph: Any, args: tuple[Any, ...], calls: int) -> float:
    """Return the seconds of one call, for calls that are in flight together."""
    began = time.perf_counter()
    await service.map([graph(*args)] * calls)
    return (time.perf_counter() - began) / calls


async def with_jax(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    """Return the seconds of one call of a function that was compiled by hand; the call blocks the loop."""
    began = time.perf_counter()
    for _ in range(calls):
        function(*args).block_until_ready()
    return (time.perf_counter() - began) / calls


async def with_jax_and_a_busy_core(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    """Return the seconds of `with_jax` while another process keeps a core busy: the cost of any work beside it."""
    with busy_core():
        return await with_jax(function, args, calls)


@asynccontextmanager
async def beside_jax(
    graph: Any, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], calls: int, quick: bool
) -> AsyncIterator[Contenders]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    args = tuple([jax.random.uniform(key, shape) for key, shape in zip(keys, shapes, strict=True)])
    calls = max(1, calls // 4) if quick else calls
    compiled = jax.jit(function)
    async with engine.deploy(graph) as service:
        yield {
            "one by one": partial(with_penstock, service, graph, args, calls),
            "together": partial(many_with_penstock, service, graph, args, calls),
            "jax": partial(with_jax, compiled, args, calls),
            "jax beside a busy core": partial(with_jax_and_a_busy_core, compiled, args, calls),
        }


@asynccontextmanager
async def passes(quick: bool) -> AsyncIterator[Contenders]:
    trace = engine.plan(thousand_nodes).trace

    async def plan() -> float:
        began = time.perf_counter()
        make_plan(trace)
        return 1_000 * (time.perf_counter() - began)

    sample: Callable[[], Awaitable[float]] = plan
    yield {"plan": sample}


def beside(
    name: str,
    title: str,
    limits: Limits | None,
    graph: Any,
    function: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    calls: int,
) -> Workload:
    """Return a workload: the time of a graph over the time of a compiled function, one call after the other.

    The limits are for calls that are in flight together. Calls one by one also wait for the event loop; the latency of
    a tiny kernel measures that wait.
    """
    return Workload(
        name=name,
        contenders=partial(beside_jax, graph, function, shapes, calls),
        control="jax",
        rows=(
            Row(title=f"{title}, together", subject="together", reference="jax", limits=limits),
            Row(title=f"{title}, one by one", subject="one by one", reference="jax"),
            Row(title=f"{title}, jax.jit itself beside a busy core", subject="jax beside a busy core", reference="jax"),
        ),
    )


TEN = Limits(must=1.5, aim=1.1)
LINE = (ELEMENTS,)
SQUARE = (1_000, 1_000)

REGIONS: tuple[Workload, ...] = (
    beside("ten", "ten elementwise nodes over 1M / jax.jit", TEN, ten_nodes, waves, (LINE,), 10),
    beside("reduction", "sum of 1M / jax.jit", AGAINST_JAX, reduction, jnp.sum, (LINE,), 100),
    beside(
        "matrices", "A B C of 1000 / jax.jit", AGAINST_JAX, three_operands, lambda a, b, c: a @ b @ c, (SQUARE,) * 3, 4
    ),
    beside(
        "power",
        "A A v of 500 by einsum / (A @ A) @ v",
        None,
        squared_times,
        lambda a, v: (a @ a) @ v,
        ((500, 500), (500,)),
        40,
    ),
    Workload(
        name="device_passes",
        contenders=passes,
        rows=(Row(title="passes over 1,000 device nodes", subject="plan", unit="ms", limits=Limits(must=100, aim=30)),),
    ),
)
