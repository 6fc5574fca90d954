"""Parts of many tests of devices: nodes of one line, rows, outcomes of calls, and what is alive."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import jax
import numpy as np

import penstock as ps
from penstock import engine

SIZE = 16_384  # float32 values: 64 KB, the size from which alignment matters


def usual_device() -> str:
    """Return the name of the device that a node takes if it names none; the machine may have a GPU."""
    return f"{jax.devices()[0].platform}:0"


def doubling(**options: Any) -> "ps.Graph[[Any], Any]":
    """Return a graph of one node that doubles its argument."""
    node: Any = ps.device_node(**{"device": "cpu", "name": "doubled", **options})
    return ps.graph(node(lambda x: x * 2))


def graph_of(make: Callable[..., Any], *resources: Any, awaits: bool = False) -> Any:
    """Return a graph, `of`, whose result a function makes of its parameters, such as a lambda that calls nodes.

    Args:
        make: the function; its first parameters are the resources.
        *resources: what the graph opens and gives to the function.
        awaits: whether the graph awaits what the function returns, such as a loop.
    """

    async def of(*args: Any, **keywords: Any) -> Any:
        opened = [await resource() for resource in resources]
        result = make(*opened, *args, **keywords)
        return await result if awaits else result

    parameters = [*inspect.signature(make).parameters.values()][len(resources) :]
    of.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return ps.graph(of)


def resource_of(make: Callable[..., Any]) -> Any:
    """Return a resource whose value a function makes each time the resource is opened."""

    @ps.resource
    async def opened(*args: Any) -> AsyncIterator[Any]:
        yield make(*args)

    return opened


def on_the_host(compute: Any, x: jax.Array) -> jax.Array:
    """Return the result of a function of NumPy, which a program calls with `x`."""
    return jax.pure_callback(compute, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="broadcast_all")


def refuse_negatives(x: Any) -> Any:
    if (np.asarray(x) < 0).any():
        raise ValueError("a negative number")
    return np.asarray(x)


def refusing(x: jax.Array) -> jax.Array:
    """Return `x`; the computation fails if a number in `x` is negative."""
    return on_the_host(refuse_negatives, x)


async def settled(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return the result or the error of each call."""
    return [*await asyncio.gather(*calls, return_exceptions=True)]


def row(value: float) -> Any:
    return np.full(2, value, np.float32)


def at_64(value: float = 1) -> Any:
    """Return a user's array that is aligned, so that XLA on a CPU would use it in place."""
    memory = np.empty(SIZE + 16, np.float32)
    array = memory[-memory.ctypes.data % 64 // 4 :][:SIZE]
    array[:] = value
    return array


def numbers_of(results: list[Any]) -> list[float | None]:
    """Return the first number of each result, and None for an error."""
    return [None if isinstance(one, BaseException) else float(np.ravel(one)[0]) for one in results]


def names(graph: Any) -> list[str]:
    """Return the names of the nodes of a plan."""
    return [step.head.callee.name for step in engine.plan(graph).steps]


def report_of(graph: Any, name: str = "regions") -> Any:
    """Return what a pass of the planning says."""
    return next(report for report in engine.plan(graph).reports if report.name == name)


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())
