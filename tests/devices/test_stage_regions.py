"""Consecutive device stages of a stream become one program; nothing else about the stream changes."""

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import data, engine
from tests.conftest import EFFORT
from tests.saving.exact import exact
from tests.tracing import Tracing

from .kit import graph_of, names, report_of, resource_of

ROWS = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)


def like(x: Any) -> Any:
    return jax.eval_shape(lambda: x)


def checked(limit: float) -> Callable[[Any], Any]:
    def refuse(x: np.ndarray) -> np.ndarray:
        if x.max() > limit:
            raise ValueError(f"more than {limit}")
        return x

    return lambda x: jax.pure_callback(refuse, like(x), x)


def on_cpu(name: str, fn: Callable[..., Any], **options: Any) -> Any:
    return ps.device_node(**{"device": "cpu", "name": name, **options})(fn)


doubled = on_cpu("doubled", lambda x: x * 2)
half_more = on_cpu("half_more", lambda x: x + 0.5)
unchanged = on_cpu("unchanged", lambda x: x * 1)
tanh = on_cpu("tanh", jnp.tanh)
total = on_cpu("total", lambda x: x.sum())
scaled = on_cpu("scaled", lambda x, factor: x * factor)
added = on_cpu("added", lambda x, y: x + y)
pair = on_cpu("pair", lambda x: {"x": x + 1, "sum": x.sum()})
below_nine = on_cpu("below_nine", checked(9))
below_six = on_cpu("below_six", checked(6))
value_of = ps.node(name="value_of")(lambda record: record.value)


def batches(rows: Any = ROWS, size: int = 4) -> Any:
    return data.order(rows) >> data.read(rows, runs_on="loop") >> value_of >> data.batched(size)


def joined(graph: Any) -> list[str]:
    """Returns the names of the programs that join several stages."""
    programs = [step.joined.steps[0].label for step in engine.plan(graph).steps if step.joined is not None]
    assert all(len(step.joined.steps) == 1 for step in engine.plan(graph).steps if step.joined is not None)
    return programs


async def arrays_of(call: Any, **options: Any) -> list[Any]:
    return [jax.tree.map(np.asarray, value) async for value in engine.stream(call, **options)]


async def gives_the_same_apart(call: Any) -> bool:
    """Returns whether the values of a stream are equal to those of its stages one by one, bit by bit."""
    return bool(exact(await arrays_of(call)) == exact(await arrays_of(call, fuse=False)))


async def test_stages_behind_batches_are_one_program_and_keep_their_rows() -> None:
    feed = graph_of(lambda: batches() >> data.to_device("cpu") >> doubled >> tanh >> total)
    assert joined(feed) == ["doubled → tanh → total"]
    assert report_of(feed).changes == (
        "one program for the stages doubled → tanh → total: 2 calls of the device less for each value",
    )
    assert report_of(feed).changes[0] in str(engine.plan(feed))
    async with engine.stream(feed()) as stream:
        found = [np.asarray(value) async for value in stream]
        rows = {(row.graph, row.node): row.completed for row in stream.statistics().actors}
    stages = {name: count for (graph, name), count in rows.items() if graph == "of" and "map" in name}
    assert stages == {"map_each": 24, **{f"map_each#{number}": 6 for number in (2, 3, 4, 5)}}
    assert rows["of/doubled → tanh → total", "doubled → tanh → total"] == 6
    assert exact(found) == exact(await arrays_of(feed(), fuse=False))


async def test_a_stage_may_take_values_from_outside_and_give_several() -> None:
    weights = resource_of(lambda: np.float32(3))

    @ps.graph
    async def feed(factor: Any) -> Any:
        w = await weights()
        first = ps.map_each(lambda x: scaled(scaled(x, w), factor), batches())
        return ps.map_each(lambda x: added(x["x"], x["sum"]), first >> pair) >> tanh

    assert len(joined(feed)) == 1
    async with engine.deploy(feed) as service, service.stream(feed(np.float32(2))) as stream:
        found = [np.asarray(value) async for value in stream]
    assert exact(found) == exact(await arrays_of(feed(np.float32(2)), fuse=False))


