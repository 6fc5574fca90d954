"""Why a node was compiled again: told in its statistics, and logged once per cause."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import structlog

import penstock as ps
from penstock import devices, engine
from penstock.devices.compiling import CompileCache
from penstock.devices.recompilation import CompileLog
from tests.devices.compiled import called, leased, program

Events = list[Any]


@pytest.fixture
def events() -> Iterator[Events]:
    with structlog.testing.capture_logs() as logged:
        yield logged


@pytest.fixture
def cache() -> Iterator[CompileCache]:
    with leased(CompileCache()) as cache:
        yield cache


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


CHANGES: dict[str, tuple[Any, Any, tuple[str, str, str, str]]] = {
    "shape": (ones(3), ones(4), ("x", "shape", "float32[3]", "float32[4]")),
    "dtype": (ones(3), ones(3, dtype=np.int32), ("x", "dtype", "float32[3]", "int32[3]")),
    "weak type": (np.float32(1), 1.0, ("x", "weak type", "float32[]", "weakly typed float32[]")),
    "structure": ([ones(1), None], [ones(1)] * 2, ("x", "structure", "[float32[1], None]", "[float32[1], float32[1]]")),
    "leaf": ({"a": 1, "b": [ones(2)]}, {"a": 1, "b": [ones(5)]}, ("x['b'][0]", "shape", "float32[2]", "float32[5]")),
    "array to tree": (ones(1), [ones(1)], ("x", "structure", "float32[1]", "[float32[1]]")),
}  # fmt: skip


@pytest.mark.parametrize(("first", "second", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_explained(
    first: Any, second: Any, expected: tuple[str, ...], cache: CompileCache, events: Events
) -> None:
    node = program(lambda x: jax.tree.map(lambda leaf: leaf + 1, x))
    called(cache, node, first)
    assert node.log.statistics().recompilations == ()
    called(cache, node, second)
    [reason] = node.log.statistics().recompilations
    assert (reason.argument, reason.cause, reason.before, reason.after) == expected
    assert reason.program == 2
    names = ("event", "node", "argument", "cause", "before", "after", "remedy")
    assert [[event[name] for name in names] for event in events] == [
        ["program.recompiled", "node", *expected, reason.remedy]
    ]


def test_the_most_similar_earlier_program_is_what_it_is_told_against_and_each_cause_is_logged_once(
    cache: CompileCache, events: Events
) -> None:
    node = program(lambda x, y: x.sum() + y.sum(), "x", "y")
    for sizes in ((3, 3), (7, 8), (3, 9)):
        called(cache, node, *map(ones, sizes))
    assert [(event["event"], event["argument"]) for event in events] == [
        ("program.recompiled", "x"), ("program.recompiled", "y")
    ]  # fmt: skip
    assert [str(reason) for reason in node.log.statistics().recompilations] == [
        "program 2: shape of x: float32[3] -> float32[7]",
        "program 2: shape of y: float32[3] -> float32[8]",
        "program 3: shape of y: float32[3] -> float32[9]",
    ]


def test_a_configuration_is_named_with_its_values(cache: CompileCache) -> None:
    node = program(lambda x: x @ x)
    called(cache, node, ones(3))
    with jax.default_matmul_precision("highest"):
        called(cache, node, ones(3))
    [reason] = node.log.statistics().recompilations
    assert (reason.cause, reason.argument) == ("configuration", "jax_default_matmul_precision")
    assert (reason.before, reason.after) == ("None", "'highest'")


def test_shapes_that_a_caller_bounds_are_no_cause_for_a_log(cache: CompileCache, events: Events) -> None:
    node = program(lambda x: x + 1, bucketed=(frozenset({0}),))
    for size in range(1, 13):
        called(cache, node, ones(size))
    assert events == []
    reasons = node.log.statistics().recompilations
    assert len(reasons) == 11
    assert {reason.remedy for reason in reasons} == {""}


@pytest.mark.parametrize(
    ("bucketed", "first", "second", "is_meant"),
    [
        ({0}, ones(1, 3), ones(2, 4), False),
        ({0, 1}, ones(1, 8, 3), ones(4, 16, 3), True),
        ({0, 1}, ones(1, 8, 3), ones(4, 16, 5), False),
        ({0}, ones(1, 3), ones(1, 3, 1), False),
        (set(), ones(3), ones(4), False),
    ],
)
def test_a_batch_is_told_what_its_buckets_do_not_bound_yet(
    bucketed: set[int], first: Any, second: Any, is_meant: bool, cache: CompileCache, events: Events
) -> None:
    node = program(lambda x: x + 1, bucketed=(frozenset(bucketed),))
    called(cache, node, first)
    called(cache, node, second)
    [reason] = node.log.statistics().recompilations
    assert reason.cause == "shape"
    assert bool(reason.remedy) is not is_meant
    assert [event["remedy"] for event in events] == [reason.remedy] * bool(reason.remedy)


@ps.resource
async def weights() -> AsyncIterator[Any]:
    yield ones(3)


def called_both_ways(node: Any) -> Any:
    @ps.graph
    async def of_both(x: Any, w: Any) -> Any:
        return [node(x, await weights()), node(x, w)]

    return of_both


async def test_one_program_serves_arguments_from_resources_and_from_callers(events: Events) -> None:
    node = ps.device_node(device="cpu", pure=False)(lambda x, w: x * w)
    await engine.run(called_both_ways(node)(ones(3), 2 * ones(3)))
    statistics = node.compile_statistics()
    assert (statistics.programs, statistics.recompilations) == (1, ())
    assert events == []


async def test_a_batch_has_a_program_for_each_of_them_and_says_so(events: Events) -> None:
    node = ps.device_node(name="scaled", device="cpu", batch=ps.Batch(1))(lambda x, w: x * w)
    results = await engine.run(called_both_ways(node)(ones(3), 2 * ones(3)))
    assert [np.asarray(result).tolist() for result in results] == [[1, 1, 1], [2, 2, 2]]
    [reason] = node.compile_statistics().recompilations
    assert (reason.cause, reason.argument) == ("resource", "w")
    assert {reason.before, reason.after} == {"passed by callers", "from a resource"}
    [event] = events
    assert (event["node"], event["cause"], event["remedy"]) == ("scaled", "resource", reason.remedy)
    assert "from a @resource wherever the node is called, or nowhere" in reason.remedy


TABLE = ones(3)


def scaled_by_a_table(**options: Any) -> tuple[Any, Any]:
    node = ps.device_node(name="scaled", device="cpu", batch=ps.Batch(1), **options)(lambda x, table: x * table)

    @ps.graph
    async def by_table(x: Any) -> Any:
        return node(x, TABLE)

    return node, by_table


async def test_a_constant_of_the_graph_is_no_resource_in_the_words_for_its_program(events: Events) -> None:
    node, by_table = scaled_by_a_table()
    await node.warmup(ones(3), TABLE)
    await engine.run(by_table(ones(3)))
    [reason] = node.compile_statistics().recompilations
    assert (reason.cause, reason.argument, reason.before) == ("constant", "table", "passed by callers")
    assert reason.after == "passed once for the whole batch: a constant of the graph"
    [event] = events
    assert (event["node"], event["cause"], event["remedy"]) == ("scaled", "constant", reason.remedy)
    assert "shared=" in reason.remedy


@pytest.mark.parametrize("way", ["constants", "shared"])
async def test_a_batched_node_is_warmed_for_a_constant_of_the_graph(way: str, events: Events) -> None:
    node, by_table = scaled_by_a_table(**({"shared": ("table",)} if way == "shared" else {}))
    await (node.warmup(ones(3), TABLE) if way == "shared" else node.warmup(ones(3), constants={"table": TABLE}))
    assert node.compile_statistics().misses == 1
    await engine.run(by_table(ones(3)))
    statistics = node.compile_statistics()
    assert (statistics.programs, statistics.misses, statistics.hits) == (1, 1, 1)
    assert events == []


async def test_lengths_of_buckets_are_meant_and_other_axes_have_a_remedy(events: Events) -> None:
    batch = devices.DeviceBatch(2, pad_axes={"x": 0})
    of = ps.graph(ps.device_node(device="cpu", batch=batch)(lambda x, mask=None: x.sum(where=mask[:, None])))
    for length in (1, 9, 17):
        assert float(await engine.run(of(ones(length, 2)))) == 2 * length
    assert events == []
    assert float(await engine.run(of(ones(1, 3)))) == 3
    [event] = events
    assert (event["argument"], event["cause"]) == ("x", "shape")
    assert "pad_axes=" in event["remedy"]


def test_a_program_that_was_evicted_says_so(cache: CompileCache) -> None:
    node = program(lambda x: x + 1)
    cache.resize(1)
    for size in (1, 2, 1):
        called(cache, node, ones(size))
    assert [reason.cause for reason in node.log.statistics().recompilations] == ["shape", "eviction"]


def test_a_function_that_is_made_anew_for_each_call_is_explained(cache: CompileCache, events: Events) -> None:
    log = CompileLog()
    for _ in range(3):
        called(cache, program(lambda x: x + 1, name="run", log=log), ones(3))
    assert [reason.cause for reason in log.statistics().recompilations] == ["function", "function"]
    [event] = events
    assert "test_recompilations.py" in event["before"]
    assert "outside of the loop" in event["remedy"]


def test_programs_of_a_node_that_are_meant_to_be_several_are_not_explained(cache: CompileCache, events: Events) -> None:
    log = CompileLog()

    def fn(x: Any) -> Any:
        return x + 1

    for device in range(3):
        called(cache, program(fn, device=device, log=log), ones(3))
    called(cache, program(jax.vmap(fn), log=log), ones(3))
    assert log.statistics().recompilations == ()
    assert log.statistics().programs == 4
    assert events == []


@pytest.mark.parametrize("batch", [None, ps.Batch(4)])
async def test_each_run_on_a_device_is_a_hit_or_a_miss(batch: ps.Batch | None) -> None:
    doubled = ps.device_node(device="cpu", batch=batch)(lambda x: x * 2)
    double = ps.graph(doubled)
    for number, (size, counted) in enumerate([(2, (0, 1)), (2, (1, 1)), (3, (1, 2)), (2, (2, 2)), (3, (3, 2))]):
        await engine.run(double(np.full(size, number, np.float32)))
        statistics = doubled.compile_statistics()
        assert (statistics.hits, statistics.misses) == counted
