"""Host memory: the alignment of Penstock's arrays, and the effects of writing to an array after a call."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import data, devices, engine

from .gates import Gate
from .kit import SIZE, at_64


def is_at_64(array: Any) -> bool:
    return bool(array.ctypes.data % 64 == 0)


# Ways to call a function with an array: each returns when the caller continues, and gives the result to await.


async def run(fn: Any, x: Any) -> Any:
    return await devices.actor("cpu").run(fn, x, ready=False)


async def bind(fn: Any, x: Any) -> Any:
    return await devices.actor("cpu").bind(fn, ready=False)(x)


async def bind_a_tree(fn: Any, x: Any) -> Any:
    return await devices.actor("cpu").bind(lambda tree: fn(tree["x"][0]), ready=False)({"x": (x,)})


@pytest.mark.parametrize("call", [run, bind, bind_a_tree])
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

    @ps.graph
    async def both(x: Any) -> Any:
        found = first(x)
        return found, second(found)

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


async def test_an_array_may_change_while_a_computation_that_was_handed_on_is_under_way() -> None:
    gate, x = Gate(), at_64()

    late = ps.device_node(device="cpu", pure=False)(lambda x: x[:4] + gate.pass_through(jnp.zeros(4)))
    graph = late >> ps.device_node(device="cpu", pure=False)(lambda x: x * 2)
    running = asyncio.ensure_future(engine.run(graph(x)))
    await gate.entered()
    x[:] = 7
    gate.open()
    assert (await running).tolist() == [2] * 4


async def test_parameters_are_not_changed_by_writing_to_what_they_were_made_of() -> None:
    weights = at_64()
    total = ps.device_node(device="cpu")(lambda parameter, x: parameter.sum() * x)

    @ps.resource
    async def loaded() -> AsyncIterator[Any]:
        yield weights

    @ps.graph
    async def of(x: Any) -> Any:
        return total(await loaded(), x)

    async with engine.deploy(of) as service:
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

    @ps.graph
    async def placed(values: list[Any]) -> AsyncIterator[Any]:
        return functools.reduce(lambda stream, stage: stage(stream), stages, passed_on(values))

    async with engine.stream(placed(values)) as stream:
        found = [value async for value in stream]
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
    @ps.graph
    async def joined(values: list[Any]) -> AsyncIterator[Any]:
        return passed_on(values) >> data.batched(2) >> data.rebatched(3)

    values = [np.full(SIZE, number, np.float32) for number in range(6)]
    async with engine.stream(joined(values)) as stream:
        found = [batch async for batch in stream]
    assert [*map(is_at_64, found)] == [True] * 2
    assert np.array_equal(np.concatenate(found), np.stack(values))


@ps.node(runs_on="process")
def sent(count: int) -> dict[str, Any]:
    return {"x": np.arange(count, dtype=np.float32), "y": np.ones(3), "z": np.arange(2 * count)}


async def test_arrays_of_worker_processes_lie_there_too() -> None:
    of = ps.graph(sent)
    for count in (SIZE + 1, 1_000_001):
        found = await engine.run(of(count))
        assert [is_at_64(found[name]) for name in "xz"] == [True] * 2
        assert np.array_equal(found["x"], np.arange(count))
        assert found["y"].tolist() == [1] * 3
        found["x"][0] = 5  # the result can be written to
