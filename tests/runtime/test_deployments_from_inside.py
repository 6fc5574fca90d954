"""A deployment that is called, drained or aborted by a task for which the deployment itself waits at its end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.kit import actor, model, same, values_of

Service = engine.Service[[int], int]


def calling(service: Service) -> ps.Graph[[int], int]:
    """Returns a graph whose node calls the service."""

    @ps.node
    async def calls(x: int) -> int:
        return await service(x)

    return ps.graph(calls)


async def by_a_deployment(service: Service, graph: ps.Graph[[int], int]) -> None:
    async with engine.deploy(calling(service)) as other:
        await other(0)


WAYS: dict[str, Callable[[Service, ps.Graph[[int], int]], Awaitable[Any]]] = {
    "call": lambda service, graph: service(0),
    "run": lambda service, graph: service.run(graph(0)),
    "stream": lambda service, graph: values_of(service.stream([graph(0)])),
    "drain": lambda service, graph: service.drain(),
    "abort": lambda service, graph: service.abort(),
    "by way of a run": lambda service, graph: engine.run(calling(service)(0)),
    "by way of another deployment": by_a_deployment,
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_loop_cannot_wait_for_its_own_deployment(way: str) -> None:
    refused: list[str] = []

    async def loop(inbox: ps.Inbox[ps.Work[int, int]]) -> None:
        while True:
            work = await inbox.get()
            if work.value == 13:
                work.fail(KeyError())
                raise KeyError
            try:
                await WAYS[way](service, graph)
            except ps.ReentrantCallError as error:
                refused.append(str(error))
            work.finish(work.value)

    graph = ps.graph(actor(loop))
    async with engine.deploy(graph) as service:
        assert await service(1) == 1
        with pytest.raises(KeyError):
            await service(13)
        assert await service(2) == 2  # the new instance is refused as well
        assert len(refused) == 2
        assert all("→ loop: " in message and "use engine.run; to end" in message for message in refused)
        assert service.state == "ready"


@pytest.mark.parametrize("way", WAYS)
async def test_a_task_of_a_stateful_node_cannot_wait_for_its_own_deployment(way: str) -> None:
    asked = asyncio.Event()
    refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    tasks: list[asyncio.Task[None]] = []

    async def watch() -> None:
        await asked.wait()
        try:
            await WAYS[way](service, graph)
        except ps.ReentrantCallError as error:
            refused.set_result(str(error))

    async def enter() -> None:
        tasks.append(asyncio.create_task(watch()))

    graph = ps.graph(model(enter=enter, leave=lambda: tasks[0]))
    async with engine.deploy(graph) as service:
        asked.set()
        assert "by a task that one of its own stateful nodes has started" in await refused
        assert await service(1) == 1


async def test_a_stateful_node_may_call_another_deployment() -> None:
    constants: list[int] = []

    async def ask() -> None:
        constants.append(await inner(21))

    async def add(x: int) -> int:
        return x + sum(constants)

    graph = ps.graph(model(enter=ask, call=add, leave=ask))
    async with engine.deploy(ps.graph(same)) as inner, engine.deploy(graph) as service:
        assert await service(1) == 22
    assert constants == [21, 21]
