"""Which changes need another program, as in `jax.jit`, and what statistics and the log say of the cause."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog

import penstock as ps
from penstock import devices, engine
from penstock.devices import programs
from penstock.devices.compiling import CompileCache
from penstock.devices.recompilation import CompileLog

from .compiled import called, compiled, configured, leased, program
from .kit import graph_of, resource_of

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


weights = resource_of(lambda: ones(3))


def called_both_ways(node: Any) -> Any:
    return graph_of(lambda opened, x, w: [node(x, opened), node(x, w)], weights)


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
    by_table = graph_of(lambda x: node(x, TABLE))
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


def test_a_function_that_is_made_anew_for_each_call_is_explained(cache: CompileCache, events: Events) -> None:
    log = CompileLog()
    for _ in range(3):
        called(cache, program(lambda x: x + 1, name="run", log=log), ones(3))
    assert [reason.cause for reason in log.statistics().recompilations] == ["function", "function"]
    [event] = events
    assert "test_recompilations.py" in event["before"]
    assert "outside of the loop" in event["remedy"]


@pytest.mark.parametrize("batch", [None, ps.Batch(4)])
async def test_each_run_on_a_device_is_a_hit_or_a_miss(batch: ps.Batch | None) -> None:
    doubled = ps.device_node(device="cpu", batch=batch)(lambda x: x * 2)
    double = ps.graph(doubled)
    for number, (size, counted) in enumerate([(2, (0, 1)), (2, (1, 1)), (3, (1, 2)), (2, (2, 2)), (3, (3, 2))]):
        await engine.run(double(np.full(size, number, np.float32)))
        statistics = doubled.compile_statistics()
        assert (statistics.hits, statistics.misses) == counted


# Those that hold for all threads are in test_device_actors.py.
CONFIGURATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "x64, on this thread": lambda: jax.enable_x64(True),
    "matmul precision, on this thread": lambda: jax.default_matmul_precision("float32"),
    "NaNs, on this thread": lambda: jax.debug_nans(True),
    "promotion": lambda: configured("jax_numpy_dtype_promotion", "strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "mesh": lambda: jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("data",))),
}


@pytest.mark.parametrize("change", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_each_configuration_has_its_own_program(
    change: Callable[[], AbstractContextManager[Any]], cache: CompileCache
) -> None:
    node, args = program(lambda x: x * x), (np.ones(3, np.float32),)
    first = compiled(cache, node, *args)
    with change():
        assert cache.find(node, args) is None
        second = compiled(cache, node, *args)
        assert cache.find(node, args) is second
        np.testing.assert_array_equal(second(*args), np.ones(3))
    assert cache.find(node, args) is first
    with change():
        assert cache.find(node, args) is second
    assert {reason.cause for reason in node.log.statistics().recompilations} == {"configuration"}


@pytest.mark.parametrize("change", [nullcontext, lambda: jax.enable_x64(True)])
def test_the_configuration_of_the_caller_reaches_the_thread_that_compiles(
    change: Callable[[], AbstractContextManager[Any]], cache: CompileCache
) -> None:
    seen: list[Any] = []

    def fn(x: jax.Array) -> jax.Array:
        seen.append((x.dtype, jax.config.jax_enable_x64))
        return x + 1

    x = np.ones(2, np.float64)
    with change():
        result = called(cache, program(fn), x)
        expected = jax.jit(fn)(x)
    assert result.dtype == expected.dtype
    assert seen[0] == seen[1]
    assert jax.config.jax_enable_x64 is False


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clears the cached configuration; resets the x64 option afterwards."""
    monkeypatch.setattr(programs, "_known", {})
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("nothing_known")
def test_a_configuration_that_changes_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    original = programs._state
    changes = iter([True])

    def state() -> Hashable:
        read = original()
        for value in changes:  # changes the option once, as another thread could
            jax.config.update("jax_enable_x64", value)
        return read

    monkeypatch.setattr(programs, "_state", state)
    configuration = programs.current()
    assert configuration.state == original()
    jax.config.update("jax_enable_x64", False)
    with configuration.entered():
        assert jax.config.jax_enable_x64 is True


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("argument", [np.ones(2), [np.ones(2)], 2.5], ids=["array", "list", "number"])
def test_dtypes_are_those_of_a_configuration_whatever_has_been_set_meanwhile(argument: Any) -> None:
    jax.config.update("jax_enable_x64", True)
    configuration, node = programs.current(), program(lambda x: x)
    jax.config.update("jax_enable_x64", False)
    signatures = [programs.signature_of((argument,), (), configuration, node)]
    jax.config.update("jax_enable_x64", True)
    signatures.append(programs.signature_of((argument,), (), programs.current(), node))
    assert "float64" in str(signatures[0])
    assert signatures[0] == signatures[1]


