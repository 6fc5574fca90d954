"""Adjacent device nodes become one program if no other step reads the values between them; all other steps stay.

Random graphs compute what NumPy computes: as regions and node by node, alone and in batches.
"""

import asyncio
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import devices, engine
from tests.conftest import EFFORT
from tests.kit import values_of

from .kit import graph_of, names, report_of, resource_of


@pytest.fixture(autouse=True, scope="module")
def _no_warnings_of_dead_nodes() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


double = ps.device_node(name="double")(lambda x: x * 2)
add = ps.device_node(name="add")(lambda x, y: x + y)
increment = ps.device_node(name="increment")(lambda x: x + 1)
on_host = ps.node(name="on_host")(lambda x: np.asarray(x))  # noqa: PLW0108 - it has no signature


async def test_regions_cross_the_borders_of_graphs_and_join_diamonds() -> None:
    @ps.graph
    async def inner(x: Any) -> Any:
        shared = double(x)
        return add(increment(shared), shared)

    @ps.graph
    async def outer(x: Any, y: Any) -> Any:
        return add(await inner(x), await inner(y))

    assert names(outer) == ["double → increment → add → double → increment → add ×2"]
    assert float(await engine.run(outer(np.float32(1), np.float32(2)))) == 5 + 9


async def test_who_reads_between_divides() -> None:
    divided = graph_of(lambda x: (increment(between := double(x)), on_host(between), between))
    assert sorted(names(divided)) == ["double", "increment", "on_host"]

    returned = graph_of(lambda x: (increment(between := double(x)), between))
    assert sorted(names(returned)) == ["double", "increment"]

    @ps.graph
    async def two_regions(x: Any) -> Any:
        shared = double(double(x))
        return on_host(increment(increment(shared))), on_host(increment(double(shared)))

    # Two regions read `shared`; it belongs to neither.
    assert names(two_regions)[0] == "double ×2"
    assert len(engine.plan(two_regions).steps) == 5
    first, second = await engine.run(two_regions(np.float32(1)))
    assert (float(first), float(second)) == (6, 9)


async def test_an_effect_divides() -> None:
    booked: list[float] = []

    @ps.node(effectful=True)
    async def book(x: Any) -> None:
        booked.append(float(x))

    @ps.graph
    async def graph(x: Any) -> Any:
        before = double(increment(x))
        await book(x)
        return add(increment(double(before)), add(x, x))

    assert names(graph) == ["increment → double", "book", "double → increment → add ×2"]
    assert report_of(graph).notes == ()
    assert float(await engine.run(graph(1.0))) == 11.0
    assert booked == [1.0]


async def test_a_node_is_not_made_to_wait_for_more_than_it_reads() -> None:
    waits = graph_of(lambda x, y: add(double(x), on_host(y)))
    assert sorted(names(waits)) == ["add", "double", "on_host"]
    assert report_of(waits).notes == ("double is not in one program with add, which waits for more: it runs meanwhile",)

    waits_anyway = graph_of(lambda x: add(double(found := on_host(x)), increment(found)))
    assert names(waits_anyway) == ["on_host", "double → increment → add"]


POLICIES: dict[str, dict[str, Any]] = {
    "timeout": {"timeout_seconds": 9.0},
    "retry": {"retry": ps.Retry(2)},
    "fallback": {"fallback": lambda error: 0},
    "concurrency": {"concurrency": 2},
    "pure=False": {"pure": False},
    "fuse=False": {"fuse": False},
    "out_specs": {
        "device": ps.devices.DeviceMesh(shape=(2,), axis_names=("data",), device="cpu"),
        "out_specs": jax.sharding.PartitionSpec(),
    },
}


@pytest.mark.parametrize("word", POLICIES)
def test_what_has_rules_of_its_own_stays_alone_and_the_plan_says_why(word: str) -> None:
    special = ps.device_node(name="special", **POLICIES[word])(lambda x: x)

    around = increment >> increment >> special >> double >> double
    assert names(around) == ["increment ×2", "special", "double ×2"]
    note = next(note for note in report_of(around).notes if note.startswith("special stays a program of its own"))
    assert word.partition("=")[0] in note
    assert note in str(engine.plan(around))


