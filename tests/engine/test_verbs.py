"""Verbs that cannot work: without a loop, or with wrong arguments; and the meaning of a stream's position."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.kit import numbers


@ps.node
async def wait(turns: int) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    return turns


waited, other = ps.graph(wait.named("waited")), ps.graph(wait.named("other"))


@pytest.mark.parametrize("verb", ["stream", "deploy"])
def test_a_verb_outside_of_a_loop_says_where_it_belongs(verb: str) -> None:
    with pytest.raises(ps.EngineLoopError, match=r"async def main\(\).*asyncio\.run\(main\(\)\).*engine\.Engine\(\)"):
        engine.deploy(waited) if verb == "deploy" else engine.stream([waited(1)])


def test_streams_and_services_of_an_engine_of_ones_own_are_made_before_the_loop_runs() -> None:
    own = engine.Engine()
    service, stream = own.deploy(waited), own.stream([waited(2)])

    async def main() -> list[int]:
        async with own, service, stream:
            return [await service(1), *[value async for value in stream]]

    assert asyncio.run(main()) == [1, 2]


def test_a_service_used_outside_of_its_loop_says_so() -> None:
    with asyncio.Runner() as runner:
        service = runner.run(engine.Engine().deploy(waited).__aenter__())
        with pytest.raises(ps.EngineLoopError, match="call it from there"):
            service.stream([waited(1)])
        runner.run(service.abort())


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="asyncio.run takes everything that can be awaited since 3.14")
def test_asyncio_run_of_a_call_says_what_runs_it() -> None:
    with pytest.raises((ValueError, TypeError), match=r"Call of graph waited, which `await engine\.run\(call\)` runs"):
        asyncio.run(waited(1))  # type: ignore[arg-type]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="asyncio.run takes coroutines only before 3.14")
def test_asyncio_run_of_a_call_runs_it_as_plain_python() -> None:
    assert asyncio.run(waited(1)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", [engine.plan, engine.Engine().plan, engine.Engine().deploy])
def test_verbs_that_take_a_graph_say_what_to_pass_instead_of_another_thing(verb: Callable[..., Any]) -> None:
    name = f"engine.{verb.__name__}"
    for wrong, remedy in (
        (waited(1), rf"without calling it, {name}\(waited\)"),
        (wait, rf"ps.graph\(node\) makes a graph of one node, {name}\(ps.graph\(wait\)\)"),
        (ps.RateLimit(per_second=1), rf"{name}\(ps.graph\(instance\)\)"),
        (ps.RateLimit, rf"{name}\(ps.graph\(RateLimit\(...\)\)\)"),
        (waited.fn, "make one with @ps.graph"),
    ):
        with pytest.raises(TypeError, match=f"{name} takes a graph, got .*: .*{remedy}"):
            verb(wrong)


@ps.node
class Counter:
    async def __call__(self, *, inputs: int) -> int:
        return inputs


class Service:
    @ps.node
    async def fetch(self, number: int) -> int:
        return number

    @ps.node
    async def numbers(self, number: int) -> AsyncIterator[int]:
        yield number


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: Counter()(inputs=1), r"a coroutine of 'Counter': .*run\(ps.graph\(instance\)\(...\)\)"),
        (lambda: Service().fetch(1), r"of 'Service.fetch'.*run\(ps.graph\(instance.fetch\)\(...\)\)"),
        (lambda: Service().fetch, r"<Node fetch>.*run\(ps.graph\(instance.fetch\)\(...\)\)"),
        (lambda: Service().numbers(1), r"of 'Service.numbers'.*stream\(ps.graph\(instance.numbers\)\(...\)\)"),
        (lambda: numbers(1), r"an async generator of 'numbers'.*engine.stream\(ps.graph\(numbers\)\(...\)\)"),
        (lambda: wait(1), r"a coroutine of 'wait'.*run\(ps.graph\(wait\)\(...\)\)"),
        (lambda: wait, r"ps.graph\(node\) makes a graph of .*, engine.run\(ps.graph\(wait\)\(...\)\)"),
        (lambda: ps.RateLimit(per_second=1), r"engine.run\(ps.graph\(instance\)\(...\)\)"),
        (lambda: ps.node(lambda: 1), r"run\(ps.graph\(node\)\(...\)\)"),
        (lambda: 1, r"1: a node that is called outside of a graph has run already, and ps.graph\(node\)\(...\)"),
    ],
)
async def test_the_remedy_can_be_written(call: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(TypeError, match=f"engine.run takes a call of a graph, .*{remedy}"):
        await engine.run(call())


async def test_arguments_belong_into_the_call() -> None:
    async with engine.deploy(waited) as service:
        for verb, name in ((engine.run, "engine.run"), (service.run, "service.run")):
            run: Any = verb
            with pytest.raises(
                TypeError, match=rf"graph 'waited' has parameters: pass a call, {name}\(waited\(...\)\)"
            ):
                await run(waited, 1)
            with pytest.raises(TypeError, match=rf"{name} takes one call, got 2 arguments: .* take many calls"):
                await run(waited(1), waited(2))
            with pytest.raises(TypeError, match=rf"{name}\(ps.graph\(wait\)\(...\)\)"):
                await run(wait, 1)


async def test_a_stream_says_how_a_graph_and_a_node_are_called() -> None:
    stream: Any = engine.stream
    with pytest.raises(TypeError, match=r"graph 'waited' has parameters: pass a call, engine.stream\(waited\(...\)\)"):
        stream(waited)
    for wrong in (wait, wait(1)):
        with pytest.raises(TypeError, match=r"makes a graph of .*, engine.stream\(ps.graph\(wait\)\(...\)\)"):
            stream(wrong)
    with pytest.raises(TypeError, match="takes an iterable of calls"):
        stream(1)


@pytest.mark.parametrize("decorator", [ps.node, ps.node(concurrency=2), ps.device_node, ps.node(batch=ps.Batch(2))])
def test_what_is_a_step_already_is_not_made_a_node(decorator: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="'waited' is a graph already"):
        decorator(waited)
    with pytest.raises(TypeError, match="'wait' is a node already"):
        decorator(wait)
    with pytest.raises(TypeError, match="Call of graph waited"):
        decorator(waited(1))


def test_an_instance_of_a_node_is_not_made_a_node() -> None:
    with pytest.raises(TypeError, match="an instance of a node already"):
        ps.node(ps.RateLimit(per_second=1))  # type: ignore[type-var]


async def test_a_graph_that_is_not_deployed_is_no_closed_deployment() -> None:
    async with engine.deploy(waited) as service:
        with pytest.raises(
            ps.PlanError, match=r"graph 'other' is not part of .* of waited; .*engine\.deploy\(waited, other\)"
        ):
            await service.run(other(1))
        with pytest.raises(ps.PlanError, match="graph 'other' is not part"):
            await service.map([other(1)])
        assert await service(1) == 1


async def test_the_position_of_a_stream_is_the_index_of_its_next_item() -> None:
    async with engine.stream([waited(9), waited(1), waited(1)]) as results:
        assert results.position == 0
        assert await anext(results) == 9
        assert results.position == 1
    assert results.position == 1


async def test_the_position_of_an_unordered_stream_is_how_many_items_were_taken_out() -> None:
    async with engine.stream([waited(99), waited(1), waited(1)], ordered=False) as results:
        seen = [outcome.index async for outcome in results.outcomes() if results.position < 3]
        assert seen == [1, 2]
    assert results.position == 3
