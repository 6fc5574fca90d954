"""`device_strategy`: on which devices nodes without a device of their own run."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import penstock as ps
from penstock import engine

X = np.ones(2, np.float32)


anywhere = ps.device_node(lambda x: x + 1)
on_five = ps.device_node(device="cpu:5")(lambda x: x + 1)


@ps.node
def place(x: jax.Array) -> int:
    [device] = x.devices()
    return device.id


where = anywhere >> place


@ps.graph
async def where_of_all(xs: list[Any]) -> list[int]:
    return await ps.map_each(where, xs)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Resets options that a test sets for the process."""
    yield
    ps.set_execution_options()


async def test_every_level_says_where_a_node_without_a_device_runs() -> None:
    async def found(**options: Any) -> int:
        return await own.run(where(X), **options)

    async with engine.Engine() as own:
        assert await found() == 0
        ps.set_execution_options(device_strategy="cpu:1")
        assert await found() == 1
    async with engine.Engine(device_strategy="cpu:2") as own:
        assert await found() == 2
        with ps.execution_options(device_strategy="cpu:3"):
            assert await found() == 3
            assert await found(device_strategy="cpu:4") == 4
            assert await found(device_strategy="auto") == 0
        assert await found() == 2


async def test_runs_streams_and_deployments_take_it() -> None:
    @ps.node
    async def twice(x: jax.Array) -> AsyncIterator[int]:
        for _ in range(2):
            yield place(x)

    places = anywhere >> twice
    async with engine.stream(places(X), device_strategy="cpu:6") as values:
        assert [value async for value in values] == [6, 6]
    assert await engine.run(where_of_all([X, X]), device_strategy="cpu:1") == [1, 1]
    async with engine.stream((where_of_all([X]) for _ in range(3)), device_strategy="cpu:2") as results:
        assert [result async for result in results] == [[2]] * 3
    async with engine.deploy(where, device_strategy="cpu:3") as service:
        with ps.execution_options(device_strategy="cpu:4"):  # the deployment keeps its own strategy
            assert await service(X) == 3
        with pytest.raises(ps.OptionsError, match=r"'device_strategy' does not apply to service\.run"):
            await service.run(where(X), device_strategy="cpu:4")


async def test_a_device_of_its_own_stays_and_copies_follow_the_strategy() -> None:
    copied = ps.device_node(replicas=2)(lambda x: x + 1)

    @ps.graph
    async def of(x: Any) -> list[int]:
        return [place(on_five(anywhere(x))), place(copied(x))]

    first, second = await engine.run(of(X), device_strategy="cpu:3")
    assert first == 5
    assert second in (3, 4)
    with pytest.raises(ps.DeviceError, match="replicas=2 needs 2 devices from cpu:7 on"):
        await engine.run(of(X), device_strategy="cpu:7")


async def test_what_is_compiled_before_the_first_call_is_compiled_for_it() -> None:
    node = ps.device_node(sample_input=(X,))(lambda x: x - 1)

    of = node >> place
    async with engine.deploy(of, warmup=True, device_strategy="cpu:2") as service:
        assert await service(X) == 2
    assert node.compile_statistics().misses == 1
    with ps.execution_options(device_strategy="cpu:3"):
        await node.warmup(X)
        assert await engine.run(of(X)) == 3
    assert node.compile_statistics().misses == 2


async def test_a_device_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    for name in ("cpu:99", "gppu"):
        with pytest.raises(ps.DeviceError, match=f'there is no device {name!r}; this process has "cpu:0"'):
            await engine.run(where(X), device_strategy=name)
