"""Plain sources, in every way in which the engine steps them: by a worker, in their own task, or without a task."""

import asyncio
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, paused, plain

var: ContextVar[str] = ContextVar("var", default="unset")


class Source:
    """Gives calls, and records its context variable and task at each step; `end` may raise."""

    def __init__(self, graph: Any, end: Callable[[], None] = lambda: None) -> None:
        self.seen: list[str] = []
        self.tasks: list[asyncio.Task[Any] | None] = []
        self._graph = graph
        self._end = end

    def __iter__(self) -> Iterator[Any]:
        for x in range(6):
            self._note()
            var.set(f"set at {x}")
            yield self._graph(x)
        self._note()
        self._end()

    def _note(self) -> None:
        self.seen.append(var.get())
        self.tasks.append(asyncio.current_task())


of_plain = ps.graph(plain)


of_suspending = ps.graph(paused)


STEPS = ["caller", *[f"set at {x}" for x in range(6)]]


@pytest.mark.parametrize("graph", [of_plain, of_suspending])
@pytest.mark.parametrize("is_deployed", [False, True])
async def test_a_source_sees_its_callers_variables_and_its_own(graph: Any, is_deployed: bool) -> None:
    var.set("caller")
    source = Source(graph)
    async with (
        engine.deploy(graph) as service,
        service.stream(source) if is_deployed else engine.stream(source) as results,
    ):
        assert [x async for x in results] == list(range(6))
    assert source.seen == STEPS
    assert var.get() == "caller"


async def test_also_where_it_is_stepped_outside_of_any_task() -> None:
    var.set("caller")
    gate = Gate()
    source = Source(gate.graph(concurrency=1))
    async with engine.stream(source) as results:
        await testing.wait_quiescent()
        assert None in source.tasks
        gate.open()
        assert [x async for x in results] == list(range(6))
    assert source.seen == STEPS
    assert var.get() == "caller"


ERRORS: list[tuple[type[BaseException], type[BaseException]]] = [
    (LookupError, LookupError),
    (StopAsyncIteration, RuntimeError),
    (asyncio.CancelledError, ps.NodeCancelledError),
    (KeyboardInterrupt, KeyboardInterrupt),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS)
async def test_an_error_there_comes_in_its_turn_like_any_other(
    error: type[BaseException], expected: type[BaseException]
) -> None:
    def end() -> None:
        raise error("of the source")

    gate = Gate()
    source = Source(gate.graph(concurrency=1), end)
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    found: list[int] = []
    with pytest.raises(expected) as caught:
        await _read(source, gate, found)
    assert "of the source" in (str(caught.value), str(caught.value.__cause__))
    assert source.tasks[-1] is None
    # KeyboardInterrupt ends the whole program at once.
    assert found == ([] if error is KeyboardInterrupt else list(range(6)))
    assert unhandled == []


async def _read(source: Source, gate: Gate, found: list[int]) -> None:
    async with engine.stream(source) as results:
        await testing.wait_quiescent()
        gate.open()
        async for x in results:
            found.append(x)  # noqa: PERF401 - keeps the results before an error


@ps.node(concurrency=2, capacity=3)
async def narrow(x: int) -> int:
    await asyncio.sleep(x % 3)
    return x


of_narrow = ps.graph(narrow)


@given(
    runs=st.lists(st.tuples(st.sampled_from([of_narrow, of_suspending, of_plain]), st.integers(1, 8)), max_size=8),
    raises=st.booleans(),
    window=st.sampled_from([1, 3, 7, 30]),
    seed=st.integers(0, 1000),
)
def test_items_that_wait_to_enter_come_out_in_order_before_the_end_of_their_source(
    runs: list[tuple[Any, int]], raises: bool, window: int, seed: int
) -> None:
    graphs = [graph for graph, length in runs for _ in range(length)]

    def source() -> Iterator[Any]:
        for x, graph in enumerate(graphs):
            yield graph(x)
        if raises:
            raise LookupError("the end")

    async def main() -> tuple[list[int], bool]:
        seen: list[int] = []
        stream = engine.stream(source(), max_in_flight=window)
        try:
            async for value in stream:
                seen.append(value)
                assert stream.statistics().in_flight <= window
        except LookupError:
            return seen, True
        return seen, False

    assert testing.run_seeded(main, seed=seed) == (list(range(len(graphs))), raises)
