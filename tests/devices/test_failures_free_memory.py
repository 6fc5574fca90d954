"""Arguments of a failed call are freed by reference counts, without the collector, when its caller drops the error."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine

from .kit import live_bytes, outcomes, refusing, values_of

SIZE = 10_000


def fails_late(x: jax.Array) -> jax.Array:
    product = jnp.outer(x[:64], x[:64])
    for _ in range(8):
        product = jnp.sin(product @ product)
    return refusing(x + 0 * product[0, 0])


def fails_while_traced(x: jax.Array) -> jax.Array:
    raise LookupError("not traceable")


def _actor(fn: Callable[..., Any], **options: Any) -> Callable[[Any], Awaitable[Any]]:
    return lambda x: devices.actor("cpu").run(fn, x, **options)


def _node(fn: Callable[..., Any], **options: Any) -> Callable[[Any], Awaitable[Any]]:
    of: Any = ps.graph(ps.device_node(device="cpu", **options)(fn))
    return lambda x: engine.run(of(x))


def _batches(fn: Callable[..., Any]) -> Callable[[Any], Awaitable[Any]]:
    call = _node(fn, batch=ps.Batch(4))

    async def three(x: Any) -> Any:
        assert values_of(await outcomes(call(x) for _ in range(3))) == [None] * 3
        raise LookupError("all of them failed")

    return three


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[[Any], Awaitable[Any]]]] = {
    "function": _actor,
    "function that donates": lambda fn: _actor(fn, donate_argnums=(0,)),
    "node": lambda fn: _node(fn, pure=False),
    "batches": _batches,
}


@pytest.fixture
async def without_collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    # JAX logs the error of a callback, and pytest keeps the log record with all objects that the traceback refers to.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("fn", [refusing, fails_late, fails_while_traced])
@pytest.mark.parametrize("way", WAYS)
async def test_a_failed_call_lets_go_of_its_arrays(way: str, fn: Callable[..., Any], without_collector: None) -> None:
    call = WAYS[way](fn)

    async def fail() -> None:
        with pytest.raises((jax.errors.JaxRuntimeError, LookupError)):
            await call(-jnp.ones(SIZE))

    await devices.actor("cpu").run(jnp.negative, np.zeros(1))  # opens the device
    before = live_bytes()
    for _ in range(3):
        await fail()
    async with asyncio.timeout(20):  # the threads of the device drop their last reference a little later
        while live_bytes() - before >= 4 * SIZE:
            await asyncio.sleep(0.001)
