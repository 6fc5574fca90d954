"""A trace never goes stale: rebound names, replaced nodes, and calls that run meanwhile."""

import asyncio
import os
import sys
import threading
import types
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.engine.tracing import add, collect, define
from tests.kit import model, values_of


@ps.node
async def fetch(url: str) -> str:
    return f"real {url}"


@ps.node(runs_on="thread")
def in_thread(x: int) -> str:
    return f"real {x}"


@ps.node(runs_on="process")
def in_process(x: int) -> str:
    return f"real {x} of another process" if os.getpid() != MAIN_PROCESS else "this process"


MAIN_PROCESS = os.getpid()


class Client:
    @ps.node
    async def get(self, url: str) -> str:
        return f"client {url}"


@ps.graph
async def search(url: str) -> str:
    return await fetch(url)


async def fake(url: str) -> str:
    return f"fake {url}"


async def test_a_notebook_cell_that_is_run_again() -> None:
    namespace: dict[str, Any] = {"ps": ps}

    def run_cell(source: str) -> None:
        exec(source, namespace)

    run_cell("@ps.node\nasync def work(x: int) -> int: return x + 1")
    run_cell("@ps.graph\nasync def inner(x: int) -> int: return await work(x)")
    run_cell("@ps.graph\nasync def outer(x: int) -> int: return await inner(x)")
    run_cell("helper = lambda x: work(x)\n@ps.graph\nasync def third(x: int) -> int: return await helper(x)")
    outer, third = namespace["outer"], namespace["third"]
    assert [await engine.run(one(1)) for one in (outer, third)] == [2, 2]
    run_cell("@ps.node\nasync def work(x: int) -> int: return x + 10")
    assert [await engine.run(one(1)) for one in (outer, third)] == [11, 11]
    run_cell("@ps.graph\nasync def inner(x: int) -> int: return await work(await work(x))")
    assert await engine.run(outer(1)) == 21
    run_cell("helper = lambda x: inner(x)")
    assert await engine.run(third(1)) == 21


limits = types.SimpleNamespace(most=1)


@ps.graph
async def beside_a_comprehension(x: int) -> int:
    return add(x, sum([1 * limits for limits in (1, 2)]) + limits.most)


