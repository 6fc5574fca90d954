"""Notes and `current()` name the right node, item and attempt, also in chains and for the first item."""

import asyncio
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing

seen: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


@ps.node
def first(x: int) -> int:
    seen.append(ps.current().node)
    return x + 1


@ps.node
def second(x: int) -> int:
    seen.append(ps.current().node)
    return x


@ps.node
def odd_only(x: int) -> int:
    seen.append(ps.current().node)
    if x % 2 == 0:
        raise LookupError(x)
    return x


@ps.graph
async def chain(x: int) -> int:
    return odd_only(second(first(x)))


async def outcomes(way: str, *numbers: int) -> list[BaseException | int | None]:
    """The result or error of each number, for one way to run the chain."""
    found: list[BaseException | int | None] = []
    if way == "run":
        for number in numbers:
            try:
                found.append(await engine.run(chain(number)))
            except LookupError as error:
                found.append(error)
    elif way == "stream":
        async with engine.stream(chain(number) for number in numbers) as stream:
            found.extend([outcome.error or outcome.value async for outcome in stream.outcomes()])
    else:
        async with engine.deploy(chain) as service:
            for number in numbers:
                try:
                    found.append(await service(number))
                except LookupError as error:
                    found.append(error)
    return found


def fresh_chain(number: int) -> Any:
    """A call of a chain that no item has passed yet."""

    @ps.graph
    async def chain(x: int) -> int:
        return odd_only(second(first(x)))

    return chain(number)


ATTRIBUTED = "in node 'odd_only' of graph 'chain', item {item}, attempt 1"


@pytest.mark.parametrize("way", ["run", "stream", "deploy"])
async def test_the_error_of_the_very_first_item_names_the_link_that_failed(way: str) -> None:
    """An actor times its first item, which takes another code path than later items."""
    call = fresh_chain(1)
    if way == "run":
        with pytest.raises(LookupError) as raised:
            await engine.run(call)
    elif way == "stream":
        async with engine.stream([call]) as stream:
            with pytest.raises(LookupError) as raised:
                await anext(stream)
    else:
        async with engine.deploy(call.graph) as service:
            with pytest.raises(LookupError) as raised:
                await service.run(call)
    assert raised.value.__notes__ == [ATTRIBUTED.format(item=0)]
    assert seen == ["first", "second", "odd_only"]


@pytest.mark.parametrize("way", ["run", "stream", "deploy"])
async def test_later_errors_name_the_link_that_failed(way: str) -> None:
    assert await outcomes(way, 0) == [1]
    seen.clear()
    found = await outcomes(way, 0, 2, 3, 4, 5)
    assert [error for error in found if isinstance(error, int)] == [1, 3, 5]
    items = {"run": [0, 0]}.get(way, [2, 4])
    assert [error.__notes__ for error in found if isinstance(error, LookupError)] == [
        [ATTRIBUTED.format(item=item)] for item in items
    ]
    assert seen[-3:] == ["first", "second", "odd_only"]


@pytest.mark.parametrize("way", ["run", "stream"])
async def test_an_attempt_is_counted_in_its_node_only(way: str) -> None:
    attempts: list[tuple[str, int]] = []

    @ps.node(retry=ps.Retry(attempts=3))
    async def flaky(x: int) -> int:
        attempts.append((ps.current().node, ps.current().attempt))
        if ps.current().attempt < 3:
            raise ValueError(x)
        return x

    @ps.node
    async def after(x: int) -> int:
        attempts.append((ps.current().node, ps.current().attempt))
        raise LookupError(x)

    @ps.graph
    async def line(x: int) -> int:
        return await after(await flaky(x))

    if way == "run":
        with pytest.raises(LookupError) as raised:
            await engine.run(line(1))
        notes = raised.value.__notes__
    else:
        async with engine.stream([line(1)]) as stream:
            (outcome,) = [outcome async for outcome in stream.outcomes()]
        assert outcome.error is not None
        notes = outcome.error.__notes__
    assert attempts == [("flaky", 1), ("flaky", 2), ("flaky", 3), ("after", 1)]
    assert notes == ["in node 'after' of graph 'line', item 0, attempt 1"]


async def test_the_last_attempt_is_the_one_in_the_note() -> None:
    @ps.node(retry=ps.Retry(attempts=3))
    async def never(x: int) -> int:
        raise ValueError(ps.current().attempt)

    @ps.graph
    async def line(x: int) -> int:
        return await never(x)

    with pytest.raises(ValueError, match="3") as raised:
        await engine.run(line(1))
    assert raised.value.__notes__ == ["in node 'never' of graph 'line', item 0, attempt 3"]


async def test_a_task_that_outlives_its_handler_is_not_taken_for_another_item() -> None:
    tasks: list[asyncio.Task[int]] = []
    look = asyncio.Event()

    async def background() -> int:
        await look.wait()
        return ps.current().item

    @ps.node(concurrency=1)
    async def handle(x: int) -> int:
        if x == 0:
            tasks.append(asyncio.create_task(background()))
        if x == 2:
            look.set()
            await testing.wait_quiescent()
        return x

    line = ps.graph(handle)

    async with engine.stream(line(x) for x in range(4)) as stream:
        assert [x async for x in stream] == [0, 1, 2, 3]
    assert await tasks[0] == 0  # its own item, or no item, which counts as item 0