async def test_a_call_keeps_its_nodes_apart_with_an_option() -> None:
    counted = ps.device_node(name="counted")(lambda x: x * 3)

    chain = increment >> counted >> increment
    with ps.execution_options(fuse=False):
        assert names(chain) == ["increment", "counted", "increment"]
        assert report_of(chain).notes == ("each device node is a program of its own: fuse=False",)
    assert names(chain) == ["increment → counted → increment"]
    for fuse, programs in ((True, 1), (False, 2), (True, 2)):
        assert float(await engine.run(chain(np.float32(3)), fuse=fuse)) == 13
        assert counted.compile_statistics().programs == programs
    assert chain.statistics().traces == 1
    async with engine.deploy(chain, fuse=False) as service:
        assert float(await service(np.float32(3))) == 13


def test_a_node_that_overwrites_ends_a_region() -> None:
    overwriting = ps.device_node(name="overwriting", donate=True)(lambda x: x + 1)

    around = increment >> increment >> overwriting >> double >> double
    assert names(around) == ["increment ×2 → overwriting", "double ×2"]
    assert report_of(around).notes == (
        "overwriting is not in one program with double behind it: it overwrites, by donate=True",
    )


def test_only_one_place_makes_a_region() -> None:
    elsewhere = ps.device_node(name="elsewhere", device="cpu:1")(lambda x: x)
    batched = ps.device_node(name="batched", batch=ps.Batch(4))(lambda x: x)
    masked = ps.device_node(name="masked", batch=devices.DeviceBatch(4, pad_axes={"x": 0}))(lambda x, mask=None: x)

    places = double >> double >> elsewhere >> elsewhere >> batched >> batched >> masked >> masked
    assert names(places) == ["double ×2", "elsewhere ×2", "batched ×2", "masked", "masked"]
    assert any("pad_axes" in note for note in report_of(places).notes)


async def test_a_fake_is_no_part_of_a_region() -> None:
    chain = increment >> double >> increment
    assert len(names(chain)) == 1
    with ps.testing.replace(double, lambda x: np.float32(100)):
        assert names(chain) == ["increment", "double", "increment"]
        assert float(await engine.run(chain(np.float32(3)))) == 101
    assert len(names(chain)) == 1


async def test_static_arguments_keywords_defaults_and_containers_are_kept() -> None:
    seen: list[object] = []

    @ps.device_node(static=("times",))
    def repeat(x: Any, times: int = 2, *, offset: Any = 0.5) -> Any:
        seen.append(type(times))
        return {"all": [x] * times, "offset": offset}

    @ps.device_node(static=("axis",))
    def total(values: Any, axis: Any = None) -> Any:
        return jnp.sum(jnp.stack(values["all"]), axis) + values["offset"]

    gathered = ps.device_node(lambda values: values["first"][0] + values["first"][1] * values["second"])
    table = np.arange(3, dtype=np.float32)

    @ps.graph
    async def containers(x: Any, times: int) -> Any:
        found = repeat(double(x), times)
        again = repeat(x, offset=table)
        return gathered({"first": (total(found, axis=0), found["all"][1]), "second": total(again)})

    (step,) = engine.plan(containers).steps
    x = np.ones(3, np.float32)
    result = await engine.run(containers(x, 3))
    np.testing.assert_allclose(result, (6 + 0.5) + 2 * (6 + table), rtol=1e-6)
    assert set(seen) == {int}
    assert list(step.head.callee._parameters) == ["x", "times", "offset"]


def test_what_a_program_is_compiled_for_is_not_computed_inside_it() -> None:
    repeat = ps.device_node(static=("times",), name="repeat")(lambda x, times: jnp.tile(x, times))  # noqa: PLW0108
    computed = graph_of(lambda x: repeat(x, increment(double(x))))
    assert names(computed) == ["double → increment", "repeat"]