@pytest.mark.usefixtures("nothing_known")
def test_what_is_set_while_a_program_is_compiled_is_none_of_its_business(cache: CompileCache) -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.config.update("jax_enable_x64", True)  # as another thread could
        return x + np.arange(3.0)

    x = np.ones(3)
    executable = compiled(cache, program(fn), x)
    jax.config.update("jax_enable_x64", False)
    assert executable(x).dtype == np.float32


VALUES: dict[str, Callable[[], Any]] = {
    "NumPy float32": lambda: np.ones((2, 3), np.float32),
    "NumPy float64": lambda: np.ones((2, 3)),
    "NumPy int64": lambda: np.arange(3),
    "NumPy bool": lambda: np.ones(3, bool),
    "NumPy scalar": lambda: np.float64(2.5),
    "array": lambda: jnp.ones(3, jnp.bfloat16),
    "weak array": lambda: jnp.asarray(1.5),
    "bool": lambda: True,
    "int": lambda: 3,
    "float": lambda: 2.5,
    "complex": lambda: 1j,
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), 3),
    "None": lambda: None,
    "list of numbers": lambda: [1, 2.5, True],
    "nested": lambda: {"a": (np.ones(2), None, [jnp.zeros(3)]), "b": 1},
    "big-endian": lambda: np.ones(2, ">f4"),
    "empty tuple": lambda: (),
}


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_what_jit_takes_is_taken_with_the_same_result(make: Callable[[], Any], x64: bool, cache: CompileCache) -> None:
    def is_key(leaf: Any) -> bool:
        return jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key)

    def fn(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf if is_key(leaf) else leaf * 2, x)

    node = program(fn)
    with jax.enable_x64(x64):
        value = make()
        try:
            expected = jax.jit(fn)(value)
        except TypeError:
            with pytest.raises(TypeError, match=r"node 'node': x is an array of >f4"):
                cache.find(node, (value,))
            return
        result = called(cache, node, value)
        assert cache.find(node, (make(),)) is not None
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for got, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert str(jax.typeof(got)) == str(jax.typeof(wanted))  # includes the weak type
            if not is_key(got):
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.several_devices
def test_what_has_the_same_type_for_jax_shares_a_program(cache: CompileCache) -> None:
    node = program(lambda x: x + 1)
    first = compiled(cache, node, np.ones(3, np.float32))
    for same in (np.zeros(3), jnp.ones(3), jax.device_put(jnp.ones(3), jax.devices("cpu")[1])):
        assert cache.find(node, (same,)) is first
    for other in (np.ones(4, np.float32), np.ones((3, 1), np.float32), np.ones(3, np.int32), 1.0, [np.ones(3)]):
        assert cache.find(node, (other,)) is None
    scalar = compiled(cache, node, 1.0)
    assert cache.find(node, (2.0,)) is scalar
    for other in (1, True, np.float32(1), jnp.float32(1)):
        assert cache.find(node, (other,)) is None
    assert compiled(cache, node, jax.ShapeDtypeStruct((3,), np.float32)) is first