async def test_what_one_stage_builds_goes_to_the_next_as_it_is() -> None:
    both = on_cpu("both", lambda two: two["a"] - two["b"])
    feed = graph_of(lambda: ps.map_each(lambda x: {"a": doubled(x), "b": tanh(x)}, batches()) >> both)
    assert joined(feed) == ["doubled → tanh → both"]
    assert await gives_the_same_apart(feed())


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (lambda x: ps.map_each(tanh, ps.map_each(doubled, x, concurrency=2)), "concurrency=2"),
        (lambda x: ps.map_each(tanh, ps.map_each(doubled, x, on_error="skip")), "on_error='skip'"),
        (lambda x: x >> doubled >> on_cpu("there", jnp.sin, device="cpu:1"), "differ in device"),
        (lambda x: x >> doubled >> on_cpu("alone", jnp.sin, fuse=False), "fuse=False"),
        (lambda x: x >> doubled >> on_cpu("impure", jnp.sin, pure=False), "pure=False"),
        (
            lambda x: ps.map_each(lambda two: tanh(two[0]), ps.map_each(lambda y: (doubled(y), y), x)),
            "a part of a result that the stage before builds of several values",
        ),
    ],
)
async def test_stages_that_stay_apart_say_why(graph: Callable[[Any], Any], reason: str) -> None:
    feed = graph_of(lambda: graph(batches()))
    assert joined(feed) == []
    [note] = [note for note in report_of(feed).notes if "stays apart from" in note]
    assert reason in note
    assert note in str(engine.plan(feed))
    assert len(await arrays_of(feed())) == 6


async def test_a_stage_that_waits_for_another_step_or_stands_behind_an_effect_stays_apart() -> None:
    @ps.node
    async def slow() -> float:
        return 2.0

    @ps.node(effectful=True)
    async def book() -> None: ...

    waits = graph_of(lambda factor: ps.map_each(lambda x: scaled(x, factor), batches() >> doubled), slow)

    @ps.graph
    async def behind_an_effect() -> Any:
        first = batches() >> doubled
        await book()
        return first >> tanh

    waiting = "it waits for more steps: the stages before it run meanwhile"
    for feed, reason in ((waits, waiting), (behind_an_effect, "an effect stands between them")):
        assert joined(feed) == []
        assert report_of(feed).notes[0].endswith(reason)
        assert len(await arrays_of(feed())) == 6


LARGE = {3: 7.0, 4: 12.0}


def failing(*, on_error: Any = "raise", count: int = 8, first_stage: Any = half_more) -> Any:
    @ps.graph
    async def feed(large: Any) -> Any:
        given = ps.map_each(lambda record: grown(record.index, large), data.order(range(count)))
        first = ps.map_each(first_stage, given, on_error=on_error, concurrency=2)
        second = ps.map_each(below_nine, first, on_error=on_error, concurrency=2)
        return ps.map_each(below_six, second, on_error=on_error, concurrency=2)

    return feed


grown = ps.node(lambda index, large: np.full(3, large.get(index, index / 20), np.float32))


async def outcome_of(call: Any, **options: Any) -> Any:
    """Returns all that a caller can see of a stream: values, the error with its notes, and the counts of its stages."""
    found: list[Any] = []
    told: Any = None
    async with engine.stream(call, **options) as stream:
        try:
            async for value in stream:
                found.append(np.asarray(value).tolist())  # noqa: PERF401 - those before an error count
        except RuntimeError as error:
            told = str(error).splitlines()[-1], error.__notes__
        counts = {
            row.node: (row.completed, row.failed)
            for row in stream.statistics().actors
            if row.graph == "feed" and "map" in row.node
        }
    return found, told, counts


async def test_an_error_names_the_stage_as_if_it_ran_by_itself() -> None:
    feed = failing()
    assert joined(feed) == ["half_more → below_nine → below_six"]
    for value, stage in ((7.0, "below_six"), (12.0, "below_nine")):
        values, told, counts = await outcome_of(feed({4: value}))
        assert len(values) == 4
        assert f"in node '{stage}' of graph 'feed/{stage}', item 4, attempt 1" in told[1]
        apart, told_apart, counts_apart = await outcome_of(feed({4: value}), fuse=False)
        assert (values, told) == (apart, told_apart)
        assert [failed for _, failed in counts.values()] == [failed for _, failed in counts_apart.values()]


async def test_a_value_that_is_left_out_counts_in_the_stage_that_failed() -> None:
    feed = failing(on_error="skip")
    assert joined(feed) == ["half_more → below_nine → below_six"]
    values, told, counts = await outcome_of(feed(LARGE))
    assert told is None
    assert len(values) == 6
    assert list(counts.values())[1:] == [(8, 0), (7, 1), (6, 1)]
    assert (values, told, counts) == await outcome_of(feed(LARGE), fuse=False)