async def test_what_one_node_gives_is_an_array_for_the_next_as_between_programs() -> None:
    of_numpy = ps.device_node(name="of_numpy")(lambda x: (np.zeros(3, np.float32), 2))
    changed = ps.device_node(name="changed")(lambda x: x[0].at[1].set(x[1].astype(np.float32)))
    chain = of_numpy >> changed
    assert names(chain) == ["of_numpy → changed"]
    assert (await engine.run(chain(np.float32(0)))).tolist() == [0, 2, 0]


async def test_a_resource_is_one_parameter_that_is_shared_by_a_batch() -> None:
    weights = resource_of(lambda: {"w": np.full((3,), 2, np.float32)})
    batch = ps.Batch(4)
    shapes: list[Any] = []

    @ps.device_node(batch=batch)
    def layer(w: Any, x: Any) -> Any:
        shapes.append(w["w"].shape)
        return w["w"] * x

    last = ps.device_node(batch=batch)(lambda x, w: x + w["w"])

    model = graph_of(lambda w, x: last(layer(w, layer(w, x)), w), weights)
    (step,) = engine.plan(model).steps
    assert list(step.head.callee._parameters) == ["w", "x"]
    async with engine.deploy(model) as service:
        results = await asyncio.gather(*[service.run(model(np.full(3, i, np.float32))) for i in range(6)])
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, np.full(3, 4 * i + 2, np.float32))
    assert set(shapes) == {(3,)}
    assert layer.compile_statistics() == last.compile_statistics()


async def test_what_one_member_takes_with_rows_is_not_shared_in_the_region() -> None:
    scaled = ps.device_node(name="scaled", batch=ps.Batch(4), shared=("table",))(lambda x, table: x * table)
    moved = ps.device_node(name="moved", batch=ps.Batch(4))(lambda x, y: x + y)
    squares = graph_of(lambda x: moved(scaled(x, x), x))
    with_number = graph_of(lambda x: moved(scaled(x, x), 2.0))
    with_table = graph_of(lambda x, table: moved(scaled(x, table), table))
    row = np.arange(3, dtype=np.float32)
    calls = [
        (squares, lambda i: (row * i,), lambda i: (row * i) ** 2 + row * i),
        (with_number, lambda i: (row * i,), lambda i: (row * i) ** 2 + 2),
        (with_table, lambda i: (row, row * i), lambda i: row * row * i + row * i),
    ]  # fmt: skip
    for graph, arguments, expected in calls:
        assert names(graph) == ["scaled → moved"]
        results = await asyncio.gather(*[engine.run(graph(*arguments(i))) for i in range(5)])
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result, expected(i))


weights = resource_of(lambda: np.arange(3, dtype=np.float32))


async def test_nodes_stay_apart_where_a_region_would_take_nothing_with_rows() -> None:
    batch = ps.Batch(4)
    scaled = ps.device_node(name="scaled", batch=batch, shared=("table",))(lambda x, table: x * table)
    moved = ps.device_node(name="moved", batch=batch, shared=("table",))(lambda x, table: x + table)
    taken = ps.device_node(name="taken", batch=batch)(lambda x, table: x * table)
    next_one = ps.device_node(name="next_one", batch=batch)(lambda x: x + 1)
    of_shared = graph_of(lambda table: moved(scaled(2.0, table), table))
    of_resource = graph_of(lambda w: taken(taken(2.0, w), w), weights)
    of_nothing = graph_of(lambda: next_one(next_one(2.0)))
    with_rows = graph_of(lambda x, table: moved(scaled(x, table), table))
    in_a_body = graph_of(
        lambda w, numbers: ps.map_each(lambda number: taken(taken(2.0, w), w), numbers), weights, awaits=True
    )
    table = np.arange(3, dtype=np.float32)
    assert names(of_shared) == ["scaled", "moved"]
    assert names(of_resource) == ["taken", "taken"]
    assert names(of_nothing) == ["next_one", "next_one"]
    assert names(with_rows) == ["scaled → moved"]
    assert report_of(of_shared).notes == (
        "scaled → moved is not one program: no argument would have a row for each call",
    )
    for call in (of_shared(table), with_rows(np.float32(2), table)):
        np.testing.assert_array_equal(await engine.run(call), [0, 3, 6])
    np.testing.assert_array_equal(await engine.run(of_resource()), [0, 2, 8])
    np.testing.assert_array_equal(await engine.run(in_a_body([1, 2])), [[0, 2, 8]] * 2)
    assert await engine.run(of_nothing()) == 4


