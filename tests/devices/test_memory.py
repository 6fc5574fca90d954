"""`engine.memory`: the bytes of programs, of inboxes and of items in flight."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, devices, engine
from penstock.devices.wrong_fusions import compiler_options

from .kit import graph_of

pytest.importorskip("jax")

SIDE = 64
MATRIX = SIDE * SIDE * 4


@dataclass
class Page:
    text: str
    picture: Any


sample = np.zeros((SIDE, SIDE), np.float32)
columns: Any = ps.device_node(sample_input=(sample,), name="columns")(lambda x: (x @ x).sum(0))
halved = ps.device_node(batch=devices.DeviceBatch(4), name="halved")(lambda x: x / 2)
load = ps.node(name="load")(lambda count: np.full((SIDE, SIDE), count, np.float32))


@ps.node(max_bytes=1000)
async def page(x: Any) -> Page:
    await asyncio.sleep(0)
    return Page("abc", np.asarray(x))


report = load >> columns >> halved >> page


@ps.node(capacity=3)
async def chunks(count: int) -> AsyncIterator[Any]:
    for number in range(count):
        yield np.full((SIDE, SIDE), number, np.float32)


@ps.graph
async def pages(count: int) -> AsyncIterator[Page]:
    return ps.map_each(page, ps.map_each(columns, chunks(count), concurrency=2))


def node_of(found: engine.MemoryReport, name: str) -> engine.NodeMemory:
    [node] = [node for node in found.nodes if node.node == name]
    return node


async def test_programs_say_what_xla_says() -> None:
    import jax

    found = await engine.memory(report(3))
    [program] = node_of(found, "columns").programs
    # Compiled with the same fusions: from JAX 0.10.2 on, Penstock leaves out some of the compiler's.
    compiled = jax.jit(columns.fn).lower(sample).compile(compiler_options("cpu"))
    said = compiled.memory_analysis()
    assert program.arguments == f"x: float32[{SIDE}, {SIDE}]"
    assert (program.argument_bytes, program.output_bytes) == (MATRIX, 4 * SIDE)
    assert program.temporary_bytes == pytest.approx(said.temp_size_in_bytes, rel=0.5)
    assert program.total_bytes == program.argument_bytes + program.output_bytes + program.temporary_bytes
    [batched] = node_of(found, "halved").programs
    assert (batched.argument_bytes, batched.output_bytes) == (4 * SIDE, 4 * SIDE)  # a batch of one


async def test_values_and_inboxes() -> None:
    found = await engine.memory(report(3))
    assert [node.node for node in found.nodes] == ["load", "columns", "halved", "page"]
    loaded = node_of(found, "load")
    assert (loaded.result_bytes, loaded.programs) == (MATRIX, ())
    inner = node_of(found, "columns")
    assert (inner.item_bytes, inner.result_bytes) == (MATRIX, 4 * SIDE)
    assert (inner.inbox_bytes, inner.inbox_items) == (16 * MATRIX, 16)
    last = node_of(found, "page")
    assert (last.result_bytes, last.inbox_bytes) == (4 * SIDE + 3, 1000)  # less than 16 items
    assert MATRIX <= (found.in_flight_bytes or 0) <= MATRIX + 8 * SIDE
    assert found.in_flight_device_bytes == 4 * SIDE
    for part in ("temporaries", "1.00 kB"):
        assert part in str(found)
    assert "in flight" in found._repr_html_()


async def test_a_stream_is_read_and_its_values_count() -> None:
    found = await engine.memory(pages(10))
    source = node_of(found, "chunks")
    assert (source.result_bytes, source.inbox_bytes, source.inbox_items) == (MATRIX, 3 * MATRIX, 3)
    assert node_of(found, "columns").graph == "pages/columns"
    assert node_of(found, "columns").inbox_bytes is None  # its items wait in the step that contains it
    assert 2 * MATRIX <= (found.in_flight_bytes or 0) <= 8 * MATRIX


async def test_so_many_values_of_a_stream_without_end() -> None:
    @ps.node
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100

    of = ps.graph(endless)
    found = await engine.memory(of(), items=5)
    assert node_of(found, "endless").result_bytes == 100
    assert (await engine.memory(of, items=1)).graph == "endless"


@ps.node
async def first_is_last(x: Any) -> Any:
    for _ in range(200 if x[0, 0] == 0 else 0):
        await asyncio.sleep(0)
    return x + 0


@pytest.mark.parametrize(
    ("pipeline", "least", "most"),
    [
        (lambda stream: stream >> data.shuffled(50, seed=1), 50, 90),
        (lambda stream: stream >> data.batched(8, drop_remainder=True) >> data.unbatched(), 16, 60),
        (lambda stream: stream >> data.batched(8) >> data.shuffled(5, seed=1), 40, 100),
        (lambda stream: ps.map_each(first_is_last, stream >> data.prefetched(30), concurrency=1), 30, 60),
        (lambda stream: ps.map_each(first_is_last, stream, concurrency=40), 40, 90),
        (lambda stream: (stream >> data.split(2, ahead=20)) >> data.merged("round_robin"), 3, 50),
    ],
    ids=["shuffled", "batched", "batches", "buffer", "turns", "split"],
)
async def test_what_stages_and_streams_hold_is_in_flight(pipeline: Any, least: int, most: int) -> None:
    feed = graph_of(lambda count: pipeline(chunks(count)))
    found = await engine.memory(feed(60))
    assert least * MATRIX <= (found.in_flight_bytes or 0) <= most * MATRIX
    assert found.in_flight_device_bytes == 0
    assert "on devices" not in str(found)


async def test_what_a_stage_holds_on_a_device_is_there() -> None:
    feed = graph_of(lambda count: chunks(count) >> data.to_device("cpu") >> data.shuffled(30, seed=1))
    found = await engine.memory(feed(60), items=5)
    assert 30 * MATRIX <= (found.in_flight_device_bytes or 0) <= 60 * MATRIX


async def test_a_plan_is_compiled_as_far_as_there_are_samples_and_nothing_runs() -> None:
    ran: list[int] = []
    compiled_on: list[int] = []

    @ps.node
    def source() -> Any:
        ran.append(1)
        return np.zeros(8, np.float32)

    @ps.device_node(sample_input=(np.zeros(8, np.float32),))
    def known(x: Any) -> Any:
        compiled_on.append(threading.get_ident())
        return x * 2

    unknown = ps.device_node(name="unknown")(lambda x: x.sum())
    planned = graph_of(lambda: ps.cond(True, unknown, known, known(source())), awaits=True)
    found = await engine.memory(engine.plan(planned))
    assert ran == []
    assert threading.get_ident() not in compiled_on
    first = found.nodes[0]
    assert (first.node, len(first.programs), first.item_bytes) == ("known", 1, None)
    assert first.programs[0].argument_bytes == 32
    assert found.without_sample == ("unknown",)
    assert found.in_flight_bytes is None
    assert "no sample_input=" in str(found)


async def test_it_runs_once_and_fails_as_a_run_does() -> None:
    ran: list[int] = []

    @ps.node
    async def count(step: int) -> int:
        ran.append(step)
        if step > 1:
            raise ValueError("too much")
        return step

    counted = ps.graph(count)

    async with engine.Engine() as own:
        await own.memory(counted(1))
        assert ran == [1]
        with pytest.raises(ValueError, match="too much") as caught:
            await own.memory(counted(2))
        assert "graph 'count'" in caught.value.__notes__[0]
        assert own.statistics().scopes == 0


async def test_only_programs_that_the_call_used_are_told() -> None:
    doubled = ps.device_node(lambda x: x * 2)
    of = graph_of(lambda count: doubled(ps.node(np.zeros)(count)))
    await engine.run(of(8))
    await engine.run(of(16))
    for _ in range(2):
        [program] = (await engine.memory(of(16))).nodes[-1].programs
        assert "[16]" in program.arguments


async def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"engine.memory takes a call of a graph"):
        await engine.memory(3)  # type: ignore[arg-type]
    with pytest.raises(ps.OptionsError, match="items=0"):
        await engine.memory(pages(1), items=0)
    with pytest.raises(ps.OptionsError):
        await engine.memory(report(1), max_in_flight=3)