async def test_an_error_that_is_only_that_of_the_whole_says_so() -> None:
    calls: list[int] = []

    def refuse_once(x: np.ndarray) -> np.ndarray:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("once")
        return x

    flaky = on_cpu("flaky", lambda x: jax.pure_callback(refuse_once, like(x), x))
    feed = graph_of(lambda: batches() >> doubled >> flaky)
    with pytest.raises(Exception, match="once") as caught:
        await arrays_of(feed())
    assert any("each of these stages by itself does not fail" in note for note in caught.value.__notes__)


async def test_a_trace_has_a_span_for_each_stage(tracing: Tracing) -> None:
    feed = graph_of(lambda: batches() >> doubled >> tanh)
    await arrays_of(feed())
    assert {"map_each", "map_each#2", "map_each#3", "doubled → tanh"} <= {span.name for span in tracing.spans()}


# Snapshots.


def skipped_in(logs: Any) -> set[int]:
    return {entry["item"] for entry in logs if entry["event"] == "map_each.item_skipped"}


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("fuse", [True, False])
async def test_a_saved_call_goes_on_with_its_stages_fused_or_apart(tmp_path: Path, fuse: bool, on_error: Any) -> None:
    feed = failing(on_error=on_error, count=40, first_stage=lambda x: half_more(unchanged(x)))
    call = feed(LARGE | {30: 7.0, 33: 12.0} if on_error == "skip" else {})
    with structlog.testing.capture_logs() as logs:
        whole, _, counts = await outcome_of(call, fuse=False)
    skipped = skipped_in(logs)
    # Numbers count the items that reach the failing stage.
    assert skipped == ({3, 4, 29, 33} if on_error == "skip" else set())
    assert joined(feed) == ["unchanged → half_more → below_nine → below_six"]
    got: dict[int, Any] = {}
    with structlog.testing.capture_logs() as logs:
        for limit, fused in ((13, fuse), (25, not fuse), (100, fuse)):
            began = max(got, default=0)
            async with engine.stream(call, checkpoint=ps.Checkpoint(tmp_path, every_records=3), fuse=fused) as stream:
                async for value in stream:
                    got[stream.position] = np.asarray(value).tolist()
                    if stream.position >= limit:
                        break
            assert max(got) > began
    assert [got[position] for position in sorted(got)] == whole
    assert len(got) == max(got) == (36 if on_error == "skip" else 40)
    assert counts["map_each#4"] == ((36, 2) if on_error == "skip" else (40, 0))
    assert skipped_in(logs) == skipped


# Any chain.

WEIGHTS = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
# Rounding in these functions does not depend on neighbouring operations, with JAX 0.10 and 0.12.
# In those of AT_THE_END, it may depend on the operations that follow.
ANYWHERE: tuple[Callable[[Any], Any], ...] = (lambda x: x * 1.5 + 0.25, lambda x: x @ WEIGHTS, jax.nn.relu)
AT_THE_END: tuple[Callable[[Any], Any], ...] = (lambda x: jax.nn.softmax(x, axis=-1), lambda x: x - x.max(axis=0))


def as_nodes(functions: tuple[Callable[[Any], Any], ...]) -> list[Any]:
    nodes = [on_cpu("op", one) for one in functions]
    return [*nodes, *(node.vmap() for node in nodes[:2])]


@settings(max_examples=6 * EFFORT, deadline=None)
@given(
    st.lists(st.sampled_from(as_nodes(ANYWHERE)), min_size=2, max_size=4),
    st.lists(st.sampled_from(as_nodes(AT_THE_END)[:2]), max_size=1),
    st.integers(0, 2**32 - 1),
)
async def test_a_chain_of_stages_gives_the_same_bits_as_the_stages_one_by_one(
    nodes: list[Any], last: list[Any], seed: int
) -> None:
    rows = np.random.default_rng(seed).normal(size=(64, 4)).astype(np.float32)

    feed = graph_of(lambda: functools.reduce(operator.rshift, [*nodes, *last], batches(rows, 32)))
    assert len(joined(feed)) == 1
    assert await gives_the_same_apart(feed())


# Stages that donate their input.


