"""Looks at a process, as a client without Penstock reads them: lines of JSON on a socket."""

import asyncio
import contextlib
import gc
import os
import re
import resource
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import data, engine, extension, telemetry, testing
from tests.kit import Gate, added, begun, numbers, paused
from tests.telemetry.virtual_time import VirtualTime

from .conftest import ASK, Raw


@ps.node
def double(number: int) -> int:
    return 2 * number


@ps.node
def is_small(number: int) -> bool:
    return number < 3


@ps.graph
async def shape(numbers: list[int]) -> list[int]:
    async def body(number: int) -> int:
        async def other(value: int) -> int:
            return double(added(value))

        return await ps.cond(is_small(number), paused, other, number)

    return await ps.map_each(body, numbers)


def boxes_of(drawing: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the names of the boxes of nodes by their places."""
    found = {prefix + node["id"]: node["label"] for node in drawing["nodes"] if node["kind"] == "node"}
    numbers: dict[str, int] = {}
    for owner, body in drawing["bodies"]:
        number = numbers[owner] = numbers.get(owner, -1) + 1
        found |= boxes_of(body, f"{prefix}{owner}.{number}.")
    return found


async def test_each_node_has_its_box_in_the_drawing(raw: Raw) -> None:
    async with engine.deploy(shape, max_in_flight=5) as service:
        assert await service([1, 4]) == [1, 10]
        look = raw.look()
        [scope] = look["scopes"]
        [digest] = scope["drawings"]
        drawing = raw.ask("drawing", digest=digest)
        assert raw.ask("drawing", digest="none") is None
    assert (scope["graph"], scope["kind"], scope["max_admitted"]) == ("shape", "deployment", 5)
    assert 0 <= look["when"] - scope["opened"] < 60
    assert drawing["title"] == "shape"
    assert {(node["drawing"], node["step"]): node["node"] for node in look["nodes"]} == {
        (digest, box): name for box, name in boxes_of(drawing).items()
    }
    assert {node["node"]: node["total_completed"] for node in look["nodes"]} == {
        "is_small": 2, "paused": 1, "added": 1, "double": 1,
    }  # fmt: skip


async def test_scopes_of_one_graph_share_a_drawing_and_a_client_may_choose_one(raw: Raw) -> None:
    graph = ps.graph(paused)
    async with engine.deploy(graph) as one, engine.deploy(graph) as other:
        assert [await one(1), await other(2), await other(3)] == [1, 2, 3]
        await engine.run(graph(4))
        look = raw.look()
        scopes = {scope["id"]: scope for scope in look["scopes"]}
        told = {name: raw.look(scope=name)["nodes"][0] for name in scopes}
    assert len(scopes) == 3
    assert len({digest for scope in scopes.values() for digest in scope["drawings"]}) == 1
    assert look["nodes"][0]["total_completed"] == 4
    assert all(node.get("completed", 0) == 0 for node in told.values())  # since the look before, at another scope
    kinds = [(scopes[name].get("kind", "runs"), node["total_completed"]) for name, node in told.items()]
    assert sorted(kinds) == [("deployment", 1), ("deployment", 2), ("runs", 1)]


async def test_a_look_at_one_scope_tells_what_moved_in_it_and_in_no_other(raw: Raw) -> None:
    chosen, elsewhere = ps.graph(paused), ps.graph(added)
    async with engine.deploy(chosen) as one, engine.deploy(chosen) as other, engine.deploy(elsewhere) as third:
        await one(1)
        [scope] = [scope["id"] for scope in raw.look()["scopes"] if scope["graph"] == "paused"][:1]
        before = raw.look(scope=scope)["nodes"]
        await asyncio.gather(one(1), other(1), other(2), third(1))
        after = raw.look(scope=scope)["nodes"]
    assert [node["node"] for node in before] == [node["node"] for node in after] == ["paused"]
    assert after[0]["completed"] == after[0]["total_completed"] - before[0]["total_completed"]


@ps.node(stateless=True)
async def doubles(numbers: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
    async for number in numbers:
        yield 2 * number.index


@ps.graph
async def long(number: int) -> int:
    for _ in range(70):
        number = await paused(number)
    return number


async def test_each_step_of_a_large_graph_is_timed_once_it_has_items(raw: Raw) -> None:
    async with engine.deploy(long) as service, engine.deploy(long):
        raw.look()
        while not all(node.get("timed") for node in raw.look()["nodes"]):
            await service(1)
        nodes = raw.look()["nodes"]
    assert len(nodes) == 70
    assert all(node["p50"] > 0 for node in nodes)


async def test_a_stream_tells_its_progress_and_its_snapshots(raw: Raw, tmp_path: Path) -> None:
    graph = ps.graph(paused)
    doubled = ps.graph(doubles)
    checkpoint = ps.Checkpoint(tmp_path / "snapshots", every_values=2)
    async with engine.stream([graph(number) for number in range(8)]) as results:
        for _ in range(6):
            await anext(results)
        [half] = raw.look()["scopes"]
    async with engine.stream(doubled(data.order(range(100))), checkpoint=checkpoint) as values:
        for _ in range(5):
            await anext(values)
        await values.checkpoint()
        [saved] = raw.look()["scopes"]
    async with engine.stream(doubled(data.order(range(100))), checkpoint=checkpoint) as values:
        for _ in range(5):
            await anext(values)
        look = raw.look()
    assert half["total"] == 8
    assert 6 <= half["done"] <= 8
    assert (half["done"] == 8) == (half["left"] == 0)
    assert (saved["cut_asked"], saved["total"]) == ("every 2 values", 100)
    assert 5 <= saved["done"] < 100
    [resumed] = look["scopes"]  # its time left does not count items that had ended before it was opened
    assert resumed["left"] > (look["when"] - resumed["opened"]) * (100 / resumed["done"] - 1) * 1.1
    assert saved["cuts"] >= 1
    assert saved["cut_bytes"] > 0
    assert 0 <= saved["cut_age"] < 60


async def test_durable_loops_tell_what_they_have_stored(raw: Raw, tmp_path: Path) -> None:
    @ps.graph
    async def doubled(number: int) -> int:
        durable = ps.Durable(tmp_path / "loops.db")
        return await ps.while_loop(is_small, double, number, max_iterations=9, durable=durable)

    assert await engine.run(doubled(1), durable_key="one") == 4
    [scope] = raw.look()["scopes"]
    assert (scope["kind"], scope["cuts"], scope["cut_asked"]) == ("durable loop", 2, "every iteration")
    assert scope["cut_bytes"] > 0
    assert scope["cut_reached"] > 0
    assert 0 <= scope["cut_age"] < 60


async def test_items_count_once_where_idle_scopes_share_the_limit(raw: Raw) -> None:
    gate = Gate()
    graph = gate.graph(concurrency=2)
    async with engine.deploy(graph) as idle, engine.deploy(graph) as busy, engine.deploy(graph):
        calls = await begun(busy(0), busy(1))
        [first] = raw.look()["nodes"]
        gate.open()
        await asyncio.gather(*calls)
        await idle(1)
        [second] = raw.look()["nodes"]
    assert (first["in_flight"], first["limit"]) == (2, 2)
    assert (second["in_flight"], second["total_completed"]) == (0, 3)
    assert second["inbox_capacity"] == 48


@pytest.mark.parametrize(("others", "room"), [("none", 100), ("before", 100), ("after", 100), ("none", 2)])
async def test_items_count_once_where_active_scopes_share_the_limit(
    virtual: VirtualTime, raw: Raw, others: str, room: int
) -> None:
    gate = Gate()

    @ps.node(concurrency=4)
    async def held(number: int) -> int:
        if number:
            await gate.wait(number)
        return number

    graph = ps.graph(held)
    async with (
        engine.deploy(graph, max_in_flight=room) as first,
        engine.deploy(graph, max_in_flight=room) as second,
    ):
        busy, quick = (second, first) if others == "before" else (first, second)
        calls = await begun(busy(1), (second if others == "none" else busy)(1))
        raw.look()
        await testing.wait_quiescent()  # the loop has begun to measure
        virtual.hold(0.5)
        if others != "none":
            await quick(0)
        [node] = raw.look()["nodes"]
        gate.open()
        await asyncio.gather(*calls)
    assert (node["in_flight"], node["limit"]) == (2, 4)
    assert node["busy_share"] == pytest.approx(0.5)


async def test_places_of_a_deployment_count_from_its_first_look(raw: Raw) -> None:
    gate = Gate()
    async with engine.deploy(gate.graph(), max_in_flight=4) as service:
        raw.look()
        for _ in range(50):
            await asyncio.sleep(0.01)
        calls = [asyncio.ensure_future(service(number)) for number in range(4)]
        for _ in range(10):
            await asyncio.sleep(0.01)
        said = raw.look()["evidence"]
        gate.open()
        await asyncio.gather(*calls)
    [share] = [int(one.split()[-3].rstrip("%")) for one in said if one.startswith("of 4 places of a deployment")]
    assert 0 < share < 50


# --- Items in flight ---


async def test_items_tell_where_they_are_and_since_when(virtual: VirtualTime, raw: Raw) -> None:
    gate = Gate()
    graph = gate.graph(concurrency=2, name="slow")
    async with engine.deploy(graph, key=lambda number: "tenant 7", timeout_seconds=600) as service:
        calls = await begun(*map(service, range(3)))
        first = raw.look()
        virtual.hold(0.5)
        calls += await begun(service(3))
        second = raw.look(show_keys=True)
        found = raw.look(matching="nothing like it")
        gate.open()
        await asyncio.gather(*calls)
        assert raw.look()["items"] == []
    items = {item["item"]: item for item in second["items"]}
    assert (second["in_flight"], found["in_flight"], found["items"]) == (4, 0, [])
    assert [item["item"] for item in second["items"]] == [0, 1, 2, 3]
    states = {number: (item["node"], item["state"]) for number, item in items.items()}
    assert states == {0: ("slow", "working"), 1: ("slow", "working"), 2: ("slow", "waiting"), 3: ("slow", "waiting")}
    assert items[0]["age"] == items[2]["age"] > items[3].get("age", 0) == 0
    assert all(0 < item["deadline"] <= 600 for item in items.values())
    [node] = second["nodes"]
    assert (node["in_flight"], node["limit"], node["inbox_depth"], node["inbox_capacity"]) == (2, 2, 2, 16)
    assert {(item["scope"], item["drawing"], item["step"]) for item in items.values()} == {
        (second["scopes"][0]["id"], node["drawing"], node["step"])
    }
    assert {item["key"] for item in items.values()} == {"tenant 7"}
    [hidden] = {item["key"] for item in first["items"]}
    assert re.fullmatch("[0-9a-f]{8}", hidden)


async def test_an_item_is_in_the_step_of_a_body_and_in_its_attempt(raw: Raw) -> None:
    gate = Gate()

    @ps.node(retry=ps.Retry(3, backoff_seconds=0))
    async def often(number: int) -> int:
        if ps.current().attempt < 3:
            raise ConnectionError
        return await gate.wait(number)

    @ps.graph
    async def many(numbers: list[int]) -> list[int]:
        return await ps.map_each(often, numbers, concurrency=2)

    async with engine.deploy(many) as service:
        [call] = await begun(service([1, 2, 3]))
        look = raw.look()
        gate.open()
        assert await call == [1, 2, 3]
    [item], [node] = look["items"], look["nodes"]
    assert (item["graph"], item["node"], item["state"], item["attempt"]) == ("many", "often", "working", 3)
    assert (item["drawing"], item["step"]) == (node["drawing"], node["step"])
    assert (node["limit"], node["retried"]) == (2, 4)


async def test_a_loop_that_does_not_answer_is_said_so_with_the_stack_of_its_thread(raw: Raw) -> None:
    let_go = threading.Event()

    @ps.node
    async def hold(number: int) -> int:
        let_go.wait(60)
        return number

    looks: list[Any] = []

    def look_until_told() -> None:
        while not looks or not looks[-1]["stuck"]:
            looks[:] = [raw.look()]
        let_go.set()

    async with engine.deploy(ps.graph(hold)) as service:
        raw.look()
        looking = threading.Thread(target=look_until_told)
        looking.start()
        assert await service(1) == 1
        await asyncio.to_thread(looking.join)
        assert raw.look()["stuck"] == []
    [stuck] = looks[-1]["stuck"]
    assert stuck["thread"] == threading.current_thread().name
    assert stuck["seconds"] >= 1
    assert any(__file__ in line and "hold" in line for line in stuck["stack"])


# --- Limits ---


async def test_a_map_each_over_a_stream_has_its_places_and_a_stream_its_buffer(
    virtual: VirtualTime, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.insight.watching._LATE_SECONDS", 3600.0)  # on a busy machine, it is late
    gate = Gate()
    step = gate.node(name="step")

    @ps.graph
    async def mapped(count: int) -> AsyncIterator[int]:
        return ps.map_each(step, numbers(count), concurrency=2)

    async with engine.deploy(mapped) as service, service.stream(mapped(100)) as results:
        reading = asyncio.ensure_future(anext(results))
        await gate.has(2)
        raw.look()
        await testing.wait_quiescent()  # the loop has begun to measure
        virtual.hold(0.05)
        look = raw.look()
        gate.open()
        assert await reading == 0
    nodes = {node["node"]: node for node in look["nodes"]}
    assert (nodes["step"]["in_flight"], nodes["step"]["limit"]) == (2, 2)
    assert nodes["step"]["busy_share"] == pytest.approx(1.0, abs=0.1)
    assert (look["verdict"]["node"], look["verdict"]["limit"]) == ("step", "places")
    stream = nodes["numbers"]
    assert stream["buffer_capacity"] == 16
    assert stream["buffer_depth"] == stream["values"] - 2 > 0


async def test_a_limit_that_steps_share_is_shown_as_shared_and_each_step_has_its_own_items(raw: Raw) -> None:
    gate = Gate()
    both = gate.node(concurrency=3, name="both")

    @ps.graph
    async def twice(number: int) -> Any:
        return await both(await both(number))

    async with engine.deploy(twice) as service:
        calls = await begun(service(0), service(1))
        first, second = raw.look()["nodes"]
        gate.open()
        await asyncio.gather(*calls)
    shared = "concurrency=3, shared by both of twice, both#2 of twice"
    told = [(step["in_flight"], step["limit"], step["shared"]) for step in (first, second)]
    assert told == [(2, 3, shared), (0, 3, shared)]


# --- Failures ---


@ps.graph
@ps.node
async def refuse(number: int) -> int:
    raise RuntimeError(number)


@pytest.fixture
async def old_failures_are_gone() -> None:
    async with engine.deploy(refuse) as service:
        await asyncio.gather(*[service(number) for number in range(200)], return_exceptions=True)


@pytest.mark.usefixtures("old_failures_are_gone")
async def test_failures_are_kept_also_while_nobody_looks(path: Path) -> None:
    @ps.node
    async def strict(number: int) -> int:
        raise (ValueError if number else KeyError)(f"secret {number}")

    graph = ps.graph(strict)
    began = time.time()
    async with engine.deploy(graph) as service:
        for number in (0, 1, 2):
            with contextlib.suppress(ValueError, KeyError):
                await service(number)
    with telemetry.expose(path), Raw(path) as raw:
        hidden, told = raw.look()["failures"], raw.look(show_messages=True)["failures"]
    of_graph = [one for one in told if one["graph"] == "strict"]
    assert [(one["node"], one["type"], one["count"], one["message"]) for one in of_graph] == [
        ("strict", "ValueError", 2, "secret 2"),
        ("strict", "KeyError", 1, "secret 0"),
    ]
    assert all(began <= one["last"] <= time.time() for one in of_graph)
    assert "secret" not in str(hidden)


@pytest.mark.usefixtures("old_failures_are_gone")
async def test_a_failure_in_a_body_counts_once_and_200_are_kept(path: Path) -> None:
    @ps.node
    async def inner(number: int) -> int:
        raise LookupError(number)

    @ps.graph
    async def around(numbers: list[int]) -> list[int]:
        return await ps.map_each(inner, numbers)

    async with engine.deploy(around) as service:
        with pytest.raises(LookupError):
            await service([1])
        with telemetry.expose(path), Raw(path) as raw:
            [once] = [one for one in raw.look()["failures"] if one["node"] == "inner"]
            for _ in range(250):
                with contextlib.suppress(LookupError):
                    await service([1])
            failures = raw.look()["failures"]
    assert once["count"] == 1
    assert [(one["node"], one["count"]) for one in failures] == [("inner", 200)]


async def test_a_process_with_many_open_files_is_looked_at(path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 1200:
        pytest.skip("a process may open fewer than 1,200 files here")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), most))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        null = os.open(os.devnull, os.O_RDONLY)
        for one in (null, *[os.dup(null) for _ in range(1050)]):
            files.callback(os.close, one)
        with telemetry.expose(path), Raw(path) as raw:
            assert (await asyncio.to_thread(raw.look))["process"] == os.getpid()


def test_a_look_that_takes_long_is_answered_less_often(path: Path) -> None:
    def compute() -> list[tuple[str, str]]:
        until = time.thread_time() + 0.06
        while time.thread_time() < until:
            pass
        return []

    end = extension.tell_in_top(compute)
    with telemetry.expose(path):
        raw = Raw(path)
        _, second, third = (raw.look()["seconds"] for _ in range(3))
        raw.send(ASK)  # this answer would take a second more: the server ends without it
    with raw:
        assert raw.has_ended()
    end()
    assert second < 1 < third


@pytest.mark.filterwarnings("ignore:.*fork")  # Python and JAX warn: the process has other threads
async def test_a_child_that_is_forked_during_a_look_collects_garbage(path: Path) -> None:
    codes: list[int] = []

    def fork() -> list[tuple[str, str]]:
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return []

    end = extension.tell_in_top(fork)
    with telemetry.expose(path), Raw(path) as raw:
        await asyncio.to_thread(raw.look)
    end()
    assert (codes, gc.isenabled()) == ([0], True)
