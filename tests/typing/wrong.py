"""Wrong use, which mypy and pyright must refuse; it never runs.

Each wrong line carries an ignore comment for each checker, with its rule. Both checkers refuse ignore comments that are
not needed. So a wrong line that a checker accepts is an error, and so is a line that it refuses without a comment.
"""

from collections.abc import AsyncIterator, Coroutine
from typing import Any

import penstock as ps
from penstock import asgi, data, engine, testing
from penstock.testing import faults
from tests.typing import resources
from tests.typing.correct import (
    Client,
    Hit,
    Index,
    Settings,
    best,
    client,
    counter,
    embed,
    fetch,
    first,
    first_of,
    index,
    is_good,
    limited,
    pairs,
    rank,
    search,
    spelling,
    telling,
    tokenize,
    triple,
)


async def arguments(hit: Hit) -> None:
    await fetch(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tokenize(b"", limits=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    search(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await engine.run(search("a"), "b")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await index("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    counter(hit, hit)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Index(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await client.get(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Client.parse(b"")  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    await fetch.with_policy(name="x")(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def failing_over() -> None:
    fetch.with_policy(failover=rank)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    fetch.with_policy(failover=tokenize)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    ps.node(failover=fetch)(number_of)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    ps.node(failover=fetch)(other_parameters)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    ps.Retry(3, wait=lambda error: 1.0)  # type: ignore[misc, arg-type]  # pyright: ignore[reportArgumentType]
    ps.Cache(max_bytes="1 MB")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.Hedge(0.2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def number_of(url: str) -> int:
    return len(url)


async def other_parameters(url: int) -> bytes:
    return bytes(url)


async def graphs_of_one_node(hit: Hit) -> None:
    ps.graph(fetch)(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.graph(index)("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fetch.named(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await fetch.named("a")(hit)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.graph(Index)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]


def applied(hit: Hit) -> None:
    ps.apply(len, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.apply(len)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    score = ps.apply(lambda found: found.score, hit)
    text: str = score  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(text)


async def results() -> None:
    text: str = await fetch("a")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    hits: list[Hit] = best([])  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    hit: Hit = await engine.run(search("a"))  # type: ignore[arg-type]  # pyright: ignore[reportAssignmentType]
    call: ps.Call[Hit] = search("a")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    offset: int = ps.tagged(search("a"), "a").tag  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(text, hits, hit, call, offset)
    ps.tagged("a", 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@ps.graph
async def forgotten(url: str) -> list[Hit]:
    page = fetch(url)
    return await rank(tokenize(page))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@ps.graph
async def wrong_result(url: str) -> str:
    return await fetch(url)  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


@ps.graph  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue, reportUntypedFunctionDecorator]
def no_async(url: str) -> str:
    return url


@ps.node(concurency=3)  # type: ignore[call-overload, untyped-decorator]  # pyright: ignore[reportCallIssue, reportUntypedFunctionDecorator]
async def misspelt(url: str) -> str:
    return url


@ps.node(runs_on="treads")  # type: ignore[call-overload, untyped-decorator]  # pyright: ignore[reportArgumentType]
def elsewhere(url: str) -> str:
    return url


@ps.node(model=5)  # type: ignore[call-overload, untyped-decorator]  # pyright: ignore[reportArgumentType]
def modelled(url: str) -> str:
    return url


@ps.node(batch=ps.Batch(4))  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType, reportUntypedFunctionDecorator]
async def no_list(text: str) -> str:
    return text


async def own_loops() -> None:
    await embed(["a"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await triple("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pairs("a", 1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    ps.RateLimit()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    number: int = await limited("a")  # type: ignore[arg-type]  # pyright: ignore[reportAssignmentType]
    print(number)


def policies() -> None:
    fetch.with_policy(timeout=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    fetch.with_policy(concurrency=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    ps.Retry()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ps.Retry(3, retry_on="error")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def options(urls: list[str]) -> None:
    await engine.run(search("a"), timeout=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await engine.run(search("a"), scheduler="wavy")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    engine.stream([search("a")], max_inflight=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    engine.stream([search("a")], progress="yes")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await engine.run(search("a"), progress=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    engine.deploy(search, strategy="all")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    engine.deploy(search, max_queues=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    engine.Engine(threads=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ps.execution_options(on_error="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.ExecutionOptions(sheduler="wave")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def verbs() -> None:
    await engine.run(search)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await engine.run("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    engine.stream(search("a"))  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.stream(["a"])  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.deploy(search("a"))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    async with engine.deploy(search) as service:
        await service(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await service("a", weight=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        text: str = await service("a")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        print(text)


async def control(hit: Hit, url: str) -> None:
    await ps.cond(await is_good(hit), index, first_of, url)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await ps.while_loop(is_good, first_of, hit)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await ps.map_each(fetch, [hit])  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await ps.switch(url, (index,), hit)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def chains() -> None:
    _ = fetch >> best  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
    _ = search >> first  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
    _ = index >> best  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]


def of_text(text: str) -> bool:
    return bool(text)


def of_texts(texts: list[str]) -> int:
    return len(texts)


def stages(numbers: AsyncIterator[int], records: AsyncIterator[data.Record[int]]) -> None:
    _ = numbers >> data.filtered(of_text)  # type: ignore[arg-type]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
    _ = records >> data.filtered(of_text)  # type: ignore[arg-type]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
    _ = numbers >> data.batched(2, collate=of_texts)  # type: ignore[arg-type]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
    _ = records >> data.batched(2, collate=of_texts)  # type: ignore[arg-type]  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
    data.filtered(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    data.batched(2, collate=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    texts: AsyncIterator[str] = numbers >> data.batched(2, collate=list[int])  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(texts)


def functions_beside_options() -> None:
    ps.node(number_of, stateless=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    ps.device_node(of_text, pure=False)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def replacing() -> None:
    def narrower(url: bytes) -> Coroutine[Any, Any, bytes]:
        return fetch("a")

    testing.replace(fetch, narrower)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def opening() -> None:
    await resources.http(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    text: str = await resources.http("a")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(text)

    async def number(base_url: int) -> resources.Http:
        return resources.Http()

    testing.replace(resources.http, number)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]

    @ps.resource  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    async def no_yield() -> int:
        return 3

    async with engine.deploy(search) as service:
        await service.reload(search)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def wrong_faults() -> None:
    faults.inject("node.start", faults.Cancel())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    faults.inject("node.call", OSError())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def the_side_of_the_engine(
    inbox: ps.Inbox[ps.Work[int, str]], work: ps.Work[int, str], stream: ps.StreamWork[int, str]
) -> None:
    ps.Work(3)  # type: ignore[abstract, call-arg]  # pyright: ignore[reportAbstractUsage, reportCallIssue]
    inbox.close()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    work.cancel()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    stream.cancel()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    work.finish(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    stream.put_nowait(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def wrong_settings() -> None:
    Settings(strategy="one_for_none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Settings(restart="always")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ps.node(shutdown_seconds="5")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


async def wrong_events(hit: Hit) -> None:
    engine.stream(telling(hit))  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.stream(telling(hit), events=hit)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    engine.stream([telling(hit)], events=Hit)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    async with engine.stream(telling(hit), events=Hit) as events:
        number: int = await events.result()  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        print(number)
        async for event in events:
            event.value.title()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    async with engine.stream(spelling(hit), events=Hit) as both:
        await both.result()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    asgi.event_stream(telling(hit))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def chosen(hit: Hit) -> None:
    await ps.call(fetch, 3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await ps.call(tokenize, b"", limits=3)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    await ps.call(search, hit)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await ps.call("fetch")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
