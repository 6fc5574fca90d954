"""Functions that are no resources, and invalid calls of resources, are refused with place and remedy."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.engine.tracing import body
from tests.kit import added


@ps.resource
async def client(base: str, retries: object = 0) -> AsyncIterator[str]:
    yield base


@ps.node
async def fetch(client: str, url: str) -> str:
    return client + url


@ps.node
def length(text: str) -> int:
    return len(text)


def plain_generator(base: str) -> Iterator[str]:
    yield base


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (length.fn, "needs an async generator function, got .*length.*write `async def` with one `yield`"),
        (fetch.fn, "needs an async generator function, got .*fetch"),
        (plain_generator, "needs an async generator function, got .*plain_generator"),
        (dict, "needs an async generator function"),
        (fetch, "needs an async generator function, got <Node fetch>"),
        (client, "needs an async generator function, got <Resource client>"),
    ],
)
def test_what_is_no_resource_is_refused(fn: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ps.resource(fn)


@dataclass
class Mutable:
    url: str


@dataclass(frozen=True)
class Frozen:
    url: str


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (1, x), Frozen])
def test_an_argument_that_each_call_has_its_own_of_is_refused(wrap: Any) -> None:
    @ps.graph
    async def search(url: str) -> str:
        return await fetch(await client(base=wrap(url)), url)

    with pytest.raises(
        ps.GraphTraceError,
        match=r"resource_refusals.py:\d+: argument 'base' of resource 'client' is <Ref url>.*def build\(base_url\)",
    ):
        engine.plan(search)


@pytest.mark.parametrize("value", [["a"], {"a": 1}, Mutable("a"), ("a", [])])
async def test_an_argument_that_is_not_hashable_is_named(value: object) -> None:
    @ps.graph
    async def search(url: str) -> str:
        return await fetch(await client("a", retries=value), url)

    message = r"test_resource_refusals.py:\d+: argument 'retries' of resource 'client' cannot be hashed"
    with pytest.raises(ps.GraphTraceError, match=message):
        engine.plan(search)
    with pytest.raises(ps.GraphTraceError, match=message):
        await search("x")


async def test_a_frozen_dataclass_and_none_are_fine() -> None:
    @ps.graph
    async def search(url: str) -> str:
        return await fetch(await client("a", Frozen("b")), await fetch(await client("c", None), url))

    assert await engine.run(search("x")) == "acx"


async def test_calls_that_are_awaited_later_are_told_apart() -> None:
    async def inside(url: str) -> str:
        one = fetch("a", url)
        other, same = client("b"), client("b")
        return await fetch(await other, await fetch(await same, await one))

    @ps.graph
    async def search(urls: list[str]) -> list[str]:
        return await ps.map_each(inside, urls)

    assert await engine.run(search(["x", "y"])) == ["bbax", "bbay"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return await client(await client('a'), length('x'))", "argument 'base' of resource 'client' is <Ref client>"),
        ("return await client(bse='a')", r"resource 'client' is called wrongly: .*'base'.*parameters are \(base"),
        ("client('a')", "the result of this call in 'g' is never awaited"),
        ("return added(await client('a'))", "parameter 'x' of node 'added' takes int, but gets str"),
    ],
)
def test_a_wrong_use_is_refused_by_the_plan(line: str, message: str) -> None:
    with pytest.raises((ps.GraphTraceError, ps.PlanError), match=message):
        engine.plan(body(line, client=client, length=length, added=added))


def test_a_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="resource 'client' has no policy"):
        client.with_policy(timeout_seconds=1)


@ps.resource
async def twice() -> AsyncIterator[int]:
    for number in range(3):
        yield number


@ps.resource
async def never() -> AsyncIterator[int]:
    for number in range(0):
        yield number


@ps.resource
async def late() -> AsyncIterator[int]:
    yield 1
    raise StopAsyncIteration


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (twice, ps.ResourceError, "a @resource function must yield exactly once; 'twice': generator didn't stop"),
        (never, ps.ResourceError, "a @resource function must yield exactly once; 'never': generator didn't yield"),
        (late, RuntimeError, "raised StopAsyncIteration"),
    ],
)
async def test_a_generator_that_yields_twice_or_never(
    wrong: ps.Resource[[], int], error: type[Exception], message: str
) -> None:
    async def opened() -> None:
        async with wrong.open():
            pass

    async def run_on_an_own_engine() -> None:
        async with engine.Engine() as own:
            await own.run(use)

    use = ps.graph(wrong)
    for way in (lambda: engine.run(use), use, opened, run_on_an_own_engine):
        with pytest.raises(error, match=message):
            await way()


def test_it_is_drawn_with_a_shape_of_its_own_and_without_its_arguments() -> None:
    @ps.graph
    async def search(url: str) -> str:
        return await fetch(await client("https://user:secret@host"), url)

    assert "□  client   resource" in str(search)
    assert '[("client<br/><small>resource</small>")]' in search.to_mermaid()
    assert "shape=cylinder" in search.to_dot()
    assert 'class="resource"' in search._repr_svg_()
    assert "secret" not in str(search) + search.to_mermaid() + search.to_dot() + search._repr_svg_()
