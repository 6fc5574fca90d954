"""A call that is its own statement stays, and its failure fails the call; a named result that nothing reads is dead."""

import functools
from collections.abc import Callable
from textwrap import indent
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import engine
from tests.engine.tracing import define, double
from tests.kit import numbers


class RefusedError(Exception):
    """The error that the node `check` raises."""


@ps.node
async def check(x: int) -> int:
    raise RefusedError(x)


@ps.node
def check_plain(x: int) -> int:
    raise RefusedError(x)


class Shop:
    @ps.node
    async def check(self, x: int) -> int:
        raise RefusedError(x)


shop = Shop()


def helper(x: int) -> int:
    return check_plain(x)


def helper_in_a_loop(x: int) -> int:
    for _ in range(2):
        return check_plain(x)
    return x


async def async_helper(x: int) -> int:
    return await check(x)


async def checks_inside(x: int) -> int:
    await check(x)
    return x


def takes(value: object) -> None: ...


def keeps_a_name(x: int) -> None:
    result = check_plain(x)  # noqa: F841


@ps.graph
async def sub_graph(x: int) -> int:
    allowed = await check(x)
    return allowed  # noqa: RET504 - the test needs a result with a name


@ps.graph
async def sub_graph_of_many(x: int) -> dict[str, Any]:
    twice = await double(x)
    return {"twice": twice, "checked": [await check(x)]}


def forwards(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        return fn(*args)

    return wrapper


wrapped = forwards(check_plain)
partial = functools.partial(check_plain, 1)


# Bodies of `async def g(x)`. They have no source: the bytecode alone tells a statement from a result with a name.
MANY_NAMES = "\n".join(f"a{number} = {number}.5" for number in range(300))  # needs longer instructions
READ_MANY = f"({', '.join(f'a{number}' for number in range(300))}) and await check(x)"
STAY = [
    "await check(x)",
    "check_plain(x)",
    "result = await double(x)\nawait check(result)\nreturn result",
    "call = check(x)\nawait call",
    "for number in range(3):\n    await (check if number == 2 else double)(x)",
    "await check(x) if shop else None",
    "shop and await check(x)",
    "[await check(x) for _ in range(2)]",
    "{name: check_plain(x) for name in 'ab' for _ in 'ab' if shop}",
    "[[await check(x) for _ in name] for name in 'ab']",
    f"{MANY_NAMES}\n[{READ_MANY} for _ in 'ab']",
    "list(map(check_plain, [x]))",
    "helper(x)",
    "helper_in_a_loop(x)",
    "await async_helper(x)",
    "_ = await checks_inside(x)",
    "wrapped(x)",
    "partial()",
    "(lambda: check_plain(x))()",
    "await sub_graph(x)",
    "await sub_graph_of_many(x)",
    "await (double >> check)(x)",
    "await shop.check(x)",
    "await check.with_policy(name='copy', retry=ps.Retry(2), failover=check_plain)(x)",
    "await check.with_policy(cache=ps.Cache(max_bytes=1_000, ttl_seconds=1))(x)",
    "ps.apply(check_plain.fn, x)",
    "await ps.cond(x, check, double, x)",
    "await ps.map_each(check, [x, x])",
    "await ps.while_loop(lambda x: x, check, x, max_iterations=3)",
    "await ps.fold(lambda state, value: check(value), numbers(x), 0)",
    "_ = await ps.map_each(checks_inside, [x])",
    "_ = await ps.cond(x, checks_inside, double, x)",
    "call = check(x)\nasync def body(y):\n    await call\n    return y\nreturn await ps.cond(x, body, double, x)",
]
DEAD = [
    "result = await check(x)",
    "_ = check_plain(x)",
    "(_ := await check(x))",
    "_ = [await check(x) for _ in range(2)]\n_, _ = check_plain(x), [check_plain(x)]",
    f"{MANY_NAMES}\n_ = [{READ_MANY} for _ in 'ab']",
    "takes(check_plain(x))\nkeeps_a_name(x)",
    "_ = helper(x)\n_ = await async_helper(x)\n_ = await sub_graph(x)",
    "_ = await ps.cond(x, check, double, x)\n_ = await ps.map_each(check, [x])",
    "_ = numbers(x)",
]


def graph_of(body: str) -> ps.Graph[[int], Any]:
    graph: ps.Graph[[int], Any] = define(f"@ps.graph\nasync def g(x):\n{indent(body, '    ')}", **globals())
    return graph


@pytest.mark.parametrize("body", STAY, ids=lambda body: body.splitlines()[-1][-60:])
async def test_a_call_that_is_a_statement_of_its_own_stays(body: str) -> None:
    graph = graph_of(body)
    with pytest.raises(RefusedError):
        await engine.run(graph(1))
    assert "for its effect: " in str(engine.plan(graph))


@pytest.mark.parametrize("body", DEAD, ids=lambda body: body.splitlines()[-1][-60:])
async def test_a_result_with_a_name_that_is_never_read_is_dead(body: str) -> None:
    graph = graph_of(body)
    with structlog.testing.capture_logs() as logged:
        assert await engine.run(graph(1)) is None
    assert [line["event"] for line in logged] == ["plan.dead_nodes"]
    assert "for its effect: " not in str(engine.plan(graph))


def test_a_stream_that_is_a_statement_of_its_own_is_refused() -> None:
    async def opened(x: int) -> int:
        numbers(x)
        return await double(x)

    async def mapped(x: int) -> int:
        ps.map_each(double, numbers(x))
        return await double(x)

    for body in (opened, mapped):
        with pytest.raises(ps.PlanError, match=r"no node reads the stream of .*, so the step would not run; read"):
            engine.plan(ps.graph(body))
