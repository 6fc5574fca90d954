"""Execution options: five levels of precedence, the effect of each field, and errors that name the valid values."""

import asyncio
import contextvars
import dataclasses
import gc
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, get_type_hints

import anyio.to_thread
import pytest

import penstock as ps
from penstock import engine
from penstock.engine import CallOptions
from tests.kit import Gate, begun, values_of


@ps.node
async def waits() -> float | None:
    return ps.current().remaining_seconds()


remaining = ps.graph(waits)


@pytest.fixture(autouse=True)
def defaults() -> Any:
    """Undoes the options that a test sets for the process."""
    yield
    ps.set_execution_options()


def test_the_keywords_of_a_call_mirror_the_options() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(ps.ExecutionOptions)}
    assert list(get_type_hints(CallOptions)) == list(fields)
    late = {"Durable": ps.Durable}  # `penstock` loads the name when it is first used
    assert get_type_hints(CallOptions) == get_type_hints(ps.ExecutionOptions, localns=late)
    assert CallOptions.__required_keys__ == frozenset()


def test_they_are_frozen_and_take_keywords_only() -> None:
    options = ps.ExecutionOptions(max_in_flight=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.max_in_flight = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        ps.ExecutionOptions("wave")  # type: ignore[misc]


async def test_a_keyword_wins_over_contexts_those_over_the_engine_that_over_the_process() -> None:
    async def seconds(**options: Any) -> int | None:
        found = await own.run(remaining(), **options)
        return None if found is None else round(found)

    async with engine.Engine() as own:
        assert await seconds() is None
        ps.set_execution_options(timeout_seconds=1000)
        assert await seconds() == 1000
    async with engine.Engine(timeout_seconds=2000) as own:
        assert await seconds() == 2000
        with ps.execution_options(timeout_seconds=3000):
            assert await seconds() == 3000
            with ps.execution_options(scheduler="wave", timeout_seconds=4000):
                assert await seconds() == 4000
                assert await seconds(timeout_seconds=5000) == 5000
                assert await seconds(timeout_seconds=None) is None
            assert await seconds() == 3000
        assert await seconds() == 2000


async def test_a_context_that_is_left_in_another_task_changes_nothing_there() -> None:
    left = asyncio.Event()

    async def inside() -> None:
        with ps.execution_options(timeout_seconds=1000):
            await left.wait()

    [task] = await begun(inside())
    assert await _run() is None
    left.set()
    await task


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduler", "quick"), ("on_error", "ignore"), ("max_workers", 0), ("max_in_flight", True), ("max_queue", -1),
        ("max_in_flight", 1.5), ("priority", "high"), ("timeout_seconds", -1), ("timeout_seconds", float("nan")),
        ("ordered", "no"), ("reuse_plans", 1), ("device_strategy", ""), ("device_strategy", "gpu:first"),
        ("device_strategy", None), ("device_strategy", 0),
    ],
)  # fmt: skip
def test_a_value_out_of_its_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ps.OptionsError, match=f"{name}={value!r}"):
        ps.ExecutionOptions(**{name: value})


def test_names_that_no_device_can_have_are_answered_with_those_that_one_can() -> None:
    with pytest.raises(ps.OptionsError, match=r"'auto'.* 'cpu', 'gpu', 'cuda', 'rocm' or 'tpu'.* 'gpu:1'"):
        ps.set_execution_options(device_strategy="gpu 1")


async def test_an_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises(ps.OptionsError) as caught:
        await engine.run(remaining(), timeout=3)  # type: ignore[call-arg]
    assert "'timeout'" in str(caught.value)
    assert "timeout_seconds" in str(caught.value)
    misspelt: Any = {"max_inflight": 3}
    for use in (ps.set_execution_options, engine.Engine, lambda **options: ps.execution_options(**options).__enter__()):
        with pytest.raises(ps.OptionsError, match="'max_inflight' is no execution option"):
            use(**misspelt)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("use_parallel", "leave it out: nodes that do not wait for each other run at the same time"),
        ("retry", r"retry= is for nodes, @ps.node\(retry=...\)"),
        ("max_in_flight", "max_in_flight= is for stream, deploy, Engine"),
        ("colour", "trace_execution"),
    ],
)
async def test_an_option_that_is_refused_is_told_what_to_write_instead(name: str, remedy: str) -> None:
    wrong: Any = {name: 3}
    with pytest.raises(ps.OptionsError, match=f"'{name}' .*options of run are .*{remedy}$"):
        await engine.run(remaining(), **wrong)


