"""Arrays on their way to a device: their alignment, who may write to them after a call, and batches put there ahead."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import data, devices, engine
from tests.kit import values_of

from .gates import Gate
from .kit import SIZE, at_64, graph_of, resource_of
from .processes import sent


def is_at_64(array: Any) -> bool:
    return bool(array.ctypes.data % 64 == 0)


# Ways to call a function with an array: each returns when the caller continues, and gives the result to await.


async def run(fn: Any, x: Any) -> Any:
    return await devices.actor("cpu").run(fn, x, ready=False)


async def bind(fn: Any, x: Any) -> Any:
    return await devices.actor("cpu").bind(fn, ready=False)(x)


async def bind_a_tree(fn: Any, x: Any) -> Any:
    return await devices.actor("cpu").bind(lambda tree: fn(tree["x"][0]), ready=False)({"x": (x,)})


async def through_two_nodes(fn: Any, x: Any) -> Any:
    first, second = (ps.device_node(device="cpu", pure=False)(one) for one in (fn, lambda x: x + 0))
    return await engine.run((first >> second)(x))


@pytest.mark.parametrize("call", [run, bind, bind_a_tree, through_two_nodes])
async def test_a_caller_that_does_not_wait_may_write_to_the_array(call: Any) -> None:
    gate, x = Gate(), at_64()

    def late(x: Any) -> Any:
        return x[:4] + gate.pass_through(jnp.zeros(4))

    running = asyncio.ensure_future(call(late, x))
    await gate.entered()
    x[:] = 7
    gate.open()
    assert (await running).tolist() == [1] * 4


@pytest.mark.parametrize("options", [{}, {"batch": ps.Batch(4)}, {"batch": ps.Batch(1)}])
async def test_a_caller_of_nodes_may_write_to_the_array_when_it_has_the_result(options: Any) -> None:
    first = ps.device_node(device="cpu", pure=False, **options)(lambda x: x)
    second = ps.device_node(device="cpu", pure=False)(lambda x: x)

    both = graph_of(lambda x: (found := first(x), second(found)))
    x, kept = at_64(), []
    async with engine.deploy(both) as service:
        for value in range(5):
            x[:] = value
            kept.append(await service(x))
            x[:] = -1
    assert [{*np.asarray(result).tolist()} for pair in kept for result in pair] == [
        {float(value)} for value in range(5) for _ in range(2)
    ]
    if options:  # the items of a batch are views
        with pytest.raises(ValueError, match="read-only"):
            kept[0][0][0] = 5


async def test_parameters_are_not_changed_by_writing_to_what_they_were_made_of() -> None:
    weights = at_64()
    total = ps.device_node(device="cpu")(lambda parameter, x: parameter.sum() * x)
    async with engine.deploy(graph_of(total, resource_of(lambda: weights))) as service:
        for _ in range(2):
            assert float(await service(np.float32(1))) == SIZE
            weights[:] = 2


@ps.node
async def passed_on(values: list[Any]) -> AsyncIterator[Any]:
    for value in values:
        yield value


def own_buffer(buffer: Any) -> Callable[[list[Any]], Any]:
    def collated(values: list[Any]) -> Any:
        buffer[:] = values[0]
        return buffer

    return collated


@pytest.mark.parametrize("kind", ["source", "collate of the user", "collate by the user", "values", "batches"])
async def test_what_was_placed_is_no_memory_of_the_user(kind: str) -> None:
    buffer, values = at_64(), [at_64(1), at_64(1)]
    stages: Any = [data.to_device("cpu")]
    if kind == "collate of the user":
        stages = [data.batched(2, collate=own_buffer(buffer)), *stages]
    elif kind == "collate by the user":
        values = [data.collate(values)]
    elif kind == "values":
        stages = [data.batched(2), *stages]
    elif kind == "batches":
        values, stages = [data.collate(values)], [data.rebatched(1), *stages]
    placed = graph_of(lambda values: functools.reduce(lambda stream, stage: stage(stream), stages, passed_on(values)))
    found = await values_of(engine.stream(placed(values)))
    for array in (buffer, *values):
        array[:] = 7
    assert found
    assert {*np.concatenate([np.asarray(one).ravel() for one in found]).tolist()} == {1}


def test_collated_arrays_lie_where_a_program_takes_them_without_a_copy() -> None:
    row = {"x": np.ones(8_192, np.float32), "n": 1.5, "tokens": np.arange(6_000), "small": np.ones(1)}
    for size in (9, 5_000):
        short = row if size == 9 else {"x": np.ones(2), "n": 1.5, "tokens": np.arange(2)}
        batch = data.collate([short] * size, ragged={"tokens": 0})
        assert [*map(is_at_64, (batch["x"], batch["n"] if size > 9 else batch["x"], batch["tokens"].values))] == [
            True
        ] * 3
        expected = {name: np.stack([np.asarray(one[name]) for one in [short] * size]) for name in short}
        for name, found in expected.items():
            got = batch[name].values if name == "tokens" else batch[name]
            assert (got.dtype, got.tobytes()) == (found.dtype, found.tobytes())


async def test_batches_that_were_joined_lie_there_too() -> None:
    joined = graph_of(lambda values: passed_on(values) >> data.batched(2) >> data.rebatched(3))
    values = [np.full(SIZE, number, np.float32) for number in range(6)]
    found = await values_of(engine.stream(joined(values)))
    assert [*map(is_at_64, found)] == [True] * 2
    assert np.array_equal(np.concatenate(found), np.stack(values))


async def test_arrays_of_worker_processes_lie_there_too() -> None:
    of = ps.graph(sent)
    for count in (SIZE + 1, 1_000_001):
        found = await engine.run(of(count))
        assert [is_at_64(found[name]) for name in "xz"] == [True] * 2
        assert np.array_equal(found["x"], np.arange(count))
        assert found["y"].tolist() == [1] * 3
        found["x"][0] = 5  # the result can be written to


MESH = devices.DeviceMesh(shape=(4, 2), axis_names=("data", "model"), device="cpu")
SPECS = {"x": jax.P("data"), "y": None, "name": None}


@ps.node
async def batches(count: int, size: int = 8) -> AsyncIterator[dict[str, Any]]:
    for number in range(count):
        yield {"x": np.full((size, 2), number, np.float32), "y": np.int32(number), "name": f"batch {number}"}


split = graph_of(lambda count, size: batches(count, size) >> data.to_device(MESH, SPECS))
on_one = graph_of(lambda count: batches(count) >> data.to_device("cpu:3"))


@pytest.mark.several_devices
async def test_arrays_arrive_split_over_the_mesh_and_texts_stay() -> None:
    placed = await values_of(engine.stream(split(5, 8)))
    assert [batch["name"] for batch in placed] == [f"batch {number}" for number in range(5)]
    for number, batch in enumerate(placed):
        assert batch["x"].sharding.is_equivalent_to(jax.NamedSharding(MESH.resolve(), jax.P("data")), 2)
        assert batch["x"].addressable_shards[0].data.shape == (2, 2)
        assert batch["y"].sharding.is_fully_replicated
        assert np.asarray(batch["x"]).tolist() == [[number, number]] * 8
    assert {device.id for batch in await values_of(engine.stream(on_one(3))) for device in batch["x"].devices()} == {3}
    alone = [batch async for batch in await split(2, 8)]
    assert alone[1]["x"].sharding == placed[1]["x"].sharding


@pytest.mark.several_devices
async def test_a_placer_places_values_and_streams_without_a_feed() -> None:
    placer = devices.Placer("cpu:3")
    placed = await asyncio.to_thread(placer, {"x": np.ones(2, np.float32), "name": "one"})
    assert (placed["name"], {device.id for device in placed["x"].devices()}) == ("one", {3})
    elsewhere = devices.Placer("cpu:2")
    assert {device.id for device in elsewhere.again(placed)["x"].devices()} == {2}
    untouched = {"x": np.ones(2)}
    assert elsewhere.again(untouched) is untouched
    assert placer.state() != elsewhere.state()
    streamed = graph_of(lambda count: placer.stream(batches(count), 1))
    assert [batch["name"] for batch in await values_of(engine.stream(streamed(2)))] == ["batch 0", "batch 1"]
    assert [batch["name"] async for batch in await streamed(2)] == ["batch 0", "batch 1"]


@pytest.mark.several_devices
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

    two = graph_of(lambda count: ps.map_each(both, placer.stream(batches(count)), placer.stream(batches(count))))
    assert len(await values_of(engine.stream(two(20)))) == 20


async def test_no_more_batches_are_placed_than_ahead() -> None:
    made: list[int] = []

    @ps.node
    async def counted() -> AsyncIterator[Any]:
        for number in range(50):
            made.append(number)
            yield np.full(4, number)

    ahead = graph_of(lambda: counted() >> data.prefetched(1) >> data.to_device("cpu", ahead=3))
    async with engine.stream(ahead()) as values:
        assert int((await anext(values))[0]) == 0
        before = -1
        while len(made) != before:
            before = len(made)
            await asyncio.sleep(0.05)
        # 1 read, 3 placed, and on the host 16 of the source and one or two at each step
        assert before <= 1 + 3 + 16 + 5


@pytest.mark.several_devices
async def test_a_batch_that_cannot_be_split_and_a_wrong_option_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the batch\['x'\] has 6 elements along axis 0.*no multiple of 4"):
        await values_of(engine.stream(split(2, 6)))
    with pytest.raises(ps.OptionsError, match="ahead=0"):
        data.to_device("cpu", ahead=0)
