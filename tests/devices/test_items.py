"""Items of a device node's result are computed on its device, and never on the event loop."""

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import penstock as ps
from penstock import devices, engine
from tests.devices.gates import Gate
from tests.devices.kit import graph_of, on_the_host, report_of, resource_of
from tests.kit import SCHEDULERS, values_of

MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4) + 1


@ps.device_node(device="cpu")
def tripled(x: jax.Array) -> jax.Array:
    return x * 3


double = ps.device_node(device="cpu", name="double")(lambda x: x * 2)
elsewhere = ps.device_node(device="cpu:1", name="elsewhere")(lambda x: x + 1)
batched = ps.device_node(device="cpu", batch=ps.Batch(4), name="batched")(lambda x: x + 1)
impure = ps.device_node(device="cpu", pure=False, name="impure")(lambda x: x + 1)
split = ps.device_node(device="cpu", name="split")(lambda x: {"rows": x * 2, "sums": (x.sum(0), x.sum(1))})
on_host = ps.node(name="on_host")(lambda x: np.asarray(x) * 10)
in_thread = ps.node(name="in_thread", runs_on="thread")(lambda x: np.asarray(x) * 10)
positive = ps.node(lambda x: bool(x > 0))


@contextmanager
def nothing_computed_here() -> Iterator[None]:
    """Fails if this thread takes an item of an array, or an attribute that JAX computes."""
    kind: Any = type(jnp.zeros(1))
    loop, taken = threading.get_ident(), list[str]()

    def watched(name: str) -> property:
        original = getattr(kind, name)

        def get(self: Any) -> Any:
            if threading.get_ident() == loop:
                taken.append(name)
            return original.__get__(self)

        return property(get)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("__getitem__", "T", "mT", "real", "imag"):
            patch.setattr(kind, name, watched(name))
        yield
    assert not taken


async def same_as_plain_python(graph: Any, *args: Any, **options: Any) -> Any:
    expected = await graph(*jax.tree.map(jnp.asarray, args))
    with nothing_computed_here():
        result = await engine.run(graph(*args), **options)
    found, wanted = jax.tree.leaves(result), jax.tree.leaves(expected)
    for one, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-6)
        assert np.shape(one) == np.shape(right)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    return result


items_of = functools.partial(report_of, name="items")


def taken_from(node: Any, take: Callable[[Any], Any]) -> Any:
    """Returns a graph whose result a function takes of the result of a node."""
    return graph_of(lambda x: take(node(x)))


READERS = {
    "batched": batched, "elsewhere": elsewhere, "impure": impure, "on_host": on_host, "in_thread": in_thread,
    "the result": lambda x: x,
}  # fmt: skip


@pytest.mark.several_devices
@pytest.mark.parametrize("reader", READERS)
async def test_the_item_that_one_reader_takes_is_all_that_the_program_gives(reader: str) -> None:
    read: Any = READERS[reader]
    of = taken_from(double, lambda found: read(found[0]))
    assert items_of(of).changes == ("double gives [0] of its result",)
    await same_as_plain_python(of, MATRIX)


KEYS: dict[str, Any] = {
    "negative": -1,
    "slice": slice(1, 9),
    "steps": slice(None, None, -2),
    "several axes": (slice(None), 1),
    "ellipsis": (..., 0),
    "new axis": (None, 2),
    "an array": np.array([0, 2]),
    "a mask": np.array([True, False, True]),
    "beyond the end": 7,  # JAX clamps this index to the last item
}


@pytest.mark.parametrize("kind", KEYS)
async def test_all_that_an_array_takes_for_a_place(kind: str) -> None:
    await same_as_plain_python(taken_from(double, lambda found: on_host(found[KEYS[kind]])), MATRIX)


@pytest.mark.several_devices
async def test_readers_of_several_items_and_of_the_whole() -> None:
    of = taken_from(impure, lambda found: [
        batched(found[0]), on_host(found[0]), on_host({"all": [found[1], found]}["all"][0]),
        elsewhere(found[1][1:]), found, found[2], found.T,
    ])  # fmt: skip
    report = items_of(of)
    assert sorted(report.changes) == [
        f"impure gives {what} of its result" for what in (".T", "[0]", "[1]", "[1][slice(1, None, None)]", "[2]")
    ]
    assert (report.before, report.after) == (5, 0)
    await same_as_plain_python(of, MATRIX)


async def test_attributes_that_are_computed_and_those_that_are_not() -> None:
    computed = taken_from(double, lambda found: (found.T, found.mT, found.real, on_host(found.imag), found.T[0]))
    await same_as_plain_python(computed, MATRIX + 1j)
    shapes = taken_from(double, lambda found: (found.T, found.shape, found.shape[0], found[0].shape))
    assert (await same_as_plain_python(shapes, MATRIX))[1:] == ((3, 4), 3, (4,))
    about = taken_from(double, lambda found: (found.dtype, found.ndim, found.shape[-1]))
    assert not items_of(about).changes
    assert await engine.run(about(MATRIX)) == (jnp.float32, 2, 4)


