"""Promise 6 for results of `discard=` nodes: each is read, returned to a caller, or discarded; never two of these."""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, outcomes
from tests.promises.exploring import Explorer, random_of_loop


@dataclass
class Response:
    """Stands for an open HTTP response."""

    number: int
    of: "World" = field(repr=False)
    fate: list[str] = field(default_factory=list)

    def begun(self) -> int:
        assert "discarded" not in self.fate
        self.fate.append("read")
        return self.number

    async def aclose(self) -> None:
        self.fate.append("discarded")
        self.of.closing += 1
        await asyncio.sleep(self.of.draw.choice([0, 0.5]))
        self.of.closing -= 1


@dataclass
class Found:
    """A result of a graph that contains a response."""

    number: int
    response: Response


class World:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.opened: list[Response] = []
        self.closing = 0
        self.ends: Counter[str] = Counter()

    async def pause(self) -> None:
        await asyncio.sleep(self.draw.choice([0, 0, 0.1, 0.3, 1]))

    def got(self, value: Any) -> None:
        """Note that a caller has a result: the responses in it belong to the caller, not to the library."""
        for one in value if isinstance(value, list | tuple) else [value]:
            response = one.response if isinstance(one, Found) else one
            if isinstance(response, Response):
                assert "discarded" not in response.fate
                response.fate.append("got")


world: World


async def opened(number: int) -> Response:
    mine = world
    try:
        await mine.pause()
        if not mine.draw.randrange(8):
            raise ConnectionError(number)
    except asyncio.CancelledError:
        if mine.draw.randrange(2):
            raise
    mine.opened.append(Response(number, mine))  # also after a cancel, like a client that already has its response
    return mine.opened[-1]


fetch = ps.node(
    discard=Response.aclose, hedge=ps.Hedge(after_seconds=0.2, max_share=1), retry=ps.Retry(2), concurrency=3
)(opened)
within = ps.node(discard=Response.aclose, timeout_seconds=0.7, failover=fetch)(opened)


@ps.node(concurrency=2)
async def read(response: Response) -> int:
    number = response.begun()
    await world.pause()
    return number


@ps.node
async def read_all(responses: list[Response]) -> int:
    return sum(response.begun() for response in responses)


@ps.node
def read_found(found: Found) -> int:
    return found.response.begun()


@ps.node
async def fails(number: int) -> int:
    await world.pause()
    if not world.draw.randrange(3):
        raise LookupError(number)
    return number


@ps.node
async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        await world.pause()
        yield number


async def found(number: int) -> Found:
    return Found(number, await fetch(number))


async def read_and_again(response: Response) -> Response:
    await read(response)
    return response


line = fetch >> read


given = ps.graph(within)


@ps.graph
async def beside(number: int) -> list[int]:
    response = await within(number)
    return [await fails(number), await read(response), await read(response)]


@ps.graph
async def unread(number: int) -> int:
    await fetch(number)
    return await fails(number)


@ps.graph
async def mapped(number: int) -> list[int]:
    return await ps.map_each(read, await ps.map_each(fetch, [number] * 4, concurrency=2), concurrency=2)


@ps.graph
async def gathered(number: int) -> int:
    return await read_all(await ps.map_each(fetch, [number] * 3, on_error="skip"))


@ps.graph
async def wrapped(number: int) -> list[Found]:
    return await ps.map_each(found, [number] * 2)


@ps.graph
async def unwrapped(number: int) -> list[int]:
    return await ps.map_each(read_found, await ps.map_each(found, [number] * 2))


@ps.graph
async def chosen(number: int) -> Response:
    return await ps.cond(await fails(number), read_and_again, read_and_again, await fetch(number))


@ps.graph
async def streamed(number: int) -> AsyncIterator[Response]:
    return ps.map_each(fetch, numbers(5), concurrency=3)


@ps.graph
async def read_in_stream(number: int) -> AsyncIterator[int]:
    return ps.map_each(read, ps.map_each(fetch, numbers(5), concurrency=3))


@ps.node
def is_small(number: int) -> bool:
    return number < 3


@ps.node
def more(number: int) -> int:
    return number + 1


async def number_alone(state: tuple[int, Response]) -> int:
    return more(state[0])


async def response_alone(state: tuple[int, Response]) -> int:
    return await read(state[1])


async def neither(state: tuple[int, Response]) -> int:
    return 5


async def pair(number: int) -> tuple[int, Response]:
    return number, await fetch(number)