@pytest.mark.parametrize("name", ["max_in_flight", "max_queue", "ordered", "on_error", "priority", "trace_items"])
async def test_an_option_that_does_not_apply_to_a_verb_is_refused_there_and_not_in_a_context(name: str) -> None:
    value: Any = {"ordered": False, "on_error": "skip", "trace_items": True}.get(name, 2)
    with pytest.raises(ps.OptionsError, match=name):
        await engine.run(remaining(), **{name: value})
    with ps.execution_options(**{name: value}):
        assert await _run() is None


@ps.node
async def values(x: list[int]) -> AsyncIterator[int]:
    for value in x:
        yield value


async def test_without_caching_each_run_stream_and_deployment_traces_anew_and_merges_no_equal_calls() -> None:
    seen: Counter[str] = Counter()

    @ps.node(pure=True)
    async def once(x: int) -> int:
        seen["call"] += 1
        return x

    @ps.graph
    async def graph(x: int) -> list[int]:
        seen["trace"] += 1
        return [await once(x), await once(x)]

    @ps.graph
    async def giving(x: int) -> AsyncIterator[int]:
        seen["trace"] += 1
        return values([await once(x), await once(x)])

    def counts() -> tuple[int, int]:
        """Return the number of traces, and of calls of the pure node, since `counts` was last called."""
        found = seen["trace"], seen["call"]
        seen.clear()
        return found

    async with engine.Engine() as own:
        for _ in range(3):
            assert await own.run(graph(1)) == [1, 1]
        assert counts() == (1, 3)
        actors = len(own.statistics().actors)
        for _ in range(3):
            assert await own.run(graph(1), reuse_plans=False) == [1, 1]
        assert counts() == (3, 6)
        results = own.stream((graph(x) for x in range(3)), reuse_plans=False)
        assert await values_of(results) == [[0, 0], [1, 1], [2, 2]]
        assert counts() == (1, 6)
        async with own.deploy(graph, reuse_plans=False) as service:
            assert [await service(1), await service(2)] == [[1, 1], [2, 2]]
        assert counts() == (1, 4)
        for is_cached, expected in ((True, (1, 1)), (False, (1, 2)), (True, (0, 1))):
            assert await values_of(own.stream(giving(1), reuse_plans=is_cached)) == [1, 1]
            assert counts() == expected
        # The cached plan is the same as before, and no other plan was kept.
        assert await own.run(graph(1)) == [1, 1]
        assert counts() == (0, 1)
        gc.collect()
        assert len(own.statistics().actors) == actors
        assert "merged once" in str(own.plan(graph))
        with ps.execution_options(reuse_plans=False):
            assert "merged" not in str(own.plan(graph))


async def test_max_queue_and_priority_decide_who_waits_for_a_place() -> None:
    gate = Gate()
    graph = gate.graph()
    async with engine.deploy(graph, max_in_flight=1, max_queue=2) as service:
        calls = await begun(*(service.run(graph(n), priority=n) for n in range(3)))
        with pytest.raises(ps.Overloaded):
            await service.run(graph(3))
        gate.open()
        await asyncio.gather(*calls)
    assert gate.gone == [0, 2, 1]


async def _run() -> float | None:
    return await engine.run(remaining())


@ps.node
async def fail() -> int:
    raise LookupError


failing = ps.graph(fail)


async def _skips() -> bool:
    try:
        return await values_of(engine.stream([failing()])) == []
    except LookupError:
        return False


def skips() -> bool:
    """As `_skips`, in a loop of its own."""
    return asyncio.run(_skips())


@ps.node
async def skips_on_loop() -> bool:
    return await asyncio.create_task(_skips())


asking_a_thread = ps.graph(ps.node(runs_on="thread")(skips))
asking_the_loop = ps.graph(skips_on_loop)


async def by_thread(ask: Callable[[], bool] = skips) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


async def by_executor() -> bool:
    with ThreadPoolExecutor(1) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, skips)


@pytest.mark.parametrize(
    ("ask", "inherits"),
    [
        (lambda: asyncio.create_task(_skips()), True),
        (lambda: asyncio.to_thread(skips), True),
        (lambda: anyio.to_thread.run_sync(skips), True),
        (lambda: engine.run(asking_a_thread()), True),
        (lambda: engine.run(asking_the_loop()), True),
        (lambda: by_thread(partial(contextvars.copy_context().run, skips)), True),
        # From Python 3.14 on, threads may inherit the context of their starter; a build without a GIL does so by
        # default.
        (by_thread, bool(getattr(sys.flags, "thread_inherit_context", False))),
        (by_executor, bool(getattr(sys.flags, "thread_inherit_context", False))),
    ],
    ids=["task", "to_thread", "anyio", "node in a thread", "node", "copied context", "Thread", "executor"],
)
async def test_what_inherits_the_options_of_a_context(ask: Callable[[], Awaitable[bool]], inherits: bool) -> None:
    with ps.execution_options(on_error="skip"):
        assert await ask() is inherits
    assert not await ask()
