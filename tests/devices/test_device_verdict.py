"""A profile names a device node that is compiled again and again, or copies rather than computes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock import engine, telemetry


async def profile_of(calls: Iterable[ps.Call[Any]]) -> telemetry.Profile:
    with telemetry.profile() as profile:
        async with engine.stream(calls) as results:
            async for _ in results:
                pass
    return profile


@ps.node
def total(x: Any) -> float:
    return float(np.asarray(x).sum())


async def test_a_node_whose_shapes_change() -> None:
    @ps.device_node(device="cpu")
    def embed(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jnp.sin(x) * 2
        return x

    @ps.graph
    async def search(x: Any) -> float:
        return total(embed(x))

    profile = await profile_of(search(np.ones(number + 1, np.float32)) for number in range(20))
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == ("embed", "compilation")
    assert "compiled again and again" in verdict.reason
    assert "pad" in verdict.remedy
    again = await profile_of(search(np.ones(3, np.float32)) for _ in range(20))
    assert again.verdict.limit != "compilation"


async def test_a_node_that_mostly_copies() -> None:
    @ps.device_node(device="cpu:1")
    def first(x: jax.Array) -> jax.Array:
        return x[:1, :1]

    @ps.graph
    async def search(x: Any) -> float:
        return total(first(x))

    x = np.ones((2048, 2048), np.float32)
    await engine.run(search(x))  # compiles
    verdict = (await profile_of(search(x) for _ in range(40))).verdict
    assert (verdict.node, verdict.limit) == ("first", "transfer")
    assert "copies rather than computes" in verdict.reason