async def next_pair(state: tuple[int, Response]) -> tuple[int, Response]:
    return await pair(more(state[0]))


async def goes_on(state: tuple[int, Response]) -> bool:
    return is_small(state[0])


@ps.graph
async def number_of_loop(number: int) -> int:
    last = await ps.while_loop(goes_on, next_pair, await pair(0))
    return last[0]


@ps.graph
async def response_of_loop(number: int) -> Response:
    last = await ps.while_loop(goes_on, next_pair, await pair(1))
    return last[1]


@ps.graph
async def parts_of_operands(number: int) -> list[int]:
    return [
        await ps.cond(is_small(number), number_alone, response_alone, await pair(number)),
        await ps.cond(is_small(number), neither, number_alone, await pair(number)),
    ]


@ps.graph
async def numbers_of_items(number: int) -> list[int]:
    return await ps.map_each(number_alone, await ps.map_each(pair, [number] * 3))


@ps.graph
async def responses_of_items(number: int) -> list[int]:
    return await ps.map_each(response_alone, await ps.map_each(pair, [number] * 3))


@ps.graph
async def numbers_of_stream(number: int) -> AsyncIterator[int]:
    return ps.map_each(number_alone, ps.map_each(pair, numbers(5)), concurrency=3)


ONE_VALUE = [
    line, given, beside, unread, mapped, gathered, wrapped, unwrapped, chosen, number_of_loop, response_of_loop,
    parts_of_operands, numbers_of_items, responses_of_items,
]  # fmt: skip
STREAMS = [streamed, read_in_stream, numbers_of_stream]
ERRORS = (ConnectionError, LookupError, TimeoutError, ps.EngineClosedError, asyncio.CancelledError)


async def call_all(service: Any, mine: World) -> None:
    async def one(number: int) -> None:
        graph = mine.draw.choice(ONE_VALUE)
        timeout = mine.draw.choice([None, None, 0.3, 1])
        try:
            mine.got(await mine.draw.choice([service, engine]).run(graph(number), timeout_seconds=timeout))
            mine.ends["done"] += 1
        except ERRORS as error:
            mine.ends[type(error).__name__] += 1

    calls = [asyncio.create_task(one(number)) for number in range(8)]
    for call in calls:
        if not mine.draw.randrange(3):
            await asyncio.sleep(mine.draw.choice([0, 0.1, 0.3]))
            call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def stream_of(start: Callable[..., Any], mine: World, *kinds: str) -> Any:
    """Makes a stream of values, of results, or of events with a result."""
    kind = mine.draw.choice(kinds or ("values", "results", "results", "events"))
    if kind == "values":
        return start(mine.draw.choice(STREAMS)(1))
    if kind == "events":
        return start(mine.draw.choice(ONE_VALUE)(1), events=object)
    calls = [mine.draw.choice(ONE_VALUE)(number) for number in range(6)]
    return start(calls, on_error="skip", ordered=bool(mine.draw.randrange(2)))


async def read_some(stream: Any, mine: World) -> None:
    """Reads a stream, or a part of it, and leaves it as a reader may: at the end of `async with`, or by dropping it."""
    left = mine.draw.randrange(8)
    try:
        async with stream if mine.draw.randrange(2) else nullcontext():
            async for value in stream:
                mine.got(value)
                await mine.pause()
                if (left := left - 1) < 0:
                    mine.ends["left"] += 1
                    return
            if isinstance(stream, engine.EventStream) and mine.draw.randrange(2):
                mine.got(await stream.result())
                mine.ends["result"] += 1
    except ERRORS as error:
        mine.ends[type(error).__name__] += 1


async def read_streams(service: Any, mine: World) -> None:
    readers: list[asyncio.Task[None]] = []
    for _ in range(4):
        start = mine.draw.choice([service.stream, service.stream, engine.stream])
        readers.append(asyncio.create_task(read_some(stream_of(start, mine), mine)))
        await mine.pause()
    if mine.draw.randrange(2):
        mine.ends["cancelled reader"] += readers[0].cancel()
    await asyncio.gather(*readers, return_exceptions=True)