async def test_a_region_is_compiled_for_what_the_samples_of_its_nodes_say() -> None:
    row = np.zeros(3, np.float32)
    first = ps.device_node(sample_input=[(row,), (row[:1],)], name="first")(lambda w, x: w * x)
    last = ps.device_node(sample_input=(row, row))(lambda x, y: x + y)
    model = graph_of(lambda w, x, y: last(first(w, x), y), weights)
    unknown = graph_of(lambda w, x: increment(first(w, double(x))), weights)

    async with engine.deploy(model, warmup=True) as service:
        assert first.compile_statistics().programs == last.compile_statistics().programs == 2
        assert (await service.run(model(row + 1, row + 2))).tolist() == [2, 3, 4]
        assert first.compile_statistics().programs == 2
    with pytest.raises(ps.PlanError, match="double → first → increment"):
        async with engine.deploy(unknown, warmup=True):
            pass


async def test_errors_name_all_nodes_and_the_one_that_failed() -> None:
    @ps.device_node
    def wrong(x: Any) -> Any:
        return x @ jnp.ones((7, 7))

    failing = double >> wrong >> increment
    with pytest.raises(TypeError) as caught:
        await engine.run(failing(np.ones((2, 3), np.float32)))
    notes = "\n".join(caught.value.__notes__)
    assert "in node 'wrong', called at " in notes
    assert "while compiling node 'double → wrong → increment'" in notes
    assert "of graph 'double" in notes


async def test_a_graph_that_is_made_or_traced_again_compiles_nothing() -> None:
    node, of_item = (ps.device_node(name=name)(lambda x: x + 1) for name in ("counted", "of_item"))

    async def run() -> Any:
        chain = graph_of(lambda x: (node(node(x)), of_item(x)[0]))
        await engine.run(chain(np.ones(3)))
        return chain

    first = await run()
    for _ in range(2):
        await run()
        gc.collect()
    with ps.testing.replace(on_host, lambda x: x):
        await engine.run(first(np.ones(3)))
    assert node.compile_statistics().programs == of_item.compile_statistics().programs == 1


async def test_bodies_have_regions_too() -> None:
    mapped = graph_of(lambda xs, y: ps.map_each(lambda x: add(double(increment(x)), y), xs), awaits=True)
    (step,) = engine.plan(mapped).steps
    assert [inner.head.callee.name for inner in step.bodies[0].steps] == ["increment → double → add"]
    assert [float(one) for one in await engine.run(mapped([1, 2], 10))] == [14, 16]


def test_drawings_of_the_graph_stay_the_users() -> None:
    chain = double >> increment
    for drawing in (str(chain), chain.to_mermaid(), chain.to_dot(), str(engine.plan(chain)).partition("plan of")[0]):
        assert "double" in drawing
        assert "→" not in drawing
    assert "regions: 2 → 1\n    one program for double → increment: 1 call of the device less" in str(
        engine.plan(chain)
    )


