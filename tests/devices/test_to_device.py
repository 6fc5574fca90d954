"""Batches that are put on devices ahead of the step that computes with them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, devices, engine

jax = pytest.importorskip("jax")

MESH = devices.DeviceMesh(shape=(4, 2), axis_names=("data", "model"), device="cpu")
SPECS = {"x": jax.P("data"), "y": None, "name": None}


@ps.node
async def batches(count: int, size: int = 8) -> AsyncIterator[dict[str, Any]]:
    for number in range(count):
        yield {"x": np.full((size, 2), number, np.float32), "y": np.int32(number), "name": f"batch {number}"}


@ps.graph
async def split(count: int, size: int) -> AsyncIterator[Any]:
    return batches(count, size) >> data.to_device(MESH, SPECS)


@ps.graph
async def on_one(count: int) -> AsyncIterator[Any]:
    return batches(count) >> data.to_device("cpu:3")


async def collected(call: ps.Call[AsyncIterator[Any]]) -> list[Any]:
    async with engine.stream(call) as values:
        return [value async for value in values]


async def test_arrays_arrive_split_over_the_mesh_and_texts_stay() -> None:
    placed = await collected(split(5, 8))
    assert [batch["name"] for batch in placed] == [f"batch {number}" for number in range(5)]
    for number, batch in enumerate(placed):
        assert batch["x"].sharding.is_equivalent_to(jax.NamedSharding(MESH.resolve(), jax.P("data")), 2)
        assert batch["x"].addressable_shards[0].data.shape == (2, 2)
        assert batch["y"].sharding.is_fully_replicated
        assert np.asarray(batch["x"]).tolist() == [[number, number]] * 8
    assert {device.id for batch in await collected(on_one(3)) for device in batch["x"].devices()} == {3}
    alone = [batch async for batch in await split(2, 8)]
    assert alone[1]["x"].sharding == placed[1]["x"].sharding


async def test_a_placer_places_values_and_streams_without_a_feed() -> None:
    placer = devices.Placer("cpu:3")
    placed = await asyncio.to_thread(placer, {"x": np.ones(2, np.float32), "name": "one"})
    assert (placed["name"], {device.id for device in placed["x"].devices()}) == ("one", {3})
    elsewhere = devices.Placer("cpu:2")
    assert {device.id for device in elsewhere.again(placed)["x"].devices()} == {2}
    untouched = {"x": np.ones(2)}
    assert elsewhere.again(untouched) is untouched
    assert placer.state() != elsewhere.state()

    @ps.graph
    async def streamed(count: int) -> AsyncIterator[Any]:
        return placer.stream(batches(count), 1)

    assert [batch["name"] for batch in await collected(streamed(2))] == ["batch 0", "batch 1"]
    assert [batch["name"] async for batch in await streamed(2)] == ["batch 0", "batch 1"]


async def test_streams_of_one_placer_are_placed_one_value_at_a_time() -> None:
    running: list[int] = []

    class Watched(devices.Placer):
        def __call__(self, value: Any) -> Any:
            running.append(1)
            try:
                assert len(running) == 1
                return super().__call__(value)
            finally:
                running.pop()

    placer = Watched("cpu:3")

    @ps.node
    def both(left: Any, right: Any) -> tuple[str, str]:
        return left["name"], right["name"]

    @ps.graph
    async def two(count: int) -> AsyncIterator[tuple[str, str]]:
        return ps.map_each(both, placer.stream(batches(count)), placer.stream(batches(count)))

    assert len(await collected(two(20))) == 20


async def test_no_more_batches_are_placed_than_ahead() -> None:
    made: list[int] = []

    @ps.node
    async def counted() -> AsyncIterator[Any]:
        for number in range(50):
            made.append(number)
            yield np.full(4, number)

    @ps.graph
    async def ahead() -> AsyncIterator[Any]:
        return counted() >> data.prefetched(1) >> data.to_device("cpu", ahead=3)

    async with engine.stream(ahead()) as values:
        assert int((await anext(values))[0]) == 0
        before = -1
        while len(made) != before:
            before = len(made)
            await asyncio.sleep(0.05)
        # 1 read, 3 placed, and on the host 16 of the source and one or two at each step
        assert before <= 1 + 3 + 16 + 5


async def test_an_actor_keeps_arrays_of_its_mesh_as_they_lie() -> None:
    resolved = MESH.resolve()
    x = jax.device_put(np.arange(16.0, dtype=np.float32).reshape(8, 2), jax.NamedSharding(resolved, jax.P("data")))
    doubled = devices.actor(MESH).bind(lambda x: x * 2)
    for _ in range(2):
        found = await doubled(x)
        assert np.asarray(found).sum() == 240
        assert found.addressable_shards[0].data.shape == (2, 2)
        assert (await doubled(np.ones((8, 2), np.float32))).sharding.is_fully_replicated


async def test_a_batch_that_cannot_be_split_and_a_wrong_option_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the batch\['x'\] has 6 elements along axis 0.*no multiple of 4"):
        await collected(split(2, 6))
    with pytest.raises(ps.OptionsError, match="ahead=0"):
        data.to_device("cpu", ahead=0)