def test_promise_6_what_nobody_has_begun_to_read_is_discarded_once(explore: Explorer) -> None:
    async def main() -> World:
        global world  # noqa: PLW0603 - one world at a time, seen by the nodes
        mine = world = World(random_of_loop())
        async with engine.deploy(*ONE_VALUE, *STREAMS, max_in_flight=6) as service:
            await asyncio.gather(call_all(service, mine), read_streams(service, mine))
            await asyncio.sleep(10)  # of virtual time, until all responses are closed
            assert {actor.in_flight for actor in service.statistics().actors} == {0}
            late = [stream_of(service.stream, mine, "results", "events")]  # a drain waits for the reader of values
            with suppress(*ERRORS):
                await late[0].wait_started()
            if mine.draw.randrange(2):
                await read_some(late.pop(), mine)
        while late:  # the deployment has been drained, and has left results to this reader
            await read_some(late.pop(), mine)
        gc.collect()
        await asyncio.sleep(10)
        assert mine.closing == 0
        for response in mine.opened:
            assert response.fate, response
            assert response.fate == ["discarded"] or "discarded" not in response.fate
        return mine

    def has(fate: str) -> Any:
        return lambda mine: any(fate in response.fate for response in mine.opened)

    reaches: dict[str, Any] = {fate: has(fate) for fate in ("read", "got", "discarded")}
    for end in ("left", "cancelled reader", "result"):
        reaches[end] = lambda mine, end=end: mine.ends[end] > 0
    explore(main, reaches=reaches, count=100)


async def test_promise_6_of_a_hedge_and_of_two_readers_the_late_ones_response_is_discarded() -> None:
    global world  # noqa: PLW0603 - seen by the nodes
    world = World(random.Random(0))

    @ps.node(discard=Response.aclose, hedge=ps.Hedge(after_seconds=0.001, max_share=1))
    async def hedged(number: int) -> Response:
        world.opened.append(response := Response(len(world.opened) + 1, world))
        if response.number == 1:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return response

    graph = hedged >> read
    assert await engine.run(graph(1)) == 2
    assert [response.fate for response in world.opened] == [["discarded"], ["read"]]


@pytest.mark.parametrize("discards", [True, False])
async def test_promise_6_of_a_thread_that_returns_late_and_of_no_node_without_it(discards: bool) -> None:
    gate, discarded = Gate(), list[str]()

    async def discard(text: str) -> None:
        await testing.wait_quiescent()
        discarded.append(text)

    @ps.node(runs_on="thread", discard=discard if discards else None)
    def slow(number: int) -> str:
        return f"response {gate.block(number)}"

    async with engine.Engine() as own:
        call = asyncio.create_task(own.run(ps.graph(slow)(1)))
        await gate.has()
        call.cancel()
        assert await outcomes(call) == [asyncio.CancelledError]
        gate.open()
    assert discarded == (["response 1"] if discards else [])


async def test_promise_6_a_kept_result_is_not_discarded_and_an_error_is_logged() -> None:
    discarded: list[str] = []

    def discard(text: str) -> None:
        discarded.append(text)
        raise LookupError("a mistake")

    @ps.node(discard=discard, cache=ps.Cache(max_bytes=1000))
    async def kept(number: int) -> str:
        return "kept"

    @ps.node(discard=discard)
    async def lost(number: int) -> str:
        return "lost"

    @ps.node
    async def joined(*texts: str) -> None: ...

    @ps.node
    async def broken(number: int) -> str:
        await testing.wait_quiescent()
        raise ConnectionError

    @ps.graph
    async def graph(number: int) -> None:
        await joined(await kept(number), await lost(number), await broken(number))

    with structlog.testing.capture_logs() as logged, pytest.raises(ConnectionError):
        await engine.run(graph(1))
    assert discarded == ["lost"]
    assert [(event["event"], event["node"], event["error"]) for event in logged] == [
        ("node.not_discarded", "lost", "LookupError('a mistake')")
    ]


def test_promise_6_where_nothing_could_be_discarded_it_is_refused() -> None:
    async def values(number: int) -> AsyncIterator[int]:
        yield number

    async def many(numbers: list[int]) -> list[int]:
        return numbers

    with pytest.raises(TypeError, match="discard= does not apply: a generator closes"):
        ps.node(discard=print)(values)
    with pytest.raises(TypeError, match="'many' has discard=: a batch does not know"):
        ps.node(discard=print, batch=ps.Batch(max_size=2, max_wait_seconds=0))(many)  # type: ignore[call-overload]
    with pytest.raises(ps.OptionsError, match="discard=3: a function of the result"):
        ps.node(discard=3)(opened)  # type: ignore[call-overload]