async def test_a_name_that_is_also_a_variable_of_a_comprehension(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await engine.run(beside_a_comprehension(0)) == 4
    monkeypatch.setattr(limits, "most", 10)
    assert await engine.run(beside_a_comprehension(0)) == 13
    monkeypatch.setattr(sys.modules[__name__], "limits", types.SimpleNamespace(most=20))
    assert await engine.run(beside_a_comprehension(0)) == 23


async def test_a_call_without_caching_hides_no_change_from_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await engine.run(search("a")) == "real a"
    monkeypatch.setattr(sys.modules[__name__], "fetch", ps.node(fake))
    assert await engine.run(search("a"), reuse_plans=False) == "fake a"
    assert await engine.run(search("a")) == "fake a"


async def test_replacing_a_node_for_a_time() -> None:
    patient = fetch.with_policy(name="patient", timeout_seconds=5)

    @ps.graph
    async def graph(url: str) -> object:
        return collect(await fetch(url), await patient(url), await search(url))

    real = ("real a",) * 3
    for _ in range(2):
        assert await engine.run(graph("a")) == await graph("a") == real
        with testing.replace(fetch, fake):
            assert await engine.run(graph("a")) == await graph("a") == ("fake a",) * 3
            assert await fetch("a") == "fake a"
    assert await engine.run(graph("a")) == await graph("a") == real
    with testing.replace(patient, fake):  # replaces all copies of the node
        assert await engine.run(search("a")) == "fake a"


async def test_a_fake_of_an_async_node_gives_something_to_await() -> None:
    with testing.replace(fetch, lambda url: fake(f"{url}?")):
        assert await engine.run(search("a")) == await search("a") == "fake a?"
    with (
        testing.replace(fetch, lambda url: "a"),
        pytest.raises(TypeError, match="fake of node 'fetch' returned 'a', and the node is an `async def`: make its"),
    ):
        await engine.run(search("a"))


async def test_replacements_nest_and_end_also_after_an_error() -> None:
    async def other(url: str) -> str:
        return f"other {url}"

    async def replace_and_fail() -> None:
        with testing.replace(fetch, fake):
            with testing.replace(fetch, other):
                assert await engine.run(search("a")) == "other a"
            assert await engine.run(search("a")) == "fake a"
            raise LookupError

    with pytest.raises(LookupError):
        await replace_and_fail()
    assert await engine.run(search("a")) == "real a"


async def test_the_policy_of_a_node_holds_for_its_fake() -> None:
    failures = iter([ValueError(), ValueError()])

    async def unlucky(url: str) -> str:
        for failure in failures:
            raise failure
        return "third time"

    persistent = fetch.with_policy(retry=ps.Retry(3))
    with testing.replace(fetch, unlucky):
        assert await engine.run(ps.graph(persistent)("a")) == "third time"


@pytest.mark.parametrize("node", [in_thread, in_process], ids=["thread", "process"])
async def test_thread_and_process_nodes_are_replaced_by_closures(node: ps.Node[[int], str]) -> None:
    seen: list[object] = []

    graph = ps.graph(node)

    def closure(x: int) -> str:
        seen.append(threading.current_thread() is not threading.main_thread())
        return f"fake {x}"

    with testing.replace(node, closure):
        assert await engine.run(graph(1)) == "fake 1"
    assert seen == [True]
    if node is in_thread:
        assert await engine.run(graph(1)) == "real 1"


async def test_a_stateful_node_is_neither_made_nor_entered() -> None:
    log: list[str] = []
    index = model(log)
    graph = ps.graph(index)
    with testing.replace(index, fake):
        assert await engine.run(graph("a")) == await graph("a") == "fake a"
        async with engine.deploy(graph) as service:
            assert await service("b") == "fake b"
        assert log == []
    assert await engine.run(graph("a")) == await graph("a") == "a"
    assert log == ["entered", "left"]


async def test_a_method_is_replaced_for_all_instances() -> None:
    one, two = Client(), Client()

    @ps.graph
    async def graph(url: str) -> object:
        return collect(await one.get(url), await two.get(url))

    async def method(self: Client, url: str) -> str:
        return f"{'one' if self is one else 'two'} {url}"

    with testing.replace(Client.get, method):
        assert await engine.run(graph("a")) == await graph("a") == ("one a", "two a")
        assert await Client.get(one, "b") == "one b"
    with testing.replace(one.get, fake):
        assert await engine.run(graph("a")) == await graph("a") == ("fake a", "fake a")
    assert await engine.run(graph("a")) == ("client a", "client a")


@pytest.mark.parametrize("wrong", [fake, ps.RateLimit, 3, search])
def test_only_nodes_are_replaced(wrong: Any) -> None:
    with pytest.raises(TypeError, match="takes a node"):
        testing.replace(wrong, fake)


async def test_a_running_deployment_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine.deploy(search) as service:
        assert await service("a") == "real a"
        with testing.replace(fetch, fake), monkeypatch.context() as patch:
            assert await service("a") == "real a"
            assert await engine.run(search("a")) == "fake a"
            patch.setattr(sys.modules[__name__], "fetch", ps.node(fake))
            assert await asyncio.gather(service("a"), service.run(search("b"))) == ["real a", "real b"]


async def test_statistics_of_a_graph_say_why_it_was_traced_again() -> None:
    limit = 3
    settings = types.SimpleNamespace(by=1)

    @ps.graph
    async def graph(x: int) -> int:
        return add(x, limit, z=settings.by)

    assert graph.statistics() == engine.GraphStatistics(0, (), 0.0, 0.0, 0)
    for _ in range(3):
        await engine.run(graph(1))
    first = graph.statistics()
    assert (first.traces, first.reasons, first.hits) == (1, (), 2)
    assert first.trace_seconds > 0
    assert first.plan_seconds > 0
    limit = 4
    await engine.run(graph(1))
    settings.by = 2
    await engine.run(graph(1))
    with testing.replace(add, lambda x, y=1, *, z=0: 0):
        await engine.run(graph(1))
    assert await engine.run(graph(1), reuse_plans=False) == 7
    found = graph.statistics()
    assert found.reasons == (
        "`limit` was 3 and is 4",
        "`by` was 1 and is 2",
        "testing.replace has replaced or restored a node",
        "reuse_plans=False",
    )
    assert (found.traces, found.hits) == (5, 2)
    assert found.trace_seconds > first.trace_seconds
    assert found.plan_seconds > first.plan_seconds
    async with engine.deploy(graph) as service:
        before = graph.statistics()
        await asyncio.gather(*(service(1) for _ in range(5)))
        assert graph.statistics() == before  # a deployment keeps its plan
        limit = 5
    assert await values_of(engine.stream(graph(1) for _ in range(5))) == [8] * 5
    assert graph.statistics().traces == before.traces + 1


def test_what_a_name_has_become_is_told() -> None:
    graph = define("@ps.graph\nasync def g(x):\n    return helper(x, later)", helper=collect, later=None)
    other = ps.node(lambda x, y: y)
    names = graph.fn.__globals__
    engine.plan(graph)
    for helper, later in ((other, None), (other, "a" * 100), (other, ps)):
        names.update(helper=helper, later=later)
        engine.plan(graph)
    del names["later"]
    with pytest.raises(ps.GraphTraceError):
        engine.plan(graph)
    names["later"] = 3
    engine.plan(graph)
    assert graph.statistics().reasons == (
        "`helper` is another object of type Node",
        f"`later` was None and is '{'a' * 19}…{'a' * 18}'",
        f"`later` was '{'a' * 19}…{'a' * 18}' and is of type module",
        "`later` was of type module and is 3",
    )
    assert graph.statistics().traces == 5
