"""Random graph functions do the same traced as called, under every scheduler, with passes and without passes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

import pytest
import structlog
from hypothesis import given, note, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import engine
from penstock.engine.program import data_edges
from tests.engine.programs import HELPERS, KINDS, Kind, Oracle, Program, is_ordered, programs, source_of
from tests.kit import SCHEDULERS, values_of


@pytest.fixture(autouse=True, scope="module")
def _no_warnings_of_dead_nodes() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


class Refused(Exception):
    pass


Made: TypeAlias = tuple[str, int]  # the name of a node, and a value that it returned


def define(
    program: Program, calls: Counter[str], made: list[Made] | None = None, refused: Made | None = None
) -> ps.Graph[[int, int], Any]:
    """The graph of a program; its nodes count their calls.

    Args:
        program: the program.
        calls: how often each node was called.
        made: the values that the nodes have returned, in this order.
        refused: the node and the value at which a call fails.
    """
    note(source_of(program))
    made = [] if made is None else made
    nodes = {name: make_node(name, kind, calls, made, refused) for name, kind in {**KINDS, **HELPERS}.items()}
    names: dict[str, Any] = {"ps": ps, **nodes}
    exec(compile(source_of(program), "<random graph>", "exec"), names)
    graph: ps.Graph[[int, int], Any] = names["g"]
    return graph


def make_node(name: str, kind: Kind, calls: Counter[str], made: list[Made], refused: Made | None) -> ps.Node[..., Any]:
    def plain(*args: Any) -> Any:
        calls[name] += 1
        value = kind.compute(*args)
        made.append((name, value))
        if (name, value) == refused:
            raise Refused
        return value

    async def suspending(*args: Any) -> Any:
        await asyncio.sleep(0)
        return plain(*args)

    fn: Callable[..., Any] = suspending if kind.is_async else plain
    return ps.node(name=name, pure=kind.pure, effectful=kind.effectful)(fn)


@given(program=programs(), x=st.integers(0, 5), y=st.integers(0, 5))
async def test_a_traced_graph_does_what_plain_python_does(program: Program, x: int, y: int) -> None:
    calls: Counter[str] = Counter()
    graph = define(program, calls)
    plainly, optimised = Oracle(with_passes=False), Oracle(with_passes=True)
    expected = plainly.run(program, {"x": x, "y": y})
    assert optimised.run(program, {"x": x, "y": y}) == expected
    assert await graph(x, y) == expected
    assert calls == plainly.calls
    for scheduler in SCHEDULERS:
        calls.clear()
        assert await engine.run(graph(x, y), scheduler=scheduler) == expected
        assert calls == optimised.calls
    calls.clear()
    assert await values_of(engine.stream([graph(x, y)] * 3)) == [expected] * 3
    assert calls == {name: 3 * count for name, count in optimised.calls.items()}


# In plain Python, a failure leaves coroutines behind that later lines would have awaited.
@pytest.mark.filterwarnings("ignore:coroutine 'make_node", "ignore:Exception ignored in. <coroutine object make_node")
@given(program=programs(), x=st.integers(0, 5), fails=st.none() | st.integers(0, 30))
async def test_effects_come_in_the_order_of_plain_python_and_none_behind_a_failure(
    program: Program, x: int, fails: int | None
) -> None:
    made: list[Made] = []
    await define(program, Counter(), made)(x, 1)
    refused = None if fails is None or not made else made[fails % len(made)]
    made.clear()
    graph = define(program, Counter(), made, refused)
    with suppress(Refused):
        await graph(x, 1)
    expected = effects_of(made)
    for scheduler in SCHEDULERS:
        made.clear()
        with suppress(Refused):
            await engine.run(graph(x, 1), scheduler=scheduler)
        assert effects_of(made) == expected
    made.clear()
    with suppress(Refused):
        async with engine.stream([graph(x, 1)]) as results:
            await anext(results)
    assert effects_of(made) == expected


def effects_of(made: list[Made]) -> list[Made]:
    """The values of the nodes whose effects keep their order."""
    return [(name, value) for name, value in made if name in KINDS and KINDS[name].effectful is True]


@given(program=programs())
@settings(max_examples=settings().max_examples // 2)
def test_without_ordered_effects_a_step_waits_for_data_alone(program: Program) -> None:
    plan = engine.plan(define(program, Counter()))
    has_effects = any(map(is_ordered, program.lines))
    units = plan._program("actors").units
    by_data = {index: len(sources) for index, sources in data_edges(units).items()}
    assert has_effects or {unit.index: unit.countdown for unit in units} == by_data
    assert has_effects or "order of effects" not in str(plan)
