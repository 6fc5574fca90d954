"""Notes and `current()` name the right node, item and attempt, also in chains and for the first item."""

import asyncio

import pytest

import penstock as ps
from penstock import engine

seen: list[str] = []


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


@pytest.mark.parametrize("way", ["run", "stream", "deploy"])
async def test_an_error_of_the_very_first_item_or_a_later_one_names_the_link_that_failed(way: str) -> None:
    """An actor times its first item, which takes another code path than later items."""
    seen.clear()
    chain = first >> second >> odd_only
    numbers = [1, 0, 2, 3, 4, 5]
    if way == "stream":
        async with engine.stream(map(chain, numbers)) as stream:
            outcomes = [outcome async for outcome in stream.outcomes()]
        found = [outcome.error or outcome.value for outcome in outcomes]
    else:
        async with engine.deploy(chain) as service:
            ask = service if way == "deploy" else lambda number: engine.run(chain(number))
            found = [(await asyncio.gather(ask(number), return_exceptions=True))[0] for number in numbers]
    assert [one for one in found if not isinstance(one, LookupError)] == [1, 3, 5]
    items = [0, 0, 0] if way == "run" else [0, 3, 5]
    assert [one.__notes__ for one in found if isinstance(one, LookupError)] == [
        [f"in node 'odd_only' of graph {chain.name!r}, item {item}, attempt 1"] for item in items
    ]
    assert seen[:3] == seen[-3:] == ["first", "second", "odd_only"]


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

    line = flaky >> after
    with pytest.raises(LookupError) as raised:
        await (engine.run(line(1)) if way == "run" else anext(engine.stream([line(1)])))
    assert attempts == [("flaky", 1), ("flaky", 2), ("flaky", 3), ("after", 1)]
    assert raised.value.__notes__ == [f"in node 'after' of graph {line.name!r}, item 0, attempt 1"]