async def test_items_inside_of_containers_by_keyword_and_as_operands() -> None:
    @ps.graph
    async def of(x: Any) -> Any:
        found = split(x)
        taken = on_host(x=found["sums"][1][0])
        branch = await ps.cond(positive(taken), batched, on_host, found["rows"][1])
        return [taken, {"branch": branch}, await ps.map_each(batched, [found["rows"][0], found["rows"][2]])]

    await same_as_plain_python(of, MATRIX)


async def test_items_in_the_bodies_of_control_flow() -> None:
    of = graph_of(lambda xs: ps.map_each(lambda x: on_host(impure(x)[1]), xs), awaits=True)
    await same_as_plain_python(of, [MATRIX, MATRIX + 1])


async def test_the_result_of_a_region_and_of_an_einsum() -> None:
    region = taken_from(lambda x: double(double(x)), lambda found: (batched(found[0]), found[1]))
    product = graph_of(lambda x: batched(devices.einsum("ij,kj->ik", x, x)[0]))
    assert len(engine.plan(region).steps) == 2
    assert items_of(product).changes
    await same_as_plain_python(region, MATRIX)
    await same_as_plain_python(product, MATRIX)


@pytest.mark.several_devices
@pytest.mark.parametrize("scheduler", SCHEDULERS)
async def test_under_every_scheduler_in_streams_and_in_services(scheduler: Any) -> None:
    of = taken_from(elsewhere, lambda found: (batched(found[0]), on_host(found[1])))
    await same_as_plain_python(of, MATRIX, scheduler=scheduler)
    with nothing_computed_here():
        streamed = await values_of(engine.stream([of(MATRIX + i) for i in range(5)], scheduler=scheduler))
        async with engine.deploy(of, scheduler=scheduler) as service:
            served = await service.map([of(MATRIX + i) for i in range(5)])
    for i in range(5):
        for result in (streamed[i], served[i]):
            np.testing.assert_array_equal(result[0], MATRIX[0] + i + 2)
            np.testing.assert_array_equal(result[1], (MATRIX[1] + i + 1) * 10)


class Named(NamedTuple):
    rows: jax.Array
    sums: jax.Array


async def test_items_that_an_annotation_says_to_be_there_take_no_program_of_their_own() -> None:
    @ps.device_node(device="cpu")
    def pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * 2, x.sum(0)

    @ps.device_node(device="cpu")
    def table(x: jax.Array) -> dict[str, jax.Array]:
        return {"rows": x * 2, "sums": x.sum(0)}

    @ps.device_node(device="cpu")
    def named(x: jax.Array) -> Named:
        return Named(x * 2, x.sum(0))

    @ps.graph
    async def of(x: jax.Array) -> Any:
        rows, sums = pair(x)
        return on_host(rows), sums, table(x)["sums"], named(x).rows, named(x)[1], on_host(x)

    assert not items_of(of).changes
    for node in (pair, table, named):
        await node.warmup(MATRIX)
    await same_as_plain_python(of, MATRIX)
    assert [node.compile_statistics().programs for node in (pair, table, named)] == [1, 1, 1]
    deeper = graph_of(lambda x: (pair(x)[0][1], on_host(table(x)["rows"][0]), named(x).rows[2].shape, tripled(x)[0]))
    assert sorted(items_of(deeper).changes) == [
        "named gives .rows[2] of its result",
        "pair gives [0][1] of its result",
        "table gives ['rows'][0] of its result",
        "tripled gives [0] of its result",
    ]
    await same_as_plain_python(deeper, MATRIX)


async def test_what_is_no_place_in_the_result_is_an_error_that_names_it() -> None:
    too_deep = graph_of(lambda x: on_host(double(x)[1, 2, 3]))
    missing = graph_of(lambda x: on_host(split(x)["columns"]))
    with pytest.raises(IndexError, match="Too many indices") as caught:
        await engine.run(too_deep(MATRIX))
    assert "while taking [(1, 2, 3)] of the result of node 'double'" in caught.value.__notes__
    assert any("in node 'double' of graph 'of', item 0" in note for note in caught.value.__notes__)
    with pytest.raises(KeyError, match="columns") as other:
        await engine.run(missing(MATRIX))
    assert "while taking ['columns'] of the result of node 'split'" in other.value.__notes__


async def test_the_policy_of_the_node_is_kept() -> None:
    calls: list[None] = []

    def refused(x: Any) -> Any:
        calls.append(None)
        raise ValueError("never")

    async def later(error: Exception) -> Any:
        return np.full((2, 2), 8.0)

    def failing(**policy: Any) -> Any:
        fails = ps.device_node(device="cpu", pure=False, **policy)(lambda x: on_the_host(refused, x))
        return taken_from(fails, lambda found: (on_host(found[1]), found[0, 0]))

    with pytest.raises(Exception, match="never"):
        await engine.run(failing(retry=ps.Retry(3))(MATRIX))
    assert len(calls) == 3
    for fallback in (lambda error: np.full((2, 2), 8.0), later):
        row, number = await engine.run(failing(fallback=fallback)(MATRIX))
        assert (row.tolist(), number) == ([80, 80], 8)


