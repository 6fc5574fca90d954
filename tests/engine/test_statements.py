"""A call that is its own statement stays, and its failure fails the call; a named result that nothing reads is dead."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import structlog

import penstock as ps
from penstock import engine
from tests.kit import numbers

Body = Callable[[int], Any]


class RefusedError(Exception):
    """The error that the node `check` raises."""


@ps.node
async def check(x: int) -> int:
    raise RefusedError(x)


@ps.node
def check_plain(x: int) -> int:
    raise RefusedError(x)


@ps.node
async def double(x: int) -> int:
    return 2 * x


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


async def stays_awaited(x: int) -> None:
    await check(x)


async def stays_plain(x: int) -> None:
    check_plain(x)


async def stays_behind_the_result(x: int) -> int:
    result = await double(x)
    await check(result)
    return result


async def stays_awaited_later(x: int) -> None:
    call = check(x)
    await call


async def stays_in_a_loop(x: int) -> None:
    for number in range(3):
        await (check if number == 2 else double)(x)


async def stays_in_one_branch(x: int) -> None:
    await check(x) if shop else None


async def stays_behind_and(x: int) -> None:
    shop and await check(x)


async def stays_in_a_comprehension(x: int) -> None:
    [await check(x) for _ in range(2)]


async def stays_in_other_comprehensions(x: int) -> None:
    {name: check_plain(x) for name in "ab" for _ in "ab" if shop}


async def stays_in_a_nested_comprehension(x: int) -> None:
    [[await check(x) for _ in name] for name in "ab"]


async def stays_through_map(x: int) -> None:
    list(map(check_plain, [x]))


async def stays_in_helpers(x: int) -> None:
    helper(x)


async def stays_in_a_helper_with_a_loop(x: int) -> None:
    helper_in_a_loop(x)


async def stays_in_an_async_helper(x: int) -> None:
    await async_helper(x)


async def stays_inside_of_a_helper_whose_result_has_a_name(x: int) -> None:
    _ = await checks_inside(x)


async def stays_in_a_wrapper(x: int) -> None:
    wrapped(x)


async def stays_in_a_partial(x: int) -> None:
    partial()


async def stays_in_a_lambda(x: int) -> None:
    (lambda: check_plain(x))()  # noqa: PLC3002


async def stays_in_a_sub_graph(x: int) -> None:
    await sub_graph(x)


async def stays_in_a_sub_graph_of_many(x: int) -> None:
    await sub_graph_of_many(x)


async def stays_in_a_chain(x: int) -> None:
    await (double >> check)(x)


async def stays_a_method(x: int) -> None:
    await shop.check(x)


async def stays_a_copy(x: int) -> None:
    await check.with_policy(name="copy", retry=ps.Retry(2), failover=check_plain)(x)  # type: ignore[arg-type]


async def stays_a_kept_result(x: int) -> None:
    await check.with_policy(cache=ps.Cache(max_bytes=1_000, ttl_seconds=1))(x)


async def stays_a_step_of_one_line(x: int) -> None:
    ps.apply(check_plain.fn, x)


async def stays_one_branch_of_cond(x: int) -> None:
    await ps.cond(x, check, double, x)


async def stays_each_of_a_map(x: int) -> None:
    await ps.map_each(check, [x, x])


async def stays_rounds_of_a_loop(x: int) -> None:
    await ps.while_loop(lambda x: x, check, x, max_iterations=3)


async def stays_a_fold(x: int) -> None:
    await ps.fold(lambda state, value: check(value), numbers(x), 0)


async def stays_in_the_body_of_a_map(x: int) -> None:
    async def body(x: int) -> int:
        await check(x)
        return await double(x)

    _ = await ps.map_each(body, [x])


async def stays_in_the_body_of_a_branch(x: int) -> None:
    async def body(x: int) -> int:
        check_plain(x)
        return await double(x)

    _ = await ps.cond(x, body, double, x)


async def stays_of_a_value_around_the_body(x: int) -> int:
    call = check(x)

    async def body(y: int) -> int:
        await call
        return await double(y)

    return await ps.cond(x, body, double, x)


async def dead_with_a_name(x: int) -> None:
    result = await check(x)  # noqa: F841


async def dead_with_the_name_of_no_name(x: int) -> None:
    _ = check_plain(x)


async def dead_with_a_name_in_an_expression(x: int) -> None:
    (_ := await check(x))  # noqa: PLW0131


async def dead_with_a_name_for_many(x: int) -> None:
    _ = [await check(x) for _ in range(2)]
    _, _ = check_plain(x), [check_plain(x)]


async def dead_passed_to_a_function(x: int) -> None:
    takes(check_plain(x))
    keeps_a_name(x)


async def dead_with_a_name_behind_helpers(x: int) -> None:
    _ = helper(x)
    _ = await async_helper(x)
    _ = await sub_graph(x)


async def dead_with_a_name_for_control_flow(x: int) -> None:
    _ = await ps.cond(x, check, double, x)
    _ = await ps.map_each(check, [x])


async def dead_with_a_name_for_a_stream(x: int) -> None:
    _ = numbers(x)


STAY: list[Body] = [body for name, body in vars().items() if name.startswith("stays_")]
DEAD: list[Body] = [body for name, body in vars().items() if name.startswith("dead_")]


@pytest.mark.parametrize("body", STAY, ids=lambda body: body.__name__)
async def test_a_call_that_is_a_statement_of_its_own_stays(body: Body) -> None:
    graph = ps.graph(body)
    with pytest.raises(RefusedError):
        await engine.run(graph(1))
    assert "for its effect: " in str(engine.plan(graph))


@pytest.mark.parametrize("body", DEAD, ids=lambda body: body.__name__)
async def test_a_result_with_a_name_that_is_never_read_is_dead(body: Body) -> None:
    graph = ps.graph(body)
    with structlog.testing.capture_logs() as logged:
        assert await engine.run(graph(1)) is None
    assert [line["event"] for line in logged] == ["plan.dead_nodes"]
    assert "for its effect: " not in str(engine.plan(graph))


@pytest.mark.parametrize("body", [*STAY, *DEAD], ids=lambda body: body.__name__)
async def test_calls_are_told_apart_without_source(body: Any) -> None:
    code = body.__code__.replace(co_filename="<no source>")
    cells = body.__closure__
    again = type(body)(code, body.__globals__, body.__name__, body.__defaults__, cells)
    with structlog.testing.capture_logs(), pytest.raises(RefusedError) if body in STAY else nullcontext():
        assert await engine.run(ps.graph(again)(1)) is None


async def test_a_long_body_has_longer_instructions() -> None:
    lines = [f"    a{number} = {number}.5" for number in range(300)]
    names = ", ".join(f"a{number}" for number in range(300))
    lines += [f"    [({names}) and await node(x) for _ in 'ab']", "    return x"]
    namespace: dict[str, Any] = {"node": check}
    exec("\n".join(["async def stays(x):", *lines]), namespace)
    exec("\n".join(["async def dead(x):", *lines]).replace("    [", "    _ = ["), namespace)
    with structlog.testing.capture_logs():
        with pytest.raises(RefusedError):
            await engine.run(ps.graph(namespace["stays"])(1))
        assert await engine.run(ps.graph(namespace["dead"])(1)) == 1


async def test_a_statement_stays_in_a_stream_and_fails_its_item_only() -> None:
    @ps.node
    async def odd(x: int) -> None:
        if not x % 2:
            raise RefusedError(x)

    @ps.graph
    async def graph(x: int) -> int:
        await odd(x)
        return await double(x)

    async with engine.stream((graph(x) for x in range(4)), on_error="skip") as results:
        assert [x async for x in results] == [2, 6]


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
