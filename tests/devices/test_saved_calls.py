"""Saved calls whose state is on devices: donated arrays, a mesh, and batches before state."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import data, devices, engine

SOURCE = np.arange(64, dtype=np.float32)


def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    updated = weights * 0.9 + jnp.sin(batch.sum())
    return updated, updated.sum()


@ps.node
class Trainer:
    """Donates its weights at each step, so a state that was not copied would be deleted."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self.mesh = mesh

    async def __aenter__(self) -> Self:
        self.step = devices.actor(self.mesh).bind(step, donate_argnums=(0,))
        self.weights = jax.device_put(jnp.ones(8), jax.NamedSharding(self.mesh, jax.P("data")))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self.weights

    def state(self) -> Any:
        return {"weights": self.weights}

    def restore(self, state: Any) -> None:
        assert state["weights"].sharding == self.weights.sharding
        self.weights = state["weights"]

    async def __call__(self, batch: np.ndarray) -> float:
        self.weights, loss = await self.step(self.weights, batch)
        return float(loss)


async def taken(call: Any, folder: Path | None, limit: int | None) -> dict[int, Any]:
    checkpoint = None if folder is None else ps.Checkpoint(folder, every_records=10)
    got: dict[int, Any] = {}
    async with engine.stream(call, checkpoint=checkpoint) as stream:
        async for value in stream:
            got[stream.position] = value
            if len(got) == limit:
                break
    return got


def records() -> Any:
    return data.order(SOURCE, shuffle_seed=1, epochs=2)


async def test_donated_weights_on_a_mesh_come_back_where_they_were(tmp_path: Path) -> None:
    trainer = Trainer(jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("data",)))

    @ps.graph
    async def train(given: AsyncIterator[data.Record[None]]) -> AsyncIterator[float]:
        return ps.map_each(trainer, given >> data.read(SOURCE) >> data.batched(4))

    whole = await taken(train(records()), None, None)
    first = await taken(train(records()), tmp_path, 20)
    second = await taken(train(records()), tmp_path, None)
    assert min(second) > 1
    assert {**first, **second} == whole


async def test_batches_of_a_device_before_state_are_up_to_rounding(tmp_path: Path) -> None:
    def doubled(**options: Any) -> Any:
        return ps.device_node(device="cpu", batch=ps.Batch(4), name="doubled", **options)(lambda value: value * 2)

    value_of = ps.node(lambda record: record.value)

    @ps.node
    class Summed:
        def __init__(self) -> None:
            self.total = 0.0

        def state(self) -> Any:
            return self.total

        def restore(self, state: Any) -> None:
            self.total = state

        def __call__(self, value: Any) -> float:
            self.total += float(value)
            return self.total

    summed = Summed()

    def graph(node: Any) -> Any:
        @ps.graph
        async def batches(given: AsyncIterator[data.Record[None]]) -> AsyncIterator[float]:
            return ps.map_each(summed, ps.map_each(node, ps.map_each(value_of, given >> data.read(SOURCE))))

        return batches(records())

    with pytest.raises(ps.PlanError, match=r"'doubled' .* rounding"):
        engine.stream(graph(doubled()), checkpoint=ps.Checkpoint(tmp_path))
    about = doubled(stateless=True)
    whole = await taken(graph(about), None, None)
    first = await taken(graph(about), tmp_path, 50)
    second = await taken(graph(about), tmp_path, None)
    assert min(second) > 1
    got = {**first, **second}
    assert list(got) == list(whole)
    assert np.allclose(list(got.values()), list(whole.values()))
