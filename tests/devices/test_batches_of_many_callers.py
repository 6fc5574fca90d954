"""Callers of one batch on a device call again together, like callers of a batch on the loop or in a thread."""

import time
from collections.abc import AsyncIterator
from typing import Any

import jax
import numpy as np

import penstock as ps
from penstock import engine

WIDTH, ROUNDS = 32, 12


async def test_the_device_gets_no_batch_of_one_between_two_of_all_others() -> None:
    sizes: list[int] = []

    def slow(values: Any) -> Any:
        sizes.append(len(values))
        time.sleep(0.004)
        return values

    @ps.device_node(device="cpu", batch=ps.Batch(WIDTH))
    def model(value: jax.Array) -> jax.Array:
        return jax.pure_callback(slow, jax.ShapeDtypeStruct((), np.float32), value, vmap_method="broadcast_all")

    async def numbers() -> AsyncIterator[Any]:
        for number in range(WIDTH * ROUNDS):
            yield np.float32(number)

    @ps.graph
    async def graph(values: AsyncIterator[Any]) -> AsyncIterator[Any]:
        return ps.map_each(model, values)

    one = ps.graph(model)

    async with engine.Engine() as own, own.deploy(one) as service:
        for count in (1, 2, 4, 8, 16, 32):  # compiles the program for each size
            await service.run(one(np.float32(0)))
            async with own.stream((one(np.float32(0)) for _ in range(count)), max_in_flight=count) as warm:
                assert len([value async for value in warm]) == count
        before = model.batch_statistics().batches
        async with own.stream(graph(numbers())) as results:
            assert [float(value) async for value in results] == list(range(WIDTH * ROUNDS))
        assert model.batch_statistics().batches - before <= ROUNDS * 1.7, sizes
