"""What was called runs, whether or not its value is read; calls of pure nodes and streams that nobody reads do not."""

import functools
from collections.abc import AsyncIterator
from textwrap import indent
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import data, engine
from tests.engine.tracing import define, double
from tests.kit import listed, numbers


class RefusedError(Exception):
    """The error that the node `check` raises."""


@ps.node
async def check(x: int) -> int:
    raise RefusedError(x)


@ps.node
def check_plain(x: int) -> int:
    raise RefusedError(x)


@ps.node(pure=True)
async def pure(x: int) -> int:
    raise AssertionError("nobody reads its result")


@ps.node(effectful=True)
async def stamps(x: int) -> AsyncIterator[int]:
    assert not x, "nobody reads its stream"
    yield x


def helper(x: int) -> int:
    return check_plain(x)


def takes(value: object) -> None: ...


async def checks_inside(x: int) -> int:
    await check(x)
    return x


async def pure_inside(x: int) -> int:
    return await pure(await pure(x))


@ps.graph
async def sub_graph(x: int) -> dict[str, Any]:
    return {"twice": await double(x), "checked": [await check(x)]}


partial = functools.partial(check_plain, 1)

# Bodies of `async def g(x)`.
RUNS = [
    "await check(x)",
    "_ = check_plain(x)",
    "call = check(x)\nawait call",
    "[await check(x) for _ in range(2)]",
    "takes(helper(x))",
    "partial()",
    "_ = await sub_graph(x)",
    "await check.with_policy(name='copy', retry=ps.Retry(2), failover=check_plain)(x)",
    "await check.with_policy(cache=ps.Cache(max_bytes=1_000, ttl_seconds=1))(x)",
    "_ = ps.apply(check_plain.fn, x)",
    "_ = await ps.cond(x, check, pure, x)",
    "await ps.map_each(checks_inside, [x])",
    "await ps.while_loop(lambda x: x, check, x, max_iterations=3)",
    "await ps.fold(lambda state, value: check(value), numbers(x), 0)",
    "await listed(ps.map_each(check, numbers(x)))",
    "call = check(x)\nasync def body(y):\n    await call\n    return y\nreturn await ps.cond(x, body, double, x)",
]
# The same, with the reason for which the plan leaves the last call out.
IS_LEFT_OUT = [
    ("await pure(x)", "it is pure"),
    ("_ = await pure(await pure(x))", "it is pure"),
    ("_ = await pure.with_policy(failover=check_plain)(x)", "it is pure"),
    ("await ps.cond(x, pure, pure_inside, x)", "so may be all steps in its bodies"),
    ("await ps.while_loop(pure, pure_inside, x, max_iterations=3)", "so may be all steps in its bodies"),
    ("await ps.fold(lambda state, value: pure(value), numbers(x), 0)", "so may be all steps in its bodies"),
    ("numbers(x)", "a stream that is not read does not begin"),
    ("_ = stamps(x)", "a stream that is not read does not begin"),
    ("ps.map_each(check, numbers(x))", "a stream that is not read does not begin"),
    ("left, right = stamps(x) >> data.split(2)", "a stream that is not read does not begin"),
]  # fmt: skip


def graph_of(body: str) -> ps.Graph[[int], Any]:
    given = {**globals(), "data": data, "listed": listed, "numbers": numbers}
    graph: ps.Graph[[int], Any] = define(f"@ps.graph\nasync def g(x):\n{indent(body, '    ')}", **given)
    return graph


@pytest.mark.parametrize("body", RUNS, ids=lambda body: body.splitlines()[-1][-60:])
async def test_what_was_called_runs(body: str) -> None:
    graph = graph_of(body)
    with structlog.testing.capture_logs() as logged:
        with pytest.raises(RefusedError):
            await engine.run(graph(1))
        assert "dead-node elimination: nothing to change" in str(engine.plan(graph))
    assert not [line for line in logged if line["event"] == "plan.dead_nodes"]


@pytest.mark.parametrize(("body", "reason"), IS_LEFT_OUT, ids=lambda one: one[-60:])
async def test_a_pure_call_and_a_stream_that_nobody_reads_are_left_out(body: str, reason: str) -> None:
    graph = graph_of(body)
    with structlog.testing.capture_logs() as logged:
        assert await engine.run(graph(1)) is None
    (warning,) = [line for line in logged if line["event"] == "plan.dead_nodes"]
    assert warning["changes"][-1].endswith(f"(<graph>:{3 + body.count(chr(10))}): its result is not read, and {reason}")
    assert engine.plan(graph).steps == ()


async def test_a_pure_call_is_left_out_although_an_effect_comes_behind_it() -> None:
    booked: list[int] = []

    @ps.node(effectful=True)
    async def book(x: int) -> None:
        booked.append(x)

    @ps.graph
    async def graph(x: int) -> None:
        await pure(x)
        await book(x)

    with structlog.testing.capture_logs():
        await engine.run(graph(1))
    assert booked == [1]