async def test_the_limit_of_the_node_is_shared_by_all_of_its_calls() -> None:
    gate = Gate()
    guarded = ps.device_node(device="cpu", concurrency=1, pure=False)(gate.pass_through)
    of = graph_of(lambda x: (guarded(x)[0], guarded(x)))
    async with engine.deploy(of) as service:
        call = asyncio.create_task(service.run(of(MATRIX)))
        await gate.entered()
        waiting = sorted([node.inbox.depth for node in service.statistics().actors])
        gate.open()
        await call
    assert waiting == [0, 1]


async def test_an_effect_comes_once() -> None:
    seen: list[float] = []

    @ps.device_node(device="cpu", pure=False)
    def noted(x: Any) -> Any:
        jax.debug.callback(lambda one: seen.append(float(one)), x[0], ordered=True)
        return x + 1

    await engine.run(taken_from(noted, lambda found: (on_host(found[0]), found[1]))(np.arange(3.0)))
    jax.effects_barrier()
    assert seen == [0]


@pytest.mark.several_devices
async def test_the_item_may_be_donated_and_the_node_may_overwrite_its_argument() -> None:
    overwriting = ps.device_node(device="cpu", donate=True)(lambda x: x + 1)
    into = graph_of(lambda x: overwriting(elsewhere.with_policy(name="first")(x)[0]))
    out_of = graph_of(lambda x: on_host(overwriting(double(x))[0]))
    await same_as_plain_python(into, MATRIX)
    await same_as_plain_python(out_of, MATRIX)


@pytest.mark.several_devices
async def test_nodes_on_meshes_with_specs_and_with_replicas() -> None:
    mesh = devices.DeviceMesh(shape=(2,), axis_names=("data",), device="cpu")
    rows = PartitionSpec("data")
    spread = ps.device_node(device=mesh, in_specs=rows, out_specs=rows)(lambda x: x * 2)
    copied = ps.device_node(device="cpu", replicas=2)(lambda x: x * 2)

    of = graph_of(lambda x: (batched((found := spread(x))[0]), found, on_host(copied(x)[1])))
    _, whole, _ = await same_as_plain_python(of, np.concatenate([MATRIX, MATRIX]))
    assert whole.sharding.spec == rows
    three_rows = taken_from(spread, lambda found: on_host(found[1:4]))  # which cannot be split over two devices
    await same_as_plain_python(three_rows, np.concatenate([MATRIX, MATRIX]))


async def test_parameters_are_reloaded_and_samples_compiled_as_for_the_whole() -> None:
    version = 1.0
    weights = resource_of(lambda: np.full((2, 3), version, np.float32))

    weighted = ps.device_node(device="cpu", sample_input=(MATRIX,))(lambda w, x: w @ x)
    of = graph_of(lambda w, x: on_host(weighted(w, x)[0]), weights)
    async with engine.deploy(of, warmup=True) as service:
        assert weighted.compile_statistics().programs == 1
        with nothing_computed_here():
            first = await service(MATRIX)
            version = 2.0
            await service.reload(weights)
            second = await service(MATRIX)
        assert weighted.compile_statistics().programs == 1
    np.testing.assert_array_equal(second, 2 * first)


async def test_what_a_node_gives_is_an_array_before_its_items_are_taken_except_for_rows_of_batches() -> None:
    of_numpy = ps.device_node(device="cpu")(lambda x: np.arange(3))
    of = graph_of(lambda x: (of_numpy(x)[7], on_host(batched(x)[0])))
    assert (await engine.run(of(MATRIX)))[0] == 2  # NumPy would refuse
    assert not any("batched" in change for change in items_of(of).changes)  # its rows are left to NumPy


@pytest.mark.several_devices
async def test_a_fake_gives_what_it_gives() -> None:
    of = graph_of(lambda x: (double(x)[0], elsewhere(x)[0, 0]))
    await engine.run(of(MATRIX))
    with ps.testing.replace(double, lambda x: ["no array"]):
        assert await engine.run(of(MATRIX)) == ("no array", 2)
    assert (await engine.run(of(MATRIX)))[0].tolist() == (MATRIX[0] * 2).tolist()


async def test_drawings_show_items_as_they_are_written() -> None:
    of = taken_from(double, lambda found: (on_host(found[1]), on_host(found[2].T)))
    assert "items: 2 → 0\n    double gives [1] of its result\n    double gives [2].T of its result" in str(
        engine.plan(of)
    )
    async with engine.deploy(of) as service:
        await service(MATRIX)
        for drawing in (str(of), str(service), str(engine.plan(of)).partition("plan of")[0]):
            assert "double[1]" in drawing or "← [1]" in drawing, drawing
            assert "[2].T" in drawing