async def test_a_step_that_overwrites_its_state_is_the_last_of_its_program() -> None:
    seen: list[Any] = []
    step = on_cpu("step", lambda state, x: state * 0.5 + x, donate=True)
    columns = on_cpu("columns", lambda x: x.sum(axis=0))

    @ps.node(effectful="unordered")
    async def look(state: Any) -> None:
        seen.append(state)

    async def body(state: Any, x: Any) -> Any:
        new = step(state, doubled(columns(x)))
        await look(new)
        return new

    folded = graph_of(lambda state: ps.fold(body, batches(), state), awaits=True)
    told = str(engine.plan(folded))
    assert "one program for columns → doubled → step: 2 calls of the device less" in told
    assert "doubled → step in of/body writes the next state over the one before" in told
    found = np.asarray(await engine.run(folded(jnp.zeros(4))))
    assert [state.is_deleted() for state in seen] == [True] * 5 + [False]
    expected = np.zeros(4)
    for batch in ROWS.reshape(6, 4, 4):
        expected = expected * 0.5 + batch.sum(axis=0) * 2
    assert np.allclose(found, expected, rtol=1e-5)


# Chunks.


shifted = on_cpu("shifted", lambda x, y, by=1.0: x + y * by)
LONG = np.random.default_rng(2).normal(size=(70, 3)).astype(np.float32)


async def test_chunks_pass_from_one_node_to_the_next_on_the_device() -> None:
    @ps.graph
    async def chunks(x: Any, y: Any) -> Any:
        first = tanh.vmap(batch_size=16)(x)
        second = shifted.vmap(in_axes=(0, None, None), batch_size=16)(first, y, 3.0)
        return pair.vmap(batch_size=16)(shifted.vmap(batch_size=16)(second, x))

    assert names(chunks) == ["tanh.vmap → shifted.vmap ×2 → pair.vmap"]
    assert "tanh.vmap → shifted.vmap ×2 → pair.vmap" in str(engine.plan(chunks))
    found = await engine.run(chunks(LONG, LONG[0]))
    assert isinstance(found["x"], np.ndarray)
    assert (found["x"].shape, found["sum"].shape) == ((70, 3), (70,))
    apart = await engine.run(chunks(LONG, LONG[0]), fuse=False)
    assert all(np.allclose(found[name], apart[name], rtol=1e-5) for name in ("x", "sum"))


async def test_a_program_of_chunks_is_compiled_for_the_samples_of_its_nodes() -> None:
    first = on_cpu("first", lambda x: x * 2, sample_input=(LONG[0],))
    chunks = graph_of(lambda x: tanh.vmap(batch_size=16)(first.vmap(batch_size=16)(x)))
    async with engine.deploy(chunks, warmup=True) as service:
        [step] = engine.plan(chunks).steps
        program: Any = step.head.callee
        assert program.runs_on.statistics().programs == 1
        assert np.allclose(await service(LONG), np.tanh(LONG * 2), rtol=1e-5)
        assert program.runs_on.statistics().programs == 1


async def test_chunks_of_a_stream_are_one_program() -> None:
    functions = *ANYWHERE[1:], lambda x: x.sum()
    nodes = [on_cpu("op", one).vmap(batch_size=16) for one in functions]

    def read() -> Any:
        return data.order(LONG, batch=35) >> data.read(LONG[:, [0, 1, 2, 2]], runs_on="loop") >> value_of

    feed = graph_of(lambda: functools.reduce(operator.rshift, nodes, read()))
    assert joined(feed) == [f"op.vmap ×{len(nodes)}"]
    assert await gives_the_same_apart(feed())


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (lambda x: total.vmap(batch_size=8)(tanh.vmap(batch_size=16)(x)), ["tanh.vmap", "total.vmap"]),
        (lambda x: tanh.vmap(batch_size=16)(tanh.vmap(batch_size=16, out_axes=1)(x)), ["tanh.vmap", "tanh.vmap"]),
        (lambda x: tanh.vmap(in_axes=1, batch_size=16)(tanh.vmap(batch_size=16, out_axes=1)(x)), ["tanh.vmap ×2"]),
        (
            lambda x: shifted.vmap(in_axes=(0, None), batch_size=16)(x, total.vmap(batch_size=16)(x)[:3]),
            ["total.vmap", "shifted.vmap"],
        ),
        (lambda x: tanh.vmap()(tanh.vmap(batch_size=16)(x)), ["tanh.vmap", "tanh.vmap"]),
    ],
)
async def test_chunks_of_other_rows_stay_apart(chain: Callable[[Any], Any], expected: list[str]) -> None:
    chunks = graph_of(chain)
    assert names(chunks) == expected
    found, apart = [await engine.run(chunks(LONG), fuse=fuse) for fuse in (True, False)]
    assert exact(jax.tree.map(np.asarray, found)) == exact(jax.tree.map(np.asarray, apart))