@pytest.mark.parametrize("count", [105, 3000])
def test_regions_are_cut_where_compiling_would_take_long(count: int) -> None:
    long = graph_of(lambda x: functools.reduce(lambda value, _: increment(value), range(count), x))
    rest = ["increment ×5"] if count % 50 else []
    assert sorted(names(long)) == rest + ["increment ×50"] * (count // 50)


N = 4


@dataclass(frozen=True)
class Kind:
    """A kind of node: its function, for JAX as well as NumPy, and the axes of its operands and its result.

    All numbers are positive, so that no sum cancels, and the error of a float32 stays small.
    """

    compute: Callable[..., Any]
    needs: tuple[int, ...]  # least number of axes of each operand
    axes: Callable[..., int]  # number of axes of the result, given the axes of the operands


def dot_splat(np_: Any, x: Any) -> Any:
    return x @ np_.ones((N, N), np.float32)


KINDS = {
    "tanh": Kind(lambda np_, x: np_.tanh(x), (0,), lambda x: x),
    "scaled": Kind(lambda np_, x: x * 0.5 + 1, (0,), lambda x: x),
    "add": Kind(lambda np_, x, y: x + y, (0, 0), max),
    "gate": Kind(lambda np_, x, y: np_.tanh(x) * y, (0, 0), max),
    "dot": Kind(lambda np_, x, y: np_.tanh(x) @ y, (2, 2), lambda x, y: 2),
    "dot_splat": Kind(dot_splat, (1,), lambda x: x),
    # JAX 0.10.2 computes wrong values for this kind, inside one node as well as in two that become one program.
    "dot_splat_sum": Kind(lambda np_, x: dot_splat(np_, x).sum(0), (2,), lambda x: 1),
    "sum": Kind(lambda np_, x: x.sum(0), (1,), lambda x: x - 1),
    "largest": Kind(lambda np_, x: x.max(-1), (1,), lambda x: x - 1),
    "pair": Kind(lambda np_, x: {"a": x + 1, "b": (x * 2, 3.0)}, (0,), lambda x: x),
    "gathered": Kind(lambda np_, x: (x["p"][0] + x["p"][1]) * x["q"], (0, 0), max),
    # These kinds are on another device and on the host, so regions have to be cut without a circle.
    "elsewhere": Kind(lambda np_, x: x * 2, (0,), lambda x: x),
    "on_host": Kind(lambda np_, x: x + 1, (0,), lambda x: x),
    # These kinds make no nodes: a graph applies them to the result of a node.
    "row": Kind(lambda np_, x: x[1], (1,), lambda x: x - 1),
    "turned": Kind(lambda np_, x: x.T, (0,), lambda x: x),
}
ITEMS = ("row", "turned")


def nodes_of(batch: ps.Batch | None) -> dict[str, Any]:
    def node(name: str, kind: Kind) -> Any:
        if name == "on_host":
            return ps.node(name=name)(lambda x: np.asarray(x) + np.float32(1))
        if name == "elsewhere":
            return ps.device_node(name=name, device="cpu:1")(lambda x: kind.compute(jnp, x))
        if len(kind.needs) == 1 or name == "gathered":
            return ps.device_node(name=name, batch=batch)(lambda x: kind.compute(jnp, x))
        return ps.device_node(name=name, batch=batch)(lambda x, y: kind.compute(jnp, x, y))

    return {name: node(name, kind) for name, kind in KINDS.items() if name not in ITEMS}


@ps.node(effectful=True)
def mark(at: int) -> None: ...


ALONE, BATCHED = nodes_of(None), nodes_of(ps.Batch(4))


@dataclass(frozen=True)
class Random:
    """A random graph: lines (kind, operands), results, whether nodes are batched, and the call after an effect."""

    lines: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[int, ...]
    batched: bool
    effect_at: int

    def run(self, call: Callable[[str, list[Any]], Any], x: Any, y: Any) -> list[Any]:
        values = [x, y]
        for name, operands in self.lines:
            given = [values[operand] for operand in operands]
            if name == "gathered":
                given = [{"p": [given[0], 2.0], "q": given[1]}]
            value = KINDS[name].compute(None, *given) if name in ITEMS else call(name, given)
            values.append(value["a"] if name == "pair" else value)
            if name == "pair":
                values.append(value["b"][0])
        return [values[index] for index in self.results]

    def graph(self) -> Any:
        nodes = BATCHED if self.batched else ALONE

        @ps.graph
        async def random_graph(x: Any, y: Any) -> Any:
            calls = iter(range(99))

            def call(name: str, operands: list[Any]) -> Any:
                if next(calls) == self.effect_at:
                    mark(self.effect_at)
                return nodes[name](*operands)

            return self.run(call, x, y)

        return random_graph


@st.composite
def graphs(draw: st.DrawFn) -> Random:
    axes = [2, 1]
    lines: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(draw(st.integers(1, 9))):
        name = draw(st.sampled_from(sorted(KINDS)))
        needs = KINDS[name].needs
        fitting = [[i for i, have in enumerate(axes) if have >= need] for need in needs]
        operands = tuple([draw(st.sampled_from(some[-3:] if draw(st.booleans()) else some)) for some in fitting])
        lines.append((name, operands))
        axes += [KINDS[name].axes(*[axes[operand] for operand in operands])] * (2 if name == "pair" else 1)
    results = draw(st.lists(st.integers(2, len(axes) - 1), min_size=0, max_size=2))
    return Random(tuple(lines), (*results, len(axes) - 1), draw(st.booleans()), draw(st.integers(0, 9)))


def expected(graph: Random, x: Any, y: Any) -> list[Any]:
    return graph.run(lambda name, operands: KINDS[name].compute(np, *operands), np.float64(x), np.float64(y))


@settings(max_examples=7 * EFFORT)
@given(graph=graphs(), seed=st.integers(0, 99))
async def test_random_graphs_compute_what_numpy_computes(graph: Random, seed: int) -> None:
    draw = np.random.default_rng(seed)
    inputs = [(draw.random((N, N), np.float32) + 0.1, draw.random(N, np.float32) + 0.1) for _ in range(3)]

    def check(results: Any, item: int) -> None:
        for result, right in zip(results, expected(graph, *inputs[item]), strict=True):
            assert np.shape(result) == np.shape(right)
            np.testing.assert_allclose(result, right, rtol=1e-4)

    fused = graph.graph()
    check(await engine.run(fused(*inputs[0])), 0)
    streamed = await values_of(engine.stream([fused(*one) for one in inputs]))
    async with engine.deploy(fused) as service:
        served = await service.map([fused(*one) for one in inputs])
    for item in range(len(inputs)):
        check(streamed[item], item)
        check(served[item], item)
    check(await engine.run(graph.graph()(*inputs[0]), fuse=False), 0)


@pytest.mark.parametrize("nodes", [ALONE, BATCHED], ids=["alone", "batched"])
async def test_dot_and_reduce_of_a_splat_constant_in_one_region(nodes: dict[str, Any]) -> None:
    splat = graph_of(lambda x: nodes["sum"](nodes["dot_splat"](x)))
    (step,) = engine.plan(splat).steps
    assert step.label == "dot_splat → sum"
    x = np.random.default_rng(0).random((256, N), np.float32)
    np.testing.assert_allclose(await engine.run(splat(x)), dot_splat(np, x).sum(0), rtol=1e-5)


@given(graph=graphs())
def test_regions_of_random_graphs_make_no_cycle_and_count_what_changed(graph: Random) -> None:
    plan: Any = engine.plan(graph.graph())
    known = set(plan.trace.parameter_sources)
    for step in plan.steps:  # the order of steps defines each value before it is read, so there is no cycle
        assert {read.source for read in step.head.reads()} <= known
        known.add(step.source)
    assert {read.source for read in plan.result.children} <= known
    [report] = [one for one in plan.reports if one.name == "regions"]
    saved = sum(int(change.rpartition(": ")[2].split()[0]) for change in report.changes)
    assert saved == report.before - report.after
